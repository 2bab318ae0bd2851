"""The backward kernel of rows by the cost rule, which serves where no table does: how many rows a CTA and an SM have at
once, and their stages. For few rows some CTAs add up whole columns, so that no launch waits for partial sums.

A number without a reason was measured, or found by compiling: with less, ptxas spills (docs/tuning.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import NORMS, derivative
from .forward import RING_BYTES
from .problem import ITEMSIZE, Problem, ceil_div, derivative_of, only_gradients, row_bytes, sources
from .resources import (
    SHARED_LIMIT,
    ctas_by_registers,
    ctas_that_fit,
    dynamic_shared,
    registers_of_one_iteration,
    shared_memory,
    stages_for,
    widest_column,
    with_rows_in_registers,
)
from .shapes import fewest_rows_per_cta
from .spec import WARP, FewRowsSpec, NormSpec, RowShape, kernel_spec

# Bytes of rows on their way to an SM besides those that it computes: for LayerNorm, for RMSNorm, with prefetch, and for
# what writes two matrices. measured: docs/tuning.md
UNDER_WAY, RMS_UNDER_WAY, PREFETCH_UNDER_WAY, TWO_RESULTS_UNDER_WAY = 60 << 10, 54 << 10, 64 << 10, 48 << 10
MOST_CTA = 512  # threads of a CTA, and of an SM
MOST_OF_FEW_REGISTERS = 640  # threads of an SM, if 96 registers are enough


class RowsAtOnce(NamedTuple):
    """How many rows a CTA and an SM have at once, and the stages for each."""

    rows_per_cta: int
    ctas_per_sm: int = 1
    stages: int = 3  # 0: by the bytes of a row


def backward_by_rule(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel of rows of the shape of `spec`."""
    many = problem.matrix_bytes > RING_BYTES * device.sms
    group_rows = problem.rows // problem.groups.count if problem.groups else 0
    wanted, stages = _rows_at_once(problem.layout, spec, many, group_rows, device)
    cta_threads, sm_threads = _most_threads(wanted, problem.rows, device)
    if problem.rows == 1:
        cta_threads = spec.shape.threads
    return _in_shared_memory(wanted, stages, cta_threads, sm_threads, device)


@lru_cache(maxsize=4096)
def _rows_at_once(
    problem: Problem, spec: NormSpec, many: bool, group_rows: int, device: Device
) -> tuple[NormSpec, int]:
    """Return the kernel and its stages, as if shared memory sufficed. `group_rows`: the rows of a group, if any."""
    shape, expensive = spec.shape, derivative_of(problem).is_expensive
    two_results = many and _writes_two_matrices(problem, shape)
    prefetch = _gains_by_prefetch(spec)
    if two_results:
        at_once = _rows_of_two_results(problem, shape)
    else:
        few_registers = spec.aligned and device.arch < 100 and not expensive
        at_once = _rows_of_one_result(problem, shape, prefetch, MOST_OF_FEW_REGISTERS if few_registers else MOST_CTA)
    rows_per_cta = at_once.rows_per_cta
    if problem.groups:  # a CTA has rows of one group alone
        least = fewest_rows_per_cta(shape)
        rows_per_cta = min(rows_per_cta, ceil_div(group_rows, least) * least)
    spec = replace(
        spec,
        rows_per_cta=rows_per_cta,
        ctas_per_sm=at_once.ctas_per_sm,
        prefetch=prefetch and not two_results and (many or shape.threads > 2 * WARP),
        keeps_g=expensive and (spec.aligned or shape.vectors <= 2),
    )
    return spec, at_once.stages


def _rows_of_one_result(problem: Problem, shape: RowShape, prefetch: bool, most_threads: int) -> RowsAtOnce:
    """Choose as many rows as keep enough bytes on their way to an SM, by at most so many threads of it.

    Two or three rows of several warps share a CTA, which leaves one set of partial sums. Shorter rows are in two CTAs
    of whole warps.
    """
    matrices = len(problem.operands.full_matrices)
    if shape.cluster > 1:  # a stage of three matrices in clusters of two has 48 KB
        return RowsAtOnce(1, stages=2 if matrices > 2 and shape.cluster == 2 else 0)
    subtracts_mean = problem.norm.subtracts_mean
    under_way = PREFETCH_UNDER_WAY if prefetch else UNDER_WAY if subtracts_mean else RMS_UNDER_WAY
    rows = under_way / (2 * row_bytes(problem))
    if shape.threads > 2 * WARP:
        rows_per_sm = min(max(2, round(rows)), max(1, most_threads // shape.threads))
        rows_per_cta = 2 if rows_per_sm > 3 else 1 if rows_per_sm == 2 and subtracts_mean else rows_per_sm
        rows_per_cta = 1 if matrices > 2 else rows_per_cta
        at_once = RowsAtOnce(rows_per_cta, rows_per_sm // rows_per_cta)
    else:
        warps = max(1, ceil(rows / 2 * shape.threads / WARP))
        if warps == 5 and (shape.threads < WARP or not subtracts_mean):
            warps = 6 if subtracts_mean else 4  # twice five are uneven for an SM's four schedulers
        at_once = RowsAtOnce(min(warps * WARP, MOST_CTA // 2) // shape.threads, 2)
    if problem.groups and shape.threads > WARP and matrices <= 2:
        # In one CTA, because each CTA leaves partial sums of each group.
        return RowsAtOnce(min(at_once.rows_per_cta * at_once.ctas_per_sm, most_threads // shape.threads))
    return at_once


def _gains_by_prefetch(spec: NormSpec) -> bool:
    """Whether rows are those of RMSNorm with 16 bits and a power of two of columns, which gain by prefetch."""
    narrow = max(ITEMSIZE[spec.row_dtype], widest_column(spec)) == 2
    power_of_two = spec.cols & (spec.cols - 1) == 0
    return narrow and power_of_two and spec.cluster == 1 and not NORMS[spec.operation.norm].subtracts_mean


def _writes_two_matrices(problem: Problem, shape: RowShape) -> bool:
    """Whether two matrices are written, so that fewer bytes are to be on their way, and none prefetched.

    Rows of groups and rows of which a warp holds several were not measured; in larger clusters they would spill.
    """
    results = [operand for operand in problem.operands.written if operand.kind == "full"]
    return len(results) > 1 and not problem.groups and shape.threads >= WARP and shape.cluster <= 2


def _rows_of_two_results(problem: Problem, shape: RowShape) -> RowsAtOnce:
    """Choose the rows of one CTA on an SM."""
    if shape.cluster > 1:
        return RowsAtOnce(1, stages=2)
    rows = min(max(1, round(TWO_RESULTS_UNDER_WAY / row_bytes(problem))), MOST_CTA // shape.threads)
    return RowsAtOnce(1, stages=3) if rows == 2 else RowsAtOnce(rows, stages=2)


@lru_cache(maxsize=4096)
def _in_shared_memory(spec: NormSpec, most_stages: int, cta_threads: int, sm_threads: int, device: Device) -> NormSpec:
    """Choose as many stages as fit, and fewer rows per CTA if two stages do not fit, as beside a wide dy.

    A CTA and an SM have at most so many threads.
    """
    shape, least = spec.shape, fewest_rows_per_cta(spec.shape)
    most_rows = min(spec.rows_per_cta, max(least, cta_threads // shape.threads))
    if most_stages == 0:
        row_cols = shape.threads * shape.vectors * shape.vector_cols
        most_stages = stages_for(row_cols * sum(matrix.itemsize for matrix in spec.matrices))
    for rows_per_cta in range(most_rows, 0, -least):
        for stages in range(most_stages, 1, -1):
            fitting = replace(spec, rows_per_cta=rows_per_cta, stages=stages)
            needed = shared_memory(fitting) + dynamic_shared(fitting)
            if needed <= device.shared:
                most_ctas = max(1, sm_threads // fitting.threads) if spec.cluster == 1 else 1
                ctas = min(most_ctas, ctas_that_fit(needed, device))
                return with_rows_in_registers(replace(fitting, ctas_per_sm=ctas), device)
    raise AssertionError("two stages of the fewest rows fit, as the rule of the tier has seen (shapes.py)")


def _most_threads(spec: NormSpec, rows: int, device: Device) -> tuple[int, int]:
    """Return the most threads of a CTA and of an SM: fewer if there are few rows for each SM.

    The more rows a CTA has at once, the longer it takes to add up their sums.
    """
    threads, resident = spec.threads, spec.threads * spec.ctas_per_sm
    in_warp = spec.shape.threads <= WARP
    if not in_warp and spec.rows_per_cta > 1:  # rows of several warps share a CTA all the same
        return threads, resident
    if rows <= 8 * device.sms:
        return 64, 256
    if rows <= 32 * device.sms:
        threads = 128
    # The threads of an SM would have two rows each, one after the other.
    if in_warp and threads > 64 and 2 * rows * spec.shape.threads < 5 * resident * device.sms:
        return 128, 256
    return threads, resident


# The most rows, and bytes of a matrix per SM, whose columns are added up apart; of more, partial sums are as fast
# (docs/tuning.md).
MOST_ROWS = 2048
MOST_BYTES = 48 << 10
ALONE = 2  # the most rows that a thread adds up alone, so that none waits for another
THREADS = {ALONE: 64, 128: 128, 1023: 256, MOST_ROWS: 512}  # threads of a CTA by the most rows
ROWS_OF_THREAD = 6  # the most rows that a thread adds up if the CTAs of all columns and rows then run at once
MOST_THREADS = 1024  # of an SM


def adds_columns_apart(problem: Problem, device: Device) -> bool:
    """Whether some CTAs add up columns and others compute rows, so that x and dy are read twice, then from L2."""
    few = problem.rows <= MOST_ROWS and problem.matrix_bytes <= MOST_BYTES * device.sms
    # They have as many CTAs as columns and rows need, on all SMs.
    return few and not problem.sm_margin and _has_columns_and_rows(problem.layout)


@lru_cache(maxsize=4096)
def _has_columns_and_rows(problem: Problem) -> bool:
    if not problem.sums or not problem.row_results:
        return False
    return not derivative(problem.operation, sources(problem.sums), problem.by_name).late


def few_rows_backward(problem: Problem, row_kernel: NormSpec, shape: RowShape, device: Device) -> FewRowsSpec:
    """Return the kernel of few rows; `row_kernel` is that of the gradients written by rows.

    A row has the `shape` that it has among many rows, though less of it is read where its columns are added up apart.
    """
    threads = next(threads for most, threads in THREADS.items() if problem.rows <= most)
    kernels = _few_rows_kernels(problem.layout, row_kernel, shape, threads)
    row_ctas = ceil_div(problem.rows, kernels.rows.rows_per_cta) * shape.cluster
    column_kernel = _column_kernel(problem, kernels, kernels.ctas_per_sm * device.sms - row_ctas, device.sms)
    return FewRowsSpec(kernels.whole, column_kernel, kernels.rows)


class _FewRowsKernels(NamedTuple):
    """The parts of a kernel of few rows that do not depend on their number."""

    whole: NormSpec
    rows: NormSpec
    columns: dict[int, NormSpec]  # by lanes: the threads of a CTA that read neighbouring columns
    alone: NormSpec  # the same with all threads as lanes
    ctas_per_sm: int  # that of aligned arrays for any, so that dweight has the same bits


@lru_cache(maxsize=1024)
def _few_rows_kernels(problem: Problem, row_kernel: NormSpec, shape: RowShape, threads: int) -> _FewRowsKernels:
    rows_per_cta = max(1, threads // shape.threads) if shape.cluster == 1 else 1
    threads = rows_per_cta * shape.threads
    rows = replace(
        row_kernel, shape=shape, rows_per_cta=rows_per_cta, stages=0, rows_in_registers=False, prefetch=False
    )
    rows = replace(rows, ctas_per_sm=_ctas_per_sm(rows))
    column_problem = only_gradients(problem, problem.sums)

    def column_kernel(lanes: int) -> NormSpec:
        lane_shape = RowShape(shape.vector_cols, lanes, 1)
        return kernel_spec(column_problem, "column_gradients", lane_shape, rows_per_cta=threads // lanes, final=True)

    columns = {lanes: column_kernel(lanes) for lanes in (2**n for n in range(1, 10)) if threads % lanes == 0}
    room = SHARED_LIMIT - shared_memory(rows)
    columns = {lanes: spec for lanes, spec in columns.items() if shared_memory(spec) <= room}
    whole = kernel_spec(problem, "backward", shape, final=True)
    ctas_per_sm = _ctas_per_sm(replace(rows, aligned=True, columns_aligned=True))
    return _FewRowsKernels(whole, rows, columns, column_kernel(threads), ctas_per_sm)


def _ctas_per_sm(spec: NormSpec) -> int:
    return max(1, ctas_by_registers(spec, registers_of_one_iteration(spec), MOST_THREADS))


def _column_kernel(problem: Problem, kernels: _FewRowsKernels, free_ctas: int, sms: int) -> NormSpec:
    """Choose the lanes of the CTAs that add up columns.

    A thread that adds up all rows needs no others: then all threads are lanes. Else the fewest lanes are chosen that
    leave a thread two rows or more, and make so few CTAs that they run at once, as `free_ctas`, or else as many as SMs.
    """
    if problem.rows <= ALONE:
        return kernels.alone
    columns, threads, vector_cols = kernels.columns, kernels.alone.shape.threads, kernels.alone.shape.vector_cols
    least = max((lanes for lanes in columns if threads // lanes >= max(8, ceil_div(problem.rows, 2))), default=2)
    ctas = {lanes: ceil_div(problem.cols, vector_cols * lanes) for lanes in columns if lanes >= least}
    at_once = (lanes for lanes in ctas if ctas[lanes] <= free_ctas and problem.rows * lanes <= ROWS_OF_THREAD * threads)
    one_per_sm = (lanes for lanes in ctas if ctas[lanes] <= sms)
    return columns[next(at_once, next(one_per_sm, max(columns)))]
