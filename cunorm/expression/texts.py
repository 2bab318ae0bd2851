"""Expressions for those who compute them: C++ statements for a kernel, and values by NumPy, torch or JAX."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any

from .grammar import check_names
from .value import COMPARISONS, FUNCTIONS, Expression, Graph

# kernels_cu/rows/functions.cuh and numbers.cuh define them, for float and double.
CUDA_FUNCTIONS = {
    "abs": "absolute",
    "erf": "error_function",
    "exp": "exponential",
    "log": "logarithm",
    "maximum": "maximum",
    "minimum": "minimum",
    "rsqrt": "reciprocal_sqrt",
    "sigmoid": "sigmoid",
    "sqrt": "square_root",
    "tanh": "hyperbolic_tangent",
}


def cuda(results: Mapping[str, Expression], *, compute: str = "Compute", indent: str = "  ") -> str:
    """C++ statements that define a constant for each result; what several need is computed once.

    A product that is added or subtracted is part of a fused multiply-add (of two products the right one): kernels are
    compiled with -fmad=false, so that no compiler chooses, and a value is the same bits in every kernel.

    Parameters
    ----------
    results : mapping of str to Expression
        By the names of the constants. The names of the expressions must be variables of the type `compute` in scope.
    compute : str
        The type of the arithmetic.
    indent : str
        What each line begins with.

    Examples
    --------
    >>> from cunorm.expression import trace
    >>> print(cuda({"y": trace(lambda xhat, weight, bias: xhat * weight + bias)}))
      const Compute t0 = cunorm::multiply_add(xhat, weight, bias);
      const Compute y = t0;
    """
    check_names(results)
    for name in results:
        if any(name in expression.uses for expression in results.values()):
            raise ValueError(f"cunorm: a result must not have the name of what it is computed from; got {name!r}.")
    graph = Graph()
    places = {name: graph.include(expression) for name, expression in results.items()}
    steps = graph.steps
    needed = set(places.values())
    for place in reversed(range(len(steps))):  # a product that only multiply_add uses is not needed itself
        if place in needed:
            needed.update(_fused(graph, place) or steps[place].operands)
    written: dict[int, str] = {}
    lines = []
    for place in sorted(needed):
        step = steps[place]
        if step.function == "name":
            written[place] = step.text
        elif step.function == "constant":
            digits = re.sub(r"\.?0+p", "p", float(step.text).hex())
            written[place] = f"static_cast<{compute}>({digits})"
        else:
            kind = "bool" if step.function in COMPARISONS else compute
            written[place] = f"t{len(lines)}"
            lines.append(f"{indent}const {kind} {written[place]} = {_cuda_operation(graph, place, written)};\n")
    lines += [f"{indent}const {compute} {name} = {written[place]};\n" for name, place in places.items()]
    return "".join(lines).removesuffix("\n")


def _fused(graph: Graph, place: int) -> tuple[int, ...]:
    """Return (factor, factor, addend) if the step adds or subtracts a product, else ()."""
    step = graph.steps[place]
    if step.function not in ("+", "-"):
        return ()
    left, right = step.operands
    if graph.steps[right].function == "*":
        return (*graph.steps[right].operands, left)
    if graph.steps[left].function == "*":
        return (*graph.steps[left].operands, right)
    return ()


def _cuda_operation(graph: Graph, place: int, written: Mapping[int, str]) -> str:
    step = graph.steps[place]
    fused = _fused(graph, place)
    if fused:
        first, second, addend = (written[operand] for operand in fused)
        if step.function == "-":
            if fused[2] == step.operands[0]:
                first = f"-{first}"
            else:
                addend = f"-{addend}"
        return f"cunorm::multiply_add({first}, {second}, {addend})"
    operands = [written[operand] for operand in step.operands]
    if step.function == "negative":
        return f"-{operands[0]}"
    if step.function == "where":
        return "{} ? {} : {}".format(*operands)
    if step.function in CUDA_FUNCTIONS:
        return f"cunorm::{CUDA_FUNCTIONS[step.function]}({', '.join(operands)})"
    return f" {step.function} ".join(operands)


_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "negative": operator.neg,
    "abs": abs,
}
# Where the functions of FUNCTIONS are, by the name of the module that somebody evaluates with.
_HOMES = {
    "numpy": ("cunorm.expression",),
    "torch": ("torch",),
    "jax.numpy": ("jax.numpy", "jax.nn", "jax.lax"),
}


@cache
def _functions(module: str) -> dict[str, Callable[..., Any]]:
    """Return what computes each function and operator with arrays of a module."""
    if module not in _HOMES:
        raise TypeError(f"cunorm: an expression must be evaluated by {', '.join(_HOMES)}; got {module}.")
    homes = [importlib.import_module(home) for home in _HOMES[module]]
    found = {
        name: next(getattr(home, name) for home in homes if hasattr(home, name))
        for name in FUNCTIONS
        if name not in _OPERATORS
    }
    return found | _OPERATORS


def evaluate(expression: Expression, values: Mapping[str, Any], module: Any) -> Any:
    """The value of an expression, element by element, in the dtype that the values have in common.

    Parameters
    ----------
    expression : Expression
    values : mapping of str to array or number
        By the expression's names; floating arrays of the module, broadcast as it does. torch records gradients, and
        JAX transforms, as ever.
    module : module
        numpy, torch or jax.numpy.

    Examples
    --------
    >>> import numpy
    >>> from cunorm.expression import trace
    >>> scaled = trace(lambda x, scale: x * (1 + scale))
    >>> evaluate(scaled, {"x": numpy.float32([1, 2]), "scale": 0.5}, numpy)
    array([1.5, 3. ], dtype=float32)
    """
    functions = _functions(module.__name__)
    missing = [name for name in expression.uses if name not in values]
    if missing:
        raise ValueError(f"cunorm: {expression.text!r} needs values of {expression.uses}; got none of {missing[0]!r}.")
    used = {name: values[name] for name in expression.uses}
    dtypes = [value.dtype for value in used.values() if hasattr(value, "dtype")]
    if any("float" not in str(dtype) for dtype in dtypes):
        raise TypeError(
            f"cunorm: an expression must be evaluated with floating arrays; got {', '.join(map(str, dtypes))}."
        )
    dtype = reduce(module.promote_types, dtypes) if dtypes else None
    computed: list[Any] = []
    for step in expression.steps:
        if step.operands:
            value = functions[step.function](*(computed[operand] for operand in step.operands))
        else:
            value = used[step.text] if step.function == "name" else float(step.text)
            if not hasattr(value, "dtype"):
                # torch would lift an array out of a traced program, and leave it there without its value.
                value = (partial(module.full, ()) if module.__name__ == "torch" else module.asarray)(value, dtype=dtype)
        computed.append(value)
    return computed[-1]
