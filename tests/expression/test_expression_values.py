"""Values and derivatives of expressions, by NumPy, torch and JAX, against Python's math and finite differences."""

from __future__ import annotations

import math

import jax
import jax.numpy
import numpy
import pytest
import torch
from expressions import FAR, PRIMITIVES, STABLE, gated
from hypothesis import given, settings
from hypothesis import strategies as st

from cunorm import expression
from cunorm.expression import gradients, parse, trace
from cunorm.expression.texts import evaluate

POINTS = numpy.concatenate([numpy.linspace(-6, 6, 49), [1.1, -2.3, 1e-9, -1e-9, 1e-300]])


@pytest.mark.parametrize("module", [numpy, torch, jax.numpy], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_functions_are_those_of_mathematics(name, module):
    function, of_numbers = PRIMITIVES[name]
    expected = [of_numbers(float(x)) for x in POINTS]
    with jax.enable_x64(True):
        values = evaluate(trace(function), {"x": module.asarray(POINTS)}, module)
        assert str(values.dtype).endswith("float64")
    numpy.testing.assert_allclose(numpy.asarray(values), expected, rtol=2e-15, atol=2e-15)


@pytest.mark.parametrize("name", sorted(PRIMITIVES.keys() - {"where", "minimum", "maximum"}))
def test_functions_take_arrays_and_numbers(name):
    function, of_numbers = PRIMITIVES[name]
    numpy.testing.assert_allclose(function(POINTS), list(map(of_numbers, POINTS)), rtol=2e-15, atol=2e-15)
    numpy.testing.assert_allclose(function(0.75), of_numbers(0.75), rtol=2e-15)
    assert numpy.asarray(function(numpy.float32([0.5, 1]))).dtype in ("float32", "int64")


@pytest.mark.parametrize("module", [numpy, torch, jax.numpy], ids=lambda module: module.__name__)
def test_constants_and_numbers_do_not_widen(module):
    traced = trace(lambda x, factor: expression.where(x > 0, 0.1, expression.minimum(0.3, factor)) * x + 2)
    values = evaluate(traced, {"x": module.asarray([1.0, -1.0], dtype=module.float32), "factor": 0.2}, module)
    assert str(values.dtype).endswith("float32")
    numpy.testing.assert_allclose(numpy.asarray(values), [2.1, 1.8], rtol=1e-6)


def test_evaluate_refuses_what_it_cannot():
    traced = trace(lambda x, y: x * y)
    with pytest.raises(ValueError, match="got none of 'y'"):
        evaluate(traced, {"x": numpy.ones(2)}, numpy)
    with pytest.raises(TypeError, match="floating arrays; got int64"):
        evaluate(traced, {"x": numpy.ones(2, "int64"), "y": 0.5}, numpy)
    with pytest.raises(TypeError, match=r"by numpy, torch, jax.numpy; got math"):
        evaluate(traced, {"x": 1.0, "y": 1.0}, math)


def test_frameworks_differentiate_and_compile_what_is_evaluated():
    traced = trace(gated)
    values = {"x": numpy.array([0.3, -2.0]), "z": numpy.array([1.5, -0.7]), "weight": numpy.array(1.1)}
    derivatives = gradients(traced, traced.names)
    expected = {name: evaluate(derivative, values, numpy).sum() for name, derivative in derivatives.items()}
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    evaluate(traced, tensors, torch).sum().backward()
    with jax.enable_x64(True):
        in_jax = jax.jit(jax.grad(lambda given: evaluate(traced, given, jax.numpy).sum()))(values)
    for name in values:
        numpy.testing.assert_allclose(tensors[name].grad.sum(), expected[name], rtol=1e-13)
        numpy.testing.assert_allclose(numpy.asarray(in_jax[name]).sum(), expected[name], rtol=1e-13)


# Derivatives.


def test_gradients_at_ties_are_those_of_torch():
    values = {"x": [1.0, 2.0, 3.0, 0.0, math.nan], "y": [1.0, 3.0, 2.0, 0.0, 1.0]}
    for function in (
        lambda x, y: expression.minimum(x, y),
        lambda x, y: expression.maximum(x, y),
        lambda x, y: abs(x) * y,
        lambda x, y: expression.where(x < y, x, y),
    ):
        traced = trace(function)
        tensors = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in values.items()}
        evaluate(traced, tensors, torch).sum().backward()
        for name, derivative in gradients(traced, ["x", "y"]).items():
            arrays = {name: numpy.array(value) for name, value in values.items()}
            gradient = numpy.broadcast_to(evaluate(derivative, arrays, numpy), 5)
            numpy.testing.assert_array_equal(gradient[:4], tensors[name].grad.numpy()[:4])
    # If one operand is NaN, torch's maximum gives the whole gradient to both.
    numpy.testing.assert_array_equal(
        evaluate(gradients(trace(lambda x, y: expression.maximum(x, y)), ["x"])["x"], arrays, numpy)[4], 1
    )


UNARY = [
    abs,
    expression.erf,
    expression.tanh,
    expression.sigmoid,
    expression.silu,
    expression.gelu,
    lambda a: expression.gelu(a, approximate="tanh"),
    lambda a: expression.exp(expression.tanh(a)),
    lambda a: expression.log(1.5 + a * a),
    lambda a: expression.sqrt(1.5 + a * a),
    lambda a: expression.rsqrt(1.5 + a * a),
    lambda a: (1.5 + a * a) ** -2,
    lambda a: -a,
    lambda a: a**3,
]
BINARY = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a / (1.5 + b * b),
    lambda a, b: 2 - a * b,
    lambda a, b: a * b - b,
    lambda a, b: expression.minimum(a, b),
    lambda a, b: expression.maximum(a, b),
    lambda a, b: expression.where(a < b, a * b, 0.25),
]


@pytest.mark.parametrize("function", [*UNARY, *BINARY])
def test_each_derivative_is_the_slope(function):
    traced = trace((lambda a: function(a)) if function in UNARY else (lambda a, b: function(a, b)))
    values = {"a": numpy.array([0.3, -1.2, 2.0, -0.7]), "b": numpy.array([-0.4, 0.9, 1.5, -2.5])}
    for name, derivative in gradients(traced, traced.names).items():
        high, low = (evaluate(traced, values | {name: values[name] + step}, numpy) for step in (1e-5, -1e-5))
        numpy.testing.assert_allclose(evaluate(derivative, values, numpy) + 0 * high, (high - low) / 2e-5, atol=1e-8)


def build(plan, leaves):
    """Compute what a plan says: it is a leaf's index, a constant, or a function and the plans of its arguments."""
    if isinstance(plan, int | float):
        return leaves[plan] if isinstance(plan, int) else plan
    function, *arguments = plan
    return function(*(build(argument, leaves) for argument in arguments))


PLANS = st.recursive(
    st.integers(0, 2) | st.floats(-2, 2, width=16),
    lambda plans: st.tuples(st.sampled_from(UNARY), plans) | st.tuples(st.sampled_from(BINARY), plans, plans),
    max_leaves=6,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(plan=PLANS, seed=st.integers(0, 2**32 - 1))
def test_any_expression_is_read_back_and_differentiated(plan, seed):
    """Derivatives are those of torch, and finite differences where two steps agree, so where there is no corner."""
    traced = trace(lambda a, b, c: build(plan, (a, b, c)) + 0 * a)
    generator = numpy.random.default_rng(seed)
    values = dict(zip("abc", generator.uniform(-1.5, 1.5, (3, 8)), strict=True))
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    (evaluate(traced, tensors, torch) + 0 * sum(tensors.values())).sum().backward()
    for name, derivative in gradients(traced, traced.names).items():
        assert parse(derivative.text, derivative.names) == derivative
        gradient = numpy.broadcast_to(evaluate(derivative, values, numpy), 8)
        assert numpy.isfinite(gradient).all()
        expected = tensors[name].grad.numpy()
        numpy.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9 * (1 + abs(expected).max()))

        def shifted(step, name=name):
            return evaluate(traced, values | {name: values[name] + step}, numpy)

        steps = 1e-4, 5e-5
        slopes = [numpy.broadcast_to((shifted(step) - shifted(-step)) / (2 * step), 8) for step in steps]
        smooth = abs(slopes[0] - slopes[1]) < 1e-6 * (1 + abs(slopes[1]))
        numpy.testing.assert_allclose(slopes[1][smooth], gradient[smooth], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda a, b: -a * -a, "a * a"),
        (lambda a, b: -a / -a, "a / a"),
        (lambda a, b: -a * -b, "a * b"),
        (lambda a, b: a / -b, "-(a / b)"),
        (lambda a, b: -a * b, "-(a * b)"),
    ],
)
def test_signs_of_products_are_counted(function, text):
    """Each factor's sign counts by itself, also where both factors are one value, as in the derivative of erf(-a)."""
    assert trace(function).text == text


@pytest.mark.parametrize("name", STABLE)
def test_derivatives_are_right_far_away_in_float32(name):
    """Derivatives in float32 are those of torch in float64, also where the obvious formula overflows."""
    traced = trace(STABLE[name])
    z = torch.tensor(FAR, requires_grad=True)
    evaluate(traced, {"x": 1.5, "z": z}, torch).sum().backward()
    for module in (numpy, torch, jax.numpy):
        values = {"x": 1.5, "z": module.asarray(FAR.astype("float32"))}
        with numpy.errstate(under="ignore"):
            gradient = evaluate(gradients(traced, ["z"])["z"], values, module)
            result = evaluate(traced, values, module)
        assert numpy.isfinite(numpy.asarray(result)).all()
        numpy.testing.assert_allclose(numpy.asarray(gradient), z.grad.numpy(), rtol=1e-5, atol=1e-6)
