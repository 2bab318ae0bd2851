"""layer_norm_linear on NumPy and CuPy arrays: values, gradients, layouts, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import linear_reference
import numpy
import pytest
from arrays import in_wider_rows, same_bits
from functions import OPS
from linear_reference import NORMALIZATION, check_backward, check_forward

import cunorm

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Shape(NamedTuple):
    rows: int
    cols: int
    outs: int
    reason: str


SHAPES = (
    Shape(5, 16, 24, "small"),
    Shape(1, 128, 8, "one row"),
    Shape(33, 7, 5, "odd: no row is aligned"),
    Shape(130, 96, 1, "one column of weight"),
    Shape(48, 320, 64, "no power of two"),
)


def on(xp: Any, call: linear_reference.Call) -> linear_reference.Call:
    return type(call)(*[xp.asarray(value) if isinstance(value, numpy.ndarray) else value for value in call])


def options(call: linear_reference.Call) -> dict[str, Any]:
    return {
        "eps": call.eps,
        "normalization": NORMALIZATION[call.op],
        "zero_centered_gamma": call.zero_centered_gamma,
    }


def forward(call: linear_reference.Call) -> tuple[Any, Any, Any]:
    parameters = (call.weight, call.bias, call.ln_weight, call.ln_bias)
    return cunorm.layer_norm_linear_forward(call.x, *parameters, **options(call))


def backward(call: linear_reference.Call, mean: Any, rstd: Any, **others: Any) -> tuple[Any, ...]:
    arrays = (call.dy, call.x, mean, rstd, call.weight, call.ln_weight, call.ln_bias)
    return cunorm.layer_norm_linear_backward(*arrays, **options(call), **others)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1.0, 1e2])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.reason)
def test_values_and_gradients(xp, op, dtype, offset, shape):
    call = on(xp, linear_reference.inputs(op, *shape[:3], dtype, offset=offset))
    y, mean, rstd = forward(call)
    check_forward(call, y)
    check_backward(call, backward(call, mean, rstd))
    assert (mean is None) == (op == "rms_norm")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("ln_dtype", ["float32", "bfloat16"])
def test_options(xp, op, zero_centered_gamma, ln_dtype):
    shape = (16, 64, 32, "bfloat16")
    call = on(xp, linear_reference.inputs(op, *shape, ln_dtype=ln_dtype, zero_centered_gamma=zero_centered_gamma))
    y, mean, rstd = forward(call)
    check_forward(call, y)
    check_backward(call, backward(call, mean, rstd))
    assert same_bits(
        cunorm.layer_norm_linear(call.x, call.weight, call.bias, call.ln_weight, call.ln_bias, **options(call)), y
    )


@pytest.mark.parametrize("op", OPS)
def test_nothing_but_x_and_weight(xp, op):
    call = linear_reference.inputs(op, 9, 32, 16, "float32")._replace(bias=None, ln_weight=None, ln_bias=None)
    call = on(xp, call)
    y, mean, rstd = forward(call)
    check_forward(call, y)
    check_backward(call, backward(call, mean, rstd))


@pytest.mark.parametrize("wanted", range(5), ids=linear_reference.NAMES)
@pytest.mark.parametrize("op", OPS)
def test_only_what_is_wanted(xp, op, wanted):
    call = on(xp, linear_reference.inputs(op, 12, 32, 16, "float32"))
    _, mean, rstd = forward(call)
    everything = backward(call, mean, rstd)
    mask = tuple(index == wanted for index in range(5))
    gradients = backward(call, mean, rstd, output_mask=mask)
    there = [gradient is not None for gradient in gradients]
    assert there == [index == wanted and everything[wanted] is not None for index in range(5)]
    check_backward(call, gradients)
    assert backward(call, mean, rstd, output_mask=(False,) * 5) == (None,) * 5


@pytest.mark.parametrize("layout", ["wider rows", "transposed weight", "reversed rows", "three axes"])
def test_layouts(xp, layout):
    call = on(xp, linear_reference.inputs("layer_norm", 12, 32, 24, "float32"))
    y, _, _ = forward(call)
    x, dy, weight = call.x, call.dy, call.weight
    if layout == "wider rows":
        x, dy, weight = (in_wider_rows(array, 8) for array in (x, dy, weight))
    elif layout == "transposed weight":
        weight = xp.ascontiguousarray(weight.T).T
    elif layout == "reversed rows":
        x, dy, weight = (xp.ascontiguousarray(array[::-1])[::-1] for array in (x, dy, weight))
    else:
        x, dy = x.reshape(3, 4, 32), dy.reshape(3, 4, 24)
    other = call._replace(x=x, dy=dy, weight=weight)
    y_other, mean, rstd = forward(other)
    assert y_other.shape == (*x.shape[:-1], 24)
    check_forward(call, y_other.reshape(y.shape))
    dx, *others = backward(other, mean, rstd)
    assert dx.shape == x.shape
    check_backward(call, (dx.reshape(call.x.shape), *others))


def test_no_rows(xp):
    call = on(xp, linear_reference.inputs("layer_norm", 0, 32, 16, "float32"))
    y, mean, rstd = forward(call)
    assert y.shape == (0, 16)
    dx, *others = backward(call, mean, rstd)
    assert dx.shape == (0, 32)
    assert all(not gradient.any() for gradient in others)


def test_one_axis(xp):
    call = on(xp, linear_reference.inputs("layer_norm", 1, 32, 16, "float32"))
    y = cunorm.layer_norm_linear(call.x[0], call.weight, call.bias, call.ln_weight, call.ln_bias, **options(call))
    assert y.shape == (16,)
    check_forward(call, y[None])


# The checkers must reject wrong results.

WRONG: dict[str, Callable[[linear_reference.Call], linear_reference.Call]] = {
    "eps is left out": lambda call: call._replace(eps=0.0),
    "ln_bias is left out": lambda call: call._replace(ln_bias=0 * call.ln_bias),
    "ln_weight is left out": lambda call: call._replace(ln_weight=0 * call.ln_weight + 1),
    "ln_weight is centred": lambda call: call._replace(zero_centered_gamma=True),
    "bias is left out": lambda call: call._replace(bias=0 * call.bias),
    "a row is missing": lambda call: call._replace(
        dy=call.dy * (numpy.arange(len(call.dy)) > 0)[:, None].astype(call.dy.dtype)
    ),
    "the other norm": lambda call: call._replace(op="rms_norm", ln_bias=None),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("offset", [1.0, 1e2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_checkers_reject(what, offset, dtype):
    call = linear_reference.inputs("layer_norm", 64, 128, 96, dtype, offset=offset)
    wrong = WRONG[what](call)
    y, mean, rstd = forward(wrong)
    gradients = backward(wrong, mean, rstd)
    if what == "the other norm":
        gradients = (*gradients[:4], None)
    rejected = [rejects(check_forward, call, y), rejects(check_backward, call, gradients)]
    assert rejected == [what != "a row is missing", what != "bias is left out"]


def rejects(check: Callable, call: linear_reference.Call, result: Any) -> bool:
    try:
        check(call, result)
    except AssertionError:
        return True
    return False


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bindings", ["nvmath", "none"])
def test_both_ways_to_cublas(dtype, bindings, monkeypatch):
    """Both ways serve every layout."""
    import cupy

    from cunorm.linear import gemm

    if bindings == "nvmath" and gemm.bindings() is None:
        pytest.skip("nvmath-python is not installed")
    if bindings == "none":
        monkeypatch.setattr(gemm, "bindings", lambda: None)
    call = on(cupy, linear_reference.inputs("layer_norm", 96, 256, 160, dtype))
    for weight in (call.weight, cupy.ascontiguousarray(call.weight.T).T, in_wider_rows(call.weight, 8)):
        for x, dy in ((call.x, call.dy), (in_wider_rows(call.x, 8), in_wider_rows(call.dy, 8))):
            other = call._replace(weight=weight, x=x, dy=dy)
            y, mean, rstd = forward(other)
            check_forward(call, y)
            check_backward(call, backward(other, mean, rstd))


@pytest.mark.gpu
def test_cublaslt_is_asked_once_for_a_kind_of_product():
    import cupy

    from cunorm.linear import gemm

    if gemm.bindings() is None:
        pytest.skip("nvmath-python is not installed")
    call = on(cupy, linear_reference.inputs("layer_norm", 32, 64, 48, "float16"))
    y, mean, rstd = forward(call)
    backward(call, mean, rstd)
    asked = gemm.of_thread.prepared.cache_info().misses
    for _ in range(3):
        assert same_bits(forward(call)[0], y)
        backward(call, mean, rstd)
    assert gemm.of_thread.prepared.cache_info().misses == asked


@pytest.mark.gpu
def test_products_go_on_while_their_descriptors_are_destroyed(monkeypatch):
    """Many products are launched before the first has ended, and only two kinds of descriptors are kept."""
    import cupy

    from cunorm.linear import gemm

    monkeypatch.setattr(gemm, "KINDS", 2)
    monkeypatch.setattr(gemm, "of_thread", gemm._OfThread())
    a, b = cupy.ones((4096, 1024), "float32"), cupy.full((1024, 2048), 0.5, "float32")
    products = [gemm.multiply(a[:rows], b) for rows in range(4096 - 40, 4097)] * 2
    assert all(bool((y == 512).all()) for y in products)


@pytest.mark.gpu
@pytest.mark.parametrize("bindings", ["nvmath", "none"])
def test_float32_is_tf32_where_cupy_is_set_so(bindings, monkeypatch):
    import cupy
    from cupy._core import _routines_linalg as linalg

    from cunorm.linear import gemm

    if bindings == "none":
        monkeypatch.setattr(gemm, "bindings", lambda: None)
    a, b = (cupy.asarray(numpy.random.default_rng(i).standard_normal((512, 512)).astype("float32")) for i in (0, 1))
    exact = a.get().astype("float64") @ b.get().astype("float64")

    def error() -> float:
        return float(abs(gemm.multiply(a, b).get() - exact).max())

    assert error() < 2e-4
    before = linalg.get_compute_type(numpy.dtype("float32"))
    try:
        linalg.set_compute_type(numpy.dtype("float32"), linalg.COMPUTE_TYPE_TF32)
        assert 2e-3 < error() < 2e-1
    finally:
        linalg.set_compute_type(numpy.dtype("float32"), before)


@pytest.mark.gpu
def test_the_current_stream():
    """x is written after a delay on a stream, and a call on that stream sees it."""
    import cupy
    from busy import spin

    call = on(cupy, linear_reference.inputs("layer_norm", 64, 256, 128, "float32"))
    forward(call)
    x = cupy.zeros_like(call.x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin(50)
        x[...] = call.x
        y, mean, rstd = forward(call._replace(x=x))
        gradients = backward(call._replace(x=x), mean, rstd)
        stream.synchronize()
    check_forward(call, y)
    check_backward(call, gradients)


@pytest.mark.gpu
def test_arrays_through_dlpack():
    import cupy

    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    call = on(cupy, linear_reference.inputs("layer_norm", 8, 64, 48, "float32"))
    foreign = call._replace(
        **{name: Foreign(getattr(call, name)) for name in ("x", "weight", "bias", "ln_weight", "ln_bias", "dy")}
    )
    y, mean, rstd = forward(foreign)
    assert isinstance(y, cupy.ndarray)
    check_forward(call, y)
    check_backward(call, backward(foreign, mean, rstd))


# Bad input.


class Bad(NamedTuple):
    what: str
    change: Callable[[Any, dict], dict]
    error: type[Exception]
    phrase: str


FORWARD = [
    Bad("x is a list", lambda xp, a: {"x": [[1.0]]}, TypeError, "x must be a NumPy, CuPy"),
    Bad("weight is a list", lambda xp, a: {"weight": [[1.0]]}, TypeError, "weight must be a"),
    Bad("weight is missing", lambda xp, a: {"weight": None}, TypeError, "weight must be a"),
    Bad("weight is a row", lambda xp, a: {"weight": a["weight"][0]}, ValueError, "weight must have shape (out, in)"),
    Bad("weight has no rows", lambda xp, a: {"weight": a["weight"][:0]}, ValueError, "neither of them 0; got (0, 8)"),
    Bad("wrong last axis", lambda xp, a: {"x": a["x"][:, 1:]}, ValueError, "the length 8 of a row of weight"),
    Bad("no axis", lambda xp, a: {"x": a["x"][0, :1].reshape(())}, ValueError, "got x of shape ()"),
    Bad("short bias", lambda xp, a: {"bias": a["bias"][1:]}, ValueError, "bias must have shape (6,); got (5,)"),
    Bad(
        "short ln_weight", lambda xp, a: {"ln_weight": a["ln_weight"][1:]}, ValueError, "ln_weight must have shape (8,)"
    ),
    Bad("short ln_bias", lambda xp, a: {"ln_bias": a["ln_bias"][1:]}, ValueError, "ln_bias must have shape (8,)"),
    Bad(
        "weight of another dtype",
        lambda xp, a: {"weight": a["weight"].astype("float16")},
        TypeError,
        "x of float32 and weight of float16",
    ),
    Bad(
        "bias of another dtype",
        lambda xp, a: {"bias": a["bias"].astype("float64")},
        TypeError,
        "x of float32 and bias of float64",
    ),
    Bad("integers", lambda xp, a: {"x": a["x"].astype("int32")}, TypeError, "x must have dtype float16"),
    Bad("eps is a string", lambda xp, a: {"eps": "1"}, TypeError, "eps must be a real number"),
    Bad("eps is negative", lambda xp, a: {"eps": -1.0}, ValueError, "eps must be finite and not negative"),
    Bad(
        "unknown normalization",
        lambda xp, a: {"normalization": "BatchNorm"},
        ValueError,
        "must be 'LayerNorm' or 'RMSNorm'; got 'BatchNorm'",
    ),
    Bad(
        "an RMSNorm with ln_bias",
        lambda xp, a: {"normalization": "RMSNorm"},
        ValueError,
        "ln_bias must be None for an RMSNorm",
    ),
    Bad(
        "nothing to centre",
        lambda xp, a: {"ln_weight": None, "zero_centered_gamma": True},
        ValueError,
        "needs ln_weight",
    ),
]
BACKWARD = [
    Bad("dy of another shape", lambda xp, a: {"dy": a["dy"][:, 1:]}, ValueError, "dy must have the shape of y, (4, 6)"),
    Bad(
        "dy of another dtype",
        lambda xp, a: {"dy": a["dy"].astype("float64")},
        TypeError,
        "x of float32 and dy of float64",
    ),
    Bad(
        "short rstd", lambda xp, a: {"rstd": a["rstd"][1:]}, ValueError, "Pass what layer_norm_linear_forward returned"
    ),
    Bad(
        "mean of another dtype",
        lambda xp, a: {"mean": a["mean"].astype("float64")},
        ValueError,
        "mean must have shape (4,) and dtype float32",
    ),
    Bad("mean is missing", lambda xp, a: {"mean": None}, TypeError, "mean must be a"),
    Bad("a short mask", lambda xp, a: {"output_mask": (True,)}, ValueError, "output_mask must have 5 entries"),
    Bad("the mask is a number", lambda xp, a: {"output_mask": 1}, TypeError, "output_mask must be a tuple"),
]


def good(xp: Any) -> dict[str, Any]:
    shapes = {"x": (4, 8), "weight": (6, 8), "bias": (6,), "ln_weight": (8,), "ln_bias": (8,)}
    return {name: xp.ones(shape, "float32") for name, shape in shapes.items()}


@pytest.mark.parametrize("bad", FORWARD, ids=lambda bad: bad.what)
def test_bad_input(xp, bad):
    arguments = good(xp)
    arguments |= bad.change(xp, arguments)
    with pytest.raises(bad.error) as caught:
        cunorm.layer_norm_linear(**arguments)
    assert bad.phrase in str(caught.value)
    assert str(caught.value).startswith("layer_norm_linear: ")


@pytest.mark.parametrize("bad", BACKWARD, ids=lambda bad: bad.what)
def test_bad_input_of_the_backward_pass(xp, bad):
    arguments = good(xp)
    del arguments["bias"]
    arguments |= {
        "dy": xp.ones((4, 6), "float32"),
        "mean": xp.ones(4, "float32"),
        "rstd": xp.ones(4, "float32"),
        "eps": 1e-5,
    }
    arguments |= bad.change(xp, arguments)
    with pytest.raises(bad.error) as caught:
        cunorm.layer_norm_linear_backward(**arguments)
    assert bad.phrase in str(caught.value)
    assert str(caught.value).startswith("layer_norm_linear_backward: ")


def test_eps_of_the_backward_pass_cannot_be_forgotten():
    with pytest.raises(TypeError, match="eps"):
        cunorm.layer_norm_linear_backward(*[numpy.ones((2, 2))] * 5)
