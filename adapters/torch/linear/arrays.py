"""What cunorm's own `layer_norm_linear` does with torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear import problem
from ..norm.formulas import compute_dtype
from . import functional
from .passes import Options, gradients, normalise


def forward(
    function: str,
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (y, mean, rstd), statistics None unless asked for. y is differentiable."""
    tensors = (x, weight, bias, ln_weight, ln_bias)
    y, _ = functional.norm_linear(function, *tensors, eps, op, zero_centered_gamma, False)
    if not statistics:
        return y, None, None
    with torch.no_grad():
        options = Options(op, eps, zero_centered_gamma, y.dtype, False)
        _, both = normalise(x, ln_weight, ln_bias, options, True)
    return y, (both[0] if len(both) == 2 else None), both[-1]


@torch.no_grad()
def backward(
    function: str,
    op: str,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    functional.check(function, x, weight, None, ln_weight, ln_bias, zero_centered_gamma)
    named = {"dy": dy, "rstd": rstd, **({} if op == "rms_norm" else {"mean": mean})}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
        shape = (*x.shape[:-1], len(weight)) if name == "dy" else x.shape[:-1]
        dtype = x.dtype if name == "dy" else compute_dtype(x)
        if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != x.device:
            raise RuntimeError(
                f"{function}: {name} must have shape {tuple(shape)} and dtype {dtype} on {x.device}; got "
                f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}."
            )
    mask = problem.check_output_mask(function, output_mask)
    statistics = torch.stack((rstd,) if op == "rms_norm" else (mean, rstd))
    options = Options(op, eps, zero_centered_gamma, x.dtype, False)
    return gradients(
        dy, None, x, weight, ln_weight, ln_bias, statistics, None, options, (*mask[:4], mask[4] and op == "layer_norm")
    )
