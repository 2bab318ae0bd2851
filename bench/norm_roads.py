"""Roads from a torch call to a norm's kernels and back through autograd, to see what each stretch costs on the host.

A road is called as (x, weight, bias, eps) and returns y; all tensors are bfloat16 on the GPU. The first rungs of the
ladder launch nothing: their results are whatever was in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import cunorm.torch
from cunorm import device, launch
from cunorm.norm.plain_problems import whole
from cunorm.norm.plan import plan
from cunorm.norm.steps import Plan
from cunorm.torch.norm import functional, gpu, operators

Road = Callable[[Tensor, Tensor, Tensor, float], Tensor]


# An autograd.Function that does ever more.


class Empty(torch.autograd.Function):
    """Allocates y; the gradient of x is that of y, weight and bias get none."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        return like(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


class Gradients(torch.autograd.Function):
    """Allocates y and the three gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        return like(x)

    @staticmethod
    def backward(ctx, dy):
        return like(dy), like_row(dy), like_row(dy), None


class Saved(torch.autograd.Function):
    """The same; keeps what cunorm's keeps, and takes it out again."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, statistics = like(x), like_statistics(x)
        ctx.save_for_backward(x, statistics, weight)
        ctx.call = eps, None
        return y

    @staticmethod
    def backward(ctx, dy):
        _ = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:3]
        return like(dy), like_row(dy), like_row(dy), None


class Launched(torch.autograd.Function):
    """The same, and the kernels are launched by plans that are known: no checks, no keys, no recipes."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, statistics = like(x), like_statistics(x)
        run_forward(x, weight, bias, eps, y, statistics)
        ctx.save_for_backward(x, statistics, weight)
        ctx.call = eps, None
        return y

    @staticmethod
    def backward(ctx, dy):
        x, statistics, weight = ctx.saved_tensors
        _ = ctx.call, ctx.needs_input_grad[:3]
        gradients = like(x), like_row(x), like_row(x)
        run_backward(dy, x, statistics, weight, *gradients)
        return *gradients, None


class TorchKernels(torch.autograd.Function):
    """torch's own kernels, its backward pass called from Python."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = torch.ops.aten.native_layer_norm.default(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        backward = torch.ops.aten.native_layer_norm_backward.default
        return *backward(dy, x, weight.shape, mean, rstd, weight, bias, mask), None


# What torch.compile differentiates is operators.Norm, a Function around two operators without an autograd of their own.

_library = torch.library.Library("cunorm_roads", "DEF")
_library.define("norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor")


@torch.library.impl(_library, "norm", "AutogradCUDA")
def _norm_autograd(x, weight, bias, eps):
    return functional._apply(
        x, weight, bias, functional._call("layer_norm", x, weight.shape, weight, bias, eps, x.dtype, 0)
    )


def through_operator(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return operators.norm(x, weight, bias, "layer_norm", 1, eps, x.dtype, True, 0, 0)[0]


def in_a_function(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return operators.Norm.apply(x, weight, bias, "layer_norm", 1, eps, x.dtype, True, 0, 0)[0]


def _quick(function: type[torch.autograd.Function]) -> Road:
    return super(torch.autograd.Function, function).apply  # as in adapters/torch/norm/functional.py


ROADS: dict[str, Road] = {
    "none": lambda x, weight, bias, eps: x,
    "torch": lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    "Function": _quick(Empty),
    "Function, gradients": _quick(Gradients),
    "Function, gradients, saved": _quick(Saved),
    "Function, gradients, saved, launched": _quick(Launched),
    "cunorm": lambda x, weight, bias, eps: cunorm.torch.layer_norm(x, weight.shape, weight, bias, eps),
    "torch's kernels in a Function": _quick(TorchKernels),
    "operator": through_operator,
    "operators in a Function": in_a_function,
    "operator at the autograd key": lambda x, weight, bias, eps: torch.ops.cunorm_roads.norm.default(
        x, weight, bias, eps
    ),
}


# What the rungs are made of. Everything is contiguous and bfloat16.


def like(x: Tensor) -> Tensor:
    return gpu.empty(tuple(x.shape), x.stride(), x.dtype)


def like_row(x: Tensor) -> Tensor:
    return gpu.empty((x.shape[-1],), (1,), x.dtype)


def like_statistics(x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    return gpu.empty((2, rows), (rows, 1), torch.float32)


_plans: dict[tuple[str, int, int], Plan] = {}


def plan_of(direction: str, x: Tensor) -> Plan:
    cols = x.shape[-1]
    key = direction, x.numel() // cols, cols
    if key not in _plans:
        problem = whole("layer_norm", *key, "bfloat16", "bfloat16")
        _plans[key] = plan(problem, device.current(x.get_device()))
    return _plans[key]


def run_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, y: Tensor, statistics: Tensor) -> None:
    plan = plan_of("forward", x)
    index, mean = x.get_device(), statistics.data_ptr()
    pointers = (x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), mean, mean + 4 * plan.problem.rows)
    launch.run(plan, index, gpu.stream(index), (*pointers, eps))


def run_backward(dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, dx, dweight, dbias) -> None:
    plan = plan_of("backward", x)
    index, mean = x.get_device(), statistics.data_ptr()
    workspace = gpu.empty((plan.workspace,), (1,), torch.uint8)
    read = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), mean, mean + 4 * plan.problem.rows)
    pointers = (*read, dx.data_ptr(), dweight.data_ptr(), dbias.data_ptr())
    launch.run(plan, index, gpu.stream(index), pointers, workspace.data_ptr())
