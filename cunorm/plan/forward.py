"""The forward kernel of rows by the cost rule, where no table knows them: how rows of a shape are run.

How it is run follows from how many rows there are: few rows get more threads each, rows that run at once ask for weight
and bias with x, others wait in a ring in shared memory or in registers, to which weight and bias come late.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import SEED
from .problem import ITEMSIZE, Problem, ceil_div
from .resources import (
    RESIDENT,
    Needs,
    bytes_of_part,
    column_bytes,
    ctas_of,
    ctas_that_fit,
    dynamic_shared,
    needs_of,
    shared_memory,
    sixteen_bits,
    stages_for,
    widest_column,
    with_rows_kept,
    words_to_shift,
)
from .shapes import CLUSTER_ROWS, SHIFTED_VECTORS, short_forward_spec
from .spec import MOST_SHORT, STREAMED_THREADS, WARP, NormSpec, RowShape, in_clusters, kernel_spec

# Bytes of rows to each SM: of more, rows wait in registers, of fewer in a ring. measured: docs/tuning.md
RING_BYTES = 512 << 10
UNDER_WAY = 48 << 10  # bytes of x that an SM has under way in a ring
EARLY_WARPS = 12  # of an SM, at most, whose registers are enough to ask early


def forward(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows of that shape."""
    short = ceil_div(problem.cols, spec.shape.vector_cols) <= MOST_SHORT
    return (_of_a_cta if short else _of_a_cluster)(problem, spec, device)


class _Ways(NamedTuple):
    """How rows that one CTA may hold are run, whatever their number."""

    at_once: NormSpec | None  # where all of them run at once
    ring: NormSpec | None  # where they are not many
    registers: NormSpec


def _of_a_cta(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows that one CTA may hold."""
    if (spread := _few_rows(problem, spec, device)) is not None:
        return spread
    ways = _ways(problem.layout, spec, device)
    at_once, sms = ways.at_once, device.sms - problem.sm_margin
    if at_once and problem.rows <= sms * at_once.ctas_per_sm * at_once.rows_per_cta:
        return at_once
    many = problem.matrix_bytes > RING_BYTES * device.sms
    return ways.registers if many or ways.ring is None else ways.ring


@lru_cache(maxsize=4096)
def _ways(problem: Problem, spec: NormSpec, device: Device) -> _Ways:
    needs = needs_of(problem, spec, device)
    ctas = ctas_of(spec, needs.working + max(needs.at_once, needs.y))
    return _Ways(
        replace(spec, ctas_per_sm=ctas, weights_in_registers=True) if ctas else None,
        _in_a_ring(problem, spec, needs, device),
        _in_registers(problem, spec, needs, device),
    )


def _few_rows(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """More threads for each row where rows leave SMs or their threads idle; None where that was not measured to win.

    The threads by which a row is added up stay the same, and so do its bits.
    """
    shape, rows, sms = spec.shape, problem.rows, device.sms - problem.sm_margin
    if rows > sms * max(2, RESIDENT // 2 // shape.threads) or spec.finds_scales:
        return None  # the largest of a row would be one exchange more
    spec = replace(spec, rows_per_cta=1, weights_in_registers=True)
    vectors = shape.threads * shape.vectors
    long = vectors > 1024
    spread = replace(spec, kernel="forward_spread")
    if 1 < shape.threads <= WARP and shape.vectors > 2 and rows <= 2 * sms:
        return spread
    if (4 * rows <= sms if long else 8 * rows <= sms and vectors == 1024) and device.runs_clusters(8):
        return replace(spread, shape=in_clusters(shape, 8), vectors_per_thread=ceil_div(shape.vectors, 2))
    if not spec.aligned:
        return None
    in_two = shape.threads == 512 and shape.vectors > (4 if problem.norm.subtracts_mean else 6)
    if in_two and 2 * rows <= sms and device.runs_clusters(2):
        return replace(spread, shape=in_clusters(shape, 2), vectors_per_thread=shape.vectors)
    # Beside wide vectors, and with dropout, more than one row on an SM spills.
    narrow = widest_column(spec) <= ITEMSIZE[problem.row_dtype] and SEED not in (one.name for one in spec.matrices)
    most = sms * (RESIDENT // 2 // shape.threads) if narrow else sms
    if shape.vectors == 4 and shape.threads in (128, 256) and spec.reads_two and sms // 8 < rows <= most:
        return replace(spread, vectors_per_thread=2, ctas_per_sm=ceil_div(rows, sms))
    return None


def _in_a_ring(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """Rows that wait in shared memory, where enough of them fit; else None."""
    shape = spec.shape
    if shape.vectors <= 2 or len(spec.matrices) > 1 or spec.grouped:
        return None
    registers = needs.working + needs.y + needs.columns + (26 if shape.vectors == 4 else 14)
    if problem.norm.subtracts_mean and not spec.scales and device.arch >= (90 if shape.threads <= 2 * WARP else 100):
        registers += 34 if problem.is_zero_centred and shape.threads <= WARP else 8
    # In shared memory weight and bias would take 40 us to come, all SMs asking L2 for the same lines.
    spec = replace(spec, stages=2, prefetch=True, weights_in_registers=True)
    wanted = max(1, round(UNDER_WAY / (spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta)))
    fitting = ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    ctas = min(wanted, ctas_of(spec, registers), fitting)
    return with_rows_kept(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None


def _in_registers(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec:
    """Rows that wait in registers, to which weight and bias come a vector at a time, from L1."""
    shape = spec.shape
    # x passes L1 by, which is left to weight and bias; but not two matrices of rows that a warp holds.
    by_l1 = spec.aligned and shape.threads <= WARP and spec.reads_two
    spec = replace(
        spec,
        streamed_x=not by_l1 and (spec.aligned or spec.streamed_x),
        rows_per_cta=max(1, spec.rows_per_cta // 2) if shape.threads <= WARP else 1,
    )
    return replace(spec, ctas_per_sm=max(1, _ctas_beside_late_columns(problem, spec, needs, device)))


def _has_few_words(spec: NormSpec, needs: Needs) -> bool:
    """Whether one matrix is read, and nothing is so wide that a thread needs more registers for it."""
    itemsize = ITEMSIZE[spec.row_dtype]
    narrow = spec.aligned and len(spec.matrices) == 1 and widest_column(spec) <= max(4, itemsize) and not needs.y
    return (
        narrow and not (spec.grouped and spec.scales) and all(one.itemsize <= max(4, itemsize) for one in spec.written)
    )


def _ctas_beside_late_columns(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> int:
    """CTAs of an SM, by the registers of a thread to which weight and bias come a vector at a time.

    Every number was found by compiling: with fewer registers ptxas spills on one of the architectures.
    """
    shape, itemsize, width = spec.shape, ITEMSIZE[problem.row_dtype], widest_column(spec)
    few = device.arch == 90 or (device.arch > 90 and shape.vectors < 3)
    if problem.norm.subtracts_mean and width == 4 and shape.vectors == 2:
        few = few and not problem.is_zero_centred and spec.cols < shape.capacity
    most, words = (
        (1536, 28 if few else 40) if shape.vectors <= 3 and _has_few_words(spec, needs) else (RESIDENT, needs.working)
    )
    if needs.y and spec.aligned and spec.columns_aligned:  # 64 registers for four vectors, 80 for five, 96 for seven
        words = 32 + 4 * (spec.rows_per_cta > 1) + width // 4 * shape.vector_cols + 8 * (itemsize == 4)
        words += (8 if device.arch < 100 else 16) * (len(spec.matrices) - 1)
        if width < 4 and len(spec.matrices) == 1 and shape.vectors <= (2 if problem.norm.subtracts_mean else 3):
            most, words = 1536, 40 - needs.y
        words += 8 * (device.arch >= 100 or (device.arch < 90 and (spec.grouped or problem.norm.subtracts_mean)))
        words += 24 * (device.arch >= 100 and shape.vectors >= 5)
    elif device.arch >= 100 and shape.vectors == 5 and not sixteen_bits(spec):
        words += 8
    if shape.threads == 1 and shape.vectors > 2 and problem.norm.subtracts_mean:
        words += 8
    return ctas_of(spec, words + max(needs.row, needs.y), most)


def _of_a_cluster(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows that the CTAs of a cluster hold together; `spec` has the most CTAs of an SM."""
    shape, most = spec.shape, spec.ctas_per_sm
    spec = replace(spec, ctas_per_sm=1, weights_in_registers=_weights_in_registers(problem, spec, device))
    for ctas in range(most, 0, -1):
        most_stages = stages_for(ctas * bytes_of_part(shape) * len(spec.matrices))
        if problem.cols % shape.vector_cols and shape.vectors > 4 and ctas > 1:
            most_stages = 2
        for stages in range(most_stages, 1, -1):
            # Parts of two and three rows of clusters of 16 are loaded early.
            few = ctas < CLUSTER_ROWS and ctas * shape.threads <= EARLY_WARPS * WARP
            early = stages == 2 and shape.cluster == 16 and few and spec.weights_in_registers
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages, prefetch=early)
            if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
                return with_rows_kept(fitting, device)
    # Several matrices keep the shape of the plain norm's rows, and so its bits: where shared memory is too small they
    # wait in registers.
    several = len(spec.matrices) > 1
    if spec.scales == "per_row" and several and shape.threads == 512 and device.runs_clusters(2 * shape.cluster):
        # y is held as float32 beside the sum or the gate, for which half the threads have twice the registers.
        shape = in_clusters(shape, 2 * shape.cluster)
    return replace(spec, shape=shape)


def _weights_in_registers(problem: Problem, spec: NormSpec, device: Device) -> bool:
    """Whether a thread keeps weight and bias in registers. Where it does not, ptxas would spill, or two matrices need
    the registers.
    """
    if len(spec.matrices) > 1 or spec.finds_scales or spec.grouped:
        return False
    if not spec.aligned and spec.shape.vectors > SHIFTED_VECTORS:
        return False
    rows = {problem.row_dtype} | {one.dtype for one in problem.operands if one.kind == "full"}
    full = spec.shape.capacity == problem.cols
    return rows == {problem.row_dtype} != {"float64"} and (
        device.arch < 100 or (full and not problem.norm.subtracts_mean)
    )


def forward_streamed(problem: Problem, device: Device) -> NormSpec:
    """The kernel of rows that nothing holds, which reads them twice."""
    shape = RowShape(16 // ITEMSIZE[problem.row_dtype], STREAMED_THREADS, 1)
    spec = kernel_spec(problem, "forward_streamed", shape)
    # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
    arrays = {operand.dtype for operand in problem.operands if operand.kind in ("full", "column", "group")}
    two = arrays == {problem.row_dtype} != {"float64"} and len(spec.matrices) == 1 and spec.aligned
    return replace(spec, ctas_per_sm=2 if two else 1)


def holds_twice(row_dtype: str, cols: int) -> bool:
    """Whether one kernel does two norms of such rows, one after the other: a CTA holds them in six vectors a thread.

    With eight, at odd addresses, it spills on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_twice(problem: Problem, device: Device) -> NormSpec:
    """That kernel. A row has the shape of either norm's own, and so its bits."""
    spec = short_forward_spec(problem, "forward_twice")
    shape = spec.shape
    # x and residual wait at once; of either norm's vectors a vector comes late, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + words_to_shift(spec) * (1 if spec.aligned else 4)
    waiting = (
        shape.vectors * sum(shape.vector_cols * one.itemsize // 4 for one in spec.matrices) * (1 if spec.aligned else 2)
    )
    ctas = ctas_of(spec, working + waiting + column_bytes(problem, shape) // 4, RESIDENT)
    if spec.aligned and problem.rows <= (device.sms - problem.sm_margin) * ctas * spec.rows_per_cta:
        # All rows at once, as where there is one norm: else they wait for either weight after the sums.
        return replace(spec, ctas_per_sm=ctas, weights_in_registers=True)
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, working + waiting, RESIDENT)))
