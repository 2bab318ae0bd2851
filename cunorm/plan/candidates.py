"""Other launches of a problem's rows, for a search: legal ones that leave every bit of y, mean, rstd and dx as it is.

The shape of a row stays, which decides how it is added up; of a backward pass the number of partial sums may differ,
and so may the last bit of dweight and dbias. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from ..kernel.device import CLUSTER_SIZES, Device
from .problem import ITEMSIZE, Problem, ceil_div
from .resources import KERNELS, at_odd_addresses, is_legal, registers_of
from .spec import MOST_SHORT, WARP, FewRowsSpec, NormSpec, RowShape
from .tables import Launch

MOST_CTAS = 10  # of an SM
MOST_THREADS = {"forward": 1024, "backward": 512}  # of a CTA
LEAST_REGISTERS = {"forward": 32, "backward": 64}  # of a thread
WORKING = 16  # registers of a thread besides what it keeps, at the very least
FEW_ROWS = 8  # to an SM: of so many a row may have more threads than those that decide its bits
# Bytes that an SM reads for an iteration of rows that are not so few: on an H100 the fastest of 222 cases read 12 to
# 72 KB forward and 16 to 50 backward.
ITERATION_BYTES = {"forward": range(12 << 10, 80 << 10), "backward": range(12 << 10, 64 << 10)}


def candidates(problem: Problem, spec: NormSpec | FewRowsSpec | None, device: Device, most: int) -> list[NormSpec]:
    """Up to `most` other kernels than `spec`, the one that runs the problem's rows today.

    Those with the fewest differences from it come first, beyond that in an order drawn by a fixed seed. There are none
    for rows that are streamed, that are few in a backward pass, or that are normalised twice.
    """
    if not isinstance(spec, NormSpec) or spec.kernel not in KERNELS[problem.direction]:
        return []
    few = problem.rows <= FEW_ROWS * device.sms
    today, differences = asdict(Launch.of(spec)), {}
    for launch in _launches(problem, spec, device, few):
        kernel = launch.applied(spec)
        enough = few or _iteration_bytes(kernel) in ITERATION_BYTES[problem.direction]
        if kernel != spec and enough and _registers_suffice(kernel) and _is_legal_at_any_address(kernel, device):
            differences[kernel] = sum(value != today[name] for name, value in asdict(launch).items())
    kernels = list(differences)
    random.Random(0).shuffle(kernels)
    return sorted(kernels, key=differences.__getitem__)[:most]


def _is_legal_at_any_address(spec: NormSpec, device: Device) -> bool:
    """A backward pass has the same launch wherever its arrays lie, so that dweight has the same bits."""
    if spec.kernel == "backward" and spec.aligned:
        anywhere = replace(spec, aligned=False, columns_aligned=False)
        if not is_legal(at_odd_addresses(anywhere, device), device):
            return False
    return is_legal(spec, device)


def _launches(problem: Problem, spec: NormSpec, device: Device, few: bool) -> Iterator[Launch]:
    """By the same threads of a row in one CTA and in clusters of each size."""
    total = spec.shape.threads * spec.shape.cluster
    short = ceil_div(problem.cols, spec.shape.vector_cols) <= MOST_SHORT
    for cluster in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        if cluster > 1 and total % (cluster * WARP):
            continue
        yield from _held(problem.direction, spec, cluster, total // cluster)
        if problem.direction == "forward" and short and few:
            yield from _spread(spec, cluster, total // cluster)


def _held(direction: str, spec: NormSpec, cluster: int, threads: int) -> Iterator[Launch]:
    """Kernels whose CTAs take row after row."""
    if cluster == 1 and threads <= WARP:
        rows_of_cta = [warps * WARP // threads for warps in (1, 2, 4, 6, 8)]
    else:
        rows_of_cta = [1] if cluster > 1 or direction == "forward" else [1, 2, 3, spec.rows_per_cta]
    ctas_of_sm = {*range(1, MOST_CTAS + 1), spec.ctas_per_sm}
    ways = _forward_ways(spec, cluster * threads) if direction == "forward" else _backward_ways(spec)
    for rows, ctas, way in product(dict.fromkeys(rows_of_cta), sorted(ctas_of_sm), ways):
        if rows * threads <= MOST_THREADS[direction]:
            yield Launch(direction, cluster, rows, ctas, **way)


def _forward_ways(spec: NormSpec, threads: int) -> list[dict[str, Any]]:
    """How rows wait: in registers, in a ring, or in one stage from which a thread takes them into registers."""
    both = (False, True)
    early = both if threads > WARP else (True,)  # late a warp would have nothing under way
    registers = [{"weights_in_registers": stay, "streamed_x": x} for stay, x in product(both, both)]
    stay = (False,) if spec.grouped else both  # the next row may be of another group
    x = {"streamed_x": spec.streamed_x}
    rings = [
        {"stages": stages, "prefetch": asked, "weights_in_registers": stays} | x
        for stages, asked, stays in product((2, 3), early, stay)
    ]
    kept = [
        {"stages": 1, "rows_in_registers": True, "prefetch": True, "weights_in_registers": stays} | x for stays in stay
    ]
    return registers + rings + (kept[-1:] if spec.aligned else [])


def _backward_ways(spec: NormSpec) -> Iterable[dict[str, Any]]:
    """By stages for each row; one that is kept frees its stage, where vectors are aligned."""
    kept = (1, 2, 3) if spec.aligned else (2, 3, 4)
    return [
        {"stages": stages, "rows_in_registers": stays, "prefetch": early, "streamed_x": spec.streamed_x}
        for stays, early in product((False, True), repeat=2)
        for stages in (kept if stays else (2, 3, 4))
    ]


def _spread(spec: NormSpec, cluster: int, threads: int) -> Iterator[Launch]:
    """A row's threads so many times that each holds a few of its vectors."""
    least = 1 if threads >= WARP else 2  # threads to spare are not for the vectors of a row undivided
    held_vectors = sorted({ceil_div(spec.shape.vectors, parts) for parts in range(least, spec.shape.vectors + 1)})
    for held, ctas in product(held_vectors, range(1, MOST_CTAS + 1)):
        choices = {"weights_in_registers": True, "streamed_x": spec.streamed_x, "vectors_per_thread": held}
        yield Launch("forward_spread", cluster, ctas_per_sm=ctas, **choices)


def _iteration_bytes(spec: NormSpec) -> int:
    """Of the rows that an SM has at once, in every matrix that is read."""
    shape: RowShape = spec.shape
    of_rows = shape.threads * shape.vectors * shape.vector_cols * spec.rows_per_cta * spec.ctas_per_sm
    return of_rows * sum(one.itemsize for one in spec.matrices)


def _registers_suffice(spec: NormSpec) -> bool:
    """Whether a thread has registers for what it keeps; what it spills beyond that, ptxas says."""
    registers = registers_of(spec.threads * spec.ctas_per_sm)
    vectors = spec.vectors_per_thread if spec.kernel == "forward_spread" else spec.shape.vectors
    bytes_kept = sum(one.itemsize for one in spec.matrices) if spec.rows_in_registers or not spec.stages else 0
    bytes_kept += sum(one.itemsize for one in spec.columns) if spec.weights_in_registers else 0
    bytes_kept += len(spec.sums) * ITEMSIZE[spec.compute]
    kept = vectors * spec.shape.vector_cols * bytes_kept // 4
    direction = "backward" if spec.kernel == "backward" else "forward"
    return registers >= max(LEAST_REGISTERS[direction], kept + WORKING)
