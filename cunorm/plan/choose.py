"""Choose the kernel of the rows of a `Problem` on a `Device`.

shapes.py gives the shape, which decides the bits. A table of measurements, or else the cost rule, says how rows of that
shape are run. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from functools import lru_cache

from ..kernel.device import Device
from .backward import adds_columns_apart, backward_by_rule, few_rows_backward
from .forward import forward_by_rule, forward_norm_add_norm, forward_streamed
from .problem import Problem, only_gradients
from .shapes import Tier, shape_of_rows
from .spec import FewRowsSpec, NormSpec
from .tables import measured


def choose(problem: Problem, device: Device) -> NormSpec | FewRowsSpec | None:
    """Return the kernel of the rows of a problem; None for streamed rows of a backward pass."""
    if problem.direction == "forward":
        if problem.operation.second:
            return forward_norm_add_norm(problem, device)
        choice = tier_of(problem, device)
        return choice[1] if choice else forward_streamed(problem, device)
    # Sums of dy alone need neither x nor whole rows.
    needs_rows = problem.row_results or "rstd" in problem.pointers
    shape = shape_of_rows(problem, device) if needs_rows else None
    if shape is None:
        return None
    _, spec = shape
    if not problem.groups:
        if adds_columns_apart(problem, device):
            return few_rows_backward(problem, _row_kernel(problem.layout, device), spec.shape, device)
        if (kernel := measured(problem, spec, device)) is not None:
            return kernel
    return _backward_by_rule(problem, spec, device)


@lru_cache(maxsize=1024)
def _row_kernel(problem: Problem, device: Device) -> NormSpec:
    """Return the kernel of the gradients that a backward pass writes by rows, if its columns are added up apart."""
    choice = tier_of(only_gradients(problem, problem.row_results), device)
    assert choice is not None, "which tier takes a row depends only on what is read of it"
    return choice[1]


def tier_of(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """Return the tier that takes rows of this length, and their kernel; None for streamed rows.

    Of a backward pass it is the kernel by the cost rule, whatever a table says.
    """
    shape = shape_of_rows(problem, device)
    if shape is None:
        return None
    tier, spec = shape
    if problem.direction == "forward":
        return tier, measured(problem, spec, device) or forward_by_rule(problem, spec, device)
    return tier, _backward_by_rule(problem, spec, device)


def _backward_by_rule(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel by the cost rule, unless the rule of its tier has chosen its stages."""
    return spec if spec.stages else backward_by_rule(problem, spec, device)
