"""Plans of y = z weightᵀ + bias whose product begins while the norm that makes z still runs.

z is a tensor in the workspace. The norm's kernel is its own, but for saying that the next may begin; the product's is
kernels_cu/linear/product.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..kernel.device import Device
from ..kernel.text import CPP_TYPE
from ..plan.plain_problems import plain
from ..plan.plan import plan as norm_plan
from ..plan.problem import ITEMSIZE, ceil_div
from ..plan.spec import WARP, NormSpec, OtherSpec
from ..plan.steps import WORKSPACE, Matrix, Names, OtherPlan, Pointer, Step
from .one_launch import BARRIER
from .problem import LinearProblem

# As in kernels_cu/linear/product.cu.
STAGE_COLUMNS = 64
GROUP_ROWS = 64
GROUP_WARPS = 4

OUTS = 8  # those of a CTA are a multiple of this
MOST_OUTS = {64: 256, 128: 256, 192: 128}  # of a CTA by its rows, so that sums stay in registers
ROWS = tuple(MOST_OUTS)  # a kernel serves up to so many rows
MOST_STAGES = 10
RING_BYTES = 200 << 10
AHEAD = 2  # stages
ALIGNMENT = 1024
# What the arrays of the norm's own problem are called here.
OF_NORM = {"x": "x", "weight": "ln_weight", "bias": "ln_bias", "y": WORKSPACE, "mean": "mean", "rstd": "rstd"}
INSTRUCTION_DTYPE = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Product(OtherSpec):
    """The kernel of a product with few rows, of `outs` columns of y in each CTA."""

    dtype: str
    rows: int
    outs: int
    stages: int
    ahead: int  # stages of weight that are fetched before z is there
    biased: bool

    kernel = "product"
    file = "linear/product.cu"
    of_one_arch = True

    def __str__(self) -> str:
        return (
            f"{self.kernel} of {self.dtype}, up to {self.rows} rows, {self.outs} outs a CTA, {self.stages} stages of "
            f"{STAGE_COLUMNS} cols"
        )

    @property
    def threads(self) -> int:
        return (self.rows // GROUP_ROWS * GROUP_WARPS + 1) * WARP

    @property
    def dynamic_shared(self) -> int:
        """Return the size of ProductMemory in bytes."""
        ring = self.stages * (self.rows + self.outs) * STAGE_COLUMNS * ITEMSIZE[self.dtype]
        return ceil_div(ring + 2 * self.stages * BARRIER, ALIGNMENT) * ALIGNMENT

    def parameters(self) -> dict[str, str]:
        kind = CPP_TYPE[self.dtype]
        types = dict.fromkeys(("z", "weight"), "const __grid_constant__ TensorMap")
        types |= {"bias": f"const {kind}*"} if self.biased else {}
        return types | {"y": f"{kind}*"} | dict.fromkeys(("rows", "cols", "outs"), "int64")

    def text(self) -> tuple[str, str]:
        tile = f"ProductTile<{self.rows}, {self.outs}, {self.stages}, {self.ahead}>"
        bias = "bias" if self.biased else f"static_cast<const {CPP_TYPE[self.dtype]}*>(nullptr)"
        sizes = ", ".join(f"static_cast<int>({name})" for name in ("rows", "cols", "outs"))
        call = f"  product<{tile}, {self.dynamic_shared}>(z, weight, {bias}, y, {sizes});\n"
        return multiply_group(self.dtype, self.outs), call


def multiply_group(dtype: str, outs: int) -> str:
    """Return the function of that name of hopper.cuh: an instruction names every register of its sums."""
    count, kind = outs // 2, INSTRUCTION_DTYPE[dtype]
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"namespace cunorm {{\nDEVICE void multiply_group({CPP_TYPE[dtype]}, float (&sums)[{count}], "
        "unsigned long long z, unsigned long long weight, int adds) {\n"
        f'  asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{outs}k16.f32.{kind}.{kind} {{{registers}}}, "\n'
        f'      "%{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n}}"\n'
        f'      : {operands}\n      : "l"(z), "l"(weight), "r"(adds));\n}}\n}}  // namespace cunorm\n'
    )


def why_not(problem: LinearProblem, device: Device) -> str:
    """Return why a problem that tensor cores can take cannot overlap; empty if it can."""
    if not 1 <= problem.rows <= ROWS[-1]:
        return f"it is for up to {ROWS[-1]} rows, not {problem.rows}"
    if not device.overlaps_launches:
        return "launches must not begin early"
    most = device.sms * MOST_OUTS[_rows_of(problem)]
    return f"it is for up to {most} outs of {problem.rows} rows, not {problem.outs}" if problem.outs > most else ""


def _rows_of(problem: LinearProblem) -> int:
    """Return up to how many rows its kernel serves."""
    return next(most for most in ROWS if problem.rows <= most)


def outs_of_cta(problem: LinearProblem, device: Device) -> int:
    """Return the outs of a CTA, so that every SM has one."""
    return ceil_div(ceil_div(problem.outs, device.sms), OUTS) * OUTS


def plan(problem: LinearProblem, device: Device) -> OtherPlan:
    """Return the launches of a problem of which nothing says why not."""
    given = (problem.norm, "forward", problem.rows, problem.cols, problem.dtype, problem.ln_weight, problem.ln_bias)
    of_norm = norm_plan(
        plain(*given, zero_centered_gamma=problem.zero_centered_gamma, strides={"x": problem.x_stride}), device
    )
    (norm,) = of_norm.steps
    assert isinstance(norm.spec, NormSpec)
    spec = replace(norm.spec, lets_next_begin=True)
    pointers = tuple(Pointer(OF_NORM[pointer.name]) for pointer in norm.pointers)
    product = _product(problem, device)
    names = dict.fromkeys(pointer.name for pointer in (*pointers, *product.pointers) if pointer.name != WORKSPACE)
    workspace = problem.rows * problem.cols * ITEMSIZE[problem.dtype]
    steps = (norm._replace(spec=spec, pointers=pointers), product)
    return OtherPlan(Names(tuple(names), ("eps",)), steps, workspace)


def _product(problem: LinearProblem, device: Device) -> Step:
    rows = _rows_of(problem)
    outs = outs_of_cta(problem, device)
    stage_bytes = (rows + outs) * STAGE_COLUMNS * ITEMSIZE[problem.dtype]
    stages = min(MOST_STAGES, RING_BYTES // stage_bytes, ceil_div(problem.cols, STAGE_COLUMNS))
    spec = Product(problem.dtype, rows, outs, stages, min(AHEAD, stages), problem.bias)
    z = Matrix(WORKSPACE, 0, problem.dtype, problem.rows, problem.cols, problem.cols, problem.rows)
    weight = Matrix("weight", 0, problem.dtype, problem.outs, problem.cols, problem.weight_stride, outs)
    others = (Pointer("bias"), Pointer("y")) if problem.bias else (Pointer("y"),)
    integers = (problem.rows, problem.cols, problem.outs)
    grid = (ceil_div(problem.outs, outs), 1, 1)
    return Step(spec, grid, spec.dynamic_shared, (z, weight, *others), (), integers, begins_early=True)
