"""The backward kernel of rows by the cost rule, where no table knows them: how many rows a CTA and an SM have at once,
and how they wait. Of few rows whole columns are added up beside the rows, so that nothing waits for partial sums.

Where a comment names a class of rows and no reason, its number was measured, or found by compiling: with less, ptxas
spills (docs/tuning.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, floor
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import derivative
from .forward import RING_BYTES
from .problem import ITEMSIZE, Problem, ceil_div, is_dear, matrices_read, part, row_bytes, sources
from .resources import (
    SHARED_LIMIT,
    column_dtypes,
    ctas_of,
    ctas_that_fit,
    dynamic_shared,
    registers_of_one_turn,
    shared_memory,
    stages_for,
    with_rows_kept,
)
from .shapes import Held, is_power_of_two, whole_warps
from .spec import WARP, FewRowsSpec, NormSpec, RowShape, kernel_spec


class RowsAtOnce(NamedTuple):
    """How many rows there are at once, and how they wait."""

    rows_per_cta: int
    resident: int  # threads that an SM holds at once
    stages: int  # 0: by the bytes of a row


def backward_rows(problem: Problem, held: Held, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows of that shape by the cost rule."""
    shape = spec.shape
    dear, early, late = is_dear(problem), _asks_early(problem, held), _asks_late(problem, held, shape, device)
    # 96 registers are enough.
    few_registers = spec.aligned and device.arch < 100 and not dear
    at_once = _rows_asked_for_late(problem, held, shape) if late else _rows(problem, held, shape, early, few_registers)
    if problem.groups:  # a CTA has rows of one group alone
        least = whole_warps(shape)
        of_group = ceil_div(problem.rows // problem.groups.count, least) * least
        at_once = at_once._replace(rows_per_cta=min(at_once.rows_per_cta, of_group))
    spec = replace(
        spec,
        rows_per_cta=at_once.rows_per_cta,
        ctas_per_sm=max(1, at_once.resident // (shape.threads * at_once.rows_per_cta)) if shape.cluster == 1 else 1,
        # Few rows that a warp or two hold load late.
        ask_early=early
        and not late
        and (shape.threads > 2 * WARP or 2 * problem.matrix_bytes > RING_BYTES * device.sms),
        keeps_g=dear and (spec.aligned or shape.packs <= 2),
    )
    return _in_shared_memory(spec, at_once.stages, problem.rows, device)


def _asks_early(problem: Problem, held: Held) -> bool:
    """Whether the next row is asked for before the present one is summed up, as far as the table says."""
    sixteen_bits = max(ITEMSIZE[dtype] for dtype in (problem.row_dtype, *column_dtypes(problem))) == 2
    early = problem.operation.norm in held.ask_early and is_power_of_two(problem.cols)
    return sixteen_bits and (held.always_early or early)


def _rows(problem: Problem, held: Held, shape: RowShape, early: bool, few_registers: bool) -> RowsAtOnce:
    """The rows that the tier has at once; of short rows so many as have enough bytes under way."""
    resident = held.resident if few_registers else min(held.resident, 512)
    rows_per_cta = max(1, min(held.cta, resident) // shape.threads) if held.cluster == 1 else 1
    if not held.packs:
        rows_per_cta, ctas = _rows_under_way(problem, held, shape, early)
        # In one CTA: else each of them leaves partial sums of each group.
        if problem.groups and shape.threads > WARP and len(matrices_read(problem)) <= 2:
            rows_per_cta, ctas = min(ctas * rows_per_cta, held.cta // shape.threads), 1
        resident = min(resident, ctas * rows_per_cta * shape.threads)
    of_three = held.fused_packs and len(matrices_read(problem)) > 2  # a stage of three matrices has 48 KB
    return RowsAtOnce(rows_per_cta, resident, 2 if of_three else held.stages)


def _rows_under_way(problem: Problem, held: Held, shape: RowShape, early: bool) -> tuple[int, int]:
    """(rows of a CTA, CTAs of an SM), so that an SM has 54 to 64 KB under way.

    Rows that more than two warps hold share a CTA by two or three, which leave one set of partial sums; two
    of LayerNorm have a CTA each.
    """
    # Rows that end within a vector are kept by fewer threads.
    odd = problem.cols % shape.pack != 0 and shape.pack == 8
    under_way = 64 if early else 60 if problem.norm.subtracts_mean and not odd else 54
    rows = (under_way << 10) / ((held.stages - 1) * row_bytes(problem))
    if shape.threads > 2 * WARP:
        count = max(2, round(rows))
        count = min(count, held.cta // shape.threads) if odd else count
        if len(matrices_read(problem)) > 2:
            return 1, count
        if count > 3:
            return (count, 1) if odd and count % 2 else (2, count // 2)
        return (1, 2) if count == 2 and problem.norm.subtracts_mean else (count, 1)
    # Whole warps, in two CTAs. Twice five are uneven for an SM's four schedulers.
    warps = ceil(rows / 2 * shape.threads / WARP)
    if odd and problem.norm.subtracts_mean and warps > 4:
        warps -= warps % 2
    elif warps == 5 and not problem.norm.subtracts_mean:
        warps = 4
    elif warps == 5 and shape.threads < WARP:
        warps = 6
    return min(max(1, warps) * WARP, held.cta // 2) // shape.threads, 2


def _asks_late(problem: Problem, held: Held, shape: RowShape, device: Device) -> bool:
    """Whether two matrices are written by rows: then less is to be under way, and to be loaded late.

    Rows of groups were not measured, nor those of which a warp holds several.
    """
    if problem.operation.second:
        return True
    results = [one for one in problem.operands if one.kind == "full" and one.written]
    many = problem.matrix_bytes > RING_BYTES * device.sms
    return len(results) > 1 and not problem.groups and many and shape.threads >= WARP and held.stages > 0


def _rows_asked_for_late(problem: Problem, held: Held, shape: RowShape) -> RowsAtOnce:
    """The rows of one CTA on an SM, so that about 48 KB are under way."""
    rows, stages = (48 << 10) / row_bytes(problem), 2
    if held.cluster > 1:
        rows = 1
    elif problem.operation.second:
        rows = max(1, floor(rows))
        if shape.packs == 5:
            rows = min(rows, 4)
    else:
        rows = min(max(1, round(rows)), held.cta // shape.threads)
        if rows == 2:
            rows, stages = 1, 3
    return RowsAtOnce(rows, rows * shape.threads, stages)


def _in_shared_memory(spec: NormSpec, most_stages: int, rows: int, device: Device) -> NormSpec:
    """As many stages as fit, at least two: beside a wide dy or weight fewer than wanted, then fewer rows of a CTA."""
    least = whole_warps(spec.shape)
    threads, resident = _small_ctas(spec, rows, device)
    # A single row has no row group beside it that has none.
    most = least if rows == 1 else min(spec.rows_per_cta, max(least, threads // spec.shape.threads))
    of_row = spec.shape.threads * spec.shape.packs * spec.shape.pack * sum(one.itemsize for one in spec.matrices)
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
    sums = problem.sums
    if not sums or all(one.name in sums for one in problem.operands if one.written):
        return False
    if problem.sm_margin:
        return False  # its CTAs are as many as columns and rows need, on all SMs
    if problem.operation.second or derivative(problem.operation, sources(sums), problem.by_name).late:
        return False
    return rows_are_few(problem, device)


def rows_are_few(problem: Problem, device: Device) -> bool:
    return problem.rows <= MOST_ROWS and problem.matrix_bytes <= MOST_BYTES * device.sms


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
    of_rows = replace(of_rows, shape=shape, rows_per_cta=rows_per_cta, stages=0, rows_stay=False)
    of_rows = replace(of_rows, ctas_per_sm=_ctas_per_sm(of_rows))
    of_columns = part(problem, problem.sums)

    def by(lanes: int) -> NormSpec:
        of_lanes = RowShape(shape.pack, lanes, 1)
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
    columns, threads, pack = kernels.columns, kernels.alone.shape.threads, kernels.alone.shape.pack
    least = max((lanes for lanes in columns if threads // lanes >= max(8, ceil_div(problem.rows, 2))), default=2)
    ctas = {lanes: ceil_div(problem.cols, pack * lanes) for lanes in columns if lanes >= least}
    at_once = (lanes for lanes in ctas if ctas[lanes] <= slots and problem.rows * lanes <= ROWS_OF_THREAD * threads)
    no_more = (lanes for lanes in ctas if ctas[lanes] <= sms)
    return columns[next(at_once, next(no_more, max(columns)))]
