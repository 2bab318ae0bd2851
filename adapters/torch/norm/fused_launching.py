"""Fused operations on plain CUDA tensors: check, plan, launch on torch's current stream, in memory of its allocator.

As launching.py: what follows from layouts and options alone is worked out once, by the core, and kept as a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.checks import Layout
from ...call.recipe import backward_recipe, form_of, forward_recipe, of_any_rows, scalars_of
from ...kernel import launch
from ...operation import NORMS, Operation, added_after
from ...plan.problem import argument_order, backward_reads
from ...plan.steps import Plan
from . import checks, fused_memory, gpu, launching
from .gpu import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What calls of one form have in common. Told apart by identity: `call_of` makes one for each form."""

    function: str
    operation: Operation
    whole: Operation  # with numbers for the operands that are left out
    names: tuple[str, ...]  # of the tensors: x, and operands
    numbers: tuple[str, ...]  # of the operands that are numbers
    demanded: broadcasting.Kinds
    dtype: str | None
    s_dtype: str | None
    sm_margins: tuple[int, int, int] = (0, 0, 0)  # forward, backward, forward where nobody will go back
    recipes: dict[Hashable, Forward] = field(default_factory=dict)
    forms: dict[Hashable, Any] = field(default_factory=dict)  # a recipe of any number of rows, forward or backward
    compiled: dict[Hashable, tuple] = field(default_factory=dict)  # what serves calls in C++ (norm_nodes.py)
    families: dict[Hashable, Family] = field(default_factory=dict)
    masks: dict[tuple[bool, ...], tuple[str, ...]] = field(default_factory=dict)
    reads: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def wanted(self, mask: tuple[bool, ...]) -> tuple[str, ...]:
        """The names of the tensors whose gradients are wanted."""
        found = self.masks.get(mask)
        if found is None:
            named = zip(self.names, mask, strict=True)
            found = self.masks[mask] = tuple(name for name, one in named if one)
        return found

    def saved(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """What the backward pass for such gradients reads of x, the operands and s."""
        found = self.reads.get(wanted)
        if found is None:
            reads = backward_reads(self.operation, wanted, (*self.names, *self.numbers))
            found = self.reads[wanted] = tuple(name for name in reads if name == "s" or name in self.names)
        return found


_calls: dict[Hashable, Call] = {}


def call_of(
    function: str,
    operation: Operation,
    names: tuple[str, ...],
    numbers: tuple[str, ...],
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int] = (0, 0, 0),
) -> Call:
    """`names`: of the operands that are tensors."""
    key = (function, operation, names, numbers, demanded, dtype, s_dtype, sm_margins)
    found = None if torch.compiler.is_compiling() else _calls.get(key)
    if found is None:
        whole = operation.given((*names, *numbers))
        found = Call(function, operation, whole, ("x", *names), numbers, demanded, dtype, s_dtype, sm_margins)
        if not torch.compiler.is_compiling():  # nothing of it is needed after the trace
            launching.keep(_calls, key, found)
    return found


class Family(NamedTuple):
    """The backward passes of calls with tensors of the same shapes and dtypes, each with its recipe."""

    call: Call
    layouts: dict[str, Layout]
    recipes: dict[Hashable, Backward]


class Forward(NamedTuple):
    """`plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # places of tensors that must be made contiguous, of such shapes
    results: tuple[Memory, ...]
    statistics: Memory
    rstd_offset: int  # bytes from mean to rstd, 0 where there is no mean
    order: Callable[[Sequence[float]], tuple[float, ...]] | None  # picks, of all pointers of a call, those of the plan
    family: Family


class Backward(NamedTuple):
    """As Forward."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # places among dy, ds and what was saved
    gradients: tuple[Memory, ...]
    written: tuple[str, ...]  # their names
    places: tuple[int, ...]  # of each gradient that is wanted among those
    # What is yet to be added up of those that are wanted, by place: along which axes, and what it comes to.
    sums: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeros: Memory | None  # what stands for a dy that is not there
    rstd_offset: int
    order: Callable[[Sequence[float]], tuple[float, ...]] | None


def forward(
    call: Call,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    wants_statistics: bool,
    *,
    sm_margin: int,
) -> tuple[list[Tensor], Tensor | None, Family]:
    """(results in the order of `returns`, statistics as formulas.py has them, what `backward` wants)"""
    index = tensors[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return forward(call, tensors, numbers, eps, wants_statistics, sm_margin=sm_margin)
    pointers = [tensor.data_ptr() for tensor in tensors]
    recipe = recipe_of(call, tensors, pointers, sm_margin)
    plan, copies, memory, memory_of_statistics, rstd_offset, order, family = recipe
    results = [gpu.empty(*one) for one in memory]
    statistics = None
    mean_pointer = rstd_pointer = 0
    if wants_statistics:
        statistics = gpu.empty(*memory_of_statistics)
        mean_pointer = statistics.data_ptr()
        rstd_pointer = mean_pointer + rstd_offset
    if plan is None or order is None:
        return results, statistics, family
    if copies:
        tensors = fused_memory.copied(tensors, copies, pointers)
    for result in results:
        pointers.append(result.data_ptr())
    pointers += (mean_pointer, rstd_pointer)
    scalars = (eps,)
    if call.numbers:
        scalars = scalars_of(plan, dict(zip(call.numbers, numbers, strict=True), eps=eps))
    launch.run(plan, index, gpu.stream(index), (*order(pointers), *scalars))
    return results, statistics, family


def recipe_of(call: Call, tensors: Sequence[Tensor], pointers: Sequence[int], sm_margin: int) -> Forward:
    aligned = fused_memory.aligned(call.names, pointers, tensors, tensors[0].shape)
    key = (aligned, sm_margin, *[(one.shape, one.stride(), one.dtype, one.get_device()) for one in tensors])
    recipe = call.recipes.get(key)
    if recipe is None:
        layouts = layouts_of(call, tensors)
        form = form_of(layouts["x"].shape, layouts.values())
        like = None if form is None else call.forms.get((aligned, sm_margin, form))
        if like is None:
            recipe = _forward_recipe(call, tensors, layouts, sm_margin, aligned)
            if form is not None and recipe.plan is not None and not recipe.copies and of_any_rows(recipe.plan):
                launching.keep(call.forms, (aligned, sm_margin, form), recipe)
        else:
            recipe = _forward_of_rows(like, layouts)
        launching.keep(call.recipes, key, recipe)
    return recipe


def _forward_of_rows(like: Forward, layouts: Mapping[str, Layout]) -> Forward:
    """The recipe of a call that differs from an earlier one in its number of rows alone."""
    shape = layouts["x"].shape
    solution = launching.plan_of_rows(like.plan, shape[:-1])
    (statistics, *_), _, dtype = like.statistics
    return like._replace(
        plan=solution,
        results=tuple(gpu.contiguously(shape, dtype) for _, _, dtype in like.results),
        statistics=gpu.contiguously((statistics, *shape[:-1]), dtype),
        rstd_offset=_rstd_offset(solution),
        family=family(like.family.call, layouts),
    )


def layouts_of(call: Call, tensors: Sequence[Tensor]) -> dict[str, Layout]:
    """Of x and the operands that are tensors."""
    return {name: fused_memory.layout(call.function, name, one) for name, one in zip(call.names, tensors, strict=True)}


def _forward_recipe(
    call: Call, tensors: Sequence[Tensor], layouts: dict[str, Layout], sm_margin: int, aligned: bool
) -> Forward:
    recipe = forward_recipe(
        call.function,
        call.operation,
        given_of(call, layouts),
        gpu.properties_of(call.function, tensors[0]),
        demanded=call.demanded,
        dtype=call.dtype,
        s_dtype=call.s_dtype,
        sm_margin=sm_margin,
        aligned=aligned,
    )
    leading = tensors[0].shape[:-1]
    statistics = NORMS[call.operation.norm].statistics
    names = (*call.names, *call.operation.returns, "mean", "rstd")
    return Forward(
        plan=recipe.plan,
        copies=fused_memory.copies(recipe, call.names, {name: one.shape for name, one in layouts.items()}),
        results=tuple(fused_memory.memory(shape, dtype) for _, shape, dtype in recipe.written),
        statistics=fused_memory.memory((len(statistics), *leading), recipe.statistics[0][2]),
        rstd_offset=_rstd_offset(recipe.plan),
        order=None if recipe.plan is None else argument_order(recipe.plan.problem, names),
        family=family(call, layouts),
    )


def given_of(call: Call, layouts: Mapping[str, Layout]) -> dict[str, broadcasting.Given]:
    """x and the operands in the core's order; of a number only that it is one counts."""
    given: dict[str, broadcasting.Given] = {**layouts, **dict.fromkeys(call.numbers, 0.0)}
    return {name: given[name] for name in ("x", *call.operation.operands) if name in given}


def family(call: Call, layouts: Mapping[str, Layout]) -> Family:
    """What `backward` wants to know of tensors that it does not see."""
    contiguous = {name: one._replace(strides=fused_memory.strides(one.shape)) for name, one in layouts.items()}
    key = tuple(contiguous.values())
    found = call.families.get(key)
    return found or launching.keep(call.families, key, Family(call, contiguous, {}))


def given_through(family: Family, wanted: Collection[str], dy: Tensor | None) -> dict[str, Tensor]:
    """The gradients that are dy itself, as that of what is added to a norm: nobody need write them."""
    call, layouts, _ = family
    added = added_after(call.operation, (*call.names, *call.numbers))
    if dy is None or not added:
        return {}
    of_dy = dy.shape, checks.dtype_name(dy.dtype)
    return {name: dy for name in added if name in wanted and (layouts[name].shape, layouts[name].dtype) == of_dy}


def backward(
    family: Family,
    names: tuple[str, ...],
    saved: Sequence[Tensor],
    numbers: Sequence[float],
    dy: Tensor | None,
    ds: Tensor | None,
    statistics: Tensor,
    wanted: tuple[str, ...],
) -> list[Tensor]:
    """The gradients of `wanted`, names of x and of operands; equal ones are one tensor.

    `saved` are the tensors `names`, those of Call.saved at least. Shapes and devices fit: autograd sees to it.
    """
    index = statistics.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return backward(family, names, saved, numbers, dy, ds, statistics, wanted)
    tensors = (dy, ds, *saved)
    pointers = [0 if one is None else one.data_ptr() for one in tensors]
    recipe = backward_recipe_of(family, names, tensors, pointers, statistics, wanted)
    plan, copies, memory, _, places, sums, zeros, rstd_offset, order = recipe
    gradients = [gpu.empty(*one) for one in memory]
    if plan is None or order is None:  # sums over no rows
        return _summed([gradients[place].zero_() for place in places], sums)
    if copies:
        tensors = fused_memory.copied(tensors, copies, pointers)
    if zeros is not None:
        dy = gpu.empty(*zeros).zero_()
        pointers[0] = dy.data_ptr()
    workspace = gpu.empty((plan.workspace,), (1,), torch.uint8) if plan.workspace else None
    if not statistics.is_contiguous():  # vmap may have moved its axes
        statistics = statistics.contiguous()
    mean_pointer = statistics.data_ptr()
    pointers += (mean_pointer, mean_pointer + rstd_offset)
    for gradient in gradients:
        pointers.append(gradient.data_ptr())
    scalars = scalars_of(plan, dict(zip(family.call.numbers, numbers, strict=True))) if numbers else ()
    workspace_pointer = 0 if workspace is None else workspace.data_ptr()
    launch.run(plan, index, gpu.stream(index), (*order(pointers), *scalars), workspace_pointer)
    return _summed([gradients[place] for place in places], sums)


def backward_recipe_of(
    family: Family,
    names: tuple[str, ...],
    tensors: Sequence[Tensor | None],
    pointers: Sequence[int],
    statistics: Tensor,
    wanted: tuple[str, ...],
) -> Backward:
    """`tensors` are dy, ds and those of `names`."""
    names = ("dy", "ds", *names)
    aligned = fused_memory.aligned(names, pointers, tensors, family.layouts["x"].shape)
    key = (wanted, names, aligned, *[None if one is None else (one.stride(), one.dtype) for one in tensors])
    recipe = family.recipes.get(key)
    if recipe is None:
        named = dict(zip(names, tensors, strict=True))
        call, layouts, _ = family
        function = f"backward of {call.function}"
        given = [None if one is None else fused_memory.layout(function, name, one) for name, one in named.items()]
        form = form_of(layouts["x"].shape, (*layouts.values(), *given))
        like = None if form is None else call.forms.get((wanted, names, aligned, form))
        if like is None:
            recipe = _backward_recipe(family, named, statistics, wanted, aligned)
            other = recipe.copies or recipe.sums or recipe.zeros
            if form is not None and recipe.plan is not None and not other and of_any_rows(recipe.plan):
                launching.keep(call.forms, (wanted, names, aligned, form), recipe)
        else:
            recipe = _backward_of_rows(like, layouts["x"].shape)
        launching.keep(family.recipes, key, recipe)
    return recipe


def _backward_of_rows(like: Backward, shape: tuple[int, ...]) -> Backward:
    """The recipe of a backward pass that differs from an earlier one in its number of rows alone; `shape` is x's."""
    solution = launching.plan_of_rows(like.plan, shape[:-1])
    of_shape = [gpu.contiguously(shape, one[2]) if len(one[0]) > 1 else one for one in like.gradients]
    return like._replace(plan=solution, gradients=tuple(of_shape), rstd_offset=_rstd_offset(solution))


def _summed(gradients: list[Tensor], sums: Mapping[int, tuple]) -> list[Tensor]:
    for place, (axes, shape, dtype) in sums.items():
        gradients[place] = gradients[place].sum(axes).reshape(shape).to(dtype)
    return gradients


def _backward_recipe(
    family: Family, tensors: Mapping[str, Tensor | None], statistics: Tensor, wanted: tuple[str, ...], aligned: bool
) -> Backward:
    call, layouts, _ = family
    function = f"backward of {call.function}"
    present = {name: one for name, one in tensors.items() if one is not None}
    read = {
        name: fused_memory.layout(function, name, present[name])
        for name in (*present.keys() & {"dy", "ds"}, *call.saved(wanted))
    }
    of_rows = layouts["x"].shape[:-1]
    read |= {
        name: Layout(
            of_rows, fused_memory.strides(of_rows), checks.dtype_name(statistics.dtype), str(statistics.device)
        )
        for name in NORMS[call.operation.norm].statistics
    }
    recipe = backward_recipe(
        function,
        call.operation,
        given_of(call, layouts) | read,
        wanted,
        gpu.properties_of(call.function, statistics),
        demanded=call.demanded,
        s_dtype=call.s_dtype,
        sm_margin=call.sm_margins[1],
        aligned=aligned,
    )
    written = [name for name, _, _ in recipe.written]
    found = dict(recipe.gradients)
    sums = {wanted.index(name): (axes, shape, getattr(torch, dtype)) for axes, (name, shape, dtype) in recipe.reduced}
    compute = statistics.dtype
    sums |= {place: ((0,), (), compute) for place, name in enumerate(wanted) if found[name] in recipe.totals}
    names = (*tensors, "mean", "rstd", *written)
    return Backward(
        plan=recipe.plan,
        copies=fused_memory.copies(recipe, tuple(tensors), {name: one.shape for name, one in read.items()}),
        gradients=tuple(fused_memory.memory(shape, dtype) for _, shape, dtype in recipe.written),
        written=tuple(written),
        places=tuple(written.index(found[name]) for name in wanted),
        sums=sums,
        zeros=None if recipe.dy is None else fused_memory.memory(*recipe.dy[1:]),
        rstd_offset=_rstd_offset(recipe.plan),
        order=None if recipe.plan is None else argument_order(recipe.plan.problem, names),
    )


def _rstd_offset(plan: Plan | None) -> int:
    if plan is None or not plan.problem.norm.subtracts_mean:
        return 0
    return plan.problem.rows * getattr(torch, plan.problem.compute).itemsize
