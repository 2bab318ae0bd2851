"""Forward rows that the CTAs of a cluster hold together: who holds what of a row.

Of all sizes of clusters, threads, packs and CTAs of an SM, those that cost least are taken. What a row costs was fitted
to searches at row lengths of 36864 to 262144 columns (docs/tuning.md). Where the warps of an SM are no multiple of
four, one of its four schedulers has a warp more than the others, and all wait for that one. Parts of several rows on an
SM hide what each waits for: LayerNorm of 143360 columns 69.8 us by clusters of 16, three CTAs on an SM with four warps
of nine packs, 76.7 by clusters of eight, one CTA of twelve warps of six.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..kernel.device import CLUSTER_SIZES, Device
from .problem import ITEMSIZE, Problem
from .registers import column_bytes, registers_of, with_rows_kept, working_of_shifted
from .shapes import ceil_div, in_clusters, kernel_spec
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape
from .tables import measured

# Of the SMs of an H200, how many the clusters of each size count as reaching: by Device.clusters 1.0, 0.91, 0.91 and
# 0.85; 16 was fitted. Constants, so that who holds what of a row, and so its bits, is the same on every GPU that has
# clusters of that size.
REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.95}
SHIFTED_REACHED = REACHED | {16: 0.82}  # by rows of odd widths
FIXED_PACKS, SHIFTED_FIXED_PACKS = 2, 5  # what a warp does once for a row, in packs
COST_BY_ROWS = {1: 1.15, 2: 1.04}  # of an SM that has parts of so few rows, which wait for each other
LEAST_THREADS, MOST_THREADS = 96, 512  # of a CTA
MOST_ROWS, MOST_WARPS = 4, 16  # of an SM
LEAST_PACKS, MOST_PACKS = 4, 10
EARLY_WARPS = 12  # of an SM, at most, whose registers are enough to ask early
# Rows that begin at odd addresses: of few packs a thread keeps weight and bias and the row once it has shifted it, and
# more warps hide the shifting. 50257 columns forward, H100, LayerNorm by five packs 98.8 us, by four 109.8; RMSNorm
# 97.5 and 101.9. On an H200 by seven 144, of four that are shifted at every reading 137, once 122.
SHIFTED_PACKS, SHIFTED_WARPS = 5, 24
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
    fitting = _forward_shape(problem, device)
    if fitting is None:
        return None
    shape, most = fitting
    spec = kernel_spec(problem, "forward", shape)
    if (found := measured(problem, spec, device)) is not None:
        return found
    spec = replace(spec, columns_stay=_columns_stay(problem, spec, device))
    for ctas in range(most, 0, -1):
        most_places = places(ctas * bytes_of_part(shape) * len(spec.matrices))
        if problem.cols % shape.pack and shape.packs > 4 and ctas > 1:
            most_places = 2  # LayerNorm, 50257 cols 98.8 us, by three 102.8; four packs, 48001 cols 111 and 99
        for stages in range(most_places, 1, -1):
            # Parts of two and three rows of clusters of 16, by two places: LayerNorm of 143360 cols 69.8 us, late 72.0;
            # of 73728 cols, clusters of eight, 70.1 and 69.9.
            few = ctas < MOST_ROWS and ctas * shape.threads <= EARLY_WARPS * WARP
            early = stages == 2 and shape.cluster == 16 and few and spec.columns_stay
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages, ask_early=early)
            if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
                return with_rows_kept(fitting, device)
    # Several matrices keep the shape of the plain norm's rows, and so its bits: where shared memory is too small they
    # wait in registers.
    several = len(spec.matrices) > 1
    if spec.scales == "per_row" and several and shape.threads == 512 and device.runs_clusters(2 * shape.cluster):
        # y is held as float32 beside the sum or the gate: 8 bytes spilled in 128 registers. Half the threads have twice
        # those.
        shape = in_clusters(shape, 2 * shape.cluster)
    return replace(spec, shape=shape)


def _forward_shape(problem: Problem, device: Device) -> tuple[RowShape, int] | None:
    """(who holds a row, CTAs of an SM): the same whatever else is read by rows, and at whatever addresses."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    if column_bytes(problem, RowShape(pack, WARP, LEAST_PACKS)) > MOST_COLUMN_BYTES:
        return None
    packs = ceil_div(problem.cols, pack)
    whole_packs = problem.cols % pack == 0

    def candidates(whole_packs: bool) -> Iterator[tuple[RowShape, int]]:
        most_packs, most_warps = (MOST_PACKS, MOST_WARPS) if whole_packs else (SHIFTED_PACKS, SHIFTED_WARPS)
        for size in filter(device.runs_clusters, CLUSTER_SIZES):
            for threads in range(LEAST_THREADS, MOST_THREADS + 1, WARP):
                shape = RowShape(pack, threads, ceil_div(ceil_div(packs, size), threads), size)
                if LEAST_PACKS <= shape.packs <= most_packs:
                    most_rows = min(MOST_ROWS, most_warps * WARP // threads)
                    yield from ((shape, ctas) for ctas in range(1, most_rows + 1))

    def fits(shape: RowShape, ctas: int) -> bool:
        full = MORE_IF_FULL * (shape.capacity == problem.cols)
        registers = _registers(problem, shape, WORKING + shape.packs + full)
        if not whole_packs:
            of_row = shape.packs * shape.pack * ITEMSIZE[problem.row_dtype] // 4
            registers = _registers(problem, shape, working_of_shifted(problem.norm) + of_row)
        # Two places, with room for a byte more for each pack at an odd address and for what warps tell each other.
        shared = 2 * (bytes_of_part(shape) + shape.threads * shape.packs) + (6 << 10)
        return registers <= registers_of(ctas * shape.threads) and ctas <= ctas_that_fit(shared, device)

    def cost(candidate: tuple[RowShape, int]) -> tuple[float, int, int]:
        shape, ctas = candidate
        warps = ctas * shape.threads // WARP
        reached = (REACHED if whole_packs else SHIFTED_REACHED)[shape.cluster]
        fixed = FIXED_PACKS if whole_packs else SHIFTED_FIXED_PACKS
        turn = ceil_div(warps, 4) * (shape.packs + fixed) * COST_BY_ROWS.get(ctas, 1)
        return round(turn * shape.cluster / (ctas * reached), 6), -ctas, shape.threads

    found = [one for one in candidates(whole_packs) if fits(*one)] or [one for one in candidates(True) if fits(*one)]
    return min(found, key=cost, default=None)


def _registers(problem: Problem, shape: RowShape, working: int) -> int:
    return working + column_bytes(problem, shape) // 4


def bytes_of_part(shape: RowShape) -> int:
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


def places(of_row: int) -> int:
    """For each row of a CTA that takes so many bytes at once: what is under way is enough, and not too much."""
    return 3 if of_row <= THREE_PLACES else 2
