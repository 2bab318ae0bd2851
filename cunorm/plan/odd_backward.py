"""Backward rows that end within a pack: those of 16 bits that few warps hold better than the tiers do.

A thread shifts each pack of such a row at every reading, so a row that is kept is worth more than many warps: by five
packs of eight warps, RMSNorm of up to twelve, where the row fills them. H100, 64 M elements, us: LayerNorm of 10007
cols 150, by three packs of fourteen warps 167; of 20011 150 and 172, of 80021 162 and 188, of 150001 181 and 219;
RMSNorm of 12345 145 and 175, of 50257 148 and 184, of 100003 147 and 191, where five packs had not been kept; by eleven
and twelve warps 27001 147 and 174, 56001 148 and 170, 14999 152 and 161. What it costs: few rows have fewer threads,
RMSNorm of 84 x 12345 7.9 and 6.4.

Where LayerNorm's rows do not fill five packs, thirteen warps keep two, in four places: 50257 cols 177 and 194,
100003 193 and 202.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernel.device import CLUSTER_SIZES, Device
from .backward_parts import is_plain
from .plain_problems import every_gradient
from .problem import ITEMSIZE, Problem
from .registers import widest_column, with_rows_kept
from .shapes import ceil_div, kernel_spec, shape_of
from .shared_memory import dynamic_shared, shared_memory
from .spec import NormSpec, RowShape

PACKS = 5
EIGHT_WARPS = range(1121, 1281)  # packs of a row to a CTA of eight warps
TO_TWELVE_WARPS = range(1281, 1921)  # By three packs in 128 registers RMSNorm of 10501 cols spilled 112 bytes
TWO_PACKS = range(769, 833)  # of a CTA of 13 warps, in clusters of four and more; few rows by 14 spilled 8 bytes
MOST_ODD_PACKS = TO_TWELVE_WARPS[-1] * CLUSTER_SIZES[-1]  # of a row


def odd_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The kernel of such a row of x and dy alone, of 16 bits, on Hopper; None where the tiers have a better one."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    wide = any(one.itemsize > 2 for one in problem.operands if one.kind == "full")
    if pack != 8 or wide or problem.cols % pack == 0 or device.arch != 90 or not is_plain(problem):
        return None
    shape = _shape(problem, pack, device)
    if shape is None:
        return None
    stages = 2 if shape.packs == PACKS else 4
    most = kernel_spec(every_gradient(problem), "backward", shape, stages=stages, aligned=False, columns_aligned=False)
    if shared_memory(most) + dynamic_shared(most) > device.shared:
        return None
    spec = kernel_spec(problem, "backward", shape, stages=stages)
    if shape.packs == PACKS:
        return with_rows_kept(spec, device)
    # A float32 weight at an odd address beside them spilled 56 bytes in 128 registers.
    return replace(spec, rows_stay=spec.columns_aligned or widest_column(spec) == 2)


def _shape(problem: Problem, pack: int, device: Device) -> RowShape | None:
    for size in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        packs = ceil_div(ceil_div(problem.cols, pack), size)
        if packs in EIGHT_WARPS or (packs in TO_TWELVE_WARPS and not problem.norm.subtracts_mean):
            return shape_of(pack, packs, PACKS, size)
        if packs in TWO_PACKS and size >= 4 and problem.norm.subtracts_mean:
            return shape_of(pack, packs, 2, size)
    return None
