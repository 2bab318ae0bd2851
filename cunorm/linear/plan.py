"""How a norm with its product runs: one launch, overlapped or split, by a table of measurements.

The functions are pure and import no GPU library. Where no measurement says that something else wins, the norm's kernel
and cuBLASLt's product run one after the other (split).
"""

from __future__ import annotations

from functools import lru_cache

from ..kernel.device import Device
from ..plan.steps import OtherPlan
from ..plan.tables import OVERLAPPED, REACH, SPLIT, tables_of
from . import one_launch, overlapped
from .problem import LinearProblem

ROWS = (*one_launch.ROWS, *overlapped.ROWS)  # what was measured serves up to so many rows
DTYPES = ("float16", "bfloat16")
VECTOR_COLS = 8  # the columns of a vector of 16 bits


@lru_cache(maxsize=4096)
def chosen(problem: LinearProblem, device: Device) -> OtherPlan | None:
    """Return the launches that were measured to be faster than split; None: split."""
    way = _measured(problem, device)
    return None if way == SPLIT else ways(problem, device).get(way)


def ways(problem: LinearProblem, device: Device) -> dict[int, OtherPlan]:
    """Return every plan but split, by the CTAs of the clusters of one launch, or OVERLAPPED."""
    if _why_not(problem, device):
        return {}
    plans = {}
    if not one_launch.why_not(problem, device):
        for division in one_launch.divisions(problem, device):
            plans[division.cluster] = one_launch.plan(problem, device, division)
    if not overlapped.why_not(problem, device):
        plans[OVERLAPPED] = overlapped.plan(problem, device)
    return plans


def why_not(problem: LinearProblem, device: Device) -> str:
    """Return why such a problem must be split; empty if it need not be."""
    if reason := _why_not(problem, device):
        return reason
    reasons = one_launch.why_not(problem, device), overlapped.why_not(problem, device)
    return f"in one launch {reasons[0]}; overlapped {reasons[1]}" if all(reasons) else ""


def _why_not(problem: LinearProblem, device: Device) -> str:
    """Return why the tensor cores of sm_90 cannot take such a problem; empty if they can."""
    if device.arch != 90:
        return f"anything else is for sm_90; {device.name} is sm_{device.arch}"
    if problem.dtype not in DTYPES:
        return f"anything else is for float16 and bfloat16, not {problem.dtype}"
    if problem.cols % VECTOR_COLS or problem.outs % VECTOR_COLS:
        return f"in and out must be multiples of {VECTOR_COLS}"
    if not problem.aligned or problem.x_stride % VECTOR_COLS or problem.weight_stride % VECTOR_COLS:
        return "every row of x and weight must begin at a multiple of 16 bytes"
    return ""


def _measured(problem: LinearProblem, device: Device) -> int:
    """Return what was measured to be the fastest.

    It serves fewer rows of the same entry of ROWS, and up to REACH times more or fewer outs.
    """
    most = rows_of(problem)
    for _, table in tables_of(device):
        by_outs = table.products.get(problem.cols, {})
        apart = {outs: max(outs / problem.outs, problem.outs / outs) for outs in by_outs}
        for outs in sorted((outs for outs in apart if apart[outs] <= REACH), key=apart.__getitem__):
            enough = [rows for rows in by_outs[outs] if problem.rows <= rows <= most]
            if enough:
                return by_outs[outs][min(enough)]
    return SPLIT


def rows_of(problem: LinearProblem) -> int:
    """Return up to how many rows are measured together with a problem's; 0 if they are always split."""
    return next((most for most in ROWS if problem.rows <= most), 0)


def describe(problem: LinearProblem, device: Device) -> str:
    """Say in a sentence what runs."""
    solution = chosen(problem, device)
    if solution is None:
        reason = why_not(problem, device) or f"nothing else was measured to win for it on {device.name}"
        return f"split, the norm's kernel and then the product: {reason}"
    launches = [
        f"{step.spec}, grid {step.grid[0]}, {step.dynamic_shared} bytes of shared memory" for step in solution.steps
    ]
    return f"{'overlapped' if len(launches) > 1 else 'one launch'}: {'; with it '.join(launches)}"
