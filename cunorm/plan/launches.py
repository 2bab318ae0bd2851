"""The launches of a plan: `launches(problem, kernel of its rows, device)` -> grids, partial sums, workspace.

Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from ..kernel.device import Device
from ..operation import derivative
from .problem import ITEMSIZE, Problem, ceil_div, part, sources
from .resources import dynamic_shared, launch_shared
from .spec import (
    LINE_COLUMNS,
    MOST_SHORT,
    STREAMED_THREADS,
    SUM_COLUMNS,
    WARP,
    FewRowsSpec,
    NormSpec,
    RowShape,
    SumSpec,
    kernel_spec,
)
from .steps import GRID_LIMIT, WORKSPACE, Plan, Pointer, Step

SUM_THREADS = 256
SUM_LANES = {8: 512, 16: 4096, 32: 8192, 64: 16384, 128: 32768}  # up to how many threads of partial sums
# Of column_gradients, on an SM. Of sum_partials no more where multiprocessors are left to others.
PARTIAL_CTAS = 2
LEAST_ROWS = 16  # of one of its partial sums
# CTAs of a cluster at most, behind whose kernel the sums let the next one begin: larger clusters would find room
# unevenly.
NEXT_BEGINS_CLUSTER = 2
COLUMN_THREADS = 256  # of a CTA of column_gradients
# What the first row of a CTA waits, and its sums on their way out, in iterations of the others.
ITERATIONS_TO_START = 4


def launches(problem: Problem, rows: NormSpec | FewRowsSpec | None, device: Device) -> Plan:
    """The plan of a problem by the kernel of its rows; None: rows of a backward pass that are streamed."""
    if problem.direction == "forward":
        assert isinstance(rows, NormSpec)
        return _forward(problem, rows, device)
    return _backward(problem, rows, device)


def _forward(problem: Problem, spec: NormSpec, device: Device) -> Plan:
    """A CTA for every row or, where a CTA has more than one iteration, as many as run at once."""
    short = ceil_div(problem.cols, spec.shape.vector_cols) <= MOST_SHORT
    once = short and spec.kernel == "forward" and not spec.stages
    once = once and not problem.sm_margin and problem.rows <= GRID_LIMIT
    if spec.kernel == "forward_streamed":
        groups = resident_groups(problem, spec, device) if problem.sm_margin else min(problem.rows, GRID_LIMIT)
    elif spec.kernel == "forward_twice" and not problem.sm_margin:
        groups = min(ceil_div(problem.rows, spec.rows_per_cta), GRID_LIMIT)
    elif once or spec.kernel in ("forward_pairs", "forward_spread"):
        groups = ceil_div(problem.rows, spec.rows_per_cta)
    else:
        groups = resident_groups(problem, spec, device)
        if short and spec.grouped and spec.kernel == "forward":
            spec = replace(spec, weights_in_registers=False)  # the next row of a CTA may be of another group
    spec = _with_one_row_per_cta(spec) if once else spec
    step = step_of(problem, spec, (groups * spec.cluster, 1, 1), 0)
    return Plan(problem, device, tier_name(spec), (step,))


# By replace() it takes 8 us more.
@lru_cache(maxsize=4096)
def _with_one_row_per_cta(spec: NormSpec) -> NormSpec:
    return replace(spec, one_row_per_cta=True)


def _backward(problem: Problem, rows: NormSpec | FewRowsSpec | None, device: Device) -> Plan:
    compute = ITEMSIZE[problem.compute]
    sums = problem.sums
    # Four partial sums of float32 an SM; more gradients have fewer, at least one.
    most_groups = max(1, 4 * device.sms * 8 // (compute * max(2, len(sums))))
    if rows is None:
        tier = "streamed"
        steps, partials = _streamed_backward(problem, device, sums, most_groups)
    elif isinstance(rows, FewRowsSpec):
        tier, steps, partials = tier_name(rows.rows), _few_rows_backward(problem, rows, sums), 0
    else:
        tier = tier_name(rows)
        if problem.groups:
            steps, partials = _grouped_backward(problem, device, sums, rows)
        else:
            steps, partials = _resident_backward(problem, device, sums, most_groups, rows)
    if partials:
        # Like the sum behind it: it gains 1 us in a stream that the host has filled, and costs up to 0.4 in a graph.
        first = steps[0].spec
        early, shared = device.overlaps_launches, launch_shared(first, device)
        steps[0] = replace(steps[0], begins_early=early, dynamic_shared=shared)
        # It does not depend on the number of rows.
        steps += _sum_partials(problem.layout, device, partials, early, first.cluster <= NEXT_BEGINS_CLUSTER)
    workspace = partials * partial_row(problem) * compute * len(sums)
    return Plan(problem, device, tier, tuple(steps), partials, workspace)


def _few_rows_backward(problem: Problem, spec: FewRowsSpec, sums: tuple[str, ...]) -> list[Step]:
    """One launch, or two where dx may take the memory of x or dy, which the columns must have been read from."""
    row_ctas = ceil_div(problem.rows, spec.rows.rows_per_cta) * spec.rows.cluster
    if problem.overwrites:
        columns = part(problem, sums)
        rows = part(problem, (one.name for one in problem.operands if one.written and one.name not in sums))
        return [
            step_of(columns, spec.columns, (spec.column_ctas, 1, 1), 1),
            step_of(rows, spec.rows, (row_ctas, 1, 1), 0),
        ]
    step = step_of(problem, spec.whole, (spec.column_ctas + row_ctas, 1, 1), 1)
    return [replace(step, spec=spec, dynamic_shared=dynamic_shared(spec))]


def _resident_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int, spec: NormSpec
) -> tuple[list[Step], int]:
    """The launches for rows that a tier takes, and how many partial rows they leave."""
    groups = min(resident_groups(problem, spec, device), most_groups)
    # What a single group adds up are the gradients: nothing is left to be done.
    spec = replace(spec, final=True) if groups == 1 and sums else spec
    step = step_of(problem, spec, (groups * spec.shape.cluster, 1, 1), groups)
    return [step], groups if sums and not spec.final else 0


def _grouped_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], spec: NormSpec
) -> tuple[list[Step], int]:
    """The same where rows are of groups: a CTA has rows of one, so that its sums are of one."""
    assert problem.groups is not None
    ctas = _ctas_of_group(problem, spec, device)
    spec = replace(spec, final=bool(sums) and ctas == 1 and _of_groups_alone(problem, sums))
    partials = ctas * problem.groups.count
    step = step_of(problem, spec, (ctas * spec.shape.cluster, 1, problem.groups.count), partials)
    return [step], partials if sums and not spec.final else 0


def _of_groups_alone(problem: Problem, sums: tuple[str, ...]) -> bool:
    return all(problem.by_name[name].kind == "group" for name in sums)


def _ctas_of_group(problem: Problem, spec: NormSpec, device: Device) -> int:
    """How many CTAs (or clusters) share the rows of a group, so that all groups together take the fewest iterations.

    CTAs that do not run at once run one after the other.
    """
    groups = problem.groups
    assert groups is not None
    rows = ceil_div(problem.rows // groups.count, spec.rows_per_cta)
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin)

    def iterations(ctas: int) -> int:
        return ceil_div(groups.count * ctas, resident) * (ceil_div(rows, ctas) + ITERATIONS_TO_START)

    most = max(1, (1 if problem.sm_margin else 4) * resident // groups.count)
    return min(range(1, min(rows, most) + 1), key=iterations)


def _streamed_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int
) -> tuple[list[Step], int]:
    """The launches for rows that no tier takes, and how many partial rows they leave."""
    late = [name for name, _ in derivative(problem.operation, sources(sums), problem.by_name).late]
    if late:
        raise NotImplementedError(
            f"cunorm: the gradient of {late[0]}, a vector or number that the prologue takes for all rows, is for rows "
            f"that a CTA or cluster holds; got rows of {problem.cols} columns on {device.name}. Leave it out."
        )
    vector_cols, steps, groups = 16 // ITEMSIZE[problem.row_dtype], [], 0
    rows = tuple(one.name for one in problem.operands if one.written and one.name not in sums)
    if sums:
        of_columns = part(problem, sums)
        spec = kernel_spec(of_columns, "column_gradients", RowShape(vector_cols, COLUMN_THREADS, 1))
        tiles = ceil_div(problem.cols, vector_cols * COLUMN_THREADS)
        sms = device.sms - problem.sm_margin
        count = problem.groups.count if problem.groups else 1
        ctas = max(1, min(most_groups, PARTIAL_CTAS * sms // tiles) // count)
        ctas = min(ceil_div(problem.rows // count, LEAST_ROWS), ctas)
        groups = ctas * count
        final = groups == 1 or (ctas == 1 and _of_groups_alone(problem, sums))
        most = max(1, PARTIAL_CTAS * sms // (ctas * count))  # blocks of columns at once
        blocks = min(tiles, most) if problem.sm_margin else tiles
        spec = replace(spec, final=final, several_blocks=blocks < tiles)
        steps.append(step_of(of_columns, spec, (blocks, ctas, count), groups))
        groups = 0 if final else groups
    # Last, as dx may take the memory of x or dy.
    if rows:
        of_rows = part(problem, rows)
        spec = kernel_spec(of_rows, "backward_streamed", RowShape(vector_cols, STREAMED_THREADS, 1))
        # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
        dtypes = {one.dtype for one in of_rows.operands if one.kind != "statistic"}
        plain = dtypes == {problem.row_dtype} and spec.aligned
        # More arrays, two strides and vectors of groups spill.
        strides = any(one.inner for one in spec.operands)
        plain = plain and len(spec.matrices) + len(spec.results) <= 4 and not strides and not spec.grouped
        spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
        steps.append(step_of(of_rows, spec, (resident_groups(of_rows, spec, device), 1, 1), 0))
    return steps, groups


@lru_cache(maxsize=4096)
def _sum_partials(
    problem: Problem, device: Device, groups: int, begins_early: bool, next_begins: bool
) -> tuple[Step, ...]:
    """A launch for each dtype."""
    sums = problem.sums
    threads = partial_row(problem) // SUM_COLUMNS
    row = partial_row(problem) * ITEMSIZE[problem.compute]
    steps = []
    for dtype, kind in dict.fromkeys((problem.by_name[name].dtype, problem.by_name[name].kind) for name in sums):
        names = [name for name in sums if (problem.by_name[name].dtype, problem.by_name[name].kind) == (dtype, kind)]
        # blockIdx.z: of which group of rows.
        count = problem.groups.count if problem.groups and kind == "group" else 1
        # Some 64 to 256 CTAs for dweight and for dbias, of 8 to 256 threads beside each other. All groups of rows
        # together have as many: of each there are few partial sums.
        lanes = next((lanes for lanes, most in SUM_LANES.items() if threads * count <= most), SUM_THREADS)
        vector_cols = 16 // ITEMSIZE[problem.row_dtype]
        spec = SumSpec(problem.compute, dtype, vector_cols, lanes, len(names), count > 1, next_begins, SUM_THREADS)
        partials = (Pointer(WORKSPACE, sums.index(name) * groups * row) for name in names)
        pointers = tuple(one for pair in zip(partials, map(Pointer, names), strict=True) for one in pair)
        # blockIdx.y: which of them.
        grid, integers = (ceil_div(threads, lanes), len(names), count), (groups // count, problem.cols)
        tasks, at_once = prod(grid), PARTIAL_CTAS * (device.sms - problem.sm_margin)
        if problem.sm_margin and tasks > at_once:
            spec, integers = replace(spec, several_blocks=True), (*integers, grid[0], tasks)
            grid = (at_once, 1, 1)
        # Only the first has the kernel that wrote the partial rows in front of it.
        steps.append(Step(spec, grid, 0, pointers, (), integers, begins_early and not steps))
    return tuple(steps)


def tier_name(spec: NormSpec) -> str:
    """Who holds a row, in a word."""
    if spec.kernel not in ("forward", "forward_spread", "forward_twice", "backward"):
        return "streamed"
    if spec.shape.cluster > 1:
        return "cluster"
    return "cta" if spec.shape.threads > WARP else "warp"


def resident_groups(problem: Problem, spec: NormSpec, device: Device) -> int:
    """As many CTAs (or clusters) as run at once, no more than the rows need."""
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin)
    return min(ceil_div(problem.rows, spec.rows_per_cta), resident)


def step_of(problem: Problem, spec: NormSpec, grid: tuple[int, int, int], groups: int) -> Step:
    """The launch of a kernel that reads rows; its sums go to `groups` partial rows each, one after the other."""
    row = partial_row(problem) * ITEMSIZE[problem.compute]
    pointers = _pointers(problem.pointers)
    if spec.leaves_partial_rows:
        sums = [one.name for one in spec.sums]
        places = {name: Pointer(WORKSPACE, i * groups * row) for i, name in enumerate(sums)}
        pointers = tuple(places.get(pointer.name, pointer) for pointer in pointers)
    return Step(
        spec,
        grid,
        dynamic_shared(spec),
        pointers,
        problem.scalars,
        (
            problem.rows,
            *problem.operands.row_numbers,
            *(problem.groups.numbers(problem.rows) if problem.groups else ()),
        ),
    )


@lru_cache(maxsize=4096)
def _pointers(names: tuple[str, ...]) -> tuple[Pointer, ...]:
    return tuple(map(Pointer, names))


def partial_row(problem: Problem) -> int:
    """Elements of a partial row: whole vectors, whole lines."""
    vector_cols = 16 // ITEMSIZE[problem.row_dtype]
    return ceil_div(ceil_div(problem.cols, vector_cols) * vector_cols, LINE_COLUMNS) * LINE_COLUMNS
