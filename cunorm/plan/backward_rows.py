"""The backward kernel of rows by a tier: who holds what of a row, and the cost rule for how many rows a CTA and an SM
have at once and how they wait.

Where a comment names a class of rows and no reason, its number was measured, or found by compiling: with less, ptxas
spills (docs/tuning.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, floor
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import SEED
from .backward_parts import is_dear, is_plain, matrices_read
from .cluster_forward import stages_for
from .forward_rows import RING_BYTES
from .problem import ITEMSIZE, Problem
from .registers import column_dtypes, with_rows_kept
from .shapes import ceil_div, is_power_of_two, kernel_spec, shape_of, short_backward_shape
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape


class Held(NamedTuple):
    """How a tier holds its rows."""

    packs: tuple[int, ...] = ()  # vectors that a thread may hold; (): by the rule of powers of two
    cluster: int = 1
    cta: int = 512  # threads of a CTA; where a row needs fewer, several rows share it
    resident: int = 512  # threads that an SM holds at once, which bounds the registers of a thread
    stages: int = 0  # in shared memory, for each row of a CTA; 0: by the bytes of a row
    # Norms that load the next row before they sum up the present one, where x and weight have 16 bits and cols is a
    # power of two.
    ask_early: tuple[str, ...] = ()
    always_early: bool = False  # whatever cols is
    fused_packs: int = 0  # vectors of a thread where there is more to do than in a plain norm


class RowsAtOnce(NamedTuple):
    """How many rows there are at once, and how they wait."""

    rows_per_cta: int
    resident: int  # threads that an SM holds at once
    stages: int  # 0: by the bytes of a row


def shape_of_rows(problem: Problem, held: Held, device: Device) -> NormSpec | None:
    """The kernel of rows so held, before it is known how it is run; None if they do not fit."""
    shape = _shape(problem, held, device) if device.runs_clusters(held.cluster) else None
    if shape is None:
        return None
    # Rows at odd addresses take a little more; whether a tier takes rows of a length must not depend on it.
    least = kernel_spec(
        problem, "backward", shape, rows_per_cta=_whole_warps(shape), stages=2, aligned=False, columns_aligned=False
    )
    fits = shared_memory(least) + dynamic_shared(least) <= device.shared
    return kernel_spec(problem, "backward", shape) if fits else None


def backward_rows(problem: Problem, held: Held, spec: NormSpec, device: Device) -> NormSpec:
    """The kernel of rows of that shape by the cost rule."""
    shape = spec.shape
    dear, early, late = is_dear(problem), _asks_early(problem, held), _asks_late(problem, held, shape, device)
    # 96 registers are enough.
    few_registers = spec.aligned and device.arch < 100 and not dear
    at_once = _rows_asked_for_late(problem, held, shape) if late else _rows(problem, held, shape, early, few_registers)
    if problem.groups:  # a CTA has rows of one group alone
        whole_warps = _whole_warps(shape)
        of_group = ceil_div(problem.rows // problem.groups.count, whole_warps) * whole_warps
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


def _shape(problem: Problem, held: Held, device: Device) -> RowShape | None:
    """Who holds what of a row; None where a thread has no registers for it."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(ceil_div(problem.cols, pack), held.cluster)

    def by(choices: Iterable[int]) -> list[RowShape]:
        shapes = [shape_of(pack, packs, choice, held.cluster) for choice in choices]
        shapes = shapes if held.packs else [short_backward_shape(pack, packs, whole=problem.cols % pack == 0)]
        return [one for one in shapes if _registers_suffice(problem, one, device)]

    shapes = by([held.fused_packs]) if held.fused_packs and not is_plain(problem) else []
    shapes = shapes or by(held.packs)
    return _least_work(shapes) if shapes else None


def _least_work(shapes: list[RowShape]) -> RowShape:
    """The shape by which a row is the least work for an SM's schedulers, of one for each number of vectors."""
    # Five vectors by 256 threads are slower than they count.
    shapes = [one for one in shapes if one.packs < 5 or one.threads > 256] or shapes
    return min(shapes, key=lambda shape: (ceil_div(shape.threads // WARP, 4) * shape.packs, shape.packs))


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
    rows = (under_way << 10) / ((held.stages - 1) * _row_bytes(problem))
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
    rows, stages = (48 << 10) / _row_bytes(problem), 2
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


def _row_bytes(problem: Problem) -> int:
    """Bytes that a backward pass reads of a row."""
    return problem.cols * sum(one.itemsize for one in matrices_read(problem))


def _whole_warps(shape: RowShape) -> int:
    """The fewest rows of a CTA."""
    return max(1, WARP // shape.threads)


def _in_shared_memory(spec: NormSpec, most_stages: int, rows: int, device: Device) -> NormSpec:
    """As many stages as fit, at least two: beside a wide dy or weight fewer than wanted, then fewer rows of a CTA."""
    whole_warps = _whole_warps(spec.shape)
    threads, resident = _small_ctas(spec, rows, device)
    # A single row has no row group beside it that has none.
    most = whole_warps if rows == 1 else min(spec.rows_per_cta, max(whole_warps, threads // spec.shape.threads))
    of_row = spec.shape.threads * spec.shape.packs * spec.shape.pack * sum(one.itemsize for one in spec.matrices)
    for rows_per_cta in range(most, 0, -whole_warps):
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


def _registers_suffice(problem: Problem, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for the sums of its columns."""
    # Beside the accumulators of four and five vectors they are too few for a weight more than twice as wide as x, on
    # sm_100 for any weight.
    if shape.threads > 512 or (shape.packs == 5 and shape.threads > 384):
        return False
    # What draws again which elements were dropped takes more.
    if shape.cluster > 1 and shape.threads > 384 and SEED in problem.by_name:
        return False
    if shape.threads <= 256 or shape.packs < 4:
        return True
    width = max((ITEMSIZE[dtype] for dtype in column_dtypes(problem)), default=0) // ITEMSIZE[problem.row_dtype]
    return device.arch < 100 and width <= 2
