"""Threads and packs of a row, and the kernel of a problem for such a shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..operation import Norm
from .problem import ITEMSIZE, Operands, Problem
from .spec import WARP, NormSpec, RowShape

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
MOST_SHORT = 4096  # vectors of a row that one CTA holds forward
THREADS = 128  # of a CTA of forward rows that a warp or less holds
# Packs of a thread, the best first, where several numbers waste as little.
PREFERRED_PACKS = (2, 3, 4, 5, 6, 7, 8, 1)


def _forward_shape(norm: Norm, pack: int, packs: int) -> RowShape:
    """The shape of forward rows of up to 4096 vectors."""
    if packs <= WARP:
        return _power_of_two_shape(pack, packs, dict.fromkeys((1, 2, 4, 8, 16, WARP), 8))
    most, threads = next((most, threads) for most, threads in FORWARD_THREADS.items() if packs <= most)
    threads = threads if norm.subtracts_mean else RMS_FORWARD_THREADS.get(most, threads)
    return RowShape(pack, threads, ceil_div(packs, threads))


def short_backward_shape(pack: int, packs: int, whole: bool = True) -> RowShape:
    """The shape of backward rows of up to 512 vectors; `whole`: none ends within a vector.

    A thread also holds the sums of its columns, twice 8 registers a vector.
    """
    if not whole and pack == 8 and 4 * WARP < packs <= 5 * WARP:
        return RowShape(pack, 96, 2)
    return _power_of_two_shape(pack, packs, {**dict.fromkeys((1, 2, 4, 8, 16, 128, 256, 512), 3), WARP: 5, 64: 4})


def _power_of_two_shape(pack: int, packs: int, most: dict[int, int]) -> RowShape:
    """The power of two of threads that leaves the fewest places empty; `most` has the vectors of a thread at most."""

    def badness(shape: RowShape) -> tuple:
        within_warp = shape.threads < WARP
        order = -shape.threads if within_warp else PREFERRED_PACKS.index(shape.packs)
        return shape.capacity, within_warp, order

    shapes = (RowShape(pack, threads, ceil_div(packs, threads)) for threads in most)
    allowed = (one for one in shapes if one.packs <= most[one.threads] and (one.packs > 1 or one.threads == 1))
    return min(allowed, key=badness)


def shape_of(pack: int, packs: int, packs_per_thread: int, cluster: int) -> RowShape:
    """The fewest threads that hold `packs` packs in a CTA: a power of two within a warp, else whole warps."""
    threads = ceil_div(packs, packs_per_thread)
    threads = _power_of_two_from(threads) if threads <= WARP else ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(pack, threads, ceil_div(packs, threads), cluster)


def in_clusters(shape: RowShape, size: int) -> RowShape:
    """The same threads of a row, in as many CTAs."""
    return replace(shape, threads=shape.threads * shape.cluster // size, cluster=size)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def kernel_spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> NormSpec:
    of_problem = kernel, problem.operation, problem.cols, problem.row_dtype, problem.operands.of_text
    fits = {
        "aligned": _vectors_fit(problem, shape.pack, ("full", "group")),
        "columns_aligned": _vectors_fit(problem, shape.pack, ("group",)),
    }
    return _spec(*of_problem, shape=shape, **fits | changes)


# Calls that differ in their number of rows share it: made anew it takes 9 us.
_spec = lru_cache(maxsize=4096)(NormSpec)


def short_forward_spec(problem: Problem, kernel: str) -> NormSpec:
    """The same of forward rows of up to 4096 packs, which one CTA may hold."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    shape = _forward_shape(problem.norm, pack, ceil_div(problem.cols, pack))
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    return kernel_spec(problem, kernel, shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64)


def _vectors_fit(problem: Problem, pack: int, kinds: tuple[str, ...]) -> bool:
    """Every pack of every row, or vector, of such operands starts at a multiple of its size (or of 16 bytes)."""
    return problem.aligned and (problem.rows == 1 or _strides_fit(problem.operands, pack, kinds))


@lru_cache(maxsize=4096)
def _strides_fit(operands: Operands, pack: int, kinds: tuple[str, ...]) -> bool:
    return all(
        stride * one.itemsize % min(16, pack * one.itemsize) == 0
        for one in operands
        if one.kind in kinds
        for stride in (one.row_stride, one.outer_stride)
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
