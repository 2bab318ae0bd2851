"""`layer_norm` and `rms_norm` on JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import problem
from ..problem import Layout


def layer_norm(
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> jax.Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x."""
    return _norm("layer_norm", x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin)


def rms_norm(
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> jax.Array:
    """y = x / sqrt(mean(x²) + eps) * weight, over the last axes of x."""
    return _norm("rms_norm", x, normalized_shape, weight, None, eps, zero_centered_gamma, dtype, sm_margin)


def _norm(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin):
    layouts = [None if a is None else Layout(a.shape, (), a.dtype.name, "") for a in (x, weight, bias)]
    name = None if dtype is None else problem.dtype_name(op, dtype)
    shape, y_dtype = problem.check_forward(
        op, layouts[0], normalized_shape, *layouts[1:], None, name, zero_centered_gamma=zero_centered_gamma
    )
    eps = problem.check_eps(op, eps)
    problem.check_sm_margin(op, sm_margin, None)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    compute = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    y = x.astype(compute)
    if op == "layer_norm":
        y = y - y.mean(axes, keepdims=True)
        y = y - y.mean(axes, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(axes, keepdims=True) + eps)
    if weight is not None:
        gamma = weight.astype(compute)
        y = y * (gamma + 1 if zero_centered_gamma else gamma)
    if bias is not None:
        y = y + bias.astype(compute)
    return y.astype(y_dtype)
