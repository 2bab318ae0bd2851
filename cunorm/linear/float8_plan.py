"""Plans of the kernels that cast operands of products to 8 bits: pure functions of a problem and a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..kernel.device import Device
from ..operation import Operation
from ..plan.problem import ITEMSIZE, ceil_div
from ..plan.resources import ctas_that_fit
from ..plan.spec import WARP, OtherSpec, RowShape
from ..plan.steps import GRID_LIMIT, WORKSPACE, Names, OtherPlan, Pointer, Step
from .float8_spec import (
    COLUMN_THREADS,
    PRODUCT_THREADS,
    REDUCE_COLUMNS,
    TILE_ROWS,
    CastColumns,
    CastRows,
    ColumnTotals,
    ReduceColumns,
    ScaleProduct,
    padded,
    vector_cols_of,
)

MOST_THREADS = 512  # of a row in a CTA, with 128 registers each
# Measured: docs/tuning.md, LayerNormLinear.
MOST_VECTORS = 4  # of a thread: eight columns take 16 registers, with their sums and maxima
FEW_VECTORS = 2  # of a thread with sums and maxima
# Bytes of rows that an SM loads ahead.
UNDER_WAY = 48 << 10
LEAST_ROWS = 16  # of a partial row of column_totals
GRID_Y_LIMIT = 65535


@dataclass(frozen=True)
class RowsProblem:
    """a (rows, cols) -> bytes, scales; sums and maxima of the columns where they are wanted."""

    rows: int
    cols: int
    dtype: str
    format: str
    stride: int  # elements from row to row
    aligned: bool  # a begins at a multiple of 16 bytes
    given: bool = False  # the scale is known, one for all
    power_of_2: bool = False
    sums: bool = False
    maxima: bool = False
    sum_dtype: str = "float32"


@dataclass(frozen=True)
class ColumnsProblem:
    """a (rows, cols) -> bytes (cols, padded rows), scales (cols): of the rows normalised, with an operation."""

    rows: int
    cols: int
    dtype: str
    format: str
    stride: int
    aligned: bool
    given: bool = False
    power_of_2: bool = False
    operation: Operation | None = None
    affine: tuple[tuple[str, str], ...] = ()
    affine_aligned: bool = True


@dataclass(frozen=True)
class ProductProblem:
    """product (rows, cols) -> y = product * row_scale * column_scale + bias."""

    rows: int
    cols: int
    dtype: str
    y: str
    bias: str | None
    aligned: bool


@lru_cache(maxsize=4096)
def plan_rows(problem: RowsProblem, device: Device) -> OtherPlan:
    """Return the plan of a problem with at least one row and column."""
    return rows_plan(problem, rows_kernel(problem, device), device)


def rows_plan(problem: RowsProblem, spec: CastRows, device: Device) -> OtherPlan:
    """Plan rows for a kernel that is chosen."""
    vector_cols = vector_cols_of(problem.dtype)
    width = ceil_div(problem.cols, vector_cols) * vector_cols
    wanted = problem.sums or problem.maxima
    if spec.shape:
        resident = device.resident_clusters(spec.cluster, spec.ctas_per_sm)
        groups = min(ceil_div(problem.rows, spec.rows_per_cta), resident)
        steps = [_step(spec, (groups * spec.cluster, 1, 1), (problem.rows, problem.stride))]
    else:
        tiles = ceil_div(problem.cols, vector_cols * COLUMN_THREADS)
        groups = min(ceil_div(problem.rows, LEAST_ROWS), max(1, 2 * device.sms // tiles), GRID_Y_LIMIT)
        streamed = replace(spec, sums=False, maxima=False)
        integers = (problem.rows, problem.stride, problem.cols)
        steps = [_step(streamed, (min(problem.rows, GRID_LIMIT), 1, 1), integers)]
        if wanted:
            totals = ColumnTotals(problem.dtype, spec.aligned, problem.sums, problem.maxima)
            steps.append(_step(totals, (tiles, groups, 1), (*integers, width)))
    names = ("a", problem.given and "given", "bytes", not problem.given and "scales")
    names += (problem.sums and "sums", problem.maxima and "maxima")
    arguments = Names(tuple(name for name in names if name))
    if not wanted:
        return OtherPlan(arguments, tuple(steps))
    # The workspace has partial sums, then partial maxima.
    first, second = Pointer(WORKSPACE), Pointer(WORKSPACE, 4 * groups * width if problem.sums else 0)
    steps = [_renamed(step, {"sums": first, "maxima": second}) for step in steps]
    sum_dtype = problem.sum_dtype if problem.sums else "float32"
    reduce = ReduceColumns(problem.dtype, sum_dtype, problem.sums, problem.maxima)
    grid = (ceil_div(width, REDUCE_COLUMNS), problem.sums + problem.maxima, 1)
    last = _step(reduce, grid, (groups, width, problem.cols), begins_early=device.overlaps_launches)
    steps.append(_renamed(last, {"sum_partials": first, "maximum_partials": second}))
    size = (4 * problem.sums + ITEMSIZE[problem.dtype] * problem.maxima) * groups * width
    return OtherPlan(arguments, tuple(steps), size)


def rows_kernel(problem: RowsProblem, device: Device) -> CastRows:
    """Return the kernel that casts rows.

    An SM has about MOST_THREADS, in one CTA, or in several of different clusters, so that partial rows are few.
    """
    itemsize, vector_cols = ITEMSIZE[problem.dtype], vector_cols_of(problem.dtype)
    streamed = CastRows(
        problem.dtype,
        problem.format,
        cols=0,
        shape=None,
        rows_per_cta=1,
        stages=0,
        aligned=problem.aligned and (problem.rows == 1 or problem.stride * itemsize % 16 == 0),
        bytes_aligned=problem.cols % vector_cols == 0,
        given=problem.given,
        power_of_2=problem.power_of_2,
        sums=problem.sums,
        maxima=problem.maxima,
    )
    shape = _row_shape(problem.cols, vector_cols, device, problem.sums or problem.maxima)
    if shape is None:
        return streamed
    of_row = shape.capacity // shape.cluster * itemsize
    most = max(1, MOST_THREADS // shape.threads)
    rows_per_cta = min(most, ceil_div(problem.rows, device.sms)) if shape.cluster == 1 else 1
    ctas = 1 if shape.cluster == 1 else max(1, min(most, round(UNDER_WAY / (2 * of_row))))
    ahead = max(1, min(5, round(UNDER_WAY / (ctas * rows_per_cta * of_row))))
    spec = replace(streamed, cols=problem.cols, shape=shape, rows_per_cta=rows_per_cta, ctas_per_sm=ctas)
    for stages in range(1 + ahead, 1, -1):
        staged = replace(spec, stages=stages)
        if ctas <= ctas_that_fit(staged.dynamic_shared + staged.shared_memory, device):
            return staged
    return streamed


def _row_shape(cols: int, vector_cols: int, device: Device, totals: bool) -> RowShape | None:
    """Choose which threads share a row: whole warps, of the fewest CTAs, with the fewest empty places for vectors.

    With totals of the columns rows of more than 1024 vectors are shared by clusters of four, so that an SM has parts of
    several rows, which do not wait for each other (docs/tuning.md, LayerNormLinear).
    """
    vectors = ceil_div(cols, vector_cols)
    few = totals and vectors <= FEW_VECTORS * MOST_THREADS
    in_fours = totals and not few and device.runs_clusters(4)
    for cluster in (4, 8, 16) if in_fours else (1, 2, 4, 8, 16):
        of_cta = ceil_div(vectors, cluster)
        if of_cta > MOST_VECTORS * MOST_THREADS or not device.runs_clusters(cluster):
            continue
        shapes = [
            RowShape(
                vector_cols, ceil_div(ceil_div(of_cta, vectors_per_thread), WARP) * WARP, vectors_per_thread, cluster
            )
            for vectors_per_thread in range(FEW_VECTORS if few else MOST_VECTORS, 0, -1)
        ]
        return min((shape for shape in shapes if shape.threads <= MOST_THREADS), key=lambda shape: shape.capacity)
    return None


@lru_cache(maxsize=4096)
def plan_columns(problem: ColumnsProblem, device: Device) -> OtherPlan:
    """Return the plan of a problem with at least one row and column."""
    aligned = problem.aligned and (problem.rows == 1 or problem.stride * ITEMSIZE[problem.dtype] % 16 == 0)
    # A thread has 64 bytes under way. With 64 registers each what is shifted spills, and what is normalised elsewhere.
    four = aligned and (problem.operation is None or (device.arch == 90 and problem.affine_aligned))
    spec = CastColumns(
        problem.dtype,
        problem.format,
        aligned,
        problem.given,
        problem.power_of_2,
        column_warps=1,
        operation=problem.operation,
        affine=problem.affine,
        affine_aligned=problem.affine_aligned,
        ctas_per_sm=4 if four else 2,
    )
    return columns_plan(problem, spec, device)


def columns_plan(problem: ColumnsProblem, spec: CastColumns, device: Device, tiles_per_cta: int = 0) -> OtherPlan:
    """Plan columns for a kernel that is chosen; 0 chooses the tiles of a CTA too."""
    across, down = ceil_div(problem.cols, spec.columns), ceil_div(problem.rows, TILE_ROWS)
    # A column's scale is found once for all tiles of a CTA, and the next tile is under way while one is written. Of few
    # tiles every SM has some.
    tiles_per_cta = tiles_per_cta or max(1, min(4, across * down // (6 * device.sms)), ceil_div(down, GRID_Y_LIMIT))
    integers = (problem.rows, problem.stride, problem.cols, padded(problem.rows), tiles_per_cta)
    step = _step(spec, (across, ceil_div(down, tiles_per_cta), 1), integers)
    return OtherPlan(Names(tuple(pointer.name for pointer in step.pointers)), (step,))


@lru_cache(maxsize=4096)
def plan_product(problem: ProductProblem, device: Device) -> OtherPlan:
    """Return the plan of a problem with at least one row and column."""
    vector_cols = vector_cols_of(problem.dtype)
    whole = problem.cols % max(vector_cols, 16 // ITEMSIZE[problem.y]) == 0 or problem.rows == 1
    spec = ScaleProduct(problem.dtype, problem.y, problem.bias, problem.aligned and whole, problem.aligned)
    tiles = ceil_div(problem.cols, vector_cols * PRODUCT_THREADS)
    step = _step(spec, (tiles, min(problem.rows, GRID_Y_LIMIT), 1), (problem.rows, problem.cols))
    return OtherPlan(Names(tuple(pointer.name for pointer in step.pointers)), (step,))


def _step(spec: OtherSpec, grid: tuple[int, int, int], integers: tuple[int, ...], begins_early: bool = False) -> Step:
    pointers = tuple(Pointer(name) for name, kind in spec.parameters().items() if kind.endswith("*"))
    return Step(spec, grid, spec.dynamic_shared, pointers, (), integers, begins_early)


def _renamed(step: Step, names: dict[str, Pointer]) -> Step:
    return step._replace(pointers=tuple(names.get(pointer.name, pointer) for pointer in step.pointers))


def kernels_of(plans: Iterable[OtherPlan]) -> list[OtherSpec]:
    """Return every kernel of these plans, once."""
    return list(dict.fromkeys(step.spec for plan in plans for step in plan.steps if isinstance(step.spec, OtherSpec)))
