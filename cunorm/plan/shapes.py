"""The shape of a row: which thread holds which columns. It decides the bits of a row's results, and nothing else does.

A shape follows from cols, dtypes and architecture alone, never from the number of rows or from addresses: a row's
result has the same bits whatever else is in the batch. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ..kernel.device import CLUSTER_SIZES, Device
from ..operation import SEED
from .plain_problems import with_every_gradient
from .problem import ITEMSIZE, Problem, ceil_div, is_plain
from .resources import (
    THREE_STAGES,
    column_bytes,
    ctas_that_fit,
    dynamic_shared,
    registers_per_thread,
    row_bytes_per_cta,
    shared_memory,
    widest_column,
    with_rows_in_registers,
    working_of_shifted,
)
from .spec import UNALIGNED, WARP, NormSpec, RowShape, kernel_spec

# Threads of a forward row of more than 32 vectors, by the most vectors of the row. On an H200, with 64 M elements of
# bfloat16, other numbers take 1 to 14% longer. measured: docs/tuning.md
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
RMS_FORWARD_THREADS = {320: 160, 1792: 512}  # for RMSNorm, where another number is faster by more than 2%
THREADS = 128  # of a CTA of forward rows that a warp or less holds
PREFERRED_VECTORS = (2, 3, 4, 5, 6, 7, 8, 1)  # vectors per thread, the best first, where they leave as many empty


def short_forward(problem: Problem, device: Device, kernel: str = "forward") -> NormSpec:
    """Return the kernel of forward rows of up to 4096 vectors, which one CTA may hold."""
    if problem.vectors <= WARP:
        shape = _power_of_two_shape(problem, dict.fromkeys((1, 2, 4, 8, 16, WARP), 8))
    else:
        most, threads = next((most, threads) for most, threads in FORWARD_THREADS.items() if problem.vectors <= most)
        threads = threads if problem.norm.subtracts_mean else RMS_FORWARD_THREADS.get(most, threads)
        shape = RowShape(problem.vector_cols, threads, ceil_div(problem.vectors, threads))
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    return kernel_spec(problem, kernel, shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64)


def short_backward(problem: Problem, device: Device) -> NormSpec | None:
    """Return the kernel of backward rows of up to 512 vectors, before it is known how they are run.

    A thread also holds the sums of its columns, twice 8 registers a vector.
    """
    ends_within_a_vector = problem.cols % problem.vector_cols > 0
    if ends_within_a_vector and problem.vector_cols == 8 and 4 * WARP < problem.vectors <= 5 * WARP:
        shape = RowShape(problem.vector_cols, 96, 2)
    else:
        most = {**dict.fromkeys((1, 2, 4, 8, 16, 128, 256, 512), 3), WARP: 5, 64: 4}
        shape = _power_of_two_shape(problem, most)
    return _backward_kernel(problem, shape, device)


def _power_of_two_shape(problem: Problem, most: dict[int, int]) -> RowShape:
    """Return the shape of a power of two of threads that has the least room for more vectors than the row has.

    `most` has the most vectors per thread for each number of threads.
    """

    def badness(shape: RowShape) -> tuple:
        within_warp = shape.threads < WARP
        order = -shape.threads if within_warp else PREFERRED_VECTORS.index(shape.vectors)
        return shape.capacity, within_warp, order

    shapes = (RowShape(problem.vector_cols, threads, ceil_div(problem.vectors, threads)) for threads in most)
    allowed = (
        shape for shape in shapes if shape.vectors <= most[shape.threads] and (shape.vectors > 1 or shape.threads == 1)
    )
    return min(allowed, key=badness)


def _fewest_threads(vector_cols: int, vectors: int, vectors_per_thread: int, cluster: int) -> RowShape:
    """Return the shape of the fewest threads that hold `vectors` vectors in a CTA: a power of two, or whole warps."""
    threads = ceil_div(vectors, vectors_per_thread)
    threads = 1 << (threads - 1).bit_length() if threads <= WARP else ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(vector_cols, threads, ceil_div(vectors, threads), cluster)


# The share of an H200's SMs that clusters of each size reach; that of 16 was fitted. They are constants, so that the
# shape of a row, and so its bits, is the same on every GPU that has clusters of that size.
FORWARD_REACHED = {2: 1.0, 4: 0.91, 8: 0.91, 16: 0.95}
SHIFTED_REACHED = FORWARD_REACHED | {16: 0.82}  # for rows that end within a vector
FORWARD_FIXED_VECTORS, SHIFTED_FIXED_VECTORS = 2, 5  # a warp's work for a row besides its vectors, in vectors
COST_BY_ROWS = {1: 1.15, 2: 1.04}  # the cost if an SM has parts of so few rows, which wait for each other
FORWARD_LEAST_THREADS, FORWARD_MOST_THREADS = 96, 512  # of a CTA
CLUSTER_ROWS, CLUSTER_WARPS = 4, 16  # the most of an SM
FORWARD_LEAST_VECTORS, FORWARD_MOST_VECTORS = 4, 10  # of a thread
# The most vectors per thread and warps of an SM for rows that end within a vector. With so few vectors a thread keeps
# weight, bias and the shifted row in registers, and more warps hide the shifting.
SHIFTED_VECTORS, SHIFTED_WARPS = 5, 24
# Registers of a thread besides weight, bias and one for each vector, and more for a row that fills its shape. With
# fewer ptxas spills.
FORWARD_WORKING, MORE_IF_FULL = 48, 3
MOST_COLUMN_BYTES = 256  # the most bytes of weight and bias for four vectors; rows with more are streamed


@lru_cache(maxsize=1024)
def cluster_forward(problem: Problem, device: Device) -> NormSpec | None:
    """Return the forward kernel of rows that a cluster holds, with as many CTAs on an SM as fit; None if none fits.

    The shape does not depend on addresses, nor on what is read by rows besides x.
    """
    if column_bytes(problem, RowShape(problem.vector_cols, WARP, FORWARD_LEAST_VECTORS)) > MOST_COLUMN_BYTES:
        return None
    whole_vectors = problem.cols % problem.vector_cols == 0
    fixed = FORWARD_FIXED_VECTORS if whole_vectors else SHIFTED_FIXED_VECTORS
    reached = FORWARD_REACHED if whole_vectors else SHIFTED_REACHED

    def candidates(most_vectors: int, most_warps: int) -> Iterator[tuple[RowShape, int]]:
        """Yield (shape, CTAs of an SM) that fit."""
        for size in filter(device.runs_clusters, CLUSTER_SIZES):
            for threads in range(FORWARD_LEAST_THREADS, FORWARD_MOST_THREADS + 1, WARP):
                vectors = ceil_div(ceil_div(problem.vectors, size), threads)
                if FORWARD_LEAST_VECTORS <= vectors <= most_vectors:
                    shape = RowShape(problem.vector_cols, threads, vectors, size)
                    most_ctas = min(CLUSTER_ROWS, most_warps * WARP // threads)
                    yield from ((shape, ctas) for ctas in range(1, most_ctas + 1) if fits(shape, ctas))

    def fits(shape: RowShape, ctas: int) -> bool:
        if whole_vectors:
            working = FORWARD_WORKING + shape.vectors + MORE_IF_FULL * (shape.capacity == problem.cols)
        else:
            working = working_of_shifted(problem.norm) + 4 * shape.vectors
        registers = working + column_bytes(problem, shape) // 4
        # Two stages, with a byte more for each vector at an odd address, and what warps exchange.
        shared = 2 * (row_bytes_per_cta(shape) + shape.threads * shape.vectors) + (6 << 10)
        return registers <= registers_per_thread(ctas * shape.threads) and ctas <= ctas_that_fit(shared, device)

    def cost(candidate: tuple[RowShape, int]) -> tuple[float, int, int]:
        shape, ctas = candidate
        iteration = ceil_div(ctas * shape.threads // WARP, 4) * (shape.vectors + fixed) * COST_BY_ROWS.get(ctas, 1)
        return round(iteration * shape.cluster / (ctas * reached[shape.cluster]), 6), -ctas, shape.threads

    fitting = [] if whole_vectors else list(candidates(SHIFTED_VECTORS, SHIFTED_WARPS))
    fitting = fitting or list(candidates(FORWARD_MOST_VECTORS, CLUSTER_WARPS))
    if not fitting:
        return None
    shape, ctas = min(fitting, key=cost)
    return kernel_spec(problem, "forward", shape, ctas_per_sm=ctas)


class ShapeChoices(NamedTuple):
    """The rule of a tier that chooses among a few shapes of backward rows."""

    vectors: tuple[int, ...]  # the vectors that a thread may hold
    cluster: int = 1
    fused_vectors: int = 0  # tried first for operations with more to do than a plain norm

    def __call__(self, problem: Problem, device: Device) -> NormSpec | None:
        """Return the kernel of rows, before it is known how they are run; None if they do not fit."""
        if not device.runs_clusters(self.cluster):
            return None
        vectors = ceil_div(problem.vectors, self.cluster)
        fused_first = self.fused_vectors and not is_plain(problem)
        for choices in ((self.fused_vectors,), self.vectors) if fused_first else (self.vectors,):
            shapes = [_fewest_threads(problem.vector_cols, vectors, choice, self.cluster) for choice in choices]
            shapes = [shape for shape in shapes if _registers_suffice(problem, shape, device)]
            if shapes:
                return _backward_kernel(problem, _least_work(shapes), device)
        return None


def _backward_kernel(problem: Problem, shape: RowShape, device: Device) -> NormSpec | None:
    """Return the kernel of rows of a shape, before it is known how they are run; None if shared memory is too small."""
    # Rows at odd addresses take a little more, and whether a tier takes rows of a length must not depend on addresses.
    least = kernel_spec(problem, "backward", shape, rows_per_cta=fewest_rows_per_cta(shape), stages=2, **UNALIGNED)
    fits = shared_memory(least) + dynamic_shared(least) <= device.shared
    return kernel_spec(problem, "backward", shape) if fits else None


def _least_work(shapes: list[RowShape]) -> RowShape:
    """Return the shape by which a row is the least work for an SM's schedulers."""
    # Five vectors of 256 threads or fewer are slower than this count.
    shapes = [shape for shape in shapes if shape.vectors < 5 or shape.threads > 256] or shapes
    return min(shapes, key=lambda shape: (ceil_div(shape.threads // WARP, 4) * shape.vectors, shape.vectors))


def _registers_suffice(problem: Problem, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for the sums of its columns."""
    if shape.threads > 512 or (shape.vectors == 5 and shape.threads > 384):
        return False
    # A backward pass of dropout draws its random numbers again.
    if shape.cluster > 1 and shape.threads > 384 and SEED in problem.by_name:
        return False
    if shape.threads <= 256 or shape.vectors < 4:
        return True
    # The sums of four and five vectors leave too few for a weight more than twice as wide as x, on sm_100 for any.
    width = max((column.itemsize for column in problem.operands.columns), default=0)
    return device.arch < 100 and width // ITEMSIZE[problem.row_dtype] <= 2


def fewest_rows_per_cta(shape: RowShape) -> int:
    """Return how many rows fill a warp."""
    return max(1, WARP // shape.threads)


BACKWARD_REACHED = {4: 0.85, 8: 1.0, 16: 0.95}  # the share of an H200's SMs that clusters of each size reach
MOST_CLUSTER_VECTORS = 65536  # of a row
BACKWARD_FIXED_VECTORS = 3  # a warp's work for a row besides its vectors, in vectors
BACKWARD_LEAST_VECTORS = 3  # of a thread
BACKWARD_LEAST_THREADS, BACKWARD_MOST_THREADS = 192, 512  # of an SM
SLOWER = 1.1  # the cost if a thread does not keep its row, and again if there are only two stages
# Registers of a thread besides the sums of its columns, and those for vectors of four columns by architecture. With
# fewer ptxas spills.
BACKWARD_WORKING, BACKWARD_WORKING_OF_FOUR = 73, {90: 64, 100: 72}


def cluster_backward(problem: Problem, device: Device) -> NormSpec | None:
    """Return the backward kernel of plain rows of whole vectors that more than four CTAs hold; None if none fits.

    It needs a GPU with clusters of 16. Where two rows are more than shared memory has, there is one stage, which is
    filled again in place, in half the time of a streamed row.
    """
    if problem.cols % problem.vector_cols or not device.runs_clusters(16) or not is_plain(problem):
        return None
    # The shape, and so the bits of dx, must depend neither on which gradients are wanted nor on addresses.
    layout = _cluster_backward_shape(with_every_gradient(problem), device)
    if layout is None:
        return None
    shape, ctas, in_place = layout

    def fitting(problem: Problem, **changes: bool) -> NormSpec | None:
        spec = kernel_spec(problem, "backward", shape, ctas_per_sm=ctas, **changes)
        return _with_stages(problem, spec, device, in_place)

    # Beside a wide dy, or more sums than a norm has, a row may not fit: then for no gradients and at no addresses.
    if fitting(with_every_gradient(problem, own_dtypes=True), **UNALIGNED) and fitting(problem, **UNALIGNED):
        return fitting(problem)
    return None


@lru_cache(maxsize=1024)
def _cluster_backward_shape(problem: Problem, device: Device) -> tuple[RowShape, int, bool] | None:
    """Return the cheapest (shape, CTAs of an SM, whether a stage is filled again in place); None if none fits."""
    return _cheapest(problem, device, in_place=False) or _cheapest(problem, device, in_place=True)


def _cheapest(problem: Problem, device: Device, in_place: bool) -> tuple[RowShape, int, bool] | None:
    costs = {}
    # In place the warps of an SM are a multiple of four: other numbers spill where the next multiple does not.
    least, step = (3 * 4 * WARP, 4 * WARP) if in_place else (BACKWARD_LEAST_THREADS, WARP)
    for size, ctas in product(filter(device.runs_clusters, BACKWARD_REACHED), (1, 2)):
        most_vectors = 6 if ctas == 2 else 7 if size == 4 else 8
        if device.arch == 120:
            most_vectors = 5  # six spill in 255 registers
        for threads in range(least // ctas, BACKWARD_MOST_THREADS // ctas + 1, step):
            shape = RowShape(problem.vector_cols, threads, ceil_div(ceil_div(problem.vectors, size), threads), size)
            if not BACKWARD_LEAST_VECTORS <= shape.vectors <= most_vectors:
                continue
            spec = kernel_spec(problem, "backward", shape, ctas_per_sm=ctas)
            fitting = _with_stages(problem, spec, device, in_place)
            if fitting and _with_stages(problem, replace(spec, **UNALIGNED), device, in_place):
                costs[shape, ctas, in_place] = _backward_cost(fitting), threads
    return min(costs, key=costs.__getitem__, default=None)


def _with_stages(problem: Problem, spec: NormSpec, device: Device, in_place: bool) -> NormSpec | None:
    """Return the kernel with stages for its rows; None if there are too few registers or too little shared memory."""
    shape, ctas, width = spec.shape, spec.ctas_per_sm, ITEMSIZE[problem.row_dtype]
    registers = BACKWARD_WORKING
    if shape.vector_cols == 4:
        registers = BACKWARD_WORKING_OF_FOUR.get(device.arch, BACKWARD_WORKING)
    registers += len(spec.sums) * shape.vectors * shape.vector_cols * ITEMSIZE[spec.compute] // 4
    registers += 16 * any(operand.itemsize > width for operand in (*spec.columns, *spec.matrices))
    if registers > registers_per_thread(ctas * shape.threads):
        return None
    if in_place:
        choices = [replace(spec, stages=1)]
    else:
        # RMSNorm of long rows has one row on its way beside the one that it computes, and prefetches that of 16 bits.
        stage_bytes = ctas * row_bytes_per_cta(shape) * sum(matrix.itemsize for matrix in spec.matrices) // width
        one_ahead = stage_bytes > THREE_STAGES and not problem.norm.subtracts_mean
        spec = replace(spec, prefetch=one_ahead and width == 2)
        numbers = (2,) if one_ahead else (3, 2)
        choices = [with_rows_in_registers(replace(spec, stages=stages), device) for stages in numbers]
    for choice in choices:
        if ctas <= ctas_that_fit(shared_memory(choice) + dynamic_shared(choice), device):
            return choice
    return None


def _backward_cost(spec: NormSpec) -> float:
    shape, ctas = spec.shape, spec.ctas_per_sm
    iteration = ceil_div(ctas * shape.threads // WARP, 4) * (shape.vectors + BACKWARD_FIXED_VECTORS)
    if not spec.rows_in_registers:
        iteration *= SLOWER * (SLOWER if spec.stages == 2 else 1)
    return round(iteration * shape.cluster / (ctas * BACKWARD_REACHED[shape.cluster]), 6)


ODD_VECTORS = 5  # of a thread
# Vectors that a CTA holds of a row, by five of a thread: in eight warps, and in up to twelve.
EIGHT_WARPS, TO_TWELVE_WARPS = range(1121, 1281), range(1281, 1921)
TWO_VECTORS = range(769, 833)  # the same by two of a thread, in 13 warps, in clusters of four and more
MOST_ODD_VECTORS = TO_TWELVE_WARPS[-1] * CLUSTER_SIZES[-1]  # of a row


def odd_backward(problem: Problem, device: Device) -> NormSpec | None:
    """Return the kernel of plain rows of 16 bits that end within a vector, on Hopper; None if others are better."""
    wide = any(operand.itemsize > 2 for operand in problem.operands if operand.kind == "full")
    whole_vectors = problem.cols % problem.vector_cols == 0
    if problem.vector_cols != 8 or wide or whole_vectors or device.arch != 90 or not is_plain(problem):
        return None
    shape = _odd_shape(problem, device)
    if shape is None:
        return None
    stages = 2 if shape.vectors == ODD_VECTORS else 4
    most = kernel_spec(with_every_gradient(problem), "backward", shape, stages=stages, **UNALIGNED)
    if shared_memory(most) + dynamic_shared(most) > device.shared:
        return None
    spec = kernel_spec(problem, "backward", shape, stages=stages)
    if shape.vectors == ODD_VECTORS:
        return with_rows_in_registers(spec, device)
    # With rows in registers a float32 weight at an odd address spills.
    return replace(spec, rows_in_registers=spec.columns_aligned or widest_column(spec) == 2)


def _odd_shape(problem: Problem, device: Device) -> RowShape | None:
    for size in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        vectors = ceil_div(problem.vectors, size)
        if vectors in EIGHT_WARPS or (vectors in TO_TWELVE_WARPS and not problem.norm.subtracts_mean):
            return _fewest_threads(problem.vector_cols, vectors, ODD_VECTORS, size)
        if vectors in TWO_VECTORS and size >= 4 and problem.norm.subtracts_mean:
            return _fewest_threads(problem.vector_cols, vectors, 2, size)
    return None


class Tier(NamedTuple):
    """The rule that finds the shape of rows of up to `most` vectors.

    A rule returns None for rows that do not fit, or for which another tier is faster. A backward rule may leave to the
    cost rule how rows are run: then its kernel has no stages.
    """

    most: int
    rule: Callable[[Problem, Device], NormSpec | None]
    norm: str = ""  # the norm that it is for, if not for all


# Forward there is one rule for all rows that one CTA holds, and one for those of clusters. Each length at which a
# thread's vectors or a row's threads change a good deal has a tier, so that whoever compiles an example of each tier
# meets every kind of kernel.
SHORT = (2, 32, 64, 128, 256, 288, 320, 512, 640, 672, 1024, 1280, 1536, 1792, 2048, 3072, 4096)
CLUSTERS = (5120, 6144, 8192, 10240, 16384, 24576, 32768, 65536)
FORWARD = (*(Tier(most, short_forward) for most in SHORT), *(Tier(most, cluster_forward) for most in CLUSTERS))
# Found by a search on an H200 in bfloat16, with about 64 KB of rows on their way to an SM; docs/tuning.md has what else
# was tried. A thread also holds dweight and dbias of its columns.
BACKWARD = (
    Tier(MOST_ODD_VECTORS, odd_backward),
    Tier(512, short_backward),
    Tier(576, ShapeChoices((3,)), norm="layer_norm"),
    Tier(1024, ShapeChoices((2,))),
    Tier(1536, ShapeChoices((3,))),
    Tier(2048, ShapeChoices((4,), cluster=2, fused_vectors=2)),
    Tier(2304, ShapeChoices((3,), cluster=2)),
    Tier(3072, ShapeChoices((3, 4), cluster=2)),
    Tier(4096, ShapeChoices((4,), cluster=4)),
    Tier(MOST_CLUSTER_VECTORS, cluster_backward),
    Tier(6144, ShapeChoices((3, 4), cluster=4)),
    Tier(8192, ShapeChoices((4,), cluster=8)),
    Tier(16384, ShapeChoices((3, 4, 5), cluster=8)),
    Tier(32768, ShapeChoices((3, 4, 5), cluster=16)),
)
TABLES = {"forward": FORWARD, "backward": BACKWARD}


def shape_of_rows(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """Return the tier of the rows and their kernel, before it is known how they are run; None for streamed rows.

    It is the same for every number of rows, except that a single row is aligned whatever its stride.
    """
    return _shape_of_layout(problem.layout, device)


@lru_cache(maxsize=4096)
def _shape_of_layout(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    for tier in TABLES[problem.direction]:
        if problem.vectors <= tier.most and tier.norm in ("", problem.operation.norm):
            spec = tier.rule(problem, device)
            if spec is not None:
                return tier, spec
    return None
