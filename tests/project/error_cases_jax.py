"""The table of error_cases.py for calls of cunorm.jax and cunorm.flax."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import Rows, of_cuda, with_environment
from flax import nnx

import cunorm
import cunorm.jax as ours
from cunorm.flax import nnx as modules
from cunorm.jax.xla import target

X, WEIGHT = jnp.ones((4, 8)), jnp.ones((8, 6))


def on_a_gpu(error: Exception) -> Any:
    gpu = SimpleNamespace(local_hardware_id=0)
    with (
        mock.patch.object(target, "gpu", return_value=gpu),
        mock.patch.object(target.devices, "current", side_effect=error),
    ):
        return target.device("layer_norm")


def too_new() -> Any:
    why = mock.patch.object(target.compile, "why_ptx_is_too_new", return_value="NVRTC 13 is newer than the driver")
    with mock.patch.object(target, "gpu", return_value=object()), why:
        return with_environment(target.CALL_VARIABLE, "ptx", lambda: target.call("layer_norm"))


def dense(**changed: Any) -> Any:
    return modules.LayerNormDense(**{"in_features": 8, "out_features": 6, "rngs": nnx.Rngs(0)} | changed)


ROWS: Rows = {
    "jax: a list": lambda: ours.layer_norm([[1.0]]),
    "jax: out": lambda: cunorm.layer_norm(X, out=X),
    "jax: float64": lambda: ours.layer_norm(X, dtype="float64"),
    "jax: a gradient of 8 bits": lambda: jax.grad(lambda x: ours.layer_norm_fp8(x)[1].sum())(X),
    "jax: fp8 by rows": lambda: ours.layer_norm_linear(X, WEIGHT, fp8="row"),
    "jax: another way to launch": lambda: with_environment(
        target.CALL_VARIABLE, "thread", lambda: target.call("layer_norm")
    ),
    "jax: PTX that is too new": too_new,
    "jax: an unknown architecture": lambda: with_environment(
        target.ARCH_VARIABLE, "12", lambda: target.device("layer_norm")
    ),
    "jax: no CuPy": lambda: on_a_gpu(ImportError("no module named cupy")),
    "jax: CuPy without a driver": lambda: on_a_gpu(of_cuda(importlib.import_module("cupy"))),
    "flax: x without an axis": lambda: modules.AddLayerNorm(8, rngs=nnx.Rngs(0))(jnp.ones(()), jnp.ones(())),
    "flax: Dense without a scale": lambda: dense(use_scale=False, zero_centered_gamma=True),
    "flax: Dense of text": lambda: dense(out_features="6"),
    "flax: Dense of 0": lambda: dense(out_features=0),
    "flax: Dense of x without an axis": lambda: dense()(jnp.ones(())),
    "flax: a condition of another batch": lambda: modules.AdaLayerNorm(8, 3, rngs=nnx.Rngs(0))(X, jnp.ones((2, 3))),
}
