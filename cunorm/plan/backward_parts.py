"""What a backward pass reads and computes, and its parts: the sums over rows and what is written by rows are of one
derivative, and need not be computed by the same threads. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..operation import derivative
from .problem import Operand, Problem, backward_problem


def part(problem: Problem, wanted: Iterable[str]) -> Problem:
    """The same backward pass for some of its gradients: it reads no more than they need."""
    given = problem.by_name
    found = backward_problem(
        problem.operation,
        problem.rows,
        problem.cols,
        {"x": problem.row_dtype, "s": problem.row_dtype} | {name: one.dtype for name, one in given.items()},
        sources(wanted),
        # The gradient of a number is written as a column; what the number itself is, the operand says.
        kinds={name[1:]: one.kind for name, one in given.items() if one.written}
        | {name: one.kind for name, one in given.items()},
        strides={name: one.strides for name, one in given.items() if one.kind in ("full", "group", "per_row")},
        groups=problem.groups,
    )
    return replace(problem, operands=found.operands)


def sources(gradients: Iterable[str]) -> tuple[str, ...]:
    """What they are the gradients of."""
    return tuple(name.removeprefix("d") for name in gradients)


def matrices_read(problem: Problem) -> list[Operand]:
    return [one for one in problem.operands if one.kind == "full" and not one.written]


def row_bytes(problem: Problem) -> int:
    """Of all matrices that are read."""
    return problem.cols * sum(one.itemsize for one in matrices_read(problem))


def is_dear(problem: Problem) -> bool:
    """Whether the derivative takes much to compute."""
    return derivative(problem.operation, sources(problem.wanted), problem.by_name).is_dear


def is_plain(problem: Problem) -> bool:
    """Whether it reads x and dy, or s and dy, and has little to compute."""
    alone = not problem.groups and not problem.operation.second and len(matrices_read(problem)) <= 2
    return alone and not is_dear(problem)
