"""`LayerNorm` and `RMSNorm` of flax.linen, same constructors, parameters and results, on cunorm's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from ..jax import layer_norm, rms_norm
from .coverage import covered_row, normalise


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias, over the last axes of x.

    Parameters
    ----------
    epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, reduction_axes, feature_axes, axis_name, \
axis_index_groups, use_fast_variance, force_float32_reductions, parent, name
        As flax.linen.LayerNorm has them. The kernels' variance is the mean of squared differences from the mean,
        summed in float32 or float64, whatever `use_fast_variance` and `force_float32_reductions` are.

    Attributes
    ----------
    scale, bias : parameters of `param_dtype`, of the shape of the axes `feature_axes` of x
        Those of flax.linen.LayerNorm: checkpoints fit both.

    Notes
    -----
    Called with x of shape (..., *row), it returns y of that shape, in `dtype` or, without one, in the dtype to which x,
    scale and bias promote. The kernels compute it if reduction_axes and feature_axes are the same last axes of x, and
    x, y, scale and bias are float16, bfloat16, float32 or float64. flax.linen.LayerNorm itself does if not, and if
    there is a `mask` or an `axis_name`; it raises what it raises.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import LayerNorm
    >>> x = jnp.array([[1.0, 2.0, 3.0]])
    >>> norm = LayerNorm()
    >>> variables = norm.init(jax.random.key(0), x)
    >>> print(norm.apply(variables, x).round(4))
    [[-1.2247  0.      1.2247]]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        row = covered_row(self, x, mask, _dtypes(self, "scale", "bias"))
        if row is None:
            return super().__call__(x, mask=mask)
        scale, bias = _parameter(self, "scale", row), _parameter(self, "bias", row)
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        return normalise(layer_norm, x, row, (scale, bias), self.epsilon, dtype)


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x²) + epsilon) * scale, over the last axes of x.

    Parameters, attributes and notes as in `LayerNorm`, without bias.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import RMSNorm
    >>> x = jnp.array([[4.0, -4.0]])
    >>> norm = RMSNorm(epsilon=0.0)
    >>> variables = norm.init(jax.random.key(0), x)
    >>> print(norm.apply(variables, x).round(4))
    [[ 1. -1.]]
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        row = covered_row(self, x, mask, _dtypes(self, "scale"))
        if row is None:
            return super().__call__(x, mask=mask)
        scale = _parameter(self, "scale", row)
        dtype = canonicalize_dtype(x, scale, dtype=self.dtype)
        return normalise(rms_norm, x, row, (scale,), self.epsilon, dtype)


def _dtypes(module: nn.Module, *names: str) -> list[Any]:
    """Of the parameters that are there, and that of those to come."""
    stored = jax.tree.leaves([module.get_variable("params", name) for name in names])
    return [*map(jnp.result_type, stored), module.param_dtype]


def _parameter(module: nn.Module, name: str, row: tuple[int, ...]) -> jax.Array | None:
    if not getattr(module, f"use_{name}"):
        return None
    # A list, because that is what an initializer gets from Flax.
    parameter = module.param(name, getattr(module, f"{name}_init"), list(row), module.param_dtype)
    return jnp.asarray(parameter, None if module.force_float32_reductions else module.param_dtype)
