"""The norms with y in 8 bits on torch tensors: one kernel where it can be launched, else torch's own operators.

The operators are for the CPU, for torch.compile and for whatever listens to calls; their bytes are those of the kernel
where their float32 y is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ... import logs
from ...call import store
from ...kernel import launch
from ...plan.plain_problems import FORWARD8, float8_problem
from ...plan.plan import plan
from ...plan.problem import BLOCK, FLOAT8, argument_order
from ...plan.steps import Plan
from . import checks, formulas, gpu, launching


class Recipe(NamedTuple):
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[bool, ...]  # which of x, weight and bias must be made contiguous
    copied: bool  # any of them
    found: tuple  # (shape, strides, dtype) of y in 8 bits
    scales: tuple
    y: tuple | None
    statistics: tuple
    rstd_offset: int  # bytes from mean to rstd, 0 where there is no mean
    order: Callable[..., Any]
    aligned: bool  # all pointers are multiples of 16
    options: tuple  # as `recipe_of` takes them


_recipes: dict[Hashable, Recipe] = {}


def launched(
    operation: str,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    granularity: str | int,
    name: str,
    scales: Tensor | None,
    sm_margin: int,
    of_y: torch.dtype | None,
    wants_statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(y in 8 bits, scale, y in the dtype `of_y` if there is one, statistics as formulas.py has them if wanted).

    By the kernel, for arguments that are checked. `scales` is one for all, of no axes, which is returned then.
    """
    options = (operation, shape, granularity, name, sm_margin, of_y)
    recipe = recipe_of(x, weight, bias, options)
    return launched_by(recipe, x, weight, bias, eps, scales, wants_statistics)


def recipe_of(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: tuple) -> Recipe:
    """`options` are (operation, shape, granularity, name, sm_margin, of_y), as of `launched`."""
    pointers = x.data_ptr()
    weight_key = bias_key = None
    if weight is not None:
        pointers |= weight.data_ptr()
        weight_key = (weight.dtype, weight.is_contiguous())
    if bias is not None:
        pointers |= bias.data_ptr()
        bias_key = (bias.dtype, bias.is_contiguous())
    aligned = pointers & 15 == 0
    key = (options, x.shape, x.stride(), x.dtype, x.get_device(), weight_key, bias_key, aligned)
    recipe = _recipes.get(key)
    if recipe is None:
        recipe = launching.keep(_recipes, key, _recipe(options, x, weight, bias, aligned))
    return recipe


def launched_by(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scales: Tensor | None,
    wants_statistics: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `launched`, by a recipe made of such tensors, wherever they lie."""
    index = x.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return launched_by(recipe, x, weight, bias, eps, scales, wants_statistics)
    x_pointer = x.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    bias_pointer = 0 if bias is None else bias.data_ptr()
    if ((x_pointer | weight_pointer | bias_pointer) & 15 == 0) is not recipe.aligned:
        recipe = recipe_of(x, weight, bias, recipe.options)
        return launched_by(recipe, x, weight, bias, eps, scales, wants_statistics)
    y_pointer = mean_pointer = rstd_pointer = 0
    y = statistics = None
    found = gpu.empty(*recipe.found)
    if scales is None:
        scales = gpu.empty(*recipe.scales)
    if recipe.y is not None:
        y = gpu.empty(*recipe.y)
        y_pointer = y.data_ptr()
    if wants_statistics:
        statistics = gpu.empty(*recipe.statistics)
        mean_pointer = statistics.data_ptr()  # rms_norm's kernels write none
        rstd_pointer = mean_pointer + recipe.rstd_offset
    if recipe.plan is None:
        return found, scales, y, statistics
    if recipe.copied:
        x, weight, bias = gpu.contiguous((x, weight, bias), recipe.copies)
        x_pointer, weight_pointer, bias_pointer = map(gpu.pointer, (x, weight, bias))
    given = (x_pointer, weight_pointer, bias_pointer, scales.data_ptr(), found.data_ptr(), y_pointer)
    arguments = recipe.order((*given, mean_pointer, rstd_pointer, eps))
    launch.run(recipe.plan, index, gpu.stream(index), arguments)
    return found, scales, y, statistics


def _recipe(options, x, weight, bias, aligned) -> Recipe:
    operation, shape, granularity, name, sm_margin, of_y = options
    norm = checks.function_of(operation)
    cols, x_rows = math.prod(shape), gpu.row_strides_of(x, len(shape))
    copies = (x_rows is None, *(one is not None and not one.is_contiguous() for one in (weight, bias)))
    logs.copied(f"{norm}_fp8", ("x", "weight", "bias"), (x, weight, bias), copies)
    rows = math.prod(x.shape) // cols
    problem = float8_problem(
        norm,
        rows,
        cols,
        checks.dtype_name(x.dtype),
        None if weight is None else checks.dtype_name(weight.dtype),
        None if bias is None else checks.dtype_name(bias.dtype),
        y8=name,
        granularity=granularity,
        y=None if of_y is None else checks.dtype_name(of_y),
        zero_centered_gamma=operation != norm,
        x_rows=x_rows,
        sm_margin=sm_margin,
        aligned=aligned,
    )
    properties = gpu.properties_of(norm, x)
    leading = tuple(x.shape[: x.dim() - len(shape)])
    has_mean = formulas.subtracts_mean(operation)
    contiguously = gpu.contiguously
    return Recipe(
        plan=plan(problem, properties) if problem.rows else None,
        copies=copies,
        copied=any(copies),
        found=contiguously(x.shape, getattr(torch, name)),
        scales=contiguously(store.scales_shape(granularity, leading, cols), torch.float32),
        y=None if of_y is None else contiguously(x.shape, of_y),
        statistics=contiguously((1 + has_mean, *leading), torch.float32),
        rstd_offset=4 * rows * has_mean,
        order=argument_order(problem, FORWARD8),
        aligned=aligned,
        options=options,
    )


def quantise(y: Tensor, granularity: str | int, name: str, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """What kernels_cu/rows/float8.cuh does, of float32 rows, y[rows, cols]; traceable."""
    if scales is not None:
        return rounded(y * scales.reciprocal(), name), scales
    rows, cols = y.shape
    width = BLOCK if granularity == BLOCK else cols
    blocks = -(-cols // width)
    padded = F.pad(y, (0, blocks * width - cols)).reshape(rows, blocks, width)
    multiplier, scales = scaling(padded.abs().amax(dim=2), name)
    return rounded((padded * multiplier[:, :, None]).reshape(rows, blocks * width)[:, :cols], name), scales


def scaling(amax: Tensor, name: str, power_2: bool = False) -> tuple[Tensor, Tensor]:
    """(q, 1 / q) for numbers of which max|v| is `amax`, as kernels_cu/rows/float8.cuh has them."""
    largest = FLOAT8[name]
    quotient = largest / amax
    tiny = quotient > store.MOST_MULTIPLIER
    multiplier = torch.where(tiny, store.MOST_MULTIPLIER, quotient)
    if power_2:
        multiplier = power_of_2(multiplier)
        scale = multiplier.reciprocal()
    else:
        scale = torch.where(tiny, 1 / store.MOST_MULTIPLIER, amax / largest)
    scale = torch.where(amax == 0, 1.0, scale)
    return multiplier, scale + (amax - amax)  # NaN where amax is not finite


def power_of_2(q: Tensor) -> Tensor:
    """Without its mantissa, NaN as it is."""
    return torch.where(torch.isnan(q), q, (q.view(torch.int32) & 0x7F800000).view(torch.float32))


def rounded(values: Tensor, name: str) -> Tensor:
    """To nearest even; what is too large becomes the largest."""
    return values.clamp(-FLOAT8[name], FLOAT8[name]).to(getattr(torch, name))


def bound(operation: str, x: Tensor, ndim: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What no |y_j| exceeds, whatever x is, in float32: of the shape of the normalised axes, the last `ndim` of x."""
    shape = x.shape[-ndim:]
    gamma = x.new_ones(shape, dtype=torch.float32) if weight is None else formulas.gamma(operation, weight, x)
    found = gamma.abs() * store.largest_normalised(formulas.subtracts_mean(operation), math.prod(shape))
    return found if bias is None else found + bias.float().abs()


def _static_scale(
    operation: str, x: Tensor, ndim: int, weight: Tensor | None, bias: Tensor | None, name: str
) -> Tensor:
    """As norm/float8.py has it of arrays."""
    found = bound(operation, x, ndim, weight, bias).amax() / FLOAT8[name]
    return torch.where(found > 0, found, 1.0)
