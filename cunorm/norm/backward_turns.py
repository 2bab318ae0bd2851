"""Backward rows where an SM has little of the memory's bandwidth, as on an H100: so many at once as are few bytes.

What an SM reads for a turn decides there, and hardly how many places rows have: 64 M elements of LayerNorm take 137 to
140 us by turns of 20 to 26 KB of x and dy, 147 to 155 by 30 and more, 143 to 148 by 17; RMSNorm 137 to 141 by 17 to 20,
144 and more by 23. Rows of 16 bits and many of float32, x and dy alone; an H100 was searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, log2
from typing import NamedTuple

from ..device import CLUSTER_SIZES, Device
from .backward_halves import by_halves, was_searched
from .backward_parts import matrices_read
from .cluster_backward import registers_of_long_row
from .problem import ITEMSIZE, Problem
from .registers import registers_of, sixteen_bits, with_rows_kept
from .shapes import in_clusters, is_power_of_two
from .short_rings import RING_BYTES
from .spec import WARP, NormSpec, RowShape

# Bytes of x and dy that an SM reads for a turn. LayerNorm of 4992 cols 138.5 us, by 39 KB 151; RMSNorm of 1536 cols
# 138.3, by 24 KB 146.
TURN_BYTES = {"layer_norm": 21500, "rms_norm": 18000}
EARLY_TURN_BYTES = 24 << 10  # RMSNorm of 1024 cols, a power of two, which asks early, 137.7 us, by 32 KB 146
# Of fewer times as many an SM waits: RMSNorm of 448 cols by 14 KB 145 us, by 17.5 137. And what rows that are not many
# want at least, of which partial rows take longer: LayerNorm of 1728 cols, 8 M elements, 21.7 us, by 20 KB 22.7.
LEAST, LEAST_OF_FEW = {"layer_norm": 0.77, "rms_norm": 0.8}, 0.97
FEWEST_BYTES = 100 << 10  # of a matrix, to each SM: less than 7 M elements were not timed
# Of so many times as many a thread of two packs asks early: RMSNorm of 6400 cols 135.9 us, late 143.6, LayerNorm of
# 7168 136.2 and 148.6; or, beside a float32 weight, where early takes 160 and more, has LayerNorm a place more: 7424
# cols 141.9 and 147.3. Of more the rows keep their plan.
TOO_MANY, FAR_TOO_MANY = 1.26, 1.72
# And what an SM reads of rows that a cluster holds, by both norms: 64 M elements of LayerNorm, 24576 cols 138 us by
# 24 KB, by 48 154; 36864 by 27 KB 143, by 18 154, by 36 146; 114688 by 28 KB 141, by 57 148. Rather these bytes, else
# more than LEAST_LONG. Larger clusters cost, in log of the bytes: 57344 by 28 KB of 8 CTAs 144, of 16 146; but two CTAs
# of an SM gain where it has to be more: 73728 by 36 KB 142, by one 146.
LONG_TURN_BYTES, LONG_TURNS, LEAST_LONG = 26 << 10, range(21 << 10, (29 << 10) + 1), 20 << 10
LARGER_CLUSTER = 0.02
LEAST_OF_PART = 2 * WARP  # threads
CLUSTERS_COST = 0.07  # in log of the bytes: RMSNorm of 2688 cols by clusters of 16 KB is no faster than by 21
MOST_THREADS = 512  # of an SM
# Of a CTA of more than two rows. LayerNorm, 8 M elements, of 4288 cols by two 22.1 us, by two CTAs 22.7; of 4096, 512
# threads, 21.6 and 22.5.
THREADS_TOGETHER = 384


class AtOnce(NamedTuple):
    """How many rows an SM has at once: of `ctas` CTAs, in clusters of `cluster`."""

    cluster: int
    rows_per_cta: int
    ctas: int

    @property
    def rows(self) -> float:
        return self.rows_per_cta * self.ctas / self.cluster


def by_turns(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of such rows; of others what backward_halves.py says."""
    many = problem.matrix_bytes > RING_BYTES * device.sms
    # Float32, 64 M elements: 1024 cols by 20 KB 267 us, by 32 284, 4096 by 24 KB 270, by 32 282, 12288 268 and 285.
    searched = device.memory_is_slow and was_searched(problem, spec, (2, 4) if many else (2,))
    if searched and spec.cluster > 1 and problem.cols % spec.shape.pack == 0:
        return _by_parts(problem, spec, device)
    early = spec.ask_early and is_power_of_two(problem.cols)
    found = _at_once(problem, spec, many, early, device) if searched else None
    if found is None:
        return by_halves(problem, spec, device)
    best, times_wanted = found
    shape = in_clusters(spec.shape, best.cluster)
    at_once = {"shape": shape, "rows_per_cta": best.rows_per_cta, "ctas_per_sm": best.ctas}
    spec = replace(spec, **at_once, stages=3, rows_stay=False, ask_early=early)
    too_many = times_wanted > TOO_MANY and best.cluster == 1 and ITEMSIZE[spec.row_dtype] == 2
    if many and too_many and shape.packs <= 2 and not early:
        if sixteen_bits(spec):
            spec = replace(spec, ask_early=True)
        elif problem.norm.subtracts_mean:
            spec = replace(spec, stages=4)
    # At odd addresses 96 threads of three packs spilled 4 to 8 bytes.
    return spec if best.cluster > 1 and not spec.aligned else with_rows_kept(spec, device)


def _by_parts(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """Rows that a cluster holds: by the same threads in as many CTAs or more, of which an SM has one or several."""
    options = list(_parts(spec, device))
    if problem.matrix_bytes <= FEWEST_BYTES * device.sms or not options:
        return spec

    def cost(one: AtOnce) -> tuple[bool, bool, float]:
        of_turn = round(one.rows * _row_bytes(problem))
        larger = LARGER_CLUSTER * log2(one.cluster) * (-1 if of_turn >= LONG_TURNS.stop else 1)
        away = abs(log(of_turn / LONG_TURN_BYTES)) + larger
        return of_turn < LEAST_LONG, of_turn not in LONG_TURNS, away

    best = min(options, key=cost)
    shape = in_clusters(replace(spec.shape, threads=spec.shape.threads * spec.cluster, cluster=1), best.cluster)
    if (shape, best.ctas) == (spec.shape, spec.ctas_per_sm):
        return spec
    spec = replace(spec, shape=shape, ctas_per_sm=best.ctas, stages=3, rows_stay=False, ask_early=False)
    return with_rows_kept(spec, device) if spec.aligned else spec


def _parts(spec: NormSpec, device: Device) -> Iterator[AtOnce]:
    """One row at a time by each CTA, whose threads have the registers that cluster_backward.py wants for them."""
    threads = spec.shape.threads * spec.cluster
    for size in filter(device.runs_clusters, CLUSTER_SIZES):
        if size < spec.cluster or threads % (size * WARP) or threads < LEAST_OF_PART * size:
            continue
        for ctas in range(1, size * MOST_THREADS // threads + 1):
            if registers_of_long_row(spec, device) <= registers_of(ctas * threads // size):
                yield AtOnce(size, 1, ctas)


def _at_once(problem: Problem, spec: NormSpec, many: bool, early: bool, device: Device) -> tuple[AtOnce, float] | None:
    """(what has the bytes nearest to those wanted, how many times as many); None where rows keep their plan.

    Of rows that are not many RMSNorm gains nothing, nor does LayerNorm of which an SM has one.
    """
    if problem.cols % spec.shape.pack or (early and not many):
        return None
    several = spec.rows_per_cta * spec.ctas_per_sm > 1 and problem.matrix_bytes > FEWEST_BYTES * device.sms
    if not many and not (problem.norm.subtracts_mean and several):
        return None
    norm = problem.operation.norm
    wanted = (EARLY_TURN_BYTES if early else TURN_BYTES[norm]) / _row_bytes(problem)
    least = LEAST[norm] if many else LEAST_OF_FEW
    options = [one for one in _options(spec.shape, many, device) if least <= one.rows / wanted <= FAR_TOO_MANY]
    if early:
        options = [one for one in options if one.cluster == 1]
    if not options:
        return None
    best = min(options, key=lambda one: abs(log(one.rows / wanted)) + CLUSTERS_COST * (one.cluster > 1))
    return best, best.rows / wanted


def _row_bytes(problem: Problem) -> int:
    """Of x and dy."""
    return problem.cols * sum(one.itemsize for one in matrices_read(problem))


def _options(shape: RowShape, many: bool, device: Device) -> Iterator[AtOnce]:
    """Of rows of that shape: several, and of many rows one, parts of some, or an odd number of warps."""
    threads = shape.threads
    if threads <= 2 * WARP:
        for warps in range(threads // WARP or 1, MOST_THREADS // WARP + 1):
            if warps % 2 == 0 and warps * WARP // 2 % threads == 0:
                yield AtOnce(1, warps * WARP // 2 // threads, 2)
            elif many and warps * WARP % threads == 0:
                yield AtOnce(1, warps * WARP // threads, 1)
        return
    for rows in range(1 if many else 2, MOST_THREADS // threads + 1):
        if not many and rows % 2 and shape.packs <= 2:
            continue  # LayerNorm of 1920 cols, 8 M elements, by three 22.2 us, by four 21.4
        if rows == 2 or rows * threads <= THREADS_TOGETHER:
            yield AtOnce(1, rows, 1)
        else:
            yield AtOnce(1, 2, rows // 2) if rows % 2 == 0 else AtOnce(1, 1, rows)
    if many:
        for cluster, ctas in ((2, 1), (2, 3), (2, 5), (4, 3), (4, 5)):
            # By 96 threads each of three CTAs 4288 cols took 151 us beside 16 bits, 139 beside a float32 weight.
            warps = cluster if ctas == 1 else 4
            fits = threads % (warps * WARP) == 0 and ctas * threads <= cluster * MOST_THREADS
            if fits and device.runs_clusters(cluster):
                yield AtOnce(cluster, 1, ctas)
