"""The backward kernel of rows that end within a vector: those of 16 bits that few warps hold better than the tiers do.

A thread shifts each vector of such a row at every reading, so a row that is kept is worth more than many warps: five
vectors by eight warps, of RMSNorm by up to twelve, where the row fills them. Where LayerNorm's rows do not, thirteen
warps keep two, in four stages. It gains 10 to 20% of many rows (docs/tuning.md); few rows have fewer threads.
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
EIGHT_WARPS = range(1121, 1281)  # vectors of a row to a CTA of eight warps
TO_TWELVE_WARPS = range(1281, 1921)
TWO_PACKS = range(769, 833)  # of a CTA of 13 warps, in clusters of four and more
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
    # Beside them a float32 weight at an odd address spills.
    return replace(spec, rows_stay=spec.columns_aligned or widest_column(spec) == 2)


def _shape(problem: Problem, pack: int, device: Device) -> RowShape | None:
    for size in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        packs = ceil_div(ceil_div(problem.cols, pack), size)
        if packs in EIGHT_WARPS or (packs in TO_TWELVE_WARPS and not problem.norm.subtracts_mean):
            return shape_of(pack, packs, PACKS, size)
        if packs in TWO_PACKS and size >= 4 and problem.norm.subtracts_mean:
            return shape_of(pack, packs, 2, size)
    return None
