"""cunorm.jax.layer_norm_linear with fp8: which bytes are multiplied, gradients, transformations, bad input."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from linear_reference import NORMALIZATION

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import lowered, on_devices, random  # noqa: E402

import cunorm  # noqa: E402
from cunorm.jax import layer_norm_linear  # noqa: E402

ROWS, COLS, OUTS = 24, 96, 48
LARGEST = 448  # of e4m3
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}
SUM = 2.0**-20  # allowed error of a sum of products, as a part of the product of the two vectors' lengths


def arguments(device: str, dtype: str = "bfloat16", op: str = "layer_norm") -> dict[str, jax.Array]:
    """Return x, kernel, bias, ln_weight and, for a LayerNorm, ln_bias."""
    shapes = {"x": (ROWS, COLS), "kernel": (COLS, OUTS), "bias": (OUTS,), "ln_weight": (COLS,), "ln_bias": (COLS,)}
    if op == "rms_norm":
        del shapes["ln_bias"]
    return {
        name: random(*shape, device=device, dtype=dtype, seed=seed) for seed, (name, shape) in enumerate(shapes.items())
    }


def power_of_two(scale: float) -> float:
    return 2.0 ** numpy.ceil(numpy.log2(scale))


@on_devices
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("op", NORMALIZATION)
def test_the_bytes_that_are_multiplied(device, op, dtype, zero_centered_gamma):
    """The bytes of z are those of `layer_norm_fp8`; the scale of kernel fits its largest number. Both scales are powers
    of two.
    """
    given = arguments(device, dtype, op)
    y = layer_norm_linear(
        **given, normalization=NORMALIZATION[op], zero_centered_gamma=zero_centered_gamma, fp8="tensor"
    )
    norm, options = getattr(cunorm, f"{op}_fp8"), {"eps": 1e-5, "zero_centered_gamma": zero_centered_gamma}
    x, kernel, bias, *parameters = given.values()
    _, scale = norm(x, None, *parameters, **options, granularity="tensor")
    scale = power_of_two(numpy.asarray(scale))
    bytes, _ = norm(x, None, *parameters, **options, granularity="tensor", scale=float(scale))
    z = numpy.asarray(bytes).astype("float64") * scale
    kernel, bias = numpy.asarray(kernel), numpy.asarray(bias)
    wide = kernel.astype("float64")
    of_kernel = power_of_two(abs(wide).max() / LARGEST)
    expected = z @ ((wide / of_kernel).astype(ml_dtypes.float8_e4m3fn).astype("float64") * of_kernel)
    exact = expected + bias.astype("float64")
    room = EPSILON[dtype] * (abs(expected) + abs(exact))  # y is rounded before bias is added, and after
    room += SUM * numpy.linalg.norm(z, axis=1, keepdims=True) * numpy.linalg.norm(wide, axis=0)
    assert (y.dtype, y.shape) == (x.dtype, (ROWS, OUTS))
    assert (abs(numpy.asarray(y).astype("float64") - exact) <= room).all()


@pytest.mark.parametrize("keep_normalized", [False, True])
def test_gradients_are_those_of_the_product_in_16_bits(keep_normalized):
    """FP8 changes no bit of a gradient."""
    given, dy = arguments("cpu"), random(ROWS, OUTS, dtype="bfloat16", seed=9)

    def gradients(**options):
        call = lambda given: layer_norm_linear(**given, keep_normalized=keep_normalized, **options)  # noqa: E731
        return jax.jit(lambda given: jax.vjp(call, given)[1](dy)[0])(given)

    with_fp8, without = gradients(fp8="tensor"), gradients()
    assert with_fp8.keys() == given.keys()
    assert all(bool((with_fp8[name] == without[name]).all()) for name in given)


@pytest.mark.slow
@on_devices
def test_transformations(device):
    """vmap over x and kernel and jvp are right, and second derivatives run."""
    given = arguments(device, "float32")
    call = lambda x, kernel: layer_norm_linear(x, kernel, given["bias"], fp8="tensor")  # noqa: E731
    x, kernel = jnp.stack([given["x"], given["x"] * 3 + 1]), jnp.stack([given["kernel"], given["kernel"] * 5])
    expected = jnp.stack([call(*pair) for pair in zip(x, kernel, strict=True)])
    assert jnp.allclose(jax.vmap(call)(x, kernel), expected, rtol=1e-5, atol=1e-5)
    _, tangent = jax.jvp(lambda x: call(x, kernel[0]), (x[0],), (x[1],))
    _, exact = jax.jvp(lambda x: layer_norm_linear(x, kernel[0], given["bias"]), (x[0],), (x[1],))
    assert jnp.allclose(tangent, exact, rtol=1e-3, atol=1e-3)
    assert jax.hessian(lambda x: call(x, kernel[0]).sum())(x[0][:1]).shape == (1, COLS, 1, COLS)


@on_devices
def test_numbers_that_are_not_finite_and_zeros(device):
    given = arguments(device)
    bad = given | {"x": given["x"].at[1, 2].set(jnp.inf)}
    y = layer_norm_linear(**bad, fp8="tensor")
    assert (bool(jnp.isnan(y[1]).all()), bool(jnp.isfinite(jnp.delete(y, 1, 0)).all())) == (True, True)
    for number in (jnp.nan, jnp.inf):
        bad = given | {"kernel": given["kernel"].at[1, 2].set(number)}
        assert bool(jnp.isnan(layer_norm_linear(**bad, fp8="tensor")).all())
    y = layer_norm_linear(**given | {"kernel": given["kernel"] * 0}, fp8="tensor")
    assert bool((y == given["bias"]).all())


def test_the_largest_number_of_kernel_is_reduced():
    """On a GPU one thread would compute a reduce_window over all of kernel, which is slow."""
    program = lowered(lambda given: layer_norm_linear(**given, fp8="tensor"), arguments("cpu"))
    assert "reduce_window" not in program


@pytest.mark.gpu
def test_xla_takes_its_product_in_8_bits():
    """XLA has an FP8 product from compute capability 8.9 on, and takes it unless it may make a Triton kernel."""
    if float(jax.devices()[0].compute_capability) < 8.9:
        pytest.skip("needs compute capability 8.9")
    x, kernel = (random(512, 512, device="cuda", dtype="bfloat16", seed=seed) for seed in range(2))
    program = jax.jit(lambda x, kernel: layer_norm_linear(x, kernel, fp8="tensor")).lower(x, kernel)
    assert "matmul$f8" in program.compile({"xla_gpu_enable_triton_gemm": False}).as_text()


CALLS = {
    "by rows": ({}, {"fp8": "row"}, ValueError, "fp8 must be None or 'tensor', .*; got 'row'"),
    "in": ({"x": (4, 40), "kernel": (40, 48)}, {}, ValueError, r"both sizes of kernel must be multiples of 16"),
    "out": (
        {"x": (4, 48), "kernel": (48, 40)},
        {},
        ValueError,
        r"both sizes of kernel must be .* got shape \(48, 40\)",
    ),
}


@pytest.mark.parametrize(("shapes", "options", "error", "phrase"), CALLS.values(), ids=CALLS)
def test_bad_input(shapes, options, error, phrase):
    arrays = {name: jnp.ones(shape) for name, shape in ({"x": (4, 48), "kernel": (48, 48)} | shapes).items()}
    with pytest.raises(error, match=phrase):
        layer_norm_linear(**arrays, **{"fp8": "tensor"} | options)


def test_float64_is_refused():
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match="x must have dtype float16, bfloat16 or float32 with fp8"),
    ):
        layer_norm_linear(jnp.ones((4, 48), "float64"), jnp.ones((48, 48), "float64"), fp8="tensor")
