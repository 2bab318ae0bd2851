"""rms_norm_add_rms_norm on plain CUDA tensors by one kernel, where a CTA holds a row; as fused_launching.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.checks import Layout
from ...call.recipe import backward_twice_recipe, forward_recipe, one_kernel_norms_twice
from ...kernel import launch
from ...plan.problem import argument_order
from ...plan.steps import Plan
from . import checks, fused_launching, fused_memory, gpu, launching
from .fused_launching import Call, Memory


class Recipe(NamedTuple):
    """`plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    y: Memory
    s: Memory
    statistics: Memory  # of either norm
    order: Callable[[Sequence[float]], tuple[float, ...]] | None


_recipes: dict[Hashable, Recipe | None] = {}  # None where one launch does not do it


def forward(
    call: Call, s_dtype: str | None, tensors: Sequence[Tensor], eps: float, wants_statistics: bool, sm_margin: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """(y, s, statistics of x, statistics of s), these as formulas.py has them; None where two launches are needed."""
    index = tensors[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return forward(call, s_dtype, tensors, eps, wants_statistics, sm_margin)
    pointers = [tensor.data_ptr() for tensor in tensors]
    aligned = fused_memory.aligned(call.names, pointers, tensors, tensors[0].shape)
    key = (
        call,
        aligned,
        s_dtype,
        sm_margin,
        *[(one.shape, one.stride(), one.dtype, one.get_device()) for one in tensors],
    )
    if key not in _recipes:
        launching.keep(_recipes, key, _recipe(call, s_dtype, tensors, sm_margin, aligned))
    recipe = _recipes[key]
    if recipe is None:
        return None
    plan, copies, memory_of_y, memory_of_s, memory_of_statistics, order = recipe
    y, s = gpu.empty(*memory_of_y), gpu.empty(*memory_of_s)
    of_x = of_s = None
    pointers_of_statistics = (0, 0)
    if wants_statistics:
        of_x, of_s = gpu.empty(*memory_of_statistics), gpu.empty(*memory_of_statistics)
        pointers_of_statistics = (of_x.data_ptr(), of_s.data_ptr())
    if plan is None or order is None:
        return y, s, of_x, of_s
    if copies:
        tensors = fused_memory.copied(tensors, copies, pointers)
    given = (*pointers, y.data_ptr(), s.data_ptr(), *pointers_of_statistics, eps)
    launch.run(plan, index, gpu.stream(index), order(given))
    return y, s, of_x, of_s


def _recipe(call: Call, s_dtype: str | None, tensors: Sequence[Tensor], sm_margin: int, aligned: bool) -> Recipe | None:
    layouts = fused_launching.layouts_of(call, tensors)
    if not one_kernel_norms_twice(layouts["x"], s_dtype):
        return None
    found = forward_recipe(
        call.function,
        call.operation,
        fused_launching.given_of(call, layouts),
        gpu.properties_of(call.function, tensors[0]),
        demanded=call.demanded,
        dtype=call.dtype,
        s_dtype=None,
        sm_margin=sm_margin,
        aligned=aligned,
    )
    (y, s), (_, of_rows, compute) = found.written, found.statistics[0]
    names = (*call.names, "y", "s", "rstd", "second_rstd", "eps")
    return Recipe(
        plan=found.plan,
        copies=fused_memory.copies(found, call.names, {name: one.shape for name, one in layouts.items()}),
        y=fused_memory.memory(*y[1:]),
        s=fused_memory.memory(*s[1:]),
        statistics=fused_memory.memory((1, *of_rows), compute),
        order=None if found.plan is None else argument_order(found.plan.problem, names),
    )


class Backward(NamedTuple):
    """`gradients` by name, in the order of the plan."""

    plan: Plan
    gradients: tuple[tuple[str, Memory], ...]
    order: Callable[[Sequence[float]], tuple[float, ...]]


_backward_recipes: dict[Hashable, Backward | None] = {}  # None where one kernel does not do it


def backward(
    call: Call, tensors: Mapping[str, Tensor], of_x: Tensor, of_s: Tensor, wanted: tuple[str, ...]
) -> dict[str, Tensor] | None:
    """The gradients of x and of the residual, and of the weights that are `wanted`, by name; None where two launches
    are needed. `tensors`: x, s, dy, ds if there is one, and the weights.
    """
    index = of_s.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return backward(call, tensors, of_x, of_s, wanted)
    given = tuple(tensors.values())
    pointers = [tensor.data_ptr() for tensor in given]
    aligned = fused_memory.aligned(tuple(tensors), pointers, given, tensors["x"].shape)
    key = (
        call,
        tuple(tensors),
        wanted,
        aligned,
        *[(one.shape, one.stride(), one.dtype, one.get_device()) for one in given],
    )
    if key not in _backward_recipes:
        launching.keep(_backward_recipes, key, _backward_recipe(call, tensors, of_s, wanted, aligned))
    recipe = _backward_recipes[key]
    if recipe is None:
        return None
    plan, memory, order = recipe
    gradients = {name: gpu.empty(*one) for name, one in memory}
    workspace = gpu.empty((plan.workspace,), (1,), torch.uint8) if plan.workspace else None
    of_x, of_s = of_x.contiguous(), of_s.contiguous()  # vmap may have moved their axes
    pointers += (of_x.data_ptr(), of_s.data_ptr())
    pointers += (gradient.data_ptr() for gradient in gradients.values())
    workspace_pointer = 0 if workspace is None else workspace.data_ptr()
    launch.run(plan, index, gpu.stream(index), order(pointers), workspace_pointer)
    return gradients


def _backward_recipe(
    call: Call, tensors: Mapping[str, Tensor], of_s: Tensor, wanted: tuple[str, ...], aligned: bool
) -> Backward | None:
    layouts = {name: fused_memory.layout(call.function, name, one) for name, one in tensors.items()}
    x = layouts["x"]
    of_rows = Layout(x.shape[:-1], fused_memory.strides(x.shape[:-1]), checks.dtype_name(of_s.dtype), x.device)
    found = backward_twice_recipe(
        call.operation,
        layouts | {"rstd": of_rows, "second_rstd": of_rows},
        wanted,
        gpu.properties_of(call.function, of_s),
        sm_margin=call.sm_margins[1],
        aligned=aligned,
    )
    if found.plan is None:
        return None
    names = (*tensors, "rstd", "second_rstd", *(name for name, _, _ in found.written))
    gradients = zip(found.gradients, found.written, strict=True)
    return Backward(
        plan=found.plan,
        gradients=tuple((name, fused_memory.memory(*one[1:])) for (name, _), one in gradients),
        order=argument_order(found.plan.problem, names),
    )
