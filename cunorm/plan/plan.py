"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions; no GPU library is imported.

Which kernel, and who holds what of a row, tiers.py decides; here come the grids of forward passes, in backward_plan.py
the launches of backward passes and their workspace. Only grids depend on the number of rows, and how many rows a CTA
takes at once where they are few.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..kernel.device import Device
from .backward_plan import plan_backward
from .forward_twice import forward_twice
from .problem import ITEMSIZE, Problem
from .shapes import ceil_div, kernel_spec
from .short_forward import short_forward
from .spec import NormSpec, RowShape
from .steps import GRID_LIMIT, STREAMED_THREADS, Plan, resident_groups, step_of, tier_name
from .tiers import choose


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    return _plan_forward(problem, device) if problem.direction == "forward" else plan_backward(problem, device)


def _plan_forward(problem: Problem, device: Device) -> Plan:
    if problem.operation.second:
        spec = forward_twice(problem, device)
        groups = min(ceil_div(problem.rows, spec.rows_per_cta), GRID_LIMIT)
        groups = resident_groups(problem, spec, device) if problem.sm_margin else groups
        return Plan(problem, device, tier_name(spec), (step_of(problem, spec, (groups, 1, 1), 0),))
    choice = choose(problem, device)
    if choice is None:
        shape = RowShape(16 // ITEMSIZE[problem.row_dtype], STREAMED_THREADS, 1)
        spec = kernel_spec(problem, "forward_streamed", shape)
        # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
        arrays = {one.dtype for one in problem.operands if one.kind in ("full", "column", "group")}
        two = arrays == {problem.row_dtype} != {"float64"} and len(spec.matrices) == 1 and spec.aligned
        spec = replace(spec, ctas_per_sm=2 if two else 1)
        groups = resident_groups(problem, spec, device) if problem.sm_margin else min(problem.rows, GRID_LIMIT)
    else:
        tier, spec = choice
        if tier.by is short_forward:
            return _plan_short_forward(problem, spec, device)
        groups = resident_groups(problem, spec, device)
    step = step_of(problem, spec, (groups * spec.shape.cluster, 1, 1), 0)
    return Plan(problem, device, tier_name(spec), (step,))


def _plan_short_forward(problem: Problem, spec: NormSpec, device: Device) -> Plan:
    """A CTA for every row or, where a CTA has more than one turn, as many as run at once."""
    once = spec.kernel == "forward" and not spec.stages and not problem.sm_margin and problem.rows <= GRID_LIMIT
    if spec.grouped and spec.kernel == "forward" and not once:
        spec = replace(spec, columns_stay=False)  # the next row of a CTA may be of another group
    if once or spec.kernel in ("forward_pairs", "forward_spread"):
        groups = ceil_div(problem.rows, spec.rows_per_cta)
    else:
        groups = resident_groups(problem, spec, device)
    step = step_of(problem, replace(spec, once=once), (groups * spec.cluster, 1, 1), 0)
    return Plan(problem, device, tier_name(spec), (step,))
