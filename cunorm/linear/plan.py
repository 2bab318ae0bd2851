"""How a norm with its product runs: one launch, overlapped or split, by a table of measurements, else by a rule.

The functions are pure and import no GPU library. Where nothing says that something else wins, the norm's kernel and
cuBLASLt's product run one after the other (split).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial

from ..kernel.device import Device
from ..plan.problem import ITEMSIZE
from ..plan.steps import OtherPlan
from ..plan.tables import OVERLAPPED, REACH, SPLIT, tables_of
from . import one_launch, overlapped
from .one_launch import VECTOR_COLS
from .problem import LinearProblem

ROWS = (*one_launch.ROWS, *overlapped.ROWS)  # what was measured serves up to so many rows
DTYPES = ("float16", "bfloat16")

# The rule was found by 210 layers on an H100 (docs/tuning.md), which has 25 GB/s per SM; an H200 has 36.
MOST_BANDWIDTH = 28
# One launch wins for so many rows of any layer, and for so many of long rows. More of x than this is divided.
ONE_LAUNCH_ROWS, ONE_LAUNCH_LONG_ROWS, LONG_ROW = 8, 16, 2048
UNDIVIDED_BYTES = 28 << 10
# Overlapped launches win for few columns, and otherwise for so many outs of a CTA, by ROWS; never for more than this.
FEW_COLUMNS = 1024
LEAST_OUTS = {8: 24, 16: 24, 32: 24, 64: 24, 128: 32, 192: 48}
MOST_OUTS = 192


@lru_cache(maxsize=4096)
def chosen(problem: LinearProblem, device: Device) -> OtherPlan | None:
    """Return the launches that are faster than split; None: split."""
    measured = _measured(problem, device)
    if measured == SPLIT:
        return None
    plans = _ways(problem, device)
    way = _expected(problem, device, plans) if measured is None else measured
    return plans[way]() if way in plans else None


def ways(problem: LinearProblem, device: Device) -> dict[int, OtherPlan]:
    """Return every plan but split, by the CTAs of the clusters of one launch, or OVERLAPPED."""
    return {way: make() for way, make in _ways(problem, device).items()}


def _ways(problem: LinearProblem, device: Device) -> dict[int, Callable[[], OtherPlan]]:
    if _why_not(problem, device):
        return {}
    plans: dict[int, Callable[[], OtherPlan]] = {}
    if not one_launch.why_not(problem, device):
        for division in one_launch.divisions(problem, device):
            plans[division.cluster] = partial(one_launch.plan, problem, device, division)
    if not overlapped.why_not(problem, device):
        plans[OVERLAPPED] = partial(overlapped.plan, problem, device)
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


def _measured(problem: LinearProblem, device: Device) -> int | None:
    """Return what was measured to be the fastest; None if nothing like it was measured.

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
    return None


def _expected(problem: LinearProblem, device: Device, plans: Collection[int]) -> int:
    """Return which of the plans wins by the rule, else SPLIT."""
    rows, one_launches = rows_of(problem), sorted(way for way in plans if way > SPLIT)
    if device.bandwidth / device.sms > MOST_BANDWIDTH:
        return SPLIT
    if one_launches and (rows <= ONE_LAUNCH_ROWS or (rows <= ONE_LAUNCH_LONG_ROWS and problem.cols >= LONG_ROW)):
        divided = rows * problem.cols * ITEMSIZE[problem.dtype] > UNDIVIDED_BYTES
        return next((ctas for ctas in one_launches if ctas > 1), SPLIT) if divided else one_launches[0]
    if OVERLAPPED not in plans:
        return SPLIT
    outs = overlapped.outs_of_cta(problem, device)
    wins = (problem.cols <= FEW_COLUMNS or outs >= LEAST_OUTS[rows]) and outs <= MOST_OUTS
    return OVERLAPPED if wins else SPLIT


def rows_of(problem: LinearProblem) -> int:
    """Return up to how many rows are measured together with a problem's; 0 if they are always split."""
    return next((most for most in ROWS if problem.rows <= most), 0)


def describe(problem: LinearProblem, device: Device) -> str:
    """Say in a sentence what runs."""
    solution = chosen(problem, device)
    if solution is None:
        reason = why_not(problem, device) or f"nothing else is known to win for it on {device.name}"
        return f"split, the norm's kernel and then the product: {reason}"
    launches = [
        f"{step.spec}, grid {step.grid[0]}, {step.dynamic_shared} bytes of shared memory" for step in solution.steps
    ]
    return f"{'overlapped' if len(launches) > 1 else 'one launch'}: {'; with it '.join(launches)}"
