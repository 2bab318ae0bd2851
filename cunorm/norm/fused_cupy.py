"""Fused operations on CuPy arrays: check, plan, launch on CuPy's current stream; recipes as in cupy_arrays.py."""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy

from .. import device, launch, logs
from ..cupy_arrays import layout
from ..numpy_arrays import numpy_dtype
from ..operation import NORMS, Operation
from ..recipes import Recipes
from . import checks, fused
from .checks import Layout
from .plan import Plan, plan
from .problem import Problem, RowStrides, backward_problem, compute_dtype, forward_problem


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    copies: tuple[str, ...]  # the arrays that must be made contiguous
    written: tuple[tuple[str, tuple[int, ...], numpy.dtype], ...]  # names, shapes and dtypes of what is allocated
    # Forward.
    statistics: tuple[tuple[str, tuple[int, ...], numpy.dtype], ...] = ()
    eps: float = 0.0  # rounded as the kernel's parameter is
    # Backward.
    dy: tuple[tuple[int, ...], numpy.dtype] | None = None  # of the zeros that stand for a dy that was not given
    gradients: tuple[tuple[str, str], ...] = ()  # which of those written is the gradient of each name
    totals: frozenset[str] = frozenset()  # of those written: sums of columns that are yet to be added up


_recipes: Recipes[Recipe] = Recipes()


def forward(
    function: str,
    operation: Operation,
    x: cupy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: fused.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
) -> tuple[dict[str, cupy.ndarray], cupy.ndarray | None, cupy.ndarray | None]:
    """Return ({"y": y, "s": s if it is returned}, mean, rstd), statistics None unless asked for."""
    arrays = {"x": x, **operands}
    options = (operation, demanded, eps, dtype, s_dtype)
    key = (function, options, type(eps), _key(arrays))
    recipe = _recipes.of(key, _forward_recipe, function, arrays, *options)
    with cupy.cuda.Device(recipe.device_id):
        results = {name: cupy.ndarray(shape, kind) for name, shape, kind in recipe.written}
        of_rows = {name: cupy.ndarray(shape, kind) for name, shape, kind in recipe.statistics if statistics}
        if recipe.plan is not None:
            _launch(recipe, recipe.plan, arrays, results | of_rows)
    return results, of_rows.get("mean"), of_rows.get("rstd")


def _forward_recipe(function, arrays, operation, demanded, eps, dtype, s_dtype) -> Recipe:
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: one for name, one in given.items() if name != "x"}
    kinds = fused.check_operands(function, x, operands, demanded=demanded)
    eps = checks.check_eps(function, eps)
    row_dtype = s_dtype or x.dtype
    compute = compute_dtype(row_dtype)
    dtypes = _dtypes(given, compute) | {"y": dtype or x.dtype}
    if operation.prologue is not None:
        dtypes["s"] = row_dtype
    task = forward_problem(
        operation,
        math.prod(x.shape[:-1]),
        x.shape[-1],
        dtypes,
        kinds=kinds,
        strides=_strides(given, kinds),
        aligned=_aligned(arrays),
    )
    of_rows = (x.shape[:-1], numpy.dtype(compute))
    return Recipe(
        plan=plan(task, device.current(int(x.device))) if task.rows else None,
        device_id=int(x.device),
        copies=_copies(function, given, kinds),
        written=tuple((name, x.shape, numpy_dtype(function, dtypes[name])) for name in operation.returns),
        statistics=tuple((name, *of_rows) for name in NORMS[operation.norm].statistics),
        eps=_rounded(eps, compute),
    )


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: fused.Kinds,
    s_dtype: str | None,
) -> dict[str, cupy.ndarray]:
    """The gradients `wanted`, by name. `arrays`: x, dy, ds, s, mean, rstd and the operands, None or absent where there
    is none.
    """
    needed = ("x", *NORMS[operation.norm].statistics)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    options = (operation, demanded, tuple(wanted), s_dtype)
    recipe = _recipes.of((function, options, _key(arrays)), _backward_recipe, function, arrays, *options)
    with cupy.cuda.Device(recipe.device_id):
        # Sums over no rows are zero.
        empty = cupy.ndarray if recipe.plan is not None else cupy.zeros
        results = {name: empty(shape, kind) for name, shape, kind in recipe.written}
        if recipe.plan is not None:
            if recipe.dy is not None:
                arrays["dy"] = cupy.zeros(*recipe.dy)
            _launch(recipe, recipe.plan, arrays, results)
        results = {name: array.sum() if name in recipe.totals else array for name, array in results.items()}
    return {name: results[of] for name, of in recipe.gradients}


def _backward_recipe(function, arrays, operation, demanded, wanted, s_dtype) -> Recipe:
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: given[name] for name in operation.operands if name in given}
    kinds = fused.check_operands(function, x, operands, demanded=demanded)
    row_dtype = s_dtype or x.dtype
    fused.check_backward(function, operation, given, row_dtype)
    compute = compute_dtype(row_dtype)
    zeros = None
    if "dy" not in given:
        zeros = (x.shape, arrays["x"].dtype)
        given["dy"] = Layout(x.shape, (), x.dtype, x.device)
    dtypes = _dtypes(given, compute)
    if operation.prologue is not None:
        dtypes["s"] = row_dtype
    of = {name: dtypes.get(name, x.dtype) for name in wanted}
    same = fused.same_gradients(operation, wanted, operands, kinds, of)
    computed = tuple(dict.fromkeys(same.values()))
    task = backward_problem(
        operation,
        math.prod(x.shape[:-1]),
        x.shape[-1],
        dtypes,
        computed,
        kinds=kinds,
        strides=_strides(given, kinds),
        aligned=_aligned(arrays),
    )
    columns = x.shape[-1:]
    written = []
    for name in computed:
        one = given.get(name)
        number = isinstance(one, float)
        shape = one.shape if isinstance(one, Layout) else columns  # of a number the sums of columns; or one left out
        written.append((f"d{name}", shape, numpy_dtype(function, compute if number else of[name])))
    return Recipe(
        plan=plan(task, device.current(int(x.device))) if task.rows and computed else None,
        device_id=int(x.device),
        copies=_copies(function, given, kinds),
        written=tuple(written),
        dy=zeros,
        gradients=tuple((name, f"d{same[name]}") for name in wanted),
        totals=frozenset(f"d{name}" for name in computed if kinds.get(name) == "scalar"),
    )


def _launch(recipe: Recipe, solution: Plan, arrays: dict[str, Any], written: dict[str, cupy.ndarray]) -> None:
    problem: Problem = solution.problem
    if recipe.copies:
        arrays = arrays | {name: cupy.ascontiguousarray(arrays[name]) for name in recipe.copies}
    arrays = {"eps": recipe.eps, **arrays, **written}
    pointers = [arrays[name].data.ptr if name in arrays else 0 for name in problem.pointers]
    scalars = [_rounded(arrays[name], problem.compute) for name in problem.scalars]
    workspace = cupy.cuda.alloc(solution.workspace)
    stream = cupy.cuda.get_current_stream(recipe.device_id).ptr
    launch.run(solution, recipe.device_id, stream, pointers, scalars, workspace.ptr)


def _key(arrays: Mapping[str, Any]) -> Hashable:
    """All that a recipe is made of. Numbers are not: they may change with every call."""
    pointers, layouts = 0, []
    for name, array in arrays.items():
        if isinstance(array, cupy.ndarray):
            pointers |= array.data.ptr
            layouts.append((name, array.shape, array.strides, array.dtype, array.data.device_id))
        else:
            layouts.append((name, type(array)))
    return pointers % 16 == 0, tuple(layouts)


def _given(function: str, name: str, array: Any) -> fused.Given:
    """What the checks know of an array or a number."""
    if isinstance(array, numbers.Real) and name != "x":
        return fused.number(function, name, array)
    return layout(function, name, array)


def _dtypes(given: Mapping[str, fused.Given], compute: str) -> dict[str, str]:
    """By name. A number is passed in the dtype of the arithmetic."""
    return {name: one.dtype if isinstance(one, Layout) else compute for name, one in given.items()}


def _full(given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> dict[str, Layout]:
    """The arrays that are read by rows."""
    by_rows = {"x", "s", "dy", "ds"} | {name for name, kind in kinds.items() if kind == "full"}
    return {name: one for name, one in given.items() if name in by_rows and isinstance(one, Layout)}


def _strides(given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> dict[str, RowStrides]:
    """From row to row, of the arrays that are read by rows and not copied."""
    found = {name: _row_strides(one) for name, one in _full(given, kinds).items()}
    return {name: strides for name, strides in found.items() if strides is not None}


def _copies(function: str, given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The arrays whose rows, or that as vectors, do not lie as kernels read them."""
    full = _full(given, kinds)
    copies = {
        name: one
        for name, one in given.items()
        if isinstance(one, Layout)
        and (_row_strides(one) if name in full else checks.row_strides(one, len(one.shape))) is None
    }
    logs.copied(function, copies, copies.values(), [True] * len(copies))
    return tuple(copies)


def _row_strides(layout: Layout) -> RowStrides | None:
    return checks.row_strides(layout, 1) if layout.strides else RowStrides(layout.shape[-1])


def _aligned(arrays: Mapping[str, Any]) -> bool:
    """All arrays begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(one.data.ptr % 16 == 0 for one in arrays.values() if isinstance(one, cupy.ndarray))


def _rounded(number: Any, compute: str) -> float:
    """A number in the dtype of the arithmetic; infinite where that cannot hold it."""
    return float(number) if compute == "float64" else ctypes.c_float(number).value
