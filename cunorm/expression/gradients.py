"""The derivatives of expressions, by reverse accumulation over their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .functions import exp, where
from .grammar import check_names
from .tracing import Tracer
from .value import COMPARISONS, Expression, Graph


def _selected(dy: Tracer, selected: Tracer, other: Tracer, beyond: Tracer) -> Tracer:
    """Return the gradient of an operand of minimum or maximum. It is torch's, also where an operand is NaN."""
    return where(selected == other, dy * 0.5, where(beyond, 0, dy))


# Reverse accumulation splits a product into its factors at each step. Without a limit a chain of n products would take
# n² of time and of steps.
MOST_FACTORS = 100


def _factors(value: Tracer) -> list[int]:
    """Return the places of a product's factors, in order, or its own place if they are more than MOST_FACTORS.

    Products of the expression itself are not split.
    """
    graph = value.graph
    factors, pending = [], [value.place]
    while pending:
        place = pending.pop()
        function, operands, _ = graph.steps[place]
        if place < graph.given or function not in ("*", "negative"):
            factors.append(place)
        elif function == "negative":
            pending += [graph.constant(-1), *operands]
        else:
            pending += reversed(operands)
        if len(factors) + len(pending) > MOST_FACTORS:
            return [value.place]
    return factors


def _multiplied(graph: Graph, factors: Iterable[int]) -> Tracer:
    """Return the product of the factors, from the left. Constants become one, if float32 holds it."""
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
    """Return dy * factor. Ten steps that multiply by constants become one step of the derivative."""
    if dy.graph.steps[factor.place].function != "constant":
        return dy * factor
    return _multiplied(dy.graph, [*_factors(dy), factor.place])


def _total(first: Tracer, second: Tracer) -> Tracer:
    """Return the sum, with common factors multiplied once: dy * a + dy * b is dy * (a + b)."""
    common, of_first, of_second = [], [], _factors(second)
    for place in _factors(first):
        if place in of_second:
            of_second.remove(place)
            common.append(place)
        else:
            of_first.append(place)
    if not common:
        return first + second
    graph = first.graph
    return _product(_multiplied(graph, common), _multiplied(graph, of_first) + _multiplied(graph, of_second))


# For each function the gradients of its operands, from dy, the gradient of its result y. None stands for no gradient.
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
    """Return the derivatives of an expression with respect to some of its names, by reverse accumulation.

    Parameters
    ----------
    expression : Expression
    wrt : iterable of str
        The names. The result has an expression for each.
    seed : str, optional
        The name of the gradient of the result. Each derivative is multiplied by it and has it as its last name. Without
        it they are not multiplied.

    Notes
    -----
    At points without a derivative, abs has 0, and equal operands of minimum and maximum get half each, as in torch. A
    comparison has no derivative.

    Examples
    --------
    >>> from cunorm.expression import sigmoid, trace
    >>> gradients(trace(lambda x, gate: x * sigmoid(gate)), ["gate"], seed="dy")["gate"].text
    't0 = sigmoid(gate); dy * x * (t0 * (1 - t0))'
    """
    wrt = tuple(wrt)
    unknown = [name for name in wrt if name not in expression.names]
    if unknown:
        raise ValueError(f"cunorm: gradients must be by the names {expression.names}; got {unknown[0]!r}.")
    names = expression.names if seed is None else check_names((*expression.names, seed))
    graph = Graph(expression.steps)
    varies: list[bool] = []  # for each step, whether it depends on one of the names
    for function, operands, text in expression.steps:
        varies.append(text in wrt if function == "name" else any(varies[operand] for operand in operands))
    start = graph.constant(1) if seed is None else graph.name(seed)
    gradient_of = {len(expression.steps) - 1: Tracer(graph, start)}
    for place in reversed(range(len(expression.steps))):
        step = expression.steps[place]
        if place not in gradient_of or not varies[place] or not step.operands:
            continue
        operands = [Tracer(graph, operand) for operand in step.operands]
        parts = _GRADIENTS[step.function](gradient_of[place], Tracer(graph, place), *operands)
        for operand, part in zip(step.operands, parts, strict=True):
            if varies[operand] and part is not None:
                gradient_of[operand] = _total(gradient_of[operand], part) if operand in gradient_of else part
    places = {name: graph.name(name) for name in wrt}
    return {
        name: graph.expression(gradient_of[place].place if place in gradient_of else graph.constant(0), names)
        for name, place in places.items()
    }
