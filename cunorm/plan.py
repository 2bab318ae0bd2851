"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions over small tables; no GPU library is imported.

The shape of a row (who holds which columns) depends on cols, dtypes and architecture, never on the number of rows nor
on addresses: a row's result is the same to the bit whatever else is in the batch. Only grids depend on rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .device import Device
from .problem import ITEMSIZE, Problem

WARP = 32


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row is held by `threads` threads in each of `cluster` CTAs, `packs` packs of `pack` columns a thread."""

    pack: int
    threads: int
    packs: int
    cluster: int = 1

    @property
    def capacity(self) -> int:
        return self.pack * self.threads * self.packs * self.cluster


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that changes a kernel's text: two launches with equal specs share one compiled kernel."""

    kernel: str
    rms: bool
    cols: int
    x: str
    y: str
    weight: str | None
    bias: str | None
    zero_centered_gamma: bool
    aligned: bool
    shape: RowShape
    rows_per_cta: int = 1
    ctas_per_sm: int = 1
    prefetch: bool = False
    once: bool = False  # forward: the grid has a CTA for every row
    output_mask: tuple[bool, bool, bool] = (False, False, False)

    @property
    def threads(self) -> int:
        return self.shape.threads * self.rows_per_cta


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
                f"{'16-byte' if spec.aligned else 'element'} access, {shared_memory(spec)} bytes of shared memory"
            )
        return "\n".join(lines)


class Tier(NamedTuple):
    """How rows of up to `most` packs are run."""

    most: int
    packs: tuple[int, ...]  # a thread holds; the choice that leaves the fewest threads idle, of equals the first
    cluster: int
    cta: int  # threads of a CTA, where a row needs fewer several rows share it
    resident: int  # threads that an SM is to hold at once; bounds the registers of a thread
    prefetch: bool  # ask for the next row before reducing the present one
    visits: int  # rows that a CTA takes one after the other; 0: it stays until none is left
    full: bool = False  # only for rows that fill a power of two of threads with whole packs


# Fractions of the streaming roof: bfloat16 on an H200, 2026-11-20; what else was tried is in bench/NOTES.md.
FORWARD = (
    Tier(64, (2,), 1, 128, 1024, False, 1),  # 32 cols 0.93, 128 cols 0.91, 256 cols 0.99, 512 cols 0.98
    Tier(128, (4,), 1, 128, 768, False, 1),  # 1024 cols 0.98
    Tier(256, (2,), 1, 128, 768, True, 0),  # 2048 cols 0.95
    Tier(2048, (4, 3, 2), 1, 128, 1024, False, 1),  # 4096 to 16384 cols 0.98
    Tier(4096, (8,), 1, 512, 512, True, 2),  # 32768 cols 0.97; four packs and 1024 threads 0.90
    Tier(8192, (8,), 2, 512, 512, True, 0),  # 65536 cols 0.82
    Tier(16384, (8,), 8, 256, 512, True, 0),  # 131072 cols 0.77
    Tier(32768, (8,), 8, 512, 512, True, 0),  # 262144 cols 0.72
)
# A thread also holds dweight and dbias of its columns: it owns fewer of them than in the forward pass.
BACKWARD = (
    # With bounds to check, 64 registers are too few for one pack a thread: other rows go to the next tier.
    Tier(256, (1,), 1, 512, 1024, True, 0, full=True),  # 32 cols 0.80, 256 cols 0.87, 1024 cols 0.89
    Tier(512, (1,), 1, 1024, 1024, True, 0, full=True),  # 4096 cols 0.85; fewer partial rows than two CTAs leave
    Tier(1024, (2,), 1, 512, 512, True, 0),  # 8192 cols 0.85
    Tier(2048, (2,), 2, 512, 512, True, 0),  # 16384 cols 0.85
    Tier(4096, (2,), 4, 512, 512, True, 0),  # 32768 cols 0.82
    Tier(8192, (2,), 8, 512, 512, True, 0),  # 65536 cols 0.76
)

# dx alone: dweight and dbias then come from a second reading of x and dy.
BACKWARD_DX = (Tier(16384, (4,), 8, 512, 512, True, 0),)  # 131072 cols 0.49

STREAMED_THREADS = 512
SUM_THREADS = 1024
SUM_COLUMNS = 32
GRID_LIMIT = 2**31 - 1
MAILBOXES = 16  # bytes of row.cuh's two


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    return _plan_forward(problem, device) if problem.direction == "forward" else _plan_backward(problem, device)


def shared_memory(spec: KernelSpec) -> int:
    """Bytes of (static) shared memory, for the reader of a plan; the compile test holds it against ptxas."""
    compute = 8 if spec.x == "float64" else 4
    if spec.kernel == "sum_partials":
        return compute * 32 * 33
    if spec.kernel == "weight_gradient_partials":
        return 0
    shape, rows = spec.shape, spec.rows_per_cta
    total = 0
    slots = max(1, shape.threads // WARP) * shape.cluster
    if slots > 1 and (not spec.kernel.startswith("backward") or spec.output_mask[0]):
        values = {"forward": 3, "forward_streamed": 4}.get(spec.kernel, 2)
        if spec.rms:
            values = 1
        total += rows * (2 * values * slots * compute + MAILBOXES)
    holders = max(1, rows * shape.threads // max(WARP, shape.threads))
    if spec.kernel == "backward" and holders > 1 and any(spec.output_mask[1:]):
        total += shape.capacity * compute
    return total


def choose(table: tuple[Tier, ...], cols: int, itemsize: int, device: Device) -> tuple[Tier, RowShape] | None:
    """The tier that takes rows of `cols` and how it divides them; None if the row has to be streamed."""
    pack = 16 // itemsize
    packs = _ceil_div(cols, pack)
    for tier in table:
        if packs <= tier.most and (tier.cluster == 1 or device.clusters):
            shapes = (_shape(pack, _ceil_div(packs, tier.cluster), choice, tier.cluster) for choice in tier.packs)
            shape = min(shapes, key=lambda shape: shape.capacity)
            if not tier.full or (shape.capacity == cols and shape.threads == _power_of_two_from(shape.threads)):
                return tier, shape
    return None


def _shape(pack: int, packs: int, packs_per_thread: int, cluster: int) -> RowShape:
    """The fewest threads that hold `packs` packs in a CTA: a power of two within a warp, else whole warps."""
    threads = _ceil_div(packs, packs_per_thread)
    threads = _power_of_two_from(threads) if threads <= WARP else _ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(pack, threads, _ceil_div(packs, threads), cluster)


def _tier(spec: KernelSpec) -> str:
    if spec.kernel not in ("forward", "backward"):
        return "streamed"
    if spec.shape.cluster > 1:
        return "cluster"
    return "cta" if spec.shape.threads > WARP else "warp"


def _spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> KernelSpec:
    spec = KernelSpec(
        kernel=kernel,
        rms=problem.op == "rms_norm",
        cols=problem.cols,
        x=problem.x,
        y=problem.y,
        weight=problem.weight,
        bias=problem.bias,
        zero_centered_gamma=problem.zero_centered_gamma,
        aligned=_vectors_fit(problem, shape.pack),
        shape=shape,
        output_mask=problem.output_mask,
    )
    return replace(spec, **changes)


def _vectors_fit(problem: Problem, pack: int) -> bool:
    """Every pack of every row starts at a multiple of its size (or of 16 bytes)."""

    def fits(stride: int, dtype: str) -> bool:
        return stride * ITEMSIZE[dtype] % min(16, pack * ITEMSIZE[dtype]) == 0

    strides_fit = fits(problem.x_stride, problem.x) and fits(problem.y_stride, problem.y)
    if problem.direction == "backward":  # dx is contiguous
        strides_fit = strides_fit and fits(problem.cols, problem.x)
    return problem.aligned and (problem.rows == 1 or strides_fit)


def _resident_spec(problem: Problem, kernel: str, tier: Tier, shape: RowShape, device: Device) -> KernelSpec:
    spec = _spec(problem, kernel, shape)
    # float64 arithmetic takes twice the registers; a dy wider than x, a float64 weight, access by elements some more.
    backward = problem.direction == "backward"
    wide = backward and (ITEMSIZE[problem.y] > ITEMSIZE[problem.x] or problem.weight == "float64")
    resident = tier.resident // 2 if problem.x == "float64" or wide else tier.resident
    rows_per_cta = max(1, min(tier.cta, resident) // shape.threads)
    resident = resident if spec.aligned else tier.resident // 2
    ctas_per_sm = max(1, resident // (shape.threads * rows_per_cta))
    prefetch = tier.prefetch and _next_row_fits(problem, shape, device)
    return replace(spec, rows_per_cta=rows_per_cta, ctas_per_sm=ctas_per_sm, prefetch=prefetch)


def _next_row_fits(problem: Problem, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for the next row too. Where it says no, ptxas spilled 4 to 90 bytes with it."""
    blackwell = device.arch >= 100
    if problem.direction == "backward":
        if blackwell and (shape.packs == 1 or problem.x == "float32"):
            return False
        widths = [ITEMSIZE[dtype] for dtype in (problem.y, problem.weight) if dtype]
        return shape.packs <= 2 or max(widths) <= ITEMSIZE[problem.x]
    if shape.packs <= 4:
        return True
    parameters = (problem.weight, problem.bias)
    fitting = {None, problem.x} if problem.x == "float16" else {None, problem.x, "float32"}
    if problem.y != problem.x or not fitting.issuperset(parameters):
        return False
    one_parameter = problem.op == "layer_norm" and parameters.count(None) == 1
    return not (one_parameter and shape.cluster > 1) and not (blackwell and problem.x == "float16")


def _plan_forward(problem: Problem, device: Device) -> Plan:
    choice = choose(FORWARD, problem.cols, ITEMSIZE[problem.x], device)
    if choice is None:
        spec = _spec(problem, "forward_streamed", RowShape(16 // ITEMSIZE[problem.x], STREAMED_THREADS, 1))
        visits = 1
    else:
        spec = _resident_spec(problem, "forward", *choice, device)
        visits = choice[0].visits
        # Without the state of a loop over rows the kernel has registers to spare.
        spec = replace(spec, once=visits == 1 and not problem.sm_margin and problem.rows <= GRID_LIMIT)
    groups = min(_ceil_div(problem.rows, spec.rows_per_cta * max(1, visits)), GRID_LIMIT // spec.shape.cluster)
    if visits == 0 or problem.sm_margin:
        groups = min(groups, device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin))
    return Plan(problem, device, _tier(spec), (Step(spec, (groups * spec.shape.cluster, 1, 1)),))


def _resident_groups(problem: Problem, spec: KernelSpec, device: Device) -> int:
    """As many CTAs (or clusters) as run at once, no more than the rows need."""
    resident = device.resident_clusters(spec.shape.cluster, spec.ctas_per_sm, problem.sm_margin)
    return min(_ceil_div(problem.rows, spec.rows_per_cta), resident)


def _plan_backward(problem: Problem, device: Device) -> Plan:
    itemsize, statistics = ITEMSIZE[problem.x], ITEMSIZE[problem.statistics]
    sms = device.sms - problem.sm_margin
    wants_dx, *wants_parameters = problem.output_mask
    # dweight and dbias partials take at most 2 x SMs x cols x 8 bytes together.
    most_groups = 2 * device.sms * 8 // (2 * statistics)
    choice = choose(BACKWARD, problem.cols, itemsize, device)
    steps: list[Step] = []
    groups = 0
    if choice is not None:
        spec = _resident_spec(problem, "backward", *choice, device)
        groups = min(_resident_groups(problem, spec, device), most_groups)
        steps.append(Step(spec, (groups * spec.shape.cluster, 1, 1)))
    else:
        pack = 16 // itemsize
        if wants_dx:
            choice = choose(BACKWARD_DX, problem.cols, itemsize, device)
            if choice is not None:
                spec = replace(_resident_spec(problem, "backward", *choice, device), output_mask=(True, False, False))
            else:
                spec = _spec(problem, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
                # Two CTAs an SM, 0.37 instead of 0.32 of the roof at 262144 cols, where 64 registers are enough.
                plain = problem.y == problem.x and problem.weight in (None, problem.x) and spec.aligned
                spec = replace(spec, ctas_per_sm=2 if plain and device.arch < 100 else 1)
            ctas = _resident_groups(problem, spec, device) * spec.shape.cluster
            steps.append(Step(spec, (ctas, 1, 1)))
        if any(wants_parameters):
            spec = _spec(problem, "weight_gradient_partials", RowShape(pack, 256, 1))
            tiles = _ceil_div(problem.cols, pack * 256)
            groups = min(problem.rows, most_groups, max(1, 4 * sms // tiles))
            steps.append(Step(spec, (tiles, groups, 1)))
    if any(wants_parameters):
        tiles = _ceil_div(problem.cols, SUM_COLUMNS)
        spec = KernelSpec(
            kernel="sum_partials",
            rms=False,
            cols=0,
            x=problem.statistics,
            y=problem.weight or problem.x,
            weight=None,
            bias=None,
            zero_centered_gamma=False,
            aligned=True,
            shape=RowShape(1, SUM_THREADS, 1),
        )
        # blockIdx.y: dweight, dbias.
        steps.append(Step(spec, (tiles, sum(wants_parameters), 1)))
    workspace = groups * problem.cols * statistics * sum(wants_parameters)
    return Plan(problem, device, _tier(steps[0].spec), tuple(steps), groups, workspace)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
