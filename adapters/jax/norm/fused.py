"""Fused operations on JAX arrays: what `cunorm.fuse` makes, and the named functions of its kind.

A number stands in the program, as eps does. An array without axes becomes a vector for all rows, and an operand that
kernels know no kind for one of the shape of x; their gradients are added up again.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...call import broadcasting, checks
from ...call.checks import Layout
from ...call.store import Float8Store, check_rows
from ...operation import NORMS, SEED, Operation
from . import formulas, functional, sharding
from .arrays import cunorm_backward
from .float8 import results8, task8
from .formulas import Task
from .functional import array


def forward(
    function: str,
    operation: Operation,
    x: jax.Array,
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
) -> tuple[dict[str, jax.Array], jax.Array | None, jax.Array | None]:
    """Return ({"y": y, "s": s if it is returned}, mean, rstd), statistics None unless asked for. All are
    differentiable. With `float8` y8 and y8_scale, and y if it is wide: nothing is differentiable.
    """
    arrays, task = _checked(function, operation, x, operands, demanded, eps, dtype, s_dtype, sm_margin)
    if float8:
        check_rows(function, Layout((), (), x.dtype.name, ""), s_dtype)
        found = results8(task8(task, float8.format, float8.granularity), arrays, scale, wide=float8.wide)
        return {name: found[name] for name in float8.results(operation.returns)}, None, None
    results = functional.FORWARD[operation.norm](task, bool(statistics), arrays)
    return {name: results[name] for name in operation.returns}, results.get("mean"), results.get("rstd")


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: broadcasting.Kinds,
    s_dtype: str | None,
    sm_margin: int,
) -> dict[str, jax.Array]:
    """The gradients `wanted`, by name. `arrays`: x, dy, ds, s, mean, rstd and the operands, None or absent where there
    is none.
    """
    needed = ("x", *NORMS[operation.norm].statistics)
    x = array(function, "x", arrays["x"])
    operands = {name: arrays[name] for name in operation.operands if arrays.get(name) is not None}
    # A number of which the gradient is wanted is an array after all.
    kind = broadcasting.compute_dtype(s_dtype or x.dtype.name)
    operands |= {
        name: jnp.full((), broadcasting.number(function, name, one), kind)
        for name, one in operands.items()
        if isinstance(one, numbers.Real) and name in wanted
    }
    given, task = _checked(function, operation, x, operands, demanded, 0.0, None, s_dtype, sm_margin)
    others = {
        name: array(function, name, arrays.get(name))
        for name in ("dy", "ds", "s", "mean", "rstd")
        if arrays.get(name) is not None or name in needed
    }
    layouts = {name: _layout(one) for name, one in (given | others).items()}
    broadcasting.check_backward(function, operation, layouts, task.row_dtype)
    others.setdefault("dy", jnp.zeros_like(x))
    read = formulas.kept(task, given | others) | {name: others[name] for name in ("dy", "ds") if name in others}
    names = tuple(f"d{name}" for name in wanted)
    results = cunorm_backward(task, names, sharding.prepared(task, {"x": x} | read)) if names else {}
    kinds = dict.fromkeys(given, "column") | dict(task.kinds)
    gradients = {}
    for name in wanted:
        gradients[name] = results[f"d{name}"]
        if name in operands:
            of = array(function, name, operands[name])
            _, pull = jax.vjp(partial(_placed, kind=kinds[name], shape=x.shape), of)
            (gradients[name],) = pull(gradients[name])
    return gradients


def _checked(
    function: str,
    operation: Operation,
    x: Any,
    operands: Mapping[str, Any],
    demanded: broadcasting.Kinds,
    eps: float,
    dtype: str | None,
    s_dtype: str | None,
    sm_margin: int,
) -> tuple[dict[str, jax.Array], Task]:
    """The arrays of a call, as the primitives take them, and the rest of it."""
    x = array(function, "x", x)
    of_x = _layout(x)
    literals = {
        name: broadcasting.number(function, name, one)
        for name, one in operands.items()
        if isinstance(one, numbers.Real)
    }
    given = {name: array(function, name, one) for name, one in operands.items() if name not in literals}
    layouts = {name: _layout(one, None if name == SEED else of_x) for name, one in given.items()}
    kinds = broadcasting.check_operands(function, of_x, layouts | literals, demanded=demanded)
    for argument, name in (("dtype", dtype), ("s_dtype", s_dtype)):
        functional.check_x64(function, argument, name)
    arrays = {name: _placed(one, kinds[name], x.shape) for name, one in given.items()}
    of_operands = {name: one.dtype.name for name, one in arrays.items()}
    task = Task(
        operation,
        ndim=1,
        eps=checks.check_eps(function, eps),
        dtype=dtype or of_x.dtype,
        sm_margin=checks.check_sm_margin(function, sm_margin, None),
        # Of an operand that was left out the gradient has the dtype of x.
        dtypes=tuple((dict.fromkeys(("x", *operation.operands), of_x.dtype) | of_operands).items()),
        s_dtype=None if operation.prologue is None else s_dtype or of_x.dtype,
        kinds=tuple(
            (name, kinds[name] if kinds[name] in ("group", "per_row") else "full")
            for name in arrays
            if kinds[name] not in ("column", "seed")
        ),
        numbers=tuple(literals.items()),
        group_axes=_group_axes(arrays, kinds, x.shape),
    )
    return sharding.prepared(task, {"x": x} | arrays), task


def _group_axes(arrays: Mapping[str, jax.Array], kinds: Mapping[str, str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes of x that operands for groups of rows have, all of them the same."""
    for name, kind in kinds.items():
        if kind == "group":
            own = arrays[name].shape
            return tuple(axis for axis, size in enumerate(shape[:-1]) if own[axis] == size != 1)
    return ()


def _placed(operand: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """In the shape of its kind: a column's one axis, the axes of x, for numbers of rows all but the last, or for groups
    ones where they have no axis of x.
    """
    if kind == "seed":
        return operand.reshape(-1)
    if kind == "group":
        return operand.reshape((1,) * (len(shape) - operand.ndim) + operand.shape)
    to = shape[-1:] if kind == "column" else shape
    if kind == "per_row":
        to, operand = shape[:-1], operand.reshape(operand.shape[:-1])
    if operand.shape == to:
        return operand
    if kind != "column":  # its gradient is a sum of what is not rounded before
        operand = operand.astype(jnp.promote_types(operand.dtype, jnp.float32))
    return _expanded(to, operand.reshape(operand.shape[max(0, operand.ndim - len(to)) :]))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _expanded(shape: tuple[int, ...], operand: jax.Array) -> jax.Array:
    return jnp.broadcast_to(operand, shape)


@_expanded.defjvp
def _jvp_of_expanded(shape, primals, tangents):
    """By JAX's own rule the gradient would be a sum in 16 bits."""
    (dot,) = tangents
    wide = dot.astype(jnp.promote_types(dot.dtype, jnp.float32))
    return _expanded(shape, *primals), jnp.broadcast_to(wide, shape).astype(dot.dtype)


def _layout(of: jax.Array, x: Layout | None = None) -> Layout:
    """An operand without axes is one number for all columns."""
    return Layout(of.shape or (x.shape[-1:] if x else ()), (), of.dtype.name, "")
