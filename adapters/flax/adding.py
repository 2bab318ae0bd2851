"""What linen's and nnx's `AddLayerNorm` and `AddRMSNorm` have in common: parameters, and the call of cunorm.jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..jax import add_layer_norm, add_rms_norm


def initializers(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the initializers of the parameters that the module has; an AddRMSNorm has no bias."""
    made = {"scale": module.scale_init} if module.use_scale else {}
    return made | ({"bias": module.bias_init} if getattr(module, "use_bias", False) else {})


def as_arrays(name: str, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    x, residual = jnp.asarray(x), jnp.asarray(residual)
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{name}: x must have a last axis of 1 element or more; got x of shape {x.shape}.")
    return x, residual


def add_norm(
    module: Any, x: jax.Array, residual: jax.Array, parameters: Mapping[str, jax.Array], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return (y in `dtype`, s)."""
    s_dtype = jnp.promote_types(x.dtype, residual.dtype) if module.s_dtype is None else module.s_dtype
    types: dict[str, Any] = {"dtype": jnp.dtype(dtype), "s_dtype": jax.dtypes.canonicalize_dtype(s_dtype)}
    scale, epsilon = parameters.get("scale"), module.epsilon
    if hasattr(module, "use_bias"):
        return add_layer_norm(x, residual, scale, parameters.get("bias"), epsilon, **types)
    return add_rms_norm(x, residual, scale, epsilon, **types)
