"""Backward rows that the CTAs of a cluster hold together: who holds what of a row.

What a row costs an SM's schedulers was fitted to searches at row lengths of 36864 to 262144 columns (docs/tuning.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from ..kernel.device import Device
from .backward_parts import is_plain
from .cluster_forward import THREE_PLACES, bytes_of_part
from .plain_problems import every_gradient
from .problem import ITEMSIZE, Problem
from .registers import registers_of, with_rows_kept
from .shapes import ceil_div, kernel_spec
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# How much of an H200's SMs the clusters of each size count as reaching, as in cluster_forward.py.
REACHED = {4: 0.85, 8: 1.0, 16: 0.95}
MOST_CLUSTER_PACKS = 65536  # of a row
FIXED_PACKS = 3  # what a warp does once for a row, in packs
LEAST_PACKS = 3
LEAST_THREADS, MOST_THREADS = 192, 512  # of an SM
SLOWER = 1.1  # where a thread does not keep its row, and where two rows under way take too much shared memory
# Registers of a thread besides the sums of its columns: with 64 four packs in 128 spilled 24 bytes. Packs of four
# columns take fewer, by architecture: on sm_100 eight of them spilled 28 bytes with 64.
WORKING, WORKING_OF_FOUR = 73, {90: 64, 100: 72}


def cluster_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The backward kernel of rows of whole packs that more than four CTAs hold, of x and dy alone, where a GPU has
    clusters of 16; None if none fits.

    LayerNorm of 163840 cols by eight warps of five packs, which keep the row, 103.5 us, by 14 of three 115.4; RMSNorm
    101.9 and 105.1. Where two rows are more than shared memory has, one is filled again in place: float32, H100, 262144
    cols 288 us, streamed 635; of 163840, which have two places, 276, in one 288.
    """
    if problem.cols % (16 // ITEMSIZE[problem.row_dtype]) or not device.runs_clusters(16) or not is_plain(problem):
        return None
    # The same whatever gradients are asked for, and at whatever addresses: so are the bits of dx.
    found = _shape(every_gradient(problem), device)
    if found is None:
        return None
    shape, ctas, in_place = found

    def under_way(one: Problem, **changes: bool) -> NormSpec | None:
        return _under_way(one, kernel_spec(one, "backward", shape, ctas_per_sm=ctas, **changes), device, in_place)

    # Beside a wide dy, or more sums than a norm has, such a row may not fit: then with no gradient and at no address.
    most = (every_gradient(problem, own_dtypes=True), problem)
    if not all(under_way(one, aligned=False, columns_aligned=False) for one in most):
        return None
    return under_way(problem)


@lru_cache(maxsize=1024)
def _shape(problem: Problem, device: Device) -> tuple[RowShape, int, bool] | None:
    """(who holds a row, CTAs of an SM, whether rows are filled again in place): what costs least."""
    return _cheapest(problem, device, in_place=False) or _cheapest(problem, device, in_place=True)


def _cheapest(problem: Problem, device: Device, in_place: bool) -> tuple[RowShape, int, bool] | None:
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    found = []
    # LayerNorm in place of eight packs by 15 warps spilled 12 to 124 bytes, by 16, which have as many registers, none.
    least, step = (3 * 4 * WARP, 4 * WARP) if in_place else (LEAST_THREADS, WARP)
    for size, ctas in product(filter(device.runs_clusters, REACHED), (1, 2)):
        # Eight took 4 to 11% longer by two CTAs on an SM, 3 to 8% by clusters of four.
        most = 6 if ctas == 2 else 7 if size == 4 else 8
        if device.arch == 120:
            most = min(most, 5)  # six packs of 32776 cols spilled 48 bytes in 255 registers
        for threads in range(least // ctas, MOST_THREADS // ctas + 1, step):
            shape = RowShape(pack, threads, ceil_div(ceil_div(packs, size), threads), size)
            if not LEAST_PACKS <= shape.packs <= most:
                continue
            spec = kernel_spec(problem, "backward", shape, ctas_per_sm=ctas)
            fitting = _under_way(problem, spec, device, in_place)
            if fitting and _under_way(problem, replace(spec, aligned=False, columns_aligned=False), device, in_place):
                found.append((_cost(fitting), threads, (shape, ctas, in_place)))
    return min(found, key=lambda one: one[:2])[-1] if found else None


def _under_way(problem: Problem, spec: NormSpec, device: Device, in_place: bool) -> NormSpec | None:
    """The same with places for rows; None if registers or shared memory are too small."""
    shape, ctas, width = spec.shape, spec.ctas_per_sm, ITEMSIZE[problem.row_dtype]
    if registers_of_long_row(spec, device) > registers_of(ctas * shape.threads):
        return None
    of_row = ctas * bytes_of_part(shape) * sum(one.itemsize for one in spec.matrices) // width
    # RMSNorm of long rows: 217088 cols by one row under way, asked for early, 104.4 us, late 111.5. But float32 of
    # 163840 cols late 273, early 288 (H100).
    one_ahead = of_row > THREE_PLACES and not problem.norm.subtracts_mean
    for stages in (1,) if in_place else (2,) if one_ahead else (3, 2):
        fitting = replace(spec, stages=stages, ask_early=one_ahead and width == 2 and not in_place)
        fitting = fitting if in_place else with_rows_kept(fitting, device)
        if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
            return fitting
    return None


def registers_of_long_row(spec: NormSpec, device: Device) -> int:
    """Of a thread, which does not keep its row."""
    shape = spec.shape
    sums = len(spec.sums) * shape.packs * shape.pack * ITEMSIZE[spec.compute] // 4
    wide = 16 * any(one.itemsize > ITEMSIZE[spec.row_dtype] for one in (*spec.columns, *spec.matrices))
    working = WORKING_OF_FOUR.get(device.arch, WORKING) if shape.pack == 4 else WORKING
    return working + sums + wide


def _cost(spec: NormSpec) -> float:
    shape, ctas = spec.shape, spec.ctas_per_sm
    turn = ceil_div(ctas * shape.threads // WARP, 4) * (shape.packs + FIXED_PACKS)
    if not spec.rows_stay:
        turn *= SLOWER * (SLOWER if spec.stages == 2 else 1)
    return round(turn * shape.cluster / (ctas * REACHED[shape.cluster]), 6)
