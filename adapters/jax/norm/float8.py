"""The norms, and fused operations, with y in 8 bits on JAX arrays: one kernel on CUDA, elsewhere jax.numpy.

A primitive of their own, beside those of primitives.py: leading axes are rows, so vmap moves its axis to the front; a
derivative there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...call import store
from ...call.checks import Layout
from ...operation import SEED
from ...plan.problem import BLOCK, FLOAT8, SCALES
from ..private import ad, batching
from . import formulas, functional, primitives, sharding
from .formulas import Arrays, Names, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Task(Task):
    """The forward pass with the results y8, y8_scale (an argument where one is for all), y, and s if it is returned."""

    y8: str  # its dtype
    granularity: str | int

    @property
    def wide(self) -> Task:
        """Of which y is what is rounded."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Task)}
        values["dtype"] = "float32"
        return Task(**values)

    def results(self, arrays: Arrays, wanted: Names) -> dict[str, jax.Array]:
        return self.rounded(formulas.forward(self.wide, arrays), arrays)

    def rounded(self, found: Arrays, arrays: Arrays) -> dict[str, jax.Array]:
        """All results, of those with y in float32."""
        y = found["y"]
        leading = y.shape[: y.ndim - self.ndim]
        _, cols = self.rows_and_cols(y.shape)
        y8, scales = quantise(y.reshape(-1, cols), self.granularity, self.y8, arrays.get("y8_scale"))
        scales = scales.reshape(store.scales_shape(self.granularity, leading, cols))
        return {**found, "y8": y8.reshape(y.shape), "y8_scale": scales, "y": y.astype(self.dtype)}


def task8(task: Task, y8: str, granularity: str | int) -> Float8Task:
    """The same with y in 8 bits."""
    values: dict[str, Any] = {one.name: getattr(task, one.name) for one in fields(Task)}
    values["kinds"] = (*task.kinds, ("y8", "full"), ("y8_scale", SCALES[granularity]))
    return Float8Task(**values, y8=y8, granularity=granularity)


def forward(
    function: str,
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    granularity: str | int,
    scale: Any,
    dtype: Any,
    sm_margin: int,
    output: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return (y in jnp.float8_e4m3fn or float8_e5m2, scale, y), the last None unless asked for."""
    store.check_granularity(function, granularity, scale)
    store.check_x(function, Layout(x.shape, (), x.dtype.name, ""))
    name = store.check_format(function, dtype)
    arrays, task = functional.checked(
        function, x, normalized_shape, weight, bias, eps, zero_centered_gamma, None, sm_margin
    )
    results = results8(task8(task, name, granularity), arrays, scale, wide=output)
    return results["y8"], results["y8_scale"], results.get("y")


def results8(task: Float8Task, arrays: dict[str, jax.Array], scale: Any, *, wide: bool) -> dict[str, jax.Array]:
    """y8, y8_scale, y if it is wide, and s if it is returned. `scale` is one for all, None for the one that no value
    of an affine operation exceeds.
    """
    if task.granularity == "tensor":
        if scale is None:
            scale = unexceeded(task, arrays, task.y8)
        arrays = sharding.prepared(task, arrays | {"y8_scale": jnp.asarray(scale, jnp.float32).reshape(())})
    return arrays | cunorm_float8(task, wide, arrays)


def unexceeded(task: Task, arrays: Arrays, y8: str) -> jax.Array:
    """A scale for all of y that no value of an affine operation exceeds."""
    _, cols = task.rows_and_cols(arrays["x"].shape)
    zero_centered = "weight" in arrays and dict(task.operation.defaults)["weight"] == 0
    # Of a number that XLA does not know, for it divides by one that it knows as `quantise` says.
    largest: Any = jax.lax.optimization_barrier(jnp.float32(FLOAT8[y8]))
    parameters = (arrays.get("weight"), arrays.get("bias"), zero_centered)
    return store.static_scale(jnp, task.norm.subtracts_mean, cols, *parameters, largest)


@partial(jax.jit, static_argnums=(0, 1))
def cunorm_float8(task: Float8Task, wide: bool, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One program for all calls alike."""
    returned = [name for name in task.operation.returns if name != "y" or wide]
    wanted = ("y8", *(() if "y8_scale" in arrays else ("y8_scale",)), *returned)
    return primitives.bind(float8_p, sharding.call, task, arrays, wanted)


float8_p = primitives.primitive("cunorm_float8")


def _refuse_derivatives(primals, tangents, *, call, task, names, wanted):
    raise ValueError(
        f"{task.operation.norm}_fp8: x and operands must not be differentiated, as y in 8 bits has no gradient; got "
        "one that is. Pass jax.lax.stop_gradient of it."
    )


def _batch(arrays, dims, *, call, task, names, wanted):
    by_rows = {name for name in names if task.kind(name) in ("full", "per_row")}
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    if mapped == by_rows and not task.group_axes and SEED not in names:
        moved, _ = primitives.batch_in_front(arrays, dims, names)
        results = primitives.bind(float8_p, sharding.call, task, moved, wanted)
        return [results[name] for name in wanted], [0] * len(wanted)
    # The kernel takes one operand, and one scale, for all rows.
    return jax.vmap(partial(_in_two, task, names, wanted), dims)(*arrays), [0] * len(wanted)


def _in_two(task: Float8Task, names: Names, wanted: Names, *arrays: jax.Array) -> list[jax.Array]:
    """The results of the norm in float32, and what is made of it."""
    given = dict(zip(names, arrays, strict=True))
    of_norm = {name: array for name, array in given.items() if name != "y8_scale"}
    results = task.rounded(primitives.forward(task.wide, of_norm, statistics=False), given)
    return [results[name] for name in wanted]


ad.primitive_jvps[float8_p] = _refuse_derivatives
batching.primitive_batchers[float8_p] = _batch


def quantise(y: jax.Array, granularity: str | int, name: str, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What kernels_cu/rows/float8.cuh does, of float32 rows, y[rows, cols]."""
    cols = y.shape[1]
    if scale is not None:
        return _rounded(y * (1 / scale), name), scale
    most = jnp.float32(store.MOST_MULTIPLIER)
    width = BLOCK if granularity == BLOCK else cols
    blocks = -(-cols // width)
    bits = bits_of_magnitudes(y)
    padding = ((0, 0), (0, blocks * width - cols))
    bits = jax.lax.reduce_window(bits, jnp.int32(0), jax.lax.max, (1, width), (1, width), padding)
    largest = jax.lax.bitcast_convert_type(bits, jnp.float32)
    # An array: by one number XLA divides by multiplying by its reciprocal, which rounds once more.
    largest_number = jnp.where(largest > 0, jnp.float32(FLOAT8[name]), 1)
    quotient = largest_number / largest
    tiny = quotient > most
    multiplier = jnp.where(tiny, most, quotient)
    scales = jnp.where(tiny, jnp.where(largest == 0, 1, 1 / most), largest / largest_number)
    scales = scales + (largest - largest)  # NaN where the largest is not finite
    return _rounded(y * jnp.repeat(multiplier, width, axis=1)[:, :cols], name), scales


def bits_of_magnitudes(values: jax.Array) -> jax.Array:
    """In their order, NaN as the largest: of floats XLA's maximum on the CPU lost it."""
    return jax.lax.bitcast_convert_type(abs(values), jnp.int32)


def _rounded(values: jax.Array, name: str) -> jax.Array:
    """To nearest even; what is too large becomes the largest."""
    return jnp.clip(values, -FLOAT8[name], FLOAT8[name]).astype(name)
