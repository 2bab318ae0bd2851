"""Plans of y = z weightᵀ + bias for few rows in one launch, where z = norm(x) is never a tensor.

The kernel is kernels_cu/linear/one_launch.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from ..kernel.text import CPP_TYPE, Arithmetic, forward_struct
from ..operation import NORMS, Operation, affine
from ..plan.plain_problems import plain
from ..plan.problem import ITEMSIZE, ceil_div
from ..plan.shapes import shape_of_rows
from ..plan.spec import MOST_SHORT, WARP, OtherSpec, RowShape
from ..plan.steps import Names, OtherPlan, Pointer, Step
from .problem import LinearProblem

# As in kernels_cu/linear/one_launch.cu.
CONSUMERS = 8  # warps
TILE_OUTS = 8
PAIR = 64  # columns
BARRIER = 8  # bytes

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


def why_not(problem: LinearProblem, device: Device) -> str:
    """Return why a problem that tensor cores can take cannot be one launch; empty if it can."""
    if not 1 <= problem.rows <= ROWS[-1]:
        return f"it is for up to {ROWS[-1]} rows, not {problem.rows}"
    if "float64" in (problem.ln_weight, problem.ln_bias):
        return "ln_weight and ln_bias must not be float64"
    if problem.cols > VECTOR_COLS * MOST_SHORT or row_shape(problem, device).threads == 1:
        return (
            f"it is for rows that more than one thread and no more than one CTA adds up, not of {problem.cols} columns"
        )
    if not divisions(problem, device):
        return f"no division of {problem.cols} columns fits"
    return ""


def rows_of(problem: LinearProblem) -> int:
    """Return how many rows its kernel serves at most; 0 if there is none."""
    return next((most for most in ROWS if problem.rows <= most), 0)


def plan(problem: LinearProblem, device: Device, division: Division) -> OtherPlan:
    """Return the launch of a problem of which nothing says why not, by one of its divisions."""
    spec = _spec(replace(problem, rows=division.rows), division, device)
    tiles = problem.outs // TILE_OUTS
    clusters = min(tiles, device.resident_clusters(division.cluster, 1))
    pointers = tuple(Pointer(name) for name, kind in spec.parameters().items() if kind.endswith("*"))
    integers = (problem.rows, problem.outs, problem.x_stride, problem.weight_stride)
    step = Step(spec, (clusters * division.cluster, 1, 1), spec.dynamic_shared, pointers, ("eps",), integers)
    return OtherPlan(Names(tuple(pointer.name for pointer in pointers), ("eps",)), (step,))


def divisions(problem: LinearProblem, device: Device) -> tuple[Division, ...]:
    """Return every division that fits, by clusters of more and more CTAs."""
    return _divisions(replace(problem, rows=rows_of(problem)), device)


@lru_cache(maxsize=4096)
def _divisions(problem: LinearProblem, device: Device) -> tuple[Division, ...]:
    size, rows, fitting = ITEMSIZE[problem.dtype], problem.rows, []
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
                fitting.append(division)
                break
    return tuple(fitting)


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
