"""What cunorm's own functions do with torch tensors: as cupy_arrays.py and numpy_arrays.py with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, functional, operators
from .formulas import compute_dtype


def forward(
    function: str,
    x: Tensor,
    normalized_shape: int | Sequence[int] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: Tensor | None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (y, mean, rstd), statistics None unless asked for. y is differentiable unless it is written to `out`."""
    op = function.removesuffix("_forward")
    checks.tensors(op, x, weight, bias)
    checks.check_eps(function, eps)
    if normalized_shape is None:
        normalized_shape = x.shape[-1:] if weight is None else weight.shape
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, checks.dtype_name(function, dtype))
    if out is not None:
        dtype = _check_out(function, out, x, dtype, (x, weight, bias))
    mean = rstd = None
    if statistics:
        shape = checks.shape(op, normalized_shape)
        ndim = checks.trailing_axes(op, x, shape)
        options = (checks.eps(op, eps, x), zero_centered_gamma, dtype or x.dtype, True)
        margins = checks.sm_margins(op, sm_margin)[:2]
        y, both = operators.norm_forward(x, weight, bias, op, ndim, *options, *margins)
        mean, rstd = (both[0] if len(both) == 2 else None), both[-1]
    else:
        y = functional.norm(op, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin)
    return (y if out is None else out.copy_(y)), mean, rstd


@torch.no_grad()
def backward(
    function: str,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    sm_margin: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    op = function.removesuffix("_backward")
    named = {"dy": dy, "x": x, "rstd": rstd, **({} if op == "rms_norm" else {"mean": mean})}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
        if name in ("mean", "rstd") and (tensor.shape != x.shape[: tensor.dim()] or tensor.dtype != compute_dtype(x)):
            raise RuntimeError(
                f"{function}: {name} must have the shape of x without its normalised axes and dtype "
                f"{compute_dtype(x)}; got {tuple(tensor.shape)}, {tensor.dtype}. Pass what {op}_forward returned."
            )
    if zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    mask = checks.check_output_mask(function, output_mask, 3 if op == "layer_norm" else 2)
    statistics = torch.stack((rstd,) if op == "rms_norm" else (mean, rstd))
    margin = checks.check_sm_margin(function, sm_margin, None)
    gradients = operators.norm_backward(dy, x, statistics, weight, op, 0.0, zero_centered_gamma, list(mask), margin)
    dx, dweight, dbias = (gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))
    return dx, dweight, dbias


def _check_out(function, out: Any, x: Tensor, dtype: torch.dtype | None, inputs: Sequence[Tensor | None]):
    """Return the dtype of y."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{function}: out must be a torch.Tensor, as x is; got {type(out).__name__}.")
    if out.shape != x.shape or out.dtype != (dtype or out.dtype) or out.device != x.device:
        raise ValueError(
            f"{function}: out must have shape {tuple(x.shape)}, dtype {dtype or out.dtype} and device {x.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}."
        )
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise RuntimeError(
            f"{function}: out must be None where a gradient is wanted; got a tensor. Use torch.no_grad()."
        )
    return out.dtype
