"""What cunorm's own `layer_norm_linear` does with torch tensors, held to the rules of cunorm/linear/problem.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear import problem
from ..norm.arrays import layouts_of, mean_and_rstd
from ..norm.functional import autocast_dtype
from . import functional
from .passes import Options, gradients, without_autocast


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
    named = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    layouts = tuple(layouts_of(function, named, required=("x", "weight")).items())
    cast = autocast_dtype(x)
    # A size that a trace holds open cannot be looked up among those that were checked before.
    traced = any(isinstance(size, torch.SymInt) for size in x.shape)
    check = problem.check_forward.__wrapped__ if traced else problem.check_forward
    check(function, layouts, zero_centered_gamma, cast is not None)
    options = Options(op, eps, zero_centered_gamma, cast or x.dtype, False)
    y, _, both = functional.run(*named.values(), options, cast, wants_statistics=statistics)
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
    layer_norm = op == "layer_norm"
    required = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, **({"mean": mean} if layer_norm else {})}
    layouts = layouts_of(function, {**required, "ln_weight": ln_weight, "ln_bias": ln_bias}, tuple(required))
    problem.check_backward(function, tuple(layouts.items()), zero_centered_gamma)
    mask = problem.check_output_mask(function, output_mask)
    mask = (*mask[:4], mask[4] and layer_norm)
    statistics = torch.stack((mean, rstd) if layer_norm else (rstd,))
    options = Options(op, eps, zero_centered_gamma, x.dtype, False)
    with without_autocast(x.device.type):
        return gradients(dy, None, x, weight, ln_weight, ln_bias, statistics, None, options, mask)
