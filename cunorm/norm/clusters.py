"""Rows that the CTAs of a cluster hold together: who holds what of a row.

The forward pass takes, of all sizes of clusters, threads, packs and CTAs of an SM, those that cost least. What a row
costs was measured at 9 row lengths, 36864 to 258048 columns, with weight and bias of 16 and 32 bits (bench/NOTES.md).
Where the warps of an SM are no multiple of four, one of its four schedulers has a warp more than the others, and all
wait for that one: 73728 columns took 90 us by nine warps of eight packs, 78 by twelve of six.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..device import CLUSTER_SIZES, Device
from .problem import ITEMSIZE, Problem
from .registers import column_bytes, registers_of, with_shifted, working_of_shifted
from .shapes import ceil_div, in_clusters, kernel_spec
from .shared_memory import dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# Of the SMs of an H200, how many the clusters of each size reach (Device.clusters). A constant, so that who holds what
# of a row, and so its bits, is the same on every GPU that has clusters of that size.
REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.85}
FIXED_PACKS = 5  # what a warp does once for a row, in packs
FEW_WARPS = 12  # fewer hide too little of what they wait for,
FEW_WARPS_COST = 1.15  # and take so much longer
MOST_THREADS = 512  # of a CTA
MOST_WARPS = 16  # of an SM
LEAST_PACKS, MOST_PACKS = 4, 8
# Rows that begin at odd addresses: of few packs a thread keeps weight and bias and the row once it has shifted it, and
# more warps hide the shifting. 50257 columns forward, LayerNorm 122 us, by seven packs 144, of four that are shifted at
# every reading 137; RMSNorm 83, 123 and 121, by 14 warps 91.
SHIFTED_PACKS, SHIFTED_WARPS = 4, 24
# Registers of a thread besides weight and bias. With as few as 40 ptxas spilled 4 to 12 bytes unless the next row is
# asked for before the present one is summed up, which is fast with three CTAs on an SM alone: weight and bias of 32
# bits, eight packs, 122880 columns 77 us, but 196608 by two 103, 49152 by four 84 and by one 85.
WORKING, WORKING_IF_EARLY = 48, 40
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
    early = spec.columns_stay and _registers(problem, shape, WORKING) > registers_of(most * shape.threads)
    spec = replace(spec, ask_early=early)
    for ctas in range(most, 0, -1):
        for stages in range(2 if early else places(ctas * _bytes(shape) * len(spec.matrices)), 1, -1):
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages)
            if ctas * (shared_memory(fitting) + dynamic_shared(fitting) + 1024) <= device.shared + 1024:
                return with_shifted(fitting, device)
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
            for threads in range(2 * WARP, MOST_THREADS + 1, WARP):
                shape = RowShape(pack, threads, ceil_div(ceil_div(packs, size), threads), size)
                if LEAST_PACKS <= shape.packs <= most_packs:
                    yield from ((shape, ctas) for ctas in range(1, most_warps * WARP // threads + 1))

    def fits(shape: RowShape, ctas: int) -> bool:
        registers = _registers(problem, shape, WORKING_IF_EARLY if ctas == 3 else WORKING)
        if not whole:
            of_row = shape.packs * shape.pack * ITEMSIZE[problem.row_dtype] // 4
            registers = _registers(problem, shape, working_of_shifted(problem.norm) + of_row)
        # Two places, with room for a byte more for each pack at an odd address and for what warps tell each other.
        shared = 2 * (_bytes(shape) + shape.threads * shape.packs) + (6 << 10)
        return registers <= registers_of(ctas * shape.threads) and ctas * (shared + 1024) <= device.shared + 1024

    def cost(candidate: tuple[RowShape, int]) -> tuple[float, int, int]:
        shape, ctas = candidate
        warps = ctas * shape.threads // WARP
        turn = ceil_div(warps, 4) * (shape.packs + FIXED_PACKS) * (FEW_WARPS_COST if warps < FEW_WARPS else 1)
        # Two rows on an SM at once, of twice as many SMs each, are up to 5% faster.
        return round(turn * shape.cluster / (ctas * REACHED[shape.cluster]), 6), -ctas, shape.threads

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


def backward_shape(shapes: list[RowShape]) -> RowShape:
    """Of these, one for each number of packs, the one by which a row is the least work for an SM's schedulers."""
    # Five packs by 256 threads would be that of 73728 columns, and are slower.
    shapes = [one for one in shapes if one.packs < 5 or one.threads > 256] or shapes
    return min(shapes, key=lambda shape: (ceil_div(shape.threads // WARP, 4) * shape.packs, shape.packs))


def places(of_row: int) -> int:
    """For each row of a CTA that takes so many bytes at once: what is under way is enough, and not too much."""
    return 3 if of_row <= THREE_PLACES else 2
