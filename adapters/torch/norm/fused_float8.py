"""Fused operations of tensors with y in 8 bits: one kernel where it can be launched, else y in float32 by the ways of
fused_dispatch.py, and what float8.py makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...call import store as core
from ...call.checks import Layout
from ...call.recipe import forward_recipe, scalars_of
from ...call.store import Float8Store
from ...kernel import launch
from ...operation import Operation, name_of
from ...plan.problem import argument_order
from ...plan.steps import Plan
from . import checks, float8, fused_dispatch, fused_launching, fused_memory, gpu, launching, operators
from .fused_launching import Call, Memory, call_of


def forward(
    function: str,
    operation: Operation,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    eps: float,
    *,
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margin: int,
    store: Float8Store,
    scale: Any,
) -> dict[str, Tensor]:
    """y8, y8_scale, y if it is wide and s if it is returned, of x and the operands: tensors, and numbers."""
    x, given = tensors["x"], tuple(tensors.values())
    core.check_rows(function, Layout((), (), checks.dtype_name(x.dtype), ""), s_dtype)
    if operators.wants_gradient(*given):
        raise ValueError(
            f"{function}: x and operands must want no gradient, as y in 8 bits has none; got one that does. Use "
            "torch.no_grad() or detach()."
        )
    scales = _scale(operation, tensors, store, scale) if store.granularity == "tensor" else None
    form = (function, operation, tuple(tensors)[1:], tuple(numbers), demanded)
    margins = (sm_margin,) * 3
    if not torch.compiler.is_compiling() and fused_dispatch.at_once(given):
        call = call_of(*form, dtype, s_dtype, margins)
        return launched(call, given, tuple(numbers.values()), eps, store, scales)
    call = call_of(*form, "float32", s_dtype, margins)
    results, _ = fused_dispatch.run(call, given, tuple(numbers.values()), eps, False)
    found = dict(zip(operation.returns, results, strict=True))
    y, cols = found["y"], x.shape[-1]
    y8, scales = float8.quantise(y.reshape(-1, cols), store.granularity, store.format, scales)
    found["y8"] = y8.reshape(x.shape)
    found["y8_scale"] = scales.reshape(core.scales_shape(store.granularity, tuple(x.shape[:-1]), cols))
    found["y"] = y.to(getattr(torch, dtype) if dtype else x.dtype)
    return found


def _scale(operation: Operation, tensors: Mapping[str, Tensor], store: Float8Store, scale: Any) -> Tensor:
    """As norm/float8.py has it of arrays."""
    x, weight = tensors["x"], tensors.get("weight")
    if scale is not None:
        return torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(())
    zero_centered = weight is not None and dict(operation.defaults)["weight"] == 0
    name = name_of(operation.norm, zero_centered)
    return float8._static_scale(name, x, 1, weight, tensors.get("bias"), store.format)


class Recipe(NamedTuple):
    """`plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # as in fused_launching.py
    results: tuple[tuple[str, Memory], ...]
    order: Callable[[Sequence[float]], tuple[float, ...]] | None


_recipes: dict[Hashable, Recipe] = {}


def launched(
    call: Call,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    store: Float8Store,
    scales: Tensor | None,
) -> dict[str, Tensor]:
    """The results by the kernel, on torch's current stream. `scales` is one for all, which is a result then."""
    index = tensors[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return launched(call, tensors, numbers, eps, store, scales)
    pointers = [tensor.data_ptr() for tensor in tensors]
    aligned = fused_memory.aligned(call.names, pointers, tensors, tensors[0].shape)
    key = (call, store, aligned, *[(one.shape, one.stride(), one.dtype, one.get_device()) for one in tensors])
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = launching.keep(_recipes, key, _recipe(call, tensors, store, aligned))
    plan, copies, memory, order = recipe
    results = {name: gpu.empty(*one) for name, one in memory}
    pointers_of_results = [one.data_ptr() for one in results.values()]
    if scales is not None:
        results["y8_scale"] = scales
        pointers_of_results.append(scales.data_ptr())
    if plan is None or order is None:
        return results
    if copies:
        tensors = fused_memory.copied(tensors, copies, pointers)
    scalars = scalars_of(plan, dict(zip(call.numbers, numbers, strict=True), eps=eps))
    arguments = (*order((*pointers, *pointers_of_results, 0, 0)), *scalars)
    launch.run(plan, index, gpu.stream(index), arguments)
    return results


def _recipe(call: Call, tensors: Sequence[Tensor], store: Float8Store, aligned: bool) -> Recipe:
    layouts = fused_launching.layouts_of(call, tensors)
    found = forward_recipe(
        call.function,
        call.operation,
        fused_launching.given_of(call, layouts),
        gpu.properties_of(call.function, tensors[0]),
        demanded=call.demanded,
        dtype=call.dtype,
        s_dtype=call.s_dtype,
        sm_margin=call.sm_margins[2],
        aligned=aligned,
        float8=store,
    )
    results = tuple((name, fused_memory.memory(shape, dtype)) for name, shape, dtype in found.written)
    of_scale = ("y8_scale",) if store.granularity == "tensor" else ()
    names = (*call.names, *(name for name, _ in results), *of_scale, "mean", "rstd")
    return Recipe(
        plan=found.plan,
        copies=fused_memory.copies(found, call.names, {name: one.shape for name, one in layouts.items()}),
        results=results,
        order=None if found.plan is None else argument_order(found.plan.problem, names),
    )
