"""Rows that the CTAs of a cluster hold together: who holds what of a row.

The forward pass takes, of all sizes of clusters, threads, packs and CTAs of an SM, those that cost least. What a row
costs was measured at 45 row lengths, 36864 to 262144 columns, a third with weight and bias of 32 bits (bench/NOTES.md).
Where the warps of an SM are no multiple of four, one of its four schedulers has a warp more than the others, and all
wait for that one. Parts of several rows on an SM hide what each waits for: LayerNorm of 143360 columns 69.8 us by
clusters of 16, three CTAs on an SM with four warps of nine packs, 76.7 by clusters of eight, one CTA of twelve warps of
six.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ..device import CLUSTER_SIZES, Device
from .problem import ITEMSIZE, Problem, whole
from .registers import column_bytes, registers_of, with_rows_kept, working_of_shifted
from .shapes import ceil_div, in_clusters, kernel_spec
from .shared_memory import dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# Of the SMs of an H200, how many the clusters of each size reach (Device.clusters). A constant, so that who holds what
# of a row, and so its bits, is the same on every GPU that has clusters of that size.
REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.95}
SHIFTED_REACHED = REACHED | {16: 0.85}  # by rows of odd widths
FIXED_PACKS, SHIFTED_FIXED_PACKS = 2, 5  # what a warp does once for a row, in packs
COST_BY_ROWS = {1: 1.15, 2: 1.04}  # of an SM that has parts of so few rows, which wait for each other
LEAST_THREADS, MOST_THREADS = 96, 512  # of a CTA
MOST_ROWS, MOST_WARPS = 4, 16  # of an SM
LEAST_PACKS, MOST_PACKS = 4, 10
EARLY_WARPS = 12  # of an SM, at most, whose registers are enough to ask early
# Rows that begin at odd addresses: of few packs a thread keeps weight and bias and the row once it has shifted it, and
# more warps hide the shifting. 50257 columns forward, LayerNorm 122 us, by seven packs 144, of four that are shifted at
# every reading 137; RMSNorm 83, 123 and 121, by 14 warps 91.
SHIFTED_PACKS, SHIFTED_WARPS = 4, 24
# Registers of a thread besides weight and bias, and one for each pack: nine in 128 spilled 8 to 24 bytes. Seven beside
# float32 weight and bias, of rows that fill all places, spilled 20 in 168.
WORKING, MORE_IF_FULL = 48, 3
# Bytes of weight and bias of four packs: of more, rows are streamed.
MOST_COLUMN_BYTES = 256
# Bytes. 200704 columns forward, 49 KB, 79.0 us with three places and 81.3 with two; 258048, 64 KB, 80.1 and 77.8.
# Backward of 172032, 42 KB, 117.7 and 125.8; of 200704, 50 KB, 118.5 and 127; of 57344, 56 KB, 109.8 and 109.3.
THREE_PLACES = 52 << 10


def cluster_forward(problem: Problem, device: Device) -> NormSpec | None:
    """The forward kernel of rows that a cluster holds, None where none does."""
    found = _forward_shape(problem, device)
    if found is None:
        return None
    shape, most = found
    spec = kernel_spec(problem, "forward", shape)
    spec = replace(spec, columns_stay=_columns_stay(problem, spec, device))
    for ctas in range(most, 0, -1):
        for stages in range(places(ctas * _bytes(shape) * len(spec.matrices)), 1, -1):
            # Parts of two and three rows of clusters of 16, by two places: LayerNorm of 143360 cols 69.8 us, late 72.0;
            # of 73728 cols, clusters of eight, 70.1 and 69.9.
            few = ctas < MOST_ROWS and ctas * shape.threads <= EARLY_WARPS * WARP
            early = stages == 2 and shape.cluster == 16 and few and spec.columns_stay
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages, ask_early=early)
            if ctas * (shared_memory(fitting) + dynamic_shared(fitting) + 1024) <= device.shared + 1024:
                return with_rows_kept(fitting, device)
    # Several matrices keep the shape of the plain norm's rows, and so its bits: where shared memory is too small they
    # wait in registers.
    several = len(spec.matrices) > 1
    if spec.scales == "per_row" and several and shape.threads == 512 and device.runs_clusters(2 * shape.cluster):
        # y is held as float32 beside the sum or the gate: 8 bytes spilled in 128 registers. Half the threads have twice
        # those.
        shape = in_clusters(replace(shape, threads=512 * shape.cluster, cluster=1), 2 * shape.cluster)
    return replace(spec, shape=shape)


def _forward_shape(problem: Problem, device: Device) -> tuple[RowShape, int] | None:
    """(who holds a row, CTAs of an SM): the same whatever else is read by rows, and at whatever addresses."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    if column_bytes(problem, RowShape(pack, WARP, LEAST_PACKS)) > MOST_COLUMN_BYTES:
        return None
    packs = ceil_div(problem.cols, pack)
    whole = problem.cols % pack == 0

    def candidates(whole: bool) -> Iterator[tuple[RowShape, int]]:
        most_packs, most_warps = (MOST_PACKS, MOST_WARPS) if whole else (SHIFTED_PACKS, SHIFTED_WARPS)
        for size in filter(device.runs_clusters, CLUSTER_SIZES):
            for threads in range(LEAST_THREADS, MOST_THREADS + 1, WARP):
                shape = RowShape(pack, threads, ceil_div(ceil_div(packs, size), threads), size)
                if LEAST_PACKS <= shape.packs <= most_packs:
                    most_rows = min(MOST_ROWS, most_warps * WARP // threads)
                    yield from ((shape, ctas) for ctas in range(1, most_rows + 1))

    def fits(shape: RowShape, ctas: int) -> bool:
        full = MORE_IF_FULL * (shape.capacity == problem.cols)
        registers = _registers(problem, shape, WORKING + shape.packs + full)
        if not whole:
            of_row = shape.packs * shape.pack * ITEMSIZE[problem.row_dtype] // 4
            registers = _registers(problem, shape, working_of_shifted(problem.norm) + of_row)
        # Two places, with room for a byte more for each pack at an odd address and for what warps tell each other.
        shared = 2 * (_bytes(shape) + shape.threads * shape.packs) + (6 << 10)
        return registers <= registers_of(ctas * shape.threads) and ctas * (shared + 1024) <= device.shared + 1024

    def cost(candidate: tuple[RowShape, int]) -> tuple[float, int, int]:
        shape, ctas = candidate
        warps = ctas * shape.threads // WARP
        reached = (REACHED if whole else SHIFTED_REACHED)[shape.cluster]
        fixed = FIXED_PACKS if whole else SHIFTED_FIXED_PACKS
        turn = ceil_div(warps, 4) * (shape.packs + fixed) * (COST_BY_ROWS.get(ctas, 1) if whole else 1)
        return round(turn * shape.cluster / (ctas * reached), 6), -ctas, shape.threads

    found = [one for one in candidates(whole) if fits(*one)] or [one for one in candidates(True) if fits(*one)]
    return min(found, key=cost, default=None)


def _registers(problem: Problem, shape: RowShape, working: int) -> int:
    return working + column_bytes(problem, shape) // 4


def _bytes(shape: RowShape) -> int:
    """Of what a CTA holds of a row, in a matrix of the dtype of x."""
    return 16 * shape.threads * shape.packs


def _columns_stay(problem: Problem, spec: NormSpec, device: Device) -> bool:
    """Whether a thread keeps weight and bias. Where it says no, ptxas spilled 4 to 176 bytes."""
    # Beside two matrices add_layer_norm took 173 us with them and 139 without, 16384 x 4096.
    if len(spec.matrices) > 1 or spec.finds_scales or spec.grouped:
        return False
    if not spec.aligned and spec.shape.packs > SHIFTED_PACKS:
        return False
    rows = {problem.row_dtype} | {one.dtype for one in problem.operands if one.kind == "full"}
    full = spec.shape.capacity == problem.cols
    return rows == {problem.row_dtype} != {"float64"} and (
        device.arch < 100 or (full and not problem.norm.subtracts_mean)
    )


# The backward pass, likewise, fitted to 44 row lengths of 36864 to 262144 columns.
BACKWARD_REACHED = {4: 0.85, 8: 1.0, 16: 0.95}
BACKWARD_FIXED_PACKS, BACKWARD_LEAST_PACKS = 3, 3
SLOWER = 1.1  # where a thread does not keep its row, and where two rows under way take too much shared memory
# Registers of a thread besides the sums of its columns: with 64 four packs in 128 spilled 24 bytes.
BACKWARD_WORKING = 73


def cluster_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The backward kernel of rows of whole packs that more than four CTAs hold, of x and dy alone; None if none fits.

    LayerNorm of 163840 cols by eight warps of five packs, which keep the row, 103.5 us, by 14 of three 115.4; RMSNorm
    101.9 and 105.1.
    """
    columns = [one.dtype for one in problem.operands if one.kind == "column" and not one.written]
    widest = max(columns, key=lambda dtype: ITEMSIZE[dtype], default=problem.row_dtype)
    # The same whatever gradients are asked for, and at whatever addresses: so are the bits of dx.
    all_of_it = whole(problem.operation.norm, "backward", 1, problem.cols, problem.row_dtype, widest)
    found = _backward_shape(all_of_it, device)
    if found is None:
        return None
    shape, ctas = found
    return _under_way(problem, kernel_spec(problem, "backward", shape, ctas_per_sm=ctas), device)


@lru_cache(maxsize=1024)
def _backward_shape(problem: Problem, device: Device) -> tuple[RowShape, int] | None:
    """(who holds a row, CTAs of an SM): what costs least."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    found = []
    for size, ctas in product(filter(device.runs_clusters, BACKWARD_REACHED), (1, 2)):
        # Eight took 4 to 11% longer by two CTAs on an SM, 3 to 8% by clusters of four.
        most = 6 if ctas == 2 else 7 if size == 4 else 8
        for threads in range(192 // ctas, MOST_THREADS // ctas + 1, WARP):
            shape = RowShape(pack, threads, ceil_div(ceil_div(packs, size), threads), size)
            if not BACKWARD_LEAST_PACKS <= shape.packs <= most:
                continue
            spec = kernel_spec(problem, "backward", shape, ctas_per_sm=ctas)
            fitting = _under_way(problem, spec, device)
            if fitting and _under_way(problem, replace(spec, aligned=False, columns_aligned=False), device):
                found.append((_backward_cost(fitting), threads, (shape, ctas)))
    return min(found, key=lambda one: one[:2])[-1] if found else None


def _under_way(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """The same with places for rows; None if registers or shared memory are too small."""
    shape, ctas, width = spec.shape, spec.ctas_per_sm, ITEMSIZE[problem.row_dtype]
    sums = len(spec.sums) * shape.packs * shape.pack * ITEMSIZE[problem.compute] // 4
    wide = 16 * any(one.itemsize > width for one in (*spec.columns, *spec.matrices))
    if BACKWARD_WORKING + sums + wide > registers_of(ctas * shape.threads):
        return None
    of_row = ctas * _bytes(shape) * sum(one.itemsize for one in spec.matrices) // width
    # RMSNorm of long rows: 217088 cols by one row under way, asked for early, 104.4 us, late 111.5.
    early = of_row > THREE_PLACES and not problem.norm.subtracts_mean
    for stages in (2,) if early else (3, 2):
        fitting = with_rows_kept(replace(spec, stages=stages, ask_early=early), device)
        if ctas * (shared_memory(fitting) + dynamic_shared(fitting) + 1024) <= device.shared + 1024:
            return fitting
    return None


def _backward_cost(spec: NormSpec) -> float:
    shape, ctas = spec.shape, spec.ctas_per_sm
    turn = ceil_div(ctas * shape.threads // WARP, 4) * (shape.packs + BACKWARD_FIXED_PACKS)
    if not spec.rows_stay:
        turn *= SLOWER * (SLOWER if spec.stages == 2 else 1)
    return round(turn * shape.cluster / (ctas * BACKWARD_REACHED[shape.cluster]), 6)


def backward_shape(shapes: list[RowShape]) -> RowShape:
    """Of these, one for each number of packs, the one by which a row is the least work for an SM's schedulers."""
    # Five packs by 256 threads would be that of 73728 columns, and are slower.
    shapes = [one for one in shapes if one.packs < 5 or one.threads > 256] or shapes
    return min(shapes, key=lambda shape: (ceil_div(shape.threads // WARP, 4) * shape.packs, shape.packs))


def places(of_row: int) -> int:
    """For each row of a CTA that takes so many bytes at once: what is under way is enough, and not too much."""
    return 3 if of_row <= THREE_PLACES else 2
