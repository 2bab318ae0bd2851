"""Recipes: how a call runs on a GPU, worked out once from layouts and options alone.

They serve CuPy, and frameworks with memory and streams of their own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import logs
from ..kernel.device import Device
from ..plan.forward import fits_norm_add_norm
from ..plan.plan import plan
from ..plan.problem import (
    ITEMSIZE,
    SCALES,
    Groups,
    RowStrides,
    backward_problem,
    compute_dtype,
    forward_problem,
)
from ..plan.steps import Plan
from . import broadcasting, checks
from .backend import CallOptions
from .checks import Layout
from .store import check_rows, scales_shape

# An array that is allocated: its name, its shape, and the name of its dtype or a framework's dtype of that name.
Memory = tuple[str, tuple[int, ...], Any]


LIMIT = 4096  # recipes that are kept at most


@dataclass(frozen=True, eq=False)
class LaunchRecipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    expanded: tuple[tuple[str, tuple[int, ...]], ...]  # the arrays that are broadcast, and to which shape
    copies: tuple[str, ...]  # the arrays that must be made contiguous
    written: tuple[Memory, ...]  # what is allocated
    # Forward.
    statistics: tuple[Memory, ...] = ()
    # Backward.
    dy: Memory | None = None  # of the zeros that stand for a dy that was not given
    gradients: tuple[tuple[str, str], ...] = ()  # which of those written is the gradient of each name
    # Of arrays that are broadcast: the axes along which their gradients are added up, and what that comes to.
    reduced: tuple[tuple[tuple[int, ...], Memory], ...] = ()
    totals: frozenset[str] = frozenset()  # of those written: sums of columns that are yet to be added up
    # Of a call that is given memory for its first result.
    temporary: bool = False  # no kernel can write there
    ndim: int = 1  # normalised axes, the last ones
    # What a call site (site.py) needs besides, once it is known which arrays in which order it is given.
    device_id: int = 0
    everyday_on: int = -1  # the same where there is nothing to do but to allocate and to launch, else no device
    widest: int = 1  # bytes of an element of any array
    allocated: tuple[tuple[tuple[int, ...], Any], ...] = ()  # shape and dtype of each result
    order: Callable[[Sequence[float]], tuple[float, ...]] | None = None  # picks what the plan takes
    eps: float = 0.0  # rounded as the kernel's parameter is
    places: tuple[int, ...] = ()  # of the gradients that are wanted, in order, among those written
    layouts: tuple[tuple[str, Layout], ...] = ()  # of the arrays that are given, and of the memory for the first result

    def of_rows(self, x_shape: tuple[int, ...]) -> LaunchRecipe:
        """Return the recipe of a call of the same `form_of`, which differs in its number of rows alone."""
        assert self.plan is not None
        rows = x_shape[:-1]
        written = tuple([(name, x_shape if len(shape) > 1 else shape, dtype) for name, shape, dtype in self.written])
        statistics = tuple([(name, rows, dtype) for name, _, dtype in self.statistics])
        allocated = tuple([(shape, dtype) for _, shape, dtype in (*written, *statistics)])[: len(self.allocated)]
        recipe = object.__new__(LaunchRecipe)  # by replace() it takes 5 us more
        solution = plan(self.plan.problem.with_rows(math.prod(rows)), self.plan.device)
        vars(recipe).update(vars(self), plan=solution, written=written, statistics=statistics, allocated=allocated)
        return recipe

    @property
    def has_others(self) -> bool:
        """Whether recipes of other numbers of rows follow from it."""
        given = self.copies or self.expanded or self.reduced or self.dy or self.ndim > 1
        return self.plan is not None and not given and of_any_rows(self.plan)

    def with_dtypes(self, of: Callable[[str], Any]) -> LaunchRecipe:
        """Return the same recipe with the dtypes of a framework in place of their names."""

        def named(memory: Memory) -> Memory:
            name, shape, dtype = memory
            return name, shape, of(dtype)

        return replace(
            self,
            written=tuple(map(named, self.written)),
            statistics=tuple(map(named, self.statistics)),
            dy=None if self.dy is None else named(self.dy),
            reduced=tuple((axes, named(memory)) for axes, memory in self.reduced),
        )


class Recipes:
    """Recipes by keys, which have all that a recipe is made of: layouts and options.

    `kept(key)` returns the recipe that is kept, or None. It raises TypeError or ValueError for a key without a hash.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self.kept = self._kept.get

    def of(self, key: Hashable, make: Callable[..., Any], *arguments: object) -> Any:
        """Return the recipe that is kept, or make(*arguments), which is not kept for a key without a hash."""
        try:
            recipe = self._kept.get(key)
        except (TypeError, ValueError):
            return make(*arguments)
        if recipe is None:
            recipe = make(*arguments)
            if len(self._kept) >= LIMIT:
                self._kept.clear()
            self._kept[key] = recipe
        return recipe


def form_of(x_shape: tuple[int, ...], given: Iterable[broadcasting.Given | None]) -> Hashable:
    """Return what arrays have in common with those of calls with another number of rows; None where that is not known.

    It is known of contiguous matrices of the shape of x, of contiguous numbers for its rows, and of vectors. It is not
    known of a single row, where a matrix is a vector too, nor of as many rows as columns, where a vector may be either.
    """
    if math.prod(x_shape[:-1]) < 2 or x_shape[:-1] == x_shape[-1:]:
        return None
    parts: list[Hashable] = [x_shape[-1]]
    for array in given:
        if not isinstance(array, Layout):
            parts.append(type(array))
        elif array.shape in (x_shape, x_shape[:-1]) and checks.is_contiguous(array):
            parts.append((len(x_shape) - len(array.shape), array.dtype, array.device))
        elif len(array.shape) == 1:
            parts.append(array)
        else:
            return None
    return tuple(parts)


def of_any_rows(solution: Plan) -> bool:
    """Return whether the number of rows changes only the length of the matrices that kernels read or write."""
    return solution.problem.operands.kinds <= {"full", "column", "statistic", "scalar", "seed"}


def forward_recipe(
    options: CallOptions,
    given: Mapping[str, broadcasting.Given],
    device: Device,
    *,
    aligned: bool,
    out: Layout | None = None,
) -> LaunchRecipe:
    """Return the recipe of the forward pass of x and the operands, which are `given` and are checked here.

    y is written to `out` if there is one. `aligned`: whether all that is read or written by vectors begins at multiples
    of 16 bytes.
    """
    function, operation, store, ndim = options.function, options.operation, options.store, options.ndim
    given = dict(given)
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: operand for name, operand in given.items() if name != "x"}
    kinds, groups, broadcast = _kinds(options, given, operands)
    leading, columns = x.shape[: len(x.shape) - ndim], x.shape[len(x.shape) - ndim :]
    row_dtype = options.s_dtype or x.dtype
    compute = compute_dtype(row_dtype)
    dtypes = _dtypes(given, compute) | {"y": options.dtype or x.dtype}
    if operation.prologue is not None or operation.second is not None:
        dtypes["s"] = row_dtype
    kinds_of_kernels, returns, shapes = _of_kernels(kinds), operation.returns, {}
    if store:
        check_rows(function, x, options.s_dtype)
        dtypes |= {"y8": store.format, "y8_scale": "float32"}
        if not store.wide:
            del dtypes["y"]
        kinds_of_kernels["y8_scale"] = SCALES[store.granularity]
        shapes["y8_scale"] = scales_shape(store.granularity, leading, math.prod(columns))
        returns = store.written(returns)
    out_rows = None if out is None else checks.row_strides(out, ndim)
    task = forward_problem(
        operation,
        math.prod(leading),
        math.prod(columns),
        dtypes,
        kinds=kinds_of_kernels,
        strides=_strides(given, kinds, ndim) | ({} if out_rows is None else {"y": out_rows}),
        groups=groups,
        sm_margin=checks.check_sm_margin(function, options.sm_margin, device.sms),
        aligned=aligned,
    )
    temporary = out is not None and out_rows is None
    return LaunchRecipe(
        plan=plan(task, device) if task.rows else None,
        expanded=tuple(broadcast.items()),
        copies=_copies(options, given, kinds, {"out": out} if temporary else {}),
        written=tuple((name, shapes.get(name, x.shape), dtypes[name]) for name in returns),
        statistics=tuple((name, leading, compute) for name in operation.statistics),
        temporary=temporary,
        ndim=ndim,
    )


def runs_norm_add_norm(x: Layout, s_dtype: str | None) -> bool:
    """Return whether one kernel runs an operation with a second norm for such x and s; else two run."""
    if s_dtype not in (None, x.dtype) or not x.shape or x.dtype not in ITEMSIZE or 0 in x.shape:
        return False
    return fits_norm_add_norm(x.dtype, x.shape[-1])


def backward_recipe(
    options: CallOptions,
    given: Mapping[str, broadcasting.Given],
    wanted: Collection[str],
    device: Device,
    *,
    aligned: bool,
    out: Layout | None = None,
) -> LaunchRecipe:
    """Return the recipe of the gradients `wanted`, each in the dtype of what it is the gradient of.

    `given` are x, dy, ds, s, mean, rstd and the operands, as far as there are any; they are checked here. dx is written
    to `out` if there is one, and `aligned` is as of `forward_recipe`.
    """
    function, operation, ndim = options.function, options.operation, options.ndim
    given = dict(given)
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: given[name] for name in operation.operands if name in given}
    shapes = {name: (operand.shape, operand.dtype) for name, operand in operands.items() if isinstance(operand, Layout)}
    kinds, groups, broadcast = _kinds(options, given, operands)
    leading, columns = x.shape[: len(x.shape) - ndim], x.shape[len(x.shape) - ndim :]
    s = given.get("s")
    row_dtype = options.s_dtype or (s.dtype if isinstance(s, Layout) else x.dtype)
    broadcasting.check_backward(function, operation, given, row_dtype, ndim)
    compute = compute_dtype(row_dtype)
    zeros = None
    if "dy" not in given:
        zeros = ("dy", x.shape, x.dtype)
        given["dy"] = Layout(x.shape, (), x.dtype, x.device)
    dtypes = _dtypes(given, compute)
    if operation.prologue is not None:
        dtypes["s"] = row_dtype
    left_out = options.left_out or x.dtype
    # A gradient that is added up afterwards is not rounded before.
    of = {name: compute if name in broadcast else dtypes.get(name, left_out) for name in wanted}
    same = broadcasting.same_gradients(operation, wanted, operands, kinds, of)
    computed = tuple(dict.fromkeys(same.values()))
    out_rows = None if out is None else checks.row_strides(out, ndim)
    task = backward_problem(
        operation,
        math.prod(leading),
        math.prod(columns),
        dtypes | {f"d{name}": of[name] for name in computed},
        computed,
        kinds=_of_kernels(kinds),
        strides=_strides(given, kinds, ndim) | ({} if out_rows is None else {"dx": out_rows}),
        groups=groups,
        sm_margin=checks.check_sm_margin(function, options.sm_margin, device.sms),
        aligned=aligned,
    )
    if out_rows is not None:
        task = replace(task, overwrites=True)
    temporary = out is not None and out_rows is None
    written = []
    for name in computed:
        source = given.get(name) if name in broadcast or name not in operands else operands[name]
        # The kernel writes the sums of columns for a number, and for an operand that was left out.
        shape = source.shape if isinstance(source, Layout) else columns
        written.append((f"d{name}", shape, compute if isinstance(source, float) else of[name]))
    return LaunchRecipe(
        plan=plan(task, device) if task.rows and computed else None,
        expanded=tuple(broadcast.items()),
        copies=_copies(options, given, kinds, {"dx_out": out} if temporary else {}),
        written=tuple(written),
        dy=zeros,
        gradients=tuple((name, f"d{same[name]}") for name in wanted),
        reduced=tuple(
            (broadcasting.broadcast_axes(shapes[name][0], x.shape), (name, *shapes[name]))
            for name in wanted
            if name in broadcast
        ),
        totals=frozenset(f"d{name}" for name in computed if kinds.get(name) == "scalar"),
        temporary=temporary,
        ndim=ndim,
    )


def scalars_of(solution: Plan, numbers: Mapping[str, Any]) -> list[float]:
    """Return the numbers that a launch takes, as `rounded` gives them."""
    return rounded(solution, *(numbers[name] for name in solution.problem.scalars))


def rounded(solution: Plan, *numbers: float) -> list[float]:
    """Return numbers, each rounded to the arithmetic of a plan; infinite where that cannot hold it."""
    is_double = solution.problem.compute == "float64"
    try:
        return [float(number) if is_double else ctypes.c_float(number).value for number in numbers]
    except OverflowError:
        raise ValueError("cunorm: an operand must be finite; got a number beyond 1.8e308.") from None


def _dtypes(given: Mapping[str, broadcasting.Given], compute: str) -> dict[str, str]:
    """Return dtypes by name; a number is passed in the dtype of the arithmetic."""
    return {name: layout.dtype if isinstance(layout, Layout) else compute for name, layout in given.items()}


def _read_by_rows(given: Mapping[str, broadcasting.Given], kinds: Mapping[str, str]) -> dict[str, Layout]:
    """Return the arrays that kernels read row by row."""
    of_rows = ("full", "expanded", "per_row")
    names = {"x", "s", "dy", "ds"} | {name for name, kind in kinds.items() if kind in of_rows}
    return {name: layout for name, layout in given.items() if name in names and isinstance(layout, Layout)}


def _strides(given: Mapping[str, broadcasting.Given], kinds: Mapping[str, str], ndim: int) -> dict[str, RowStrides]:
    """Return strides from row to row, or from vector to vector, of the arrays that are read so and not copied."""
    strides = {name: _row_strides(layout, ndim) for name, layout in _read_by_rows(given, kinds).items()}
    strides |= {name: _vector_strides(given[name]) for name, kind in kinds.items() if kind == "group"}
    return {name: stride for name, stride in strides.items() if stride is not None}


def _copies(
    options: CallOptions,
    given: Mapping[str, broadcasting.Given],
    kinds: Mapping[str, str],
    written: Mapping[str, Layout | None],
) -> tuple[str, ...]:
    """Return the arrays that are copied, as their rows or they as vectors do not lie as kernels read them.

    `written` are those that are copied afterwards, by the name by which the caller knows them.
    """
    by_rows = _read_by_rows(given, kinds)

    def strides(name: str, layout: Layout) -> RowStrides | None:
        if name in by_rows:
            return _row_strides(layout, options.ndim)
        return _vector_strides(layout) if kinds.get(name) == "group" else checks.row_strides(layout, len(layout.shape))

    arrays = {name: layout for name, layout in given.items() if isinstance(layout, Layout)}
    copies = {name: layout for name, layout in arrays.items() if strides(name, layout) is None}
    logged = {**copies, **written}
    logs.copied(options.function, logged, logged.values(), [True] * len(logged))
    return tuple(copies)


def _kinds(
    options: CallOptions, given: dict[str, broadcasting.Given], operands: dict[str, broadcasting.Given]
) -> tuple[dict[str, str], Groups | None, dict[str, tuple[int, ...]]]:
    """Return the kinds of operands, the groups of rows of some, and the shapes to which some are broadcast.

    `given` gets the layouts of what is broadcast.
    """
    function, x = options.function, given["x"]
    assert isinstance(x, Layout)
    kinds = broadcasting.check_operands(function, x, operands, demanded=options.demanded, ndim=options.ndim)
    groups = broadcasting.groups_of(x, operands, kinds)
    broadcast = {}
    for name, kind in kinds.items():
        layout = given[name]
        if kind not in ("expanded", "per_row"):
            continue
        assert isinstance(layout, Layout)
        repeated = broadcasting.broadcast_axes(layout.shape, x.shape)
        shape = x.shape if kind == "expanded" else (*x.shape[:-1], 1)
        if kind == "expanded":
            logs.expanded(function, name, layout.shape, x.shape)
        if kind == "expanded" or repeated != (len(x.shape) - 1,):
            broadcast[name] = shape
        padded = (0,) * (len(x.shape) - len(layout.strides)) + layout.strides
        strides = tuple(0 if axis in repeated else stride for axis, stride in enumerate(padded))
        given[name] = Layout(shape, strides, layout.dtype, layout.device)
    return kinds, groups, broadcast


def _of_kernels(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds as kernels know them: what is expanded is full."""
    return {name: "full" if kind == "expanded" else kind for name, kind in kinds.items()}


def _vector_strides(given: broadcasting.Given) -> RowStrides | None:
    """Return the stride from vector to vector, None where no single stride leads there."""
    strides = checks.row_strides(given, 1) if isinstance(given, Layout) else None
    return None if strides is None or strides.inner else strides


def _row_strides(layout: Layout, ndim: int = 1) -> RowStrides | None:
    return checks.row_strides(layout, ndim) if layout.strides else RowStrides(layout.shape[-1])
