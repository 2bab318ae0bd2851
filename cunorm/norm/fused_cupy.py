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
from .problem import Groups, Problem, RowStrides, backward_problem, compute_dtype, forward_problem


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    shape: tuple[int, ...]  # of x
    expanded: tuple[str, ...]  # the arrays that are broadcast to it
    copies: tuple[str, ...]  # the arrays that must be made contiguous
    written: tuple[tuple[str, tuple[int, ...], numpy.dtype], ...]  # names, shapes and dtypes of what is allocated
    # Forward.
    statistics: tuple[tuple[str, tuple[int, ...], numpy.dtype], ...] = ()
    eps: float = 0.0  # rounded as the kernel's parameter is
    # Backward.
    dy: tuple[tuple[int, ...], numpy.dtype] | None = None  # of the zeros that stand for a dy that was not given
    gradients: tuple[tuple[str, str], ...] = ()  # which of those written is the gradient of each name
    # Of expanded arrays: axes along which their gradients are added up, shapes and dtypes.
    reduced: tuple[tuple[str, tuple[int, ...], tuple[int, ...], numpy.dtype], ...] = ()
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
    kinds, groups = _kinds(function, x, given, operands, demanded)
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
        kinds=_of_kernels(kinds),
        strides=_strides(given, kinds),
        groups=groups,
        aligned=_aligned(arrays),
    )
    of_rows = (x.shape[:-1], numpy.dtype(compute))
    return Recipe(
        plan=plan(task, device.current(int(x.device))) if task.rows else None,
        device_id=int(x.device),
        shape=x.shape,
        expanded=_expanded(kinds),
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
        gradients = {name: results[of] for name, of in recipe.gradients}
        for name, axes, shape, kind in recipe.reduced:
            gradients[name] = gradients[name].sum(axes).reshape(shape).astype(kind)
    return gradients


def _backward_recipe(function, arrays, operation, demanded, wanted, s_dtype) -> Recipe:
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: given[name] for name in operation.operands if name in given}
    shapes = {name: (one.shape, one.dtype) for name, one in operands.items() if isinstance(one, Layout)}
    kinds, groups = _kinds(function, x, given, operands, demanded)
    s = given.get("s")
    row_dtype = s_dtype or (s.dtype if isinstance(s, Layout) else x.dtype)
    fused.check_backward(function, operation, given, row_dtype)
    compute = compute_dtype(row_dtype)
    zeros = None
    if "dy" not in given:
        zeros = (x.shape, arrays["x"].dtype)
        given["dy"] = Layout(x.shape, (), x.dtype, x.device)
    dtypes = _dtypes(given, compute)
    if operation.prologue is not None:
        dtypes["s"] = row_dtype
    # A gradient that is added up afterwards is not rounded before.
    of = {name: compute if kinds.get(name) == "expanded" else dtypes.get(name, x.dtype) for name in wanted}
    same = fused.same_gradients(operation, wanted, operands, kinds, of)
    computed = tuple(dict.fromkeys(same.values()))
    task = backward_problem(
        operation,
        math.prod(x.shape[:-1]),
        x.shape[-1],
        dtypes | {f"d{name}": of[name] for name in computed},
        computed,
        kinds=_of_kernels(kinds),
        strides=_strides(given, kinds),
        groups=groups,
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
        shape=x.shape,
        expanded=_expanded(kinds),
        copies=_copies(function, given, kinds),
        written=tuple(written),
        dy=zeros,
        gradients=tuple((name, f"d{same[name]}") for name in wanted),
        reduced=tuple(
            (
                name,
                fused.broadcast_axes(shapes[name][0], x.shape),
                shapes[name][0],
                numpy_dtype(function, shapes[name][1]),
            )
            for name in wanted
            if kinds.get(name) == "expanded"
        ),
        totals=frozenset(f"d{name}" for name in computed if kinds.get(name) == "scalar"),
    )


def _launch(recipe: Recipe, solution: Plan, arrays: dict[str, Any], written: dict[str, cupy.ndarray]) -> None:
    problem: Problem = solution.problem
    if recipe.expanded:
        arrays = arrays | {name: cupy.broadcast_to(arrays[name], recipe.shape) for name in recipe.expanded}
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
    by_rows = {"x", "s", "dy", "ds"} | {name for name, kind in kinds.items() if kind in ("full", "expanded")}
    return {name: one for name, one in given.items() if name in by_rows and isinstance(one, Layout)}


def _strides(given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> dict[str, RowStrides]:
    """From row to row, or vector to vector, of the arrays that are read so and not copied."""
    found = {name: _row_strides(one) for name, one in _full(given, kinds).items()}
    found |= {name: _vector_strides(given[name]) for name, kind in kinds.items() if kind == "group"}
    return {name: strides for name, strides in found.items() if strides is not None}


def _copies(function: str, given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The arrays whose rows, or that as vectors, do not lie as kernels read them."""
    full = _full(given, kinds)

    def strides(name: str, one: Layout) -> RowStrides | None:
        if name in full:
            return _row_strides(one)
        return _vector_strides(one) if kinds.get(name) == "group" else checks.row_strides(one, len(one.shape))

    copies = {name: one for name, one in given.items() if isinstance(one, Layout) and strides(name, one) is None}
    logs.copied(function, copies, copies.values(), [True] * len(copies))
    return tuple(copies)


def _kinds(
    function: str, x: Layout, given: dict[str, fused.Given], operands: dict[str, fused.Given], demanded: fused.Kinds
) -> tuple[dict[str, str], Groups | None]:
    """The kinds of operands, and the groups of rows of some. `given` gets the layout of what is expanded."""
    kinds = fused.check_operands(function, x, operands, demanded=demanded)
    groups = fused.groups_of(x, operands, kinds)
    for name in _expanded(kinds):
        one = given[name]
        assert isinstance(one, Layout)
        logs.expanded(function, name, one.shape, x.shape)
        own = (0,) * (len(x.shape) - len(one.strides)) + one.strides
        repeated = fused.broadcast_axes(one.shape, x.shape)
        strides = tuple(0 if axis in repeated else stride for axis, stride in enumerate(own))
        given[name] = Layout(x.shape, strides, one.dtype, one.device)
    return kinds, groups


def _expanded(kinds: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, kind in kinds.items() if kind == "expanded")


def _of_kernels(kinds: Mapping[str, str]) -> dict[str, str]:
    """What is expanded is full."""
    return {name: "full" if kind == "expanded" else kind for name, kind in kinds.items()}


def _vector_strides(given: fused.Given) -> RowStrides | None:
    """From vector to vector, where one stride leads there."""
    found = checks.row_strides(given, 1) if isinstance(given, Layout) else None
    return None if found is None or found.inner else found


def _row_strides(layout: Layout) -> RowStrides | None:
    return checks.row_strides(layout, 1) if layout.strides else RowStrides(layout.shape[-1])


def _aligned(arrays: Mapping[str, Any]) -> bool:
    """All arrays begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(one.data.ptr % 16 == 0 for one in arrays.values() if isinstance(one, cupy.ndarray))


def _rounded(number: Any, compute: str) -> float:
    """A number in the dtype of the arithmetic; infinite where that cannot hold it."""
    return float(number) if compute == "float64" else ctypes.c_float(number).value
