"""Fused operations: what a call returns is what its parts return one after the other, and gradients are right."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from arrays import on_host, same_bits
from fusion_cases import CASES, EPS, check, make
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import FORMATS

import cunorm
from cunorm.expression import sigmoid, tanh

# Shapes and dtypes for every case; on the GPU larger ones too.

SHAPES = ((5, 33), (3, 1000), (2, 3, 129), (2, 3, 2, 17))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch_in_float64(xp, name, shape, dtype):
    case = CASES[name]
    check(case, make(case, shape, dtype), xp.asarray)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((300, 4096), "bfloat16"),
        ((2, 20001), "float32"),
        ((3, 65537), "float16"),
        ((257, 1), "float32"),
        ((4, 100, 2048), "bfloat16"),
        ((9, 7, 2, 128), "float16"),
        ((3, 2, 40000), "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_every_tier_on_a_gpu(name, shape, dtype):
    import cupy

    case = CASES[name]
    # The reference computes s in float64 and a kernel in float32, before they round it. Where s takes functions, a few
    # values are then rounded to the neighbour, and y shows it. In the other cases s is exact, so they keep 16 bits.
    dtype = "float32" if name in ("both", "poles") else dtype
    # The gradient of a number is a sum over all of x. With 240,000 terms of either sign it may be small, while float32
    # rounds its large partial sums. Smaller shapes show that it is right.
    wanted = ()
    if shape == (3, 2, 40000):
        wanted = tuple(name for name in ("x", *case.op.operation.operands) if name not in case.numbers)
    check(case, make(case, shape, dtype), cupy.asarray, wanted)


# The bits of a sum and a norm.


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_add_and_norm_has_the_bits_of_the_two_calls(xp, norm, dtype):
    made = make(CASES["add_rms_norm"], (37, 1000), dtype)
    x, residual, weight = map(xp.asarray, (made.x, made.operands["residual"], made.operands["weight"]))
    y, s = getattr(cunorm, f"add_{norm}")(x, residual, weight)
    total = x + residual
    assert same_bits(on_host(s), on_host(total))
    assert same_bits(on_host(y), on_host(getattr(cunorm, norm)(total, None, weight)))


# The named operations.


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_named_operations_are_those_of_fuse(xp, norm, zero_centered_gamma):
    """A named function gives what the same operation of cunorm.fuse gives; `in_order` sorts y and s by its returns."""
    named = CASES[f"add_{norm}"]
    made = make(named, (3, 7), "float32")
    x, residual = xp.asarray(made.x), xp.asarray(made.operands["residual"])
    parameters = [xp.asarray(made.operands[name]) for name in named.columns]
    options = {"zero_centered_gamma": zero_centered_gamma}
    of_name = getattr(cunorm, f"add_{norm}")
    (y, s), of_call = of_name.forward(x, residual, *parameters, eps=EPS, **options)
    shifted = {"weight": parameters[0] + zero_centered_gamma} | dict(
        zip(named.columns[1:], parameters[1:], strict=True)
    )
    results, saved = named.op.forward(x, eps=EPS, residual=residual, **shifted)
    by_name = dict(zip(named.op.operation.returns, results, strict=True))
    assert abs(on_host(y - by_name["y"])).max() < 1e-5
    assert same_bits(on_host(s), on_host(by_name["s"]))
    dy, ds = (xp.asarray(gradient) for gradient in made.gradients)
    in_order = {"y": dy, "s": ds}
    gradients = named.op.backward(saved, *(in_order[name] for name in named.op.operation.returns))
    gradients_of_name = of_name.backward(of_call, dy, ds)
    assert gradients_of_name.keys() == {"x", "residual", *named.columns}
    for name, gradient in gradients_of_name.items():
        assert abs(on_host(gradient - gradients[name])).max() < 1e-4, name
    only = of_name.backward(of_call, dy, None, wanted=["weight"])
    assert list(only) == ["weight"]
    assert same_bits(on_host(only["weight"]), on_host(gradients_of_name["weight"]))


def test_gradients_have_the_dtypes_of_what_they_are_of(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 12, dtype="float16").reshape(3, 4))
    weight, bias = xp.ones(4, "float64"), xp.ones(4, "float32")
    options = {"s_dtype": "float32", "dtype": "float64"}
    (y, s), saved = cunorm.add_layer_norm.forward(x, x.astype("float32"), weight, bias, **options)
    assert (y.dtype, s.dtype, saved.statistics["rstd"].dtype) == ("float64", "float32", "float32")
    dtypes = {name: gradient.dtype.name for name, gradient in cunorm.add_layer_norm.backward(saved, y, None).items()}
    assert dtypes == {"x": "float16", "residual": "float32", "weight": "float64", "bias": "float32"}


# Gradients of random expressions, against differences.

NAMES = ("first", "a", "b", "c")


@st.composite
def trees(draw, depth: int = 3) -> Any:
    """Draw a smooth function of four names, which is bounded where they are."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(NAMES) | st.sampled_from([0.5, -1.5, 2.0]))
    function = draw(st.sampled_from(["+", "-", "*", "tanh", "sigmoid", "exp"]))
    return (function, draw(trees(depth - 1)), draw(trees(depth - 1)))


def computed(tree: Any, values: dict[str, Any]) -> Any:
    if not isinstance(tree, tuple):
        return values.get(tree, tree) if isinstance(tree, str) else tree
    function, left, right = tree[0], computed(tree[1], values), computed(tree[2], values)
    if function in ("+", "-", "*"):
        return {"+": left + right, "-": left - right, "*": left * right}[function]
    return {"tanh": tanh, "sigmoid": sigmoid, "exp": lambda x: sigmoid(x) ** 2}[function](left + 0.5 * right)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["layer_norm", "rms_norm"]), trees(), trees())
def test_gradients_are_the_limits_of_differences(norm, before, after):
    op = cunorm.fuse(
        norm,
        prologue=lambda first, a, b, c: first + computed(before, {"first": first, "a": a, "b": b, "c": c}),
        epilogue=lambda first, a, b, c: computed(after, {"first": first, "a": a, "b": b, "c": c}) + 0 * first,
        returns=("y", "s"),
    )
    random = numpy.random.default_rng(0)
    values = {"x": random.standard_normal((3, 5)), "a": random.standard_normal((3, 5)), "b": random.standard_normal(5)}
    values["c"] = 0.75
    steps = {name: random.standard_normal(numpy.shape(value)) for name, value in values.items()}
    weights = random.standard_normal((2, 3, 5))

    def loss(amount: float) -> float:
        at = {name: value + amount * steps[name] for name, value in values.items()}
        y, s = op(at.pop("x"), eps=0.5, **{k: float(v) if numpy.ndim(v) == 0 else v for k, v in at.items()})
        return float((weights[0] * y + weights[1] * s).sum())

    x, *_ = values.values()
    _, saved = op.forward(x, eps=0.5, **{name: value for name, value in values.items() if name != "x"})
    gradients = op.backward(saved, *weights)
    slope = sum(float((gradients[name] * steps[name]).sum()) for name in values)
    size = sum(float(abs(gradients[name] * steps[name]).sum()) for name in values)
    assert abs((loss(1e-5) - loss(-1e-5)) / 2e-5 - slope) <= 1e-6 * (1 + size)
