"""Backward rows of which an SM would have one, held by two CTAs instead: with the same bits of dx.

An SM then has halves of two rows, of which one moves while the other waits, or half of one, and half as many partial
rows are left. Rows of 16 bits, x and dy alone, on Hopper; an H200 was searched for which.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import is_named
from .problem import ITEMSIZE, Problem
from .registers import widest_column
from .shapes import in_clusters
from .spec import WARP, NormSpec


class Halves(NamedTuple):
    most: float  # bytes of a matrix to each SM
    ctas: int  # of an SM
    places: int  # for rows
    kept: bool  # whether a thread keeps its row


# By packs of a thread and threads of a row, 0: any; the first that has room for the matrix. LayerNorm, 8 M elements:
# 8192 cols 19.0 us, by a CTA a row 19.9; 12288 cols 19.1 and 21.2, 64 M elements 102 either way. RMSNorm, 64 M
# elements: 8192 cols 105 and 97.
HALVES: dict[str, dict[tuple[int, int], tuple[Halves, ...]]] = {
    "layer_norm": {
        (2, 0): (Halves(inf, 2, 2, True),),
        (3, 384): (Halves(512 << 10, 2, 2, True),),
        (3, 448): (Halves(128 << 10, 1, 2, True), Halves(256 << 10, 2, 3, False)),
        (3, 512): (Halves(inf, 1, 2, True),),
    },
    "rms_norm": {
        (2, 0): (Halves(256 << 10, 2, 2, True),),
        (3, 384): (Halves(256 << 10, 2, 2, True),),
        (3, 448): (Halves(256 << 10, 2, 2, True),),
    },
}
LEAST_THREADS = 384


def by_halves(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of such rows where the table has them, else the same."""
    shape = spec.shape
    one_row = shape.cluster * spec.rows_per_cta * spec.ctas_per_sm == 1
    if not (one_row and was_searched(problem, spec)):
        return spec
    if shape.threads < LEAST_THREADS or shape.threads % (2 * WARP) or device.arch != 90 or not device.runs_clusters(2):
        return spec
    of_norm = HALVES[problem.operation.norm]
    options = of_norm.get((shape.packs, shape.threads), of_norm.get((shape.packs, 0), ()))
    found = next((one for one in options if problem.matrix_bytes <= one.most * device.sms), None)
    if found is None:
        return spec
    places = found.places
    if not spec.aligned:
        # Where half as many partial rows are left, the same rows at odd addresses leave as many, so that dweight has
        # its bits. Not timed.
        if found.ctas > 1 or problem.cols % shape.pack:
            return spec
        places += 1  # a row that is kept frees no place there
    spec = replace(spec, shape=in_clusters(shape, 2), ctas_per_sm=found.ctas, ask_early=False)
    return replace(spec, stages=places, rows_stay=found.kept)


def was_searched(problem: Problem, spec: NormSpec, itemsizes: tuple[int, ...] = (2,)) -> bool:
    """Whether the searches were of such rows: of so many bytes an element, x and dy alone."""
    alike = {(one.kind, one.dtype) for one in spec.matrices} == {("full", spec.row_dtype)}
    plain = is_named(problem.operation) and alike and ITEMSIZE[spec.row_dtype] in itemsizes
    # The sums of a dbias beside RMSNorm's spilled 32 to 80 bytes.
    sums = (1, 2) if problem.norm.subtracts_mean else (1,)
    return plain and len(spec.sums) in sums and widest_column(spec) <= 4
