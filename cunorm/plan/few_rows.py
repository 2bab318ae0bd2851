"""How few rows are differentiated: whole columns are added up beside the rows, so that nothing waits for partial rows.

Every CTA has one turn. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import derivative
from .backward_parts import part, sources
from .problem import Problem
from .registers import ctas_of, registers_of_one_turn
from .shapes import ceil_div, kernel_spec
from .shared_memory import SHARED_LIMIT, shared_memory
from .spec import FewRowsSpec, NormSpec, RowShape

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
