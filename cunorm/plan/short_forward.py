"""The forward kernels of rows that one CTA may hold.

How a row is divided follows from its length, and how it waits from how many rows there are.
"""

from __future__ import annotations

from dataclasses import replace

from ..expression.value import FUNCTIONS
from ..kernel.device import Device
from .cluster_forward import WORKING
from .late_columns import late_columns
from .plain_rings import is_plain, plain_ring
from .problem import ITEMSIZE, Problem
from .registers import Needs, ctas_of, needs_of, registers_of, sixteen_bits, widest_column
from .shapes import in_clusters, kernel_spec, short_forward_spec
from .short_rings import RING_BYTES, in_a_ring
from .spec import WARP, NormSpec
from .spread_forward import few_rows_forward, without_turns

PAIRS_BYTES = 112 << 10  # of rows to each SM: two rows of two packs a thread, where y has 8 bits


def short_forward(problem: Problem, device: Device) -> NormSpec:
    """Rows of up to 4096 packs. How they wait follows from how many there are.

    Whoever holds what of a row is the same for all, and so are the bits.
    """
    spec = short_forward_spec(problem, "forward")
    needs = needs_of(problem, spec, device)
    few = few_rows_forward(problem, spec, needs, device)
    if few is not None:
        return few
    ctas = ctas_of(spec, needs.working + max(needs.at_once, needs.y))
    if ctas and problem.rows <= (device.sms - problem.sm_margin) * ctas * spec.rows_per_cta:
        # All rows at once: weight and bias are asked for with x.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    if (once := without_turns(problem, spec, device)) is not None:
        return once
    many = problem.matrix_bytes > RING_BYTES * device.sms
    if (in_pairs := _in_pairs(problem, spec, device)) is not None:
        return in_pairs
    plain, late = is_plain(problem, spec, device), late_columns(problem, spec, needs, device)
    ring = plain_ring(problem, spec, needs, device) if plain else in_a_ring(problem, spec, needs, many, device)
    if ring is None and many and not (plain and device.memory_is_slow and widest_column(spec) <= 2):
        ring = _by_two_ctas(problem, spec, needs, device)
    return late if ring is None or (plain and _all_at_once(problem, late, device)) else ring


def _all_at_once(problem: Problem, late: NormSpec, device: Device) -> bool:
    """Whether registers hold all rows at once, weight and bias coming late, and rather that than a ring: LayerNorm of
    five warps and more, where two thirds of the places or more are taken.

    512 x 10240 8.0 us, in a ring 8.6; 256 x 20480 8.3 and 9.2. Beside float32 weights five packs and more by 256
    threads, six by 512, and half of the places: 217 x 14336 7.4 and 8.6, but 297 x 12288 8.8 and 8.0.
    """
    if not problem.norm.subtracts_mean or late.shape.threads < 5 * WARP:
        return False
    rows = (device.sms - problem.sm_margin) * late.ctas_per_sm * late.rows_per_cta
    if widest_column(late) <= 2:
        return 2 * rows < 3 * problem.rows <= 3 * rows
    shape = late.shape
    few = (shape.threads == 256 and shape.packs >= 5) or (shape.threads == 512 and shape.packs >= 6)
    return few and rows < 2 * problem.rows <= 2 * rows


def _by_two_ctas(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """LayerNorm of more than 2560 packs, of which an SM would have one row at a time, where plain_rings.py has no
    better way, as beside zero-centred float32 or float64 weights: two CTAs hold a row, keep weight and bias and have
    the next rows under way, with the same bits.

    Timed before there were better ways, 32768 cols beside 16 bits 73.6 us, by one CTA 90.3. RMSNorm took 74.8 and 71.6.
    """
    alone = len(spec.matrices) == 1 and not spec.grouped and not spec.scales
    if not (alone and spec.aligned and ITEMSIZE[problem.row_dtype] == 2 and problem.norm.subtracts_mean):
        return None
    if spec.shape.packs <= 5 or spec.shape.threads < 512 or device.arch != 90 or not device.runs_clusters(2):
        return None
    shape = in_clusters(spec.shape, 2)
    ctas = 2 if WORKING + needs.columns <= registers_of(2 * shape.threads) else 1
    return kernel_spec(problem, "forward", shape, columns_stay=True, ctas_per_sm=ctas, stages=2 if ctas == 2 else 3)


def _in_pairs(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """LayerNorm's y in 8 bits, of rows that several warps hold in two or three packs: two rows a thread, which share
    what is read of weight and bias, and of whose sums each half of a warp merges one row's.

    64 M elements, by rows: 2048 cols 60.1 us, one by one 68.1; 6144 cols 61.5 and 70.3; 12288 cols 66.9 and 77.0. Four
    packs in 80 registers gain nothing, and y in 16 bits, which waits for memory, loses 1 to 14%.
    """
    alone = len(spec.matrices) == 1 and not spec.grouped and "s" not in (one.name for one in spec.written)
    if not (alone and spec.columns and sixteen_bits(spec)) or not (spec.scales and problem.norm.subtracts_mean):
        return None
    if any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps):
        return None
    packs = spec.shape.packs
    # By one scale 12288 cols 68.2 us, one by one 61.5. From 8 M elements on: 2048 cols by rows 11.1 us and 11.8.
    few_packs, enough = packs <= (3 if spec.finds_scales else 2), PAIRS_BYTES if packs <= 2 else RING_BYTES
    if spec.shape.threads <= WARP or not few_packs or problem.matrix_bytes <= enough * device.sms:
        return None
    if device.arch != 90 or problem.sm_margin:
        return None
    return replace(spec, kernel="forward_pairs", rows_per_cta=2, ctas_per_sm=ctas_of(spec, 64), streamed_x=True)
