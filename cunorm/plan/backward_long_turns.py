"""Backward rows that a cluster holds, where an SM has little of the memory's bandwidth: parts of so many at once as are
few bytes, as in backward_turns.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, log2

from ..kernel.device import CLUSTER_SIZES, Device
from .backward_parts import row_bytes
from .cluster_backward import MOST_THREADS, registers_of_long_row
from .problem import Problem
from .registers import registers_of, with_rows_kept
from .shapes import in_clusters
from .spec import WARP, NormSpec, RowShape

# Bytes of x and dy that an SM reads for a turn, by both norms. H100, 64 M elements of LayerNorm: 24576 cols 138 us by
# 24 KB, by 48 154; 36864 by 27 KB 141, by 18 150, by 36 146; 114688 by 28 KB 141, by 57 148. Rather one of GOOD_BYTES,
# else at least LEAST_BYTES.
BEST_BYTES, GOOD_BYTES, LEAST_BYTES = 26 << 10, range(21 << 10, (29 << 10) + 1), 20 << 10
# Larger clusters cost, in log of the bytes: 57344 cols by 28 KB of 8 CTAs 138.8 us, of 16 140.4. But two CTAs of an SM
# gain where it has to be more: 73728 by 36 KB 141.3, by one 145.8.
LARGER_CLUSTER = 0.02
LEAST_THREADS = 2 * WARP  # of a CTA


def long_rows_by_turns(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The same threads of a row in as many CTAs or more, of which an SM has one or several."""

    def cost(option: tuple[RowShape, int]) -> tuple[bool, bool, float]:
        shape, ctas = option
        of_turn = ctas * row_bytes(problem) // shape.cluster
        larger = LARGER_CLUSTER * log2(shape.cluster) * (-1 if of_turn >= GOOD_BYTES.stop else 1)
        return of_turn < LEAST_BYTES, of_turn not in GOOD_BYTES, abs(log(of_turn / BEST_BYTES)) + larger

    shape, ctas = min(_options(spec, device), key=cost, default=(spec.shape, spec.ctas_per_sm))
    if (shape, ctas) == (spec.shape, spec.ctas_per_sm):
        return spec
    spec = replace(spec, shape=shape, ctas_per_sm=ctas, stages=3, rows_stay=False, ask_early=False)
    return with_rows_kept(spec, device) if spec.aligned else spec


def _options(spec: NormSpec, device: Device) -> Iterator[tuple[RowShape, int]]:
    """(who holds a row, CTAs of an SM): whose threads have the registers that cluster_backward.py wants for them."""
    threads = spec.shape.threads * spec.cluster
    for size in filter(device.runs_clusters, CLUSTER_SIZES):
        if size < spec.cluster or threads % (size * WARP) or threads < LEAST_THREADS * size:
            continue
        for ctas in range(1, size * MOST_THREADS // threads + 1):
            if registers_of_long_row(spec, device) <= registers_of(ctas * threads // size):
                yield in_clusters(spec.shape, size), ctas
