"""`LayerNorm` and `RMSNorm` of flax.linen, same constructors, parameters and results, on cunorm's kernels;
`AddLayerNorm` and `AddRMSNorm`, which add a residual first; `AdaLayerNorm`, with scale and shift of a condition; and
`LayerNormDense`, a norm with the Dense that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from ..jax import layer_norm, rms_norm
from . import adding, modulating
from .coverage import covered_row, normalise
from .dense import check_columns, check_options, initializers, norm_dense, parameter_shapes


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


class AddLayerNorm(nn.Module):
    """s = x + residual, y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, over the last axis; both returned.

    Parameters
    ----------
    epsilon : float
    dtype : dtype, optional
        Of y. Default: that to which x, residual and the parameters promote.
    s_dtype : dtype, optional
        Of s, which is rounded to it before its statistics are taken. Default: that to which x and residual promote.
    param_dtype : dtype
        In which parameters are initialized.
    use_bias, use_scale : bool
        Whether there are these parameters.
    bias_init, scale_init : initializers

    Attributes
    ----------
    scale, bias : parameters, shape (columns,)
        Those of flax.linen.LayerNorm: its checkpoints fit.

    Raises
    ------
    TypeError, ValueError
        As of `cunorm.add_layer_norm`.

    Notes
    -----
    Called with x and residual of shape (..., columns) it returns (y, s), both of that shape: what LayerNorm makes of
    the sum, and the sum. One kernel forward and one backward, which reads s alone: x and residual are not kept.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import AddLayerNorm
    >>> x, residual = jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[0.0, 0.0, -1.0]])
    >>> norm = AddLayerNorm()
    >>> variables = norm.init(jax.random.key(0), x, residual)
    >>> y, s = norm.apply(variables, x, residual)
    >>> print(y.round(4), s)
    [[-1.2247  0.      1.2247]] [[1. 2. 3.]]
    """

    epsilon: float = 1e-6
    dtype: Any = None
    s_dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    scale_init: Callable[..., Any] = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
        return _add_norm(self, x, residual)


class AddRMSNorm(nn.Module):
    """s = x + residual, y = s / sqrt(mean(s²) + epsilon) * scale, over the last axis; both returned.

    Parameters, attributes and notes as in `AddLayerNorm`, without bias.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import AddRMSNorm
    >>> x, residual = jnp.array([[3.0, -4.0]]), jnp.array([[1.0, 0.0]])
    >>> norm = AddRMSNorm(epsilon=0.0)
    >>> y, s = norm.apply(norm.init(jax.random.key(0), x, residual), x, residual)
    >>> print(y.round(4), s)
    [[ 1. -1.]] [[ 4. -4.]]
    """

    epsilon: float = 1e-6
    dtype: Any = None
    s_dtype: Any = None
    param_dtype: Any = jnp.float32
    use_scale: bool = True
    scale_init: Callable[..., Any] = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
        return _add_norm(self, x, residual)


class AdaLayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * (1 + scale) + shift, where (shift, scale) = Dense(silu(condition)).

    Parameters
    ----------
    epsilon : float
    dtype : dtype, optional
        Of y, and of the Dense. Default: that to which x, condition and the parameters promote.
    param_dtype : dtype
        In which parameters are initialized.
    kernel_init, bias_init : initializers
        Of the Dense. With zeros for both, as diffusion transformers begin, y is the norm of x.

    Attributes
    ----------
    linear : parameters kernel, shape (features, 2 * columns), and bias, shape (2 * columns,)
        Those of flax.linen.Dense. The first half makes shift, the second scale, as in DiT.

    Raises
    ------
    TypeError, ValueError
        As of `cunorm.layer_norm_modulate`.

    Notes
    -----
    Called with x of shape (batch, ..., columns) and condition of shape (batch, features) it returns y of the shape of
    x: one kernel forward, in which y is rounded once.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import AdaLayerNorm
    >>> x, condition = jnp.arange(12.0).reshape(2, 3, 2), jnp.ones((2, 8))
    >>> norm = AdaLayerNorm()
    >>> norm.apply(norm.init(jax.random.key(0), x, condition), x, condition).shape
    (2, 3, 2)
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Any, condition: Any) -> jax.Array:
        x, condition = modulating.check_condition(x, condition)
        linear = nn.Dense(
            2 * x.shape[-1],
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name="linear",
        )
        return modulating.modulate(x, linear(nn.silu(condition)), self.epsilon, self.dtype)


class LayerNormDense(nn.Module):
    """y = z kernel + bias, z = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + ln_bias over the last axis of x.

    What flax.linen.Dense makes of what flax.linen.LayerNorm, or RMSNorm, makes of x.

    Parameters
    ----------
    features : int
        Of y.
    epsilon : float
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + epsilon) * scale, and has no ln_bias.
    zero_centered_gamma : bool
        Multiply by 1 + scale.
    use_bias, use_scale, use_ln_bias : bool
        Whether there are these parameters.
    dtype : dtype, optional
        Of z and y, and of the product. Default: that to which x and the parameters promote.
    param_dtype : dtype
        In which parameters are initialized.
    precision : optional
        Of the product, as jax.lax.dot_general takes it.
    keep_normalized : bool
        As in `cunorm.jax.layer_norm_linear`: keep z for the backward pass instead of computing it once more.
    kernel_init, bias_init, scale_init, ln_bias_init : initializers
        The default of scale_init is ones, with zero_centered_gamma zeros.

    Attributes
    ----------
    kernel : parameter, shape (in, features)
    bias : parameter, shape (features,)
    scale, ln_bias : parameters, shape (in,)

    Raises
    ------
    TypeError, ValueError
        An option of the wrong kind or value, when the module is made; x as `cunorm.jax.layer_norm_linear` says.

    Notes
    -----
    Called with x of shape (..., in) it returns y of shape (..., features); its `out_sharding` is that of
    `cunorm.jax.layer_norm_linear`. x, scale and ln_bias are read in their own
    dtypes, kernel and bias are converted to that of y.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.flax.linen import LayerNormDense
    >>> x = jnp.array([[1.0, 2.0, 3.0]])
    >>> layer = LayerNormDense(2)
    >>> variables = layer.init(jax.random.key(0), x)
    >>> {name: p.shape for name, p in variables["params"].items()}
    {'kernel': (3, 2), 'bias': (2,), 'scale': (3,), 'ln_bias': (3,)}
    >>> layer.apply(variables, x).shape
    (1, 2)
    """

    features: int
    epsilon: float = 1e-6
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    use_bias: bool = True
    use_scale: bool = True
    use_ln_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    keep_normalized: bool = False
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    scale_init: Callable[..., Any] | None = None
    ln_bias_init: Callable[..., Any] = nn.initializers.zeros_init()

    def __post_init__(self) -> None:
        check_options(self, features=self.features)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Any, out_sharding: Any = None) -> jax.Array:
        x = jnp.asarray(x)
        shapes = parameter_shapes(check_columns(x), self.features)
        parameters = {
            name: self.param(name, initializer, shapes[name], self.param_dtype)
            for name, initializer in initializers(self).items()
        }
        dtype = canonicalize_dtype(x, *parameters.values(), dtype=self.dtype)
        return norm_dense(self, x, parameters, dtype, out_sharding)


def _dtypes(module: nn.Module, *names: str) -> list[Any]:
    """Return the dtypes of the parameters that are there, and the dtype of those to come."""
    stored = jax.tree.leaves([module.get_variable("params", name) for name in names])
    return [*map(jnp.result_type, stored), module.param_dtype]


def _parameter(module: nn.Module, name: str, row: tuple[int, ...]) -> jax.Array | None:
    if not getattr(module, f"use_{name}"):
        return None
    # A list, because that is what an initializer gets from Flax.
    parameter = module.param(name, getattr(module, f"{name}_init"), list(row), module.param_dtype)
    return jnp.asarray(parameter, None if module.force_float32_reductions else module.param_dtype)


def _add_norm(module: nn.Module, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    x, residual = adding.as_arrays(type(module).__name__, x, residual)
    parameters = {
        name: module.param(name, initializer, x.shape[-1:], module.param_dtype)
        for name, initializer in adding.initializers(module).items()
    }
    dtype = canonicalize_dtype(x, residual, *parameters.values(), dtype=module.dtype)
    return adding.add_norm(module, x, residual, parameters, dtype)
