"""The forward kernel of two norms of a row, one after the other."""

from __future__ import annotations

from dataclasses import replace

from ..kernel.device import Device
from .problem import ITEMSIZE, Problem
from .registers import RESIDENT, column_bytes, ctas_of, words_to_shift
from .shapes import ceil_div, short_forward_spec
from .spec import NormSpec


def holds_twice(row_dtype: str, cols: int) -> bool:
    """Whether one kernel does two norms of such rows, one after the other: a CTA holds them in six packs a thread.

    With eight, at odd addresses, it spills on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_twice(problem: Problem, device: Device) -> NormSpec:
    """That kernel. A row has the shape of either norm's own, and so its bits."""
    spec = short_forward_spec(problem, "forward_twice")
    shape = spec.shape
    # x and residual wait at once; of either norm's vectors a pack comes late, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + words_to_shift(spec) * (1 if spec.aligned else 4)
    waiting = shape.packs * sum(shape.pack * one.itemsize // 4 for one in spec.matrices) * (1 if spec.aligned else 2)
    ctas = ctas_of(spec, working + waiting + column_bytes(problem, shape) // 4, RESIDENT)
    if spec.aligned and problem.rows <= (device.sms - problem.sm_margin) * ctas * spec.rows_per_cta:
        # All rows at once, as in forward_rows.py: else they wait for either weight after the sums.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, working + waiting, RESIDENT)))
