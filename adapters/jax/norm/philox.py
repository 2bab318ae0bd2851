"""The random numbers of norm/philox.py in jax.numpy, which has no 64 bits by default."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from ...expression.philox import COLUMNS, STEP, draw


@partial(jax.jit, static_argnums=(1, 2))
def uniform(seed: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return a number for each element of an array with this shape and fewer than 2^32 rows; `seed` has 8 bytes."""
    words = jax.lax.bitcast_convert_type(seed, jnp.uint32).reshape(2)
    rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)[:, None]
    octets = jnp.arange(-(-shape[-1] // COLUMNS), dtype=jnp.uint32)
    zeros = rows * 0 + octets * 0
    drawn = draw((octets + zeros, zeros, rows + zeros, zeros), (words[0], words[1]), _product, _sum)
    halves = jnp.stack([half for word in drawn for half in (word & 0xFFFF, word >> 16)], -1)
    numbers = halves.reshape(rows.shape[0], -1)[:, : shape[-1]].astype(dtype) * STEP
    return numbers.reshape(shape)


def _sum(words: jax.Array, number: int) -> jax.Array:
    return words + jnp.uint32(number)


def _product(words: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Return the (upper, lower) word of a product, computed by halves."""
    low, high, a, b = words & 0xFFFF, words >> 16, number & 0xFFFF, number >> 16
    middle = (low * a >> 16) + (high * a & 0xFFFF) + (low * b & 0xFFFF)
    upper = high * b + (high * a >> 16) + (low * b >> 16) + (middle >> 16)
    return upper, words * jnp.uint32(number)
