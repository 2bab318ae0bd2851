"""A norm for compiled code: its forward pass runs in torch's own operators, and its backward pass is our kernel.

    torch.ops.cunorm.chosen_norm -> y

In the forward pass the compiler sees reductions and products, and fuses them with the operators around them. In the
backward pass it sees one call, torch.ops.cunorm.fused_norm_backward. With few elements it sees the model's own
operators instead. The choice is made when AOTAutograd decomposes the operator, because it is known then whether a CUDA
graph will be recorded, with which a step does not wait for the host. Only `accelerate` uses this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...operation import NAMED
from .. import private
from . import calls, checks, formulas, functional, operators

# Devices whose kernels a CUDA graph replays.
GRAPHED = ("cuda",)

operators._library.define(
    "chosen_norm(Tensor own, Tensor x, Tensor? weight, Tensor? bias, str operation, int ndim, float eps, "
    "int at_least) -> Tensor"
)


class DecomposedNorm(operators.Norm):
    """`operators.Norm` with a forward pass in torch's own operators."""

    @staticmethod
    def forward(x, options, *operands):
        """Return (y, s, statistics).

        y is computed from mean and rstd themselves, as the concatenated statistics would have to be in memory first.
        """
        weight, bias = operators.weight_and_bias(options.names, operands)
        name = operators.described(options, operands).affine
        checks.forward(name, x, 1, weight, bias, options.dtype)
        wide = x.to(formulas.compute_dtype(x))
        if formulas.subtracts_mean(name):
            variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
            row_statistics = [mean, (variance + options.eps).rsqrt()]
            y = (wide - mean) * row_statistics[1]
        else:
            row_statistics = [(wide.square().mean(-1, keepdim=True) + options.eps).rsqrt()]
            y = wide * row_statistics[0]
        if weight is not None:
            y = y * formulas.gamma(name, weight, x)
        if bias is not None:
            y = y + bias.to(y.dtype)
        parts = [statistic.reshape(1, *x.shape[:-1]) for statistic in row_statistics]
        return y.to(options.dtype), x.new_empty(0), torch.cat(parts) if len(parts) > 1 else parts[0]


def _chosen_norm(own, x, weight, bias, operation, ndim, eps, at_least) -> Tensor:
    """Decompose the norm from `at_least` elements on, or in a CUDA graph; else return `own`.

    In the former case nothing reads `own`, so that compiled code does not compute it. mode="reduce-overhead" asks for a
    graph in inductor's options, which hold while AOTAutograd traces.
    """
    if x.numel() < at_least and not (private.is_graphed_by_inductor() and x.device.type in GRAPHED):
        return own
    call = calls.affine_call(operation, weight, bias, own.dtype, (0, 0, 0))
    rows, *operands = (functional.as_rows(tensor, ndim) for tensor in functional.given(x, weight, bias))
    options = operators.forward_options(call, (), eps, checks.dtype_name(x.dtype), True, True)
    y, *_ = DecomposedNorm.apply(rows, options, *operands)
    y = y.reshape(x.shape)
    return y.contiguous() if own.is_contiguous() else y


operators._library.impl("chosen_norm", _chosen_norm, "CompositeImplicitAutograd")


def norm(
    own: Tensor,
    operation: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    at_least: int,
) -> Tensor:
    """Return `own`, y as the model's own operators compute it, or `chosen_norm` if there will be a backward pass."""
    may_be_ours = torch.compiler.is_dynamo_compiling() and not private.is_exporting() and x.dtype in functional.FLOATING
    if not (may_be_ours and operators.wants_gradient(x, weight, bias)):
        return own
    function = NAMED[operation].norm
    ndim = checks.trailing_axes(function, x, checks.shape(function, normalized_shape))
    eps = checks.eps(function, eps, x)
    return torch.ops.cunorm.chosen_norm.default(own, x, weight, bias, operation, ndim, eps, at_least)
