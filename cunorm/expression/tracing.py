"""Expressions from Python functions: each is called once with tracers, which record what is done to them."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .grammar import check_names
from .value import Expression, Graph

POINTER = "help(cunorm.expression) says what an expression can be made of"
NO_ROUNDING = (
    "nothing in an expression rounds: compute it before and pass it as an operand (a parameter of the function)"
)
NO_BITS = "of conditions a * b is and, maximum(a, b) is or, 1 - a is not"
# What to do in place of some functions of NumPy.
INSTEAD = dict.fromkeys(
    ("floor_divide", "remainder", "fmod", "divmod", "floor", "ceil", "trunc", "rint", "round"), NO_ROUNDING
) | dict.fromkeys(
    ("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "invert"),
    NO_BITS,
)


def _infix(function: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.apply(function, self, other)


def _refused(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Tracer, *_: Any) -> NoReturn:
        raise TypeError(f"{what} cannot be traced: {instead}")

    return refuse


def _reflected(function: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.apply(function, other, self)


class Tracer:
    """A stand-in for a number in the call of a traced function. Operations on tracers return tracers."""

    __slots__ = ("graph", "place")

    def __init__(self, graph: Graph, place: int) -> None:
        self.graph = graph
        self.place = place

    def apply(self, function: str, *operands: Any) -> Tracer:
        """Return the tracer of `function(*operands)`, in the graph of this tracer."""
        return Tracer(self.graph, self.graph.apply(function, *map(self.place_of, operands)))

    def place_of(self, value: Any) -> int:
        """Return the place of a tracer or of a constant in this tracer's graph."""
        if isinstance(value, Tracer):
            if value.graph is not self.graph:
                raise TypeError(
                    "an operand must be a parameter of the function itself; got a parameter of another traced "
                    "function: make it one of its own"
                )
            return value.place
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value[()]  # NumPy turns its number on the left of a comparison into an array
        if isinstance(value, numbers.Real):
            return self.graph.constant(value)
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"what it captures must be a number; got {kind}: pass it as an operand (a parameter of the function)"
        )

    __add__, __radd__ = _infix("+"), _reflected("+")
    __sub__, __rsub__ = _infix("-"), _reflected("-")
    __mul__, __rmul__ = _infix("*"), _reflected("*")
    __truediv__, __rtruediv__ = _infix("/"), _reflected("/")
    # If the left side of a comparison is no tracer, Python calls the opposite comparison of the right side.
    __lt__, __le__, __gt__, __ge__ = _infix("<"), _infix("<="), _infix(">"), _infix(">=")
    __eq__ = _infix("==")  # type: ignore[assignment]
    __ne__ = _infix("!=")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Tracer:
        return self.apply("negative", self)

    def __pos__(self) -> Tracer:
        return self

    def __abs__(self) -> Tracer:
        return self.apply("abs", self)

    def __pow__(self, power: Any) -> Tracer:
        exponent = float(power) if isinstance(power, numbers.Real) else math.nan
        if abs(exponent) != 0.5 and exponent not in range(-4, 5):
            got = "a traced value" if isinstance(power, Tracer) else power
            raise ValueError(f"a power must be an integer from -4 to 4, or 0.5 or -0.5; got {got}: use exp and log")
        if abs(exponent) == 0.5:
            return self.apply("sqrt" if exponent > 0 else "rsqrt", self)
        square = self * self
        powers = (Tracer(self.graph, self.graph.constant(1)), self, square, square * self, square * square)
        return powers[int(exponent)] if exponent >= 0 else 1 / powers[int(-exponent)]

    __floordiv__ = __rfloordiv__ = _refused("the operator //", NO_ROUNDING)
    __mod__ = __rmod__ = _refused("the operator %", NO_ROUNDING)
    __divmod__ = __rdivmod__ = _refused("divmod", NO_ROUNDING)
    __round__ = _refused("round", NO_ROUNDING)
    __and__ = __rand__ = _refused("the operator &", NO_BITS)
    __or__ = __ror__ = _refused("the operator |", NO_BITS)
    __xor__ = __rxor__ = _refused("the operator ^", NO_BITS)
    __invert__ = _refused("the operator ~", NO_BITS)
    __lshift__ = __rlshift__ = _refused("the operator <<", "multiply by a power of two")
    __rshift__ = __rrshift__ = _refused("the operator >>", "multiply by a power of two")
    __matmul__ = __rmatmul__ = _refused("the operator @", "an expression is of single elements")

    def __rpow__(self, base: Any) -> NoReturn:
        raise ValueError(f"a power must be a number; got {base} ** a traced value: use exp and log")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Tracer:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if name not in _UFUNCS or keywords:
            raise TypeError(_untraceable(name, keywords))
        if name == "square":
            return self * self
        if name == "power":
            base, power = inputs
            return base**power if isinstance(base, Tracer) else power.__rpow__(base)
        return self.apply(_UFUNCS[name], *inputs)

    def __array_function__(self, function: Callable, types: Any, arguments: tuple, keywords: dict) -> Tracer:
        if function.__name__ == "where" and len(arguments) == 3 and not keywords:
            return self.apply("where", *arguments)
        if function.__name__ == "clip" and len(arguments) == 3 and not keywords:
            value, low, high = arguments
            value = value if low is None else self.apply("maximum", value, low)
            return value if high is None else self.apply("minimum", value, high)
        raise TypeError(_untraceable(function.__name__, keywords))

    def __bool__(self) -> NoReturn:
        raise TypeError("a traced value has no truth (if, and, or, not, min, max): use where, minimum or maximum")

    def _no_number(self, *_: Any) -> NoReturn:
        raise TypeError("a traced value has no number yet, so float, int and functions of math cannot be traced")

    __float__ = __int__ = __index__ = __complex__ = __array__ = _no_number

    def _no_array(self, *_: Any) -> NoReturn:
        raise TypeError("an index cannot be traced: an expression is of single elements")

    __getitem__ = __len__ = __iter__ = _no_array

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # libraries look such names up to find out what an object is
            raise AttributeError(name)
        instead = f"use numpy.{name}" if name in (*_UFUNCS, "clip") else "a traced value is no array"
        raise TypeError(f".{name} cannot be traced: {instead}")


Tracer.__name__ = "traced value"  # the name in error messages of Python and other libraries


def _untraceable(function: str, keywords: Mapping[str, Any]) -> str:
    with_keywords = f" with {', '.join(keywords)}" if keywords else ""
    instead = f": {INSTEAD[function]}" if function in INSTEAD else ""
    return f"numpy.{function}{with_keywords} cannot be traced{instead}"


_UFUNCS = {
    "absolute": "abs",
    "add": "+",
    "divide": "/",
    "equal": "==",
    "greater": ">",
    "greater_equal": ">=",
    "less": "<",
    "less_equal": "<=",
    "multiply": "*",
    "not_equal": "!=",
    "power": "power",
    "square": "square",
    "subtract": "-",
} | {name: name for name in ("exp", "log", "maximum", "minimum", "negative", "sqrt", "tanh")}


def trace(function: Callable[..., Any], *, role: str = "epilogue") -> Expression:
    """Return the expression that a Python function computes, by calling it once with tracers.

    Parameters
    ----------
    function : callable
        A function of one or more numbers, without defaults or ``*args``. Numbers that it captures become constants.
    role : str
        The name of the function's role in error messages.

    Raises
    ------
    TypeError
        If the function does what an expression cannot, such as ``if`` of a parameter, or captures an array.
    ValueError
        If a power, a constant or a parameter's name is not allowed.

    Examples
    --------
    >>> trace(lambda xhat, weight: xhat * weight).text
    'xhat * weight'
    """
    graph = Graph()
    try:
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if not plain or parameter.default is not parameter.empty:
                raise TypeError(f"each parameter must be one operand without a default; got {parameter}: name each one")
        names = check_names(parameter.name for parameter in parameters)
        result = function(*(Tracer(graph, graph.name(name)) for name in names))
        if not isinstance(result, Tracer | numbers.Real):
            raise TypeError(f"it must return one value made of its parameters; got {type(result).__name__}")
        return graph.expression(Tracer(graph, -1).place_of(result), names)
    except (TypeError, ValueError) as error:
        raise _complaint(role, function, error) from error


def _complaint(role: str, function: Any, error: TypeError | ValueError) -> TypeError | ValueError:
    code = getattr(function, "__code__", None)
    where_written = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    first_line = str(error).partition("\n")[0].rstrip(".")
    message = f"cunorm: the {role} {getattr(function, '__name__', function)!r}{where_written}: {first_line}."
    return TypeError(f"{message} {POINTER}.") if isinstance(error, TypeError) else ValueError(message)
