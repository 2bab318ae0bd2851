"""Candidates for a search: other legal launches of a problem's rows, with the same bits of y, mean, rstd and dx.

The shape of a row stays, because it decides how the row is added up. The number of partial sums of a backward pass may
differ, and so may the last bit of dweight and dbias. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from ..kernel.device import CLUSTER_SIZES, Device
from .problem import ITEMSIZE, Problem, ceil_div
from .resources import KERNELS, at_odd_addresses, is_legal, registers_per_thread
from .spec import MOST_SHORT, UNALIGNED, WARP, FewRowsSpec, NormSpec
from .tables import Launch

MOST_CTAS = 10  # of an SM
MOST_THREADS = {"forward": 1024, "backward": 512}  # of a CTA
LEAST_REGISTERS = {"forward": 32, "backward": 64}  # of a thread
WORKING = 16  # the least registers of a thread besides what it keeps
FEW_ROWS = 8  # the most rows per SM for which a row may have more threads than its shape
# Bytes that an SM reads for an iteration if rows are not few: on an H100 the fastest of 222 cases read 12 to 72 KB
# forward and 16 to 50 backward.
ITERATION_BYTES = {"forward": range(12 << 10, 80 << 10), "backward": range(12 << 10, 64 << 10)}


def candidates(problem: Problem, spec: NormSpec | FewRowsSpec | None, device: Device, most: int) -> list[NormSpec]:
    """Return up to `most` other kernels than `spec`, which runs the problem's rows now.

    Kernels with the fewest differences from it come first, in an order drawn by a fixed seed. There are none for
    streamed rows, for few rows of a backward pass, or for norm-add-norm.
    """
    if not isinstance(spec, NormSpec) or spec.kernel not in KERNELS[problem.direction]:
        return []
    few = problem.rows <= FEW_ROWS * device.sms
    present, differences = asdict(Launch.of(spec)), {}
    for launch in _launches(problem, spec, device, few):
        kernel = launch.applied(spec)
        enough = few or _iteration_bytes(kernel) in ITERATION_BYTES[problem.direction]
        if kernel != spec and enough and _registers_suffice(kernel) and _is_legal_at_any_address(kernel, device):
            differences[kernel] = sum(value != present[name] for name, value in asdict(launch).items())
    kernels = list(differences)
    random.Random(0).shuffle(kernels)
    return sorted(kernels, key=differences.__getitem__)[:most]


def _is_legal_at_any_address(spec: NormSpec, device: Device) -> bool:
    """Whether a backward pass can have the launch at any address, which it must so that dweight has the same bits."""
    specs = [spec]
    if spec.kernel == "backward" and spec.aligned:
        specs.append(at_odd_addresses(replace(spec, **UNALIGNED), device))
    return all(is_legal(each, device) for each in specs)


def _launches(problem: Problem, spec: NormSpec, device: Device, few: bool) -> Iterator[Launch]:
    """Yield the launches with the threads of a row in one CTA, and in clusters of each size."""
    total = spec.shape.threads * spec.shape.cluster
    for cluster in filter(device.runs_clusters, (1, *CLUSTER_SIZES)):
        if cluster > 1 and total % (cluster * WARP):
            continue
        yield from _iterating(problem.direction, spec, cluster, total // cluster)
        if problem.direction == "forward" and problem.vectors <= MOST_SHORT and few:
            yield from _spread(spec, cluster, total // cluster)


def _iterating(direction: str, spec: NormSpec, cluster: int, threads: int) -> Iterator[Launch]:
    """Yield the launches whose CTAs take row after row."""
    if cluster == 1 and threads <= WARP:
        rows_per_cta = [warps * WARP // threads for warps in (1, 2, 4, 6, 8)]
    else:
        rows_per_cta = [1] if cluster > 1 or direction == "forward" else [1, 2, 3, spec.rows_per_cta]
    ctas_per_sm = {*range(1, MOST_CTAS + 1), spec.ctas_per_sm}
    choices = _forward_choices(spec, cluster * threads) if direction == "forward" else _backward_choices(spec)
    for rows, ctas, choice in product(dict.fromkeys(rows_per_cta), sorted(ctas_per_sm), choices):
        if rows * threads <= MOST_THREADS[direction]:
            yield Launch(direction, cluster, rows, ctas, **choice)


def _forward_choices(spec: NormSpec, threads: int) -> list[dict[str, Any]]:
    """Return the choices for rows in registers, in a ring, and in one stage from which they go to registers."""
    both = (False, True)
    prefetch = both if threads > WARP else (True,)  # without it a warp would wait for every row
    weights = (False,) if spec.grouped else both  # the next row may be of another group
    registers = [{"weights_in_registers": kept, "streamed_x": x} for kept, x in product(both, both)]
    rings = [
        {"stages": stages, "prefetch": early, "weights_in_registers": kept, "streamed_x": spec.streamed_x}
        for stages, early, kept in product((2, 3), prefetch, weights)
    ]
    one_stage = {"stages": 1, "rows_in_registers": True, "prefetch": True, "weights_in_registers": weights[-1]}
    return registers + rings + ([one_stage | {"streamed_x": spec.streamed_x}] if spec.aligned else [])


def _backward_choices(spec: NormSpec) -> Iterable[dict[str, Any]]:
    """Return the choices of stages. Rows in registers free a stage if vectors are aligned."""
    freed = (1, 2, 3) if spec.aligned else (2, 3, 4)
    return [
        {"stages": stages, "rows_in_registers": kept, "prefetch": early, "streamed_x": spec.streamed_x}
        for kept, early in product((False, True), repeat=2)
        for stages in (freed if kept else (2, 3, 4))
    ]


def _spread(spec: NormSpec, cluster: int, threads: int) -> Iterator[Launch]:
    """Yield the launches of forward_spread, with several times the threads of the shape and fewer vectors of each."""
    least = 1 if threads >= WARP else 2  # a row of less than a warp that is not divided would have idle threads
    vectors_per_thread = sorted({ceil_div(spec.shape.vectors, parts) for parts in range(least, spec.shape.vectors + 1)})
    for vectors, ctas in product(vectors_per_thread, range(1, MOST_CTAS + 1)):
        choices = {"weights_in_registers": True, "streamed_x": spec.streamed_x, "vectors_per_thread": vectors}
        yield Launch("forward_spread", cluster, ctas_per_sm=ctas, **choices)


def _iteration_bytes(spec: NormSpec) -> int:
    """Return the bytes of the rows that an SM has at once, of every matrix that is read."""
    shape = spec.shape
    values = shape.threads * shape.vectors * shape.vector_cols * spec.rows_per_cta * spec.ctas_per_sm
    return values * sum(matrix.itemsize for matrix in spec.matrices)


def _registers_suffice(spec: NormSpec) -> bool:
    """Whether a thread has registers for what it keeps. Whether it spills beyond that, ptxas says."""
    registers = registers_per_thread(spec.threads * spec.ctas_per_sm)
    vectors = spec.vectors_per_thread if spec.kernel == "forward_spread" else spec.shape.vectors
    bytes_kept = sum(matrix.itemsize for matrix in spec.matrices) if spec.rows_in_registers or not spec.stages else 0
    bytes_kept += sum(column.itemsize for column in spec.columns) if spec.weights_in_registers else 0
    bytes_kept += len(spec.sums) * ITEMSIZE[spec.compute]
    kept = vectors * spec.shape.vector_cols * bytes_kept // 4
    direction = "backward" if spec.kernel == "backward" else "forward"
    return registers >= max(LEAST_REGISTERS[direction], kept + WORKING)
