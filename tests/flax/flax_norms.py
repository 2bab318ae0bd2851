"""Flax's norms and ours behind one signature: functions of parameters and x, with results and gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import flax.linen
import flax.nnx
import jax
import numpy
import pytest
from arrays import inputs

import cunorm.flax.linen
import cunorm.flax.nnx

MODULES = {
    "linen": {"flax": flax.linen, "cunorm": cunorm.flax.linen},
    "nnx": {"flax": flax.nnx, "cunorm": cunorm.flax.nnx},
}
OPS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}


class Kind(NamedTuple):
    framework: str
    norm: str

    @property
    def op(self) -> str:
        return OPS[self.norm]

    @property
    def names(self) -> tuple[str, ...]:
        return ("scale", "bias") if self.norm == "LayerNorm" else ("scale",)

    def cls(self, who: str) -> Any:
        return getattr(MODULES[self.framework][who], self.norm)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options without those that the class does not have."""
        return {name: value for name, value in options.items() if name != "use_bias" or self.norm == "LayerNorm"}


KINDS = [Kind(framework, norm) for framework in MODULES for norm in OPS]
kinds = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def function(kind: Kind, who: str, options: dict[str, Any], **call: Any) -> Callable[[dict[str, Any], Any], jax.Array]:
    """Return the function that computes y from parameters, {"scale": ..., "bias": ...}, and x."""
    cls, options = kind.cls(who), kind.options(options)

    def by_linen(parameters, x):
        return cls(**options).apply({"params": parameters}, x, **call)

    def by_nnx(parameters, x):
        features = next((p.size for p in parameters.values()), 1)
        module = cls(features, rngs=flax.nnx.Rngs(0), **options)
        for name, parameter in parameters.items():
            setattr(module, name, flax.nnx.Param(parameter.ravel()))
        return module(x, **call)

    return by_linen if kind.framework == "linen" else by_nnx


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jit the function, on the CPU without LLVM's optimizations, which take a third of the time of these tests."""
    return jax.jit(
        f, compiler_options={"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    )


def with_gradients(f: Callable[..., jax.Array], dy: Any = None) -> Callable[..., tuple[Any, ...]]:
    """Return the function of parameters and x that gives (y, {"scale": dscale, "bias": dbias}, dx).

    dy is a NumPy array, or None for ones.
    """

    def both(parameters, x):
        y, pullback = jax.vjp(f, parameters, x)
        return y, *pullback(jax.numpy.ones_like(y) if dy is None else dy.reshape(y.shape).astype(y.dtype))

    return both


@contextlib.contextmanager
def kernel_calls(kind: Kind):
    """Yield a mock that sees the calls of cunorm.jax's function."""
    module = MODULES[kind.framework]["cunorm"]
    with mock.patch.object(module, kind.op, wraps=getattr(module, kind.op)) as calls:
        yield calls


class Case(NamedTuple):
    x: str = "float32"
    parameters: str = "float32"
    dtype: str | None = None
    shape: tuple[int, ...] = (5, 129)
    offset: float = 1.0
    options: dict[str, Any] = {}  # noqa: RUF012
    framework: str | None = None  # the only one that has the options

    def options_of(self, kind: Kind) -> dict[str, Any]:
        return kind.options({"param_dtype": self.parameters, "dtype": self.dtype, **self.options})

    def row(self) -> tuple[int, ...]:
        axes = self.options.get("reduction_axes", -1)
        return tuple(self.shape[-len(axes) :]) if isinstance(axes, tuple) else self.shape[-1:]

    def arrays(self, kind: Kind) -> tuple[dict[str, numpy.ndarray], numpy.ndarray, numpy.ndarray]:
        """Return (parameters, x, dy), with dy in float32."""
        cols = math.prod(self.row())
        rows = math.prod(self.shape) // cols
        given = inputs(numpy, rows, cols, self.x, offset=self.offset, weight=self.parameters, dy="float32")
        named = {"scale": given.weight, "bias": given.bias}
        parameters = {
            name: named[name].reshape(self.row()) for name in kind.names if self.options.get(f"use_{name}", True)
        }
        return parameters, given.x.reshape(self.shape), given.dy

    def context(self) -> Any:
        return jax.enable_x64("float64" in (self.x, self.parameters, self.dtype))


LAST_TWO = {"reduction_axes": (-2, -1), "feature_axes": (-2, -1)}


def to_bfloat16(arrays, dtype=None):
    return tuple(None if array is None else array.astype("bfloat16") for array in arrays)


CASES = {
    "float32": Case(),
    "bfloat16": Case("bfloat16", "bfloat16"),
    "y-is-float32-with-float32-parameters": Case("bfloat16"),
    "y-is-float32-of-two-kinds-of-16-bits": Case("float16", "bfloat16"),
    "bfloat16-asked-for-with-float32-parameters": Case("bfloat16", "float32", "bfloat16"),
    "narrower-than-x-and-its-mean": Case("float32", "float32", "float16", offset=100.0),
    "float64": Case("float64", "float64"),
    "y-is-float64-with-float64-parameters": Case("float32", "float64"),
    "float64-x-alone": Case("float64", "float32", "float32"),
    "float64-asked-for": Case("bfloat16", "float32", "float64"),
    "without-scale": Case(options={"use_scale": False}),
    "without-bias": Case("bfloat16", options={"use_bias": False}),
    "without-parameters": Case("bfloat16", options={"use_scale": False, "use_bias": False}),
    "epsilon": Case(options={"epsilon": 0.3}),
    "two-axes": Case("bfloat16", shape=(3, 4, 33), options=LAST_TWO),
    "axes-in-any-order": Case(shape=(2, 3, 4, 5), options={"reduction_axes": (3, -2), "feature_axes": (2, -1)}),
    "exact-variance": Case(options={"use_fast_variance": False}),
    "reductions-in-x's-dtype": Case(
        "bfloat16", "bfloat16", options={"force_float32_reductions": False}, framework="linen"
    ),
    "parameters-in-param_dtype": Case(
        "bfloat16", options={"force_float32_reductions": False, "param_dtype": "bfloat16"}, framework="linen"
    ),
    "own-promotion": Case(options={"promote_dtype": to_bfloat16}, framework="nnx"),
    "offset": Case(offset=1e6),
    "no-rows": Case(shape=(0, 7)),
    "one-column": Case(shape=(5, 1), options={"epsilon": 0.3}),
}


def cases() -> list[Any]:
    return [
        pytest.param(kind, case, id=f"{'-'.join(kind)}-{name}")
        for kind in KINDS
        for name, case in CASES.items()
        if case.framework in (None, kind.framework) and ("use_bias" not in case.options or kind.norm == "LayerNorm")
    ]
