"""What linen's and nnx's `AdaLayerNorm` have in common: the call of the modulated norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..jax import layer_norm_modulate


def check_condition(x: Any, condition: Any) -> tuple[jax.Array, jax.Array]:
    x, condition = jnp.asarray(x), jnp.asarray(condition)
    if x.ndim < 2 or condition.ndim != 2 or x.shape[0] != condition.shape[0]:
        raise ValueError(
            "AdaLayerNorm: x must be (batch, ..., columns) and condition (batch, features); got "
            f"{x.shape} and {condition.shape}."
        )
    return x, condition


def modulate(x: jax.Array, shift_and_scale: jax.Array, epsilon: float, dtype: Any) -> jax.Array:
    """Return y in `dtype`, or in the dtype to which x and the modulation (batch, 2 * columns) promote."""
    shift, scale = jnp.split(shift_and_scale, 2, axis=-1)
    dtype = jnp.promote_types(x.dtype, scale.dtype) if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    return layer_norm_modulate(x, scale, shift, eps=epsilon, dtype=jnp.dtype(dtype))
