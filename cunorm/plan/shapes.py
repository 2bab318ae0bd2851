"""Who holds what of a row: what decides the bits of its results, and nothing else does.

It follows from cols, dtypes and architecture alone, never from the number of rows nor from addresses: a row's result is
the same to the bit whatever else is in the batch. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..kernel.device import CLUSTER_SIZES, Device
from ..operation import SEED, Norm
from .plain_problems import every_gradient
from .problem import ITEMSIZE, Problem, ceil_div, is_plain
from .resources import (
    THREE_STAGES,
    bytes_of_part,
    column_bytes,
    column_dtypes,
    ctas_that_fit,
    dynamic_shared,
    registers_of,
    shared_memory,
    widest_column,
    with_rows_kept,
    working_of_shifted,
)
from .spec import WARP, NormSpec, RowShape, kernel_spec

# Threads of a forward row of more than 32 vectors, by the most vectors of the row. An H200 was searched, 64 M elements
# of bfloat16: other numbers take 1 to 14% longer. measured: docs/tuning.md
FORWARD_THREADS = {
    40: 8,
    63: 16,
    64: 32,
    80: 16,
    248: 32,
    256: 128,
    288: 96,
    320: 64,
    512: 128,
    576: 192,
    640: 160,
    672: 224,
    768: 256,
    960: 192,
    1280: 256,
    1536: 512,
    1792: 256,
    4096: 512,
}
RMS_FORWARD_THREADS = {320: 160, 1792: 512}  # RMSNorm's, where another number is better by more than 2%
THREADS = 128  # of a CTA of forward rows that a warp or less holds
# Packs of a thread, the best first, where several numbers waste as little.
PREFERRED_VECTORS = (2, 3, 4, 5, 6, 7, 8, 1)


def _short_forward_shape(norm: Norm, vector_cols: int, vectors: int) -> RowShape:
    """The shape of forward rows of up to 4096 vectors."""
    if vectors <= WARP:
        return _power_of_two_shape(vector_cols, vectors, dict.fromkeys((1, 2, 4, 8, 16, WARP), 8))
    most, threads = next((most, threads) for most, threads in FORWARD_THREADS.items() if vectors <= most)
    threads = threads if norm.subtracts_mean else RMS_FORWARD_THREADS.get(most, threads)
    return RowShape(vector_cols, threads, ceil_div(vectors, threads))


def short_forward_spec(problem: Problem, kernel: str) -> NormSpec:
    """The same of forward rows of up to 4096 vectors, which one CTA may hold."""
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    shape = _short_forward_shape(problem.norm, vector_cols, ceil_div(problem.cols, vector_cols))
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    return kernel_spec(problem, kernel, shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64)


def short_backward_shape(vector_cols: int, vectors: int, whole: bool = True) -> RowShape:
    """The shape of backward rows of up to 512 vectors; `whole`: none ends within a vector.

    A thread also holds the sums of its columns, twice 8 registers a vector.
    """
    if not whole and vector_cols == 8 and 4 * WARP < vectors <= 5 * WARP:
        return RowShape(vector_cols, 96, 2)
    return _power_of_two_shape(
        vector_cols, vectors, {**dict.fromkeys((1, 2, 4, 8, 16, 128, 256, 512), 3), WARP: 5, 64: 4}
    )


def _power_of_two_shape(vector_cols: int, vectors: int, most: dict[int, int]) -> RowShape:
    """The power of two of threads that leaves the fewest places empty; `most` has the vectors of a thread at most."""

    def badness(shape: RowShape) -> tuple:
        within_warp = shape.threads < WARP
        order = -shape.threads if within_warp else PREFERRED_VECTORS.index(shape.vectors)
        return shape.capacity, within_warp, order

    shapes = (RowShape(vector_cols, threads, ceil_div(vectors, threads)) for threads in most)
    allowed = (one for one in shapes if one.vectors <= most[one.threads] and (one.vectors > 1 or one.threads == 1))
    return min(allowed, key=badness)


def shape_of(vector_cols: int, vectors: int, vectors_per_thread: int, cluster: int) -> RowShape:
    """The fewest threads that hold `vectors` vectors in a CTA: a power of two within a warp, else whole warps."""
    threads = ceil_div(vectors, vectors_per_thread)
    threads = _power_of_two_from(threads) if threads <= WARP else ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(vector_cols, threads, ceil_div(vectors, threads), cluster)


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# The share of an H200's SMs that the clusters of each size reach; that of 16 was fitted. These are constants, so that
# who holds what of a row, and so its bits, is the same on every GPU that has clusters of that size.
FORWARD_REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.95}
SHIFTED_REACHED = FORWARD_REACHED | {16: 0.82}  # by rows of odd widths
FORWARD_FIXED_VECTORS, SHIFTED_FIXED_VECTORS = 2, 5  # what a warp does once for a row, counted in vectors
COST_BY_ROWS = {1: 1.15, 2: 1.04}  # of an SM that has parts of so few rows, which wait for each other
FORWARD_LEAST_THREADS, FORWARD_MOST_THREADS = 96, 512  # of a CTA
CLUSTER_ROWS, CLUSTER_WARPS = 4, 16  # of an SM
FORWARD_LEAST_VECTORS, FORWARD_MOST_VECTORS = 4, 10
# Rows that begin at odd addresses: of few vectors a thread keeps weight and bias and the row once it has shifted it,
# and more warps hide the shifting.
SHIFTED_VECTORS, SHIFTED_WARPS = 5, 24
# Registers of a thread beside weight and bias and one for each vector; of a row that fills all places there are more.
# With fewer ptxas spills.
FORWARD_WORKING, MORE_IF_FULL = 48, 3
# Bytes of weight and bias of four vectors: of more, rows are streamed.
MOST_COLUMN_BYTES = 256


@lru_cache(maxsize=1024)
def _cluster_forward_shape(problem: Problem, device: Device) -> tuple[RowShape, int] | None:
    """(who holds a row, CTAs of an SM): the same whatever else is read by rows, and at whatever addresses."""
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    if column_bytes(problem, RowShape(vector_cols, WARP, FORWARD_LEAST_VECTORS)) > MOST_COLUMN_BYTES:
        return None
    vectors = ceil_div(problem.cols, vector_cols)
    whole_vectors = problem.cols % vector_cols == 0

    def candidates(whole_vectors: bool) -> Iterator[tuple[RowShape, int]]:
        most_vectors, most_warps = (
            (FORWARD_MOST_VECTORS, CLUSTER_WARPS) if whole_vectors else (SHIFTED_VECTORS, SHIFTED_WARPS)
        )
        for size in filter(device.runs_clusters, CLUSTER_SIZES):
            for threads in range(FORWARD_LEAST_THREADS, FORWARD_MOST_THREADS + 1, WARP):
                shape = RowShape(vector_cols, threads, ceil_div(ceil_div(vectors, size), threads), size)
                if FORWARD_LEAST_VECTORS <= shape.vectors <= most_vectors:
                    most_rows = min(CLUSTER_ROWS, most_warps * WARP // threads)
                    yield from ((shape, ctas) for ctas in range(1, most_rows + 1))

    def fits(shape: RowShape, ctas: int) -> bool:
        full = MORE_IF_FULL * (shape.capacity == problem.cols)
        registers = _registers(problem, shape, FORWARD_WORKING + shape.vectors + full)
        if not whole_vectors:
            of_row = shape.vectors * shape.vector_cols * ITEMSIZE[problem.row_dtype] // 4
            registers = _registers(problem, shape, working_of_shifted(problem.norm) + of_row)
        # Two places, with room for a byte more for each vector at an odd address and for what warps tell each other.
        shared = 2 * (bytes_of_part(shape) + shape.threads * shape.vectors) + (6 << 10)
        return registers <= registers_of(ctas * shape.threads) and ctas <= ctas_that_fit(shared, device)

    def cost(candidate: tuple[RowShape, int]) -> tuple[float, int, int]:
        shape, ctas = candidate
        warps = ctas * shape.threads // WARP
        reached = (FORWARD_REACHED if whole_vectors else SHIFTED_REACHED)[shape.cluster]
        fixed = FORWARD_FIXED_VECTORS if whole_vectors else SHIFTED_FIXED_VECTORS
        turn = ceil_div(warps, 4) * (shape.vectors + fixed) * COST_BY_ROWS.get(ctas, 1)
        return round(turn * shape.cluster / (ctas * reached), 6), -ctas, shape.threads

    found = [one for one in candidates(whole_vectors) if fits(*one)] or [one for one in candidates(True) if fits(*one)]
    return min(found, key=cost, default=None)


def _registers(problem: Problem, shape: RowShape, working: int) -> int:
    return working + column_bytes(problem, shape) // 4


def cluster_forward_spec(problem: Problem, device: Device) -> NormSpec | None:
    """The forward kernel of rows that a cluster holds, with as many CTAs on an SM as fit; None where none does."""
    fitting = _cluster_forward_shape(problem.layout, device)
    if fitting is None:
        return None
    shape, most = fitting
    return kernel_spec(problem, "forward", shape, ctas_per_sm=most)


class Held(NamedTuple):
    """How a tier holds its rows."""

    vectors: tuple[int, ...] = ()  # vectors that a thread may hold; (): by the rule of powers of two
    cluster: int = 1
    fused_vectors: int = 0  # vectors of a thread where there is more to do than in a plain norm


def shape_of_rows(problem: Problem, held: Held, device: Device) -> NormSpec | None:
    """The kernel of rows so held, before it is known how it is run; None if they do not fit."""
    shape = _held_shape(problem, held, device) if device.runs_clusters(held.cluster) else None
    if shape is None:
        return None
    # Rows at odd addresses take a little more; whether a tier takes rows of a length must not depend on it.
    least = kernel_spec(
        problem, "backward", shape, rows_per_cta=whole_warps(shape), stages=2, aligned=False, columns_aligned=False
    )
    fits = shared_memory(least) + dynamic_shared(least) <= device.shared
    return kernel_spec(problem, "backward", shape) if fits else None


def _held_shape(problem: Problem, held: Held, device: Device) -> RowShape | None:
    """Who holds what of a row; None where a thread has no registers for it."""
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    vectors = ceil_div(ceil_div(problem.cols, vector_cols), held.cluster)

    def by(choices: Iterable[int]) -> list[RowShape]:
        shapes = [shape_of(vector_cols, vectors, choice, held.cluster) for choice in choices]
        shapes = (
            shapes
            if held.vectors
            else [short_backward_shape(vector_cols, vectors, whole=problem.cols % vector_cols == 0)]
        )
        return [one for one in shapes if _registers_suffice(problem, one, device)]

    shapes = by([held.fused_vectors]) if held.fused_vectors and not is_plain(problem) else []
    shapes = shapes or by(held.vectors)
    return _least_work(shapes) if shapes else None


def _least_work(shapes: list[RowShape]) -> RowShape:
    """The shape by which a row is the least work for an SM's schedulers, of one for each number of vectors."""
    # Five vectors by 256 threads are slower than they count.
    shapes = [one for one in shapes if one.vectors < 5 or one.threads > 256] or shapes
    return min(shapes, key=lambda shape: (ceil_div(shape.threads // WARP, 4) * shape.vectors, shape.vectors))


def _registers_suffice(problem: Problem, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for the sums of its columns."""
    # Beside the accumulators of four and five vectors they are too few for a weight more than twice as wide as x, on
    # sm_100 for any weight.
    if shape.threads > 512 or (shape.vectors == 5 and shape.threads > 384):
        return False
    # What draws again which elements were dropped takes more.
    if shape.cluster > 1 and shape.threads > 384 and SEED in problem.by_name:
        return False
    if shape.threads <= 256 or shape.vectors < 4:
        return True
    width = max((ITEMSIZE[dtype] for dtype in column_dtypes(problem)), default=0) // ITEMSIZE[problem.row_dtype]
    return device.arch < 100 and width <= 2


def whole_warps(shape: RowShape) -> int:
    """The fewest rows of a CTA."""
    return max(1, WARP // shape.threads)


# The share of an H200's SMs that the clusters of each size reach.
BACKWARD_REACHED = {4: 0.85, 8: 1.0, 16: 0.95}
MOST_CLUSTER_VECTORS = 65536  # of a row
BACKWARD_FIXED_VECTORS = 3  # what a warp does once for a row, counted in vectors
BACKWARD_LEAST_VECTORS = 3
BACKWARD_LEAST_THREADS, BACKWARD_MOST_THREADS = 192, 512  # of an SM
SLOWER = 1.1  # where a thread does not keep its row, and where two rows under way take too much shared memory
# Registers of a thread beside the sums of its columns. Vectors of four columns take fewer, by architecture. With fewer
# ptxas spills.
BACKWARD_WORKING, BACKWARD_WORKING_OF_FOUR = 73, {90: 64, 100: 72}


def cluster_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The backward kernel of rows of whole vectors that more than four CTAs hold, of x and dy alone, where a GPU has
    clusters of 16; None if none fits.

    Where two rows are more than shared memory has, one is filled again in place, in half the time of a streamed row.
    """
    if problem.cols % (16 // ITEMSIZE[problem.row_dtype]) or not device.runs_clusters(16) or not is_plain(problem):
        return None
    # The same whatever gradients are asked for, and at whatever addresses: so are the bits of dx.
    found = _cluster_backward_shape(every_gradient(problem), device)
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
def _cluster_backward_shape(problem: Problem, device: Device) -> tuple[RowShape, int, bool] | None:
    """What costs least: who holds a row, CTAs of an SM, and whether rows are filled again in place."""
    return _cheapest(problem, device, in_place=False) or _cheapest(problem, device, in_place=True)


def _cheapest(problem: Problem, device: Device, in_place: bool) -> tuple[RowShape, int, bool] | None:
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    vectors = ceil_div(problem.cols, vector_cols)
    found = []
    # In place by four warps more at a time: an odd number spills where the next even one has as many registers.
    least, step = (3 * 4 * WARP, 4 * WARP) if in_place else (BACKWARD_LEAST_THREADS, WARP)
    for size, ctas in product(filter(device.runs_clusters, BACKWARD_REACHED), (1, 2)):
        # The most vectors of a thread, by two CTAs on an SM and by clusters of four fewer.
        most = 6 if ctas == 2 else 7 if size == 4 else 8
        if device.arch == 120:
            most = min(most, 5)  # six spill in 255 registers
        for threads in range(least // ctas, BACKWARD_MOST_THREADS // ctas + 1, step):
            shape = RowShape(vector_cols, threads, ceil_div(ceil_div(vectors, size), threads), size)
            if not BACKWARD_LEAST_VECTORS <= shape.vectors <= most:
                continue
            spec = kernel_spec(problem, "backward", shape, ctas_per_sm=ctas)
            fitting = _under_way(problem, spec, device, in_place)
            if fitting and _under_way(problem, replace(spec, aligned=False, columns_aligned=False), device, in_place):
                found.append((_backward_cost(fitting), threads, (shape, ctas, in_place)))
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
        fitting = replace(spec, stages=stages, prefetch=one_ahead and width == 2 and not in_place)
        fitting = fitting if in_place else with_rows_kept(fitting, device)
        if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
            return fitting
    return None


def registers_of_long_row(spec: NormSpec, device: Device) -> int:
    """Registers of a thread that does not keep its row."""
    shape = spec.shape
    sums = len(spec.sums) * shape.vectors * shape.vector_cols * ITEMSIZE[spec.compute] // 4
    wide = 16 * any(one.itemsize > ITEMSIZE[spec.row_dtype] for one in (*spec.columns, *spec.matrices))
    working = (
        BACKWARD_WORKING_OF_FOUR.get(device.arch, BACKWARD_WORKING) if shape.vector_cols == 4 else BACKWARD_WORKING
    )
    return working + sums + wide


def _backward_cost(spec: NormSpec) -> float:
    shape, ctas = spec.shape, spec.ctas_per_sm
    turn = ceil_div(ctas * shape.threads // WARP, 4) * (shape.vectors + BACKWARD_FIXED_VECTORS)
    if not spec.rows_in_registers:
        turn *= SLOWER * (SLOWER if spec.stages == 2 else 1)
    return round(turn * shape.cluster / (ctas * BACKWARD_REACHED[shape.cluster]), 6)


ODD_VECTORS = 5
EIGHT_WARPS = range(1121, 1281)  # vectors of a row to a CTA of eight warps
TO_TWELVE_WARPS = range(1281, 1921)
TWO_VECTORS = range(769, 833)  # of a CTA of 13 warps, in clusters of four and more
MOST_ODD_VECTORS = TO_TWELVE_WARPS[-1] * CLUSTER_SIZES[-1]  # of a row


def odd_backward(problem: Problem, device: Device) -> NormSpec | None:
    """The kernel of such a row of x and dy alone, of 16 bits, on Hopper; None where the tiers have a better one."""
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    wide = any(one.itemsize > 2 for one in problem.operands if one.kind == "full")
    if vector_cols != 8 or wide or problem.cols % vector_cols == 0 or device.arch != 90 or not is_plain(problem):
        return None
    shape = _odd_shape(problem, vector_cols, device)
    if shape is None:
        return None
    stages = 2 if shape.vectors == ODD_VECTORS else 4
    most = kernel_spec(every_gradient(problem), "backward", shape, stages=stages, aligned=False, columns_aligned=False)
    if shared_memory(most) + dynamic_shared(most) > device.shared:
        return None
    spec = kernel_spec(problem, "backward", shape, stages=stages)
    if shape.vectors == ODD_VECTORS:
        return with_rows_kept(spec, device)
    # Beside them a float32 weight at an odd address spills.
    return replace(spec, rows_in_registers=spec.columns_aligned or widest_column(spec) == 2)


def _odd_shape(problem: Problem, vector_cols: int, device: Device) -> RowShape | None:
    for size in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        vectors = ceil_div(ceil_div(problem.cols, vector_cols), size)
        if vectors in EIGHT_WARPS or (vectors in TO_TWELVE_WARPS and not problem.norm.subtracts_mean):
            return shape_of(vector_cols, vectors, ODD_VECTORS, size)
        if vectors in TWO_VECTORS and size >= 4 and problem.norm.subtracts_mean:
            return shape_of(vector_cols, vectors, 2, size)
    return None


def _short_forward(problem: Problem, device: Device) -> NormSpec:
    return short_forward_spec(problem, "forward")


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
    *(Tier(most, _short_forward) for most in SHORT),
    *(Tier(most, cluster_forward_spec) for most in CLUSTERS),
)
# A thread also holds dweight and dbias of its columns. An H200 was searched for about 64 KB under way on an SM, in
# bfloat16; what else was tried is in docs/tuning.md.
BACKWARD = (
    Tier(MOST_ODD_VECTORS, odd_backward),
    Tier(512, Held()),
    Tier(576, Held((3,)), norm="layer_norm"),
    Tier(1024, Held((2,))),
    Tier(1536, Held((3,))),
    Tier(2048, Held((4,), cluster=2, fused_vectors=2)),
    Tier(2304, Held((3,), cluster=2)),
    Tier(3072, Held((3, 4), cluster=2)),
    Tier(4096, Held((4,), cluster=4)),
    Tier(MOST_CLUSTER_VECTORS, cluster_backward),
    Tier(6144, Held((3, 4), cluster=4)),
    Tier(8192, Held((4,), cluster=8)),
    Tier(16384, Held((3, 4, 5), cluster=8)),
    Tier(32768, Held((3, 4, 5), cluster=16)),
)
TABLES = {"forward": FORWARD, "backward": BACKWARD}


def shaped(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """The tier and its kernel, before it is known how that is run: the same for every number of rows, but for a single
    row, which is aligned whatever its stride.
    """
    return _tier_of_layout(problem.layout, device)


@lru_cache(maxsize=4096)
def _tier_of_layout(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    vectors = ceil_div(problem.cols, 16 // ITEMSIZE[problem.row_dtype])
    for tier in TABLES[problem.direction]:
        if vectors > tier.most or tier.norm not in ("", problem.operation.norm):
            continue
        held = isinstance(tier.by, Held)
        spec = shape_of_rows(problem, tier.by, device) if held else tier.by(problem, device)
        if spec is not None:
            return tier, spec
    return None
