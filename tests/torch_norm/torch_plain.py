"""The plain norms by the operators of operations, and their formulas; `op` is a name of cunorm.operation.NAMED."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cunorm.operation import NAMED
from cunorm.torch.norm import calls, formulas, operators


def call_of(op: str, weight: Any, bias: Any, dtype: Any = None, sm_margin: int = 0) -> Any:
    return calls.affine_call(op, weight, bias, dtype, (sm_margin,) * 3)


def arguments(
    x: Any, weight: Any, bias: Any, op: str, eps: float, dtype: Any, wants_statistics: bool, sm_margin: int = 0
) -> tuple[Any, ...]:
    """Return the arguments of `fused_norm` and `fused_norm_forward`."""
    call = call_of(op, weight, bias, dtype, sm_margin)
    name = str(x.dtype).removeprefix("torch.")
    options = operators.forward_options(call, (), eps, name, wants_statistics, False)
    return x, [array for array in (weight, bias) if array is not None], *options


def norm(x, weight, bias, op, ndim, eps, dtype, wants_statistics, sm_margin=0, _=0, *, call=operators.fused_norm):
    """Return (y, statistics)."""
    rows, *columns = (None if array is None else array.flatten(-ndim) for array in (x, weight, bias))
    y, _, statistics = call(*arguments(rows, *columns, op, eps, dtype, wants_statistics, sm_margin))
    return y.reshape(x.shape), statistics


def norm_forward(*given):
    return norm(*given, call=operators.fused_norm_forward)


def function(x, weight, bias, op, ndim, eps, dtype, wants_statistics, *_):
    """Return what `norm` does, by the autograd.Function around the operator."""
    x, operands, *options = arguments(x, weight, bias, op, eps, dtype, wants_statistics)
    y, _, statistics = operators.Norm.apply(x, operators.Forward(*options), *operands)
    return y, statistics


def backward_arguments(dy, x, statistics, weight, op, eps, mask: Sequence[bool], sm_margin: int = 0) -> tuple[Any, ...]:
    """Return the arguments of `fused_norm_backward`: a weight that is left out is ones, and a bias zeros."""
    weight = x.new_ones(x.shape[-1:]) if weight is None and mask[1] else weight
    bias = torch.zeros_like(x.flatten(0, -2)[0] if weight is None else weight) if mask[2] else None
    operands = [array for array in (weight, bias) if array is not None]
    call = call_of(op, weight, bias)
    dtypes = [str(array.dtype).removeprefix("torch.") for array in (x, *operands)]
    options = operators.forward_options(call, (), eps, dtypes[0], True, True).backward(dtypes)
    named = dict(zip(("x", "weight", "bias"), mask, strict=True))
    options = options._replace(wanted=[named[name] for name in call.names], sm_margin=sm_margin)
    return dy, None, x, operands, None, statistics, *options


def norm_backward(dy, x, statistics, weight, op, eps, mask, sm_margin=0, call=operators.fused_norm_backward):
    """Return (dx, dweight, dbias), None where `mask` says so."""
    gradients = iter(call(*backward_arguments(dy, x, statistics, weight, op, eps, mask, sm_margin)))
    return tuple(next(gradients) if wants else None for wants in mask)


def backward_function(dy, x, statistics, weight, op, eps, mask, sm_margin=0):
    """Return what `norm_backward` does, by the autograd.Function."""

    def call(dy, _, x, operands, s, statistics, *options):
        return operators.NormBackward.apply(dy, statistics, operators.Backward(*options), x, *operands)

    return norm_backward(dy, x, statistics, weight, op, eps, mask, sm_margin, call)


def statistics_of(op: str, x: Any, ndim: int, eps: float) -> Any:
    rows = x.flatten(-ndim)
    return formulas.statistics_of(NAMED[op].norm, rows.to(formulas.compute_dtype(x)), eps)
