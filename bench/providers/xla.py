"""XLA: the formulas in jax.numpy under jit, in float32. Backward takes mean and rstd, as the others do."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from bench.providers.base import Provider


def load_jax() -> str:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the others need memory too
    import jax

    if jax.default_backend() != "gpu":
        raise ImportError("JAX sees no GPU")
    return jax.__version__


class Xla(Provider):
    name = "XLA"
    library = "jax"

    seconds = 1.5

    def load(self) -> str:
        version = load_jax()
        self.functions: dict[tuple[str, str, float], Any] = {}
        return version

    def prepare(self, case, b):
        key = (case.op, case.direction, case.eps)
        function = self.functions.setdefault(key, _function(*key))
        names = ("x", "weight", "bias") if case.direction == "forward" else ("dy", "x", "weight", "mean", "rstd")
        return partial(function, *(vars(b)[name] for name in names if vars(b)[name] is not None))


def _function(op, direction, eps):
    import jax.numpy as jnp

    layer_norm = op == "layer_norm"

    def forward(x, weight, bias=None):
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=1, keepdims=True) if layer_norm else wide
        y = centred / jnp.sqrt((centred * centred).mean(axis=1, keepdims=True) + eps) * weight.astype(jnp.float32)
        return (y + bias.astype(jnp.float32) if bias is not None else y).astype(x.dtype)

    def backward(dy, x, weight, mean, rstd):
        wide_dy = dy.astype(jnp.float32)
        xhat = (x.astype(jnp.float32) - mean[:, None]) * rstd[:, None]
        g = wide_dy * weight.astype(jnp.float32)
        dx = g - xhat * (g * xhat).mean(axis=1, keepdims=True)
        if layer_norm:
            dx = dx - g.mean(axis=1, keepdims=True)
        dx = (dx * rstd[:, None]).astype(x.dtype)
        dweight = (wide_dy * xhat).sum(axis=0).astype(weight.dtype)
        return (dx, dweight, wide_dy.sum(axis=0).astype(weight.dtype)) if layer_norm else (dx, dweight)

    return forward if direction == "forward" else backward
