"""cunorm.jax.layer_norm_linear, and cunorm.layer_norm_linear on JAX arrays: values, gradients, programs for CUDA,
transformations, residuals, bad input.
"""

from __future__ import annotations

import re

import linear_reference
import numpy
import pytest
from functions import OPS
from linear_reference import NORMALIZATION, check_backward, check_forward

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from jax_arrays import calls, close, from_jax, lowered, on_devices, random, to_jax  # noqa: E402

import cunorm  # noqa: E402
from cunorm.jax import layer_norm_linear  # noqa: E402

DTYPES = ("float16", "bfloat16", "float32", "float64")
ARRAYS = ("x", "weight", "bias", "ln_weight", "ln_bias")
COLS, OUTS = 48, 20


@pytest.fixture(autouse=True)
def full_precision():
    """Ask for products in full float32: JAX's default on a GPU is TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def compiled(f):
    """Jit the function, on the CPU without LLVM's optimizations, which take a third of the time of these tests."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(f, compiler_options=options)


def options(call, **others):
    return {
        "eps": call.eps,
        "normalization": NORMALIZATION[call.op],
        "zero_centered_gamma": call.zero_centered_gamma,
        **others,
    }


def y_and_gradients(call, **others):
    """Return (y, gradients of x, weight, bias, ln_weight and ln_bias). dweight is (out, in), as in the reference."""

    @compiled
    def run(arrays, dy):
        def function(arrays):
            kernel, *parameters = (arrays.get(name) for name in ARRAYS[1:])
            return layer_norm_linear(arrays["x"], kernel.T, *parameters, **options(call, **others))

        y, pull = jax.vjp(function, arrays)
        return y, pull(dy)[0]

    with jax.enable_x64(call.x.dtype == "float64"):
        given = {name: to_jax(a) for name in ARRAYS if (a := getattr(call, name)) is not None}
        y, gradients = run(given, to_jax(call.dy))
        return from_jax(y), tuple(from_jax(gradients.get(name)) for name in ARRAYS)


def inputs(xp, *arguments, **keywords):
    call = linear_reference.inputs(*arguments, **keywords)
    return call._replace(
        **{name: a if a is None else xp.asarray(a) for name in (*ARRAYS, "dy") for a in [call._asdict()[name]]}
    )


def check(call, **others):
    y, gradients = y_and_gradients(call, **others)
    check_forward(call, y)
    check_backward(call, gradients)


# Values and gradients.

SHAPES = [
    (130, 96, 40),
    *(
        pytest.param(shape, marks=pytest.mark.gpu)
        for shape in ((1, 128, 8), (8, 128, 1), (33, 7, 5), (64, 768, 256), (300, 4096, 64))
    ),
]


@pytest.mark.parametrize(("offset", "keep_normalized"), [(1.0, True), (1e2, False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(xp, shape, op, dtype, offset, keep_normalized):
    check(inputs(xp, op, *shape, dtype, offset=offset), keep_normalized=keep_normalized)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("ln_dtype", ["float32", "bfloat16"])
def test_options(xp, op, zero_centered_gamma, ln_dtype):
    check(inputs(xp, op, 16, 64, 32, "bfloat16", ln_dtype=ln_dtype, zero_centered_gamma=zero_centered_gamma))


@pytest.mark.parametrize("op", OPS)
def test_nothing_but_x_and_kernel(xp, op):
    check(inputs(xp, op, 9, 32, 16, "float32")._replace(bias=None, ln_weight=None, ln_bias=None))


@on_devices
def test_leading_axes(device):
    x, *parameters = arguments(device, 3, 4)
    flat = layer_norm_linear(x.reshape(12, COLS), *parameters)
    close(layer_norm_linear(x, *parameters), flat.reshape(3, 4, OUTS), 0, 1e-6)
    close(layer_norm_linear(x[1, 2], *parameters), flat[6], 1e-5, 1e-5)
    y, pull = jax.vjp(layer_norm_linear, x[:0], *parameters)
    assert y.shape == (0, 4, OUTS)
    dx, *gradients = pull(y)
    assert dx.shape == (0, 4, COLS)
    assert not any(gradient.any() for gradient in gradients)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_functions_of_cunorm(device, op):
    """The functions take a weight of shape (out, in), for JAX arrays too."""
    call = linear_reference.inputs(op, 12, COLS, OUTS, "float32")
    x, weight, bias, ln_weight, ln_bias, dy = (
        a if a is None else jax.device_put(a, jax.devices(device)[0]) for a in (*call[1:6], call.dy)
    )
    y, mean, rstd = cunorm.layer_norm_linear_forward(x, weight, bias, ln_weight, ln_bias, **options(call))
    check_forward(call, numpy.asarray(y))
    close(cunorm.layer_norm_linear(x, weight, bias, ln_weight, ln_bias, **options(call)), y, 1e-6, 1e-6)
    assert (mean is None) == (op == "rms_norm")

    def backward(**others):
        arrays = (dy, x, mean, rstd, weight, ln_weight, ln_bias)
        gradients = cunorm.layer_norm_linear_backward(*arrays, **options(call), **others)
        return tuple(gradient if gradient is None else numpy.asarray(gradient) for gradient in gradients)

    everything = backward()
    check_backward(call, everything)
    assert [g is not None for g in everything] == [True] * 4 + [op == "layer_norm"]
    for wanted in range(5):
        gradients = backward(output_mask=tuple(i == wanted for i in range(5)))
        assert [g is not None for g in gradients] == [i == wanted and everything[i] is not None for i in range(5)]
        check_backward(call, gradients)
    assert backward(output_mask=(False,) * 5) == (None,) * 5
    loss = lambda *a: jnp.sin(cunorm.layer_norm_linear_forward(*a, **options(call))[2]).sum()  # noqa: E731
    of_rstd = jax.grad(loss)(x, weight)
    assert jnp.isfinite(of_rstd).all()
    assert of_rstd.any()


# What a program for CUDA holds.


def names(function, *arrays):
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    return [call.name.removeprefix("cunorm_") for call in calls(lowered(function, *arrays))]


def summed(**others):
    return lambda *a: layer_norm_linear(*a, **others).astype("float32").sum()


# (arguments that have gradients, kernels if backward computes z again, kernels if z is kept)
BACKWARD = "backward_few"
LAUNCHES = {
    "all": ((0, 1, 2, 3, 4), ["forward", "forward", BACKWARD], ["forward", BACKWARD]),
    "x": ((0,), ["forward", "backward"], ["forward", "backward"]),
    "kernel": ((1,), ["forward", "forward"], ["forward"]),
    "bias": ((2,), ["forward"], ["forward"]),
    "all-but-kernel": ((0, 2, 3, 4), ["forward", BACKWARD], ["forward", BACKWARD]),
}


def test_forward_is_one_launch():
    x, *parameters = arguments("cpu", 300)
    for keep in (False, True):
        assert names(lambda *a, keep=keep: layer_norm_linear(*a, keep_normalized=keep), x, *parameters) == ["forward"]


@pytest.mark.parametrize(("argnums", "recomputed", "kept"), LAUNCHES.values(), ids=LAUNCHES)
def test_launches_of_the_gradients(argnums, recomputed, kept):
    """The norm's forward kernel runs once more only for the gradient of kernel, and not if z is kept."""
    arrays = arguments("cpu", 300)
    assert names(jax.value_and_grad(summed(), argnums), *arrays) == recomputed
    assert names(jax.value_and_grad(summed(keep_normalized=True), argnums), *arrays) == kept


def test_launches_under_transformations():
    x, *parameters = arguments("cpu", 30, 10)
    unmapped = (None,) * len(parameters)
    both = ["forward", "forward", BACKWARD]
    gradient = lambda f: jax.grad(lambda *a: f(*a).sum(), range(5))  # noqa: E731
    assert names(gradient(jax.vmap(layer_norm_linear, (0, *unmapped))), x, *parameters) == both

    def scanned(x, *parameters):
        step = lambda carry, _: (x + layer_norm_linear(carry, *parameters).mean(-1, keepdims=True), None)  # noqa: E731
        return jax.lax.scan(step, x, length=5)[0]

    assert names(gradient(scanned), x, *parameters) == both


def products(function, *arrays):
    """Return (precision, type of the first operand, of the second, of the result) of each product in a program."""
    tensor = r"tensor<[\dx]*x(\w+)>"
    pattern = rf"dot_general.*precision = \[(\w+), \w+\] : \({tensor}, {tensor}\) -> {tensor}"
    text = jax.jit(function).lower(*arrays).as_text()
    found_products = re.findall(pattern, text)
    assert len(found_products) == text.count("stablehlo.dot_general")
    return found_products


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_products_of_16_bits(dtype):
    """Products of matrices are in 16 bits throughout, so that no float32 is written.

    Products with a vector are in float32, because XLA would round each of their terms to the dtype of the result.
    """

    def dtypes_of_products(rows, outs):
        arrays = [a.astype({"bf16": "bfloat16", "f16": "float16"}[dtype]) for a in arguments("cpu", rows, outs=outs)]
        return [operands for _, *operands in products(jax.value_and_grad(summed(), range(5)), *arrays)]

    assert dtypes_of_products(30, OUTS) == [[dtype] * 3] * 3
    for rows, outs in ((1, OUTS), (30, 1)):
        assert dtypes_of_products(rows, outs) == [[dtype, dtype, "f32"], *[["f32"] * 3] * 2]


@pytest.mark.parametrize("argument", ["highest", jax.lax.Precision.HIGH, None])
def test_precision(argument):
    """Each product has the precision that was asked for, or else the one that JAX is set to."""
    arrays = arguments("cpu", 30)
    with jax.default_matmul_precision("default"):
        of_program = products(jax.value_and_grad(summed(precision=argument), range(5)), *arrays)
        assert {kind for kind, *_ in of_program} == {{"highest": "HIGHEST", None: "DEFAULT"}.get(argument, "HIGH")}
    with jax.default_matmul_precision("highest"):
        of_program = products(jax.value_and_grad(summed(), range(5)), *arrays)
        assert {kind for kind, *_ in of_program} == {"HIGHEST"}
    assert len(of_program) == 3


# What is kept for the backward pass.


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_normalised_tensor_is_kept_if_asked_for_and_else_not(device, op, jitted):
    x, kernel, bias, *ln = arguments(device, 6, 5, op=op)
    norm = cunorm.jax.layer_norm if op == "layer_norm" else cunorm.jax.rms_norm
    z = norm(x, None, *ln, eps=1e-5)

    def kept(keep_normalized):
        f = lambda *a: layer_norm_linear(*a, normalization=NORMALIZATION[op], keep_normalized=keep_normalized)  # noqa: E731
        leaves = jax.tree.leaves(jax.vjp(jax.jit(f) if jitted else f, x, kernel, bias, *ln)[1])
        large = [a for a in leaves if getattr(a, "size", 0) >= x.size and a.shape != kernel.shape]
        return ["x" if numpy.array_equal(a, x) else "z" if numpy.allclose(a, z, 1e-5, 1e-5) else "?" for a in large]

    assert kept(False) == ["x"]
    assert sorted(kept(True)) == ["x", "z"]


# Transformations.


def plain(x, kernel, bias=None, ln_weight=None, ln_bias=None, *, op="layer_norm"):
    """Compute the definition in jax.numpy."""
    centred = x - x.mean(-1, keepdims=True) if op == "layer_norm" else x
    z = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 0.3)
    z = z if ln_weight is None else z * ln_weight
    z = z if ln_bias is None else z + ln_bias
    return z @ kernel if bias is None else z @ kernel + bias


def arguments(device, *leading, op="layer_norm", cols=COLS, outs=OUTS):
    """Return x, kernel, bias, ln_weight and, for a LayerNorm, ln_bias."""
    shapes = ((*leading, cols), (cols, outs), (outs,), (cols,), (cols,))
    arrays = [random(*shape, device=device, seed=i) for i, shape in enumerate(shapes)]
    arrays[1] = arrays[1] * cols**-0.5
    return arrays[: 5 if op == "layer_norm" else 4]


def both(op, keep_normalized=False):
    """Return cunorm's function and the definition."""
    chosen = {"eps": 0.3, "normalization": NORMALIZATION[op], "keep_normalized": keep_normalized}
    return [lambda *a, **others: layer_norm_linear(*a, **chosen, **others), lambda *a: plain(*a, op=op)]


def gradient(function):
    return lambda *a: jax.grad(lambda *b: jnp.sin(function(*b)).sum(), tuple(range(len(a))))(*a)


def alike(functions, make, *arrays):
    mine, expected = (compiled(make(function))(*arrays) for function in functions)
    close(mine, expected, rtol=5e-4, atol=1e-4)


def scanned(function):
    def run(x, *parameters):
        def step(carry, _):
            y = function(carry, *parameters)
            return carry * 0.5 + y.mean(-1, keepdims=True) + x, y.sum()

        y, sums = jax.lax.scan(step, x, None, length=4)
        return y + sums.sum()

    return run


def on_one_device(function, device):
    mesh = jax.sharding.Mesh(jax.devices(device)[:1], ("data",))
    data, whole = PartitionSpec("data"), PartitionSpec()
    return lambda x, *rest: jax.shard_map(function, mesh=mesh, in_specs=(data, *[whole] * len(rest)), out_specs=data)(
        x, *rest
    )


TRANSFORMATIONS = {
    "grad": lambda f, _: gradient(f),
    "forward mode": lambda f, _: lambda *a: jax.jvp(f, a, tuple(jnp.cos(b) for b in a)),
    "forward mode in kernel": lambda f, _: lambda x, k, *rest: jax.jvp(lambda k: f(x, k, *rest), (k,), (k * k,)),
    "forward over reverse": lambda f, _: lambda *a: jax.jvp(gradient(f), a, tuple(jnp.cos(b) for b in a)),
    "reverse over reverse": lambda f, _: gradient(lambda *a: gradient(f)(*a)[0]),
    "grad of scan": lambda f, _: gradient(scanned(f)),
    "grad of checkpoint": lambda f, _: gradient(jax.checkpoint(f)),
    "grad of checkpoint of products": lambda f, _: gradient(
        jax.checkpoint(lambda *a: jnp.cos(f(*a)), policy=jax.checkpoint_policies.dots_saveable)
    ),
    "grad of shard_map": lambda f, device: gradient(on_one_device(f, device)),
    "cond": lambda f, _: gradient(lambda *a: jax.lax.cond(a[0].sum() > 0, f, lambda x, *b: f(-x, *b), *a)),
}


CHOSEN = [
    *(("layer_norm", make, False) for make in TRANSFORMATIONS),
    *(("layer_norm", make, True) for make in ("grad", "forward over reverse", "grad of checkpoint")),
    *(("rms_norm", make, False) for make in ("grad", "forward mode")),
]


@on_devices
@pytest.mark.parametrize(("op", "make", "keep_normalized"), CHOSEN)
def test_transformations(device, op, make, keep_normalized):
    function = TRANSFORMATIONS[make]
    alike(both(op, keep_normalized), lambda f: function(f, device), *arguments(device, 3, 5, op=op))


@on_devices
@pytest.mark.parametrize("mapped", ["x", "kernel", "ln_weight", "x kernel bias ln_bias"])
def test_vmap(device, mapped):
    """vmap of the gradient, and the gradient of vmap, are right."""
    order = ("x", "kernel", "bias", "ln_weight", "ln_bias")
    axes = tuple(0 if name in mapped.split() else None for name in order)
    arrays = [
        a if axis is None else jnp.stack([a, a + 1, 2 * a]) for a, axis in zip(arguments(device, 4), axes, strict=True)
    ]
    alike(both("layer_norm"), lambda f: jax.vmap(gradient(f), axes), *arrays)
    alike(both("layer_norm"), lambda f: gradient(jax.vmap(f, axes)), *arrays)


# Bad input: (name of the case, arguments in place of the good ones, error, what the message says).

CALLS = [
    ("x is a list", {"x": [[1.0]]}, TypeError, "x must be a JAX or NumPy array; got list"),
    ("kernel is missing", {"kernel": None}, TypeError, "kernel must be a JAX or NumPy array; got NoneType"),
    ("kernel is a row", {"kernel": jnp.ones(8)}, ValueError, r"kernel must have shape \(in, out\), .*; got \(8,\)"),
    ("no columns", {"kernel": jnp.ones((8, 0))}, ValueError, r"neither of them 0; got \(8, 0\)"),
    ("no rows of kernel", {"kernel": jnp.ones((0, 6))}, ValueError, r"neither of them 0; got \(0, 6\)"),
    ("torch's layout", {"kernel": jnp.ones((6, 8))}, ValueError, r"the length 6 of a column of kernel; got x of shape"),
    ("x without axes", {"x": jnp.float32(1)}, ValueError, r"got x of shape \(\)"),
    ("short bias", {"bias": jnp.ones(5)}, ValueError, r"bias must have shape \(6,\); got \(5,\)"),
    ("short ln_weight", {"ln_weight": jnp.ones(7)}, ValueError, r"ln_weight must have shape \(8,\); got \(7,\)"),
    ("short ln_bias", {"ln_bias": jnp.ones((8, 1))}, ValueError, r"ln_bias must have shape \(8,\); got \(8, 1\)"),
    ("integers", {"x": jnp.ones((4, 8), int)}, TypeError, "x must have dtype float16, .*; got int32"),
    (
        "complex ln_weight",
        {"ln_weight": jnp.ones(8, complex)},
        TypeError,
        "ln_weight must have dtype float16, .*; got complex64",
    ),
    (
        "kernel of another dtype",
        {"kernel": jnp.ones((8, 6), "bfloat16")},
        TypeError,
        "x and kernel must have one dtype; got x of float32 and kernel of bfloat16",
    ),
    ("bias of another dtype", {"bias": jnp.ones(6, "float16")}, TypeError, "x of float32 and bias of float16"),
    ("eps of text", {"eps": "1e-5"}, TypeError, "eps must be a real number; got str"),
    ("negative eps", {"eps": -1.0}, ValueError, "eps must be finite and not negative"),
    (
        "unknown normalization",
        {"normalization": "BatchNorm"},
        ValueError,
        "normalization must be 'LayerNorm' or 'RMSNorm'; got 'BatchNorm'",
    ),
    ("an RMSNorm with ln_bias", {"normalization": "RMSNorm"}, ValueError, "ln_bias must be None for an RMSNorm"),
    (
        "nothing to centre",
        {"ln_weight": None, "zero_centered_gamma": True},
        ValueError,
        "zero_centered_gamma=True needs ln_weight",
    ),
]


@pytest.mark.parametrize(("what", "change", "error", "phrase"), CALLS, ids=[case[0] for case in CALLS])
def test_bad_input(what, change, error, phrase):
    shapes = {"x": (4, 8), "kernel": (8, 6), "bias": (6,), "ln_weight": (8,), "ln_bias": (8,)}
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()} | change
    traced = {name: a for name, a in arrays.items() if isinstance(a, jax.Array)}
    rest = {name: a for name, a in arrays.items() if name not in traced}
    jitted = jax.jit(lambda a: layer_norm_linear(**a, **rest))
    for run in (lambda: layer_norm_linear(**arrays), lambda: jitted(traced)):
        with pytest.raises(error, match=phrase) as caught:
            run()
        assert str(caught.value).startswith("layer_norm_linear: ")


def test_bad_input_to_the_functions_of_cunorm():
    x, weight, dy = jnp.ones((4, 8)), jnp.ones((6, 8)), jnp.ones((4, 6))
    _, mean, rstd = cunorm.layer_norm_linear_forward(x, weight)
    backward = lambda **a: cunorm.layer_norm_linear_backward(  # noqa: E731
        **({"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "eps": 1e-5} | a)
    )
    cases = [
        (lambda: cunorm.layer_norm_linear(x, weight.T), ValueError, "the length 6 of a row of weight"),
        (
            lambda: cunorm.layer_norm_linear(x, weight.astype("float16")),
            TypeError,
            "x of float32 and weight of float16",
        ),
        (lambda: cunorm.layer_norm_linear(x, [1.0]), TypeError, "weight must be a JAX or NumPy array; got list"),
        (lambda: backward(mean=None), TypeError, "mean must be a JAX or NumPy array; got NoneType"),
        (lambda: backward(dy=dy[:, 1:]), ValueError, r"dy must have the shape of y, \(4, 6\)"),
        (lambda: backward(rstd=rstd[1:]), ValueError, "Pass what layer_norm_linear_forward returned"),
        (lambda: backward(output_mask=(True,)), ValueError, "output_mask must have 5 entries"),
    ]
    for call, error, phrase in cases:
        with pytest.raises(error, match=phrase):
            call()


def test_an_unknown_precision_is_jaxs_to_refuse_before_anything_runs():
    x, kernel, *_ = arguments("cpu", 3)
    with pytest.raises(ValueError, match="bogus"):
        layer_norm_linear(x, kernel, precision="bogus")
