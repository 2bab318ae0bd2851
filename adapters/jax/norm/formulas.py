"""Operations, their gradients and their tangents in jax.numpy, in the arithmetic of `Task.compute`.

They serve every platform without kernels, and derivatives of the gradients. Arrays go by name, as everywhere in this
adapter. x has the shape (..., *normalised axes), as have s, y and their gradients ds and dy. mean, rstd and numbers for
rows have the shape of x without its normalised axes, and an operand has the shape of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...call.store import Float8Store, scales_shape
from ...expression.texts import evaluate
from ...expression.value import Expression
from ...operation import NORMS, SEED, Derivative, Norm, Operation, derivative
from ...plan.problem import SCALES, Groups, Problem, backward_problem, compute_dtype, forward_problem
from .float8 import quantise
from .philox import uniform

Arrays = Mapping[str, jax.Array]
Names = tuple[str, ...]

DOT = ".dot"  # ends the names of tangents, and of no operand: an identifier has no point

FULL = ("x", "s", "y", "dx", "ds", "dy")
PER_ROW = ("mean", "rstd")


@dataclass(frozen=True, slots=True)
class Task:
    """What a call is, apart from its arrays."""

    operation: Operation
    ndim: int  # normalised axes, the last ones
    eps: float
    dtype: str  # of y
    sm_margin: int
    dtypes: tuple[tuple[str, str], ...]  # of x and the operands, and of their gradients
    s_dtype: str | None = None  # of what the prologue makes; that of x if there is none
    kinds: tuple[tuple[str, str], ...] = ()  # of operands that are not columns
    numbers: tuple[tuple[str, float], ...] = ()  # operands that stand in the program
    group_axes: tuple[int, ...] = ()  # the leading axes of x that operands of the kind "group" have, ones in the others
    store: Float8Store | None = None  # how a forward pass writes y, where not as it is

    @property
    def norm(self) -> Norm:
        return NORMS[self.operation.norm]

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    @property
    def row_dtype(self) -> str:
        """The dtype of what is normalised."""
        return self.s_dtype or dict(self.dtypes)["x"]

    @property
    def compute(self) -> str:
        """The dtype of statistics and of all arithmetic."""
        return compute_dtype(self.row_dtype)

    def kind(self, name: str) -> str:
        """Return how an array lies beside x, in the words of plan/problem.py; a gradient lies as its array."""
        if name == SEED:
            return SEED
        if name in FULL or name in PER_ROW:
            return "full" if name in FULL else "per_row"
        of = name if name in self.operation.operands else name.removeprefix("d")
        return dict(self.kinds).get(of, "column")

    def stored(self, store: Float8Store) -> Task:
        """Return the task with FP8 output: y8, y8_scale (an argument where one is for all), and y if it is wide."""
        kinds = (*self.kinds, ("y8", "full"), ("y8_scale", SCALES[store.granularity]))
        return replace(self, store=store, kinds=kinds)

    @property
    def wide(self) -> Task:
        """The task whose y is what is rounded to 8 bits."""
        return replace(self, store=None, dtype="float32")

    @property
    def returns(self) -> Names:
        """The names that a forward pass writes, but for statistics."""
        returns = self.operation.returns
        return self.store.written(returns) if self.store else returns

    def results(self, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
        """Compute at least the arrays `wanted`: y, s and statistics of x and operands, or gradients."""
        if self.store:
            return self.rounded(forward(self.wide, arrays), arrays)
        return forward(self, arrays) if "y" in wanted else backward(self, arrays, wanted)

    def rounded(self, results: Arrays, arrays: Arrays) -> dict[str, jax.Array]:
        """Compute all results of a store from those with y in float32."""
        assert self.store is not None
        y, granularity = results["y"], self.store.granularity
        _, cols = self.rows_and_cols(y.shape)
        y8, scales = quantise(y.reshape(-1, cols), granularity, self.store.format, arrays.get("y8_scale"))
        scales = scales.reshape(scales_shape(granularity, y.shape[: y.ndim - self.ndim], cols))
        return {**results, "y8": y8.reshape(y.shape), "y8_scale": scales, "y": y.astype(self.dtype)}

    def derivative(self, wanted: Names, arrays: Arrays | Mapping[str, str]) -> Derivative:
        """Return the gradients with respect to the names `wanted`, of a call with these arrays."""
        return derivative(self.operation, wanted, {*arrays, *dict(self.numbers)})

    def problem(self, avals: Mapping[str, Any], wanted: Names) -> Problem:
        """Return the problem that kernels are asked to solve.

        `avals`, of arguments and results, are dense: XLA places them at multiples of 16 bytes at least.
        """
        shape = next(aval.shape for name, aval in avals.items() if self.kind(name) == "full")
        rows, cols = self.rows_and_cols(shape)
        numbers = dict(self.numbers)
        dtypes = {"x": dict(self.dtypes)["x"]} | dict.fromkeys(numbers, self.compute)
        dtypes |= {name: aval.dtype.name for name, aval in avals.items()}
        if self.s_dtype:
            dtypes["s"] = self.s_dtype
        kinds = dict(self.kinds) | dict.fromkeys(numbers, "scalar")
        options = {"kinds": kinds, "groups": self.groups(shape), "sm_margin": self.sm_margin}
        if self.store or "y" in wanted:
            return forward_problem(self.operation, rows, cols, dtypes, **options)
        sources = [name.removeprefix("d") for name in wanted]
        return backward_problem(self.operation, rows, cols, dtypes, sources, **options)

    def groups(self, shape: tuple[int, ...]) -> Groups | None:
        """Return the groups of rows of an array of the shape of x that share a vector."""
        if not self.group_axes:
            return None
        inner = math.prod(shape[self.group_axes[-1] + 1 : len(shape) - self.ndim])
        return Groups(inner, math.prod(shape[axis] for axis in self.group_axes))

    def rows_and_cols(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of what has the shape of x."""
        cols = math.prod(shape[len(shape) - self.ndim :])
        return math.prod(shape) // cols, cols


def forward(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """Return y and the statistics, and s if there is a prologue."""
    values = _values(task, arrays)
    results = {}
    rows = arrays["x"].astype(task.compute)
    if task.operation.prologue is not None:
        rows, results["s"] = _prologue(task, values, rows.shape)
    if task.norm.subtracts_mean:
        mean = rows.mean(task.axes, keepdims=True)
        rows = rows - mean
        lost = rows.mean(task.axes, keepdims=True)  # by the rounding of mean
        rows = rows - lost
        results["mean"] = (mean + lost).squeeze(task.axes)
    rstd = jax.lax.rsqrt((rows * rows).mean(task.axes, keepdims=True) + task.eps)
    results["rstd"] = rstd.squeeze(task.axes)
    operation = task.operation.given(values)
    y = _full(operation.epilogue, values | {"xhat": rows * rstd}, rows.shape)
    results["y"] = y.astype(task.dtype)
    return results


def _prologue(
    task: Task, values: Mapping[str, jax.Array | float], shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return s as it is normalised, and s as it is returned; both are rounded."""
    assert task.operation.prologue is not None
    s = _full(task.operation.prologue, values, shape)
    rounded = s.astype(task.row_dtype)
    if task.row_dtype == task.compute:
        return rounded, rounded
    # XLA leaves out what only rounds on the way to a wider dtype, but not this.
    kind = jnp.finfo(task.row_dtype)
    return jax.lax.reduce_precision(rounded.astype(task.compute), kind.nexp, kind.nmant), rounded


def backward(task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """Return the gradients `wanted` from x or s, the statistics, dy, and ds if there is one.

    The whole gradient of s is ds + rstd * P(g), where g is that of xhat and P is `_project`. That of a column is a sum
    over all rows.
    """
    derivatives = task.derivative(tuple(name.removeprefix("d") for name in wanted), arrays)
    values, rstd = _normalised(task, arrays)
    shape = arrays["dy"].shape
    if derivatives.g is not None:
        ds = rstd * _project(task, _full(derivatives.g, values, shape), values["xhat"])
        values["ds"] = ds + values["ds"] if "ds" in values else ds
    gradients: dict[str, jax.Array] = {}
    for name, expression in (*derivatives.early, *derivatives.late):
        part = _full(expression, values, shape)
        gradients[name] = gradients[name] + part if name in gradients else part
    dtypes, leading = dict(task.dtypes), tuple(range(len(shape) - task.ndim))
    results = {}
    for name, gradient in gradients.items():
        if task.kind(name) == "column":
            gradient = gradient.sum(leading)
        elif task.kind(name) == "per_row":
            gradient = gradient.sum(task.axes)
        elif task.kind(name) == "group":
            gradient = gradient.sum(tuple(axis for axis in leading if axis not in task.group_axes), keepdims=True)
        results[f"d{name}"] = gradient.astype(dtypes[name])
    return results


def tangent(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """Return the tangents y.dot and s.dot from those of x and of operands: the transpose of `backward`.

    They are made of the expressions of the gradients. Each gradient is linear in dy or ds, so with the tangent of its
    source in that place it is the share of this tangent.
    """
    values, rstd = _normalised(task, arrays)
    shape = values["xhat"].shape
    moved = {name: _wide(task, name, arrays[name + DOT]) for name in sources(task) if name + DOT in arrays}
    derivatives = task.derivative(tuple(moved), arrays)
    y_dot = s_dot = jnp.zeros(shape, task.compute)
    for name, expression in derivatives.late:
        s_dot = s_dot + evaluate(expression, values | {"ds": moved[name]}, jnp)
    if derivatives.g is not None:
        y_dot = _full(derivatives.g, values | {"dy": rstd * _project(task, s_dot, values["xhat"])}, shape)
    for name, expression in derivatives.early:
        y_dot = y_dot + evaluate(expression, values | {"dy": moved[name]}, jnp)
    return {f"y{DOT}": y_dot.astype(task.dtype), f"s{DOT}": s_dot.astype(task.row_dtype)}


def kept(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """Return the arrays of a forward pass, its results among them, that derivatives are computed from."""
    derivatives = task.derivative(sources(task), arrays)
    expressions = (derivatives.g, *(expression for _, expression in (*derivatives.early, *derivatives.late)))
    rows = ("s",) if "s" in task.operation.returns else ("x", *task.operation.before)
    needed = {*rows, *task.norm.statistics}.union(
        *(expression.uses for expression in expressions if expression is not None)
    )
    return {name: array for name, array in arrays.items() if name in needed}


def sources(task: Task) -> Names:
    """Return the names that results are differentiated with respect to."""
    return ("x", *(name for name in task.operation.operands if name not in dict(task.numbers) and name != SEED))


def _values(task: Task, arrays: Arrays) -> dict[str, jax.Array | float]:
    """Return the values that expressions read, in the dtype of the arithmetic, of x, the operands, dy and ds."""
    names = ("x", *task.operation.operands, "dy", "ds")
    wide = {name: _wide(task, name, arrays[name]) for name in names if name in arrays and name != SEED}
    if SEED in arrays:
        shape = next(array.shape for name, array in arrays.items() if task.kind(name) == "full")
        wide[SEED] = uniform(arrays[SEED], shape, task.compute)
    return wide | dict(task.numbers)


def _wide(task: Task, name: str, array: jax.Array) -> jax.Array:
    """Convert an array to the dtype of the arithmetic, shaped to broadcast against x."""
    wide = array.astype(task.compute)
    return jnp.expand_dims(wide, task.axes) if task.kind(name) == "per_row" else wide


def _normalised(task: Task, arrays: Arrays) -> tuple[dict, jax.Array]:
    """Return (values with xhat among them, rstd), rstd with axes of length 1 in place of the normalised ones."""
    values = _values(task, arrays)
    if "s" in arrays:
        rows = arrays["s"].astype(task.compute)
    else:
        rows = arrays["x"].astype(task.compute)
        if task.operation.prologue is not None:
            rows, _ = _prologue(task, values, rows.shape)
    rstd = jnp.expand_dims(arrays["rstd"], task.axes)
    if "mean" in arrays:
        rows = rows - jnp.expand_dims(arrays["mean"], task.axes)
    return values | {"xhat": rows * rstd}, rstd


def _full(expression: Expression, values: Mapping[str, jax.Array | float], shape: tuple[int, ...]) -> jax.Array:
    """Return the value of an expression for every element of x."""
    return jnp.broadcast_to(evaluate(expression, values, jnp), shape)


def _project(task: Task, v: jax.Array, xhat: jax.Array) -> jax.Array:
    """Return P(v) = v - mean(v) - xhat * mean(v * xhat) with means over a row, for rms_norm without mean(v)."""
    projected = v - xhat * (v * xhat).mean(task.axes, keepdims=True)
    return projected - v.mean(task.axes, keepdims=True) if task.norm.subtracts_mean else projected
