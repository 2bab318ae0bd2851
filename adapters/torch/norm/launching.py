"""Run operations on plain CUDA tensors, on torch's current stream and in memory of torch's allocator.

The core works out once what follows from layouts and options alone, and it is kept as a recipe. repeats.py asks torch
in one question whether a call is like an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import logs
from ...call import broadcasting
from ...call.backend import CallOptions
from ...call.checks import Layout, row_strides
from ...call.recipe import backward_recipe, forward_recipe, of_any_rows, scalars_of
from ...kernel import launch
from ...operation import NORMS
from ...plan.plan import plan as plan_of
from ...plan.problem import Operands, argument_order, backward_reads
from ...plan.steps import Plan
from . import checks, gpu
from .calls import Backward, Call, Family, Forward, affine_family, family, family_of_rows
from .repeats import again, keep, known_call, known_form, remember, remember_call, remember_form

IN_ORDER = tuple(range(64))


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass: x, operands and s, at least those that Call.saved names."""

    names: tuple[str, ...]
    tensors: Sequence[Tensor]
    numbers: Sequence[float]
    statistics: Tensor  # as formulas.py has them


# Forward.


def forward_by(
    recipe: Forward,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    wants_statistics: bool,
    out: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Return (results in the order of `returns`, statistics as formulas.py has them); y is written to a given `out`.

    The recipe is for tensors of these layouts, at any address. They are those of Call.names, followed by the scale if
    the call has a store with one scale for all of y. With a store the results are those of Float8Store.results, without
    that scale.
    """
    index = tensors[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return forward_by(recipe, tensors, numbers, eps, wants_statistics, out)
    together, pointers = 0, []
    for tensor in tensors:
        pointer = tensor.data_ptr()
        together |= pointer
        pointers.append(pointer)
    if out is not None:
        together |= out.data_ptr()
    plan, copies, memory, written, statistics_memory, rstd_offset, order, family, sm_margin, aligned, temporary = recipe
    if (together & 15 or not aligned) and aligned is not gpu.aligned(
        family.call.names, pointers, tensors, tensors[0].shape, out
    ):
        recipe = recipe_of(family.call, tensors, sm_margin, out)
        return forward_by(recipe, tensors, numbers, eps, wants_statistics, out)
    if out is None or temporary:
        results = []
        for layout in memory:  # a comprehension takes longer
            results.append(gpu.empty(*layout))
    else:
        results = [out if name == "y" else gpu.empty(*layout) for name, layout in zip(written, memory, strict=True)]
    statistics = None
    mean_pointer = rstd_pointer = 0
    if wants_statistics:
        statistics = gpu.empty(*statistics_memory)
        mean_pointer = statistics.data_ptr()
        rstd_pointer = mean_pointer + rstd_offset
    if plan is not None:
        if copies:
            tensors = gpu.copied(tensors, copies, pointers)
        for result in results:
            pointers.append(result.data_ptr())
        pointers.append(mean_pointer)
        pointers.append(rstd_pointer)
        if numbers:
            scalars = scalars_of(plan, dict(zip(family.call.numbers, numbers, strict=True), eps=eps))
            arguments = (*order(pointers), *scalars)
        else:
            pointers.append(eps)
            arguments = order(pointers)
        launch.run(plan, index, gpu.stream(index), arguments)
    if temporary:
        results = [out.copy_(result) if name == "y" else result for name, result in zip(written, results, strict=True)]
    return results, statistics


def recipe_of(call: Call, tensors: Sequence[Tensor], sm_margin: int, out: Tensor | None = None) -> Forward:
    """Return the recipe of a forward pass, from the cache or from that of another number of rows if there is one."""
    pointers = [tensor.data_ptr() for tensor in tensors]
    aligned = gpu.aligned(call.names, pointers, tensors, tensors[0].shape, out)
    out_strides = None if out is None else out.stride()
    tensor_layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()) for tensor in tensors]
    key = (aligned, sm_margin, out_strides, *tensor_layouts)
    recipe = call.recipes.get(key)
    if recipe is None:
        form = ("forward", call, sm_margin, aligned) if out is None and call.store is None else None
        like = known_form(form, tensors) if form else None
        if like is not None:
            recipe = forward_of_rows(like, tensors[0].shape)
        else:
            recipe = _forward_recipe(call, tensors, layouts_of(call, tensors), sm_margin, aligned)
            if out is not None:
                recipe = _writing_to(recipe, call.function, "y", out)
            elif form and serves_any_rows(recipe):
                remember_form(form, tensors, recipe)
        keep(call.recipes, key, recipe)
    return recipe


def _writing_to(recipe: Any, function: str, name: str, target: Tensor) -> Any:
    """Return a recipe that writes `name`, y or dx, to the rows of `target`, by way of other memory if no kernel can."""
    if recipe.plan is None:
        return recipe._replace(temporary=True)
    strides = row_strides(Layout(tuple(target.shape), target.stride(), "", ""), 1)
    if strides is None:
        logs.copied(function, ("out" if name == "y" else "dx_out",), (target,), (True,))
        return recipe._replace(temporary=True)
    row, outer, inner = strides
    problem = recipe.plan.problem
    operands = Operands(
        replace(operand, row_stride=row, outer_stride=outer, inner=inner) if operand.name == name else operand
        for operand in problem.operands
    )
    problem = replace(problem, operands=operands, overwrites=name == "dx")
    return recipe._replace(plan=plan_of(problem, recipe.plan.device))


def serves_any_rows(recipe: Forward | Backward) -> bool:
    """Say whether the recipe of a call with another number of rows follows from this one."""
    return recipe.plan is not None and not recipe.copies and of_any_rows(recipe.plan)


def forward_of_rows(like: Forward, shape: tuple[int, ...]) -> Forward:
    """Return the recipe of a call that differs from an earlier one in its number of rows alone, with x of `shape`."""
    plan = plan_of(like.plan.problem.with_rows(math.prod(shape[:-1])), like.plan.device)
    (statistics, *_), _, dtype = like.statistics
    return like._replace(
        plan=plan,
        results=tuple(gpu.contiguously(shape, dtype) for _, _, dtype in like.results),
        statistics=gpu.contiguously((statistics, *shape[:-1]), dtype),
        rstd_offset=_rstd_offset(plan),
        family=family_of_rows(like.family, shape),
    )


def layouts_of(call: Call, tensors: Sequence[Tensor]) -> dict[str, Layout]:
    """Return the layouts of x and the operands that are tensors."""
    return {
        name: checks.layout_in_memory(call.function, name, tensor)
        for name, tensor in zip(call.names, tensors, strict=False)
    }


def _forward_recipe(
    call: Call, tensors: Sequence[Tensor], layouts: dict[str, Layout], sm_margin: int, aligned: bool
) -> Forward:
    """Make the recipe of a forward pass."""
    options = CallOptions(
        call.function, call.operation, call.demanded, call.dtype, call.s_dtype, sm_margin, store=call.store
    )
    device = gpu.properties_of(call.function, tensors[0])
    recipe = forward_recipe(options, given_of(call, layouts), device, aligned=aligned)
    leading = tensors[0].shape[:-1]
    written = tuple(name for name, _, _ in recipe.written)
    scale_names = ("y8_scale",) if len(tensors) > len(call.names) else ()
    # An operation with a second norm has an rstd for each norm, and no mean.
    statistic_names = ("rstd", "second_rstd") if call.operation.second else ("mean", "rstd")
    names = (*call.names, *scale_names, *written, *statistic_names, *(() if call.numbers else ("eps",)))
    return Forward(
        plan=recipe.plan,
        copies=gpu.copies(recipe, call.names, {name: layout.shape for name, layout in layouts.items()}),
        results=tuple(gpu.memory(shape, dtype) for _, shape, dtype in recipe.written),
        written=written,
        statistics=gpu.memory((len(recipe.statistics), *leading), recipe.statistics[0][2]),
        rstd_offset=_rstd_offset(recipe.plan),
        order=None if recipe.plan is None else argument_order(recipe.plan.problem, names),
        family=family(call, layouts),
        sm_margin=sm_margin,
        aligned=aligned,
    )


def given_of(call: Call, layouts: Mapping[str, Layout]) -> dict[str, broadcasting.Given]:
    """Return x and the operands in the core's order; the value of an operand that is a number does not matter."""
    inputs: dict[str, broadcasting.Given] = {**layouts, **dict.fromkeys(call.numbers, 0.0)}
    return {name: inputs[name] for name in ("x", *call.operation.operands) if name in inputs}


# Backward.


def known_backward(
    family: Family, saved: Saved, dy: Tensor | None, ds: Tensor | None, wanted: tuple[str, ...]
) -> Backward | None:
    """Return the recipe of an earlier backward pass like this one, as repeats.py finds it; None if there is none."""
    known, key = family.known, (wanted, saved.names, dy is None, ds is None)
    earlier = known.get(key)
    if not earlier:
        return None
    gradients = (dy,) if ds is None else (ds,) if dy is None else (dy, ds)
    tensors = (*gradients, *saved.tensors)
    for matches, recipe in earlier:
        if matches(*tensors):
            return recipe
    return again(known, key, tensors)


def new_backward(
    family: Family, saved: Saved, dy: Tensor | None, ds: Tensor | None, wanted: tuple[str, ...]
) -> Backward:
    """Return the recipe of a backward pass, and let `known_backward` find it."""
    tensors = (*(tensor for tensor in (dy, ds) if tensor is not None), *saved.tensors)
    recipe = backward_recipe_of(family, saved, dy, ds, wanted)
    key = wanted, saved.names, dy is None, ds is None
    if family.is_derived and key not in family.known:  # it may be the only pass of so many rows
        family.known[key] = ()
    else:
        remember(family.known, key, tensors, recipe)
    return recipe


def backward_by(
    recipe: Backward,
    saved: Saved,
    dy: Tensor | None,
    ds: Tensor | None,
    in_place: bool = False,
    dx_out: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients that the recipe wants, of which equal ones are one tensor, dx written to `dx_out` if given.

    The recipe is for tensors of these layouts, at any address. Shapes and devices are not checked, as autograd has done
    so. With `in_place` dy is not needed any more, and dx takes its memory if it can.
    """
    names, saved_tensors, numbers, statistics = saved
    index = statistics.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return backward_by(recipe, saved, dy, ds, in_place, dx_out)
    tensors, together, pointers = (dy, ds, *saved_tensors), 0, []
    for tensor in tensors:
        pointer = 0 if tensor is None else tensor.data_ptr()
        together |= pointer
        pointers.append(pointer)
    if dx_out is not None:
        together |= dx_out.data_ptr()
    plan, copies, memory, written, wanted, places, sums, zeros, rstd_offset, order, family, aligned, temporary = recipe
    if (together & 15 or not aligned) and aligned is not gpu.aligned(
        ("dy", "ds", *names), pointers, tensors, family.layouts["x"].shape, dx_out
    ):
        recipe = backward_recipe_of(family, saved, dy, ds, wanted, dx_out)
        return backward_by(recipe, saved, dy, ds, in_place, dx_out)
    into = dx_out if not temporary else None
    if in_place and into is None and memory and takes_dx(dy, recipe):
        into = dy
    if into is None:
        gradients = []
        for layout in memory:  # a comprehension takes longer
            gradients.append(gpu.empty(*layout))
    else:
        gradients = [into if name == "dx" else gpu.empty(*layout) for name, layout in zip(written, memory, strict=True)]
    if plan is None:  # there are no rows, so that all sums are zero
        for gradient in gradients:
            gradient.zero_()
    else:
        if copies:
            tensors = gpu.copied(tensors, copies, pointers)
        if zeros is not None:
            dy = gpu.empty(*zeros).zero_()
            pointers[0] = dy.data_ptr()
        workspace = gpu.empty((plan.workspace,), (1,), torch.uint8) if plan.workspace else None
        if not statistics.is_contiguous():  # vmap may have moved its axes
            statistics = statistics.contiguous()
        mean_pointer = statistics.data_ptr()
        pointers.append(mean_pointer)
        pointers.append(mean_pointer + rstd_offset)
        for gradient in gradients:
            pointers.append(gradient.data_ptr())
        arguments = order(pointers)
        if numbers:
            arguments += (*scalars_of(plan, dict(zip(family.call.numbers, numbers, strict=True))),)
        workspace_pointer = 0 if workspace is None else workspace.data_ptr()
        launch.run(plan, index, gpu.stream(index), arguments, workspace_pointer)
    if temporary:
        gradients = [
            dx_out.copy_(gradient) if name == "dx" else gradient
            for name, gradient in zip(written, gradients, strict=True)
        ]
    if places == IN_ORDER[: len(gradients)] and not sums:
        return gradients
    results = [gradients[place] for place in places]
    for place, (axes, shape, dtype) in sums.items():
        results[place] = results[place].sum(axes).reshape(shape).to(dtype)
    return results


def takes_dx(dy: Tensor | None, recipe: Backward) -> bool:
    """Say whether dx may take the memory of dy."""
    plan, memory = recipe.plan, dict(zip(recipe.written, recipe.gradients, strict=True))
    if plan is None or dy is None or not plan.may_overwrite or "dx" not in memory:
        return False
    return (dy.shape, dy.stride(), dy.dtype) == memory["dx"]


def backward_recipe_of(
    family: Family,
    saved: Saved,
    dy: Tensor | None,
    ds: Tensor | None,
    wanted: tuple[str, ...],
    dx_out: Tensor | None = None,
) -> Backward:
    """Return the recipe of a backward pass, from the cache or from that of another number of rows if there is one."""
    names, tensors = ("dy", "ds", *saved.names), (dy, ds, *saved.tensors)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    aligned = gpu.aligned(names, pointers, tensors, family.layouts["x"].shape, dx_out)
    dx_out_strides = None if dx_out is None else dx_out.stride()
    strides_and_dtypes = [None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in tensors]
    key = (wanted, names, aligned, dx_out_strides, *strides_and_dtypes)
    recipe = family.recipes.get(key)
    if recipe is None:
        given = tuple(tensor for tensor in tensors if tensor is not None)
        form = (family.form, wanted, names, dy is None, ds is None, aligned)
        like = known_form(form, given) if family.form and dx_out is None else None
        if like is None:
            function = f"backward of {family.call.function}"
            read = {
                name: None if tensor is None else checks.layout_in_memory(function, name, tensor)
                for name, tensor in zip(names, tensors, strict=True)
            }
            recipe = _backward_recipe(family, read, saved.statistics, wanted, aligned)
            if dx_out is not None:
                recipe = _writing_to(recipe, function, "dx", dx_out)
            elif family.form and not (recipe.sums or recipe.zeros) and serves_any_rows(recipe):
                remember_form(form, given, recipe)
        else:
            recipe = _backward_of_rows(like, family)
        keep(family.recipes, key, recipe)
    return recipe


def _backward_of_rows(like: Backward, family: Family) -> Backward:
    """Return the recipe of a backward pass that differs from an earlier one in its number of rows alone."""
    shape = family.layouts["x"].shape
    gradients = tuple(gpu.contiguously(shape, memory[2]) if len(memory[0]) > 1 else memory for memory in like.gradients)
    plan = plan_of(like.plan.problem.with_rows(math.prod(shape[:-1])), like.plan.device)
    return like._replace(plan=plan, gradients=gradients, rstd_offset=_rstd_offset(plan), family=family)


def _backward_recipe(
    family: Family, given: Mapping[str, Layout | None], statistics: Tensor, wanted: tuple[str, ...], aligned: bool
) -> Backward:
    """Make the recipe of a backward pass that may read what is `given`, of which dy or ds may be None."""
    call, layouts, *_ = family
    reads = backward_reads(call.operation, wanted, (*call.names, *call.numbers))
    read = {name: layout for name in dict.fromkeys(("dy", "ds", *reads)) if (layout := given.get(name)) is not None}
    leading = layouts["x"].shape[:-1]
    row_layout = Layout(leading, gpu.strides(leading), checks.dtype_name(statistics.dtype), str(statistics.device))
    read |= {name: row_layout for name in NORMS[call.operation.norm].statistics if name in reads}
    function, margin = f"backward of {call.function}", call.sm_margins[1]
    options = CallOptions(function, call.operation, call.demanded, s_dtype=call.s_dtype, sm_margin=margin)
    device = gpu.properties_of(call.function, statistics)
    recipe = backward_recipe(options, given_of(call, layouts) | read, wanted, device, aligned=aligned)
    written = [name for name, _, _ in recipe.written]
    gradients = dict(recipe.gradients)
    sums = {wanted.index(name): (axes, shape, getattr(torch, dtype)) for axes, (name, shape, dtype) in recipe.reduced}
    compute = statistics.dtype
    sums |= {place: ((0,), (), compute) for place, name in enumerate(wanted) if gradients[name] in recipe.totals}
    names = (*given, "mean", "rstd", *written)
    return Backward(
        plan=recipe.plan,
        copies=gpu.copies(recipe, tuple(given), {name: layout.shape for name, layout in read.items()}),
        gradients=tuple(gpu.memory(shape, dtype) for _, shape, dtype in recipe.written),
        written=tuple(written),
        wanted=wanted,
        places=tuple(written.index(gradients[name]) for name in wanted),
        sums=sums,
        zeros=None if recipe.dy is None else gpu.memory(*recipe.dy[1:]),
        rstd_offset=_rstd_offset(recipe.plan),
        order=None if recipe.plan is None else argument_order(recipe.plan.problem, names),
        family=family,
        aligned=aligned,
    )


def _rstd_offset(plan: Plan | None) -> int:
    """Return the bytes from the first row statistic to the second, 0 if there is only one."""
    if plan is None or len(plan.problem.operation.statistics) < 2:
        return 0
    return plan.problem.rows * getattr(torch, plan.problem.compute).itemsize


# Sums over rows.


def column_sums(dy: Tensor) -> Tensor:
    """Return Σ dy over the rows of dy (rows, cols), by a backward pass for dbias alone, which reads nothing but dy.

    It is faster than torch's sum(0) (docs/tuning.md).
    """
    return backward_by(column_sums_recipe(dy), Saved((), (), (), dy), dy, None)[0]


def column_sums_recipe(dy: Tensor) -> Backward:
    """Return the recipe of `column_sums`."""
    key = ("column_sums", dy.shape, dy.dtype)
    recipe = known_call(key, (dy,))
    if recipe is None:
        family = affine_family("layer_norm", dy, None, 0)
        recipe = backward_recipe_of(family, Saved((), (), (), dy), dy, None, ("bias",))
        remember_call(key, (dy,), recipe)
    return recipe
