"""How a backward pass is run: its launches, which leave partial rows of the sums over rows, and what adds them up.

Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..kernel.device import Device
from ..operation import derivative
from .backward_parts import part, sources
from .backward_turns import by_turns
from .few_rows import adds_columns_beside_rows, few_rows_backward, rows_are_few
from .problem import ITEMSIZE, Problem
from .registers import sixteen_bits
from .shapes import ceil_div, kernel_spec
from .shared_memory import launch_shared
from .spec import SUM_COLUMNS, WARP, NormSpec, RowShape, SumSpec
from .steps import STREAMED_THREADS, WORKSPACE, Plan, Pointer, Step, partial_row, resident_groups, step_of, tier_name
from .tiers import choose

SUM_THREADS = 256
SUM_LANES = {8: 512, 16: 4096, 32: 8192, 64: 16384, 128: 32768}  # up to how many threads of a partial row
# Of column_gradients, an SM: dbias of 8192 x 12288 49.5 us, of four 51.4. Of sum_partials no more where multiprocessors
# are left to others.
PARTIAL_CTAS = 2
LEAST_ROWS = 16  # of one of its partial rows
# CTAs of a cluster at most, behind whose kernel the sums let the next one begin. Larger clusters of a plan like this
# one would find room unevenly: H100, one after the other, LayerNorm of 512 x 16384 by clusters of eight 25.2 us, not
# 22.4.
NEXT_BEGINS_CLUSTER = 2
COLUMN_THREADS = 256  # of a CTA of column_gradients


def plan_backward(problem: Problem, device: Device) -> Plan:
    compute = ITEMSIZE[problem.compute]
    written = [one for one in problem.operands if one.written]
    sums = tuple(one.name for one in written if one.kind not in ("full", "per_row"))
    # Four partial rows of float32 an SM; more gradients have fewer, at least one.
    most_groups = max(1, 4 * device.sms * 8 // (compute * max(2, len(sums))))
    # For sums of dy alone neither x nor the whole of a row is needed.
    choice = choose(problem, device) if len(sums) < len(written) or "rstd" in problem.pointers else None
    if choice is None:
        tier = "streamed"
        steps, partials = _streamed_backward(problem, device, sums, most_groups)
    else:
        _, spec = choice
        if problem.groups:
            steps, partials = _grouped_backward(problem, device, sums, spec)
        elif adds_columns_beside_rows(problem, device, sums):
            steps, partials = few_rows_backward(problem, device, sums, spec.shape), 0
        else:
            spec = by_turns(problem, spec, device)
            steps, partials = _resident_backward(problem, device, sums, most_groups, spec)
        tier = tier_name(spec)
    if partials:
        # Like the sum behind it. Beside kernels of others in a CUDA graph that costs 0 to 0.4 us, in a stream that the
        # host has filled it gains 1.
        first = steps[0].spec
        shared = launch_shared(first, device)
        steps[0] = replace(steps[0], begins_early=device.overlaps_launches, dynamic_shared=shared)
        steps += _sum_partials(problem, device, sums, partials, first.cluster <= NEXT_BEGINS_CLUSTER)
    workspace = partials * partial_row(problem) * compute * len(sums)
    return Plan(problem, device, tier, tuple(steps), partials, workspace)


def one_kernel_differentiates_twice(problem: Problem, device: Device) -> bool:
    """Whether the backward pass of an operation with a second norm is one kernel: of rows of 16 bits that are not few.

    A CTA holds such rows in the shape that either norm's own backward pass gives them, so they have its bits. By more
    than twelve warps it spilled 20 to 28 bytes; on sm_100 8 to 164, and 4 to 72 without ds, by 512 threads.
    """
    choice = choose(problem, device) if device.arch == 90 and "ds" in problem.by_name else None
    if choice is None or rows_are_few(problem, device):
        return False
    shape = choice[1].shape
    held = shape.cluster == 1 and shape.threads >= WARP and shape.threads * shape.packs <= 768
    return held and sixteen_bits(choice[1])


def _resident_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int, spec: NormSpec
) -> tuple[list[Step], int]:
    """The launches for rows that a tier takes, and how many partial rows they leave."""
    groups = min(resident_groups(problem, spec, device), most_groups)
    # What a single group adds up are the gradients: nothing is left to be done.
    spec = replace(spec, final=groups == 1 and bool(sums))
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


# What the first row of a CTA waits, and its sums on their way out, in turns of the others.
TURNS_TO_START = 4


def _ctas_of_group(problem: Problem, spec: NormSpec, device: Device) -> int:
    """How many CTAs (or clusters) share the rows of a group: so that all groups together take the fewest turns, where
    CTAs that do not run at once run one after the other.
    """
    groups = problem.groups
    assert groups is not None
    rows = ceil_div(problem.rows // groups.count, spec.rows_per_cta)
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin)

    def turns(ctas: int) -> int:
        return ceil_div(groups.count * ctas, resident) * (ceil_div(rows, ctas) + TURNS_TO_START)

    most = max(1, (1 if problem.sm_margin else 4) * resident // groups.count)
    return min(range(1, min(rows, most) + 1), key=turns)


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
    pack, steps, groups = 16 // ITEMSIZE[problem.row_dtype], [], 0
    rows = tuple(one.name for one in problem.operands if one.written and one.name not in sums)
    if sums:
        of_columns = part(problem, sums)
        spec = kernel_spec(of_columns, "column_gradients", RowShape(pack, COLUMN_THREADS, 1))
        tiles = ceil_div(problem.cols, pack * COLUMN_THREADS)
        sms = device.sms - problem.sm_margin
        count = problem.groups.count if problem.groups else 1
        ctas = max(1, min(most_groups, PARTIAL_CTAS * sms // tiles) // count)
        ctas = min(ceil_div(problem.rows // count, LEAST_ROWS), ctas)
        groups = ctas * count
        final = groups == 1 or (ctas == 1 and _of_groups_alone(problem, sums))
        most = max(1, PARTIAL_CTAS * sms // (ctas * count))  # blocks of columns at once
        blocks = min(tiles, most) if problem.sm_margin else tiles
        spec = replace(spec, final=final, in_turns=blocks < tiles)
        steps.append(step_of(of_columns, spec, (blocks, ctas, count), groups))
        groups = 0 if final else groups
    # Last, as dx may take the memory of x or dy.
    if rows:
        of_rows = part(problem, rows)
        spec = kernel_spec(of_rows, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
        # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
        dtypes = {one.dtype for one in of_rows.operands if one.kind != "statistic"}
        plain = dtypes == {problem.row_dtype} and spec.aligned
        # Of more arrays, of two strides and of vectors of groups, they spilled 4 to 60 bytes.
        strides = any(one.inner for one in spec.operands)
        plain = plain and len(spec.matrices) + len(spec.results) <= 4 and not strides and not spec.grouped
        spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
        steps.append(step_of(of_rows, spec, (resident_groups(of_rows, spec, device), 1, 1), 0))
    return steps, groups


def _sum_partials(
    problem: Problem, device: Device, sums: tuple[str, ...], groups: int, next_begins: bool
) -> list[Step]:
    """A launch for each dtype."""
    threads = partial_row(problem) // SUM_COLUMNS
    row = partial_row(problem) * ITEMSIZE[problem.compute]
    steps = []
    for dtype, kind in dict.fromkeys((problem.by_name[name].dtype, problem.by_name[name].kind) for name in sums):
        names = [name for name in sums if (problem.by_name[name].dtype, problem.by_name[name].kind) == (dtype, kind)]
        # blockIdx.z: of which group of rows.
        count = problem.groups.count if problem.groups and kind == "group" else 1
        # Some 64 to 256 CTAs for dweight and for dbias, of 8 to 256 threads beside each other: 132 partial rows of
        # 1024 columns 2.4 us, of 8192 3.1; 28 of 65536 3.7, with 8 threads beside each other 7.2. All groups of rows
        # together have as many: of each there are few partial rows.
        lanes = next((lanes for lanes, most in SUM_LANES.items() if threads * count <= most), SUM_THREADS)
        pack = 16 // ITEMSIZE[problem.row_dtype]
        spec = SumSpec(problem.compute, dtype, pack, lanes, len(names), count > 1, next_begins, SUM_THREADS)
        partials = (Pointer(WORKSPACE, sums.index(name) * groups * row) for name in names)
        pointers = tuple(one for pair in zip(partials, map(Pointer, names), strict=True) for one in pair)
        # blockIdx.y: which of them.
        grid, integers = (ceil_div(threads, lanes), len(names), count), (groups // count, problem.cols)
        tasks, at_once = prod(grid), PARTIAL_CTAS * (device.sms - problem.sm_margin)
        if problem.sm_margin and tasks > at_once:
            spec, integers = replace(spec, in_turns=True), (*integers, grid[0], tasks)
            grid = (at_once, 1, 1)
        # Only the first has the kernel that wrote the partial rows in front of it.
        steps.append(Step(spec, grid, 0, pointers, (), integers, device.overlaps_launches and not steps))
    return steps
