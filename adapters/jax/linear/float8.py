"""The product of `layer_norm_linear` in 8 bits, from what XLA makes its FP8 product of.

That is a conversion of either matrix, a number that multiplies it, and the product, of one axis of each.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ...call.store import MOST_MULTIPLIER, Float8Store
from ...plan.problem import E4M3, FLOAT8
from ..norm import arrays, float8
from ..norm.formulas import Arrays, Task


def product(
    task: Task, inputs: Arrays, matrix: jax.Array, multiply: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """z matrix, either with one scale: z's such that no z exceeds it, whatever x is, matrix's its largest number's.

    Scales are powers of two, so that bytes times a scale are exact in 16 bits, as they are where XLA gives the scales
    to its product.
    """
    store = Float8Store(E4M3, "tensor", wide=False)
    z_scale = _power_of_two(arrays.unexceeded(task, inputs, store))
    z = arrays.stored(task.stored(store), dict(inputs), z_scale)["y8"]
    wide = matrix.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(float8.bits_of_magnitudes(wide).max(), jnp.float32)
    scale = _power_of_two(largest / FLOAT8[E4M3])
    bytes, _ = float8.quantise(wide, "tensor", E4M3, scale)
    # XLA allows itself more precision than it is asked for, and would leave the rounding out.
    bytes = jax.lax.optimization_barrier(bytes)
    # float16 has not the range of a scale.
    dtype = jnp.bfloat16 if matrix.dtype == jnp.bfloat16 else jnp.float32
    return multiply(z.astype(dtype) * z_scale.astype(dtype), bytes.astype(dtype) * scale.astype(dtype))


def _power_of_two(scale: jax.Array) -> jax.Array:
    """The next one that is not smaller. NaN stays NaN."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(scale < jnp.inf, jnp.maximum(rounded, 1 / MOST_MULTIPLIER), scale + (scale - scale))
