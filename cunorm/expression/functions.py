"""The functions that an expression may use, for traced values and for numbers and arrays of NumPy."""

from __future__ import annotations

import math
from typing import Any

from .tracing import Tracer


def _call(function: str, *operands: Any) -> Any:
    for operand in operands:
        if isinstance(operand, Tracer):
            return operand.apply(function, *operands)
    return (_OF_ARRAYS.get(function) or getattr(_numpy(), function))(*operands)


def _numpy() -> Any:
    """Import NumPy when it is needed: `import cunorm` takes a third of the time without it."""
    import numpy

    return numpy


def _sigmoid_of_array(x: Any) -> Any:
    numpy = _numpy()
    exponential = numpy.exp(-numpy.abs(x))  # which cannot overflow
    return numpy.where(numpy.greater_equal(x, 0), 1, exponential) / (1 + exponential)


def _erf_of_array(x: Any) -> Any:
    numpy = _numpy()
    dtype = numpy.result_type(numpy.asarray(x), numpy.float16)
    return numpy.vectorize(math.erf, otypes=[float])(x).astype(dtype)[()]


_OF_ARRAYS = {
    "erf": _erf_of_array,
    "rsqrt": lambda x: 1 / _numpy().sqrt(x),
    "sigmoid": _sigmoid_of_array,
    "where": lambda condition, x, y: _numpy().where(condition, x, y)[()],  # for numbers it returns a number
}


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where the condition holds, else y.

    Both are computed. An infinite derivative of the one that is not chosen makes the gradient NaN.
    """
    return _call("where", condition, x, y)


def exp(x: Any) -> Any:
    """Return e to the power of x."""
    return _call("exp", x)


def log(x: Any) -> Any:
    """Return the natural logarithm."""
    return _call("log", x)


def sqrt(x: Any) -> Any:
    """Return the square root."""
    return _call("sqrt", x)


def rsqrt(x: Any) -> Any:
    """Return 1 / sqrt(x)."""
    return _call("rsqrt", x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return _call("tanh", x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return _call("sigmoid", x)


def erf(x: Any) -> Any:
    """Return the error function of x."""
    return _call("erf", x)


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller number, or NaN if one is NaN. Equal ones get half the gradient each, as in torch."""
    return _call("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger number, or NaN if one is NaN. Equal ones get half the gradient each, as in torch."""
    return _call("maximum", x, y)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """Return x times the normal distribution's probability below x.

    With `approximate="tanh"` it is torch's approximation.
    """
    if approximate == "none":
        return x * (0.5 + 0.5 * erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        # 1 + tanh(z) is 2 * sigmoid(2 * z), which does not cancel where x is far below 0.
        return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x)))
    raise ValueError(f"gelu: approximate must be 'none' or 'tanh'; got {approximate!r}.")
