"""The backend of torch tensors for cunorm's own `layer_norm_linear`, by the rules of cunorm/linear/problem.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear import problem
from ...operation import name_of
from ..norm.arrays import checked_once, layouts_of, mean_and_rstd
from ..norm.functional import autocast_dtype
from .call import Given, Layer, norm_linear
from .parallel import ALONE
from .step import Saved, Step, gradients, without_autocast
from .wide import WIDE


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
    cast = autocast_dtype(x)
    checked_once(_check_forward, function, tensors, (zero_centered_gamma, cast is not None))
    layer = Layer(function, name_of(op, zero_centered_gamma), eps)
    y, _, both = norm_linear(layer, tensors, Given(wants_statistics=statistics))
    return (y, *mean_and_rstd(both)) if statistics else (y, None, None)


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
    tensors = (dy, x, mean if op == "layer_norm" else None, rstd, weight, ln_weight, ln_bias)
    mask = checked_once(_check_backward, function, tensors, (op, zero_centered_gamma, output_mask))
    statistics = torch.stack((mean, rstd) if op == "layer_norm" else (rstd,))
    step = Step(name_of(op, zero_centered_gamma), eps, x.dtype, numbers=WIDE)
    saved = Saved(statistics, x, weight, ln_weight, ln_bias)
    with without_autocast(x.device.type):
        return gradients(dy, None, saved, step, ALONE, mask)


def _check_forward(function, tensors, zero_centered_gamma, mixed) -> bool:
    named = dict(zip(("x", "weight", "bias", "ln_weight", "ln_bias"), tensors, strict=True))
    layouts = tuple(layouts_of(function, named, required=("x", "weight")).items())
    # Past its own memory, in which a size that a trace holds open cannot be looked up.
    problem.check_forward.__wrapped__(function, layouts, zero_centered_gamma, mixed)
    return True


def _check_backward(function, tensors, op, zero_centered_gamma, output_mask) -> tuple[bool, ...]:
    """Check a backward pass and return which gradients are wanted."""
    layer_norm = op == "layer_norm"
    names = ("dy", "x", "mean", "rstd", "weight", "ln_weight", "ln_bias")
    required = ("dy", "x", "rstd", "weight", *(("mean",) if layer_norm else ()))
    layouts = layouts_of(function, dict(zip(names, tensors, strict=True)), required)
    problem.check_backward(function, tuple(layouts.items()), zero_centered_gamma)
    mask = problem.check_output_mask(function, output_mask)
    return (*mask[:4], mask[4] and layer_norm)
