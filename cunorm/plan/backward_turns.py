"""Backward rows where an SM has little of the memory's bandwidth, as on an H100: so many at once as are few bytes.

What an SM reads for a turn decides there, and hardly how many places rows have: 64 M elements of LayerNorm take 137 to
140 us by turns of 20 to 26 KB of x and dy, 147 to 155 by 30 and more, 143 to 148 by 17; RMSNorm 137 to 141 by 17 to 20,
144 and more by 23. Rows of 16 bits and many of float32, x and dy alone; an H100 was searched. Those that a cluster
holds are in backward_long_turns.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log
from typing import NamedTuple

from ..kernel.device import Device
from .backward_halves import by_halves, was_searched
from .backward_long_turns import long_rows_by_turns
from .backward_parts import row_bytes
from .cluster_backward import MOST_THREADS
from .problem import ITEMSIZE, Problem
from .registers import sixteen_bits, with_rows_kept
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
CLUSTERS_COST = 0.07  # in log of the bytes: RMSNorm of 2688 cols by clusters of 16 KB is no faster than by 21
# Of a CTA of more than two rows. LayerNorm, 8 M elements, of 4288 cols by two 22.1 us, by two CTAs 22.7; of 4096, 512
# threads, 21.7 and 22.5.
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
    searched = searched and problem.cols % spec.shape.pack == 0
    if spec.cluster > 1:
        timed = problem.matrix_bytes > FEWEST_BYTES * device.sms
        return long_rows_by_turns(problem, spec, device) if searched and timed else spec
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


def _at_once(problem: Problem, spec: NormSpec, many: bool, early: bool, device: Device) -> tuple[AtOnce, float] | None:
    """(what has the bytes nearest to those wanted, how many times as many); None where rows keep their plan.

    Of rows that are not many RMSNorm gains nothing, nor does LayerNorm of which an SM has one.
    """
    if early and not many:
        return None
    several = spec.rows_per_cta * spec.ctas_per_sm > 1 and problem.matrix_bytes > FEWEST_BYTES * device.sms
    if not many and not (problem.norm.subtracts_mean and several):
        return None
    norm = problem.operation.norm
    wanted = (EARLY_TURN_BYTES if early else TURN_BYTES[norm]) / row_bytes(problem)
    least = LEAST[norm] if many else LEAST_OF_FEW
    options = [one for one in _options(spec.shape, many, device) if least <= one.rows / wanted <= FAR_TOO_MANY]
    if early:
        options = [one for one in options if one.cluster == 1]
    if not options:
        return None
    best = min(options, key=lambda one: abs(log(one.rows / wanted)) + CLUSTERS_COST * (one.cluster > 1))
    return best, best.rows / wanted


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
