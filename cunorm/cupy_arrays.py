"""The functions on CuPy arrays: find the recipe, allocate, launch on CuPy's current stream.

What follows from layouts and options alone is worked out once and kept, by cupy_recipes.py. Where the microseconds of a
call go: `python -m bench.host`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import cupy

from .call import checks
from .cupy_recipes import (
    BACKWARD_ARRAYS,
    FORWARD_ARRAYS,
    Recipe,
    backward_recipe,
    check_addresses,
    forward_recipe,
    kind_of,
)
from .kernel import launch
from .recipes import LIMIT, Recipes

_recipes: Recipes[Recipe] = Recipes()
_current_device = cupy.cuda.runtime.getDevice
_current_stream = cupy.cuda.get_current_stream

# forward and backward spell the key out and call few Python functions: on an H200's host every array costs 0.3 us and
# every call 0.1 us, of 7.7 in all.


def forward(
    function: str,
    x: cupy.ndarray,
    normalized_shape: int | Sequence[int] | None,
    weight: cupy.ndarray | None,
    bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: cupy.ndarray | None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    options = (normalized_shape, eps, zero_centered_gamma, dtype, sm_margin)
    try:
        x_pointer = x.data.ptr
        weight_pointer = 0 if weight is None else weight.data.ptr
        bias_pointer = 0 if bias is None else bias.data.ptr
        y_pointer = 0 if out is None else out.data.ptr
        low = (x_pointer | weight_pointer | bias_pointer | y_pointer) % 16
        key = (
            function,
            options,
            None if normalized_shape is None else kind_of(normalized_shape),
            type(eps),
            type(sm_margin),
            low == 0,
            (x.shape, x.strides, x.dtype, x.data.device_id),
            None if weight is None else (weight.shape, weight.strides, weight.dtype, weight.data.device_id),
            None if bias is None else (bias.shape, bias.strides, bias.dtype, bias.data.device_id),
            None if out is None else (out.shape, out.strides, out.dtype, out.data.device_id),
        )
    except (AttributeError, TypeError, ValueError):  # as numpy's .data of dates
        forward_recipe(function, (x, weight, bias, out), *options)  # says which is no array
        raise
    try:
        recipe = _recipes.kept(key)
    except (TypeError, ValueError):  # a list has no hash
        recipe = None
    if recipe is None:
        form = None
        if out is None and _have_rows(x):
            form = (*key[:6], x.shape[-1], x.dtype, x.data.device_id, *key[7:])
        recipe = _recipe(key, form, x.shape, forward_recipe, function, (x, weight, bias, out), *options)
    if low % recipe.widest:
        check_addresses(function, dict(zip(FORWARD_ARRAYS, (x, weight, bias, out), strict=True)))
    device_id = recipe.device_id
    if device_id != _current_device():
        with cupy.cuda.Device(device_id):
            return forward(
                function,
                x,
                normalized_shape,
                weight,
                bias,
                eps,
                zero_centered_gamma=zero_centered_gamma,
                out=out,
                dtype=dtype,
                sm_margin=sm_margin,
                statistics=statistics,
            )
    y = out
    if out is not None:
        _check_out_memory(function, recipe, (x_pointer, weight_pointer, bias_pointer, y_pointer))
    if recipe.copies:
        (x, weight, bias), (x_pointer, weight_pointer, bias_pointer) = copied((x, weight, bias), recipe.copies)
    if out is None or recipe.temporary:
        y = cupy.ndarray(recipe.x_shape, recipe.dtype)
        y_pointer = y.data.ptr
    mean = rstd = None
    mean_pointer = rstd_pointer = 0
    if statistics:
        rstd = cupy.ndarray(recipe.leading, recipe.statistics)
        rstd_pointer = rstd.data.ptr
        if recipe.layer_norm:
            mean = cupy.ndarray(recipe.leading, recipe.statistics)
            mean_pointer = mean.data.ptr
    if recipe.plan is not None:
        given = (x_pointer, weight_pointer, bias_pointer, y_pointer, mean_pointer, rstd_pointer, recipe.eps)
        launch.run(recipe.plan, device_id, _current_stream(device_id).ptr, recipe.order(given))
    if out is not None and recipe.temporary:
        out[...] = y
        y = out
    return y, mean, rstd


def backward(
    function: str,
    dy: cupy.ndarray,
    x: cupy.ndarray,
    mean: cupy.ndarray | None,
    rstd: cupy.ndarray,
    weight: cupy.ndarray | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    dx_out: cupy.ndarray | None,
    sm_margin: int,
) -> tuple[cupy.ndarray | None, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    options = (zero_centered_gamma, output_mask, sm_margin)
    try:
        dy_pointer, x_pointer, rstd_pointer = dy.data.ptr, x.data.ptr, rstd.data.ptr
        mean_pointer = 0 if mean is None else mean.data.ptr
        weight_pointer = 0 if weight is None else weight.data.ptr
        dx_pointer = 0 if dx_out is None else dx_out.data.ptr
        low = (dy_pointer | x_pointer | mean_pointer | rstd_pointer | weight_pointer | dx_pointer) % 16
        key = (
            function,
            options,
            type(sm_margin),
            low == 0,
            (dy.shape, dy.strides, dy.dtype, dy.data.device_id),
            (x.shape, x.strides, x.dtype, x.data.device_id),
            None if mean is None else (mean.shape, mean.strides, mean.dtype, mean.data.device_id),
            (rstd.shape, rstd.strides, rstd.dtype, rstd.data.device_id),
            None if weight is None else (weight.shape, weight.strides, weight.dtype, weight.data.device_id),
            None if dx_out is None else (dx_out.shape, dx_out.strides, dx_out.dtype, dx_out.data.device_id),
        )
    except (AttributeError, TypeError, ValueError):
        backward_recipe(function, (dy, x, mean, rstd, weight, dx_out), *options)  # says which is no array
        raise
    try:
        recipe = _recipes.kept(key)
    except (TypeError, ValueError):
        recipe = None
    if recipe is None:
        form, of_rows = None, (dy, x, rstd) if mean is None else (dy, x, rstd, mean)
        shapes_fit = dy.shape == x.shape and all(one.shape == x.shape[:-1] for one in of_rows[2:])
        if dx_out is None and shapes_fit and _have_rows(*of_rows):
            form = (*key[:4], x.shape[-1], *[(one.dtype, one.data.device_id) for one in of_rows], *key[8:])
        arrays = (dy, x, mean, rstd, weight, dx_out)
        recipe = _recipe(key, form, x.shape, backward_recipe, function, arrays, *options)
    if low % recipe.widest:
        check_addresses(function, dict(zip(BACKWARD_ARRAYS, (dy, x, mean, rstd, weight, dx_out), strict=True)))
    device_id = recipe.device_id
    if device_id != _current_device():
        with cupy.cuda.Device(device_id):
            return backward(
                function,
                dy,
                x,
                mean,
                rstd,
                weight,
                zero_centered_gamma=zero_centered_gamma,
                output_mask=output_mask,
                dx_out=dx_out,
                sm_margin=sm_margin,
            )
    pointers = (dy_pointer, x_pointer, mean_pointer, rstd_pointer, weight_pointer)
    if dx_out is not None:
        _check_out_memory(function, recipe, (*pointers, dx_pointer))
    wants_dx, wants_dweight, wants_dbias = recipe.mask
    # Sums over no rows are zero.
    empty = cupy.ndarray if recipe.plan is not None else cupy.zeros
    dx = dx_out
    if wants_dx and (dx_out is None or recipe.temporary):
        dx = empty(recipe.x_shape, x.dtype)
        dx_pointer = dx.data.ptr
    dweight = dbias = None
    dweight_pointer = dbias_pointer = 0
    if wants_dweight:
        dweight = empty(recipe.shape, recipe.dtype)
        dweight_pointer = dweight.data.ptr
    if wants_dbias:
        dbias = empty(recipe.shape, recipe.dtype)
        dbias_pointer = dbias.data.ptr
    if recipe.plan is not None:
        if recipe.copies:
            (dy, x, mean, rstd, weight), pointers = copied((dy, x, mean, rstd, weight), recipe.copies)
        workspace = cupy.cuda.alloc(recipe.plan.workspace)
        arguments = recipe.order((*pointers, dx_pointer, dweight_pointer, dbias_pointer))
        launch.run(recipe.plan, device_id, _current_stream(device_id).ptr, arguments, workspace.ptr)
    if dx_out is not None and recipe.temporary:
        dx_out[...] = dx
        dx = dx_out
    return dx, dweight, dbias


def _have_rows(*arrays: cupy.ndarray) -> bool:
    """Whether arrays have rows, all beside each other."""
    return all(one.ndim and one.size and one.flags.c_contiguous for one in arrays)


def _recipe(key: Hashable, form: Hashable, x_shape: tuple[int, ...], make: Any, *arguments: Any) -> Recipe:
    """A recipe that is not kept yet. `form` is the key but for the number of rows, None where strides depend on it: of
    a call whose last axis alone is normalised the recipe follows from that of another number of rows.
    """
    try:
        like = None if form is None else _recipes.kept(form)
    except (TypeError, ValueError):
        form = like = None
    if like is not None:
        return _recipes.of(key, like.of_rows, x_shape)
    recipe = _recipes.of(key, make, *arguments)
    if form is not None and recipe.plan is not None and not recipe.copies and len(recipe.shape) == 1:
        _recipes.of(form, lambda: recipe)
    return recipe


@lru_cache(maxsize=LIMIT)
def _check_out_memory(function: str, recipe: Recipe, pointers: tuple[int, ...]) -> None:
    """Of the last array. Kept, as the same memory comes again and again: without that 9 us of a call with `out`."""
    named = zip(recipe.layouts.items(), pointers, strict=True)
    *inputs, out = [(name, layout, pointer) for (name, layout), pointer in named if layout is not None]
    checks.check_out_memory(function, *out, inputs, len(recipe.shape))


def copied(arrays: Sequence[Any], copies: Sequence[bool]) -> tuple[list[Any], list[int]]:
    """The arrays, contiguous where `copies` says so, and their pointers. Hold the arrays until the launch."""
    arrays = [cupy.ascontiguousarray(array) if copy else array for array, copy in zip(arrays, copies, strict=True)]
    return arrays, [0 if array is None else array.data.ptr for array in arrays]
