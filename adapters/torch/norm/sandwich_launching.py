"""rms_norm_add_rms_norm on plain CUDA tensors by one kernel, where a CTA holds a row; as fused_launching.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.recipe import forward_recipe, one_kernel_norms_twice
from ...kernel import launch
from ...plan.problem import argument_order
from ...plan.steps import Plan
from . import fused_launching, fused_memory, gpu, launching
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
