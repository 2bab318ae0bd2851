"""Elementwise functions as values: traced from Python, written as text, read back, differentiated.

A prologue or an epilogue is a Python function of numbers. `trace` calls it once with tracers, which record what is done
to them as a list of steps (value.py). A kernel is identified by the canonical text of that list, not by the Python
function, and `parse` reads the text back (grammar.py). texts.py writes an expression for CUDA and evaluates it by
NumPy, torch or JAX.

What such a function may use:

- its parameters, and numbers that it captures, which are constants;
- + - * /, ** with a power from -4 to 4 or of 0.5 or -0.5, abs, and comparisons, which count as 1 or 0;
- of NumPy exp, log, sqrt, tanh, square, power (as **), minimum, maximum, clip and where;
- of this module where, exp, log, sqrt, rsqrt, tanh, sigmoid, silu, gelu, erf, minimum and maximum.

It may use nothing else: no if, and, or, min or max of a parameter, no functions of math, torch or JAX, no captured
arrays (make them parameters), and nothing of more than one element.

>>> import cunorm.expression as expression
>>> modulate = expression.trace(lambda xhat, scale, shift: xhat * (1 + scale) + shift)
>>> modulate.text
'xhat * (1 + scale) + shift'
>>> expression.gradients(modulate, ["scale"], seed="dy")["scale"].text
'dy * xhat'
"""

from __future__ import annotations

from collections.abc import Mapping

from .functions import erf, exp, gelu, log, maximum, minimum, rsqrt, sigmoid, silu, sqrt, tanh, where
from .gradients import gradients
from .grammar import parse
from .tracing import trace
from .value import Expression, Graph

__all__ = [
    "Expression",
    "erf",
    "exp",
    "gelu",
    "gradients",
    "log",
    "maximum",
    "minimum",
    "parse",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "substitute",
    "tanh",
    "trace",
    "where",
]


def substitute(expression: Expression, replacements: Mapping[str, Expression]) -> Expression:
    """Return the expression with names replaced by expressions, all at once.

    The names of each replacement take the place of the name that it replaces.

    Examples
    --------
    >>> outer = trace(lambda x, weight: x * weight)
    >>> substitute(outer, {"x": trace(lambda a, b: a + b)})
    parse('(a + b) * weight', ('a', 'b', 'weight'))
    """
    unknown = [name for name in replacements if name not in expression.names]
    if unknown:
        raise ValueError(f"cunorm: what is replaced must be one of {expression.names}; got {unknown[0]!r}.")
    graph = Graph()
    places = {name: graph.include(replacement) for name, replacement in replacements.items()}
    names = [replacements[name].names if name in replacements else (name,) for name in expression.names]
    return graph.expression(graph.include(expression, places), tuple(dict.fromkeys(sum(names, ()))))
