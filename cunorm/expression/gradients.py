"""The derivatives of expressions, by reverse accumulation over their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .functions import exp, where
from .grammar import check_names
from .tracing import Tracer
from .value import COMPARISONS, Expression, Graph


def _selected(dy: Tracer, selected: Tracer, other: Tracer, beyond: Tracer) -> Tracer:
    """The gradient of an operand of minimum or maximum; as torch's, also where one is NaN."""
    return where(selected == other, dy * 0.5, where(beyond, 0, dy))


# A derivative by reverse accumulation takes a product apart at each step: with no end to it a chain of n products would
# take n² of time and of steps.
MOST_FACTORS = 100


def _factors(value: Tracer) -> list[int]:
    """The places that a product is made of, in order; itself where they are more than MOST_FACTORS. The expression's
    own products are not taken apart.
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
