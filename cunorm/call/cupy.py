"""Fused operations on CuPy arrays: check, plan, launch on CuPy's current stream; recipes as in cupy_recipes.py."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import cupy
import numpy

from ..cupy_recipes import check_addresses, layout
from ..kernel import device, launch
from ..numpy_arrays import numpy_dtype
from ..operation import NORMS, Operation
from ..plan.problem import FLOAT8
from ..plan.steps import Plan
from ..recipes import Recipes
from . import broadcasting, checks
from .checks import Layout
from .recipe import (
    Recipe,
    backward_recipe,
    backward_twice_recipe,
    form_of,
    forward_recipe,
    one_kernel_norms_twice,
    scalars_of,
)
from .store import Float8Store, scale_of

_recipes: Recipes[Recipe] = Recipes()


def forward(
    function: str,
    operation: Operation,
    x: cupy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
    float8: Float8Store | None = None,
    scale: Any = None,
) -> tuple[dict[str, cupy.ndarray], cupy.ndarray | None, cupy.ndarray | None]:
    """Return ({"y": y, "s": s if it is returned}, mean, rstd), statistics None unless asked for; with `float8` y8 and
    y8_scale, and y if it is wide.
    """
    options = (demanded, dtype, s_dtype, checks.check_sm_margin(function, sm_margin, None), float8)
    found = _run(function, operation, x, operands, eps, options, statistics, scale)
    mean, rstd = found.pop("mean", None), found.pop("rstd", None)
    return found, mean, rstd


def forward_twice(
    function: str,
    operation: Operation,
    x: cupy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
) -> dict[str, cupy.ndarray] | None:
    """y, s and the statistics of both norms, by name, of an operation with a second norm; None where one kernel does
    not do it.
    """
    if not one_kernel_norms_twice(layout(function, "x", x), s_dtype):
        return None
    options = (demanded, dtype, None, checks.check_sm_margin(function, sm_margin, None), None)
    return _run(function, operation, x, operands, eps, options, statistics)


def _run(
    function: str,
    operation: Operation,
    x: cupy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    options: tuple,
    statistics: bool,
    scale: Any = None,
) -> dict[str, cupy.ndarray]:
    """Results and statistics by name; `options` are those of _forward_recipe after the operation."""
    arrays, float8 = {"x": x, **operands}, options[-1]
    eps = checks.check_eps(function, eps)
    options = (operation, *options)
    key = (function, options, _key(function, arrays))
    recipe = _recipes.of(key, _made, key, arrays, _forward_recipe)
    with cupy.cuda.Device(x.data.device_id):
        of_rows = recipe.statistics if statistics else ()
        found = {name: cupy.ndarray(shape, kind) for name, shape, kind in (*recipe.written, *of_rows)}
        if float8 and float8.granularity == "tensor":
            found["y8_scale"] = scale_of(cupy, operation, float8, x.shape[-1], operands, scale)
        if recipe.plan is not None:
            _launch(recipe, recipe.plan, arrays | {"eps": eps}, found)
    return found


def _made(key: tuple, arrays: Mapping[str, Any], make: Callable[..., Recipe]) -> Recipe:
    """The recipe of a key that is new: by that of another number of rows, if there is one, else by `make`."""
    function, options, (aligned, _) = key
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    x = given["x"]
    assert isinstance(x, Layout)
    of_form = form_of(x.shape, given.values())
    form = (function, options, aligned, tuple(given), of_form)
    like = None if of_form is None else _recipes.kept(form)
    if like is not None:
        return like.of_rows(x.shape)
    found = make(function, arrays, given, *options)
    if of_form is not None and found.has_others:
        _recipes.of(form, lambda: found)
    return found


def _forward_recipe(function, arrays, given, operation, demanded, dtype, s_dtype, sm_margin, float8) -> Recipe:
    options = {
        "demanded": demanded,
        "dtype": dtype,
        "s_dtype": s_dtype,
        "sm_margin": sm_margin,
        "aligned": _aligned(arrays),
        "float8": float8,
    }
    gpu = device.current(arrays["x"].data.device_id)
    return forward_recipe(function, operation, given, gpu, **options).with_dtypes(partial(_dtype, function))


def _dtype(function: str, name: str) -> numpy.dtype:
    """CuPy has no formats of 8 bits: their numbers are bytes."""
    return numpy.dtype(numpy.uint8) if name in FLOAT8 else numpy_dtype(function, name)


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: broadcasting.Kinds,
    s_dtype: str | None,
    sm_margin: int,
) -> dict[str, cupy.ndarray]:
    """The gradients `wanted`, by name. `arrays`: x, dy, ds, s, mean, rstd and the operands, None or absent where there
    is none.
    """
    needed = ("x", *NORMS[operation.norm].statistics)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    options = (operation, demanded, tuple(wanted), s_dtype, checks.check_sm_margin(function, sm_margin, None))
    key = (function, options, _key(function, arrays))
    recipe = _recipes.of(key, _made, key, arrays, _backward_recipe)
    with cupy.cuda.Device(arrays["x"].data.device_id):
        # Sums over no rows are zero.
        empty = cupy.ndarray if recipe.plan is not None else cupy.zeros
        results = {name: empty(shape, kind) for name, shape, kind in recipe.written}
        if recipe.plan is not None:
            if recipe.dy is not None:
                arrays["dy"] = cupy.zeros(*recipe.dy[1:])
            _launch(recipe, recipe.plan, arrays, results)
        results = {name: array.sum() if name in recipe.totals else array for name, array in results.items()}
        gradients = {name: results[of] for name, of in recipe.gradients}
        for axes, (name, shape, kind) in recipe.reduced:
            gradients[name] = gradients[name].sum(axes).reshape(shape).astype(kind)
    return gradients


def backward_twice(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    sm_margin: int,
) -> dict[str, cupy.ndarray] | None:
    """The gradients of x and of the residual, and of the weights that are `wanted`, by name, of an operation with a
    second norm; None where one kernel does not do it, or an array is not as it must be.
    """
    if not all(isinstance(array, cupy.ndarray) for array in arrays.values()):
        return None
    options = (operation, tuple(wanted), checks.check_sm_margin(function, sm_margin, None))
    recipe = _recipes.of(
        (function, options, _key(function, arrays)), _backward_twice_recipe, function, arrays, *options
    )
    if recipe.plan is None:
        return None
    with cupy.cuda.Device(arrays["x"].data.device_id):
        results = {name: cupy.ndarray(shape, kind) for name, shape, kind in recipe.written}
        _launch(recipe, recipe.plan, dict(arrays), results)
    return {name: results[of] for name, of in recipe.gradients}


def _backward_twice_recipe(function, arrays, operation, wanted, sm_margin) -> Recipe:
    given = {name: layout(function, name, array) for name, array in arrays.items()}
    gpu = device.current(arrays["x"].data.device_id)
    options = {"sm_margin": checks.check_sm_margin(function, sm_margin, gpu.sms), "aligned": _aligned(arrays)}
    return backward_twice_recipe(operation, given, wanted, gpu, **options).with_dtypes(partial(numpy_dtype, function))


def _backward_recipe(function, arrays, given, operation, demanded, wanted, s_dtype, sm_margin) -> Recipe:
    options = {"demanded": demanded, "s_dtype": s_dtype, "sm_margin": sm_margin, "aligned": _aligned(arrays)}
    gpu = device.current(arrays["x"].data.device_id)
    return backward_recipe(function, operation, given, wanted, gpu, **options).with_dtypes(
        partial(numpy_dtype, function)
    )


def _launch(recipe: Recipe, solution: Plan, arrays: dict[str, Any], written: dict[str, cupy.ndarray]) -> None:
    if recipe.expanded:
        arrays = arrays | {name: cupy.broadcast_to(arrays[name], shape) for name, shape in recipe.expanded}
    if recipe.copies:
        arrays = arrays | {name: cupy.ascontiguousarray(arrays[name]) for name in recipe.copies}
    arrays = arrays | written
    arguments = [arrays[name].data.ptr if name in arrays else 0 for name in solution.problem.pointers]
    arguments += scalars_of(solution, arrays)
    workspace = cupy.cuda.alloc(solution.workspace)
    index = arrays["x"].data.device_id
    stream = cupy.cuda.get_current_stream(index).ptr
    launch.run(solution, index, stream, arguments, workspace.ptr)


def _key(function: str, arrays: Mapping[str, Any]) -> Hashable:
    """All that a recipe is made of. Numbers are not: they may change with every call."""
    layouts, pointers = [], 0
    for name, array in arrays.items():
        if isinstance(array, cupy.ndarray):
            memory = array.data
            pointers |= memory.ptr
            layouts.append((name, array.shape, array.strides, array.dtype, memory.device_id))
        else:
            layouts.append((name, type(array)))
    if pointers % 16:
        check_addresses(function, {name: one for name, one in arrays.items() if isinstance(one, cupy.ndarray)})
    return pointers % 16 == 0 or _aligned(arrays), tuple(layouts)


def _given(function: str, name: str, array: Any) -> broadcasting.Given:
    """What the checks know of an array or a number."""
    if isinstance(array, numbers.Real) and name != "x":
        return broadcasting.number(function, name, array)
    return layout(function, name, array)


def _aligned(arrays: Mapping[str, Any]) -> bool:
    """All arrays that are read by packs begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(
        one.data.ptr % 16 == 0
        for name, one in arrays.items()
        if isinstance(one, cupy.ndarray) and broadcasting.read_by_packs(name, one.shape, arrays["x"].shape)
    )
