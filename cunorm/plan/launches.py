"""The launches of a plan, by the kernel of its rows: grids, partial sums and workspace.

Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from ..kernel.device import Device
from ..operation import derivative
from .problem import ITEMSIZE, Operands, Problem, ceil_div, only_gradients, sources
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

SUM_THREADS = 256  # of a CTA of sum_partials
SUM_LANES = {8: 512, 16: 4096, 32: 8192, 64: 16384, 128: 32768}  # its lanes, and up to how many threads they serve
# CTAs of column_gradients on an SM, and the most of sum_partials where SMs are left to others.
PARTIAL_CTAS = 2
LEAST_ROWS = 16  # of one partial sum of column_gradients
# The most CTAs of a cluster after whose kernel the sums let the next kernel begin. Larger clusters would find room on
# some SMs and not on others.
NEXT_BEGINS_CLUSTER = 2
COLUMN_THREADS = 256  # of a CTA of column_gradients
# The wait of a CTA for its first row, and the time to write its sums, in iterations.
ITERATIONS_TO_START = 4


def launches(problem: Problem, kernel: NormSpec | FewRowsSpec | None, device: Device) -> Plan:
    """Return the plan of a problem by the kernel of its rows, which is None for streamed rows of a backward pass."""
    if problem.direction == "forward":
        assert isinstance(kernel, NormSpec)
        return _forward(problem, kernel, device)
    return _backward(problem, kernel, device)


def _forward(problem: Problem, spec: NormSpec, device: Device) -> Plan:
    """Launch a CTA for every row or, if a CTA has more than one iteration, as many CTAs as run at once."""
    short = problem.vectors <= MOST_SHORT
    one_row_per_cta = short and spec.kernel == "forward" and not spec.stages
    one_row_per_cta = one_row_per_cta and not problem.sm_margin and problem.rows <= GRID_LIMIT
    every_row = ceil_div(problem.rows, spec.rows_per_cta)
    if one_row_per_cta or spec.kernel in ("forward_pairs", "forward_spread"):
        groups = every_row
    elif spec.kernel in ("forward_streamed", "forward_twice") and not problem.sm_margin:
        groups = min(every_row, GRID_LIMIT)
    else:
        groups = resident_groups(problem, spec, device)
        if short and spec.grouped and spec.kernel == "forward":
            spec = replace(spec, weights_in_registers=False)  # the next row of a CTA may be of another group
    spec = _with_one_row_per_cta(spec) if one_row_per_cta else spec
    step = step_of(problem, spec, device, (groups * spec.cluster, 1, 1))
    return Plan(problem, device, tier_name(spec), (step,))


# By replace() it takes 8 us more.
@lru_cache(maxsize=4096)
def _with_one_row_per_cta(spec: NormSpec) -> NormSpec:
    return replace(spec, one_row_per_cta=True)


def _backward(problem: Problem, kernel: NormSpec | FewRowsSpec | None, device: Device) -> Plan:
    if isinstance(kernel, FewRowsSpec):
        return Plan(problem, device, tier_name(kernel.rows), tuple(_few_rows_backward(problem, kernel, device)))
    compute, sums = ITEMSIZE[problem.compute], problem.sums
    # Four partial sums of float32 an SM; more gradients have fewer, at least one.
    most_groups = max(1, 4 * device.sms * 8 // (compute * max(2, len(sums))))
    if kernel is None:
        steps, partials = _streamed_backward(problem, device, most_groups)
    elif problem.groups:
        steps, partials = _grouped_backward(problem, device, kernel)
    else:
        steps, partials = _resident_backward(problem, device, most_groups, kernel)
    if partials:  # their sums do not depend on the number of rows
        first = steps[0]
        lets_next_begin = first.spec.cluster <= NEXT_BEGINS_CLUSTER
        steps += _sum_partials(problem.layout, device, partials, first.begins_early, lets_next_begin)
    workspace = partials * partial_columns(problem) * compute * len(sums)
    return Plan(problem, device, tier_name(kernel) if kernel else "streamed", tuple(steps), partials, workspace)


def _few_rows_backward(problem: Problem, spec: FewRowsSpec, device: Device) -> list[Step]:
    """Return one launch, or two if dx may take the memory of x or dy, which must be read for the columns before."""
    row_ctas = ceil_div(problem.rows, spec.rows.rows_per_cta) * spec.rows.cluster
    if problem.overwrites:
        columns, rows = only_gradients(problem, problem.sums), only_gradients(problem, problem.row_results)
        return [
            step_of(columns, spec.columns, device, (spec.column_ctas, 1, 1)),
            step_of(rows, spec.rows, device, (row_ctas, 1, 1)),
        ]
    step = step_of(problem, spec.whole, device, (spec.column_ctas + row_ctas, 1, 1))
    return [step._replace(spec=spec, dynamic_shared=dynamic_shared(spec))]


def _resident_backward(problem: Problem, device: Device, most_groups: int, spec: NormSpec) -> tuple[list[Step], int]:
    """Return the launch for rows that a CTA or cluster holds, and how many partial sums it leaves of each gradient."""
    groups = min(resident_groups(problem, spec, device), most_groups)
    # The sums of a single group are the gradients.
    spec = replace(spec, final=True) if groups == 1 and problem.sums else spec
    step = step_of(problem, spec, device, (groups * spec.shape.cluster, 1, 1), groups)
    return [step], groups if spec.leaves_partial_sums else 0


def _grouped_backward(problem: Problem, device: Device, spec: NormSpec) -> tuple[list[Step], int]:
    """Return the same for groups of rows: a CTA has rows of one group, so that its sums are those of one group."""
    assert problem.groups is not None
    ctas = _ctas_of_group(problem, spec, device)
    spec = replace(spec, final=bool(problem.sums) and ctas == 1 and _sums_are_of_groups(problem))
    partials = ctas * problem.groups.count
    step = step_of(problem, spec, device, (ctas * spec.shape.cluster, 1, problem.groups.count), partials)
    return [step], partials if spec.leaves_partial_sums else 0


def _sums_are_of_groups(problem: Problem) -> bool:
    return all(problem.by_name[name].kind == "group" for name in problem.sums)


def _ctas_of_group(problem: Problem, spec: NormSpec, device: Device) -> int:
    """Return how many CTAs, or clusters, share the rows of a group, so that all groups take the fewest iterations.

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


def _streamed_backward(problem: Problem, device: Device, most_groups: int) -> tuple[list[Step], int]:
    """Return the launches for streamed rows, and how many partial sums they leave of each gradient."""
    late = [name for name, _ in derivative(problem.operation, sources(problem.sums), problem.by_name).late]
    if late:
        raise NotImplementedError(
            f"cunorm: the gradient of {late[0]}, a vector or number that the prologue takes for all rows, is for rows "
            f"that a CTA or cluster holds; got rows of {problem.cols} columns on {device.name}. Leave it out."
        )
    steps, partials = [], 0
    if problem.sums:
        step, partials = _column_step(only_gradients(problem, problem.sums), device, most_groups)
        steps.append(step)
    if problem.row_results:  # last, because dx may take the memory of x or dy
        steps.append(_streamed_row_step(only_gradients(problem, problem.row_results), device))
    return steps, partials


def _column_step(problem: Problem, device: Device, most_groups: int) -> tuple[Step, int]:
    """Return the launch that adds up whole columns, and how many partial sums it leaves of each gradient."""
    spec = kernel_spec(problem, "column_gradients", RowShape(problem.vector_cols, COLUMN_THREADS, 1))
    tiles = ceil_div(problem.cols, problem.vector_cols * COLUMN_THREADS)
    sms = device.sms - problem.sm_margin
    count = problem.groups.count if problem.groups else 1
    ctas = max(1, min(most_groups, PARTIAL_CTAS * sms // tiles) // count)
    ctas = min(ceil_div(problem.rows // count, LEAST_ROWS), ctas)
    partials = ctas * count
    final = partials == 1 or (ctas == 1 and _sums_are_of_groups(problem))
    most_blocks = max(1, PARTIAL_CTAS * sms // partials)
    blocks = min(tiles, most_blocks) if problem.sm_margin else tiles
    spec = replace(spec, final=final, several_blocks=blocks < tiles)
    return step_of(problem, spec, device, (blocks, ctas, count), partials), 0 if final else partials


def _streamed_row_step(problem: Problem, device: Device) -> Step:
    """Return the launch that computes the gradients written by rows."""
    spec = kernel_spec(problem, "backward_streamed", RowShape(problem.vector_cols, STREAMED_THREADS, 1))
    # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, if 64 registers are enough. They are not on
    # sm_100, nor for more arrays, two strides and vectors of groups.
    dtypes = {operand.dtype for operand in problem.operands if operand.kind != "statistic"}
    plain = dtypes == {problem.row_dtype} and spec.aligned and not spec.grouped
    plain = plain and not any(operand.inner for operand in spec.operands)
    two = plain and len(spec.matrices) + len(spec.results) <= 4 and device.arch < 100
    spec = replace(spec, ctas_per_sm=2 if two else 1)
    return step_of(problem, spec, device, (resident_groups(problem, spec, device), 1, 1))


@lru_cache(maxsize=4096)
def _sum_partials(
    problem: Problem, device: Device, groups: int, begins_early: bool, lets_next_begin: bool
) -> tuple[Step, ...]:
    """Return the launches that add up the partial sums of `groups` CTAs: one for each dtype and kind of gradient."""
    threads = partial_columns(problem) // SUM_COLUMNS
    stride = groups * partial_columns(problem) * ITEMSIZE[problem.compute]  # from gradient to gradient
    offsets = {name: place * stride for place, name in enumerate(problem.sums)}
    steps = []
    for dtype, kind in dict.fromkeys((gradient.dtype, gradient.kind) for gradient in problem.operands.summed):
        names = [
            gradient.name for gradient in problem.operands.summed if (gradient.dtype, gradient.kind) == (dtype, kind)
        ]
        count = problem.groups.count if problem.groups and kind == "group" else 1
        # There are some 64 to 256 CTAs for each gradient, with 8 to 256 lanes. All groups of rows together have as
        # many, because each has few partial sums.
        lanes = next((lanes for lanes, most in SUM_LANES.items() if threads * count <= most), SUM_THREADS)
        spec = SumSpec(
            problem.compute,
            dtype,
            problem.vector_cols,
            lanes,
            len(names),
            grouped=count > 1,
            lets_next_begin=lets_next_begin,
            threads=SUM_THREADS,
        )
        pointers = [pointer for name in names for pointer in (Pointer(WORKSPACE, offsets[name]), Pointer(name))]
        grid = ceil_div(threads, lanes), len(names), count  # blocks of columns, gradients, groups of rows
        integers = groups // count, problem.cols
        tasks, at_once = prod(grid), PARTIAL_CTAS * (device.sms - problem.sm_margin)
        if problem.sm_margin and tasks > at_once:
            spec, integers = replace(spec, several_blocks=True), (*integers, grid[0], tasks)
            grid = (at_once, 1, 1)
        # Only the first comes right after the kernel that wrote the partial sums.
        steps.append(Step(spec, grid, 0, tuple(pointers), (), integers, begins_early and not steps))
    return tuple(steps)


def tier_name(spec: NormSpec) -> str:
    """Return in a word what holds a row."""
    if spec.kernel not in ("forward", "forward_spread", "forward_twice", "backward"):
        return "streamed"
    if spec.shape.cluster > 1:
        return "cluster"
    return "cta" if spec.shape.threads > WARP else "warp"


def resident_groups(problem: Problem, spec: NormSpec, device: Device) -> int:
    """Return how many CTAs, or clusters, run at once, and no more than the rows need."""
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin)
    return min(ceil_div(problem.rows, spec.rows_per_cta), resident)


def step_of(problem: Problem, spec: NormSpec, device: Device, grid: tuple[int, int, int], groups: int = 0) -> Step:
    """Return the launch of a kernel that reads rows; it may leave `groups` partial sums of each gradient.

    If it does, it begins early, as the launch of their sums does: that gains 1 us in a stream that the host has filled,
    and costs up to 0.4 in a graph.
    """
    operands, groups_of_rows = problem.operands, problem.groups
    group_arguments = groups_of_rows.arguments(problem.rows) if groups_of_rows else ()
    integers = problem.rows, *operands.row_arguments, *group_arguments
    leaves_sums = spec.leaves_partial_sums
    pointers = _pointers(operands, groups * partial_columns(problem) * ITEMSIZE[problem.compute] if leaves_sums else 0)
    early = leaves_sums and device.overlaps_launches
    return Step(spec, grid, launch_shared(spec, device), pointers, operands.scalars, integers, early)


@lru_cache(maxsize=4096)
def _pointers(operands: Operands, stride: int) -> tuple[Pointer, ...]:
    """Return where each array lies. With a stride, sums lie in the workspace as partial sums, so many bytes apart."""
    in_workspace = {name: Pointer(WORKSPACE, i * stride) for i, name in enumerate(operands.sums)} if stride else {}
    return tuple(in_workspace.get(name, Pointer(name)) for name in operands.pointers)


def partial_columns(problem: Problem) -> int:
    """Return the columns of a partial sum, padded to whole lines of L2."""
    return ceil_div(problem.cols, LINE_COLUMNS) * LINE_COLUMNS
