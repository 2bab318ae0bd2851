"""`LayerNorm` and `RMSNorm` of flax.nnx, same constructors, parameters and results, on cunorm's kernels;
`AddLayerNorm` and `AddRMSNorm`, which add a residual first; `AdaLayerNorm`, with scale and shift of a condition; and
`LayerNormDense`, a norm with the Linear that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype

from ..jax import layer_norm, rms_norm
from . import adding, modulating
from .coverage import covered_row, normalise
from .dense import check_columns, check_options, initializers, norm_dense, parameter_shapes


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


class AddLayerNorm(nnx.Module):
    """s = x + residual, y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias, over the last axis; both returned.

    Parameters
    ----------
    num_features : int
        Columns of x.
    rngs : nnx.Rngs
    epsilon, dtype, s_dtype, param_dtype, use_bias, use_scale, bias_init, scale_init
        As cunorm.flax.linen.AddLayerNorm has them.

    Attributes
    ----------
    scale, bias : nnx.Param, shape (num_features,), or None
        Those of flax.nnx.LayerNorm: its state fits.

    Raises
    ------
    TypeError, ValueError
        As of `cunorm.add_layer_norm`.

    Notes
    -----
    Called with x and residual of shape (..., num_features) it returns (y, s), as cunorm.flax.linen.AddLayerNorm does.
    x, residual, scale and bias are read in their own dtypes, whatever `dtype` is.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import AddLayerNorm
    >>> from flax import nnx
    >>> norm = AddLayerNorm(3, rngs=nnx.Rngs(0))
    >>> y, s = norm(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[0.0, 0.0, -1.0]]))
    >>> print(y.round(4), s)
    [[-1.2247  0.      1.2247]] [[1. 2. 3.]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        s_dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Callable[..., Any] = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Callable[..., Any] = nnx.initializers.ones_init(),  # noqa: B008
        rngs: nnx.Rngs,
    ) -> None:
        dtypes = {"dtype": dtype, "s_dtype": s_dtype, "param_dtype": param_dtype}
        bias, scale = {"use_bias": use_bias, "bias_init": bias_init}, {"use_scale": use_scale, "scale_init": scale_init}
        _init(self, rngs, num_features=num_features, epsilon=epsilon, **dtypes, **bias, **scale)

    def __call__(self, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
        return _add_norm(self, x, residual)


class AddRMSNorm(nnx.Module):
    """s = x + residual, y = s / sqrt(mean(s²) + epsilon) * scale, over the last axis; both returned.

    Parameters, attributes and notes as in `AddLayerNorm`, without bias.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import AddRMSNorm
    >>> from flax import nnx
    >>> norm = AddRMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
    >>> y, s = norm(jnp.array([[3.0, -4.0]]), jnp.array([[1.0, 0.0]]))
    >>> print(y.round(4), s)
    [[ 1. -1.]] [[ 4. -4.]]
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        s_dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_scale: bool = True,
        scale_init: Callable[..., Any] = nnx.initializers.ones_init(),  # noqa: B008
        rngs: nnx.Rngs,
    ) -> None:
        dtypes = {"dtype": dtype, "s_dtype": s_dtype, "param_dtype": param_dtype}
        scale = {"use_scale": use_scale, "scale_init": scale_init}
        _init(self, rngs, num_features=num_features, epsilon=epsilon, **dtypes, **scale)

    def __call__(self, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
        return _add_norm(self, x, residual)


class AdaLayerNorm(nnx.Module):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * (1 + scale) + shift, where (shift, scale) = Linear(silu(condition)).

    Parameters
    ----------
    condition_features, num_features : int
        Columns of the condition, and of x.
    rngs : nnx.Rngs
    epsilon, dtype, param_dtype, kernel_init, bias_init
        As cunorm.flax.linen.AdaLayerNorm has them.

    Attributes
    ----------
    linear : nnx.Linear
        The first half of what it gives is shift, the second scale, as in DiT.

    Raises and notes as in cunorm.flax.linen.AdaLayerNorm.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import AdaLayerNorm
    >>> from flax import nnx
    >>> norm = AdaLayerNorm(8, 2, rngs=nnx.Rngs(0))
    >>> norm(jnp.arange(12.0).reshape(2, 3, 2), jnp.ones((2, 8))).shape
    (2, 3, 2)
    """

    def __init__(
        self,
        condition_features: int,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        bias_init: Callable[..., Any] = nnx.initializers.zeros_init(),  # noqa: B008
        rngs: nnx.Rngs,
    ) -> None:
        self.epsilon = epsilon
        self.dtype = dtype
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.linear = nnx.Linear(
            condition_features, 2 * num_features, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs, **options
        )

    def __call__(self, x: Any, condition: Any) -> jax.Array:
        x, condition = modulating.check_condition(x, condition)
        return modulating.modulate(x, self.linear(nnx.silu(condition)), self.epsilon, self.dtype)


class LayerNormDense(nnx.Module):
    """y = z kernel + bias, z = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + ln_bias over the last axis of x.

    What flax.nnx.Linear makes of what flax.nnx.LayerNorm, or RMSNorm, makes of x.

    Parameters
    ----------
    in_features, out_features : int
    rngs : nnx.Rngs
    epsilon, normalization, zero_centered_gamma, use_bias, use_scale, use_ln_bias, dtype, param_dtype, precision, \
keep_normalized, kernel_init, bias_init, scale_init, ln_bias_init
        As cunorm.flax.linen.LayerNormDense has them.
    kernel_metadata, bias_metadata, scale_metadata, ln_bias_metadata : dict
        What nnx.Param takes besides, such as `out_sharding`.

    Attributes
    ----------
    kernel : nnx.Param, shape (in_features, out_features)
    bias : nnx.Param, shape (out_features,), or None
    scale, ln_bias : nnx.Param, shape (in_features,), or None

    Raises
    ------
    TypeError, ValueError
        An option of the wrong kind or value; x as `cunorm.jax.layer_norm_linear` says.

    Notes
    -----
    Called with x of shape (..., in_features) it returns y of shape (..., out_features); its `out_sharding` is that of
    `cunorm.jax.layer_norm_linear`. With a `dtype` x, scale and
    ln_bias are rounded to it before anything is computed, as flax.nnx.LayerNorm does and flax.linen's does not.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.flax.nnx import LayerNormDense
    >>> from flax import nnx
    >>> layer = LayerNormDense(3, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> layer.scale[...] = jnp.array([1.0, 1.0, 0.0])
    >>> print(layer(jnp.array([[1.0, 2.0, 3.0]])).round(4))
    [[-1.2247]]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        epsilon: float = 1e-6,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        use_bias: bool = True,
        use_scale: bool = True,
        use_ln_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        keep_normalized: bool = False,
        kernel_init: Callable[..., Any] = nnx.initializers.lecun_normal(),  # noqa: B008
        bias_init: Callable[..., Any] = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Callable[..., Any] | None = None,
        ln_bias_init: Callable[..., Any] = nnx.initializers.zeros_init(),  # noqa: B008
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        ln_bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.epsilon = epsilon
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.use_ln_bias = use_ln_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.keep_normalized = keep_normalized
        self.kernel_init = kernel_init
        self.bias_init = bias_init
        self.scale_init = scale_init
        self.ln_bias_init = ln_bias_init
        check_options(self, in_features=in_features, out_features=out_features)
        shapes = parameter_shapes(in_features, out_features)
        made = initializers(self)
        metadata = {
            "kernel": kernel_metadata,
            "bias": bias_metadata,
            "scale": scale_metadata,
            "ln_bias": ln_bias_metadata,
        }
        for name, shape in shapes.items():
            value = nnx.data(None)
            if name in made:
                value = nnx.Param(made[name](rngs.params(), shape, param_dtype), **metadata[name])
            setattr(self, name, value)

    def __call__(self, x: Any, out_sharding: Any = None) -> jax.Array:
        x = jnp.asarray(x)
        check_columns(x)
        parameters = {name: getattr(self, name)[...] for name in initializers(self)}
        dtype = canonicalize_dtype(x, *parameters.values(), dtype=self.dtype)
        if self.dtype is not None:
            x, *others = promote_dtype((x, parameters.get("scale"), parameters.get("ln_bias")), dtype=self.dtype)
            parameters |= {name: p for name, p in zip(("scale", "ln_bias"), others, strict=True) if p is not None}
        return norm_dense(self, x, parameters, dtype, out_sharding)


def _unwidened(module: Any, x: Any, promoted: jax.Array) -> jax.Array:
    """Return x itself where Flax only widens it to float32, as a kernel does so when it reads half the bytes."""
    plain = module.promote_dtype is promote_dtype and isinstance(x, jax.Array)
    return x if plain and promoted.dtype == jnp.float32 and x.dtype in (jnp.float16, jnp.bfloat16) else promoted


def _init(module: Any, rngs: nnx.Rngs, **attributes: Any) -> None:
    """Set the attributes of a module that adds, and make its parameters."""
    for name, value in attributes.items():
        setattr(module, name, value)
    made = adding.initializers(module)
    for name in ("scale", "bias") if hasattr(module, "use_bias") else ("scale",):
        value = nnx.data(None)
        if name in made:
            value = nnx.Param(made[name](rngs.params(), (module.num_features,), module.param_dtype))
        setattr(module, name, value)


def _add_norm(module: Any, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    x, residual = adding.as_arrays(type(module).__name__, x, residual)
    parameters = {name: getattr(module, name)[...] for name in adding.initializers(module)}
    dtype = canonicalize_dtype(x, residual, *parameters.values(), dtype=module.dtype)
    return adding.add_norm(module, x, residual, parameters, dtype)
