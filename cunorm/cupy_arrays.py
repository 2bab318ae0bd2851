"""The functions on CuPy arrays: check, plan, launch on CuPy's current stream.

What follows from layouts and options alone (checks, plan, dtypes) is worked out once and kept as a recipe. Where the
microseconds of a call go: `python -m bench.host`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy
import numpy

from . import device, launch, logs
from .norm import checks
from .norm.checks import Layout
from .norm.plan import plan
from .norm.problem import BACKWARD, FORWARD, RowStrides, argument_order, plain
from .norm.steps import Plan
from .numpy_arrays import numpy_dtype
from .recipes import LIMIT, Recipes


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    copies: tuple[bool, ...]  # which inputs must be made contiguous, in the order of the call's arrays; () for none
    x_shape: tuple[int, ...]  # of x, y, dy and dx
    shape: tuple[int, ...]  # of the normalised axes
    leading: tuple[int, ...]  # of the other axes
    dtype: numpy.dtype  # of y, or of dweight and dbias
    statistics: numpy.dtype  # of mean and rstd
    layer_norm: bool
    order: Callable[..., Any]  # picks, of all pointers and numbers of a call, what the plan takes
    layouts: dict[str, Layout | None]  # of the call's arrays, by name
    temporary: bool  # out, or dx_out, cannot be written by a kernel
    # Forward.
    eps: float = 0.0  # rounded as the kernel's parameter is
    # Backward: which gradients are wanted.
    mask: tuple[bool, bool, bool] = (False, False, False)


_FORWARD = ("x", "weight", "bias", "out")
_BACKWARD = ("dy", "x", "mean", "rstd", "weight", "dx_out")
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
        key = (
            function,
            options,
            None if normalized_shape is None else kind_of(normalized_shape),
            type(eps),
            type(sm_margin),
            (x_pointer | weight_pointer | bias_pointer | y_pointer) % 16 == 0,
            (x.shape, x.strides, x.dtype, x.data.device_id),
            None if weight is None else (weight.shape, weight.strides, weight.dtype, weight.data.device_id),
            None if bias is None else (bias.shape, bias.strides, bias.dtype, bias.data.device_id),
            None if out is None else (out.shape, out.strides, out.dtype, out.data.device_id),
        )
    except (AttributeError, TypeError, ValueError):  # as numpy's .data of dates
        _forward_recipe(function, (x, weight, bias, out), *options)  # says which is no array
        raise
    try:
        recipe = _recipes.kept(key)
    except TypeError:  # a list has no hash
        recipe = None
    if recipe is None:
        recipe = _recipes.of(key, _forward_recipe, function, (x, weight, bias, out), *options)
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


def _forward_recipe(function, arrays, normalized_shape, eps, zero_centered_gamma, dtype, sm_margin) -> Recipe:
    x, weight, bias, out = layouts = tuple(
        layout(function, name, array) if array is not None or name == "x" else None
        for name, array in zip(_FORWARD, arrays, strict=True)
    )
    assert x is not None
    if dtype is not None:
        dtype = checks.dtype_name(function, dtype)
    shape, y_dtype = checks.check_forward(
        function, x, normalized_shape, weight, bias, out, dtype, zero_centered_gamma=zero_centered_gamma
    )
    eps = checks.check_eps(function, eps)
    properties = device.current(int(x.device))
    cols = math.prod(shape)
    x_rows, y_rows = (None if array is None else checks.row_strides(array, len(shape)) for array in (x, out))
    copies = (x_rows is None, *(array is not None and not contiguous(array) for array in (weight, bias)))
    temporary = out is not None and y_rows is None
    logs.copied(function, _FORWARD, layouts, (*copies, temporary))
    task = plain(
        "layer_norm" if function.startswith("layer_norm") else "rms_norm",
        "forward",
        math.prod(x.shape) // cols,
        cols,
        x.dtype,
        weight and weight.dtype,
        bias and bias.dtype,
        y=y_dtype,
        zero_centered_gamma=bool(zero_centered_gamma),
        strides=_strides(x=x_rows, y=y_rows),
        sm_margin=checks.check_sm_margin(function, sm_margin, properties.sms),
        aligned=aligned(arrays),
    )
    statistics = numpy.dtype(task.compute)
    with numpy.errstate(over="ignore"):
        eps = float(statistics.type(eps))
    return Recipe(
        plan=plan(task, properties) if task.rows else None,
        device_id=int(x.device),
        copies=copies if True in copies else (),
        x_shape=x.shape,
        shape=shape,
        leading=x.shape[: len(x.shape) - len(shape)],
        dtype=numpy_dtype(function, y_dtype),
        statistics=statistics,
        layer_norm=task.norm.subtracts_mean,
        order=argument_order(task, FORWARD),
        layouts=dict(zip(_FORWARD, layouts, strict=True)),
        temporary=temporary,
        eps=eps,
    )


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
        key = (
            function,
            options,
            type(sm_margin),
            (dy_pointer | x_pointer | mean_pointer | rstd_pointer | weight_pointer | dx_pointer) % 16 == 0,
            (dy.shape, dy.strides, dy.dtype, dy.data.device_id),
            (x.shape, x.strides, x.dtype, x.data.device_id),
            None if mean is None else (mean.shape, mean.strides, mean.dtype, mean.data.device_id),
            (rstd.shape, rstd.strides, rstd.dtype, rstd.data.device_id),
            None if weight is None else (weight.shape, weight.strides, weight.dtype, weight.data.device_id),
            None if dx_out is None else (dx_out.shape, dx_out.strides, dx_out.dtype, dx_out.data.device_id),
        )
    except (AttributeError, TypeError, ValueError):
        _backward_recipe(function, (dy, x, mean, rstd, weight, dx_out), *options)  # says which is no array
        raise
    try:
        recipe = _recipes.kept(key)
    except TypeError:
        recipe = None
    if recipe is None:
        recipe = _recipes.of(key, _backward_recipe, function, (dy, x, mean, rstd, weight, dx_out), *options)
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


def _backward_recipe(function, arrays, zero_centered_gamma, output_mask, sm_margin) -> Recipe:
    layer_norm = function.startswith("layer_norm")
    optional = ("weight", "dx_out") if layer_norm else ("weight", "dx_out", "mean")
    dy, x, mean, rstd, weight, dx_out = layouts = tuple(
        layout(function, name, array) if array is not None or name not in optional else None
        for name, array in zip(_BACKWARD, arrays, strict=True)
    )
    assert dy is not None
    assert x is not None
    assert rstd is not None
    shape = checks.check_backward(function, dy, x, mean, rstd, weight, dx_out, zero_centered_gamma=zero_centered_gamma)
    properties = device.current(int(x.device))
    mask = checks.check_output_mask(function, output_mask, 3 if layer_norm else 2, dx_out)
    cols = math.prod(shape)
    dy_rows, x_rows = (checks.row_strides(array, len(shape)) for array in (dy, x))
    dx_rows = None if dx_out is None else checks.row_strides(dx_out, len(shape))
    small = (array is not None and not contiguous(array) for array in (mean, rstd, weight))
    copies = (dy_rows is None, x_rows is None, *small)
    temporary = dx_out is not None and dx_rows is None
    logs.copied(function, _BACKWARD, layouts, (*copies, temporary))
    task = plain(
        "layer_norm" if layer_norm else "rms_norm",
        "backward",
        math.prod(x.shape) // cols,
        cols,
        x.dtype,
        weight and weight.dtype,
        y=dy.dtype,
        zero_centered_gamma=bool(zero_centered_gamma),
        wanted=[name for name, wanted in zip(("x", "weight", "bias"), mask, strict=True) if wanted],
        strides=_strides(x=x_rows, dy=dy_rows, dx=dx_rows),
        sm_margin=checks.check_sm_margin(function, sm_margin, properties.sms),
        aligned=aligned(arrays),
        overwrites=dx_rows is not None,
    )
    return Recipe(
        plan=plan(task, properties) if task.rows and any(mask) else None,
        device_id=int(x.device),
        copies=copies if True in copies else (),
        x_shape=dy.shape,
        shape=shape,
        leading=rstd.shape,
        dtype=arrays[1].dtype if weight is None else arrays[4].dtype,
        statistics=numpy.dtype(task.compute),
        layer_norm=layer_norm,
        order=argument_order(task, BACKWARD),
        layouts=dict(zip(_BACKWARD, layouts, strict=True)),
        temporary=temporary,
        mask=mask,
    )


def _strides(**rows: RowStrides | None) -> dict[str, RowStrides]:
    """Those of the arrays that are not copied."""
    return {name: strides for name, strides in rows.items() if strides is not None}


def kind_of(option: Any) -> Hashable:
    """Tells 8.0 and True, which are equal to what is allowed, from what is."""
    return tuple(map(type, option)) if type(option) is tuple else type(option)


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


def contiguous(array: Layout) -> bool:
    return checks.row_strides(array, len(array.shape)) is not None


def aligned(arrays: Sequence[Any]) -> bool:
    """All arrays begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(array is None or array.data.ptr % 16 == 0 for array in arrays)


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a CuPy array; TypeError for anything else."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"{function}: {name} must be a CuPy array, as x is; got {type(array).__name__}. Convert one of them."
        )
    itemsize = array.dtype.itemsize
    strides = tuple(stride // itemsize for stride in array.strides)
    return Layout(array.shape, strides, array.dtype.name, array.device.id)
