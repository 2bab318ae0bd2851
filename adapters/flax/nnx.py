"""`LayerNorm` and `RMSNorm` of flax.nnx, same constructors, parameters and results, on cunorm's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype

from ..jax import layer_norm, rms_norm
from .coverage import covered_row, normalise


class LayerNorm(nnx.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias, over the last axes of x.

    Parameters
    ----------
    num_features, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, reduction_axes, \
feature_axes, axis_name, axis_index_groups, use_fast_variance, promote_dtype, rngs, bias_metadata, scale_metadata
        As flax.nnx.LayerNorm has them. The kernels' variance is the mean of squared differences from the mean, summed
        in float32 or float64, whatever `use_fast_variance` is.

    Attributes
    ----------
    scale, bias : nnx.Param, shape (num_features,) of `param_dtype`, or None
        Those of flax.nnx.LayerNorm: the state of one fits the other.

    Notes
    -----
    Called with x of shape (..., *row), num_features numbers to a row, it returns y of that shape, in `dtype` or,
    without one, in the dtype to which x, scale and bias promote. The kernels compute it if reduction_axes and
    feature_axes are the same last axes of x, and x, y, scale and bias are float16, bfloat16, float32 or float64.
    flax.nnx.LayerNorm itself does if not, and if there is a `mask` or an `axis_name`; it raises what it raises.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import LayerNorm
    >>> from flax import nnx
    >>> norm = LayerNorm(3, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0, 2.0, 3.0]])).round(4))
    [[-1.2247  0.      1.2247]]
    """

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        scale = self.scale[...] if self.scale else None
        bias = self.bias[...] if self.bias else None
        promoted, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        row = covered_row(self, promoted, mask, [p.dtype for p in (scale, bias) if p is not None])
        if row is None:
            return super().__call__(x, mask=mask)
        dtype = canonicalize_dtype(promoted, scale, bias, dtype=self.dtype)
        return normalise(layer_norm, _unwidened(self, x, promoted), row, (scale, bias), self.epsilon, dtype)


class RMSNorm(nnx.RMSNorm):
    """y = x / sqrt(mean(x²) + epsilon) * scale, over the last axes of x.

    Parameters, attributes and notes as in `LayerNorm`, without bias.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import RMSNorm
    >>> from flax import nnx
    >>> norm = RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[4.0, -4.0]])).round(4))
    [[ 1. -1.]]
    """

    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        scale = self.scale[...] if self.scale else None
        promoted, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        row = covered_row(self, promoted, mask, [] if scale is None else [scale.dtype])
        if row is None:
            return super().__call__(x, mask=mask)
        dtype = canonicalize_dtype(promoted, scale, dtype=self.dtype)
        return normalise(rms_norm, _unwidened(self, x, promoted), row, (scale,), self.epsilon, dtype)


def _unwidened(module: Any, x: Any, promoted: jax.Array) -> jax.Array:
    """x where Flax only widens it to float32: a kernel does so as it reads, and reads half the bytes."""
    plain = module.promote_dtype is promote_dtype and isinstance(x, jax.Array)
    return x if plain and promoted.dtype == jnp.float32 and x.dtype in (jnp.float16, jnp.bfloat16) else promoted
