"""Threads and packs of a row, and the kernel of a problem for such a shape."""

from __future__ import annotations

from dataclasses import replace

from .problem import Problem
from .spec import WARP, NormSpec, RowShape

# Packs of a thread, the best first, where several numbers waste as little.
PREFERRED_PACKS = {"forward": (5, 4, 6, 3, 7, 8, 2, 1), "backward": (2, 3, 4, 5, 6, 7, 8, 1)}


def power_of_two_shape(pack: int, packs: int, direction: str) -> RowShape:
    """Threads, a power of two, that leave the fewest places for packs empty."""

    def badness(shape: RowShape) -> tuple:
        within_warp = shape.threads < WARP
        order = -shape.threads if within_warp else PREFERRED_PACKS[direction].index(shape.packs)
        return shape.capacity, within_warp, order

    def allowed(shape: RowShape) -> bool:
        # In the backward pass a thread also holds the sums of its columns, twice 8 registers a pack.
        most = {WARP: 5, 64: 4}.get(shape.threads, 3)
        if direction == "forward":
            most = 5 if shape.threads == 256 else 8  # 12288 cols by 512 threads 0.95, by 256 less than 0.94
        return shape.packs <= most and (shape.packs > 1 or shape.threads == 1)

    shapes = (RowShape(pack, 2**power, ceil_div(packs, 2**power)) for power in range(10))
    return min(filter(allowed, shapes), key=badness)


def shape_of(pack: int, packs: int, packs_per_thread: int, cluster: int) -> RowShape:
    """The fewest threads that hold `packs` packs in a CTA: a power of two within a warp, else whole warps."""
    threads = ceil_div(packs, packs_per_thread)
    threads = _power_of_two_from(threads) if threads <= WARP else ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(pack, threads, ceil_div(packs, threads), cluster)


def in_clusters(shape: RowShape, size: int) -> RowShape:
    """The same threads, in as many CTAs."""
    return replace(shape, threads=shape.threads // size, cluster=size)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def kernel_spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> NormSpec:
    spec = NormSpec(
        kernel=kernel,
        operation=problem.operation,
        cols=problem.cols,
        row_dtype=problem.row_dtype,
        # Of strides the text has no more than how many there are.
        operands=tuple(
            replace(one, row_stride=0, outer_stride=0, inner=min(1, one.inner), groups=None) for one in problem.operands
        ),
        aligned=_vectors_fit(problem, shape.pack, ("full", "group")),
        columns_aligned=_vectors_fit(problem, shape.pack, ("group",)),
        shape=shape,
    )
    return replace(spec, **changes)


def _vectors_fit(problem: Problem, pack: int, kinds: tuple[str, ...]) -> bool:
    """Every pack of every row, or vector, of such operands starts at a multiple of its size (or of 16 bytes)."""
    return problem.aligned and (
        problem.rows == 1
        or all(
            stride * one.itemsize % min(16, pack * one.itemsize) == 0
            for one in problem.operands
            if one.kind in kinds
            for stride in (one.row_stride, one.outer_stride)
        )
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
