"""Functions of numbers that the tests of expressions share."""

from __future__ import annotations

import math

import numpy

from cunorm import expression


def gated(x, z, weight):
    return x * weight * expression.silu(z)


# (function, its text, the texts of its gradients from dy), as one would write them by hand.
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


# (the function for tracers, arrays and numbers; the same function for Python's float, by Python's own functions)
PRIMITIVES = {
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


# The obvious formula of each derivative overflows at some of the values FAR.
STABLE = {
    "silu": lambda x, z: x * expression.silu(z),
    "sigmoid": lambda x, z: x * expression.sigmoid(z),
    "tanh": lambda x, z: x * expression.tanh(z),
    "gelu": lambda x, z: x * expression.gelu(z),
    "gelu_tanh": lambda x, z: x * expression.gelu(z, approximate="tanh"),
    "erf": lambda x, z: x * expression.erf(z),
}
FAR = numpy.array([-1000, -100, -89, -88, -30, 0, 30, 88, 89, 100, 1000, -1e4, 1e4])
