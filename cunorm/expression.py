"""Elementwise functions as values: traced from Python, written as text, read back, differentiated.

A prologue or an epilogue is a Python function of numbers. `trace` calls it once with tracers, which note what is done
to them: a list of steps (expression_value.py). The canonical text of that list, not the Python function, is what a
kernel is known by, and `parse` reads it back (expression_grammar.py). expression_texts.py writes an expression for CUDA
and computes it by NumPy, torch or JAX.

>>> import cunorm.expression as expression
>>> modulate = expression.trace(lambda xhat, scale, shift: xhat * (1 + scale) + shift)
>>> modulate.text
'xhat * (1 + scale) + shift'
>>> expression.gradients(modulate, ["scale"], seed="dy")["scale"].text
'dy * xhat'
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from .expression_grammar import check_names, parse
from .expression_value import COMPARISONS, Expression, Graph

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

WHAT_CAN_BE_USED = (
    "An expression is made of + - * /, ** with a power from -4 to 4 or of 0.5 or -0.5, comparisons, abs, numpy.where, "
    "exp, log, sqrt, tanh, square, minimum and maximum, and where, rsqrt, sigmoid, silu, gelu and erf of "
    "cunorm.expression"
)


def _infix(function: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.apply(function, self, other)


def _reflected(function: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.apply(function, other, self)


class Tracer:
    """A number that is not known yet: what a traced function gets, and what its operations return."""

    __slots__ = ("graph", "place")

    def __init__(self, graph: Graph, place: int) -> None:
        self.graph = graph
        self.place = place

    def apply(self, function: str, *operands: Any) -> Tracer:
        """`function(*operands)`, in the graph of this tracer."""
        return Tracer(self.graph, self.graph.apply(function, *map(self.place_of, operands)))

    def place_of(self, value: Any) -> int:
        """The place of a tracer or of a constant."""
        if isinstance(value, Tracer):
            if value.graph is not self.graph:
                raise TypeError("a parameter of another traced function was captured")
            return value.place
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            value = value[()]  # NumPy makes an array of its number on the left of a comparison
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
    # Of a comparison whose left is no tracer Python asks the right one for the opposite.
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
            return sqrt(self) if exponent > 0 else rsqrt(self)
        square = self * self
        powers = (Tracer(self.graph, self.graph.constant(1)), self, square, square * self, square * square)
        return powers[int(exponent)] if exponent >= 0 else 1 / powers[int(-exponent)]

    def __rpow__(self, base: Any) -> NoReturn:
        raise ValueError(f"a power must be a number; got {base} ** a traced value: use exp and log")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Tracer:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if name not in _UFUNCS or keywords:
            with_keywords = f" with {', '.join(keywords)}" if keywords else ""
            raise TypeError(f"numpy.{name}{with_keywords} cannot be traced")
        if name == "square":
            return self * self
        return self.apply(_UFUNCS[name], *inputs)

    def __array_function__(self, function: Callable, types: Any, arguments: tuple, keywords: dict) -> Tracer:
        if function.__name__ == "where" and len(arguments) == 3 and not keywords:
            return self.apply("where", *arguments)
        raise TypeError(f"numpy.{function.__name__} cannot be traced: an expression is of single elements")

    def __bool__(self) -> NoReturn:
        raise TypeError("a traced value has no truth (if, and, or, not, min, max): use where, minimum or maximum")

    def _no_number(self, *_: Any) -> NoReturn:
        raise TypeError("a traced value has no number yet, so float, int and functions of math cannot be traced")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __array__ = _no_number

    def _no_array(self, *_: Any) -> NoReturn:
        raise TypeError("an index cannot be traced: an expression is of single elements")

    __getitem__ = __len__ = __iter__ = _no_array

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # how libraries ask what an object is
            raise AttributeError(name)
        raise TypeError(f".{name} cannot be traced: an expression is of single elements")


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
    "square": "square",
    "subtract": "-",
} | {name: name for name in ("exp", "log", "maximum", "minimum", "negative", "sqrt", "tanh")}


def trace(function: Callable[..., Any], *, role: str = "epilogue") -> Expression:
    """The expression that a Python function computes, by calling it once with tracers.

    Parameters
    ----------
    function : callable
        Of one or more numbers, its parameters: no defaults, no ``*args``. Numbers that it captures are constants.
    role : str
        What error messages call it.

    Raises
    ------
    TypeError
        If it does what an expression cannot, such as ``if`` of a parameter or a captured array.
    ValueError
        For a power, a constant or a parameter's name that cannot be.

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
    except ValueError as error:
        raise ValueError(f"{_complaint(role, function, error)}.") from error
    except TypeError as error:
        raise TypeError(f"{_complaint(role, function, error)}. {WHAT_CAN_BE_USED}.") from error


def _complaint(role: str, function: Any, error: Exception) -> str:
    code = getattr(function, "__code__", None)
    where_written = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    first_line = str(error).partition("\n")[0].rstrip(".")
    return f"cunorm: the {role} {getattr(function, '__name__', function)!r}{where_written}: {first_line}"


# Functions for traced values, and for arrays of NumPy and numbers.


def _call(function: str, *operands: Any) -> Any:
    for operand in operands:
        if isinstance(operand, Tracer):
            return operand.apply(function, *operands)
    return (_OF_ARRAYS.get(function) or getattr(_numpy(), function))(*operands)


def _numpy() -> Any:
    """Imported when arrays come: `import cunorm` takes a third of the time without it."""
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
    "where": lambda condition, x, y: _numpy().where(condition, x, y)[()],  # of numbers a number
}


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y. Both are computed: an infinite derivative of the other one gives NaN."""
    return _call("where", condition, x, y)


def exp(x: Any) -> Any:
    """e to the power of x."""
    return _call("exp", x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _call("log", x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _call("sqrt", x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return _call("rsqrt", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _call("tanh", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", x)


def erf(x: Any) -> Any:
    """The error function."""
    return _call("erf", x)


def minimum(x: Any, y: Any) -> Any:
    """The smaller one; NaN if one is. Of equal ones each gets half the gradient, as in torch."""
    return _call("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger one; NaN if one is. Of equal ones each gets half the gradient, as in torch."""
    return _call("maximum", x, y)


def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """x times the normal distribution's probability below x; by torch's approximation if `approximate` is "tanh"."""
    if approximate == "none":
        return x * (0.5 + 0.5 * erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        # 1 + tanh(z) is 2 * sigmoid(2 * z), which does not cancel where x is far below 0.
        return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x)))
    raise ValueError(f"approximate must be 'none' or 'tanh'; got {approximate!r}")


# Derivatives.


def _selected(dy: Tracer, selected: Tracer, other: Tracer, beyond: Tracer) -> Tracer:
    """The gradient of an operand of minimum or maximum; as torch's, also where one is NaN."""
    return where(selected == other, dy * 0.5, where(beyond, 0, dy))


def _factors(value: Tracer) -> list[int]:
    """The places that a product is made of, in order. The expression's own products are not taken apart."""
    graph, step = value.graph, value.graph.steps[value.place]
    if value.place < graph.given or step.function not in ("*", "negative"):
        return [value.place]
    found = [place for operand in step.operands for place in _factors(Tracer(graph, operand))]
    return [*found, graph.constant(-1)] if step.function == "negative" else found


def _multiplied(graph: Graph, factors: Iterable[int]) -> Tracer:
    """Their product from the left, where the constants among them are one, unless float32 does not hold it."""
    places = list(factors)
    constants = [place for place in places if graph.steps[place].function == "constant"]
    number = math.prod(float(graph.steps[place].text) for place in constants)
    if len(constants) > 1 and 2.0**-126 <= abs(number) < 2.0**127:
        first = places.index(constants[0])
        places = [place for place in places if place not in constants]
        places.insert(first, graph.constant(number))
    result = places[0] if places else graph.constant(1)
    for place in places[1:]:
        result = graph.apply("*", result, place)
    return Tracer(graph, result)


def _product(dy: Tracer, factor: Tracer) -> Tracer:
    """dy * factor. Ten steps that multiply by constants are one in the derivative."""
    if dy.graph.steps[factor.place].function != "constant":
        return dy * factor
    return _multiplied(dy.graph, [*_factors(dy), factor.place])


def _total(first: Tracer, second: Tracer) -> Tracer:
    """Their sum, with what is a factor of both multiplied once: dy * a + dy * b is dy * (a + b)."""
    common, rest, others = [], [], _factors(second)
    for place in _factors(first):
        if place in others:
            others.remove(place)
            common.append(place)
        else:
            rest.append(place)
    if not common:
        return first + second
    graph = first.graph
    return _product(_multiplied(graph, common), _multiplied(graph, rest) + _multiplied(graph, others))


# The gradients with respect to the operands, from dy, that with respect to the result y. None: there is none.
_GRADIENTS: dict[str, Callable[..., tuple]] = {
    "+": lambda dy, y, a, b: (dy, dy),
    "-": lambda dy, y, a, b: (dy, -dy),
    "*": lambda dy, y, a, b: (_product(dy, b), _product(dy, a)),
    "/": lambda dy, y, a, b: (dy / b, -(dy / b * y)),
    "negative": lambda dy, y, x: (-dy,),
    **dict.fromkeys(COMPARISONS, lambda dy, y, a, b: (None, None)),
    "abs": lambda dy, y, x: (where(x > 0, dy, where(x < 0, -dy, 0)),),
    "erf": lambda dy, y, x: (dy * (2 / math.sqrt(math.pi) * exp(-(x * x))),),
    "exp": lambda dy, y, x: (dy * y,),
    "log": lambda dy, y, x: (dy / x,),
    "maximum": lambda dy, y, a, b: (_selected(dy, a, b, a < b), _selected(dy, b, a, b < a)),
    "minimum": lambda dy, y, a, b: (_selected(dy, a, b, a > b), _selected(dy, b, a, b > a)),
    "rsqrt": lambda dy, y, x: (dy * (-0.5 * (y * y * y)),),
    "sigmoid": lambda dy, y, x: (dy * (y * (1 - y)),),
    "sqrt": lambda dy, y, x: (dy * (0.5 / y),),
    "tanh": lambda dy, y, x: (dy * (1 - y * y),),
    "where": lambda dy, y, condition, a, b: (None, where(condition, dy, 0), where(condition, 0, dy)),
}


def gradients(expression: Expression, wrt: Iterable[str], *, seed: str | None = None) -> dict[str, Expression]:
    """The derivatives of an expression by some of its names, by reverse accumulation.

    Parameters
    ----------
    expression : Expression
    wrt : iterable of str
        The names; the result has an expression for each.
    seed : str, optional
        The name of the gradient with respect to the result, by which each derivative is multiplied, and which each
        then has as its last name. Without it they are not multiplied.

    Notes
    -----
    Where there is no derivative: abs has 0 at 0; equal operands of minimum and maximum get half each, as in torch. A
    comparison has none.

    Examples
    --------
    >>> gradients(trace(lambda x, gate: x * sigmoid(gate)), ["gate"], seed="dy")["gate"].text
    't0 = sigmoid(gate); dy * x * (t0 * (1 - t0))'
    """
    wrt = tuple(wrt)
    unknown = [name for name in wrt if name not in expression.names]
    if unknown:
        raise ValueError(f"cunorm: gradients are by the names {expression.names}; got {unknown[0]!r}.")
    names = expression.names if seed is None else check_names((*expression.names, seed))
    graph = Graph(expression.steps)
    varying = [False] * len(expression.steps)  # with one of the names
    for place, (function, operands, text) in enumerate(expression.steps):
        varying[place] = text in wrt if function == "name" else any(varying[operand] for operand in operands)
    start = graph.constant(1) if seed is None else graph.name(seed)
    found = {len(expression.steps) - 1: Tracer(graph, start)}
    for place in reversed(range(len(expression.steps))):
        step = expression.steps[place]
        if place not in found or not varying[place] or not step.operands:
            continue
        operands = [Tracer(graph, operand) for operand in step.operands]
        parts = _GRADIENTS[step.function](found[place], Tracer(graph, place), *operands)
        for operand, part in zip(step.operands, parts, strict=True):
            if varying[operand] and part is not None:
                found[operand] = _total(found[operand], part) if operand in found else part
    places = (graph.name(name) for name in wrt)
    return {
        name: graph.expression(found[place].place if place in found else graph.constant(0), names)
        for name, place in zip(wrt, places, strict=True)
    }


def substitute(expression: Expression, replacements: Mapping[str, Expression]) -> Expression:
    """The expression with names replaced by expressions, all at once; their names take the place of the replaced one.

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
