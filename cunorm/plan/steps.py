"""What a plan is made of: launches, and what every pass counts with. Pure functions; no GPU library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from .problem import ITEMSIZE, Problem
from .shapes import ceil_div
from .shared_memory import dynamic_shared, shared_memory
from .spec import LINE_COLUMNS, WARP, FewRowsSpec, KernelSpec, NormSpec, SumSpec

GRID_LIMIT = 2**31 - 1
STREAMED_THREADS = 512  # of a CTA of a row that no other kernel takes


WORKSPACE = "the workspace"  # among the names of a call's arrays: with a space, so that no operand has this name


class Pointer(NamedTuple):
    """A place in an array: `name` is one of the problem's, or WORKSPACE."""

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
    begins_early: bool = False  # before the launch in front of it ends: the kernel waits for that itself


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The launches that solve a problem, in order, and the workspace they share (bytes). Made once for a problem."""

    problem: Problem
    device: Device
    tier: str
    steps: tuple[Step, ...]
    groups: int = 0  # backward: partial rows of dweight and dbias in the workspace
    workspace: int = 0

    @property
    def may_overwrite(self) -> bool:
        """Of a backward pass: whether a row of dy has been read when the same row of dx is written."""
        return self.tier != "streamed" and not any(isinstance(step.spec, FewRowsSpec) for step in self.steps)

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
            assert isinstance(spec, NormSpec | FewRowsSpec)
            lines.append(
                f"  {spec.kernel}: grid {step.grid}, {spec.threads} threads a CTA, {spec.layout}, "
                f"{shared_memory(spec) + step.dynamic_shared} bytes of shared memory"
            )
        return "\n".join(lines)


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
    """Elements of a partial row: whole packs, whole lines."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    return ceil_div(ceil_div(problem.cols, pack) * pack, LINE_COLUMNS) * LINE_COLUMNS
