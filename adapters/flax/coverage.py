"""Which of Flax's norms cunorm's kernels compute, and the call that does it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from ..private import check_version

check_version("flax")
READABLE = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))


def covered_row(module: Any, x: Any, mask: Any, dtypes: Iterable[Any]) -> tuple[int, ...] | None:
    """Return the shape of a row, the last axes of x, if kernels compute what the module does; else None.

    `dtypes` are those of the parameters.
    """
    if mask is not None or module.axis_name is not None or not _is_constant(module.epsilon):
        return None
    if not isinstance(x, jax.Array | numpy.ndarray):
        return None
    y_dtypes = () if module.dtype is None else (module.dtype,)
    if any(jnp.dtype(dtype) not in READABLE for dtype in (x.dtype, *dtypes, *y_dtypes)):
        return None
    reduced, features = (_axes(x.ndim, axes) for axes in (module.reduction_axes, module.feature_axes))
    first = x.ndim - len(reduced)
    if not 0 <= first < x.ndim or reduced != tuple(range(first, x.ndim)) or features != reduced:
        return None
    row = x.shape[first:]
    return None if 0 in row else row


def _is_constant(epsilon: Any) -> bool:
    """Return whether epsilon is a number that cunorm.jax takes, as kernels are compiled for it."""
    return isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool) and 0 <= float(epsilon) < math.inf


def _axes(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Return axes in the order in which Flax takes them, which is that of a set."""
    if not isinstance(axes, Iterable):
        axes = (axes,)
    return tuple({rank + axis if axis < 0 else axis for axis in axes})


def normalise(
    function: Callable[..., jax.Array],
    x: Any,
    row: tuple[int, ...],
    parameters: Iterable[Any],
    epsilon: float,
    dtype: Any,
) -> jax.Array:
    """Return function(x) of cunorm.jax for rows of that shape, in `dtype`; a parameter may be None."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    # A kernel computes in float64 only what it reads in float64.
    x = jnp.asarray(x, jnp.float64 if dtype == jnp.float64 else None)
    weights = [None if parameter is None else jnp.reshape(parameter, row) for parameter in parameters]
    return function(x, row, *weights, float(epsilon), dtype=dtype)
