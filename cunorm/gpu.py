"""The functions on CuPy arrays: check, plan, launch on CuPy's current stream.

What follows from layouts and options alone (checks, plan, dtypes) is worked out once and kept as a recipe: a call then
costs about as much as a bare launch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy

from . import device, launch, problem
from .host import numpy_dtype
from .plan import Plan, plan
from .problem import Layout, Problem

RECIPES = 4096  # kept at most


class Recipe(NamedTuple):
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    copies: tuple[bool, ...]  # which inputs must be made contiguous, in the order of the call's arrays
    shape: tuple[int, ...]  # of the normalised axes
    leading: tuple[int, ...]  # of the other axes
    dtype: numpy.dtype  # of y, or of dweight and dbias
    statistics: numpy.dtype  # of mean and rstd
    # Forward: out cannot be written by a kernel. Backward: not used.
    temporary: bool
    # Backward: which gradients are wanted.
    mask: tuple[bool, bool, bool]


_recipes: dict[Hashable, Recipe] = {}


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
    recipe = _recipe(_forward_recipe, function, (x, weight, bias, out), options)
    if out is not None:
        _check_out_memory(function, x, weight, bias, out, len(recipe.shape))
    with _on_device(recipe.device_id):
        return _run_forward(recipe, function, x, weight, bias, eps, out, statistics)


def _forward_recipe(function, arrays, normalized_shape, eps, zero_centered_gamma, dtype, sm_margin) -> Recipe:
    names = ("x", "weight", "bias", "out")
    x, weight, bias, out = (
        layout(function, name, array) if array is not None or name == "x" else None
        for name, array in zip(names, arrays, strict=True)
    )
    assert x is not None
    if dtype is not None:
        dtype = problem.dtype_name(function, dtype)
    shape, y_dtype = problem.check_forward(
        function, x, normalized_shape, weight, bias, out, dtype, zero_centered_gamma=zero_centered_gamma
    )
    problem.check_eps(function, eps)
    properties = device.current(int(x.device))
    cols = math.prod(shape)
    x_stride, y_stride = (None if array is None else problem.row_stride(array, len(shape)) for array in (x, out))
    copies = (x_stride is None, *(array is not None and not _contiguous(array) for array in (weight, bias)))
    temporary = out is not None and y_stride is None
    task = Problem(
        op="layer_norm" if function.startswith("layer_norm") else "rms_norm",
        direction="forward",
        rows=math.prod(x.shape) // cols,
        cols=cols,
        x=x.dtype,
        y=y_dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=cols if x_stride is None else x_stride,
        y_stride=cols if y_stride is None else y_stride,
        sm_margin=problem.check_sm_margin(function, sm_margin, properties.sms),
        aligned=_aligned(arrays, (*copies, temporary)),
    )
    return Recipe(
        plan=plan(task, properties) if task.rows else None,
        device_id=int(x.device),
        copies=copies,
        shape=shape,
        leading=x.shape[: len(x.shape) - len(shape)],
        dtype=numpy_dtype(function, y_dtype),
        statistics=numpy.dtype(task.statistics),
        temporary=temporary,
        mask=(False, False, False),
    )


def _run_forward(recipe: Recipe, function: str, x, weight, bias, eps, out, statistics: bool):
    y = cupy.ndarray(x.shape, recipe.dtype) if out is None or recipe.temporary else out
    rstd = cupy.ndarray(recipe.leading, recipe.statistics) if statistics else None
    mean = cupy.ndarray(recipe.leading, recipe.statistics) if statistics and function[0] == "l" else None
    if recipe.plan is not None:
        if True in recipe.copies:
            x, weight, bias = _copied((x, weight, bias), recipe.copies)
        launch.run_forward(
            recipe.plan,
            recipe.device_id,
            x=x.data.ptr,
            y=y.data.ptr,
            weight=0 if weight is None else weight.data.ptr,
            bias=0 if bias is None else bias.data.ptr,
            mean=0 if mean is None else mean.data.ptr,
            rstd=0 if rstd is None else rstd.data.ptr,
            eps=eps,
        )
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
    sm_margin: int,
) -> tuple[cupy.ndarray | None, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    options = (zero_centered_gamma, output_mask, sm_margin)
    recipe = _recipe(_backward_recipe, function, (dy, x, mean, rstd, weight), options)
    with _on_device(recipe.device_id):
        return _run_backward(recipe, dy, x, mean, rstd, weight)


def _backward_recipe(function, arrays, zero_centered_gamma, output_mask, sm_margin) -> Recipe:
    layer_norm = function.startswith("layer_norm")
    optional = ("weight",) if layer_norm else ("weight", "mean")
    dy, x, mean, rstd, weight = (
        layout(function, name, array) if array is not None or name not in optional else None
        for name, array in zip(("dy", "x", "mean", "rstd", "weight"), arrays, strict=True)
    )
    assert dy is not None
    assert x is not None
    assert rstd is not None
    shape = problem.check_backward(function, dy, x, mean, rstd, weight, zero_centered_gamma=zero_centered_gamma)
    properties = device.current(int(x.device))
    mask = problem.check_output_mask(function, output_mask, 3 if layer_norm else 2)
    cols = math.prod(shape)
    dy_stride, x_stride = (problem.row_stride(array, len(shape)) for array in (dy, x))
    small = (array is not None and not _contiguous(array) for array in (mean, rstd, weight))
    copies = (dy_stride is None, x_stride is None, *small)
    task = Problem(
        op="layer_norm" if layer_norm else "rms_norm",
        direction="backward",
        rows=math.prod(x.shape) // cols,
        cols=cols,
        x=x.dtype,
        y=dy.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=cols if x_stride is None else x_stride,
        y_stride=cols if dy_stride is None else dy_stride,
        sm_margin=problem.check_sm_margin(function, sm_margin, properties.sms),
        aligned=_aligned(arrays, copies),
        output_mask=mask,
    )
    return Recipe(
        plan=plan(task, properties) if task.rows and any(mask) else None,
        device_id=int(x.device),
        copies=copies,
        shape=shape,
        leading=rstd.shape,
        dtype=arrays[1].dtype if weight is None else arrays[4].dtype,
        statistics=numpy.dtype(task.statistics),
        temporary=False,
        mask=mask,
    )


def _run_backward(recipe: Recipe, dy, x, mean, rstd, weight):
    wants_dx, wants_dweight, wants_dbias = recipe.mask
    # Sums over no rows are zero.
    empty = cupy.ndarray if recipe.plan is not None else cupy.zeros
    dx = empty(x.shape, x.dtype) if wants_dx else None
    dweight = empty(recipe.shape, recipe.dtype) if wants_dweight else None
    dbias = empty(recipe.shape, recipe.dtype) if wants_dbias else None
    if recipe.plan is not None:
        if True in recipe.copies:
            dy, x, mean, rstd, weight = _copied((dy, x, mean, rstd, weight), recipe.copies)
        workspace = cupy.cuda.alloc(recipe.plan.workspace)
        launch.run_backward(
            recipe.plan,
            recipe.device_id,
            x=x.data.ptr,
            dy=dy.data.ptr,
            weight=0 if weight is None else weight.data.ptr,
            mean=0 if mean is None else mean.data.ptr,
            rstd=rstd.data.ptr,
            dx=0 if dx is None else dx.data.ptr,
            dweight=0 if dweight is None else dweight.data.ptr,
            dbias=0 if dbias is None else dbias.data.ptr,
            workspace=workspace.ptr,
        )
    return dx, dweight, dbias


def _recipe(make: Callable[..., Recipe], function: str, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Recipe:
    """The recipe of a call. Whatever is no array, or cannot be a key, is left to `make`, which knows what to say."""
    try:
        key = (
            function,
            options,
            *map(type, options),  # 8.0 and True are equal to what is allowed, and are not
            *[
                None if a is None else (a.shape, a.strides, a.dtype, a.data.device_id, a.data.ptr % 16 == 0)
                for a in arrays
            ],
        )
        recipe = _recipes.get(key)
    except (AttributeError, TypeError, ValueError):
        return make(function, arrays, *options)
    if recipe is None:
        if len(_recipes) >= RECIPES:
            _recipes.clear()
        recipe = _recipes[key] = make(function, arrays, *options)
    return recipe


def _on_device(device_id: int) -> Any:
    return _HERE if cupy.cuda.runtime.getDevice() == device_id else cupy.cuda.Device(device_id)


_HERE = contextlib.nullcontext()


def _check_out_memory(function: str, x, weight, bias, out, normalized_ndim: int) -> None:
    inputs = [
        (name, layout(function, name, array), array.data.ptr)
        for name, array in (("x", x), ("weight", weight), ("bias", bias))
        if array is not None
    ]
    problem.check_out_memory(function, layout(function, "out", out), out.data.ptr, inputs, normalized_ndim)


def _copied(arrays: Sequence[Any], copies: Sequence[bool]) -> list[Any]:
    return [cupy.ascontiguousarray(array) if copy else array for array, copy in zip(arrays, copies, strict=True)]


def _contiguous(array: Layout) -> bool:
    return problem.row_stride(array, len(array.shape)) is not None


def _aligned(arrays: Sequence[Any], copied: Sequence[bool]) -> bool:
    """All arrays that the kernels see begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(array is None or copy or array.data.ptr % 16 == 0 for array, copy in zip(arrays, copied, strict=True))


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a CuPy array; TypeError for anything else."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"{function}: {name} must be a CuPy array, as x is; got {type(array).__name__}. Convert one of them."
        )
    itemsize = array.dtype.itemsize
    strides = tuple(stride // itemsize for stride in array.strides)
    return Layout(array.shape, strides, array.dtype.name, array.device.id)


def from_dlpack(function: str, name: str, array: Any) -> cupy.ndarray | None:
    """A CuPy view of a DLPack producer's array, ordered after its producer on CuPy's current stream."""
    if array is None or isinstance(array, cupy.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{function}: {name} must be an array with __dlpack__, as x is; got {type(array).__name__}.")
    if int(array.__dlpack_device__()[0]) == 1:
        raise ValueError(f"{function}: {name} must be on the device of x; got an array on the host. Move one of them.")
    try:
        return cupy.from_dlpack(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"{function}: CuPy cannot use the GPU that {name} is on: {error}. Compare the driver, by nvidia-smi, with "
            "what `python -m cunorm info` says."
        ) from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{function}: {name} cannot be read through DLPack: {error}") from error
