"""How a call of a fused operation runs on a GPU, of its layouts and options alone: for CuPy, and for frameworks whose
memory and streams are their own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import logs
from ..kernel.device import Device
from ..operation import Operation
from ..plan.choose import one_kernel_differentiates_twice
from ..plan.forward import holds_twice
from ..plan.plan import plan
from ..plan.problem import (
    ITEMSIZE,
    SCALES,
    Groups,
    RowStrides,
    backward_problem,
    backward_twice_problem,
    compute_dtype,
    forward_problem,
)
from ..plan.steps import Plan
from . import checks, fused
from .checks import Layout
from .float8 import Float8Store, check_rows, scales_shape

# Of an array that is allocated: its name, its shape and the name of its dtype, or a framework's dtype of that name.
Memory = tuple[str, tuple[int, ...], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
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

    def of_rows(self, x_shape: tuple[int, ...]) -> Recipe:
        """That of a call which differs from this one's in its number of rows alone: of the same `form_of`."""
        assert self.plan is not None
        rows = x_shape[:-1]
        return replace(
            self,
            plan=plan(self.plan.problem.of_rows(math.prod(rows)), self.plan.device),
            written=tuple((name, x_shape if len(shape) > 1 else shape, dtype) for name, shape, dtype in self.written),
            statistics=tuple((name, rows, dtype) for name, _, dtype in self.statistics),
        )

    @property
    def has_others(self) -> bool:
        """Whether recipes of other numbers of rows follow from it."""
        given = self.copies or self.expanded or self.reduced or self.dy
        return self.plan is not None and not given and of_any_rows(self.plan)

    def with_dtypes(self, of: Callable[[str], Any]) -> Recipe:
        """The same with the dtypes of a framework in place of their names."""

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


def form_of(x_shape: tuple[int, ...], given: Iterable[fused.Given | None]) -> Hashable:
    """What arrays have in common with those of another number of rows: matrices of the shape of x and numbers for its
    rows, which lie close, and vectors. None of others, of a single row, of which a matrix is a vector too, and of as
    many rows as columns, where a vector may be either.
    """
    if math.prod(x_shape[:-1]) < 2 or x_shape[:-1] == x_shape[-1:]:
        return None
    found: list[Hashable] = [x_shape[-1]]
    for one in given:
        if not isinstance(one, Layout):
            found.append(type(one))
        elif one.shape in (x_shape, x_shape[:-1]) and checks.is_contiguous(one):
            found.append((len(x_shape) - len(one.shape), one.dtype, one.device))
        elif len(one.shape) == 1:
            found.append(one)
        else:
            return None
    return tuple(found)


def of_any_rows(solution: Plan) -> bool:
    """Whether nothing that its kernels read or write depends on the number of rows but the length of matrices."""
    return solution.problem.operands.kinds <= {"full", "column", "statistic", "scalar", "seed"}


def forward_recipe(
    function: str,
    operation: Operation,
    given: Mapping[str, fused.Given],
    device: Device,
    *,
    demanded: fused.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margin: int,
    aligned: bool,
    float8: Float8Store | None = None,
) -> Recipe:
    """Of the forward pass of x and the operands, `given`, which are checked here."""
    given = dict(given)
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: one for name, one in given.items() if name != "x"}
    kinds, groups, broadcast = _kinds(function, x, given, operands, demanded)
    row_dtype = s_dtype or x.dtype
    compute = compute_dtype(row_dtype)
    dtypes = _dtypes(given, compute) | {"y": dtype or x.dtype}
    if operation.prologue is not None or operation.second is not None:
        dtypes["s"] = row_dtype
    kinds_of_kernels, returns, shapes = _of_kernels(kinds), operation.returns, {}
    if float8:
        check_rows(function, x, s_dtype)
        dtypes |= {"y8": float8.format, "y8_scale": "float32"}
        if not float8.wide:
            del dtypes["y"]
        kinds_of_kernels["y8_scale"] = SCALES[float8.granularity]
        shapes["y8_scale"] = scales_shape(float8.granularity, x.shape[:-1], x.shape[-1])
        # One scale for all is read.
        returns = [name for name in float8.results(returns) if name != "y8_scale" or float8.granularity != "tensor"]
    task = forward_problem(
        operation,
        math.prod(x.shape[:-1]),
        x.shape[-1],
        dtypes,
        kinds=kinds_of_kernels,
        strides=_strides(given, kinds),
        groups=groups,
        sm_margin=checks.check_sm_margin(function, sm_margin, device.sms),
        aligned=aligned,
    )
    return Recipe(
        plan=plan(task, device) if task.rows else None,
        expanded=tuple(broadcast.items()),
        copies=_copies(function, given, kinds),
        written=tuple((name, shapes.get(name, x.shape), dtypes[name]) for name in returns),
        statistics=tuple((name, x.shape[:-1], compute) for name in operation.statistics),
    )


def one_kernel_norms_twice(x: Layout, s_dtype: str | None) -> bool:
    """Whether an operation with a second norm runs at all, for such x and s: else its norms run one by one."""
    if s_dtype not in (None, x.dtype) or not x.shape or x.dtype not in ITEMSIZE or 0 in x.shape:
        return False
    return holds_twice(x.dtype, x.shape[-1])


def backward_recipe(
    function: str,
    operation: Operation,
    given: Mapping[str, fused.Given],
    wanted: Collection[str],
    device: Device,
    *,
    demanded: fused.Kinds,
    s_dtype: str | None,
    sm_margin: int,
    aligned: bool,
) -> Recipe:
    """Of the gradients `wanted`. `given`: x, dy, ds, s, mean, rstd and the operands, absent where there is none; they
    are checked here.
    """
    given = dict(given)
    x = given["x"]
    assert isinstance(x, Layout)
    operands = {name: given[name] for name in operation.operands if name in given}
    shapes = {name: (one.shape, one.dtype) for name, one in operands.items() if isinstance(one, Layout)}
    kinds, groups, broadcast = _kinds(function, x, given, operands, demanded)
    s = given.get("s")
    row_dtype = s_dtype or (s.dtype if isinstance(s, Layout) else x.dtype)
    fused.check_backward(function, operation, given, row_dtype)
    compute = compute_dtype(row_dtype)
    zeros = None
    if "dy" not in given:
        zeros = ("dy", x.shape, x.dtype)
        given["dy"] = Layout(x.shape, (), x.dtype, x.device)
    dtypes = _dtypes(given, compute)
    if operation.prologue is not None:
        dtypes["s"] = row_dtype
    # A gradient that is added up afterwards is not rounded before.
    of = {name: compute if name in broadcast else dtypes.get(name, x.dtype) for name in wanted}
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
        sm_margin=checks.check_sm_margin(function, sm_margin, device.sms),
        aligned=aligned,
    )
    columns = x.shape[-1:]
    written = []
    for name in computed:
        one = given.get(name) if name in broadcast or name not in operands else operands[name]
        number = isinstance(one, float)
        shape = one.shape if isinstance(one, Layout) else columns  # of a number the sums of columns; or one left out
        written.append((f"d{name}", shape, compute if number else of[name]))
    return Recipe(
        plan=plan(task, device) if task.rows and computed else None,
        expanded=tuple(broadcast.items()),
        copies=_copies(function, given, kinds),
        written=tuple(written),
        dy=zeros,
        gradients=tuple((name, f"d{same[name]}") for name in wanted),
        reduced=tuple(
            (fused.broadcast_axes(shapes[name][0], x.shape), (name, *shapes[name]))
            for name in wanted
            if name in broadcast
        ),
        totals=frozenset(f"d{name}" for name in computed if kinds.get(name) == "scalar"),
    )


def backward_twice_recipe(
    operation: Operation,
    given: Mapping[str, fused.Given],
    wanted: Collection[str],
    device: Device,
    *,
    sm_margin: int,
    aligned: bool,
) -> Recipe:
    """Of the backward pass of an operation with a second norm by one kernel; without a plan where none does it.

    `given`: x, s, dy, ds if there is one, rstd, second_rstd and the weights, of which the gradients `wanted` are; those
    of x and of the residual come with them. Nothing is refused here: what does not fit the halves of the operation
    refuse.
    """
    nothing = Recipe(None, (), (), ())
    arrays = {name: one for name, one in given.items() if isinstance(one, Layout)}
    x, s = arrays.get("x"), arrays.get("s")
    weights = [name for name in operation.operands if name in given]
    if x is None or s is None or len(arrays) < len(given) or not set(wanted) <= set(weights) or 0 in x.shape:
        return nothing
    shapes = dict.fromkeys(arrays, x.shape) | dict.fromkeys(weights, x.shape[-1:])
    shapes |= dict.fromkeys(operation.statistics, x.shape[:-1])
    dtypes = {name: one.dtype for name, one in arrays.items()}
    strides = {name: _row_strides(arrays[name]) for name in ("x", "s", "dy", "ds") if name in arrays}
    if (
        any(one.shape != shapes[name] or one.device != x.device for name, one in arrays.items())
        or not x.shape
        or not set(dtypes.values()) <= set(ITEMSIZE)
        or any(dtypes[name] != compute_dtype(s.dtype) for name in operation.statistics)
        or s.dtype != x.dtype
        or None in strides.values()
        or not all(arrays[name].strides == (1,) or x.shape[-1] == 1 for name in weights)
    ):
        return nothing
    task = backward_twice_problem(
        operation,
        math.prod(x.shape[:-1]),
        x.shape[-1],
        dtypes,
        wanted,
        strides={name: one for name, one in strides.items() if one is not None},
        sm_margin=sm_margin,
        aligned=aligned,
    )
    if not one_kernel_differentiates_twice(task, device):
        return nothing
    written = {"residual": (x.shape, s.dtype), "x": (x.shape, x.dtype)}
    written |= {name: (x.shape[-1:], dtypes[name]) for name in weights if name in wanted}
    return Recipe(
        plan(task, device),
        (),
        (),
        tuple((f"d{name}", *one) for name, one in written.items()),
        gradients=tuple((name, f"d{name}") for name in written),
    )


def scalars_of(solution: Plan, numbers: Mapping[str, Any]) -> list[float]:
    """The numbers that a launch takes, each rounded to the arithmetic; infinite where that cannot hold it."""
    problem = solution.problem
    values = (numbers[name] for name in problem.scalars)
    try:
        return [float(one) if problem.compute == "float64" else ctypes.c_float(one).value for one in values]
    except OverflowError:
        raise ValueError("cunorm: an operand must be finite; got a number beyond 1.8e308.") from None


def _dtypes(given: Mapping[str, fused.Given], compute: str) -> dict[str, str]:
    """By name. A number is passed in the dtype of the arithmetic."""
    return {name: one.dtype if isinstance(one, Layout) else compute for name, one in given.items()}


def _full(given: Mapping[str, fused.Given], kinds: Mapping[str, str]) -> dict[str, Layout]:
    """The arrays that are read by rows."""
    of_rows = ("full", "expanded", "per_row")
    by_rows = {"x", "s", "dy", "ds"} | {name for name, kind in kinds.items() if kind in of_rows}
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
) -> tuple[dict[str, str], Groups | None, dict[str, tuple[int, ...]]]:
    """The kinds of operands, the groups of rows of some, and to which shapes some are broadcast.

    `given` gets the layouts of these.
    """
    kinds = fused.check_operands(function, x, operands, demanded=demanded)
    groups = fused.groups_of(x, operands, kinds)
    broadcast = {}
    for name, kind in kinds.items():
        one = given[name]
        if kind not in ("expanded", "per_row"):
            continue
        assert isinstance(one, Layout)
        repeated = fused.broadcast_axes(one.shape, x.shape)
        shape = x.shape if kind == "expanded" else (*x.shape[:-1], 1)
        if kind == "expanded":
            logs.expanded(function, name, one.shape, x.shape)
        if kind == "expanded" or repeated != (len(x.shape) - 1,):
            broadcast[name] = shape
        own = (0,) * (len(x.shape) - len(one.strides)) + one.strides
        strides = tuple(0 if axis in repeated else stride for axis, stride in enumerate(own))
        given[name] = Layout(shape, strides, one.dtype, one.device)
    return kinds, groups, broadcast


def _of_kernels(kinds: Mapping[str, str]) -> dict[str, str]:
    """What is expanded is full."""
    return {name: "full" if kind == "expanded" else kind for name, kind in kinds.items()}


def _vector_strides(given: fused.Given) -> RowStrides | None:
    """From vector to vector, where one stride leads there."""
    found = checks.row_strides(given, 1) if isinstance(given, Layout) else None
    return None if found is None or found.inner else found


def _row_strides(layout: Layout) -> RowStrides | None:
    return checks.row_strides(layout, 1) if layout.strides else RowStrides(layout.shape[-1])
