"""Expressions: tracing, texts that are read back, derivatives, and what is refused."""

from __future__ import annotations

import math
import pickle
import re
import time

import jax
import jax.numpy
import numpy
import pytest
import torch
from expressions import BY_HAND, gated

from cunorm import expression
from cunorm.expression import gradients, parse, substitute, trace
from cunorm.expression.texts import evaluate


@pytest.mark.parametrize(("function", "text", "derivatives"), BY_HAND, ids=[text for _, text, _ in BY_HAND])
def test_texts_are_those_one_would_write_by_hand(function, text, derivatives):
    traced = trace(function)
    assert traced.text == text
    by_name = gradients(traced, traced.names, seed="dy")
    assert {name: derivative.text for name, derivative in by_name.items()} == derivatives
    assert all(derivative.names == (*traced.names, "dy") for derivative in by_name.values())


def test_without_a_seed_a_derivative_is_multiplied_by_nothing():
    by_name = gradients(trace(lambda xhat, weight, bias: xhat * weight + bias), ["xhat", "weight", "bias"])
    assert [derivative.text for derivative in by_name.values()] == ["weight", "xhat", "1"]
    assert by_name["bias"].names == ("xhat", "weight", "bias")


def spelled_otherwise(x, scale):
    factor = scale + 0.0
    unused = numpy.exp(x)  # noqa: F841
    return numpy.add(numpy.multiply(x, factor), -1 * -numpy.tanh(factor)) * 1


# Pairs of functions that compute the same, but are written differently.
EQUAL = [
    (lambda x, scale: x * scale + numpy.tanh(scale), spelled_otherwise),
    (lambda x: x**3, lambda x: x * x * x),
    (lambda x: x**4, lambda x: (x * x) * (x * x)),
    (lambda x: x**-2, lambda x: 1 / (x * x)),
    (lambda x: x**0.5, lambda x: numpy.sqrt(x)),
    (lambda x: x**-0.5, lambda x: expression.rsqrt(x)),
    (lambda x: x**1 + x**0, lambda x: x + 1),
    (lambda x: numpy.square(x), lambda x: x * x),
    (lambda x: numpy.power(x, 3) + numpy.power(x, -0.5), lambda x: x * x * x + expression.rsqrt(x)),
    (lambda x: numpy.clip(x, -1, 2), lambda x: numpy.minimum(numpy.maximum(x, -1), 2)),
    (lambda x: numpy.clip(x, None, x * x), lambda x: expression.minimum(x, x * x)),
    (lambda x: numpy.clip(0.5, x, None), lambda x: expression.maximum(0.5, x)),
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


def repeated(step):
    """Return a function that traces a given number of steps, one after the other."""

    def traced(times):
        def function(x, w):
            y = x
            for _ in range(times):
                y = step(y, w)
            return y

        return trace(function)

    return traced


LONG = {
    "products": repeated(lambda y, w: y * w),
    "negative products": repeated(lambda y, w: -(y * w)),
    "squares": repeated(lambda y, w: y * y * w),
    "quotients": repeated(lambda y, w: y / w),
    "multiply-adds": repeated(lambda y, w: y * w + 1),
    "functions": repeated(lambda y, w: expression.tanh(y * w)),
    "larger ones": repeated(lambda y, w: expression.maximum(y, y * w)),
}


@pytest.mark.slow
@pytest.mark.parametrize("traced_steps", LONG.values(), ids=LONG)
def test_a_long_expression_has_texts_and_derivatives_in_proportion(traced_steps):
    lengths = {}
    for times in (500, 1000):
        traced = traced_steps(times)
        formulas = [traced, *gradients(traced, traced.names, seed="dy").values()]
        assert all(parse(formula.text, formula.names) == formula for formula in formulas)
        lengths[times] = [(len(formula.steps), len(formula.text)) for formula in formulas]
    for short, long in zip(*lengths.values(), strict=True):
        assert all(after < 2.2 * before for before, after in zip(short, long, strict=True))


def test_the_derivative_of_a_long_product_is_right():
    """The derivative of x w^1000 by w is 1000 x w^999, though so many factors are not taken apart."""
    by_name = gradients(LONG["products"](1000), ["x", "w"], seed="dy")
    values = {"x": numpy.float64(3), "w": numpy.float64(1.001), "dy": numpy.float64(2)}
    assert evaluate(by_name["x"], values, numpy) == pytest.approx(2 * 1.001**1000, rel=1e-12)
    assert evaluate(by_name["w"], values, numpy) == pytest.approx(2 * 3 * 1000 * 1.001**999, rel=1e-12)


def test_a_text_is_read_once():
    """A text with as many symbols takes about as long if its names are a thousand times longer."""

    def seconds(name):
        start = time.thread_time()
        parse(name + f" + {name}" * 2000, [name])
        return time.thread_time() - start

    assert min(seconds("x" * 1000) for _ in range(2)) < 8 * min(seconds("x") for _ in range(3))


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
    for formula in (traced, *gradients(traced, traced.names, seed="dy").values()):
        assert parse(formula.text, formula.names) == formula


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
    "lambda",
    "t0",
    "t12",
    "\N{GREEK SMALL LETTER ALPHA}",
    "a b",
    "",
    "1",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_must_suit_python_and_a_text(name):
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


# Functions that cannot be traced: (function, error, what the message says).
REFUSED = [
    (with_branch, TypeError, "'with_branch' .*test_expression.py:[0-9]+.*truth.*: use where, minimum or maximum"),
    (lambda x: max(x, 0), TypeError, "use where, minimum or maximum"),
    (lambda x: x > 0 and x, TypeError, "use where"),
    (
        lambda x: math.exp(x),
        TypeError,
        r"'<lambda>' .*functions of math.*traced\. help\(cunorm\.expression\) says what",
    ),
    (lambda x: float(x), TypeError, "float, int and functions of math cannot be traced"),
    (lambda x: numpy.asarray(x), TypeError, "cannot be traced"),
    (lambda x: x[0], TypeError, "an index cannot be traced"),
    (lambda x: sum(element for element in x), TypeError, "an index cannot be traced"),
    (lambda x: x.mean(), TypeError, r"\.mean cannot be traced: a traced value is no array"),
    (lambda x: x.clip(0, 1), TypeError, r"\.clip cannot be traced: use numpy.clip"),
    (lambda x: numpy.mean(x), TypeError, r"numpy.mean cannot be traced\."),
    (lambda x: numpy.clip(x, min=0), TypeError, "numpy.clip with min cannot be traced"),
    (lambda x: numpy.add.reduce(x), TypeError, "numpy.add.reduce cannot be traced"),
    (lambda x: numpy.add(x, 1, where=True), TypeError, "numpy.add with where cannot be traced"),
    (lambda x: numpy.sin(x), TypeError, "numpy.sin cannot be traced"),
    (lambda x: x % 2, TypeError, "the operator % cannot be traced: nothing in an expression rounds"),
    (lambda x: 7 // x, TypeError, "the operator // cannot be traced: nothing in an expression rounds"),
    (lambda x: divmod(x, 2), TypeError, "divmod cannot be traced: nothing in an expression rounds"),
    (lambda x: round(x), TypeError, "round cannot be traced: nothing in an expression rounds"),
    (lambda x: numpy.floor(x), TypeError, "numpy.floor cannot be traced: nothing in an expression rounds"),
    (lambda x: (x > 0) & (x < 1), TypeError, r"the operator & cannot be traced: of conditions a \* b is and"),
    (lambda x: (x > 0) | (x < 1), TypeError, r"the operator \| cannot be traced: .* maximum\(a, b\) is or"),
    (lambda x: True ^ (x < 1), TypeError, r"the operator \^ cannot be traced: of conditions"),
    (lambda x: ~(x < 1), TypeError, "the operator ~ cannot be traced: .* 1 - a is not"),
    (lambda x: numpy.logical_and(x < 1, x), TypeError, "numpy.logical_and cannot be traced: of conditions"),
    (lambda x: x << 1, TypeError, "the operator << cannot be traced: multiply"),
    (lambda x: x @ x, TypeError, "the operator @ cannot be traced: an expression is of single elements"),
    (lambda x: numpy.power(x, 9), ValueError, "a power must be an integer from -4 to 4, .* got 9: use exp and log"),
    (lambda x: numpy.power(2, x), ValueError, r"a power must be a number; got 2 \*\* a traced value"),
    (lambda x: torch.exp(x), TypeError, r"must be Tensor, not traced value\. help\(cunorm.expression\)"),
    (lambda x: jax.numpy.exp(x), TypeError, r"\. help\(cunorm.expression\)"),
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
    (lambda t0: t0, ValueError, "'<lambda>' .*a parameter's name must .*got 't0': rename it"),
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
