"""The forward kernel of rows that the CTAs of a cluster hold together: who holds what of a row, and the cost rule.

Among all cluster sizes, threads, vectors and CTAs of an SM, those that cost least are taken. The cost was fitted to
searches of rows of 36864 to 262144 columns (docs/tuning.md). Where the warps of an SM are no multiple of four, one of
its four schedulers has a warp more than the others, and all wait for that one. Parts of several rows on an SM hide what
each waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ..kernel.device import CLUSTER_SIZES, Device
from .measured import measured
from .problem import ITEMSIZE, Problem
from .registers import column_bytes, registers_of, with_rows_kept, working_of_shifted
from .shapes import ceil_div, in_clusters, kernel_spec
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# The share of an H200's SMs that the clusters of each size reach; that of 16 was fitted. These are constants, so that
# who holds what of a row, and so its bits, is the same on every GPU that has clusters of that size.
REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.95}
SHIFTED_REACHED = REACHED | {16: 0.82}  # by rows of odd widths
FIXED_PACKS, SHIFTED_FIXED_PACKS = 2, 5  # what a warp does once for a row, counted in vectors
COST_BY_ROWS = {1: 1.15, 2: 1.04}  # of an SM that has parts of so few rows, which wait for each other
LEAST_THREADS, MOST_THREADS = 96, 512  # of a CTA
MOST_ROWS, MOST_WARPS = 4, 16  # of an SM
LEAST_PACKS, MOST_PACKS = 4, 10
EARLY_WARPS = 12  # of an SM, at most, whose registers are enough to ask early
# Rows that begin at odd addresses: of few vectors a thread keeps weight and bias and the row once it has shifted it,
# and more warps hide the shifting.
SHIFTED_PACKS, SHIFTED_WARPS = 5, 24
# Registers of a thread beside weight and bias and one for each vector; of a row that fills all places there are more.
# With fewer ptxas spills.
WORKING, MORE_IF_FULL = 48, 3
# Bytes of weight and bias of four vectors: of more, rows are streamed.
MOST_COLUMN_BYTES = 256
THREE_STAGES = 52 << 10  # bytes of the parts of rows that an SM loads at once: of more, two stages are enough


def cluster_forward(problem: Problem, device: Device) -> NormSpec | None:
    """The forward kernel of rows that a cluster holds, None where none does."""
    fitting = _forward_shape(problem.layout, device)
    if fitting is None:
        return None
    shape, most = fitting
    spec = kernel_spec(problem, "forward", shape)
    if (found := measured(problem, spec, device)) is not None:
        return found
    spec = replace(spec, columns_stay=_columns_stay(problem, spec, device))
    for ctas in range(most, 0, -1):
        most_stages = stages_for(ctas * bytes_of_part(shape) * len(spec.matrices))
        if problem.cols % shape.pack and shape.packs > 4 and ctas > 1:
            most_stages = 2
        for stages in range(most_stages, 1, -1):
            # Parts of two and three rows of clusters of 16 are loaded early.
            few = ctas < MOST_ROWS and ctas * shape.threads <= EARLY_WARPS * WARP
            early = stages == 2 and shape.cluster == 16 and few and spec.columns_stay
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages, ask_early=early)
            if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
                return with_rows_kept(fitting, device)
    # Several matrices keep the shape of the plain norm's rows, and so its bits: where shared memory is too small they
    # wait in registers.
    several = len(spec.matrices) > 1
    if spec.scales == "per_row" and several and shape.threads == 512 and device.runs_clusters(2 * shape.cluster):
        # y is held as float32 beside the sum or the gate, for which half the threads have twice the registers.
        shape = in_clusters(shape, 2 * shape.cluster)
    return replace(spec, shape=shape)


@lru_cache(maxsize=1024)
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
    """Bytes of what a CTA holds of a row, in a matrix of the dtype of x."""
    return 16 * shape.threads * shape.packs


def _columns_stay(problem: Problem, spec: NormSpec, device: Device) -> bool:
    """Whether a thread keeps weight and bias in registers. Where it does not, ptxas would spill, or two matrices need
    the registers.
    """
    if len(spec.matrices) > 1 or spec.finds_scales or spec.grouped:
        return False
    if not spec.aligned and spec.shape.packs > SHIFTED_PACKS:
        return False
    rows = {problem.row_dtype} | {one.dtype for one in problem.operands if one.kind == "full"}
    full = spec.shape.capacity == problem.cols
    return rows == {problem.row_dtype} != {"float64"} and (
        device.arch < 100 or (full and not problem.norm.subtracts_mean)
    )


def stages_for(of_row: int) -> int:
    """Stages for each row of a CTA, of so many bytes: what is under way is enough, and not too much."""
    return 3 if of_row <= THREE_STAGES else 2
