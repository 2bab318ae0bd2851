"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions; no GPU library is imported.

Which kernel, and who holds what of a row, tiers.py decides; here come grids, the launches of the backward pass and
their workspace. Only grids depend on the number of rows, and how many rows a CTA takes at once where they are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .device import Device
from .problem import ITEMSIZE, Problem
from .tiers import (
    SUM_COLUMNS,
    WARP,
    KernelSpec,
    RowShape,
    ceil_div,
    choose,
    dynamic_shared,
    few_rows,
    kernel_spec,
    shared_memory,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    dynamic_shared: int = 0  # bytes of shared memory that the launch adds to the kernel's own


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
            f"{problem.op} {problem.direction}: {problem.rows} rows x {problem.cols} cols, {problem.x} -> {problem.y}, "
            f"on {self.device.name} (sm_{self.device.arch}, {self.device.sms} SMs)",
            f"  tier: {self.tier}; at least {problem.bytes_moved:,} bytes moved; workspace {self.workspace:,} bytes",
        ]
        for step in self.steps:
            spec, shape = step.spec, step.spec.shape
            lines.append(
                f"  {spec.kernel}: grid {step.grid}, {spec.threads} threads a CTA, {spec.rows_per_cta} rows a CTA, "
                f"{shape.threads} threads x {shape.packs} packs of {shape.pack} cols a row, cluster {shape.cluster}, "
                f"{'16-byte' if spec.aligned else 'element'} access, "
                f"{shared_memory(spec) + step.dynamic_shared} bytes of shared memory"
            )
        return "\n".join(lines)


STREAMED_THREADS = 512
SUM_THREADS = 256
PARTIAL_CTAS = 2  # of weight_gradient_partials, an SM: dbias of 8192 x 12288 49.5 us, of four 51.4
LEAST_ROWS = 16  # of one of its partial rows
GRID_LIMIT = 2**31 - 1


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    return _plan_forward(problem, device) if problem.direction == "forward" else _plan_backward(problem, device)


def _tier(spec: KernelSpec) -> str:
    if spec.kernel not in ("forward", "backward"):
        return "streamed"
    if spec.shape.cluster > 1:
        return "cluster"
    return "cta" if spec.shape.threads > WARP else "warp"


def _plan_forward(problem: Problem, device: Device) -> Plan:
    choice = choose(problem, device)
    if choice is None:
        spec = kernel_spec(problem, "forward_streamed", RowShape(16 // ITEMSIZE[problem.x], STREAMED_THREADS, 1))
        spec = replace(spec, streamed_y=True)
        visits, idle = 1, 0
    else:
        tier, spec = choice
        visits, idle = 1 if few_rows(problem, device) and not tier.stages else tier.visits, tier.idle
        # Without the state of a loop over rows the kernel has registers to spare.
        once = visits == 1 and not problem.sm_margin and problem.rows <= GRID_LIMIT
        spec = replace(spec, once=once, operands_stay=spec.operands_stay and (once or visits != 1))
    groups = min(ceil_div(problem.rows, spec.rows_per_cta * max(1, visits)), GRID_LIMIT // spec.shape.cluster)
    if visits == 0 or problem.sm_margin:
        margin = max(problem.sm_margin, idle)
        groups = min(groups, device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, margin))
    return Plan(problem, device, _tier(spec), (Step(spec, (groups * spec.shape.cluster, 1, 1), dynamic_shared(spec)),))


def _resident_groups(problem: Problem, spec: KernelSpec, device: Device, idle: int = 0) -> int:
    """As many CTAs (or clusters) as run at once, no more than the rows need."""
    margin = max(problem.sm_margin, idle)
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, margin)
    return min(ceil_div(problem.rows, spec.rows_per_cta), resident)


def _plan_backward(problem: Problem, device: Device) -> Plan:
    statistics = ITEMSIZE[problem.statistics]
    sms = device.sms - problem.sm_margin
    wants_dx, *wants_parameters = problem.output_mask
    # dweight and dbias partials take at most 2 x SMs x cols x 8 bytes together.
    most_groups = 2 * device.sms * 8 // (2 * statistics)
    # For dbias alone neither x nor the whole of a row is needed.
    choice = choose(problem, device) if wants_dx or wants_parameters[0] else None
    steps: list[Step] = []
    groups = 0
    if choice is not None:
        tier, spec = choice
        groups = min(_resident_groups(problem, spec, device, tier.idle), most_groups)
        if groups == 1 and any(wants_parameters):
            spec = replace(spec, final=True)  # what a group adds up are the gradients: nothing is left to be done
        steps.append(Step(spec, (groups * spec.shape.cluster, 1, 1), dynamic_shared(spec)))
    else:
        pack = 16 // ITEMSIZE[problem.x]
        if wants_dx:
            spec = kernel_spec(problem, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
            # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
            plain = problem.y == problem.x and problem.weight in (None, problem.x) and spec.aligned
            spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
            steps.append(Step(spec, (_resident_groups(problem, spec, device), 1, 1)))
        if any(wants_parameters):
            spec = kernel_spec(problem, "weight_gradient_partials", RowShape(pack, 256, 1))
            tiles = ceil_div(problem.cols, pack * 256)
            groups = min(ceil_div(problem.rows, LEAST_ROWS), most_groups, max(1, PARTIAL_CTAS * sms // tiles))
            steps.append(Step(replace(spec, final=groups == 1), (tiles, groups, 1)))
    if any(wants_parameters) and not steps[-1].spec.final:
        steps.append(_sum_partials(problem))
    else:
        groups = 0
    workspace = groups * _partial_row(problem) * statistics * sum(wants_parameters)
    return Plan(problem, device, _tier(steps[0].spec), tuple(steps), groups, workspace)


def _partial_row(problem: Problem) -> int:
    """Elements of a partial row: whole packs, whole fours."""
    pack = 16 // ITEMSIZE[problem.x]
    return ceil_div(ceil_div(problem.cols, pack) * pack, SUM_COLUMNS) * SUM_COLUMNS


def _sum_partials(problem: Problem) -> Step:
    threads = _partial_row(problem) // SUM_COLUMNS
    # About 256 CTAs for dweight and for dbias, of 8 to 256 threads beside each other: 132 partial rows of 1024 columns
    # 2.4 us, of 8192 3.1; 28 of 65536 3.7, with 8 threads beside each other 7.2.
    lanes = next((lanes for lanes in (8, 16, 32, 64, 128) if lanes * 256 >= threads), SUM_THREADS)
    spec = KernelSpec(
        kernel="sum_partials",
        norm="layer_norm",  # which of them does not matter
        cols=0,
        x=problem.statistics,
        y=problem.weight or problem.x,
        weight=None,
        bias=None,
        zero_centered_gamma=False,
        aligned=True,
        shape=RowShape(16 // ITEMSIZE[problem.x], lanes, 1),
        rows_per_cta=SUM_THREADS // lanes,
    )
    # blockIdx.y: dweight, dbias.
    return Step(spec, (ceil_div(threads, lanes), sum(problem.output_mask[1:]), 1))
