"""The norms, their gradients and their tangents in jax.numpy: for every platform without kernels, and for derivatives
of the gradients. All arithmetic is in `compute_dtype(x)`.

Arrays go by name, as everywhere in this adapter: x (..., *normalised axes), dy as y, mean and rstd the shape of x
without its normalised axes, operands that of the normalised axes. What is done with an operand stands in the operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from ...expression_texts import evaluate
from ...norm.problem import Problem, backward_problem, forward_problem
from ...operation import NORMS, Norm, Operation, derivative

Arrays = Mapping[str, jax.Array]
Names = tuple[str, ...]

DOT = "_dot"  # ends the names of tangents

FULL = ("x", "y", "dx", "dy")
PER_ROW = ("mean", "rstd")


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, apart from the arrays."""

    operation: Operation
    ndim: int  # normalised axes, the last ones
    eps: float
    dtype: str  # of y
    sm_margin: int

    @property
    def norm(self) -> Norm:
        return NORMS[self.operation.norm]

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    def kind(self, name: str) -> str:
        """How an array lies beside x, in the words of norm/problem.py."""
        return "full" if name in FULL else "per_row" if name in PER_ROW else "column"

    def results(self, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
        """At least the arrays `wanted`: y and statistics of x and operands, or gradients."""
        return forward(self, arrays) if "y" in wanted else backward(self, arrays, wanted)

    def problem(self, avals: Mapping[str, ShapedArray], wanted: Names) -> Problem:
        """What kernels are asked; `avals`, of arguments and results, are dense: XLA places them at multiples of 16
        bytes at least.
        """
        rows, cols = self.rows_and_cols(avals["x"].shape)
        dtypes = {name: aval.dtype.name for name, aval in avals.items()}
        if "y" in wanted:
            return forward_problem(self.operation, rows, cols, dtypes, sm_margin=self.sm_margin)
        sources = [name.removeprefix("d") for name in wanted]
        return backward_problem(self.operation, rows, cols, dtypes, sources, sm_margin=self.sm_margin)

    def rows_and_cols(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of what has the shape of x."""
        cols = math.prod(shape[len(shape) - self.ndim :])
        return math.prod(shape) // cols, cols


def compute_dtype(x: jax.Array) -> jnp.dtype:
    """Of statistics and of all arithmetic."""
    return jnp.dtype("float64" if x.dtype == jnp.float64 else "float32")


def forward(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """y and the statistics."""
    x = arrays["x"]
    values = x.astype(compute_dtype(x))
    results = {}
    if task.norm.subtracts_mean:
        mean = values.mean(task.axes, keepdims=True)
        values = values - mean
        lost = values.mean(task.axes, keepdims=True)  # by the rounding of mean
        values = values - lost
        results["mean"] = (mean + lost).squeeze(task.axes)
    rstd = jax.lax.rsqrt((values * values).mean(task.axes, keepdims=True) + task.eps)
    results["rstd"] = rstd.squeeze(task.axes)
    results["y"] = epilogue(task, values * rstd, arrays)
    return results


def epilogue(task: Task, xhat: jax.Array, arrays: Arrays) -> jax.Array:
    """y, rounded to its dtype."""
    y = evaluate(task.operation.given(arrays).epilogue, _values(task, arrays, xhat), jnp)
    return y.astype(task.dtype)


def backward(task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """The gradients that are wanted: dx = rstd * P(g), g that of xhat and P as in `_project`, in the dtype of x; those
    of operands, sums over all rows, in the dtype of weight, without one in that of x.
    """
    x = arrays["x"]
    found = derivative(task.operation, [name.removeprefix("d") for name in wanted], arrays)
    xhat, rstd = _normalised(task, arrays)
    values = _values(task, arrays, xhat)
    rows = tuple(range(x.ndim - task.ndim))
    dtype = arrays.get("weight", x).dtype
    results = {f"d{name}": evaluate(one, values, jnp).sum(rows).astype(dtype) for name, one in found.early}
    if found.g is not None:
        results["dx"] = (rstd * _project(task, evaluate(found.g, values, jnp), xhat)).astype(x.dtype)
    return results


def gradient_of_xhat(task: Task, arrays: Arrays) -> jax.Array:
    """What `backward` calls g, in the dtype of the arithmetic."""
    xhat, _ = _normalised(task, arrays)
    g = derivative(task.operation, ("x",), arrays).g
    assert g is not None  # that of x needs it
    return evaluate(g, _values(task, arrays, xhat), jnp)


def tangent(task: Task, arrays: Arrays) -> jax.Array:
    """The tangent of y, of those of x and of operands (x_dot and the like): the transpose of `backward`.

    Element by element it is what the gradients are: each is linear in dy, so with a tangent in place of dy it is that
    tangent's share.
    """
    xhat, rstd = _normalised(task, arrays)
    values = _values(task, arrays, xhat)
    moved = {name: arrays[name + DOT].astype(xhat.dtype) for name in _sources(task) if name + DOT in arrays}
    found = derivative(task.operation, tuple(moved), arrays)
    y_dot = jnp.zeros_like(xhat)
    if found.g is not None:
        xhat_dot = rstd * _project(task, moved["x"], xhat)
        y_dot = evaluate(found.g, values | {"dy": xhat_dot}, jnp)
    for name, one in found.early:
        y_dot = y_dot + evaluate(one, values | {"dy": moved[name]}, jnp)
    return y_dot.astype(task.dtype)


def kept(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """Those of the arrays of a forward pass, its statistics among them, that derivatives are computed from."""
    found = derivative(task.operation, _sources(task), arrays)
    expressions = (found.g, *(one for _, one in found.early))
    needed = {"x", *task.norm.statistics}.union(*(one.uses for one in expressions if one is not None))
    return {name: array for name, array in arrays.items() if name in needed}


def _sources(task: Task) -> Names:
    """What y is differentiated with respect to."""
    return ("x", *task.operation.operands)


def _values(task: Task, arrays: Arrays, xhat: jax.Array) -> dict[str, jax.Array]:
    """What expressions are of, in the dtype of the arithmetic: xhat, and what was given of dy and the operands."""
    names = ("dy", *task.operation.operands)
    return {"xhat": xhat} | {name: arrays[name].astype(xhat.dtype) for name in names if name in arrays}


def _normalised(task: Task, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """(xhat, rstd), rstd with axes of length 1 in place of the normalised ones."""
    x = arrays["x"].astype(compute_dtype(arrays["x"]))
    rstd = jnp.expand_dims(arrays["rstd"], task.axes)
    if "mean" in arrays:
        x = x - jnp.expand_dims(arrays["mean"], task.axes)
    return x * rstd, rstd


def _project(task: Task, v: jax.Array, xhat: jax.Array) -> jax.Array:
    """P(v) = v - mean(v) - xhat * mean(v * xhat), the means over a row; for rms_norm without mean(v)."""
    projected = v - xhat * (v * xhat).mean(task.axes, keepdims=True)
    return projected - v.mean(task.axes, keepdims=True) if task.norm.subtracts_mean else projected
