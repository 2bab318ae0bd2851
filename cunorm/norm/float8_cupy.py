"""The norms with y in 8 bits on CuPy arrays: check, plan, launch; recipes as in cupy_recipes.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy

from .. import logs
from ..call import checks
from ..call import store as float8
from ..cupy_arrays import copied
from ..cupy_recipes import aligned, check_addresses, contiguous, kind_of, layout
from ..kernel import device, launch
from ..numpy_arrays import numpy_dtype
from ..plan.plain_problems import FORWARD8, float8_problem
from ..plan.plan import plan
from ..plan.problem import FLOAT8, RowStrides, argument_order
from ..plan.steps import Plan
from ..recipes import Recipes


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    copies: tuple[bool, ...]  # which of x, weight and bias must be made contiguous
    cols: int
    scales: tuple[int, ...]  # their shape
    y: numpy.dtype | None
    largest: float  # number of the format
    order: Callable[..., Any]
    eps: float


_ARRAYS = ("x", "weight", "bias")
_recipes: Recipes[Recipe] = Recipes()


def forward(
    function: str,
    x: cupy.ndarray,
    normalized_shape: int | Sequence[int] | None,
    weight: cupy.ndarray | None,
    bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    granularity: str | int,
    scale: Any,
    dtype: Any,
    sm_margin: int,
    output: bool,
) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray | None]:
    """Return (bytes, scale, y), y None unless asked for."""
    float8.check_granularity(function, granularity, scale)
    arrays = (x, weight, bias)
    options = (normalized_shape, eps, zero_centered_gamma, granularity, dtype, sm_margin, output)
    key = (function, options, tuple(map(kind_of, options)), *map(_key, arrays))
    recipe = _recipes.of(key, _recipe, function, arrays, *options)
    if any(array is not None and array.data.ptr % 16 for array in arrays):
        check_addresses(function, dict(zip(_ARRAYS, arrays, strict=True)))
    with cupy.cuda.Device(recipe.device_id):
        pointers = [0 if array is None else array.data.ptr for array in arrays]
        if True in recipe.copies:
            arrays, pointers = copied(arrays, recipe.copies)
        if granularity != "tensor":
            scales = cupy.ndarray(recipe.scales, numpy.float32)
        elif scale is None:
            layer_norm = function.startswith("layer")
            scales = float8.static_scale(
                cupy, layer_norm, recipe.cols, weight, bias, zero_centered_gamma, recipe.largest
            )
        else:
            scales = cupy.asarray(scale, numpy.float32).reshape(())
        found = cupy.ndarray(x.shape, numpy.uint8)
        y = None if recipe.y is None else cupy.ndarray(x.shape, recipe.y)
        if recipe.plan is not None:
            y_pointer = 0 if y is None else y.data.ptr
            given = (*pointers, scales.data.ptr, found.data.ptr, y_pointer, 0, 0, recipe.eps)
            stream = cupy.cuda.get_current_stream(recipe.device_id).ptr
            launch.run(recipe.plan, recipe.device_id, stream, recipe.order(given))
    return found, scales, y


def _recipe(
    function, arrays, normalized_shape, eps, zero_centered_gamma, granularity, dtype, sm_margin, output
) -> Recipe:
    x, weight, bias = layouts = tuple(
        layout(function, name, array) if array is not None or name == "x" else None
        for name, array in zip(_ARRAYS, arrays, strict=True)
    )
    assert x is not None
    float8.check_x(function, x)
    name = float8.check_format(function, dtype)
    shape, y_dtype = checks.check_forward(
        function, x, normalized_shape, weight, bias, None, None, zero_centered_gamma=zero_centered_gamma
    )
    eps = checks.check_eps(function, eps)
    properties = device.current(int(x.device))
    cols = math.prod(shape)
    rows: RowStrides | None = checks.row_strides(x, len(shape))
    copies = (rows is None, *(array is not None and not contiguous(array) for array in (weight, bias)))
    logs.copied(function, _ARRAYS, layouts, copies)
    task = float8_problem(
        "layer_norm" if function.startswith("layer") else "rms_norm",
        math.prod(x.shape) // cols,
        cols,
        x.dtype,
        weight and weight.dtype,
        bias and bias.dtype,
        y8=name,
        granularity=granularity,
        y=y_dtype if output else None,
        zero_centered_gamma=bool(zero_centered_gamma),
        x_rows=rows,
        sm_margin=checks.check_sm_margin(function, sm_margin, properties.sms),
        aligned=aligned(arrays),
    )
    with numpy.errstate(over="ignore"):
        eps = float(numpy.float32(eps))
    return Recipe(
        plan=plan(task, properties) if task.rows else None,
        device_id=int(x.device),
        copies=copies,
        cols=cols,
        scales=float8.scales_shape(granularity, x.shape[: len(x.shape) - len(shape)], cols),
        y=numpy_dtype(function, y_dtype) if output else None,
        largest=FLOAT8[name],
        order=argument_order(task, FORWARD8),
        eps=eps,
    )


def _key(array: Any) -> Any:
    """What a recipe knows of an array; of what is none, itself: its recipe is an error."""
    if not isinstance(array, cupy.ndarray):
        return array
    return array.shape, array.strides, array.dtype, array.data.device_id, array.data.ptr % 16 == 0
