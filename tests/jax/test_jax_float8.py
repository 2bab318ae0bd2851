"""FP8 output of JAX arrays: the bytes are those of the definition, whether a kernel or jax.numpy computes them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from arrays import inputs, same_bits
from functions import OPS
from test_float8 import GRANULARITIES, TYPES, check, float8

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import calls, from_jax, lowered, on_devices, random, to_jax  # noqa: E402

import cunorm  # noqa: E402
import cunorm.jax  # noqa: E402
from cunorm.jax.xla import target as choice  # noqa: E402
from cunorm.kernel import source  # noqa: E402
from cunorm.plan.plain_problems import float8_problem  # noqa: E402
from cunorm.plan.plan import plan  # noqa: E402

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def host(array: jax.Array) -> numpy.ndarray:
    """Return a NumPy array; bytes are uint8, as test_float8.py wants them."""
    on_host = numpy.asarray(array)
    return on_host.view("uint8") if on_host.dtype.itemsize == 1 else on_host


def same(a: Any, b: Any) -> bool:
    return all(same_bits(host(first), host(second)) for first, second in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 1000), (5, 20000)])
@pytest.mark.parametrize("op", OPS)
def test_bytes_and_scales(xp, op, rows, cols, granularity, dtype):
    """x is float32, so that y holds the exact values that were rounded to bytes."""
    x, _, weight, bias = map(to_jax, inputs(xp, rows, cols, "float32", weight="bfloat16"))
    y_bytes, scale, y = float8(op, x, weight, bias, granularity=granularity, dtype=dtype)
    assert (y_bytes.dtype, y_bytes.device, y.dtype) == (FORMATS[dtype], x.device, x.dtype)
    parameters = (weight, bias)[: 2 if op == "layer_norm" else 1]
    assert same([y], [getattr(cunorm, op)(x, None, *parameters)])
    check(host(y), host(y_bytes), host(scale), granularity, dtype)
    again = getattr(cunorm.jax, f"{op}_fp8")(x, None, *parameters, granularity=granularity, dtype=FORMATS[dtype])
    assert same(again, (y_bytes, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cols", [7, 1000, 8191, 16384, 50257])
def test_the_bits_are_those_of_the_core(cols, granularity):
    import cupy

    x, _, weight, bias = inputs(cupy, 9, cols, "bfloat16", weight="float32")
    core = float8("layer_norm", x, weight, bias, granularity=granularity)
    mine = float8("layer_norm", *map(to_jax, (x, weight, bias)), granularity=granularity)
    if granularity == "tensor":  # XLA computes the static bound, and contracts multiply-adds
        numpy.testing.assert_allclose(host(mine[1]), core[1].get(), rtol=2.0**-22)
        core = cunorm.layer_norm_fp8_forward(x, None, weight, bias, granularity="tensor", scale=from_jax(mine[1]))
    assert same(mine, [array.get() for array in core])


@pytest.mark.gpu
def test_through_the_callback(monkeypatch):
    """A launch by XLA's callback gives the same bits as one by its call of PTX."""
    x, weight = random(40, 1000, device="cuda", dtype="float16"), random(1000, device="cuda")
    by_ptx = float8("rms_norm", x, weight, eps=2e-5)
    monkeypatch.setenv("CUNORM_XLA_CALL", "callback")
    jax.clear_caches()
    by_callback = float8("rms_norm", x, weight, eps=2e-5)
    jax.clear_caches()
    assert same(by_ptx, by_callback)


@on_devices
@pytest.mark.parametrize("dtype", TYPES)
def test_to_the_nearest_and_of_two_to_the_even(device, dtype):
    """The weight is zeros and the bias has every number of the format, every tie and its neighbours."""
    numbers = numpy.arange(128, dtype=numpy.uint8).view(TYPES[dtype]).astype("float32")
    numbers = numbers[numpy.isfinite(numbers)]
    values = numpy.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, numpy.float32([6e4, 3e38])])
    values = numpy.concatenate([values, *(numpy.nextafter(values, numpy.float32(to)) for to in (-1, 1e38))])
    values = values[(values == 0) | (abs(values) > 2e-38)]  # XLA flushes smaller ones to zero
    values = numpy.concatenate([values, -values[values != 0]])
    x, bias = random(2, len(values), device=device), jax.device_put(values, jax.devices(device)[0])
    y_bytes, scale = cunorm.layer_norm_fp8(x, None, bias * 0, bias, granularity="tensor", scale=1.0, dtype=dtype)
    check(numpy.stack([values, values]), host(y_bytes), host(scale), "tensor", dtype)


@on_devices
@pytest.mark.parametrize("granularity", ["row", 128])
def test_rows_at_the_edges(device, granularity):
    """The rows hold zeros, tiny numbers, infinity and NaN."""
    x = numpy.ones((4, 1000), "float32")
    x[1], x[2, -1], x[3, 0] = 0, numpy.inf, numpy.nan
    x = jax.device_put(x, jax.devices(device)[0])
    y_bytes, scale = map(host, cunorm.rms_norm_fp8(x, granularity=granularity))
    scale = scale.reshape(4, -1)
    assert (scale[1] == 1).all()
    assert not (y_bytes[1] & 0x7F).any()
    assert numpy.isnan(scale[2]).any()
    assert numpy.isnan(scale[3]).all()
    assert numpy.isfinite(scale[0]).all()
    _, scale = cunorm.rms_norm_fp8(x[:1], None, jnp.full_like(x[0], 1e-30), granularity=granularity)
    assert (host(scale) == numpy.float32(2.0**-100)).all()


@on_devices
@pytest.mark.parametrize("as_array", [False, True])
def test_a_scale_that_is_given(device, as_array):
    """The scale is a number, or an array, which may change from call to call of a program."""
    x = random(9, 64, device=device)
    run = jax.jit(lambda x, scale: cunorm.layer_norm_fp8(x, granularity="tensor", scale=scale))
    for number in (0.02, 0.3):
        scale = jax.device_put(jnp.float32([number]), x.device)
        y_bytes, used = run(x, scale) if as_array else cunorm.layer_norm_fp8(x, granularity="tensor", scale=number)
        check(host(cunorm.layer_norm(x)), host(y_bytes), host(used), "tensor", "e4m3")
        assert float(used) == numpy.float32(number)


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_vmap(device, granularity):
    """A batch of x becomes more rows. With a batch of other operands, each sample is as it is alone."""
    x, weight, bias = (random(*shape, device=device) for shape in ((3, 5, 200), (3, 200), (200,)))

    def function(x, weight):
        return cunorm.layer_norm_fp8_forward(x, None, weight, bias, granularity=granularity)

    for axes, given in (((0, None), (x, weight[0])), ((0, 0), (x, weight)), ((None, 0), (x[0], weight))):
        results = jax.vmap(function, axes)(*given)
        for sample, (y_bytes, scale, y) in enumerate(zip(*map(host, results), strict=True)):
            own = [array if axis is None else array[sample] for array, axis in zip(given, axes, strict=True)]
            alone = function(*own)
            numpy.testing.assert_allclose(y, alone[2], rtol=2e-6, atol=2e-6)
            numpy.testing.assert_allclose(scale, alone[1], rtol=2e-6)
            check(y, y_bytes, scale, granularity, "e4m3")
    y_bytes, _, y = jax.vmap(function, (1, None))(x, weight[0])
    whole = function(x.swapaxes(0, 1), weight[0])
    numpy.testing.assert_allclose(y, whole[2], rtol=2e-6, atol=2e-6)
    assert (host(y_bytes) != host(whole[0])).mean() < 0.01


@on_devices
def test_no_derivative(device):
    x, weight = random(3, 32, device=device), random(32, device=device)

    def loss(x, weight):
        y_bytes, scale = cunorm.rms_norm_fp8(x, None, weight)
        return (y_bytes.astype("float32") * scale[:, None]).sum() + x.sum()

    for run in (jax.grad(loss), jax.grad(loss, 1), jax.jit(jax.grad(loss)), lambda *a: jax.jvp(loss, a, a)):
        with pytest.raises(ValueError, match=r"must not be differentiated.*stop_gradient"):
            run(x, weight)
    assert jax.grad(lambda x: loss(jax.lax.stop_gradient(x), weight) + x.sum())(x).shape == x.shape


@on_devices
def test_any_number_of_axes(device):
    x, weight, bias = random(6, 60, device=device), random(60, device=device), random(60, device=device, seed=1)
    flat = cunorm.jax.layer_norm_fp8(x, None, weight, bias)
    shaped = x.reshape(2, 3, 5, 12), None, weight.reshape(5, 12), bias.reshape(5, 12)
    y_bytes, scale = jax.jit(cunorm.jax.layer_norm_fp8)(*shaped)
    assert (y_bytes.shape, scale.shape) == ((2, 3, 5, 12), (2, 3))
    y = numpy.asarray(cunorm.layer_norm(*shaped))
    numpy.testing.assert_allclose(scale.reshape(6), flat[1], rtol=1e-6)
    numpy.testing.assert_allclose(y_bytes.astype("float32") * scale[..., None, None], y, rtol=0.07, atol=0.01)
    assert cunorm.jax.layer_norm_fp8(x[0], None, weight, bias)[1].shape == ()
    y_bytes, scale = cunorm.layer_norm_fp8(x[:0], None, weight, bias, granularity=128)
    assert (y_bytes.shape, scale.shape) == ((0, 60), (0, 1))
    assert isinstance(cunorm.jax.rms_norm_fp8(numpy.ones((2, 8), "float32"))[0], jax.Array)


WRONG = [
    ({"dtype": jnp.float16}, TypeError, "dtype must be 'e4m3' or 'e5m2'"),
    ({"granularity": 64}, ValueError, "granularity must be"),
    ({"scale": 1.0}, ValueError, "scale is for granularity='tensor'"),
    ({"granularity": "tensor", "scale": jnp.ones(2)}, TypeError, "one float32"),
    ({"eps": -1.0}, ValueError, "eps must be finite"),
    ({"weight": jnp.ones(7)}, ValueError, "must be the last axes of x"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_is_wrong_is_said(options, error, message):
    for run in (cunorm.layer_norm_fp8, jax.jit(lambda x: cunorm.layer_norm_fp8(x, **options))):
        with pytest.raises(error, match=message):
            run(jnp.ones((2, 8)), **({} if run is not cunorm.layer_norm_fp8 else options))


def test_of_float64_it_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match="got float64"):
        cunorm.layer_norm_fp8(jnp.ones((2, 32)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_wide_numbers_of_others_change_nothing(granularity):
    x = random(3, 200, dtype="bfloat16")
    expected = float8("layer_norm", x, granularity=granularity)
    with jax.enable_x64(True):
        assert same(float8("layer_norm", x, granularity=granularity), expected)


COLUMNS = (33, 1024, 16384, 524296)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cols", COLUMNS)
def test_a_program_for_cuda_has_the_launch_of_the_plan(cols, granularity):
    """The program computes nothing else: no formula is left beside the launches."""
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    x, parameter = jax.ShapeDtypeStruct((300, cols), "bfloat16"), jax.ShapeDtypeStruct((cols,), "float32")

    def function(x, weight, bias):
        options = {"granularity": granularity, "scale": 0.1 if granularity == "tensor" else None}
        return cunorm.layer_norm_fp8_forward(x, None, weight, bias, **options)

    text = lowered(function, x, parameter, parameter)
    dtypes = ("bfloat16", "float32", "float32")
    problem = float8_problem(
        "layer_norm", 300, cols, *dtypes, y8="float8_e4m3fn", granularity=granularity, y="bfloat16"
    )
    steps = plan(problem, choice.for_xla(choice.device("test"))).steps
    expected = [(source.entry_name(s.spec), s.grid, s.spec.threads, s.dynamic_shared) for s in steps]
    assert [launch[:4] for launch in calls(text)] == expected
    assert "stablehlo.rsqrt" not in text
    batched = lowered(jax.vmap(function, (0, None, None)), x.update(shape=(3, 100, cols)), parameter, parameter)
    assert [launch[:4] for launch in calls(batched)] == expected


@on_devices
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_of_a_sum(device, granularity):
    """The bytes and scales are those of the norm of s, alone and under vmap."""
    x, residual, weight = (random(*shape, device=device) for shape in ((6, 300), (6, 300), (300,)))

    def function(x, residual, weight):
        return cunorm.jax.add_rms_norm.fp8_forward(x, residual, weight, granularity=granularity)

    y_bytes, scale, y, s = function(x, residual, weight)
    assert same([s, y], cunorm.jax.add_rms_norm(x, residual, weight)[::-1])
    check(host(y), host(y_bytes), host(scale), granularity, "e4m3")
    batched = jax.vmap(function, (0, 0, None))(x.reshape(2, 3, 300), residual.reshape(2, 3, 300), weight)
    assert same((batched[0].reshape(6, 300), batched[3].reshape(6, 300)), (y_bytes, s))
    weights = jnp.stack([weight, weight])
    for sample in jax.vmap(function, (None, None, 0))(x, residual, weights)[0]:
        assert (host(sample) != host(y_bytes)).mean() < 1e-2
    with pytest.raises(ValueError, match="must not be differentiated"):
        jax.grad(lambda x: function(x, residual, weight)[1].sum())(x)


@on_devices
def test_of_an_object(device):
    x, scale = random(2, 5, 300, device=device), random(2, 1, 300, device=device)
    epilogue = {"epilogue": lambda xhat, scale, shift: xhat * (1 + scale) + shift}
    y_bytes, scales, y = cunorm.fuse("layer_norm", **epilogue).fp8_forward(x, scale=scale, shift=0.5)
    assert scales.shape == (2, 5)
    check(host(y).reshape(10, 300), host(y_bytes).reshape(10, 300), host(scales), "row", "e4m3")
