"""Calls of layer_norm_linear on the tensors of a case, and on five small tensors."""

from __future__ import annotations

from typing import Any

import linear_reference
import pytest
from linear_reference import NORMALIZATION

torch = pytest.importorskip("torch")

from torch_tensors import random, tensor  # noqa: E402

from cunorm.torch import layer_norm_linear  # noqa: E402

keeping = pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])


def tensors(call: linear_reference.Call, device: str) -> list[Any]:
    """Return x, weight, bias, ln_weight and ln_bias, which want gradients, with None for what the call has not."""
    arrays = call[1:6]
    return [None if a is None else tensor(a).to(device).requires_grad_() for a in arrays]


def run(call: linear_reference.Call, inputs: list[Any], keep: bool = False) -> Any:
    options = {"normalization": NORMALIZATION[call.op], "zero_centered_gamma": call.zero_centered_gamma}
    return layer_norm_linear(*inputs, call.eps, keep_normalized=keep, **options)


def grad(y: Any, inputs: list[Any], dy: Any) -> tuple[Any, ...]:
    gradients = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return tuple(None if t is None else next(gradients) for t in inputs)


def five(device: str, dtype: Any = torch.float64, rows: tuple[int, ...] = (6,)) -> list[Any]:
    shapes = ((*rows, 16), (12, 16), (12,), (16,), (16,))
    return [random(*shape, device=device, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
