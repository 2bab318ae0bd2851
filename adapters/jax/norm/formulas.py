"""The norms, their gradients and their tangents in jax.numpy: for every platform without kernels, and for derivatives
of the gradients. All arithmetic is in `compute_dtype(x)`.

Arrays go by name, as everywhere in this adapter: x (..., *normalised axes), dy as y, mean and rstd the shape of x
without its normalised axes, weight and bias that of the normalised axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, apart from the arrays."""

    op: str  # "layer_norm" | "rms_norm"
    ndim: int  # normalised axes, the last ones
    eps: float
    zero_centered_gamma: bool
    dtype: str  # of y
    sm_margin: int

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))


def compute_dtype(x: jax.Array) -> jnp.dtype:
    """Of statistics and of all arithmetic."""
    return jnp.dtype("float64" if x.dtype == jnp.float64 else "float32")


def forward(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """y, mean (layer_norm) and rstd."""
    x = arrays["x"]
    values = x.astype(compute_dtype(x))
    results = {}
    if task.op == "layer_norm":
        mean = values.mean(task.axes, keepdims=True)
        values = values - mean
        lost = values.mean(task.axes, keepdims=True)  # by the rounding of mean
        values = values - lost
        results["mean"] = (mean + lost).squeeze(task.axes)
    rstd = jax.lax.rsqrt((values * values).mean(task.axes, keepdims=True) + task.eps)
    results["rstd"] = rstd.squeeze(task.axes)
    results["y"] = affine(task, values * rstd, arrays)
    return results


def affine(task: Task, xhat: jax.Array, arrays: Arrays) -> jax.Array:
    """y = xhat * weight + bias, rounded to the dtype of y."""
    y = xhat
    if "weight" in arrays:
        y = y * gamma(task, arrays["weight"], y.dtype)
    if "bias" in arrays:
        y = y + arrays["bias"].astype(y.dtype)
    return y.astype(task.dtype)


def backward(task: Task, arrays: Arrays) -> dict[str, jax.Array]:
    """dx = rstd * P(dy * weight), dweight = Σ dy * xhat, dbias = Σ dy over all rows; P as in `_project`.

    dx in the dtype of x; dweight and dbias in that of weight, without one in that of x.
    """
    x = arrays["x"]
    xhat, rstd = _normalised(task, arrays)
    dy = arrays["dy"].astype(xhat.dtype)
    g = dy * gamma(task, arrays["weight"], dy.dtype) if "weight" in arrays else dy
    rows = tuple(range(x.ndim - task.ndim))
    parameter_dtype = arrays.get("weight", x).dtype
    return {
        "dx": (rstd * _project(task, g, xhat)).astype(x.dtype),
        "dweight": (dy * xhat).sum(rows).astype(parameter_dtype),
        "dbias": dy.sum(rows).astype(parameter_dtype),
    }


def tangent(task: Task, arrays: Arrays) -> jax.Array:
    """The tangent of y, rstd * P(x_dot) * weight + xhat * weight_dot + bias_dot: the transpose of `backward`."""
    xhat, rstd = _normalised(task, arrays)
    y_dot = jnp.zeros_like(xhat)
    if "x_dot" in arrays:
        y_dot = rstd * _project(task, arrays["x_dot"].astype(xhat.dtype), xhat)
        if "weight" in arrays:
            y_dot = y_dot * gamma(task, arrays["weight"], xhat.dtype)
    if "weight_dot" in arrays:
        y_dot = y_dot + xhat * arrays["weight_dot"].astype(xhat.dtype)
    if "bias_dot" in arrays:
        y_dot = y_dot + arrays["bias_dot"].astype(xhat.dtype)
    return y_dot.astype(task.dtype)


def gamma(task: Task, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What xhat is multiplied by."""
    weight = weight.astype(dtype)
    return weight + 1 if task.zero_centered_gamma else weight


def _normalised(task: Task, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """(xhat, rstd), rstd with axes of length 1 in place of the normalised ones."""
    x = arrays["x"].astype(compute_dtype(arrays["x"]))
    rstd = jnp.expand_dims(arrays["rstd"], task.axes)
    if "mean" in arrays:
        x = x - jnp.expand_dims(arrays["mean"], task.axes)
    return x * rstd, rstd


def _project(task: Task, v: jax.Array, xhat: jax.Array) -> jax.Array:
    """P(v) = v - mean(v) - xhat * mean(v * xhat), the means over a row; for rms_norm without mean(v)."""
    projected = v - xhat * (v * xhat).mean(task.axes, keepdims=True)
    return projected if task.op == "rms_norm" else projected - v.mean(task.axes, keepdims=True)
