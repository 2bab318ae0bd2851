"""An elementwise function as a value: a list of steps, and its text."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})
FUNCTIONS = {  # the number of arguments of each
    "abs": 1,
    "erf": 1,
    "exp": 1,
    "log": 1,
    "maximum": 2,
    "minimum": 2,
    "rsqrt": 1,
    "sigmoid": 1,
    "sqrt": 1,
    "tanh": 1,
    "where": 3,
}
DEEPEST = 20  # how deep functions and parentheses may be nested in a text


class Step(NamedTuple):
    """One operation of an expression. `operands` are the places of earlier steps in the list.

    `function` is "name" or "constant", and then `text` is the name or number; or "negative", an operator as it is
    written, or one of FUNCTIONS. The number is kept as text because 0.0 and -0.0 are equal as numbers.
    """

    function: str
    operands: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Expression:
    """An elementwise function of numbers, made by `trace`, `parse`, `gradients` or `substitute`.

    Attributes
    ----------
    names : tuple of str
        The parameters, in order.
    steps : tuple of Step
        The steps, each once and after its operands. The last is the result.
    text : str
        The expression as `parse` reads it. Equal expressions have equal texts.
    uses : tuple of str
        The parameters that occur in it.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...]

    @cached_property
    def text(self) -> str:
        return _text(self.steps)

    @cached_property
    def uses(self) -> tuple[str, ...]:
        used = {step.text for step in self.steps if step.function == "name"}
        return tuple(name for name in self.names if name in used)

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """Return the same expression of parameters that have other names."""
        steps = (
            step._replace(text=names.get(step.text, step.text)) if step.function == "name" else step
            for step in self.steps
        )
        return Expression(tuple(names.get(name, name) for name in self.names), tuple(steps))

    def __hash__(self) -> int:
        return hash(self.text)  # a string keeps its hash

    def __repr__(self) -> str:
        return f"parse({self.text!r}, {self.names!r})"


class Graph:
    """A list of steps that grows. No step is added twice, and steps that change nothing are left out.

    The first `given` steps are those that it was made with.
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.steps = list(steps)
        self.given = len(self.steps)
        self._places = {step: place for place, step in enumerate(self.steps)}

    def add(self, step: Step) -> int:
        place = self._places.setdefault(step, len(self.steps))
        if place == len(self.steps):
            self.steps.append(step)
        return place

    def name(self, name: str) -> int:
        return self.add(Step("name", (), name))

    def constant(self, value: float | numbers.Real) -> int:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"a constant must be finite; got {value!s:.40}")
        return self.add(Step("constant", (), repr(number).removesuffix(".0")))

    def apply(self, function: str, *operands: int) -> int:
        """Return the place of `function(*operands)`. A comparison is 1 or 0, except as the condition of `where`."""
        if function == "where":
            condition, *values = operands
            if self.steps[condition].function not in COMPARISONS:
                condition = self.apply("!=", condition, self.constant(0))
            return self.add(Step("where", (condition, *map(self.number, values))))
        operands = tuple(map(self.number, operands))
        simpler = self._folded(function, *operands)
        if simpler is None:
            simpler = self._simplified(function, *operands)
        return self.add(Step(function, operands)) if simpler is None else simpler

    def number(self, place: int) -> int:
        """Return the place of a value as a number: 1 or 0 for a comparison."""
        if self.steps[place].function not in COMPARISONS:
            return place
        return self.add(Step("where", (place, self.constant(1), self.constant(0))))

    def include(self, expression: Expression, replacements: Mapping[str, int] | None = None) -> int:
        """Return the place of the result of `expression`, with some of its names replaced."""
        places: list[int] = []
        for step in expression.steps:
            operands = tuple([places[operand] for operand in step.operands])
            if replacements and step.text in replacements and step.function == "name":
                places.append(replacements[step.text])
            elif replacements and operands:
                places.append(self.apply(step.function, *operands))
            else:  # where nothing is replaced, no step can be simplified further
                places.append(self.add(Step(step.function, operands, step.text)))
        return places[-1]

    def expression(self, result: int, names: tuple[str, ...]) -> Expression:
        """Return the expression of `result`, with its steps depth first, in whatever order they were added."""
        pending = [self.number(result)]
        places: dict[int, int] = {}
        while pending:
            missing = [operand for operand in self.steps[pending[-1]].operands if operand not in places]
            if missing:
                pending.extend(reversed(missing))
            else:
                places.setdefault(pending.pop(), len(places))
        steps = []
        for place in places:
            function, operands, text = self.steps[place]
            steps.append(Step(function, tuple([places[operand] for operand in operands]), text))
        return Expression(names, tuple(steps))

    def _folded(self, function: str, *operands: int) -> int | None:
        if function not in _ARITHMETIC:
            return None
        for operand in operands:
            if self.steps[operand].function != "constant":
                return None
        try:
            value = _ARITHMETIC[function](*(float(self.steps[operand].text) for operand in operands))
        except ZeroDivisionError:
            return None
        return self.constant(value) if math.isfinite(value) else None

    def _simplified(self, function: str, first: int, second: int = -1) -> int | None:
        """Return the place of a simpler step with the same value, up to the sign of a zero; None if there is none."""
        if function == "negative":
            return self._negated(first)
        if function in ("+", "-"):
            if self._is_constant(second, "0", "-0"):
                return first
            if (positive := self._negated(second)) is not None:
                return self.apply("-" if function == "+" else "+", first, positive)
            if function == "-" and (positive := self._negated(first)) is not None:
                return self.apply("negative", self.apply("+", positive, second))
        if function == "+":
            if self._is_constant(first, "0", "-0"):
                return second
            if (positive := self._negated(first)) is not None:
                return self.apply("-", second, positive)
            if first == second:
                return self.apply("*", self.constant(2), first)
        if function in ("*", "/"):
            if self._is_constant(second, "1", "-1"):
                return first if self._is_constant(second, "1") else self.apply("negative", first)
            if function == "*" and self._is_constant(first, "1", "-1"):
                return second if self._is_constant(first, "1") else self.apply("negative", second)
            if (positive := self._negated(first)) is not None:
                return self.apply("negative", self.apply(function, positive, second))
            if (positive := self._negated(second)) is not None:
                return self.apply("negative", self.apply(function, first, positive))
        return None

    def _is_constant(self, place: int, *texts: str) -> bool:
        step = self.steps[place]
        return step.function == "constant" and step.text in texts

    def _negated(self, place: int) -> int | None:
        step = self.steps[place]
        return step.operands[0] if step.function == "negative" else None


_ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "negative": operator.neg,
}


# A text has C's operators with C's precedence. A value that is used more than once, or is nested too deep, is a
# temporary.

_COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(5)
_PRECEDENCE = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT} | dict.fromkeys(COMPARISONS, _COMPARISON)


def _text(steps: Sequence[Step]) -> str:
    uses = [0] * len(steps)
    for step in steps:
        for operand in step.operands:
            uses[operand] += 1
    statements: list[str] = []
    written: list[tuple[str, int, int]] = []  # text, precedence, depth

    def written_as(place: int, least: int) -> str:
        text, precedence, _ = written[place]
        return text if precedence >= least else f"({text})"

    for step, use_count in zip(steps, uses, strict=True):
        precedence = _PRECEDENCE.get(step.function, _ATOM)
        if not step.operands:
            text, precedence = step.text, _UNARY if step.text.startswith("-") else _ATOM
        elif step.function == "negative":
            text, precedence = f"-{written_as(step.operands[0], _UNARY)}", _UNARY
        elif precedence == _ATOM:
            text = f"{step.function}({', '.join(written_as(place, _COMPARISON) for place in step.operands)})"
        else:
            left, right = step.operands
            left_least = max(precedence, _SUM)
            text = f"{written_as(left, left_least)} {step.function} {written_as(right, precedence + 1)}"
        depth = 1 + max([written[place][2] for place in step.operands]) if step.operands else 0
        if step.operands and (use_count > 1 or (use_count and depth == DEEPEST)):
            temporary = f"t{len(statements)}"
            statements.append(f"{temporary} = {text}")
            text, precedence, depth = temporary, _ATOM, 0
        written.append((text, precedence, depth))
    return "; ".join([*statements, written[-1][0]])
