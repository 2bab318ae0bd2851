"""A plan and its launches, as values. No GPU library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..kernel.device import Device
from .problem import Problem
from .resources import shared_memory
from .spec import FewRowsSpec, KernelSpec, NormSpec, SumSpec

GRID_LIMIT = 2**31 - 1
WORKSPACE = "the workspace"  # its name among a call's arrays, with a space, so that no operand can have it


class Pointer(NamedTuple):
    """A place in an array, which is named as in the problem, or WORKSPACE."""

    name: str
    offset: int = 0  # bytes


class Matrix(NamedTuple):
    """A matrix in an array, of which a kernel of sm_90 fetches boxes; contiguous rows `stride` elements apart.

    A kernel that is given it has a parameter TensorMap.
    """

    name: str
    offset: int  # bytes
    dtype: str
    rows: int
    cols: int
    stride: int
    box_rows: int  # of a box of 128 bytes a row


class Step(NamedTuple):
    """One launch."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    dynamic_shared: int  # bytes of shared memory that the launch adds to the kernel's own
    # The kernel's arguments, in the order of its parameters.
    pointers: tuple[Pointer | Matrix, ...]
    scalars: tuple[str, ...]
    integers: tuple[int, ...]
    begins_early: bool = False  # it begins before the launch before it ends, for which the kernel waits itself


class Names(NamedTuple):
    """The names of what a call of a plan is given, in this order."""

    pointers: tuple[str, ...]
    scalars: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class OtherPlan:
    """Launches, in order, that solve another problem than a norm."""

    problem: Names
    steps: tuple[Step, ...]
    workspace: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The launches that solve a problem, in order, and the bytes of the workspace that they share."""

    problem: Problem
    device: Device
    tier: str
    steps: tuple[Step, ...]
    groups: int = 0  # partial sums of each gradient of a backward pass
    workspace: int = 0

    @property
    def may_overwrite(self) -> bool:
        """Whether a backward pass has read a row of dy before it writes the same row of dx."""
        return self.tier != "streamed" and not any(isinstance(step.spec, FewRowsSpec) for step in self.steps)

    def describe(self) -> str:
        """Describe the plan in words, with a line for each launch."""
        problem = self.problem
        lines = [
            f"{problem.operation.norm} {problem.direction}: {problem.rows} rows x {problem.cols} cols, on "
            f"{self.device.name} (sm_{self.device.arch}, {self.device.sms} SMs)",
            f"  {', '.join(f'{array.name} {array.dtype}' for array in problem.operands if array.kind != 'scalar')}",
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
