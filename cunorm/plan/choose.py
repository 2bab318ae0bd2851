"""Which kernel runs the rows of a `Problem` on a `Device`: of the shape that decides their bits, what a table of
measurements says, else the cost rule. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from functools import lru_cache

from ..kernel.device import Device
from .backward import adds_columns_beside_rows, backward_rows, few_rows_backward
from .forward import forward, forward_streamed, forward_twice
from .problem import Problem, part
from .shapes import Held, Tier, shaped
from .spec import FewRowsSpec, NormSpec
from .tables import measured


def choose(problem: Problem, device: Device) -> NormSpec | FewRowsSpec | None:
    """The kernel of the rows of a problem; None for rows of a backward pass that are streamed."""
    if problem.direction == "forward":
        if problem.operation.second:
            return forward_twice(problem, device)
        return held_by(problem, device) or forward_streamed(problem, device)
    # For sums of dy alone neither x nor the whole of a row is needed.
    written = [operand for operand in problem.operands if operand.written]
    needs_rows = len(problem.sums) < len(written) or "rstd" in problem.pointers
    tier, spec = (needs_rows and shaped(problem, device)) or (None, None)
    if tier is None or spec is None:
        return None
    if not problem.groups:
        if adds_columns_beside_rows(problem, device):
            return few_rows_backward(problem, _rows_apart(problem.layout, device), spec.shape, device)
        if (kernel := measured(problem, spec, device)) is not None:
            return kernel
    return _backward_by_rule(problem, tier, spec, device)


@lru_cache(maxsize=1024)
def _rows_apart(problem: Problem, device: Device) -> NormSpec:
    """The kernel of what a backward pass writes by rows, where its columns are added up apart."""
    rows = part(problem, (one.name for one in problem.operands if one.written and one.name not in problem.sums))
    spec = held_by(rows, device)
    assert spec is not None, "which tier takes a row depends on what is read of it alone"
    return spec


def held_by(problem: Problem, device: Device) -> NormSpec | None:
    """The kernel of rows that a tier takes; None if they have to be streamed."""
    found = tier_of(problem, device)
    return None if found is None else found[1]


def tier_of(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """The tier that takes rows of this length, and their kernel; None if the row has to be streamed."""
    shape = shaped(problem, device)
    if shape is None:
        return None
    tier, spec = shape
    if problem.direction == "forward":
        return tier, measured(problem, spec, device) or forward(problem, spec, device)
    return tier, _backward_by_rule(problem, tier, spec, device)


def _backward_by_rule(problem: Problem, tier: Tier, spec: NormSpec, device: Device) -> NormSpec:
    return backward_rows(problem, spec, device) if isinstance(tier.by, Held) else spec
