"""Plans of y = z weightᵀ + bias for few rows in one launch, where z = norm(x) is never a tensor.

The functions are pure and import no GPU library. The kernel is kernels_cu/linear/one_launch.cu. Where no measurement
says that it wins, the norm's kernel and cuBLASLt's product run one after the other (split).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..call import checks
from ..call.checks import Layout
from ..kernel.device import Device
from ..kernel.text import CPP_TYPE, Arithmetic, forward_struct
from ..operation import NORMS, Operation, affine
from ..plan.plain_problems import plain
from ..plan.problem import ITEMSIZE, ceil_div
from ..plan.shapes import shape_of_rows
from ..plan.spec import MOST_SHORT, WARP, OtherSpec, RowShape
from ..plan.steps import Pointer, Step
from ..plan.tables import REACH, tables_of

# As in kernels_cu/linear/one_launch.cu.
CONSUMERS = 8  # warps
TILE_OUTS = 8
PAIR = 64  # columns
BARRIER = 8  # bytes

NAMES = ("x", "weight", "bias", "ln_weight", "ln_bias")  # of the arrays of a call
ROWS = (8, 16, 32)  # a kernel serves up to so many rows
X_BYTES = 64 << 10  # x in a CTA at most, which leaves 64 registers of z in each thread
STAGE_BYTES = 32 << 10
RING_BYTES = 128 << 10
LEAST_STAGES = 2
CLUSTERS = (1, 2, 4, 8)
VECTOR_COLS = 8  # the columns of a vector of 16 bits


class Division(NamedTuple):
    """How rows, columns and stages are divided, as in the template of the same name in the kernel's file."""

    rows: int
    cluster: int
    parts: int
    stage_columns: int
    stages: int
    slots: int

    @property
    def slice(self) -> int:
        return self.parts * self.stage_columns

    @property
    def row_tiles(self) -> int:
        return ceil_div(self.rows, 16)


@dataclass(frozen=True)
class OneLaunch(OtherSpec):
    """The kernel of norm and product in one launch."""

    operation: Operation
    dtype: str
    cols: int
    shape: RowShape  # by which the norm adds a row up
    division: Division
    affine: tuple[tuple[str, str], ...]  # (name, dtype) of the norm's weight and bias, as far as there are any
    biased: bool

    kernel = "one_launch"
    file = "linear/one_launch.cu"

    def __str__(self) -> str:
        division = self.division
        return (
            f"{self.kernel} of {self.operation.norm}, {self.cols} cols of {self.dtype}, up to {division.rows} rows, "
            f"cluster {division.cluster}, {division.stages} stages of {TILE_OUTS} x {division.stage_columns}"
        )

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARP

    @property
    def cluster(self) -> int:
        return self.division.cluster

    @property
    def dynamic_shared(self) -> int:
        """Return the size of OneLaunchMemory in bytes."""
        division, size = self.division, ITEMSIZE[self.dtype]
        of_cluster = division.slots if division.cluster > 1 else 1
        norm, warps = NORMS[self.operation.norm], self.shape.threads // WARP or 1
        sums = division.row_tiles * WARP * 16
        partial = 2 * CONSUMERS * sums + of_cluster * division.cluster * sums
        arrays = [
            division.stages * TILE_OUTS * division.stage_columns * size,
            max(division.rows * division.slice * size, partial),
        ]
        dtypes = dict(self.affine)
        arrays += [division.slice * ITEMSIZE[dtypes[name]] if name in dtypes else 1 for name in ("weight", "bias")]
        total = sum(_whole(bytes_, 128) for bytes_ in arrays) + division.slots * division.cluster * TILE_OUTS * size
        total += division.rows * 16 + ceil_div(division.rows, division.cluster) * norm.forward_values * warps * 4
        return _whole(_whole(total, BARRIER) + BARRIER * (2 * division.stages + 3 + of_cluster), 128)

    def parameters(self) -> dict[str, str]:
        kind = CPP_TYPE[self.dtype]
        types = {"x": f"const {kind}*", "weight": f"const {kind}*"}
        types |= {"bias": f"const {kind}*"} if self.biased else {}
        types |= {f"ln_{name}": f"const {CPP_TYPE[dtype]}*" for name, dtype in self.affine}
        types |= {"y": f"{kind}*", "z": f"{kind}*"}
        types |= dict.fromkeys(NORMS[self.operation.norm].statistics, "float*")
        return types | {"eps": "float"} | dict.fromkeys(("rows", "outs", "x_stride", "weight_stride"), "int64")

    def text(self) -> tuple[str, str]:
        present, kind = self.parameters(), CPP_TYPE[self.dtype]
        dtypes = dict(self.affine)
        shape = f"RowShape<{self.cols}, {VECTOR_COLS}, {self.shape.threads}, {self.shape.vectors}, 1>"
        division = f"Division<{', '.join(map(str, self.division))}>"
        columns = [CPP_TYPE[dtypes[name]] if name in dtypes else "Absent" for name in ("weight", "bias")]
        names = ("x", "weight", "bias", "ln_weight", "ln_bias", "y", "z", "mean", "rstd")
        arrays = ", ".join(name if name in present else "nullptr" for name in names)
        template = (
            f"one_launch<{NORMS[self.operation.norm].policy}, {shape}, {division},\n"
            f"      {', '.join(columns)}, {self.dynamic_shared}>"
        )
        before = forward_struct(
            Arithmetic(self.operation, self.dtype, self.compute), [], [], [name for name, _ in self.affine], []
        )
        return before, (
            f"  {template}(\n      OneLaunchArrays<{kind}>{{{arrays},\n"
            "      static_cast<int>(rows), static_cast<int>(outs), x_stride, weight_stride}, Operation{}, eps);\n"
        )


def _whole(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A norm with its product: x (rows, cols) -> y (rows, outs). Strides are in elements, from row to row."""

    norm: str
    rows: int
    cols: int
    outs: int
    dtype: str
    ln_weight: str | None = None  # its dtype
    ln_bias: str | None = None  # its dtype
    bias: bool = False
    zero_centered_gamma: bool = False
    x_stride: int = 0
    weight_stride: int = 0
    aligned: bool = True  # every array begins at a multiple of 16 bytes


class Names(NamedTuple):
    """The names of what a launch is given, in this order."""

    pointers: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OneLaunchPlan:
    """A plan of one launch; plan.steps.Plan has several."""

    problem: Names
    steps: tuple[Step, ...]
    workspace: int = 0

    def describe(self) -> str:
        (step,) = self.steps
        return f"one launch: {step.spec}, grid {step.grid[0]}, {step.dynamic_shared} bytes of shared memory"


def problem_of(
    norm: str, layouts: Mapping[str, Layout], zero_centered_gamma: bool, aligned: bool
) -> LinearProblem | None:
    """Return the problem of arrays by their NAMES; None where rows do not lie as the kernel reads them."""
    x, weight = layouts["x"], layouts["weight"]
    of_x, of_weight = (checks.row_strides(matrix, 1) for matrix in (x, weight))
    vectors = [layouts[name] for name in NAMES[2:] if name in layouts]
    if of_x is None or of_weight is None or of_x.inner or not all(map(checks.is_contiguous, vectors)):
        return None
    outs, cols = weight.shape
    return LinearProblem(
        norm,
        math.prod(x.shape[:-1]),
        cols,
        outs,
        x.dtype,
        ln_weight=layouts["ln_weight"].dtype if "ln_weight" in layouts else None,
        ln_bias=layouts["ln_bias"].dtype if "ln_bias" in layouts else None,
        bias="bias" in layouts,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=of_x.row,
        weight_stride=of_weight.row,
        aligned=aligned,
    )


def why_not(problem: LinearProblem, device: Device) -> str:
    """Return why such a problem must be split; empty if it need not be."""
    if device.arch != 90:
        return f"it is for sm_90; {device.name} is sm_{device.arch}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it is for float16 and bfloat16, not {problem.dtype}"
    if not 1 <= problem.rows <= ROWS[-1]:
        return f"it is for up to {ROWS[-1]} rows, not {problem.rows}"
    if problem.cols % VECTOR_COLS or problem.outs % TILE_OUTS:
        return f"in and out must be multiples of {VECTOR_COLS}"
    if not problem.aligned or problem.x_stride % VECTOR_COLS or problem.weight_stride % VECTOR_COLS:
        return "every row of x and weight must begin at a multiple of 16 bytes"
    if "float64" in (problem.ln_weight, problem.ln_bias):
        return "ln_weight and ln_bias must not be float64"
    if problem.cols > VECTOR_COLS * MOST_SHORT or row_shape(problem, device).threads == 1:
        return (
            f"it is for rows that more than one thread and no more than one CTA adds up, not of {problem.cols} columns"
        )
    if next(divisions(problem, device), None) is None:
        return f"no division of {problem.cols} columns fits"
    return ""


@lru_cache(maxsize=4096)
def chosen(problem: LinearProblem, device: Device) -> OneLaunchPlan | None:
    """Return the launch if it was measured to be faster than two; None: split."""
    ctas = _measured(problem, device)
    if not ctas or why_not(problem, device):
        return None
    fitting = (division for division in divisions(problem, device) if division.cluster == ctas)
    return next((plan(problem, device, division) for division in fitting), None)


def _measured(problem: LinearProblem, device: Device) -> int:
    """Return the CTAs of the clusters of the one launch that was measured to be the fastest; 0: split.

    What was measured serves fewer rows of the same kernel, and up to REACH times more or fewer outs.
    """
    for _, table in tables_of(device):
        by_outs = table.products.get(problem.cols, {})
        apart = {outs: max(outs / problem.outs, problem.outs / outs) for outs in by_outs}
        for outs in sorted((outs for outs in apart if apart[outs] <= REACH), key=apart.__getitem__):
            enough = [rows for rows in by_outs[outs] if problem.rows <= rows <= rows_of(problem)]
            if enough:
                return by_outs[outs][min(enough)]
    return 0


def describe(problem: LinearProblem, device: Device) -> str:
    """Say in a sentence what runs."""
    solution = chosen(problem, device)
    if solution is not None:
        return solution.describe()
    reason = why_not(problem, device) or f"one launch was not measured to win for it on {device.name}"
    return f"split, the norm's kernel and then the product: {reason}"


def rows_of(problem: LinearProblem) -> int:
    """Return how many rows its kernel serves at most; 0 if there is none."""
    return next((most for most in ROWS if problem.rows <= most), 0)


def plan(problem: LinearProblem, device: Device, division: Division | None = None) -> OneLaunchPlan:
    """Return the launch of a problem that need not be split, by the first division that fits unless one is given."""
    division = division or next(divisions(problem, device))
    spec = _spec(problem, division, device)
    tiles = problem.outs // TILE_OUTS
    clusters = min(tiles, device.resident_clusters(division.cluster, 1))
    pointers = tuple(Pointer(name) for name, kind in spec.parameters().items() if kind.endswith("*"))
    integers = (problem.rows, problem.outs, problem.x_stride, problem.weight_stride)
    step = Step(spec, (clusters * division.cluster, 1, 1), spec.dynamic_shared, pointers, ("eps",), integers)
    return OneLaunchPlan(Names(tuple(pointer.name for pointer in pointers), ("eps",)), (step,))


def divisions(problem: LinearProblem, device: Device) -> Iterator[Division]:
    """Yield every division that fits, by clusters of more and more CTAs."""
    size = ITEMSIZE[problem.dtype]
    rows = rows_of(problem)
    for cluster in filter(device.runs_clusters, CLUSTERS):
        parts = ceil_div(_whole(ceil_div(problem.cols, cluster), PAIR) * TILE_OUTS * size, STAGE_BYTES)
        stage_columns = _whole(ceil_div(problem.cols, cluster * parts), PAIR)
        last = (cluster * parts - 1) * stage_columns  # of the last stage of the last CTA the first column
        columns = parts * stage_columns
        if last >= problem.cols or rows * columns * size > X_BYTES:
            continue
        clusters = device.resident_clusters(cluster, 1)
        slots = ceil_div(ceil_div(problem.outs // TILE_OUTS, clusters), cluster)
        for stages in range(min(WARP, max(LEAST_STAGES, RING_BYTES // (TILE_OUTS * stage_columns * size))), 1, -1):
            division = Division(rows, cluster, parts, stage_columns, stages, slots)
            if _spec(problem, division, device).dynamic_shared <= device.shared:
                yield division
                break


@lru_cache(maxsize=4096)
def _spec(problem: LinearProblem, division: Division, device: Device) -> OneLaunch:
    given = {"weight": problem.ln_weight, "bias": problem.ln_bias}
    present = tuple((name, dtype) for name, dtype in given.items() if dtype)
    operation = affine(problem.norm, problem.zero_centered_gamma).given(dict(present))
    return OneLaunch(
        operation,
        problem.dtype,
        problem.cols,
        row_shape(problem, device),
        division,
        present,
        problem.bias,
    )


def row_shape(problem: LinearProblem, device: Device) -> RowShape:
    """Return the threads by which the norm's kernel adds a row up, as if they were one CTA."""
    tier_and_spec = shape_of_rows(plain(problem.norm, "forward", problem.rows, problem.cols, problem.dtype), device)
    assert tier_and_spec is not None
    shape = tier_and_spec[1].shape
    vector_cols, threads, vectors = shape.order
    return replace(shape, vector_cols=vector_cols, threads=threads, vectors=vectors, cluster=1)
