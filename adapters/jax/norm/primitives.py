"""Operations as JAX primitives with JAX's own rules, so that its transformations compose in any order.

`jax.custom_vjp` would refuse forward mode, and under grad of vmap it would sum dweight a sample at a time outside the
kernel. Three primitives carry the derivatives:
- forward: y, s if it is returned, and mean and rstd where somebody will read them;
- tangent: of y and s, linear in the tangents of x and of operands; jax.numpy;
- backward: its transpose, of which only the gradients that are wanted are computed.
Each holds as `call` the traced function that it stands for: what it is on a device is sharding.py's and xla/call.py's
business. Leading axes of x are all rows, so vmap has no more to do than to move its axis to the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...call import broadcasting
from ...operation import SEED
from ...plan.problem import MOST_GROUPS
from ..private import ad, batching, has_primitives
from ..xla.call import formula, primitive
from . import formulas, sharding
from .formulas import DOT, Arrays, Names, Task

STATISTICS = "cunorm_statistics"  # mean and rstd of a differentiated call, to policies of jax.checkpoint


def forward(task: Task, arrays: Arrays, *, statistics: bool) -> dict[str, jax.Array]:
    """Compute what the operation returns, with `statistics` also rstd and layer_norm's mean.

    `arrays` are x and the operands that are given.
    """
    wanted = (*task.returns, *(task.norm.statistics if statistics else ()))
    return bind(forward_p, sharding.call, task, arrays, wanted)


def backward(task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """Return the gradients `wanted` from dy, ds if there is one, and what `formulas.kept` names."""
    present = {*arrays, *dict(task.numbers)}
    names = [name.removeprefix("d") for name in wanted]
    same = broadcasting.same_gradients(task.operation, names, present, dict(task.kinds), dict(task.dtypes))
    computed = tuple(f"d{name}" for name in dict.fromkeys(same.values()))
    results = bind(backward_p, sharding.call, task, arrays, computed)
    return {f"d{name}": results[f"d{of}"] for name, of in same.items()}


def tangent(task: Task, arrays: Arrays) -> list[jax.Array]:
    """Return the tangents of what the operation returns.

    `arrays` are what `formulas.kept` names, and the tangents that are not zero, such as x.dot.
    """
    wanted = tuple(f"{name}{DOT}" for name in task.operation.returns)
    return list(bind(tangent_p, _tangent_formula, task, arrays, wanted).values())


def bind(jax_primitive: Any, function: Callable, task: Task, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
    """Return the arrays `wanted` by name. The primitive stands for function(task, names, wanted, *arrays)."""
    names = tuple(arrays)
    if not has_primitives:
        return dict(zip(wanted, formula(task, names, wanted, *arrays.values()), strict=True))
    call = jax.make_jaxpr(partial(function, task, names, wanted))(*arrays.values())
    results = jax_primitive.bind(*arrays.values(), call=call, task=task, names=names, wanted=wanted)
    return dict(zip(wanted, results, strict=True))


forward_p = primitive("cunorm_forward")
backward_p = primitive("cunorm_backward")
tangent_p = primitive("cunorm_tangent")


def _statistics_formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    results = formulas.forward(task, dict(zip(names, arrays, strict=True)))
    return tuple(results[name] for name in wanted)


def _tangent_formula(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    results = formulas.tangent(task, dict(zip(names, arrays, strict=True)))
    return tuple(results[name] for name in wanted)


# Derivatives.


def _jvp_of_forward(primals, tangents, *, call, task, names, wanted):
    if task.store:
        raise ValueError(
            f"{task.operation.norm}_fp8: x and operands must not be differentiated, as FP8 output has no gradient; "
            "got one that is. Pass jax.lax.stop_gradient of it."
        )
    arrays = dict(zip(names, primals, strict=True))
    moved = {f"{name}{DOT}": dot for name, dot in zip(names, tangents, strict=True) if type(dot) is not ad.Zero}
    results = forward(task, arrays, statistics=True)
    saved = results | {name: checkpoint_name(results[name], STATISTICS) for name in task.norm.statistics}
    dots = tangent(task, formulas.kept(task, arrays | saved) | moved)
    of_rows = wanted[len(task.operation.returns) :]
    if of_rows:
        dots += _jvp_of_formula(partial(_statistics_formula, task, names, of_rows), primals, tangents)
    return [results[name] for name in wanted], dots


def _jvp_of_backward(primals, tangents, *, call, task, names, wanted):
    results = bind(backward_p, sharding.call, task, dict(zip(names, primals, strict=True)), wanted)
    dots = _jvp_of_formula(partial(formula, task, names, wanted), primals, tangents)
    return [results[name] for name in wanted], dots


def _jvp_of_tangent(primals, tangents, *, call, task, names, wanted):
    function = partial(_tangent_formula, task, names, wanted)
    return function(*primals), _jvp_of_formula(function, primals, tangents)


def _jvp_of_formula(function: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    """Return the tangents of function(*primals), by JAX's own rules for jax.numpy."""
    moved = [i for i, dot in enumerate(tangents) if type(dot) is not ad.Zero]

    def of_moved(*values):
        arguments = list(primals)
        for i, value in zip(moved, values, strict=True):
            arguments[i] = value
        return function(*arguments)

    _, dots = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    return dots


def _transpose_of_tangent(cotangents, *arrays, call, task, names, wanted):
    arguments = dict(zip(names, arrays, strict=True))
    unknown = {name: array.aval for name, array in arguments.items() if ad.is_undefined_primal(array)}
    given = {f"d{name.removesuffix(DOT)}": cotangent for name, cotangent in zip(wanted, cotangents, strict=True)}
    if all(type(cotangent) is ad.Zero for cotangent in given.values()):
        return [ad.Zero(unknown[name]) if name in unknown else None for name in names]
    given["dy"] = ad.instantiate_zeros(given["dy"])
    given = {name: cotangent for name, cotangent in given.items() if type(cotangent) is not ad.Zero}
    known = {name: array for name, array in arguments.items() if not name.endswith(DOT)}
    gradient = {name: f"d{name.removesuffix(DOT)}" for name in unknown}
    gradients = backward(task, given | known, tuple(gradient.values()))
    return [gradients[gradient[name]] if name in unknown else None for name in names]


ad.primitive_jvps[forward_p] = _jvp_of_forward
ad.primitive_jvps[backward_p] = _jvp_of_backward
ad.primitive_jvps[tangent_p] = _jvp_of_tangent
ad.primitive_transposes[tangent_p] = _transpose_of_tangent


# vmap.


def _batch_by_formula(arrays, dims, *, call, task, names, wanted):
    """Map by the formulas. A seed draws by the number of a row in its sample, so samples cannot become rows."""
    function = partial(formula, task, names, wanted)
    return jax.vmap(function, dims)(*arrays), [0] * len(wanted)


def _batch_stored(arrays, dims, *, call, task, names, wanted):
    by_rows = {name for name in names if task.kind(name) in ("full", "per_row")}
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    if mapped == by_rows and not task.group_axes and SEED not in names:
        results = bind(forward_p, sharding.call, task, batch_in_front(arrays, dims, names)[0], wanted)
        return [results[name] for name in wanted], [0] * len(wanted)
    # The kernel takes one operand, and one scale, for all rows.
    return jax.vmap(partial(_in_two, task, names, wanted), dims)(*arrays), [0] * len(wanted)


def _in_two(task: Task, names: Names, wanted: Names, *arrays: jax.Array) -> list[jax.Array]:
    """Return the results of the norm in float32, and what its store makes of them."""
    given = dict(zip(names, arrays, strict=True))
    of_norm = {name: array for name, array in given.items() if name != "y8_scale"}
    results = task.rounded(forward(task.wide, of_norm, statistics=False), given)
    return [results[name] for name in wanted]


def _batch_forward(arrays, dims, *, call, task, names, wanted):
    if task.store:
        return _batch_stored(arrays, dims, call=call, task=task, names=names, wanted=wanted)
    if SEED in task.operation.operands:
        return _batch_by_formula(arrays, dims, call=call, task=task, names=names, wanted=wanted)
    task, arrays = _in_rows(task, *batch_in_front(arrays, dims, names))
    results = bind(forward_p, sharding.call, task, arrays, wanted)
    return [results[name] for name in wanted], [0] * len(wanted)


def _batch_backward(arrays, dims, *, call, task, names, wanted):
    if SEED in task.operation.operands:
        return _batch_by_formula(arrays, dims, call=call, task=task, names=names, wanted=wanted)
    arrays, mapped = batch_in_front(arrays, dims, names)
    in_rows, all_rows = _in_rows(task, arrays, mapped, {name.removeprefix("d") for name in wanted})
    of_rows = tuple(name for name in wanted if task.kind(name) in ("full", "per_row") or in_rows.kind(name) == "group")
    results = {}
    if of_rows:
        shapes = dict(zip(wanted, (aval.shape for aval in call.out_avals), strict=True))
        gradients = bind(backward_p, sharding.call, in_rows, all_rows, of_rows)
        results = {name: array.reshape(array.shape[0], *shapes[name]) for name, array in gradients.items()}
    others = tuple(name for name in wanted if name not in of_rows)
    if others:  # of each sample, where the kernels sum over all rows
        axes = [0 if name in mapped else None for name in arrays]
        function = partial(formula, task, tuple(arrays), others)
        results |= zip(others, jax.vmap(function, axes)(*arrays.values()), strict=True)
    return [results[name] for name in wanted], [0] * len(wanted)


def _batch_tangent(arrays, dims, *, call, task, names, wanted):
    function = partial(_tangent_formula, task, names, wanted)
    return jax.vmap(function, dims)(*arrays), [0] * len(wanted)


def _in_rows(
    task: Task, arrays: dict[str, jax.Array], mapped: set[str], of_each: Collection[str] = ()
) -> tuple[Task, dict[str, jax.Array]]:
    """Make rows of a batch.

    What has rows gets the batch axis. An operand that has it is for groups of rows, and so is one whose gradient is
    wanted `of_each` sample. Kernels have groups of one sort, so what is for others gets rows.
    """
    size = next(arrays[name].shape[0] for name in mapped)
    first = next(name for name in arrays if task.kind(name) == "full")
    shape = (size, *arrays[first].shape[first in mapped :])
    vectors = [name for name in task.operation.operands if task.kind(name) in ("column", "group")]
    of_samples = {name for name in vectors if name in mapped or name in of_each}
    axes: dict[str, tuple[int, ...]] = {}  # in front of each vector
    for name in vectors:
        own = tuple(axis + 1 for axis in task.group_axes) if task.kind(name) == "group" else ()
        axes[name] = (0, *own) if name in of_samples else own
    chosen = next((before for before in axes.values() if before and _regular(before, shape, task.ndim)), ())
    kinds, in_rows = dict(task.kinds), dict(arrays)
    for name, before in axes.items():
        if before:
            kinds[name] = "group" if before == chosen else "full"
    for name, array in arrays.items():
        if axes.get(name):
            array = array if name in mapped else array[None]
            if task.kind(name) == "column":
                array = jnp.expand_dims(array, range(1, len(shape) - task.ndim))
            of_one = array.shape[1:] if kinds[name] == "group" else shape[1:]
            whole = name in of_samples or kinds[name] == "full"
            in_rows[name] = jnp.broadcast_to(array, (size if whole else 1, *of_one))
        elif name not in axes and name not in mapped:
            in_rows[name] = jnp.broadcast_to(array, (size, *array.shape))
    return replace(task, kinds=tuple(kinds.items()), group_axes=chosen), in_rows


def _regular(axes: tuple[int, ...], shape: tuple[int, ...], ndim: int) -> bool:
    """Return whether kernels take groups of these axes."""
    between = [axis for axis in range(axes[0], axes[-1]) if axis not in axes and shape[axis] != 1]
    rows, count = math.prod(shape[: len(shape) - ndim]), math.prod(shape[axis] for axis in axes)
    return not between and rows < 2**32 and 0 < count <= MOST_GROUPS


def batch_in_front(arrays, dims, names) -> tuple[dict[str, jax.Array], set[str]]:
    """Return the arrays by name, each batch axis moved to the front, and the names of those that have one."""
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    moved = (array if dim is None else jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims, strict=True))
    return dict(zip(names, moved, strict=True)), mapped


batching.primitive_batchers[forward_p] = _batch_forward
batching.primitive_batchers[backward_p] = _batch_backward
batching.primitive_batchers[tangent_p] = _batch_tangent
