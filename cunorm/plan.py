"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions over small tables; no GPU library is imported.

The shape of a row (who holds which columns) depends on cols, dtypes and architecture, never on the number of rows nor
on addresses: a row's result is the same to the bit whatever else is in the batch. Only grids depend on rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

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
    output_mask: tuple[bool, bool, bool] = (False, False, False)

    @property
    def threads(self) -> int:
        return self.shape.threads * self.rows_per_cta


@dataclass(frozen=True, slots=True)
class Step:
    """One launch."""

    spec: KernelSpec
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches that solve a problem, in order, and the workspace they share (bytes)."""

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
                f"{shape.threads} threads a row x {shape.packs} packs of {shape.pack} columns, cluster {shape.cluster}, "
                f"{'16-byte' if spec.aligned else 'element'} access, {shared_memory(spec)} bytes of shared memory"
            )
        return "\n".join(lines)


# Forward. Up to 4 packs (64 bytes of x) a thread: enough loads in flight to fill the memory system, few enough
# registers that three or more CTAs share an SM and one loads while another reduces.
FORWARD_PACKS = (4, 3, 2)
FORWARD_WARP_PACKS = 4
FORWARD_CTA_THREADS = 512
# Longer rows, in order of preference: (cluster, threads, packs).
FORWARD_CLUSTERS = ((2, 512, 4), (4, 512, 4), (8, 512, 4), (8, 512, 8), (8, 1024, 8))
# The same without clusters (before sm_90).
FORWARD_LARGE_CTAS = ((1, 1024, 4), (1, 1024, 8))
FORWARD_CTA = 128  # threads of a CTA whose rows are shorter than that
FORWARD_RESIDENT_THREADS = 1024  # of an SM: 64 registers a thread

# Backward, by bytes of an element of x. A thread holds its columns' dweight and dbias in registers besides x and dy of
# this row and the next, so it owns fewer columns than in the forward pass.
BACKWARD_WARP_PACKS = {2: 2, 4: 2, 8: 2}
BACKWARD_PACKS = {2: 2, 4: 2, 8: 2}
BACKWARD_CTA_THREADS = 512
BACKWARD_CLUSTERS = {
    2: ((2, 512, 2), (4, 512, 2), (8, 512, 2), (8, 512, 4)),
    4: ((2, 512, 2), (4, 512, 2), (8, 512, 2), (8, 512, 4)),
    8: ((2, 512, 2), (4, 512, 2), (8, 512, 2)),
}
BACKWARD_CTA = 256  # threads of a CTA whose rows are shorter than that

STREAMED_THREADS = 1024
SUM_THREADS = 1024
SUM_COLUMNS = 32
GRID_LIMIT = 2**31 - 1


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
    slots = max(1, spec.shape.threads // WARP) * spec.shape.cluster
    values = {"forward": 3, "forward_streamed": 4}.get(spec.kernel, 2)
    if spec.rms and spec.kernel.startswith("forward"):
        values = 1
    exchange = 2 * values * slots * spec.rows_per_cta * compute if slots > 1 else 0
    return exchange


def _forward_shape(cols: int, itemsize: int, device: Device) -> RowShape | None:
    pack = 16 // itemsize
    packs = _ceil_div(cols, pack)
    if packs <= WARP * FORWARD_WARP_PACKS:
        return RowShape(pack, min(WARP, _power_of_two_from(packs)), _ceil_div(packs, WARP))
    if packs <= FORWARD_CTA_THREADS * FORWARD_PACKS[0]:
        return _tightest(pack, packs, FORWARD_PACKS, FORWARD_CTA_THREADS)
    return _first_that_holds(cols, pack, FORWARD_CLUSTERS if device.has_clusters else FORWARD_LARGE_CTAS)


def _backward_shape(cols: int, itemsize: int, device: Device) -> RowShape | None:
    pack = 16 // itemsize
    packs = _ceil_div(cols, pack)
    if packs <= WARP * BACKWARD_WARP_PACKS[itemsize]:
        return RowShape(pack, min(WARP, _power_of_two_from(packs)), _ceil_div(packs, WARP))
    most = BACKWARD_PACKS[itemsize]
    if packs <= BACKWARD_CTA_THREADS * most:
        return _tightest(pack, packs, range(most, 0, -1), BACKWARD_CTA_THREADS)
    return _first_that_holds(cols, pack, BACKWARD_CLUSTERS[itemsize]) if device.has_clusters else None


def _tightest(pack: int, packs: int, choices, most_threads: int) -> RowShape:
    """The fewest idle threads; of equals, the first choice of packs a thread."""
    shapes = [RowShape(pack, _ceil_div(packs, n * WARP) * WARP, n) for n in choices]
    return min((shape for shape in shapes if shape.threads <= most_threads), key=lambda shape: shape.capacity)


def _first_that_holds(cols: int, pack: int, choices) -> RowShape | None:
    for cluster, threads, packs in choices:
        if pack * threads * packs * cluster >= cols:
            # As few threads as hold the row at this cluster size.
            threads = _ceil_div(cols, pack * packs * cluster * WARP) * WARP
            return RowShape(pack, threads, packs, cluster)
    return None


def _tier(shape: RowShape | None) -> str:
    if shape is None:
        return "streamed"
    if shape.cluster > 1:
        return "cluster"
    return "cta" if shape.threads > WARP else "warp"


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


def _plan_forward(problem: Problem, device: Device) -> Plan:
    shape = _forward_shape(problem.cols, ITEMSIZE[problem.x], device)
    if shape is None:
        spec = _spec(problem, "forward_streamed", RowShape(16 // ITEMSIZE[problem.x], STREAMED_THREADS, 1))
    else:
        rows_per_cta = max(1, FORWARD_CTA // shape.threads) if shape.threads <= WARP else 1
        ctas_per_sm = max(1, FORWARD_RESIDENT_THREADS // (shape.threads * rows_per_cta))
        spec = _spec(problem, "forward", shape, rows_per_cta=rows_per_cta, ctas_per_sm=ctas_per_sm)
    groups = min(_ceil_div(problem.rows, spec.rows_per_cta), GRID_LIMIT // spec.shape.cluster)
    if problem.sm_margin:
        # CTAs are persistent then: as many as the remaining SMs hold at once.
        resident = (device.sms - problem.sm_margin) * max(1, 1024 // spec.threads)
        groups = max(1, min(groups, resident // spec.shape.cluster))
    return Plan(problem, device, _tier(shape), (Step(spec, (groups * spec.shape.cluster, 1, 1)),))


def _plan_backward(problem: Problem, device: Device) -> Plan:
    itemsize = ITEMSIZE[problem.x]
    shape = _backward_shape(problem.cols, itemsize, device)
    sms = device.sms - problem.sm_margin
    wants_dx, *wants_parameters = problem.output_mask
    statistics = ITEMSIZE[problem.statistics]
    # dweight and dbias partials take at most 2 x SMs x cols x 8 bytes together.
    most_groups = 2 * device.sms * 8 // (2 * statistics)
    steps: list[Step] = []
    groups = 0
    if shape is not None:
        rows_per_cta = max(1, BACKWARD_CTA // shape.threads)
        ctas_per_sm = max(1, BACKWARD_CTA_THREADS // (shape.threads * rows_per_cta))
        spec = _spec(problem, "backward", shape, rows_per_cta=rows_per_cta, ctas_per_sm=ctas_per_sm)
        groups = min(_ceil_div(problem.rows, rows_per_cta), _resident_clusters(sms * ctas_per_sm, shape.cluster))
        groups = max(1, min(groups, most_groups))
        steps.append(Step(spec, (groups * shape.cluster, 1, 1)))
    else:
        pack = 16 // itemsize
        if wants_dx:
            spec = _spec(problem, "backward_streamed", RowShape(pack, STREAMED_THREADS, 1))
            steps.append(Step(spec, (min(problem.rows, 2 * sms), 1, 1)))
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
    return Plan(problem, device, _tier(shape), tuple(steps), groups, workspace)


def _resident_clusters(ctas: int, cluster: int) -> int:
    """How many clusters are surely resident at once. A cluster lies within a GPC of 16 or 18 SMs: count 16 of each."""
    return ctas // cluster if cluster <= 2 else ctas // 16 * 16 // cluster


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
