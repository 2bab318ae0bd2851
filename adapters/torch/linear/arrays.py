"""The backend of torch tensors for cunorm's own `layer_norm_linear`, by the rules of cunorm/linear/checks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...linear import checks as linear_checks
from ...linear.checks import LinearOptions
from ...operation import name_of
from ..norm.arrays import checked_once, layouts_of
from ..norm.functional import autocast_dtype
from .call import Given, Layer, norm_linear
from .parallel import ALONE
from .step import Saved, Step, gradients, without_autocast
from .wide import WIDE


def forward(options: LinearOptions, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (y, mean, rstd), statistics None unless asked for. y is differentiable."""
    tensors = tuple(arrays.values())
    cast = autocast_dtype(arrays["x"])
    checked_once(_check_forward, options.function, tensors, (options.zero_centered_gamma, cast is not None))
    layer = Layer(options.function, name_of(options.norm, options.zero_centered_gamma), options.eps)
    y, _, statistics = norm_linear(layer, tensors, Given(wants_statistics=options.statistics))
    if not options.statistics:
        return y, None, None
    return y, statistics[0] if len(statistics) == 2 else None, statistics[-1]


@torch.no_grad()
def backward(options: LinearOptions, arrays: Mapping[str, Any], output_mask: Any) -> tuple[Tensor | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    tensors = dy, x, mean, rstd, weight, ln_weight, ln_bias = tuple(arrays.values())
    norm, zero_centered_gamma = options.norm, options.zero_centered_gamma
    mask = checked_once(_check_backward, options.function, tensors, (norm, zero_centered_gamma, output_mask))
    statistics = torch.stack((mean, rstd) if norm == "layer_norm" else (rstd,))
    step = Step(name_of(norm, zero_centered_gamma), options.eps, x.dtype, numbers=WIDE)
    saved = Saved(statistics, x, weight, ln_weight, ln_bias)
    with without_autocast(x.device.type):
        return gradients(dy, None, saved, step, ALONE, mask)


def _check_forward(function, tensors, zero_centered_gamma, mixed) -> bool:
    named = dict(zip(("x", "weight", "bias", "ln_weight", "ln_bias"), tensors, strict=True))
    layouts = tuple(layouts_of(function, named, required=("x", "weight")).items())
    # Past its own memory, in which a size that a trace holds open cannot be looked up.
    linear_checks.check_forward.__wrapped__(function, layouts, zero_centered_gamma, mixed)
    return True


def _check_backward(function, tensors, norm, zero_centered_gamma, output_mask) -> tuple[bool, ...]:
    names = ("dy", "x", "mean", "rstd", "weight", "ln_weight", "ln_bias")
    layouts = layouts_of(function, dict(zip(names, tensors, strict=True)), linear_checks.required_of_backward(norm))
    linear_checks.check_backward(function, tuple(layouts.items()), zero_centered_gamma)
    mask = linear_checks.check_output_mask(function, output_mask)
    return (*mask[:4], mask[4] and norm == "layer_norm")
