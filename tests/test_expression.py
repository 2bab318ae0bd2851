"""Expressions: what is traced is what is computed, differentiated, written for CUDA and read back."""

from __future__ import annotations

import ctypes
import math
import pickle
import re
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import needs_nvrtc

from cunorm import compile, expression
from cunorm.expression import Expression, gradients, parse, substitute, trace
from cunorm.expression_texts import cuda, evaluate
from cunorm.source import SHARED_FACTS

ROOT = Path(__file__).parent.parent


def gated(x, z, weight):
    return x * weight * expression.silu(z)


# Of a function: its text, and those of its gradients from dy, as one would write them by hand.
BY_HAND = [
    (
        lambda xhat, weight, bias: xhat * weight + bias,
        "xhat * weight + bias",
        {"xhat": "dy * weight", "weight": "dy * xhat", "bias": "dy"},
    ),
    (
        lambda xhat, weight, bias: xhat * (1 + weight) + bias,
        "xhat * (1 + weight) + bias",
        {"xhat": "dy * (1 + weight)", "weight": "dy * xhat", "bias": "dy"},
    ),
    (lambda xhat: xhat, "xhat", {"xhat": "dy"}),
    (lambda x, residual: x + residual, "x + residual", {"x": "dy", "residual": "dy"}),
    (lambda x, y: x - y, "x - y", {"x": "dy", "y": "-dy"}),
    (lambda x, gate: x / gate, "x / gate", {"x": "dy / gate", "gate": "-(dy / gate * (x / gate))"}),
    (lambda x: x**2, "x * x", {"x": "dy * x * 2"}),
    (lambda x, z: x * (z > 0), "x * where(z > 0, 1, 0)", {"x": "dy * where(z > 0, 1, 0)", "z": "0"}),
    (lambda x: expression.exp(x), "exp(x)", {"x": "dy * exp(x)"}),
    (lambda x, y: numpy.where(x < y, x, -1.5), "where(x < y, x, -1.5)", {"x": "where(x < y, dy, 0)", "y": "0"}),
]


@pytest.mark.parametrize(("function", "text", "derivatives"), BY_HAND, ids=[text for _, text, _ in BY_HAND])
def test_texts_are_those_one_would_write_by_hand(function, text, derivatives):
    traced = trace(function)
    assert traced.text == text
    found = gradients(traced, traced.names, seed="dy")
    assert {name: derivative.text for name, derivative in found.items()} == derivatives
    assert all(derivative.names == (*traced.names, "dy") for derivative in found.values())


def test_without_a_seed_a_derivative_is_multiplied_by_nothing():
    found = gradients(trace(lambda xhat, weight, bias: xhat * weight + bias), ["xhat", "weight", "bias"])
    assert [derivative.text for derivative in found.values()] == ["weight", "xhat", "1"]
    assert found["bias"].names == ("xhat", "weight", "bias")


def spelled_otherwise(x, scale):
    factor = scale + 0.0
    unused = numpy.exp(x)  # noqa: F841
    return numpy.add(numpy.multiply(x, factor), -1 * -numpy.tanh(factor)) * 1


# Functions that compute the same, however they are written.
EQUAL = [
    (lambda x, scale: x * scale + numpy.tanh(scale), spelled_otherwise),
    (lambda x: x**3, lambda x: x * x * x),
    (lambda x: x**4, lambda x: (x * x) * (x * x)),
    (lambda x: x**-2, lambda x: 1 / (x * x)),
    (lambda x: x**0.5, lambda x: numpy.sqrt(x)),
    (lambda x: x**-0.5, lambda x: expression.rsqrt(x)),
    (lambda x: x**1 + x**0, lambda x: x + 1),
    (lambda x: numpy.square(x), lambda x: x * x),
    (lambda x: x + numpy.float32(0.5), lambda x: x + 0.5),
    (lambda x: numpy.less(x, 2), lambda x: numpy.where(x < 2, 1, 0)),
    (lambda x: -x * 2 - x, lambda x: -(x * 2 + x)),
    (lambda x: x - -x, lambda x: x + x),
    (lambda x: x + -0.0 - 0.0, lambda x: 0 + x),
    (lambda x: numpy.float64(2) - x, lambda x: 2 - x),
    (lambda x: numpy.where(x, x, 1), lambda x: expression.where(x != 0, x, 1)),
    (lambda x: abs(x), lambda x: numpy.abs(x)),
    (lambda x: numpy.where(numpy.float64(2) < x, x, 1), lambda x: numpy.where(numpy.less(2, x), x, 1)),
    (lambda x: numpy.float32(1) / x, lambda x: x**-1),
]


@pytest.mark.parametrize("pair", EQUAL)
def test_equal_functions_are_equal_expressions(pair):
    first, second = map(trace, pair)
    assert first == second
    assert hash(first) == hash(second)
    assert first.text == second.text


def test_other_functions_and_other_names_are_other_expressions():
    different = [
        trace(lambda x, y: x - y),
        trace(lambda x, y: y - x),
        trace(lambda y, x: x - y),
        trace(lambda x, y: x * 0.0),
        trace(lambda x, y: x * -0.0),
    ]
    assert len(set(different)) == len(different)


def test_uses_are_the_names_that_occur():
    traced = trace(lambda x, unused, weight: x * weight * 1)
    assert (traced.names, traced.uses) == (("x", "unused", "weight"), ("x", "weight"))


def test_what_is_shared_is_written_once():
    def repeated(x):
        for _ in range(200):
            x = x * x
        return x

    assert len(trace(repeated).text) < 10_000
    assert trace(lambda a, b, c: a * b * c + a * b).text == "t0 = a * b; t0 * c + t0"
    assert trace(lambda a, b: a * b / (a + b) - a * b * (a + b)).text == "t0 = a * b; t1 = a + b; t0 / t1 - t0 * t1"


def test_an_expression_is_a_value():
    traced = trace(gated)
    assert pickle.loads(pickle.dumps(traced)) == traced
    assert eval(repr(traced)) == traced
    with pytest.raises(AttributeError):
        traced.names = ()


ROUND_TRIPS = [
    *(function for function, _, _ in BY_HAND),
    *(function for pair in EQUAL for function in pair),
    gated,
    lambda x: expression.gelu(x) - (x - (1e-30 - x)) / (x / (3e300 * x)),
    lambda x, y: -(x + y) * -(x * y) / -abs(-x),
    lambda x, y: -(-(x * y) * 3) - 0.1 * -y,
    lambda x: x / 0,
    lambda x: x * -0.0 * 5e-324 * 2**60,
    lambda x: expression.where(abs(x) > 1, (x < 2) * (x < 2), 1),
    lambda x: sum((x / (1 + n) for n in range(1000)), x),
    lambda x: 7,
]


@pytest.mark.parametrize("function", ROUND_TRIPS)
def test_a_text_says_all(function):
    traced = trace(function)
    for one in (traced, *gradients(traced, traced.names, seed="dy").values()):
        assert parse(one.text, one.names) == one


def test_a_text_may_be_written_by_hand():
    assert parse(" t0=x*y ;t1 = t0+1.50; t1*(t0)", ["x", "y"]) == trace(lambda x, y: (x * y + 1.5) * (x * y))


NO_TEXTS = [  # (text, position, what the message says)
    ("__import__('os')", 0, "no function '__import__'"),
    ("x; }", 1, "the end must stand here, not ';'"),
    ("x }", 2, "no such symbol"),
    ("x + eval(x)", 4, "there is no function 'eval'"),
    ("x + z", 4, "there is no name 'z'"),
    ("x.real", 1, "no such symbol"),
    ("x ** 2", 3, "a number, a name or '(' must stand here, not '*'"),
    ("exp(x, x)", 5, "')' must stand here"),
    ("where(x, x)", 10, "',' must stand here"),
    ("x +", 3, "not 'the end'"),
    ("", 0, "not 'the end'"),
    ("(x", 2, "')' must stand here"),
    ("x < x < x", 6, "the end must stand here"),
    ("1e999 * x", 0, "a constant must be finite"),
    ("t1 = x; t1", 0, "there is no name 't1'"),
    ("t0 = x; t0 = x; t0", 11, "the end must stand here"),
    ("x = x", 2, "the end must stand here"),
    ("x // x", 3, "'/'"),
    ("--x", 1, "'-'"),
    ("x\N{GREEK SMALL LETTER ALPHA}", 1, "no such symbol"),
    ("1x", 1, "the end must stand here"),
    ("(" * 1000 + "x" + ")" * 1000, 40, "nested too deep"),
    ("exp(" * 1000 + "x" + ")" * 1000, 160, "nested too deep"),
    ('x /* " */', 3, "a number, a name or '(' must stand here, not '*'"),
]


@pytest.mark.parametrize(("text", "position", "message"), NO_TEXTS, ids=[text[:20] for text, *_ in NO_TEXTS])
def test_no_other_text_is_read(text, position, message):
    with pytest.raises(ValueError, match=f"wrong at position {position}: .*{re.escape(message)}"):
        parse(text, ["x"])


def test_a_text_must_be_a_string():
    with pytest.raises(TypeError, match="must be str; got bytes"):
        parse(b"x", ["x"])


NAMES = [
    "float",
    "template",
    "lambda",
    "Compute",
    "t0",
    "t12",
    "_x",
    "a__b",
    "\N{GREEK SMALL LETTER ALPHA}",
    "a b",
    "",
    "1",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_must_suit_python_and_a_kernel(name):
    with pytest.raises(ValueError, match="a parameter's name must"):
        parse("1", [name])
    with pytest.raises(ValueError, match="a parameter's name must"):
        gradients(parse("x", ["x"]), ["x"], seed=name)


def test_names_must_differ():
    with pytest.raises(ValueError, match="names must differ; got x, x"):
        parse("x", ["x", "x"])
    with pytest.raises(ValueError, match="names must differ; got x, dy, dy"):
        gradients(trace(lambda x, dy: x * dy), ["x"], seed="dy")


def with_branch(x):
    return x if x > 0 else 0 * x


# What cannot be traced: the function, the error, what the message says.
REFUSED = [
    (with_branch, TypeError, "'with_branch' .*test_expression.py:[0-9]+.*truth.*: use where, minimum or maximum"),
    (lambda x: max(x, 0), TypeError, "use where, minimum or maximum"),
    (lambda x: x > 0 and x, TypeError, "use where"),
    (lambda x: math.exp(x), TypeError, r"'<lambda>' .*functions of math.*An expression is made of"),
    (lambda x: float(x), TypeError, "float, int and functions of math cannot be traced"),
    (lambda x: numpy.asarray(x), TypeError, "cannot be traced"),
    (lambda x: x[0], TypeError, "an index cannot be traced"),
    (lambda x: sum(one for one in x), TypeError, "an index cannot be traced"),
    (lambda x: x.mean(), TypeError, r"\.mean cannot be traced: an expression is of single elements. An expression is"),
    (lambda x: numpy.mean(x), TypeError, "numpy.mean cannot be traced"),
    (lambda x: numpy.add.reduce(x), TypeError, "numpy.add.reduce cannot be traced"),
    (lambda x: numpy.add(x, 1, where=True), TypeError, "numpy.add with where cannot be traced"),
    (lambda x: numpy.sin(x), TypeError, "numpy.sin cannot be traced"),
    (lambda x: x % 2, TypeError, "unsupported operand.*An expression is made of"),
    (lambda x: torch.exp(x), TypeError, "must be Tensor, not Tracer.*An expression is made of"),
    (lambda x: jax.numpy.exp(x), TypeError, "An expression is made of"),
    (lambda x: x * numpy.ones(3), TypeError, "got numpy.ndarray: pass it as an operand .a parameter of the function"),
    (lambda x: numpy.ones(3) * x, TypeError, "got numpy.ndarray: pass it as an operand"),
    (lambda x: numpy.where(x > 0, numpy.ones(3), x), TypeError, "got numpy.ndarray: pass it as an operand"),
    (lambda x: x * torch.ones(3), TypeError, "got torch.Tensor: pass it as an operand"),
    (lambda x: torch.ones(3) - x, TypeError, "got torch.Tensor: pass it as an operand"),
    (lambda x: jax.numpy.ones(3) * x, TypeError, "got jaxlib.*: pass it as an operand"),
    (lambda x: expression.maximum(x, "0"), TypeError, "got str"),
    (lambda x: trace(lambda y: x * y), TypeError, "a parameter of another traced function"),
    (lambda x: None, TypeError, "must return one value made of its parameters; got NoneType"),
    (lambda x: (x, x), TypeError, "must return one value made of its parameters; got tuple"),
    (lambda *x: 1, TypeError, r"each parameter must be one operand without a default; got \*x"),
    (lambda **x: 1, TypeError, r"each parameter must be one operand without a default; got \*\*x"),
    (lambda x, eps=1e-5: x, TypeError, "each parameter must be one operand without a default; got eps=1e-05"),
    (lambda *, x: x, TypeError, "each parameter must be one operand"),
    (3, TypeError, "not a callable"),
    (
        lambda x: x**2.5,
        ValueError,
        r"a power must be an integer from -4 to 4, or 0.5 or -0.5; got 2.5: use exp and log",
    ),
    (lambda x: x**5, ValueError, "a power must be .* got 5"),
    (lambda x: x**x, ValueError, "a power must be .* got a traced value"),
    (lambda x: 2**x, ValueError, r"a power must be a number; got 2 \*\* a traced value"),
    (lambda x: x * math.inf, ValueError, "'<lambda>' .*a constant must be finite; got inf"),
    (lambda x: x * numpy.float32("nan"), ValueError, "a constant must be finite; got nan"),
    (lambda x: x * 10**400, ValueError, "a constant must be finite; got 1000"),
    (lambda float: float, ValueError, "'<lambda>' .*a parameter's name must .*got 'float': rename it"),
    (lambda t0: t0, ValueError, "got 't0'"),
    (lambda x: expression.gelu(x, approximate="sigmoid"), ValueError, "approximate must be 'none' or 'tanh'"),
]


@pytest.mark.parametrize(("function", "error", "message"), REFUSED)
def test_what_cannot_be_traced_is_named(function, error, message):
    with pytest.raises(error, match=rf"^cunorm: the prologue {message}" if message[0] == "'" else message) as caught:
        trace(function, role="prologue")
    assert str(caught.value).startswith("cunorm: the prologue ")


def test_other_errors_of_a_function_are_its_own():
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: x * (1 / 0))


def test_substitute_replaces_all_at_once():
    outer = trace(lambda x, y, weight: (x - y) * weight)
    swapped = substitute(outer, {"x": trace(lambda y: y), "y": trace(lambda x: x * 2)})
    assert (swapped.text, swapped.names) == ("(y - x * 2) * weight", ("y", "x", "weight"))
    with pytest.raises(ValueError, match=r"must be one of .*; got 'z'"):
        substitute(outer, {"z": outer})


def test_gradients_are_by_known_names():
    with pytest.raises(ValueError, match="got 'z'"):
        gradients(trace(lambda x: x), ["z"])


# Functions in float64 by each module, against Python's own.

PRIMITIVES = {  # (the function over tracers, arrays and numbers; the same of Python's numbers)
    "abs": (abs, abs),
    "erf": (expression.erf, math.erf),
    "exp": (expression.exp, math.exp),
    "log": (lambda x: expression.log(1 + x * x), lambda x: math.log(1 + x * x)),
    "sqrt": (lambda x: expression.sqrt(1 + x * x), lambda x: math.sqrt(1 + x * x)),
    "rsqrt": (lambda x: expression.rsqrt(1 + x * x), lambda x: 1 / math.sqrt(1 + x * x)),
    "tanh": (expression.tanh, math.tanh),
    "sigmoid": (expression.sigmoid, lambda x: 1 / (1 + math.exp(-x))),
    "silu": (expression.silu, lambda x: x / (1 + math.exp(-x))),
    "gelu": (lambda x: expression.gelu(x), lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2))),
    "gelu_tanh": (
        lambda x: expression.gelu(x, approximate="tanh"),
        lambda x: x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "minimum": (lambda x: expression.minimum(x, 0.5), lambda x: min(x, 0.5)),
    "maximum": (lambda x: expression.maximum(0.5, x), lambda x: max(0.5, x)),
    "where": (lambda x: expression.where(x <= -0.5, x * x, 2), lambda x: x * x if x <= -0.5 else 2.0),
    "power": (lambda x: (2 + x * x) ** -3, lambda x: (2 + x * x) ** -3),
    "comparisons": (
        lambda x: (x > 1) + 2 * (x >= 1) + 4 * (x == 1) + 8 * (x != 1) + 16 * (x < 1),
        lambda x: (x > 1) + 2 * (x >= 1) + 4 * (x == 1) + 8 * (x != 1) + 16 * (x < 1),
    ),
}
POINTS = numpy.concatenate([numpy.linspace(-6, 6, 49), [1.1, -2.3, 1e-9, -1e-9, 1e-300]])


@pytest.mark.parametrize("module", [numpy, torch, jax.numpy], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_functions_are_those_of_mathematics(name, module):
    function, of_numbers = PRIMITIVES[name]
    expected = [of_numbers(float(x)) for x in POINTS]
    with jax.enable_x64(True):
        found = evaluate(trace(function), {"x": module.asarray(POINTS)}, module)
        assert str(found.dtype).endswith("float64")
    numpy.testing.assert_allclose(numpy.asarray(found), expected, rtol=2e-15, atol=2e-15)


@pytest.mark.parametrize("name", sorted(PRIMITIVES.keys() - {"where", "minimum", "maximum"}))
def test_functions_take_arrays_and_numbers(name):
    function, of_numbers = PRIMITIVES[name]
    numpy.testing.assert_allclose(function(POINTS), list(map(of_numbers, POINTS)), rtol=2e-15, atol=2e-15)
    numpy.testing.assert_allclose(function(0.75), of_numbers(0.75), rtol=2e-15)
    assert numpy.asarray(function(numpy.float32([0.5, 1]))).dtype in ("float32", "int64")


@pytest.mark.parametrize("module", [numpy, torch, jax.numpy], ids=lambda module: module.__name__)
def test_constants_and_numbers_do_not_widen(module):
    traced = trace(lambda x, factor: expression.where(x > 0, 0.1, expression.minimum(0.3, factor)) * x + 2)
    found = evaluate(traced, {"x": module.asarray([1.0, -1.0], dtype=module.float32), "factor": 0.2}, module)
    assert str(found.dtype).endswith("float32")
    numpy.testing.assert_allclose(numpy.asarray(found), [2.1, 1.8], rtol=1e-6)


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
            found = numpy.broadcast_to(evaluate(derivative, arrays, numpy), 5)
            numpy.testing.assert_array_equal(found[:4], tensors[name].grad.numpy()[:4])
    # Where one is NaN, torch's maximum gives the whole gradient to both.
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
    """The function of `leaves` that a plan says: a leaf's number, or a function and plans of its arguments."""
    if isinstance(plan, int | float):
        return leaves[plan] if isinstance(plan, int) else plan
    function, *arguments = plan
    return function(*(build(argument, leaves) for argument in arguments))


PLANS = st.recursive(
    st.integers(0, 2) | st.floats(-2, 2, width=16),
    lambda plans: st.tuples(st.sampled_from(UNARY), plans) | st.tuples(st.sampled_from(BINARY), plans, plans),
    max_leaves=6,
)


def traced_plan(plan) -> Expression:
    return trace(lambda a, b, c: build(plan, (a, b, c)) + 0 * a)


@settings(deadline=None, max_examples=150)
@given(plan=PLANS, seed=st.integers(0, 2**32 - 1))
def test_any_expression_is_read_back_and_differentiated(plan, seed):
    """Against finite differences; where a step is across a corner, or too large, one of the points will do."""
    traced = traced_plan(plan)
    generator = numpy.random.default_rng(seed)
    values = dict(zip("abc", generator.uniform(-1.5, 1.5, (3, 8)), strict=True))
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    (evaluate(traced, tensors, torch) + 0 * sum(tensors.values())).sum().backward()
    for name, derivative in gradients(traced, traced.names).items():
        assert parse(derivative.text, derivative.names) == derivative
        found = numpy.broadcast_to(evaluate(derivative, values, numpy), 8)
        assert numpy.isfinite(found).all()
        expected = tensors[name].grad.numpy()
        numpy.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * (1 + abs(expected).max()))

        def shifted(step, name=name):
            return evaluate(traced, values | {name: values[name] + step}, numpy)

        steps = 1e-4, 5e-5
        slopes = [numpy.broadcast_to((shifted(step) - shifted(-step)) / (2 * step), 8) for step in steps]
        smooth = abs(slopes[0] - slopes[1]) < 1e-6 * (1 + abs(slopes[1]))
        numpy.testing.assert_allclose(slopes[1][smooth], found[smooth], rtol=2e-5, atol=2e-5)


STABLE = {
    "silu": lambda x, z: x * expression.silu(z),
    "sigmoid": lambda x, z: x * expression.sigmoid(z),
    "tanh": lambda x, z: x * expression.tanh(z),
    "gelu": lambda x, z: x * expression.gelu(z),
    "gelu_tanh": lambda x, z: x * expression.gelu(z, approximate="tanh"),
    "erf": lambda x, z: x * expression.erf(z),
}
FAR = numpy.array([-1000, -100, -89, -88, -30, 0, 30, 88, 89, 100, 1000, -1e4, 1e4])


@pytest.mark.parametrize("name", STABLE)
def test_derivatives_are_right_far_away_in_float32(name):
    """Within what float32 can say of torch's in float64."""
    traced = trace(STABLE[name])
    z = torch.tensor(FAR, requires_grad=True)
    evaluate(traced, {"x": 1.5, "z": z}, torch).sum().backward()
    for module in (numpy, torch, jax.numpy):
        values = {"x": 1.5, "z": module.asarray(FAR.astype("float32"))}
        with numpy.errstate(under="ignore"):
            found = evaluate(gradients(traced, ["z"])["z"], values, module)
            result = evaluate(traced, values, module)
        assert numpy.isfinite(numpy.asarray(result)).all()
        numpy.testing.assert_allclose(numpy.asarray(found), z.grad.numpy(), rtol=1e-5, atol=1e-6)


# C++.


def test_products_are_fused_with_what_they_are_added_to():
    def last(function):
        return [line.partition(" = ")[2] for line in cuda({"r": trace(function)}, indent="").splitlines()][-2]

    assert last(lambda a, b, c: a * b + c) == "cunorm::multiply_add(a, b, c);"
    assert last(lambda a, b, c: c + a * b) == "cunorm::multiply_add(a, b, c);"
    assert last(lambda a, b, c: a * b - c) == "cunorm::multiply_add(a, b, -c);"
    assert last(lambda a, b, c: c - a * b) == "cunorm::multiply_add(-a, b, c);"
    assert last(lambda a, b, c: -(a * b) + c) == "cunorm::multiply_add(-a, b, c);"
    assert last(lambda a, b, c: a * b + b * c) == "cunorm::multiply_add(b, c, t0);"
    assert last(lambda a, b, c: a * b - b * c) == "cunorm::multiply_add(-b, c, t0);"
    assert last(lambda a, b: a * 2.5 + b) == "cunorm::multiply_add(a, static_cast<Compute>(0x1.4p+1), b);"


def test_statements_compute_once_what_several_results_need():
    traced = trace(lambda x, z: x * expression.sigmoid(z))
    results = {"y": traced, "dz": gradients(traced, ["z"], seed="dy")["z"]}
    text = cuda(results, compute="double", indent="")
    assert text.count("cunorm::sigmoid(z)") == 1
    assert text.splitlines()[-2:] == ["const double y = t1;", "const double dz = t5;"]
    assert cuda({"y": traced}) == (
        "  const Compute t0 = cunorm::sigmoid(z);\n  const Compute t1 = x * t0;\n  const Compute y = t1;"
    )


def test_a_result_has_a_name_of_its_own():
    with pytest.raises(ValueError, match=r"a result must not have the name .*; got 'x'"):
        cuda({"x": trace(lambda x: -x)})
    with pytest.raises(ValueError, match="got 't1'"):
        cuda({"t1": trace(lambda x: -x)})


def without_directives(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith(("#include", "#pragma once")))


def functions_text() -> str:
    return without_directives((ROOT / "kernels_cu" / "functions.cuh").read_text())


IN_CPP = [
    *(function for function, _, _ in BY_HAND if function is not None),
    gated,
    *STABLE.values(),
    *(function for function, _ in PRIMITIVES.values()),
    lambda a, b, c: a * b - b * c + abs(c * a) - 1 / (1 + a * a),
    lambda a, b: -(a * b) - b,
    lambda a, b: expression.maximum(a, b) * expression.minimum(a, 0.1),
]


def with_gradients(function) -> dict[str, Expression]:
    traced = trace(function)
    found = gradients(traced, traced.names, seed="seed")
    return {"result": traced} | {f"gradient_{name}": derivative for name, derivative in found.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """All of IN_CPP, compiled once with the stand-in for platform.cuh."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    stand_in = ROOT / "tests" / "cpu"
    parts = [SHARED_FACTS, '#include "platform.cuh"\n', functions_text()]
    for number, function in enumerate(IN_CPP):
        results = with_gradients(function)
        names = [*results["result"].names, "seed"]
        loads = "".join(f"    [[maybe_unused]] const Compute {name} = *values++;\n" for name in names)
        stores = "".join(f"    *results++ = {name};\n" for name in results)
        parts.append(
            f"template <class Compute>\nvoid compute_{number}(const Compute* values, Compute* results, int count) {{\n"
            f"  while (count--) {{\n{loads}{cuda(results, indent='    ')}\n{stores}  }}\n}}\n"
        )
        parts += [
            f'extern "C" void {kind}_{number}(const {kind}* values, {kind}* results, int count) '
            f"{{ compute_{number}(values, results, count); }}\n"
            for kind in ("float", "double")
        ]
    folder = tmp_path_factory.mktemp("expressions")
    (folder / "all.cpp").write_text("".join(parts))
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{stand_in}"]
    built = subprocess.run(
        ["g++", *options, "all.cpp", "-o", "all.so"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(len(IN_CPP)))
def test_cpp_computes_what_numpy_does(compiled, number, dtype):
    """To the rounding of each operation; fused ones are rounded less."""
    results = with_gradients(IN_CPP[number])
    names = [*results["result"].names, "seed"]
    points = numpy.random.default_rng(0).uniform(-3, 3, (64, len(names)))
    points[:13, 0] = FAR if IN_CPP[number] in STABLE.values() else points[:13, 0]
    points[13:16] = points[13:16, :1]  # ties
    points = points.astype(dtype)
    found = numpy.empty((64, len(results)), dtype)
    call = getattr(compiled, f"{'float' if dtype == 'float32' else 'double'}_{number}")
    call(points.ctypes.data_as(ctypes.c_void_p), found.ctypes.data_as(ctypes.c_void_p), 64)
    wide = {name: points[:, column].astype("float64") for column, name in enumerate(names)}
    for column, one in enumerate(results.values()):
        expected = numpy.broadcast_to(evaluate(one, wide, numpy), 64)
        precision = numpy.finfo(dtype).eps
        scale = numpy.maximum(abs(expected), 1 + abs(expected[13:]).max())
        assert (abs(found[:, column] - expected) <= 32 * precision * scale).all(), one.text


def test_nan_goes_through_minimum_and_maximum_in_cpp(compiled):
    number = len(IN_CPP) - 1
    for a, b in ((math.nan, 1.0), (1.0, math.nan)):
        values, results = (ctypes.c_double * 3)(a, b, 1.0), (ctypes.c_double * 3)()
        compiled[f"double_{number}"](values, results, 1)
        assert math.isnan(results[0])


@needs_nvrtc
@pytest.mark.parametrize("compute", ["float", "double"])
def test_nvrtc_compiles_the_statements(compute):
    platform = ROOT / "kernels_cu" / "platform.cuh"
    text = SHARED_FACTS + without_directives(platform.read_text()) + functions_text()
    for number, function in enumerate(IN_CPP):
        results = with_gradients(function)
        names = [*results["result"].names, "seed"]
        loads = "".join(f"  const Compute {name} = *values++;\n" for name in names)
        stores = "".join(f"  *results++ = {name};\n" for name in results)
        text += (
            f'extern "C" __global__ void compute_{number}(const {compute}* values, {compute}* results) {{\n'
            f"  using Compute = {compute};\n{loads}{cuda(results)}\n{stores}}}\n"
        )
    ptx = compile.compile_ptx(text, "expressions", 90)
    assert ptx.count(".entry") == len(IN_CPP)


@pytest.mark.parametrize("function", [lambda xhat, scale, shift: xhat * (1 + scale) + shift, gated])
def test_tracing_with_derivative_and_text_takes_less_than_a_millisecond(function):
    def seconds() -> float:
        start = time.perf_counter()
        traced = trace(function)
        results = {"y": traced} | {
            f"d_{name}": derivative for name, derivative in gradients(traced, traced.names, seed="dy").items()
        }
        cuda(results)
        assert all(one.text for one in results.values())
        return time.perf_counter() - start

    assert any(seconds() < 1e-3 for _ in range(500))  # the best: other tests run beside it
