"""cunorm.jax.layer_norm and rms_norm, and cunorm's own functions on JAX arrays: values, gradients, dtypes, shapes."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import inputs, same_bits
from cases import DTYPES, OFFSETS, TIER_COLUMNS, adapter_cases
from functions import OPS, backward, bias_of, forward
from reference import EPS, check_backward, check_forward

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import close, from_jax, on_devices, random, to_jax  # noqa: E402

import cunorm  # noqa: E402
from cunorm.call.checks import NormOptions  # noqa: E402
from cunorm.jax import layer_norm, rms_norm  # noqa: E402
from cunorm.jax.norm.functional import norm  # noqa: E402

COLS = 96

# On the CPU the formulas are the same for all shapes, so a few shapes are enough.
CPU_SHAPES = ((70, 33), (0, 128), (3, 2), (8, 8191), (1, 600001))
CPU_CASES = [
    pytest.param("host", rows, cols, dtype, id=f"cpu-{rows}x{cols}-{dtype}")
    for (rows, cols), dtype in [
        *itertools.product(CPU_SHAPES[:1], DTYPES),
        *itertools.product(CPU_SHAPES[1:], ("bfloat16", "float32")),
    ]
]


@pytest.fixture(autouse=True)
def x64(request):
    """Enable 64-bit numbers only for tests of float64; the others run as most programs do."""
    arguments = getattr(request.node, "callspec", None)
    wanted = arguments is not None and "float64" in map(str, arguments.params.values())
    with jax.enable_x64(wanted):
        yield


def call(op, x, weight=None, bias=None, eps=None, zero_centered_gamma=False, dtype=None, sm_margin=0):
    eps = EPS[op] if eps is None else eps
    shape = x.shape[-1:] if weight is None else weight.shape
    options = NormOptions(op, shape, zero_centered_gamma, dtype, sm_margin, False)
    return norm(options, (x, weight, bias_of(op, bias)), eps)


def plain(op, x, weight=None, bias=None, eps=None):
    """Compute the definition in jax.numpy."""
    mean = x.mean(-1, keepdims=True) if op == "layer_norm" else 0
    y = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + (EPS[op] if eps is None else eps))
    y = y if weight is None else y * weight
    return y + bias if bias is not None and op == "layer_norm" else y


def y_and_gradients(op, x, dy, weight, bias, **options):
    """Return (y, y of a call without gradient, (dx, dweight, dbias)); for rms_norm dbias is None."""

    @jax.jit
    def run(x, dy, *parameters):
        def function(x, *parameters):
            return call(op, x, *parameters, **options)

        y, pull = jax.vjp(function, x, *parameters)
        return y, function(x, *parameters), pull(dy)

    y, without, gradients = run(*map(to_jax, (x, dy, weight, bias)[: 4 if op == "layer_norm" else 3]))
    gradients = [from_jax(gradient) for gradient in gradients]
    return from_jax(y), from_jax(without), (*gradients, *[None] * (3 - len(gradients)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("xp", "rows", "cols", "dtype"), [*CPU_CASES, *adapter_cases()], indirect=["xp"])
def test_every_shape(xp, op, rows, cols, dtype):
    """Both passes are right in every shape, and a call without gradient gives the same bits."""
    x, dy, weight, bias = inputs(xp, rows, cols, dtype)
    y, without, gradients = y_and_gradients(op, x, dy, weight, bias)
    assert same_bits(y, without)
    check_forward(op, (y, None, None), x, weight, bias_of(op, bias))
    check_backward(op, gradients, dy, x, weight)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    ("xp", "cols"),
    [("host", 1000), *(pytest.param("gpu", cols, marks=pytest.mark.gpu) for cols in TIER_COLUMNS)],
    indirect=["xp"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_from_zero(xp, op, offset, cols, dtype):
    x, dy, weight, bias = inputs(xp, 5, cols, dtype, offset=offset)
    y, _, gradients = y_and_gradients(op, x, dy, weight, bias)
    check_forward(op, (y, None, None), x, weight, bias_of(op, bias))
    check_backward(op, gradients, dy, x, weight)


@on_devices
def test_a_million_standard_deviations_from_zero(device):
    """The fast variance, E[x²] - E[x]², would be only noise here."""
    x = random(4, COLS, device=device) + 1e6
    wide = numpy.asarray(x, numpy.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / numpy.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    close(layer_norm(x), expected.astype(numpy.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [7, 1000, 8191, 16384, 50257])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_the_bits_are_those_of_the_core(op, cols, zero_centered_gamma):
    """XLA launches a kernel whose text has rows and eps in it, but the plan and so the arithmetic are the same."""
    import cupy

    x, dy, weight, bias = inputs(cupy, 9, cols, "bfloat16", weight="float32")
    option = {"zero_centered_gamma": zero_centered_gamma}
    y, _, gradients = y_and_gradients(op, x, dy, weight, bias, **option)
    core = forward(op, x, weight, bias, **option)
    assert same_bits(y, core[0])
    for mine, of_core in zip(gradients, backward(op, dy, x, *core[1:], weight, **option), strict=True):
        assert same_bits(mine, of_core)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_through_the_callback(op, monkeypatch):
    """A launch by XLA's callback gives the same bits as one by its call of PTX."""
    import cupy

    x, dy, weight, bias = inputs(cupy, 40, 1000, "bfloat16", weight="float32")
    by_ptx = y_and_gradients(op, x, dy, weight, bias, eps=2e-5)
    monkeypatch.setenv("CUNORM_XLA_CALL", "callback")
    jax.clear_caches()
    by_callback = y_and_gradients(op, x, dy, weight, bias, eps=2e-5)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(by_ptx), jax.tree.leaves(by_callback), strict=True):
        assert same_bits(a, b)


# On the CPU each dtype is taken once, with a weight of another dtype.
MIXED = [
    *(("cpu", dtype, DTYPES[i - 1]) for i, dtype in enumerate(DTYPES)),
    *(pytest.param("cuda", *dtypes, marks=pytest.mark.gpu) for dtypes in itertools.product(DTYPES, DTYPES)),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("device", "dtype", "weight_dtype"), MIXED)
def test_mixed_dtypes(device, op, dtype, weight_dtype):
    """y and dx have the dtype of x, and the gradients of weight and bias have theirs."""
    bias_dtype = DTYPES[DTYPES.index(weight_dtype) - 1]
    with jax.enable_x64(True):
        x, dy = (random(6, COLS, device=device, seed=i).astype(dtype) for i in range(2))
        weight, bias = random(COLS, device=device).astype(weight_dtype), random(COLS, device=device).astype(bias_dtype)
        arguments = (x, weight, bias)[: 3 if op == "layer_norm" else 2]
        y, pull = jax.vjp(lambda *a: call(op, *a), *arguments)
        wide = [a.astype("float64") for a in arguments]
        expected, pull_wide = jax.vjp(lambda *a: plain(op, *a), *wide)
        gradients, expected_gradients = pull(dy), pull_wide(dy.astype("float64"))
    assert [a.dtype.name for a in (y, *gradients)] == [a.dtype.name for a in (x, *arguments)]
    for a, b, coarse in zip((y, *gradients), (expected, *expected_gradients), (x, x, weight, weight), strict=False):
        arithmetic = "float64" if dtype == "float64" else "float32"
        eps = max(float(jnp.finfo(kind).eps) for kind in (a.dtype, coarse.dtype, arithmetic))
        numpy.testing.assert_allclose(
            numpy.asarray(a, numpy.float64), numpy.asarray(b), rtol=2 * eps, atol=64 * min(eps, 2.0**-23)
        )


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", jnp.float32, numpy.dtype("float32"), jnp.bfloat16])
def test_dtype_of_y(device, op, dtype):
    x = random(4, COLS, device=device).astype(jnp.bfloat16)
    y = call(op, x, dtype=dtype)
    assert y.dtype == dtype
    close(y.astype("float32"), plain(op, x.astype("float32")), rtol=1e-2 if dtype is jnp.bfloat16 else 1e-5)


OPTIONS = [
    (op, has_weight, has_bias, zero_centered_gamma)
    for op, has_weight, has_bias, zero_centered_gamma in itertools.product(OPS, *[(True, False)] * 3)
    if (op == "layer_norm" or not has_bias) and (has_weight or not zero_centered_gamma)
]


@on_devices
@pytest.mark.parametrize(("op", "has_weight", "has_bias", "zero_centered_gamma"), OPTIONS)
def test_every_combination_of_options(device, op, has_weight, has_bias, zero_centered_gamma):
    eps = 0.3
    x, dy = (random(5, COLS, device=device, seed=i) for i in range(2))
    parameters = {}
    if has_weight:
        parameters["weight"] = random(COLS, device=device)
    if has_bias:
        parameters["bias"] = random(COLS, device=device, seed=1)

    def mine(x, parameters):
        return call(op, x, **parameters, eps=eps, zero_centered_gamma=zero_centered_gamma, sm_margin=4)

    def expected(x, parameters):
        weight = parameters.get("weight")
        weight = weight + 1 if zero_centered_gamma else weight
        return plain(op, x, weight, parameters.get("bias"), eps)

    (y, pull), (y_expected, pull_expected) = (jax.vjp(f, x, parameters) for f in (mine, expected))
    close((y, pull(dy)), (y_expected, pull_expected(dy)))


ARGNUMS = [
    *(("layer_norm", argnums) for argnums in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))),
    *(("rms_norm", argnums) for argnums in ((0,), (1,))),
]


@on_devices
@pytest.mark.parametrize(("op", "argnums"), ARGNUMS)
def test_some_of_the_gradients(device, op, argnums):
    arrays = (random(6, COLS, device=device), random(COLS, device=device), random(COLS, device=device, seed=1))
    mine, expected = (jax.grad(lambda *a, f=f: jnp.sin(f(op, *a)).sum(), argnums)(*arrays) for f in (call, plain))
    close(mine, expected)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, COLS), (3, 0, COLS), (2, 0, 4, COLS)])
def test_empty(device, op, shape):
    x, weight = jax.device_put(jnp.zeros(shape), jax.devices(device)[0]), random(COLS, device=device)
    y, pull = jax.vjp(lambda x, weight: call(op, x, weight), x, weight)
    dx, dweight = pull(y)
    assert y.shape == dx.shape == shape
    assert dweight.tolist() == [0.0] * COLS


@on_devices
@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 4, 5), 1), ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 4), ((6,), 1)])
def test_any_number_of_trailing_axes(device, shape, axes):
    normalized = shape[len(shape) - axes :]
    x, weight, bias = (random(*s, device=device) for s in (shape, normalized, normalized))
    flat = (x.reshape(*shape[: len(shape) - axes], -1), weight.reshape(-1), bias.reshape(-1))
    loss = lambda f: lambda *a: jnp.sin(f(*a)).sum()  # noqa: E731
    mine = jax.value_and_grad(loss(lambda x, w, b: layer_norm(x, normalized, w, b)), (0, 1, 2))(x, weight, bias)
    expected = jax.value_and_grad(loss(lambda *a: plain("layer_norm", *a)), (0, 1, 2))(*flat)
    close((mine[0], [g.reshape(-1) for g in mine[1]]), (expected[0], [g.reshape(-1) for g in expected[1]]))
    close(layer_norm(x, None, weight, bias), layer_norm(x, normalized, weight, bias), 0, 0)


@on_devices
def test_one_array_in_several_places(device):
    """Where weight and bias are one array, XLA may pass the buffer once or twice."""
    x, weight = random(6, COLS, device=device), random(COLS, device=device)
    close(jax.jit(lambda x, w: layer_norm(x, None, w, w))(x, weight), plain("layer_norm", x, weight, weight))

    def gradients(f):
        return jax.jit(lambda x, w: jax.vjp(lambda *a: f(*a), x, w, w)[1](x))(x, weight)

    close(gradients(lambda x, w, b: layer_norm(x, None, w, b)), gradients(lambda *a: plain("layer_norm", *a)))


@on_devices
@pytest.mark.slow
def test_slices_and_transposes(device):
    """Kernels get dense rows from XLA, however x was sliced or transposed."""
    x = random(7, 6, 2 * COLS + 1, device=device)
    views = {
        "rows": lambda x: x[1:, :, :COLS],
        "odd start": lambda x: x[..., 1 : COLS + 1],
        "steps": lambda x: x[..., : 2 * COLS : 2],
        "transposed": lambda x: x[..., :COLS].swapaxes(0, 1),
        "one row": lambda x: x[3, 5, :COLS],
    }
    for view in views.values():
        mine, expected = (
            jax.jit(jax.value_and_grad(lambda x, f=f, view=view: jnp.sin(f("layer_norm", view(x))).sum()))(x)
            for f in (call, plain)
        )
        close(mine, expected)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("op", OPS)
def test_functions_of_cunorm(device, op):
    """cunorm.layer_norm and the others take JAX arrays, eager and traced, and can be differentiated."""
    x, dy = (random(4, 5, COLS, device=device, seed=i) for i in range(2))
    weight, bias = random(COLS, device=device), random(COLS, device=device, seed=1)
    y, mean, rstd = forward(op, x, weight, bias)
    gradients = backward(op, dy, x, mean, rstd, weight)
    expected, pull = jax.vjp(lambda *a: plain(op, *a), x, weight, bias)
    close(y, expected)
    assert rstd.shape == (4, 5)
    for mine, gradient in zip(gradients, pull(dy)[: 3 if op == "layer_norm" else 2], strict=False):
        close(mine, gradient)
    alone = cunorm.layer_norm if op == "layer_norm" else cunorm.rms_norm
    arguments = (x, None, weight, bias) if op == "layer_norm" else (x, None, weight)
    close(jax.jit(lambda *a: alone(a[0], None, *a[1:]))(x, *arguments[2:]), y, 0, 0)
    mask = (False, True, False) if op == "layer_norm" else (False, True)
    function = cunorm.layer_norm_backward if op == "layer_norm" else cunorm.rms_norm_backward
    statistics = (mean, rstd) if op == "layer_norm" else (rstd,)
    only = function(dy, x, *statistics, weight, output_mask=mask)
    assert [g is not None for g in only] == list(mask)
    close(only[1], gradients[1], 1e-6, 1e-6)
    of_statistics = jax.grad(lambda x: jnp.sin(forward(op, x, weight, bias)[2]).sum())(x)
    centred = (lambda x: x - x.mean(-1, keepdims=True)) if op == "layer_norm" else (lambda x: x)
    close(
        of_statistics,
        jax.grad(lambda x: jnp.sin(((centred(x) ** 2).mean(-1) + EPS[op]) ** -0.5).sum())(x),
    )


@on_devices
def test_a_numpy_array_becomes_one_of_jax(device):
    with jax.default_device(jax.devices(device)[0]):
        y = layer_norm(numpy.ones((2, 8), numpy.float32), None, numpy.ones(8, numpy.float32))
        assert isinstance(y, jax.Array)
        assert isinstance(rms_norm(numpy.ones((2, 8))), jax.Array)


@pytest.mark.gpu
def test_backward_twice_gives_the_same_bits():
    x, dy = (random(4096, 1000, device="cuda", seed=i) for i in range(2))
    weight = random(1000, device="cuda")
    gradients = jax.jit(lambda x, w, dy: jax.vjp(lambda x, w: layer_norm(x, None, w), x, w)[1](dy))
    for a, b in zip(gradients(x, weight, dy), gradients(x, weight, dy), strict=True):
        assert same_bits(from_jax(a), from_jax(b))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, cols = 2**21 + 3, 1024
    key = jax.random.key(0)
    x = jax.jit(lambda: jax.random.normal(key, (rows, cols), jnp.bfloat16))()
    y, pull = jax.vjp(layer_norm, x)
    (dx,) = pull(y)
    for rows_of in (slice(0, 2), slice(2**21 - 1, 2**21 + 3)):
        check_forward("layer_norm", (from_jax(y[rows_of]), None, None), from_jax(x[rows_of]))
        check_backward("layer_norm", (from_jax(dx[rows_of]), None, None), from_jax(y[rows_of]), from_jax(x[rows_of]))
