"""The backend of JAX arrays, which runs cunorm's own functions and what `cunorm.fuse` makes.

A number stands in the program, as eps does. An array without axes becomes a vector for all rows, and an operand of a
kind that kernels do not know becomes an array of the shape of x. Their gradients are added up again.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...call import broadcasting, checks
from ...call.backend import CallOptions
from ...call.checks import Layout, NormOptions, NormTuple
from ...call.store import Float8Store, affine_scale, check_rows, check_x
from ...operation import NORMS, SEED
from ...plan.problem import FLOAT8, compute_dtype
from . import formulas, functional, primitives, sharding
from .formulas import Arrays, Task
from .functional import array


def norm(options: NormTuple, arrays: Sequence[Any], eps: float, out: None) -> tuple[jax.Array, ...]:
    """Run `Backend.norm`; all results are differentiable."""
    options = NormOptions(*options)
    _refuse(options.function, "out", out)
    given, task = functional.checked(options, arrays, eps)
    results = functional.FORWARD[options.norm](task, options.returns, given)
    statistics = task.norm.statistics if options.returns else ()
    return tuple(results[name] for name in ("y", *statistics))


def norm_float8(options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> tuple[jax.Array, ...]:
    """Run `Backend.norm_float8`."""
    options = NormOptions(*options)
    x = arrays[0]
    check_x(options.function, Layout(x.shape, (), x.dtype.name, ""))
    given, task = functional.checked(options, arrays, eps)
    results = stored(task.stored(options.returns), given, scale)
    return tuple(results[name] for name in options.returns.results(("y",)))


def stored(task: Task, arrays: dict[str, jax.Array], scale: Any) -> dict[str, jax.Array]:
    """Return what a task with a store returns, by name.

    `scale` is the one scale of all y, None for the scale that no value of an affine operation exceeds.
    """
    assert task.store is not None
    if task.store.granularity == "tensor":
        if scale is None:
            scale = unexceeded(task, arrays, task.store)
        arrays = sharding.prepared(task, arrays | {"y8_scale": jnp.asarray(scale, jnp.float32).reshape(())})
    return arrays | functional.FORWARD[task.operation.norm](task, False, arrays)


def unexceeded(task: Task, arrays: Arrays, store: Float8Store) -> jax.Array:
    """Return a scale for all of y that no value of an affine operation exceeds."""
    _, cols = task.rows_and_cols(arrays["x"].shape)
    # XLA must not know this number, as by a known number it divides inexactly (float8.quantise).
    largest: Any = jax.lax.optimization_barrier(jnp.float32(FLOAT8[store.format]))
    return affine_scale(jnp, task.operation, largest, cols, arrays.get("weight"), arrays.get("bias"))


def norm_backward(options: NormTuple, arrays: Sequence[Any], dx_out: None) -> tuple[jax.Array | None, ...]:
    """Run `Backend.norm_backward`."""
    options = NormOptions(*options)
    function = options.function
    _refuse(function, "dx_out", dx_out)
    named = dict(zip(("dy", "x", "mean", "rstd", "weight"), arrays, strict=True))
    given = {
        name: array(function, name, value)
        for name, value in named.items()
        if value is not None or name in options.required
    }
    layouts = {name: _layout(value) for name, value in given.items()}
    shape = checks.check_backward(options, layouts)
    mask = checks.check_output_mask(function, options.returns, 3 if options.norm == "layer_norm" else 2)
    margin = checks.check_sm_margin(function, options.sm_margin, None)
    parameter = layouts.get("weight", layouts["x"]).dtype
    dtypes = (("x", layouts["x"].dtype), ("weight", parameter), ("bias", parameter))
    task = Task(options.operation, len(shape), 0.0, layouts["dy"].dtype, margin, dtypes)
    wanted = tuple(name for name, is_wanted in zip(("dx", "dweight", "dbias"), mask, strict=True) if is_wanted)
    results = cunorm_backward(task, wanted, sharding.prepared(task, given)) if wanted else {}
    return results.get("dx"), results.get("dweight"), results.get("dbias")


def _refuse(function: str, name: str, out: Any) -> None:
    if out is not None:
        got = type(out).__name__
        raise TypeError(f"{function}: {name} must be None, as JAX's arrays are not written to; got {got}.")


def forward(options: CallOptions, arrays: Mapping[str, Any], eps: float, scale: Any = None) -> dict[str, jax.Array]:
    """Run `Backend.forward`; all results are differentiable, but for those with an FP8 output."""
    given, task = _checked(options, arrays, eps)
    if options.store:
        check_rows(options.function, Layout((), (), given["x"].dtype.name, ""), options.s_dtype)
        results = stored(task.stored(options.store), given, scale)
        return {name: results[name] for name in options.store.results(options.operation.returns)}
    return functional.FORWARD[options.operation.norm](task, options.statistics, given)


def backward(options: CallOptions, arrays: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, jax.Array]:
    """Run `Backend.backward`."""
    function, operation = options.function, options.operation
    needed = ("x", *NORMS[operation.norm].statistics)
    x = array(function, "x", arrays["x"])
    operands = {name: arrays[name] for name in operation.operands if arrays.get(name) is not None}
    # A number of which the gradient is wanted is an array after all.
    kind = compute_dtype(options.s_dtype or x.dtype.name)
    operands |= {
        name: jnp.full((), broadcasting.number(function, name, operand), kind)
        for name, operand in operands.items()
        if isinstance(operand, numbers.Real) and name in wanted
    }
    given, task = _checked(options._replace(dtype=None), {"x": x, **operands}, 0.0)
    others = {
        name: array(function, name, arrays.get(name))
        for name in ("dy", "ds", "s", "mean", "rstd")
        if arrays.get(name) is not None or name in needed
    }
    layouts = {name: _layout(value) for name, value in (given | others).items()}
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
            operand = array(function, name, operands[name])
            _, pull = jax.vjp(partial(_placed, kind=kinds[name], shape=x.shape), operand)
            (gradients[name],) = pull(gradients[name])
    return gradients


def _checked(options: CallOptions, arrays: Mapping[str, Any], eps: float) -> tuple[dict[str, jax.Array], Task]:
    """Return the arrays of a call as the primitives take them, and the rest of it."""
    function, operation = options.function, options.operation
    x = array(function, "x", arrays["x"])
    of_x = _layout(x)
    operands = {name: operand for name, operand in arrays.items() if name != "x"}
    literals = {
        name: broadcasting.number(function, name, operand)
        for name, operand in operands.items()
        if isinstance(operand, numbers.Real)
    }
    given = {name: array(function, name, operand) for name, operand in operands.items() if name not in literals}
    layouts = {name: _layout(operand, None if name == SEED else of_x) for name, operand in given.items()}
    kinds = broadcasting.check_operands(function, of_x, layouts | literals, demanded=options.demanded)
    for argument in ("dtype", "s_dtype"):
        functional.check_x64(function, argument, getattr(options, argument))
    placed = {name: _placed(operand, kinds[name], x.shape) for name, operand in given.items()}
    of_operands = {name: operand.dtype.name for name, operand in placed.items()}
    task = Task(
        operation,
        ndim=1,
        eps=checks.check_eps(function, eps),
        dtype=options.dtype or of_x.dtype,
        sm_margin=checks.check_sm_margin(function, options.sm_margin, None),
        # The gradient of an operand that was left out has the dtype of x.
        dtypes=tuple((dict.fromkeys(("x", *operation.operands), of_x.dtype) | of_operands).items()),
        s_dtype=None if operation.prologue is None else options.s_dtype or of_x.dtype,
        kinds=tuple(
            (name, kinds[name] if kinds[name] in ("group", "per_row") else "full")
            for name in placed
            if kinds[name] not in ("column", "seed")
        ),
        numbers=tuple(literals.items()),
        group_axes=_group_axes(placed, kinds, x.shape),
    )
    return sharding.prepared(task, {"x": x} | placed), task


def _group_axes(arrays: Mapping[str, jax.Array], kinds: Mapping[str, str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading axes of x that operands for groups of rows have, which are the same for all of them."""
    for name, kind in kinds.items():
        if kind == "group":
            own = arrays[name].shape
            return tuple(axis for axis, size in enumerate(shape[:-1]) if own[axis] == size != 1)
    return ()


def _placed(operand: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """Reshape an operand as its kind asks.

    A column has one axis, numbers of rows have all axes of x but the last, and groups have an axis of length 1 where
    they have none of x.
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
    """Broadcast in float32 first, as by JAX's own rule the gradient would be a sum in 16 bits."""
    (dot,) = tangents
    wide = dot.astype(jnp.promote_types(dot.dtype, jnp.float32))
    return _expanded(shape, *primals), jnp.broadcast_to(wide, shape).astype(dot.dtype)


def _layout(of: jax.Array, x: Layout | None = None) -> Layout:
    """Return the layout of an array; an operand without axes, beside `x`, is one number for all columns."""
    return Layout(of.shape or (x.shape[-1:] if x else ()), (), of.dtype.name, "")


@partial(jax.jit, static_argnums=(0, 1))
def cunorm_backward(task: Task, wanted: tuple[str, ...], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return primitives.backward(task, arrays, wanted)
