"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions; no GPU library is imported.

Which kernel, and who holds what of a row, tiers.py decides; here come grids, the launches of the backward pass and
their workspace. Only grids depend on the number of rows, and how many rows a CTA takes at once where they are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..device import Device
from ..operation import derivative
from .problem import ITEMSIZE, Problem, backward_problem
from .spec import SUM_COLUMNS, WARP, KernelSpec, NormSpec, RowShape, SumSpec, dynamic_shared, shared_memory
from .tiers import ceil_div, choose, few_rows, kernel_spec


class Pointer(NamedTuple):
    """A place in an array: `name` is one of the problem's, or "workspace"."""

    name: str
    offset: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One launch."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    dynamic_shared: int  # bytes of shared memory that the launch adds to the kernel's own
    # The kernel's parameters, in this order.
    pointers: tuple[Pointer, ...]
    scalars: tuple[str, ...]
    integers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The launches that solve a problem, in order, and the workspace they share (bytes). Made once for a problem."""

    problem: Problem
    device: Device
    tier: str
    steps: tuple[Step, ...]
    groups: int = 0  # backward: partial rows of dweight and dbias in the workspace
    workspace: int = 0

    def describe(self) -> str:
        """The plan in words, a line for each launch."""
        problem = self.problem
        lines = [
            f"{problem.operation.norm} {problem.direction}: {problem.rows} rows x {problem.cols} cols, on "
            f"{self.device.name} (sm_{self.device.arch}, {self.device.sms} SMs)",
            f"  {', '.join(f'{one.name} {one.dtype}' for one in problem.operands if one.kind != 'scalar')}",
            f"  tier: {self.tier}; at least {problem.bytes_moved:,} bytes moved; workspace {self.workspace:,} bytes",
        ]
        for step in self.steps:
            spec = step.spec
            if isinstance(spec, SumSpec):
                lines.append(f"  {spec.kernel}: grid {step.grid}, {spec.threads} threads a CTA, {spec.lanes} a row")
                continue
            shape = spec.shape
            lines.append(
                f"  {spec.kernel}: grid {step.grid}, {spec.threads} threads a CTA, {spec.rows_per_cta} rows a CTA, "
                f"{shape.threads} threads x {shape.packs} packs of {shape.pack} cols a row, cluster {shape.cluster}, "
                f"{'16-byte' if spec.aligned else 'element'} access, "
                f"{shared_memory(spec) + step.dynamic_shared} bytes of shared memory"
            )
        return "\n".join(lines)


STREAMED_THREADS = 512
SUM_THREADS = 256
PARTIAL_CTAS = 2  # of column_gradients, an SM: dbias of 8192 x 12288 49.5 us, of four 51.4
LEAST_ROWS = 16  # of one of its partial rows
GRID_LIMIT = 2**31 - 1


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    return _plan_forward(problem, device) if problem.direction == "forward" else _plan_backward(problem, device)


def _tier(spec: NormSpec) -> str:
    if spec.kernel not in ("forward", "backward"):
        return "streamed"
    if spec.shape.cluster > 1:
        return "cluster"
    return "cta" if spec.shape.threads > WARP else "warp"


def _plan_forward(problem: Problem, device: Device) -> Plan:
    choice = choose(problem, device)
    if choice is None:
        shape = RowShape(16 // ITEMSIZE[problem.row_dtype], STREAMED_THREADS, 1)
        spec = kernel_spec(problem, "forward_streamed", shape)
        # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
        arrays = {one.dtype for one in problem.operands if one.kind in ("full", "column")}
        two = arrays == {problem.row_dtype} != {"float64"} and len(spec.matrices) == 1 and spec.aligned
        spec = replace(spec, streamed_y=True, ctas_per_sm=2 if two else 1)
        visits, idle = 1, 0
    else:
        tier, spec = choice
        visits, idle = 1 if few_rows(problem, device) and not tier.stages else tier.visits, tier.idle
        # Without the state of a loop over rows the kernel has registers to spare.
        once = visits == 1 and not problem.sm_margin and problem.rows <= GRID_LIMIT
        spec = replace(spec, once=once, columns_stay=spec.columns_stay and (once or visits != 1))
    groups = min(ceil_div(problem.rows, spec.rows_per_cta * max(1, visits)), GRID_LIMIT // spec.shape.cluster)
    if visits == 0 or problem.sm_margin:
        margin = max(problem.sm_margin, idle)
        groups = min(groups, device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, margin))
    step = _step(problem, spec, (groups * spec.shape.cluster, 1, 1), 0)
    return Plan(problem, device, _tier(spec), (step,))


def _resident_groups(problem: Problem, spec: NormSpec, device: Device, idle: int = 0) -> int:
    """As many CTAs (or clusters) as run at once, no more than the rows need."""
    margin = max(problem.sm_margin, idle)
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, margin)
    return min(ceil_div(problem.rows, spec.rows_per_cta), resident)


def _plan_backward(problem: Problem, device: Device) -> Plan:
    compute = ITEMSIZE[problem.compute]
    written = [one for one in problem.operands if one.written]
    sums = tuple(one.name for one in written if one.kind != "full")
    # Two partial rows of float32 an SM; more gradients have fewer.
    most_groups = 2 * device.sms * 8 // (compute * max(2, len(sums)))
    # For sums of dy alone neither x nor the whole of a row is needed.
    choice = choose(problem, device) if len(sums) < len(written) or "rstd" in problem.pointers else None
    if choice is not None:
        tier, spec = choice
        groups = min(_resident_groups(problem, spec, device, tier.idle), most_groups)
        if groups == 1 and sums:
            spec = replace(spec, final=True)  # what a group adds up are the gradients: nothing is left to be done
        steps, final = [_step(problem, spec, (groups * spec.shape.cluster, 1, 1), groups)], spec.final
    else:
        steps, groups = _streamed_backward(problem, device, sums, most_groups)
        spec, final = None, groups == 1
    if sums and not final:
        steps += _sum_partials(problem, sums, groups)
    else:
        groups = 0
    workspace = groups * _partial_row(problem) * compute * len(sums)
    return Plan(problem, device, _tier(spec) if spec else "streamed", tuple(steps), groups, workspace)


def _streamed_backward(
    problem: Problem, device: Device, sums: tuple[str, ...], most_groups: int
) -> tuple[list[Step], int]:
    """The launches for rows that no tier takes, and how many partial rows they write."""
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
        spec = kernel_spec(part, "column_gradients", RowShape(pack, 256, 1))
        tiles = ceil_div(problem.cols, pack * 256)
        sms = device.sms - problem.sm_margin
        groups = min(ceil_div(problem.rows, LEAST_ROWS), most_groups, max(1, PARTIAL_CTAS * sms // tiles))
        steps.append(_step(part, replace(spec, final=groups == 1), (tiles, groups, 1), groups))
    # Last, as dx may take the memory of x or dy.
    if rows:
        part = _part(problem, rows)
        spec = kernel_spec(part, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
        # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
        plain = {one.dtype for one in part.operands if one.kind != "per_row"} == {part.row_dtype} and spec.aligned
        spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
        steps.append(_step(part, spec, (_resident_groups(part, spec, device), 1, 1), 0))
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
        strides={name: one.strides for name, one in given.items() if one.kind == "full"},
    )
    return replace(problem, operands=found.operands)


def _sources(gradients: Iterable[str]) -> tuple[str, ...]:
    """What they are the gradients of."""
    return tuple(name.removeprefix("d") for name in gradients)


def _step(problem: Problem, spec: NormSpec, grid: tuple[int, int, int], groups: int) -> Step:
    """The launch of a kernel that reads rows; its sums go to `groups` partial rows each, one after the other."""
    row = _partial_row(problem) * ITEMSIZE[problem.compute]
    sums = [one.name for one in spec.sums]
    places = {} if spec.final else {name: Pointer("workspace", i * groups * row) for i, name in enumerate(sums)}
    return Step(
        spec,
        grid,
        dynamic_shared(spec),
        tuple(places.get(name, Pointer(name)) for name in problem.pointers),
        problem.scalars,
        (problem.rows, *(n for one in problem.operands if one.kind == "full" for n in one.row_numbers.values())),
    )


def _partial_row(problem: Problem) -> int:
    """Elements of a partial row: whole packs, whole fours."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    return ceil_div(ceil_div(problem.cols, pack) * pack, SUM_COLUMNS) * SUM_COLUMNS


def _sum_partials(problem: Problem, sums: tuple[str, ...], groups: int) -> list[Step]:
    """A launch for each dtype."""
    threads = _partial_row(problem) // SUM_COLUMNS
    row = _partial_row(problem) * ITEMSIZE[problem.compute]
    # About 256 CTAs for dweight and for dbias, of 8 to 256 threads beside each other: 132 partial rows of 1024 columns
    # 2.4 us, of 8192 3.1; 28 of 65536 3.7, with 8 threads beside each other 7.2.
    lanes = next((lanes for lanes in (8, 16, 32, 64, 128) if lanes * 256 >= threads), SUM_THREADS)
    steps = []
    for dtype in dict.fromkeys(problem.by_name[name].dtype for name in sums):
        names = [name for name in sums if problem.by_name[name].dtype == dtype]
        spec = SumSpec(problem.compute, dtype, 16 // ITEMSIZE[problem.row_dtype], lanes, len(names), SUM_THREADS)
        partials = (Pointer("workspace", sums.index(name) * groups * row) for name in names)
        pointers = tuple(one for pair in zip(partials, map(Pointer, names), strict=True) for one in pair)
        # blockIdx.y: which of them.
        grid = (ceil_div(threads, lanes), len(names), 1)
        steps.append(Step(spec, grid, 0, pointers, (), (groups, problem.cols)))
    return steps
