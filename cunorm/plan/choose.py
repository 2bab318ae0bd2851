"""Which kernel runs the rows of a `Problem` on a `Device`: by row length a tier, and there what a table of measurements
says, else the cost rule.

The shape of a row (who holds which columns) depends on cols, dtypes and architecture, never on the number of rows nor
on addresses: a row's result is the same to the bit whatever else is in the batch. Pure functions; no GPU library is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from .backward_parts import part
from .backward_rows import Held, backward_rows, shape_of_rows
from .cluster_backward import MOST_CLUSTER_PACKS, cluster_backward
from .cluster_forward import cluster_forward
from .few_rows import adds_columns_beside_rows, few_rows_backward
from .forward_rows import forward_rows
from .forward_twice import forward_twice
from .measured import measured
from .odd_backward import MOST_ODD_PACKS, odd_backward
from .problem import ITEMSIZE, Problem
from .shapes import ceil_div, kernel_spec
from .spec import FewRowsSpec, NormSpec, RowShape
from .steps import STREAMED_THREADS


class Tier(NamedTuple):
    """How rows of up to `most` vectors are run."""

    most: int
    by: Held | Callable[[Problem, Device], NormSpec | None]  # a rule says None where rows do not fit, or others win
    norm: str = ""  # that it is for, if not for all


# Forward one rule has all rows of one CTA, and one those of clusters. There is a line for each row length at which a
# thread's vectors or a row's threads change a good deal, for those who want an example of each.
SHORT = (2, 32, 64, 128, 256, 288, 320, 512, 640, 672, 1024, 1280, 1536, 1792, 2048, 3072, 4096)
CLUSTERS = (5120, 6144, 8192, 10240, 16384, 24576, 32768, 65536)
FORWARD = (
    *(Tier(most, forward_rows) for most in SHORT),
    *(Tier(most, cluster_forward) for most in CLUSTERS),
)
# A thread also holds dweight and dbias of its columns. An H200 was searched for about 64 KB under way on an SM, in
# bfloat16; what else was tried is in docs/tuning.md.
BACKWARD = (
    Tier(MOST_ODD_PACKS, odd_backward),
    Tier(512, Held(stages=3, ask_early=("rms_norm",))),
    Tier(576, Held((3,), cta=192, stages=3), norm="layer_norm"),
    Tier(640, Held((2,), cta=320, resident=640, stages=3), norm="layer_norm"),
    Tier(640, Held((2,), cta=640, resident=640, stages=2, always_early=True), norm="rms_norm"),
    Tier(1024, Held((2,), stages=3, ask_early=("rms_norm",))),
    Tier(1344, Held((3,), cta=448, resident=448, stages=3)),
    Tier(1536, Held((3,), stages=2)),
    Tier(2048, Held((4,), cluster=2, cta=256, resident=256, stages=3, fused_packs=2)),
    Tier(2304, Held((3,), cluster=2, cta=384, resident=384, stages=3)),
    Tier(3072, Held((3, 4), cluster=2)),
    Tier(4096, Held((4,), cluster=4, cta=256, resident=256)),
    Tier(MOST_CLUSTER_PACKS, cluster_backward),
    Tier(6144, Held((3, 4), cluster=4)),
    Tier(8192, Held((4,), cluster=8, cta=256, resident=256)),
    Tier(16384, Held((3, 4, 5), cluster=8)),
    Tier(32768, Held((3, 4, 5), cluster=16)),
)
TABLES = {"forward": FORWARD, "backward": BACKWARD}


def choose(problem: Problem, device: Device) -> NormSpec | FewRowsSpec | None:
    """The kernel of the rows of a problem; None for rows of a backward pass that are streamed."""
    if problem.direction == "forward":
        if problem.operation.second:
            return forward_twice(problem, device)
        return held_by(problem, device) or _forward_streamed(problem, device)
    # For sums of dy alone neither x nor the whole of a row is needed.
    written = [operand for operand in problem.operands if operand.written]
    needs_rows = len(problem.sums) < len(written) or "rstd" in problem.pointers
    tier, spec = (needs_rows and _shape(problem, device)) or (None, None)
    if tier is None or spec is None:
        return None
    if not problem.groups:
        if adds_columns_beside_rows(problem, device):
            return few_rows_backward(problem, _rows_apart(problem.layout, device), spec.shape, device)
        if (found := measured(problem, spec, device)) is not None:
            return found
    return backward_rows(problem, tier.by, spec, device) if isinstance(tier.by, Held) else spec


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
    """The tier that takes rows of this length, and its kernel; None if the row has to be streamed."""
    found = _shape(problem, device)
    if found is None:
        return None
    tier, spec = found
    return tier, backward_rows(problem, tier.by, spec, device) if isinstance(tier.by, Held) else spec


def _shape(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """The tier and its kernel; of a `Held` before it is known how that is run."""
    if problem.direction == "forward":
        return _tier(problem, device)
    return _tier_of_layout(problem.layout, device)


def _tier(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    vectors = ceil_div(problem.cols, 16 // ITEMSIZE[problem.row_dtype])
    for tier in TABLES[problem.direction]:
        if vectors > tier.most or tier.norm not in ("", problem.operation.norm):
            continue
        held = isinstance(tier.by, Held)
        spec = shape_of_rows(problem, tier.by, device) if held else tier.by(problem, device)
        if spec is not None:
            return tier, spec
    return None


# Backward it does not depend on the number of rows, but for a single one, which is aligned whatever its stride.
_tier_of_layout = lru_cache(maxsize=4096)(_tier)


def _forward_streamed(problem: Problem, device: Device) -> NormSpec:
    """The kernel of rows that nothing holds, which reads them twice."""
    shape = RowShape(16 // ITEMSIZE[problem.row_dtype], STREAMED_THREADS, 1)
    spec = kernel_spec(problem, "forward_streamed", shape)
    # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
    arrays = {operand.dtype for operand in problem.operands if operand.kind in ("full", "column", "group")}
    two = arrays == {problem.row_dtype} != {"float64"} and len(spec.matrices) == 1 and spec.aligned
    return replace(spec, ctas_per_sm=2 if two else 1)
