"""The backward kernel of rows by the cost rule, where no table knows them: how many rows a CTA and an SM have at once,
and how they wait. Of few rows whole columns are added up beside the rows, so that nothing waits for partial sums.

Where a comment names a class of rows and no reason, its number was measured, or found by compiling: with less, ptxas
spills (docs/tuning.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import NORMS, derivative
from .forward import RING_BYTES
from .problem import ITEMSIZE, Problem, ceil_div, is_expensive, matrices_read, part, row_bytes, sources
from .resources import (
    SHARED_LIMIT,
    ctas_of,
    ctas_that_fit,
    dynamic_shared,
    registers_of_one_turn,
    shared_memory,
    stages_for,
    widest_column,
    with_rows_kept,
)
from .shapes import whole_warps
from .spec import WARP, FewRowsSpec, NormSpec, RowShape, kernel_spec

# Bytes of rows that an SM has under way beside those that it computes: of LayerNorm, of RMSNorm, of rows loaded early,
# and of what writes two matrices by rows. measured: docs/tuning.md
UNDER_WAY, RMS_UNDER_WAY, EARLY_UNDER_WAY, LATE_UNDER_WAY = 60 << 10, 54 << 10, 64 << 10, 48 << 10
MOST_CTA = 512  # threads of a CTA, and of an SM
MOST_OF_FEW_REGISTERS = 640  # of an SM, where 96 registers are enough


class RowsAtOnce(NamedTuple):
    """How many rows there are at once, and how they wait."""

    rows_per_cta: int
    ctas_per_sm: int = 1
    stages: int = 3  # 0: by the bytes of a row


def backward_rows(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows of that shape by the cost rule."""
    many = problem.matrix_bytes > RING_BYTES * device.sms
    of_group = problem.rows // problem.groups.count if problem.groups else 0
    wanted, stages = _rows_at_once(problem.layout, spec, many, of_group, device)
    threads, resident = _small_ctas(wanted, problem.rows, device)
    if problem.rows == 1:  # no row is beside it
        threads = spec.shape.threads
    return _in_shared_memory(wanted, stages, threads, resident, device)


@lru_cache(maxsize=4096)
def _rows_at_once(problem: Problem, spec: NormSpec, many: bool, of_group: int, device: Device) -> tuple[NormSpec, int]:
    """The kernel as far as shared memory suffices, and its stages; `of_group`: rows of each group, if there are any."""
    shape, expensive, late = spec.shape, is_expensive(problem), many and _loads_late(problem, spec.shape)
    early, most = _loads_early(spec), MOST_CTA
    if spec.aligned and device.arch < 100 and not expensive:
        most = MOST_OF_FEW_REGISTERS
    at_once = _rows_loaded_late(problem, shape) if late else _rows(problem, shape, early, most)
    rows_per_cta = at_once.rows_per_cta
    if problem.groups:  # a CTA has rows of one group alone
        least = whole_warps(shape)
        rows_per_cta = min(rows_per_cta, ceil_div(of_group, least) * least)
    spec = replace(
        spec,
        rows_per_cta=rows_per_cta,
        ctas_per_sm=at_once.ctas_per_sm,
        prefetch=early and not late and (many or shape.threads > 2 * WARP),
        keeps_g=expensive and (spec.aligned or shape.vectors <= 2),
    )
    return spec, at_once.stages


def _rows(problem: Problem, shape: RowShape, early: bool, most: int) -> RowsAtOnce:
    """Choose as many rows as keep enough bytes under way, by `most` threads of an SM.

    Two or three rows of several warps share a CTA, which leaves one set of partial sums; shorter rows are in two CTAs
    of whole warps.
    """
    matrices = len(matrices_read(problem))
    if shape.cluster > 1:  # a stage of three matrices in clusters of two has 48 KB
        return RowsAtOnce(1, stages=2 if matrices > 2 and shape.cluster == 2 else 0)
    subtracts_mean = problem.norm.subtracts_mean
    under_way = EARLY_UNDER_WAY if early else UNDER_WAY if subtracts_mean else RMS_UNDER_WAY
    rows = under_way / (2 * row_bytes(problem))
    if shape.threads > 2 * WARP:
        count = min(max(2, round(rows)), max(1, most // shape.threads))
        of_cta = 2 if count > 3 else 1 if count == 2 and subtracts_mean else count
        at_once = RowsAtOnce(1, count) if matrices > 2 else RowsAtOnce(of_cta, count // of_cta)
    else:
        warps = max(1, ceil(rows / 2 * shape.threads / WARP))
        if warps == 5 and (shape.threads < WARP or not subtracts_mean):
            warps = 6 if subtracts_mean else 4  # twice five are uneven for an SM's four schedulers
        at_once = RowsAtOnce(min(warps * WARP, MOST_CTA // 2) // shape.threads, 2)
    if problem.groups and shape.threads > WARP and matrices <= 2:
        # In one CTA: else each of them leaves partial sums of each group.
        return RowsAtOnce(min(at_once.rows_per_cta * at_once.ctas_per_sm, most // shape.threads))
    return at_once


def _loads_early(spec: NormSpec) -> bool:
    """Return whether the next row is loaded before the present one is summed up.

    RMSNorm does so with 16 bits and a power of two of columns.
    """
    narrow = max(ITEMSIZE[spec.row_dtype], widest_column(spec)) == 2
    power_of_two = spec.cols & (spec.cols - 1) == 0
    return narrow and power_of_two and spec.cluster == 1 and not NORMS[spec.operation.norm].subtracts_mean


def _loads_late(problem: Problem, shape: RowShape) -> bool:
    """Return whether two matrices are written by rows: then less is to be under way, and to be loaded late.

    Rows of groups were not measured, nor those of which a warp holds several; in larger clusters they would spill.
    """
    results = [one for one in problem.operands.written if one.kind == "full"]
    return len(results) > 1 and not problem.groups and shape.threads >= WARP and shape.cluster <= 2


def _rows_loaded_late(problem: Problem, shape: RowShape) -> RowsAtOnce:
    """Choose the rows of one CTA on an SM."""
    rows = LATE_UNDER_WAY / row_bytes(problem)
    if shape.cluster > 1:
        return RowsAtOnce(1, stages=2)
    rows = min(max(1, round(rows)), MOST_CTA // shape.threads)
    return RowsAtOnce(1, stages=3) if rows == 2 else RowsAtOnce(rows, stages=2)


@lru_cache(maxsize=4096)
def _in_shared_memory(spec: NormSpec, most_stages: int, threads: int, resident: int, device: Device) -> NormSpec:
    """Choose as many stages as fit, at least two, and fewer rows of a CTA where two do not fit, as beside a wide dy.

    A CTA has `threads` threads at most, an SM `resident`.
    """
    least = whole_warps(spec.shape)
    most = min(spec.rows_per_cta, max(least, threads // spec.shape.threads))
    of_row = (
        spec.shape.threads * spec.shape.vectors * spec.shape.vector_cols * sum(one.itemsize for one in spec.matrices)
    )
    for rows_per_cta in range(most, 0, -least):
        for stages in range(most_stages or stages_for(of_row), 1, -1):
            fitting = replace(spec, rows_per_cta=rows_per_cta, stages=stages)
            needed = shared_memory(fitting) + dynamic_shared(fitting)
            if needed <= device.shared:
                most_ctas = max(1, resident // fitting.threads) if spec.cluster == 1 else 1
                ctas = min(most_ctas, ctas_that_fit(needed, device))
                return with_rows_kept(replace(fitting, ctas_per_sm=ctas), device)
    raise AssertionError("shape_of_rows has seen that two stages of the fewest rows fit")


def _small_ctas(spec: NormSpec, rows: int, device: Device) -> tuple[int, int]:
    """Threads of a CTA and threads that an SM holds: fewer for a few rows to each SM.

    The more row groups share a CTA, the longer their sums take to be added up.
    """
    threads, resident = spec.threads, spec.threads * spec.ctas_per_sm
    in_warp = spec.shape.threads <= WARP
    # Rows of several warps share a CTA all the same.
    if not in_warp and spec.rows_per_cta > 1:
        return threads, resident
    if rows <= 8 * device.sms:
        return 64, 256
    if rows <= 32 * device.sms:
        threads = 128
    # Where row groups of a warp would have two rows each.
    if in_warp and threads > 64 and 2 * rows * spec.shape.threads < 5 * resident * device.sms:
        return 128, 256
    return threads, resident


# At most so many rows, and bytes of a matrix to each SM: of more, partial sums are as fast (docs/tuning.md).
MOST_ROWS = 2048
MOST_BYTES = 48 << 10
# Up to so many rows a thread adds up all of them, so that nobody waits for another.
ALONE = 2
# Threads of a CTA, up to so many rows.
THREADS = {ALONE: 64, 128: 128, 1023: 256, MOST_ROWS: 512}
# Rows that a thread adds up at most, where the CTAs of all columns and rows then run at once.
ROWS_OF_THREAD = 6
MOST_THREADS = 1024  # of an SM


def adds_columns_beside_rows(problem: Problem, device: Device) -> bool:
    """Whether x and dy are read twice, the second time from L2, by CTAs that add up columns and CTAs that have rows."""
    few = problem.rows <= MOST_ROWS and problem.matrix_bytes <= MOST_BYTES * device.sms
    # Their CTAs are as many as columns and rows need, on all SMs.
    return few and not problem.sm_margin and _has_columns_and_rows(problem.layout)


@lru_cache(maxsize=4096)
def _has_columns_and_rows(problem: Problem) -> bool:
    sums = problem.sums
    if not sums or len(sums) == len(problem.operands.written):
        return False
    return not derivative(problem.operation, sources(sums), problem.by_name).late


def few_rows_backward(problem: Problem, of_rows: NormSpec, shape: RowShape, device: Device) -> FewRowsSpec:
    """The kernel of few rows, of the kernel `of_rows` of what is written by rows.

    A row has the `shape` that it has among many rows, though less is read of it where its columns are added up apart.
    """
    threads = next(threads for most, threads in THREADS.items() if problem.rows <= most)
    kernels = _kernels(problem.layout, of_rows, shape, threads)
    row_ctas = ceil_div(problem.rows, kernels.rows.rows_per_cta) * shape.cluster
    of_columns = _of_columns(problem, kernels, kernels.ctas_per_sm * device.sms - row_ctas, device.sms)
    return FewRowsSpec(kernels.whole, of_columns, kernels.rows)


class _Kernels(NamedTuple):
    """The kernels of few rows, as far as they do not depend on how many there are."""

    whole: NormSpec
    rows: NormSpec
    columns: dict[int, NormSpec]  # by how many threads of a CTA are beside each other
    alone: NormSpec  # of columns too: all threads are
    ctas_per_sm: int  # wherever the arrays lie, so that dweight has the same bits


@lru_cache(maxsize=1024)
def _kernels(problem: Problem, of_rows: NormSpec, shape: RowShape, threads: int) -> _Kernels:
    """Both parts for every number of rows whose CTAs have so many threads."""
    rows_per_cta = max(1, threads // shape.threads) if shape.cluster == 1 else 1
    threads = rows_per_cta * shape.threads
    of_rows = replace(
        of_rows, shape=shape, rows_per_cta=rows_per_cta, stages=0, rows_in_registers=False, prefetch=False
    )
    of_rows = replace(of_rows, ctas_per_sm=_ctas_per_sm(of_rows))
    of_columns = part(problem, problem.sums)

    def by(lanes: int) -> NormSpec:
        of_lanes = RowShape(shape.vector_cols, lanes, 1)
        return kernel_spec(of_columns, "column_gradients", of_lanes, rows_per_cta=threads // lanes, final=True)

    room = SHARED_LIMIT - shared_memory(of_rows)
    powers = [2**n for n in range(1, 10) if threads % 2**n == 0]
    columns = {lanes: by(lanes) for lanes in powers if shared_memory(by(lanes)) <= room}
    whole = kernel_spec(problem, "backward", shape, final=True)
    ctas_per_sm = _ctas_per_sm(replace(of_rows, aligned=True, columns_aligned=True))
    return _Kernels(whole, of_rows, columns, by(threads), ctas_per_sm)


def _ctas_per_sm(spec: NormSpec) -> int:
    return max(1, ctas_of(spec, registers_of_one_turn(spec), MOST_THREADS))


def _of_columns(problem: Problem, kernels: _Kernels, slots: int, sms: int) -> NormSpec:
    """The kernel of the columns, by as few threads of a CTA beside each other as leave each two rows, or as make so few
    CTAs that they run at once, in so many slots, or else no more than there are SMs. By all of them where a thread adds
    up all rows.
    """
    if problem.rows <= ALONE:
        return kernels.alone
    columns, threads, vector_cols = kernels.columns, kernels.alone.shape.threads, kernels.alone.shape.vector_cols
    least = max((lanes for lanes in columns if threads // lanes >= max(8, ceil_div(problem.rows, 2))), default=2)
    ctas = {lanes: ceil_div(problem.cols, vector_cols * lanes) for lanes in columns if lanes >= least}
    at_once = (lanes for lanes in ctas if ctas[lanes] <= slots and problem.rows * lanes <= ROWS_OF_THREAD * threads)
    no_more = (lanes for lanes in ctas if ctas[lanes] <= sms)
    return columns[next(at_once, next(no_more, max(columns)))]
