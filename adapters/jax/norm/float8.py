"""FP8 output in jax.numpy, from y in float32, as kernels_cu/rows/float8.cuh writes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...call import store
from ...plan.problem import BLOCK, FLOAT8


def quantise(y: jax.Array, granularity: str | int, name: str, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Round float32 rows, y[rows, cols], to 8 bits as kernels_cu/rows/float8.cuh does."""
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
    # This is an array, as XLA divides by a number by multiplying by its reciprocal, which rounds once more.
    largest_number = jnp.where(largest > 0, jnp.float32(FLOAT8[name]), 1)
    quotient = largest_number / largest
    tiny = quotient > most
    multiplier = jnp.where(tiny, most, quotient)
    scales = jnp.where(tiny, jnp.where(largest == 0, 1, 1 / most), largest / largest_number)
    scales = scales + (largest - largest)  # NaN where the largest is not finite
    return _rounded(y * jnp.repeat(multiplier, width, axis=1)[:, :cols], name), scales


def bits_of_magnitudes(values: jax.Array) -> jax.Array:
    """Return bits that order as the magnitudes do, NaN the largest: XLA's maximum of floats on the CPU loses it."""
    return jax.lax.bitcast_convert_type(abs(values), jnp.int32)


def _rounded(values: jax.Array, name: str) -> jax.Array:
    """Round to nearest even; what is too large becomes the largest number."""
    return jnp.clip(values, -FLOAT8[name], FLOAT8[name]).astype(name)
