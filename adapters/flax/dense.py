"""What linen's and nnx's `LayerNormDense` have in common: options, parameters, and the call of cunorm.jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..jax.linear import functional as linear
from .coverage import READABLE

NAME = "LayerNormDense"


def check_options(module: Any, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{NAME}: {name} must be an int; got {type(size).__name__}.")
        if size <= 0:
            raise ValueError(f"{NAME}: {name} must be 1 or more; got {size}.")
    linear.linear_checks.op(NAME, module.normalization, None)
    if module.zero_centered_gamma and not module.use_scale:
        raise ValueError(f"{NAME}: zero_centered_gamma=True needs a scale; got use_scale=False.")


def check_columns(x: jax.Array) -> int:
    """Return the length of the last axis, if x has one."""
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{NAME}: x must have a last axis of 1 element or more; got x of shape {x.shape}.")
    return x.shape[-1]


def parameter_shapes(cols: int, features: int) -> dict[str, tuple[int, ...]]:
    return {"kernel": (cols, features), "bias": (features,), "scale": (cols,), "ln_bias": (cols,)}


def initializers(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the initializers of the parameters that the module has."""
    made = {"kernel": module.kernel_init}
    if module.use_bias:
        made["bias"] = module.bias_init
    if module.use_scale:
        neutral = jax.nn.initializers.zeros if module.zero_centered_gamma else jax.nn.initializers.ones
        made["scale"] = neutral if module.scale_init is None else module.scale_init
    if module.use_ln_bias and module.normalization == "LayerNorm":
        made["ln_bias"] = module.ln_bias_init
    return made


def norm_dense(
    module: Any, x: jax.Array, parameters: Mapping[str, jax.Array], dtype: Any, out_sharding: Any
) -> jax.Array:
    """Return y in `dtype`."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    # A kernel computes in float64 only what it reads in float64.
    if x.dtype not in READABLE or dtype == jnp.float64:
        x = x.astype(dtype)
    arrays = {
        "x": x,
        "kernel": parameters["kernel"].astype(dtype),
        "bias": parameters["bias"].astype(dtype) if "bias" in parameters else None,
        "ln_weight": parameters.get("scale"),
        "ln_bias": parameters.get("ln_bias"),
    }
    norm = linear.linear_checks.op(NAME, module.normalization, arrays["ln_bias"])
    options = linear.LinearOptions(NAME, norm, module.epsilon, module.zero_centered_gamma)
    of_product = linear.ProductOptions(module.precision, out_sharding, module.keep_normalized, mixed=True)
    return linear.norm_linear(options, arrays, of_product)[0]
