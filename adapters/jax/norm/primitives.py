"""The norms as JAX primitives with JAX's own rules, so that its transformations compose in any order.

`jax.custom_vjp` would refuse forward mode, and under grad of vmap it would sum dweight a sample at a time outside the
kernel. Three primitives carry the derivatives:
- forward: y, and mean and rstd where somebody will read them;
- tangent: of y, linear in the tangents of x and of operands; jax.numpy;
- backward: its transpose, of which only the gradients that are wanted are computed.
Each holds as `call` the traced function that it stands for: what it is on a device is sharding.py's and xla/call.py's
business. Leading axes of x are all rows, so vmap has no more to do than to move its axis to the front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ...operation import affine
from . import formulas, sharding
from .formulas import DOT, Arrays, Names, Task

STATISTICS = "cunorm_statistics"  # mean and rstd of a differentiated call, to policies of jax.checkpoint


def forward(task: Task, arrays: Arrays, *, statistics: bool) -> dict[str, jax.Array]:
    """y of x and the operands that are given; with `statistics` also rstd and layer_norm's mean."""
    return bind(forward_p, sharding.call, task, arrays, ("y", *task.norm.statistics) if statistics else ("y",))


def backward(task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """The gradients that are wanted, of dy and what `formulas.kept` names."""
    return bind(backward_p, sharding.call, task, arrays, wanted)


def tangent(task: Task, arrays: Arrays) -> jax.Array:
    """The tangent of y, of what `formulas.kept` names and the tangents that are not zero, x_dot and the like."""
    return bind(tangent_p, _tangent_formula, task, arrays, ("y_dot",))["y_dot"]


def bind(one: Primitive, function: Callable, task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """The arrays `wanted`, by name; function(task, names, wanted, *arrays) is what the primitive stands for."""
    names = tuple(arrays)
    call = jax.make_jaxpr(partial(function, task, names, wanted))(*arrays.values())
    results = one.bind(*arrays.values(), call=call, task=task, names=names, wanted=wanted)
    return dict(zip(wanted, results, strict=True))


def primitive(name: str) -> Primitive:
    """One that stands for its `call`."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(_run)
    made.def_abstract_eval(lambda *avals, call, **_: call.out_avals)
    mlir.register_lowering(made, mlir.lower_fun(_run, multiple_results=True))
    return made


def _run(*arrays: jax.Array, call: ClosedJaxpr, task: Task, names: Names, wanted: Names) -> Sequence[jax.Array]:
    return jaxpr_as_fun(call)(*arrays)


forward_p = primitive("cunorm_forward")
backward_p = primitive("cunorm_backward")
tangent_p = primitive("cunorm_tangent")


def _forward_formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    results = formulas.forward(task, dict(zip(names, arrays, strict=True)))
    return tuple(results[name] for name in wanted)


def _backward_formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    results = formulas.backward(task, dict(zip(names, arrays, strict=True)), wanted)
    return tuple(results[name] for name in wanted)


def _tangent_formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return (formulas.tangent(task, dict(zip(names, arrays, strict=True))),)


# Derivatives.


def _jvp_of_forward(primals, tangents, *, call, task, names, wanted):
    arrays = dict(zip(names, primals, strict=True))
    moved = {f"{name}{DOT}": dot for name, dot in zip(names, tangents, strict=True) if type(dot) is not ad.Zero}
    results = forward(task, arrays, statistics=True)
    saved = {name: checkpoint_name(results[name], STATISTICS) for name in task.norm.statistics}
    dots = [tangent(task, formulas.kept(task, arrays | saved) | moved)]
    if len(wanted) > 1:
        function = partial(_forward_formula, task, names, wanted[1:])
        dots += _jvp_of_formula(function, primals, tangents)
    return [results[name] for name in wanted], dots


def _jvp_of_backward(primals, tangents, *, call, task, names, wanted):
    results = backward(task, dict(zip(names, primals, strict=True)), wanted)
    dots = _jvp_of_formula(partial(_backward_formula, task, names, wanted), primals, tangents)
    return [results[name] for name in wanted], dots


def _jvp_of_tangent(primals, tangents, *, call, task, names, wanted):
    function = partial(_tangent_formula, task, names, wanted)
    return function(*primals), _jvp_of_formula(function, primals, tangents)


def _jvp_of_formula(function: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    """The tangents of function(*primals), by JAX's own rules for jax.numpy."""
    moved = [i for i, dot in enumerate(tangents) if type(dot) is not ad.Zero]

    def of_moved(*values):
        arguments = list(primals)
        for i, value in zip(moved, values, strict=True):
            arguments[i] = value
        return function(*arguments)

    _, dots = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    return dots


def _transpose_of_tangent(cotangents, *arrays, call, task, names, wanted):
    (dy,) = cotangents
    arguments = dict(zip(names, arrays, strict=True))
    unknown = {name: array.aval for name, array in arguments.items() if ad.is_undefined_primal(array)}
    if type(dy) is ad.Zero:
        return [ad.Zero(unknown[name]) if name in unknown else None for name in names]
    known = {name: array for name, array in arguments.items() if not name.endswith(DOT)}
    gradient = {name: f"d{name.removesuffix(DOT)}" for name in unknown}
    gradients = backward(task, {"dy": dy} | known, tuple(gradient.values()))
    # The gradient of an operand may come in another dtype: that of weight, or of x.
    return [gradients[gradient[name]].astype(unknown[name].dtype) if name in unknown else None for name in names]


ad.primitive_jvps[forward_p] = _jvp_of_forward
ad.primitive_jvps[backward_p] = _jvp_of_backward
ad.primitive_jvps[tangent_p] = _jvp_of_tangent
ad.primitive_transposes[tangent_p] = _transpose_of_tangent


# vmap.


def _batch_forward(arrays, dims, *, call, task, names, wanted):
    arrays, mapped = batch_in_front(arrays, dims, names)
    statistics = len(wanted) > 1
    if mapped == {"x"}:
        results = forward(task, arrays, statistics=statistics)
        return [results[name] for name in wanted], [0] * len(wanted)
    # The kernels take one operand for all rows.
    plain = replace(_norm_alone(task), dtype=formulas.compute_dtype(arrays["x"]).name)
    results = forward(plain, {"x": arrays["x"]}, statistics=statistics)
    xhat = results["y"] if "x" in mapped else results["y"][None]
    results["y"] = formulas.epilogue(task, xhat, _beside_rows(task, arrays, mapped, xhat.ndim))
    return [results[name] for name in wanted], [0, *(0 if "x" in mapped else None for _ in wanted[1:])]


def _batch_backward(arrays, dims, *, call, task, names, wanted):
    arrays, mapped = batch_in_front(arrays, dims, names)
    size = next(arrays[name].shape[0] for name in mapped)
    rows = {
        name: array if name in mapped else jnp.broadcast_to(array, (size, *array.shape))
        for name, array in arrays.items()
        if name not in task.operation.operands
    }
    operands = {name: array for name, array in arrays.items() if name not in rows}
    results = {}
    if "dx" in wanted and mapped.isdisjoint(operands):
        results |= backward(task, rows | operands, ("dx",))
    elif "dx" in wanted:
        g = formulas.gradient_of_xhat(task, rows | _beside_rows(task, operands, mapped, rows["x"].ndim))
        results |= backward(_norm_alone(task), rows | {"dy": g}, ("dx",))
    others = tuple(name for name in wanted if name != "dx")
    if others:  # of each sample, where the kernels sum over all rows
        inputs = rows | operands
        axes = [0 if name in rows or name in mapped else None for name in inputs]
        function = partial(_backward_formula, task, tuple(inputs), others)
        results |= zip(others, jax.vmap(function, axes)(*inputs.values()), strict=True)
    return [results[name] for name in wanted], [0] * len(wanted)


def _batch_tangent(arrays, dims, *, call, task, names, wanted):
    function = partial(_tangent_formula, task, names, wanted)
    return jax.vmap(function, dims)(*arrays), [0]


def _norm_alone(task: Task) -> Task:
    """Of which y is xhat."""
    return replace(task, operation=affine(task.operation.norm))


def _beside_rows(task: Task, arrays: Arrays, mapped: set[str], ndim: int) -> dict[str, jax.Array]:
    """The operands as they stand beside rows of `ndim` axes: a batch axis first, then one for each that x has."""
    axes = range(1, ndim - task.ndim)
    return {
        name: jnp.expand_dims(arrays[name], axes) if name in mapped else arrays[name]
        for name in task.operation.operands
        if name in arrays
    }


def batch_in_front(arrays, dims, names) -> tuple[dict[str, jax.Array], set[str]]:
    """The arrays by name, and the names of those that have a batch axis, which is then their first."""
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    moved = (array if dim is None else jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims, strict=True))
    return dict(zip(names, moved, strict=True)), mapped


batching.primitive_batchers[forward_p] = _batch_forward
batching.primitive_batchers[backward_p] = _batch_backward
batching.primitive_batchers[tangent_p] = _batch_tangent
