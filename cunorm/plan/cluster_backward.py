"""The backward kernel of rows that the CTAs of a cluster hold together: who holds what of a row, and the cost rule.

What a row costs an SM's schedulers was fitted to searches of rows of 36864 to 262144 columns (docs/tuning.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from ..kernel.device import Device
from .backward_parts import is_plain
from .cluster_forward import THREE_STAGES, bytes_of_part
from .plain_problems import every_gradient
from .problem import ITEMSIZE, Problem
from .registers import registers_of, with_rows_kept
from .shapes import ceil_div, kernel_spec
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# The share of an H200's SMs that the clusters of each size reach, as in cluster_forward.py.
REACHED = {4: 0.85, 8: 1.0, 16: 0.95}
MOST_CLUSTER_PACKS = 65536  # of a row
FIXED_PACKS = 3  # what a warp does once for a row, counted in vectors
LEAST_PACKS = 3
LEAST_THREADS, MOST_THREADS = 192, 512  # of an SM
SLOWER = 1.1  # where a thread does not keep its row, and where two rows under way take too much shared memory
# Registers of a thread beside the sums of its columns. Vectors of four columns take fewer, by architecture. With fewer
# ptxas spills.
WORKING, WORKING_OF_FOUR = 73, {90: 64, 100: 72}


def cluster_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The backward kernel of rows of whole vectors that more than four CTAs hold, of x and dy alone, where a GPU has
    clusters of 16; None if none fits.

    Where two rows are more than shared memory has, one is filled again in place, in half the time of a streamed row.
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
    """What costs least: who holds a row, CTAs of an SM, and whether rows are filled again in place."""
    return _cheapest(problem, device, in_place=False) or _cheapest(problem, device, in_place=True)


def _cheapest(problem: Problem, device: Device, in_place: bool) -> tuple[RowShape, int, bool] | None:
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    found = []
    # In place by four warps more at a time: an odd number spills where the next even one has as many registers.
    least, step = (3 * 4 * WARP, 4 * WARP) if in_place else (LEAST_THREADS, WARP)
    for size, ctas in product(filter(device.runs_clusters, REACHED), (1, 2)):
        # The most vectors of a thread, by two CTAs on an SM and by clusters of four fewer.
        most = 6 if ctas == 2 else 7 if size == 4 else 8
        if device.arch == 120:
            most = min(most, 5)  # six spill in 255 registers
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
    """The same kernel with stages for rows; None if registers or shared memory are too small."""
    shape, ctas, width = spec.shape, spec.ctas_per_sm, ITEMSIZE[problem.row_dtype]
    if registers_of_long_row(spec, device) > registers_of(ctas * shape.threads):
        return None
    of_row = ctas * bytes_of_part(shape) * sum(one.itemsize for one in spec.matrices) // width
    # RMSNorm of long rows of 16 bits loads one row ahead, early.
    one_ahead = of_row > THREE_STAGES and not problem.norm.subtracts_mean
    for stages in (1,) if in_place else (2,) if one_ahead else (3, 2):
        fitting = replace(spec, stages=stages, ask_early=one_ahead and width == 2 and not in_place)
        fitting = fitting if in_place else with_rows_kept(fitting, device)
        if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
            return fitting
    return None


def registers_of_long_row(spec: NormSpec, device: Device) -> int:
    """Registers of a thread that does not keep its row."""
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
