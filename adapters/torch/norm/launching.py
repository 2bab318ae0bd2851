"""The norms on plain CUDA tensors: check, plan, launch on torch's current stream, in memory of torch's allocator.

What follows from layouts and options alone is worked out once and kept as a recipe, as in cunorm/call/recipe.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import logs
from ...call.checks import check_sm_margin
from ...kernel import launch
from ...plan.plain_problems import BACKWARD, FORWARD, plain
from ...plan.plan import plan
from ...plan.problem import RowStrides, argument_order
from ...plan.steps import Plan
from . import checks, gpu
from .formulas import compute_dtype
from .repeats import Alike, again, remember

RECIPES = 4096  # kept at most


class Recipe(NamedTuple):
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[bool, ...]  # which inputs must be made contiguous, in the order of the call's tensors
    copied: bool  # any of them
    first: gpu.Memory  # of y, or of dx
    second: gpu.Memory  # of statistics, or of dweight and dbias
    rstd_offset: int  # bytes from mean to rstd, 0 where there is no mean
    order: Callable[..., Any]  # picks, of all pointers and numbers of a call, what the plan takes
    family: Family  # of the backward passes of a forward one
    temporary: bool  # what y, or dx, is to be written to cannot be written by a kernel
    aligned: bool  # all pointers are multiples of 16
    options: tuple  # as `recipe_of` takes them, or (output_mask, sm_margin)


class Family(NamedTuple):
    """The backward passes of one operation over tensors of one shape, each with its recipe.

    Autograd hands from the forward pass to the backward one which family is meant: little is left to tell apart.
    """

    operation: str
    ndim: int
    recipes: dict[Hashable, Recipe]
    known: dict[Hashable, tuple[tuple[Alike, Recipe], ...]]  # by what tensors do not tell


class Call(NamedTuple):
    """What follows for a call of a norm from its options and the layouts of its tensors."""

    recipe: Recipe
    eps: float
    differentiable: bool  # some tensor requires a gradient
    backward_margin: int
    bias_dtype: torch.dtype | None
    compiled: Any = None  # what serves such a call in C++ (norm_nodes.py)


_recipes: dict[Hashable, Recipe] = {}
_families: dict[Hashable, Family] = {}
_calls: dict[Hashable, tuple[tuple[Alike, Any], ...]] = {}  # what follows for a call, by what tensors do not tell


def forward(
    operation: str,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    sm_margin: int,
    wants_statistics: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Family]:
    """(y, statistics, what `backward` wants), statistics as formulas.py has them, None unless wanted.

    `shape` is that of the normalised axes. A call that fits no recipe is checked before one is made, but for `out`.
    """
    recipe = recipe_of(x, weight, bias, (operation, shape, dtype, sm_margin), out)
    y, statistics = forward_by(recipe, x, weight, bias, eps, wants_statistics, out)
    return y, statistics, recipe.family


def earlier_calls(key: Hashable) -> tuple[tuple[Alike, Any], ...]:
    try:
        return _calls.get(key, ())
    except TypeError:  # a size that a trace holds open has no hash
        return ()


def known_call(key: Hashable, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """What was remembered of a call with tensors like these, as repeats.py has it; None for nothing."""
    earlier = earlier_calls(key)
    for known, found in earlier:
        if known(x, weight, bias) if bias is not None else known(x) if weight is None else known(x, weight):
            return found
    return again(_calls, key, tuple(one for one in (x, weight, bias) if one is not None)) if earlier else None


def remember_call(key: Hashable, x: Tensor, weight: Tensor | None, bias: Tensor | None, found: Any) -> None:
    """For `known_call`. What has bias alone is not remembered."""
    if weight is not None or bias is None:
        remember(_calls, key, tuple(one for one in (x, weight, bias) if one is not None), found, RECIPES)


def recipe_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, options: tuple, out: Tensor | None = None
) -> Recipe:
    """That of a forward pass; `options` are (operation, shape, dtype, sm_margin)."""
    pointers = x.data_ptr()
    weight_key = bias_key = out_key = None
    if weight is not None:
        pointers |= weight.data_ptr()
        weight_key = (weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous())
    if bias is not None:
        pointers |= bias.data_ptr()
        bias_key = (bias.shape, bias.dtype, bias.get_device(), bias.is_contiguous())
    if out is not None:
        pointers |= out.data_ptr()
        out_key = out.stride()
    aligned = pointers & 15 == 0
    key = (options, x.shape, x.stride(), x.dtype, x.get_device(), weight_key, bias_key, out_key, aligned)
    recipe = _recipes.get(key)
    if recipe is None:
        form = None  # the key, but for the number of rows
        if out is None and x.is_contiguous() and x.numel():
            _, shape, *_ = options
            form = (options, x.shape[-len(shape) :], x.dtype, x.get_device(), weight_key, bias_key, aligned)
        like = _recipes.get(form)
        made = _forward_recipe(options, x, weight, bias, out, aligned) if like is None else _of_rows(like, x)
        recipe = keep(_recipes, key, made)
        if like is None and form is not None and made.plan is not None and not made.copied:
            keep(_recipes, form, made)
    return recipe


def _of_rows(like: Recipe, x: Tensor) -> Recipe:
    """The recipe of a call that differs from an earlier one in its number of rows alone."""
    operation, ndim, *_ = like.family
    leading = x.shape[:-ndim]
    solution, second = plan_of_rows(like.plan, leading), like.second
    problem = solution.problem
    if problem.direction == "forward":
        second = gpu.contiguously((1 + problem.norm.subtracts_mean, *leading), second[2])
    return like._replace(
        plan=solution,
        first=gpu.contiguously(x.shape, like.first[2]),
        second=second,
        rstd_offset=like.rstd_offset // like.plan.problem.rows * problem.rows,
        family=family(operation, ndim, x),
    )


def plan_of_rows(like: Plan, leading: Sequence[int]) -> Plan:
    """The plan of a call that differs from an earlier one in its number of rows alone."""
    return plan(like.problem.of_rows(math.prod(leading)), like.device)


def forward_by(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    wants_statistics: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y, statistics) by a recipe made of such tensors, wherever they lie."""
    index = x.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return forward_by(recipe, x, weight, bias, eps, wants_statistics, out)
    plan, copies, copied, first, second, rstd_offset, order, _, temporary, aligned, options = recipe
    x_pointer = x.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    bias_pointer = 0 if bias is None else bias.data_ptr()
    out_pointer = 0 if out is None else out.data_ptr()
    if ((x_pointer | weight_pointer | bias_pointer | out_pointer) & 15 == 0) is not aligned:
        return forward_by(recipe_of(x, weight, bias, options, out), x, weight, bias, eps, wants_statistics, out)
    y = gpu.empty(*first) if out is None or temporary else out
    statistics = None
    mean_pointer = rstd_pointer = 0
    if wants_statistics:
        statistics = gpu.empty(*second)
        mean_pointer = statistics.data_ptr()  # rms_norm's kernels write none
        rstd_pointer = mean_pointer + rstd_offset
    if plan is None:
        return y if out is None else out, statistics
    if copied:
        x, weight, bias = gpu.contiguous((x, weight, bias), copies)
        x_pointer, weight_pointer, bias_pointer = gpu.pointer(x), gpu.pointer(weight), gpu.pointer(bias)
    given = (x_pointer, weight_pointer, bias_pointer, y.data_ptr(), mean_pointer, rstd_pointer, eps)
    launch.run(plan, index, gpu.stream(index), order(given))
    return out.copy_(y) if temporary else y, statistics


def _forward_recipe(options, x, weight, bias, out, aligned) -> Recipe:
    operation, shape, dtype, sm_margin = options
    function = checks.function_of(operation)
    ndim = checks.trailing_axes(function, x, shape)
    checks.forward(operation, x, ndim, weight, bias, dtype)
    properties = gpu.properties_of(function, x)
    check_sm_margin(function, sm_margin, properties.sms)
    cols = math.prod(x.shape[-ndim:])
    x_rows, y_rows = gpu.row_strides_of(x, ndim), gpu.row_strides_of(out, ndim)
    temporary = out is not None and y_rows is None
    leading = x.shape[:-ndim]
    problem = plain(
        operation,
        "forward",
        math.prod(leading),
        cols,
        checks.dtype_name(x.dtype),
        None if weight is None else checks.dtype_name(weight.dtype),
        None if bias is None else checks.dtype_name(bias.dtype),
        y=checks.dtype_name(dtype),
        strides=_strides(x=x_rows, y=y_rows),
        sm_margin=sm_margin,
        aligned=aligned,
    )
    copies = (x_rows is None, *(array is not None and not array.is_contiguous() for array in (weight, bias)))
    logs.copied(operation, ("input", "weight", "bias", "out"), (x, weight, bias, out), (*copies, temporary))
    return Recipe(
        plan=plan(problem, properties) if problem.rows else None,
        copies=copies,
        copied=any(copies),
        first=gpu.contiguously(x.shape, dtype),
        second=gpu.contiguously((1 + problem.norm.subtracts_mean, *leading), compute_dtype(x)),
        rstd_offset=problem.rows * compute_dtype(x).itemsize if problem.norm.subtracts_mean else 0,
        order=argument_order(problem, FORWARD),
        family=family(operation, ndim, x),
        temporary=temporary,
        aligned=aligned,
        options=options,
    )


def family(operation: str, ndim: int, x: Tensor) -> Family:
    """What `backward` wants to know of the forward pass."""
    key = (operation, ndim, x.shape, x.get_device())
    return _families.get(key) or keep(_families, key, Family(operation, ndim, {}, {}))


def backward(
    family: Family,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    output_mask: tuple[bool, bool, bool],
    sm_margin: int,
    in_place: bool = False,
    dx_out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where output_mask says so. Shapes and devices fit: autograd sees to it.

    `in_place`: nobody needs dy any more, and dx takes its memory if it can. `dx_out`: where dx is written, checked.
    """
    recipe = backward_recipe_of(family, output_mask, sm_margin, dy, x, weight, dx_out)
    return backward_by(recipe, dy, x, statistics, weight, output_mask, in_place, dx_out)


def known_backward(
    family: Family, dy: Tensor, x: Tensor, weight: Tensor | None, output_mask: tuple[bool, bool, bool], sm_margin: int
) -> Recipe | None:
    """The recipe of a backward pass like an earlier one, as repeats.py has it."""
    key = (output_mask, sm_margin, weight is None)
    for known, recipe in family.known.get(key, ()):
        if known(dy, x) if weight is None else known(dy, x, weight):
            return recipe
    return again(family.known, key, (dy, x) if weight is None else (dy, x, weight))


def remember_backward(
    family: Family, dy: Tensor, x: Tensor, weight: Tensor | None, output_mask: tuple[bool, bool, bool], sm_margin: int
) -> None:
    """For `known_backward`."""
    tensors = (dy, x) if weight is None else (dy, x, weight)
    recipe = backward_recipe_of(family, output_mask, sm_margin, dy, x, weight, None)
    remember(family.known, (output_mask, sm_margin, weight is None), tensors, recipe, RECIPES)


def backward_recipe_of(family, output_mask, sm_margin, dy, x, weight, dx_out) -> Recipe:
    weight_key = out_key = None
    pointers = dy.data_ptr() | x.data_ptr()
    if weight is not None:
        pointers |= weight.data_ptr()
        weight_key = (weight.dtype, weight.is_contiguous())
    if dx_out is not None:
        pointers |= dx_out.data_ptr()
        out_key = dx_out.stride()
    aligned = pointers & 15 == 0
    key = (output_mask, sm_margin, dy.stride(), dy.dtype, x.stride(), x.dtype, weight_key, out_key, aligned)
    recipe = family.recipes.get(key)
    if recipe is None:
        form = None
        if dx_out is None and dy.is_contiguous() and x.is_contiguous() and x.numel():
            of_x = family.operation, family.ndim, x.shape[-family.ndim :], x.dtype, x.get_device()
            form = (*of_x, output_mask, sm_margin, dy.dtype, weight_key, aligned)
        recipe = _recipes.get(form)
        if recipe is None:
            recipe = _backward_recipe(family, output_mask, sm_margin, dy, x, weight, dx_out, aligned)
            if form is not None and recipe.plan is not None and not recipe.copied:
                keep(_recipes, form, recipe)
        else:
            recipe = _of_rows(recipe, x)
        keep(family.recipes, key, recipe)
    return recipe


def backward_by(
    recipe: Recipe,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    output_mask: tuple[bool, bool, bool],
    in_place: bool = False,
    dx_out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `backward`, by a recipe made of such tensors, wherever they lie."""
    index = x.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return backward_by(recipe, dy, x, statistics, weight, output_mask, in_place, dx_out)
    plan, copies, copied, first, second, rstd_offset, order, family, temporary, aligned, options = recipe
    dy_pointer, x_pointer = dy.data_ptr(), x.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    out_pointer = 0 if dx_out is None else dx_out.data_ptr()
    if ((dy_pointer | x_pointer | weight_pointer | out_pointer) & 15 == 0) is not aligned:
        recipe = backward_recipe_of(family, *options, dy, x, weight, dx_out)
        return backward_by(recipe, dy, x, statistics, weight, output_mask, in_place, dx_out)
    wants_dx, wants_dweight, wants_dbias = output_mask
    dx = dweight = dbias = None
    dx_pointer = dweight_pointer = dbias_pointer = workspace_pointer = 0
    if wants_dx:
        if dx_out is not None and not temporary:
            dx = dx_out
        else:
            dx = dy if in_place and takes_dx(dy, plan, first) else gpu.empty(*first)
        dx_pointer = dx.data_ptr()
    if wants_dweight:
        dweight = gpu.empty(*second)
        dweight_pointer = dweight.data_ptr()
    if wants_dbias:
        dbias = gpu.empty(*second)
        dbias_pointer = dbias.data_ptr()
    if plan is None:  # sums over no rows
        dx = dx if dx_out is None else dx_out
        return dx, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    if copied:
        dy, x, weight = gpu.contiguous((dy, x, weight), copies)
        dy_pointer, x_pointer, weight_pointer = gpu.pointer(dy), gpu.pointer(x), gpu.pointer(weight)
    if plan.workspace:
        workspace = gpu.empty((plan.workspace,), (1,), torch.uint8)
        workspace_pointer = workspace.data_ptr()
    if not statistics.is_contiguous():  # vmap may have moved its axes
        statistics = statistics.contiguous()
    mean_pointer = statistics.data_ptr()
    read = (dy_pointer, x_pointer, mean_pointer, mean_pointer + rstd_offset, weight_pointer)
    arguments = order((*read, dx_pointer, dweight_pointer, dbias_pointer))
    launch.run(plan, index, gpu.stream(index), arguments, workspace_pointer)
    return dx_out.copy_(dx) if temporary else dx, dweight, dbias


def column_sums(dy: Tensor) -> Tensor:
    """Σ dy over the rows of (rows, cols): a backward pass that is asked for dbias alone reads nothing but dy.

    On an H200 8192 x 12288 49.5 us, torch's sum(0) 57.0; 8192 x 3072 16.6 and 26.8; 16 x 12288 2.2 and 2.5.
    """
    recipe = column_sums_recipe(dy)
    return backward_by(recipe, dy, dy, dy, None, BIAS_ALONE)[2]


BIAS_ALONE = (False, False, True)


def column_sums_recipe(dy: Tensor) -> Recipe:
    key = ("column_sums", dy.shape, dy.dtype)
    recipe = known_call(key, dy, None, None)
    if recipe is None:
        recipe = backward_recipe_of(family("layer_norm", 1, dy), BIAS_ALONE, 0, dy, dy, None, None)
        remember_call(key, dy, None, None, recipe)
    return recipe


def takes_dx(dy: Tensor, plan: Plan | None, dx: tuple) -> bool:
    """Whether dx, of such a shape, strides and dtype, may take the memory of dy."""
    return plan is not None and plan.may_overwrite and (dy.shape, dy.stride(), dy.dtype) == dx


def _backward_recipe(family, output_mask, sm_margin, dy, x, weight, dx_out, aligned) -> Recipe:
    operation, ndim, *_ = family
    function = checks.function_of(operation)
    properties = gpu.properties_of(function, x)
    check_sm_margin(function, sm_margin, properties.sms)
    shape = x.shape[-ndim:]
    cols = math.prod(shape)
    dy_rows, x_rows, dx_rows = (gpu.row_strides_of(tensor, ndim) for tensor in (dy, x, dx_out))
    temporary = dx_out is not None and dx_rows is None
    problem = plain(
        operation,
        "backward",
        math.prod(x.shape[:-ndim]),
        cols,
        checks.dtype_name(x.dtype),
        None if weight is None else checks.dtype_name(weight.dtype),
        y=checks.dtype_name(dy.dtype),
        wanted=[name for name, wanted in zip(("x", "weight", "bias"), output_mask, strict=True) if wanted],
        strides=_strides(x=x_rows, dy=dy_rows, dx=dx_rows),
        sm_margin=sm_margin,
        aligned=aligned,
        overwrites=dx_rows is not None,
    )
    copies = (dy_rows is None, x_rows is None, weight is not None and not weight.is_contiguous())
    names = ("grad_output", "input", "weight", "dx_out")
    logs.copied(f"backward of {family.operation}", names, (dy, x, weight, dx_out), (*copies, temporary))
    return Recipe(
        plan=plan(problem, properties) if problem.rows and any(output_mask) else None,
        copies=copies,
        copied=any(copies),
        first=gpu.contiguously(x.shape, x.dtype),
        second=gpu.contiguously(shape, x.dtype if weight is None else weight.dtype),
        rstd_offset=problem.rows * compute_dtype(x).itemsize if problem.norm.subtracts_mean else 0,
        order=argument_order(problem, BACKWARD),
        family=family,
        temporary=temporary,
        aligned=aligned,
        options=(output_mask, sm_margin),
    )


def keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(kept) >= RECIPES:
        kept.clear()
    kept[key] = value
    return value


def _strides(**rows: RowStrides | None) -> dict[str, RowStrides]:
    """Those of the tensors that are not copied."""
    return {name: strides for name, strides in rows.items() if strides is not None}
