"""How a norm with its product runs: one launch, overlapped or split, by a table of measurements, else by a rule.

The functions are pure and import no GPU library. Where nothing says that something else wins, the norm's kernel and
cuBLASLt's product run one after the other (split).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import NamedTuple

from ..kernel.device import Device
from ..plan.problem import ITEMSIZE
from ..plan.steps import OtherPlan
from ..plan.tables import OVERLAPPED, REACH, SPLIT, tables_of
from . import one_launch, overlapped
from .one_launch import VECTOR_COLS
from .problem import LinearProblem

ROWS = (*one_launch.ROWS, *overlapped.ROWS)  # what was measured serves up to so many rows
DTYPES = ("float16", "bfloat16")

ANY = 1 << 30


class Wins(NamedTuple):
    """The layers that a way wins for where no table says so; outs are those of a CTA of the overlapped product."""

    # By up to how many rows (ROWS): at least so many cols, and so many outs.
    one_launch: dict[int, tuple[tuple[int, range], ...]]
    # By up to how many rows: at most so many cols, and at least so many outs.
    overlapped: dict[int, tuple[tuple[int, int], ...]]
    most_outs: int  # that overlapped launches win for


SHORT = (1024, 0)  # rows for which overlapped launches win with any outs
# 282 layers were timed on each (docs/tuning.md).
ON_H100 = Wins(
    one_launch={8: ((0, range(ANY)),), 16: ((2048, range(ANY)),)},
    overlapped=dict.fromkeys((8, 16, 32, 64), (SHORT, (ANY, 24))) | {128: (SHORT, (ANY, 32)), 192: (SHORT, (ANY, 48))},
    most_outs=192,
)
ON_H200 = Wins(
    one_launch={8: ((0, range(40)), (2048, range(ANY))), 16: ((2048, range(40)), (2048, range(200, ANY)))},
    overlapped=dict.fromkeys((8, 16, 32, 64), (SHORT, (3072, 24), (ANY, 48)))
    | {128: (SHORT, (ANY, 56)), 192: ((ANY, 96),)},
    most_outs=ANY,
)
MOST_BANDWIDTH = 28  # GB/s per SM up to which a GPU is like an H100, which has 25; an H200 has 37
# One launch divides x among CTAs if it has more bytes than UNDIVIDED, and further beside few outs.
UNDIVIDED_BYTES, FEW_OUTS, BESIDE_FEW_OUTS_BYTES = 28 << 10, 40, 48 << 10


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
    wins = ON_H100 if device.bandwidth / device.sms <= MOST_BANDWIDTH else ON_H200
    rows, cols, outs = rows_of(problem), problem.cols, overlapped.outs_of_cta(problem, device)
    one_launches = sorted(way for way in plans if way > SPLIT)
    if one_launches and any(cols >= least and outs in win for least, win in wins.one_launch.get(rows, ())):
        of_x = rows * cols * ITEMSIZE[problem.dtype]
        most_of_cta = BESIDE_FEW_OUTS_BYTES if outs <= FEW_OUTS else of_x
        divided = [ctas for ctas in one_launches if ctas > 1 or of_x <= UNDIVIDED_BYTES]
        return next((ctas for ctas in divided if of_x <= ctas * most_of_cta), max(divided, default=SPLIT))
    if OVERLAPPED not in plans or outs > wins.most_outs:
        return SPLIT
    return OVERLAPPED if any(cols <= most and outs >= least for most, least in wins.overlapped[rows]) else SPLIT


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
