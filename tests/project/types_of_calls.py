"""A type checker sees that the kind of array that goes in comes out. pyright reads this, and nothing runs it."""

from typing import Any, assert_type

import jax
import numpy
import torch
from numpy.typing import NDArray

import cunorm
import cunorm.jax
import cunorm.torch

Floats = NDArray[numpy.float32]


def of_numpy(x: Floats, weight: Floats, out: Floats) -> None:
    assert_type(cunorm.layer_norm(x, None, weight, out=out), Floats)
    assert_type(cunorm.rms_norm(x), Floats)
    assert_type(cunorm.layer_norm_forward(x), tuple[Floats, Floats, Floats])
    assert_type(cunorm.rms_norm_forward(x), tuple[Floats, Floats])
    assert_type(cunorm.layer_norm_fp8(x), tuple[Floats, Floats])
    assert_type(cunorm.layer_norm_linear(x, weight), Floats)
    assert_type(cunorm.add_rms_norm(x, x), tuple[Any, Any])
    assert_type(cunorm.add_rms_norm.backward(cunorm.add_rms_norm.forward(x, x)[1], x, None), dict[str, Any])


def of_torch(x: torch.Tensor) -> None:
    assert_type(cunorm.layer_norm(x), torch.Tensor)
    assert_type(cunorm.torch.layer_norm(x, 8), torch.Tensor)
    assert_type(cunorm.torch.rms_norm(x, (8,)), torch.Tensor)


def of_jax(x: jax.Array) -> None:
    assert_type(cunorm.layer_norm(x), jax.Array)
    assert_type(cunorm.jax.layer_norm(x), jax.Array)
    assert_type(cunorm.jax.rms_norm(x), jax.Array)
