"""How a backward pass is run: its launches, which leave partial rows of the sums over rows, and what adds them up.

Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..device import Device
from ..operation import derivative
from .problem import ITEMSIZE, Problem, backward_problem
from .registers import sixteen_bits
from .shapes import ceil_div, kernel_spec
from .spec import SUM_COLUMNS, WARP, NormSpec, RowShape, SumSpec
from .steps import STREAMED_THREADS, Plan, Pointer, Step, partial_row, resident_groups, step_of, tier_name
from .tiers import Tier, choose

SUM_THREADS = 256
SUM_LANES = {8: 512, 16: 4096, 32: 8192, 64: 16384, 128: 32768}  # up to how many threads of a partial row
PARTIAL_CTAS = 2  # of column_gradients, an SM: dbias of 8192 x 12288 49.5 us, of four 51.4
LEAST_ROWS = 16  # of one of its partial rows
COLUMN_THREADS = 256  # of a CTA of column_gradients
# Of a matrix of so many bytes to each SM at most whole columns are added up beside what is written by rows: 128 x 8192
# 5.9 us, by partial rows 8.4; 512 x 4096 8.9 and 9.3. Of more rows to a CTA not: 2340 x 448 7.7, by partial rows 7.3.
WHOLE_COLUMNS = 40 << 10
WHOLE_COLUMN_PACKS = 4096
# Threads beside each other, up to so many packs of a row, so that CTAs take half of the SMs and leave the others to the
# rows: 256 x 6144 7.9 us by 16 and 9.3 by eight. But 141 x 7424 7.1 and 6.7: beyond, eight.
WHOLE_COLUMN_LANES = {2: 132, 4: 264, 8: 528, 16: 832}


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
        tier = tier_name(choice[1])
        resident_backward = _grouped_backward if problem.groups else _resident_backward
        steps, partials = resident_backward(problem, device, sums, most_groups, *choice)
    if partials:
        steps += _sum_partials(problem, device, sums, partials)
    workspace = partials * partial_row(problem) * compute * len(sums)
    return Plan(problem, device, tier, tuple(steps), partials, workspace)


def one_kernel_differentiates_twice(problem: Problem, device: Device) -> bool:
    """Whether the backward pass of an operation with a second norm is one kernel: of rows of 16 bits that are not few.

    A CTA holds such rows in the shape that either norm's own backward pass gives them, so they have its bits. By more
    than twelve warps it spilled 20 to 28 bytes; on sm_100 8 to 164, and 4 to 72 without ds, by 512 threads.
    """
    choice = choose(problem, device) if device.arch == 90 and "ds" in problem.by_name else None
    if choice is None or _columns_of_few_rows(problem, device) is not None:
        return False
    shape = choice[1].shape
    held = shape.cluster == 1 and shape.threads >= WARP and shape.threads * shape.packs <= 768
    return held and sixteen_bits(choice[1])


def _resident_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int, tier: Tier, spec: NormSpec
) -> tuple[list[Step], int]:
    """The launches for rows that a tier takes, and how many partial rows they leave."""
    groups = min(resident_groups(problem, spec, device, tier.idle), most_groups)
    columns = _whole_columns(problem, device, sums)
    if groups > 1 and columns is not None:
        return _few_rows_backward(problem, device, sums, *columns), 0
    # What a single group adds up are the gradients: nothing is left to be done.
    spec = replace(spec, final=groups == 1 and bool(sums))
    step = step_of(problem, spec, (groups * spec.shape.cluster, 1, 1), groups)
    return [step], groups if sums and not spec.final else 0


def _grouped_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], _: int, tier: Tier, spec: NormSpec
) -> tuple[list[Step], int]:
    """The same where rows are of groups: a CTA has rows of one, so that its sums are of one."""
    assert problem.groups is not None
    ctas = _ctas_of_group(problem, spec, device, tier.idle)
    spec = replace(spec, final=bool(sums) and ctas == 1 and _of_groups_alone(problem, sums))
    partials = ctas * problem.groups.count
    step = step_of(problem, spec, (ctas * spec.shape.cluster, 1, problem.groups.count), partials)
    return [step], partials if sums and not spec.final else 0


def _of_groups_alone(problem: Problem, sums: tuple[str, ...]) -> bool:
    return all(problem.by_name[name].kind == "group" for name in sums)


# What the first row of a CTA waits, and its sums on their way out, in turns of the others.
TURNS_TO_START = 4


def _ctas_of_group(problem: Problem, spec: NormSpec, device: Device, idle: int) -> int:
    """How many CTAs (or clusters) share the rows of a group: so that all groups together take the fewest turns, where
    CTAs that do not run at once run one after the other.
    """
    groups = problem.groups
    assert groups is not None
    rows = ceil_div(problem.rows // groups.count, spec.rows_per_cta)
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, max(problem.sm_margin, idle))

    def turns(ctas: int) -> int:
        return ceil_div(groups.count * ctas, resident) * (ceil_div(rows, ctas) + TURNS_TO_START)

    return min(range(1, min(rows, max(1, 4 * resident // groups.count)) + 1), key=turns)


def _whole_columns(problem: Problem, device: Device, sums: tuple[str, ...]) -> tuple[int, int] | None:
    """Of few rows: how many threads beside each other, and how many in all, add up whole columns; None where rows are
    many.

    Then x and dy are read twice, the second time from L2, and nothing waits for partial rows.
    """
    if not sums or all(one.name in sums for one in problem.operands if one.written) or problem.sm_margin:
        return None  # its CTAs are as many as the columns need, on all SMs
    if problem.operation.second or derivative(problem.operation, _sources(sums), problem.by_name).late:
        return None
    return _columns_of_few_rows(problem, device)


def _columns_of_few_rows(problem: Problem, device: Device) -> tuple[int, int] | None:
    if problem.rows * problem.cols * ITEMSIZE[problem.row_dtype] > WHOLE_COLUMNS * device.sms:
        return None
    packs = ceil_div(problem.cols, 16 // ITEMSIZE[problem.row_dtype])
    lanes = next((lanes for lanes, most in WHOLE_COLUMN_LANES.items() if packs <= most), 8)
    if problem.rows * lanes > WHOLE_COLUMN_PACKS:
        return None
    # Of many rows by larger CTAs, where they are few: 455 x 2304 6.05 us by 512 threads and 6.3 by 256, but 264 x 3968
    # 6.3 and 6.1, 512 x 4096 9.3 and 8.8.
    large = problem.rows > 384 and 8 * ceil_div(packs, lanes) <= 3 * device.sms
    return lanes, 2 * COLUMN_THREADS if large else COLUMN_THREADS


def _few_rows_backward(problem: Problem, device: Device, sums: tuple[str, ...], lanes: int, threads: int) -> list[Step]:
    """Sums over rows and what is written by rows, by two launches side by side."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    columns = _part(problem, sums)
    spec = kernel_spec(columns, "column_gradients", RowShape(pack, lanes, 1), final=True)
    spec = replace(spec, rows_per_cta=threads // lanes)
    steps = [step_of(columns, spec, (ceil_div(problem.cols, pack * lanes), 1, 1), 1)]
    rows = _part(problem, tuple(one.name for one in problem.operands if one.written and one.name not in sums))
    choice = choose(rows, device)
    if choice is None:
        raise AssertionError("which tier takes a row depends on what is read of it alone")
    tier, spec = choice
    grid = resident_groups(rows, spec, device, tier.idle) * spec.shape.cluster
    # A cluster's kernel waits for nothing: there the question spilled 4 bytes.
    early = device.arch >= 90 and spec.cluster == 1
    return [*steps, replace(step_of(rows, spec, (grid, 1, 1), 0), begins_early=early)]


def _streamed_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int
) -> tuple[list[Step], int]:
    """The launches for rows that no tier takes, and how many partial rows they leave."""
    late = [name for name, _ in derivative(problem.operation, _sources(sums), problem.by_name).late]
    if late:
        raise NotImplementedError(
            f"cunorm: the gradient of {late[0]}, a vector or number that the prologue takes for all rows, is for rows "
            f"that a CTA or cluster holds; got rows of {problem.cols} columns on {device.name}. Leave it out."
        )
    pack, steps, groups = 16 // ITEMSIZE[problem.row_dtype], [], 0
    rows = tuple(one.name for one in problem.operands if one.written and one.name not in sums)
    if sums:
        part = _part(problem, sums)
        spec = kernel_spec(part, "column_gradients", RowShape(pack, COLUMN_THREADS, 1))
        tiles = ceil_div(problem.cols, pack * COLUMN_THREADS)
        sms = device.sms - problem.sm_margin
        count = problem.groups.count if problem.groups else 1
        ctas = max(1, min(most_groups, PARTIAL_CTAS * sms // tiles) // count)
        ctas = min(ceil_div(problem.rows // count, LEAST_ROWS), ctas)
        groups = ctas * count
        final = groups == 1 or (ctas == 1 and _of_groups_alone(problem, sums))
        steps.append(step_of(part, replace(spec, final=final), (tiles, ctas, count), groups))
        groups = 0 if final else groups
    # Last, as dx may take the memory of x or dy.
    if rows:
        part = _part(problem, rows)
        spec = kernel_spec(part, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
        # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
        plain = {one.dtype for one in part.operands if one.kind != "statistic"} == {part.row_dtype} and spec.aligned
        # Of more arrays, of two strides and of vectors of groups, they spilled 4 to 60 bytes.
        strides = any(one.inner for one in spec.operands)
        plain = plain and len(spec.matrices) + len(spec.results) <= 4 and not strides and not spec.grouped
        spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
        steps.append(step_of(part, spec, (resident_groups(part, spec, device), 1, 1), 0))
    return steps, groups


def _part(problem: Problem, wanted: tuple[str, ...]) -> Problem:
    """The same backward pass for some of its gradients: it reads no more than they need."""
    given = problem.by_name
    found = backward_problem(
        problem.operation,
        problem.rows,
        problem.cols,
        {"x": problem.row_dtype, "s": problem.row_dtype} | {name: one.dtype for name, one in given.items()},
        _sources(wanted),
        # The gradient of a number is written as a column; what the number itself is, the operand says.
        kinds={name[1:]: one.kind for name, one in given.items() if one.written}
        | {name: one.kind for name, one in given.items()},
        strides={name: one.strides for name, one in given.items() if one.kind in ("full", "group", "per_row")},
        groups=problem.groups,
    )
    return replace(problem, operands=found.operands)


def _sources(gradients: Iterable[str]) -> tuple[str, ...]:
    """What they are the gradients of."""
    return tuple(name.removeprefix("d") for name in gradients)


def _sum_partials(problem: Problem, device: Device, sums: tuple[str, ...], groups: int) -> list[Step]:
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
        spec = SumSpec(problem.compute, dtype, pack, lanes, len(names), count > 1, SUM_THREADS)
        partials = (Pointer("workspace", sums.index(name) * groups * row) for name in names)
        pointers = tuple(one for pair in zip(partials, map(Pointer, names), strict=True) for one in pair)
        # blockIdx.y: which of them.
        grid = (ceil_div(threads, lanes), len(names), count)
        # Only the first has the kernel that wrote the partial rows in front of it.
        steps.append(
            Step(spec, grid, 0, pointers, (), (groups // count, problem.cols), device.arch >= 90 and not steps)
        )
    return steps
