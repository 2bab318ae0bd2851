"""Two ways to compute an expression: C++ statements for a kernel, and evaluation by NumPy, torch or JAX."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any

from .grammar import check_names
from .value import COMPARISONS, FUNCTIONS, Expression, Graph

# The functions of kernels_cu/rows/functions.cuh and numbers.cuh, for float and double.
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
    """Return C++ statements that define a constant for each result. A step that several results need is computed once.

    A product that is added or subtracted becomes a fused multiply-add; of two products the right one does. Kernels are
    compiled with -fmad=false, so that the compiler fuses nothing else and a value has the same bits in every kernel.

    Parameters
    ----------
    results : mapping of str to Expression
        The expressions by the names of the constants. Their own names must be variables of the type `compute` in scope.
    compute : str
        The type of the arithmetic.
    indent : str
        The beginning of each line.

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
    for place in reversed(range(len(steps))):  # a product that is part of a multiply_add alone needs no constant
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
    """Return the places (factor, factor, addend) if the step adds or subtracts a product, else ()."""
    step = graph.steps[place]
    if step.function in ("+", "-"):
        left, right = step.operands
        for product, addend in ((right, left), (left, right)):
            if graph.steps[product].function == "*":
                return (*graph.steps[product].operands, addend)
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
# The modules that have the functions of FUNCTIONS, by the name of the module that an expression is evaluated with.
_MODULES = {
    "numpy": ("cunorm.expression",),
    "torch": ("torch",),
    "jax.numpy": ("jax.numpy", "jax.nn", "jax.lax"),
}


@cache
def _functions(arrays: str) -> dict[str, Callable[..., Any]]:
    """Return a function for each name of FUNCTIONS and each operator, for arrays of the module of that name."""
    if arrays not in _MODULES:
        raise TypeError(f"cunorm: an expression must be evaluated by {', '.join(_MODULES)}; got {arrays}.")
    modules = [importlib.import_module(name) for name in _MODULES[arrays]]
    names = [name for name in FUNCTIONS if name not in _OPERATORS]
    functions = {name: next(getattr(module, name) for module in modules if hasattr(module, name)) for name in names}
    return functions | _OPERATORS


def evaluate(expression: Expression, values: Mapping[str, Any], module: Any) -> Any:
    """Return the value of an expression, element by element, in the dtype to which the values are promoted.

    Parameters
    ----------
    expression : Expression
    values : mapping of str to array or number
        Values by the expression's names: numbers and floating arrays of the module, which are broadcast. Autograd of
        torch and transformations of JAX work as usual.
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
