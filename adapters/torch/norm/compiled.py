"""A norm for compiled code: its forward pass in torch's own operators, its backward pass our kernel.

    torch.ops.cunorm.chosen_norm -> y

The compiler sees reductions and products in the forward pass, and joins them with what stands beside them; in the
backward pass it sees one call, torch.ops.cunorm.fused_norm_backward. Or it sees what the model's own operators made:
that is chosen where the operator is decomposed, in AOTAutograd, when it is known whether there will be a CUDA graph.
With one a step does not wait for the host. Nobody but `accelerate` asks for it.
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
    """The same derivative of other operators."""

    @staticmethod
    def forward(x, asked, *operands):
        """y comes of mean and rstd, not of `statistics`, which would have to be in memory before y is begun."""
        name, (weight, bias) = asked.call(operands).affine, operators.weight_and_bias(asked.names, operands)
        checks.forward(name, x, 1, weight, bias, asked.dtype)
        wide = x.to(formulas.compute_dtype(x))
        if formulas.subtracts_mean(name):
            variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
            of_rows = [mean, (variance + asked.eps).rsqrt()]
            y = (wide - mean) * of_rows[1]
        else:
            of_rows = [(wide.square().mean(-1, keepdim=True) + asked.eps).rsqrt()]
            y = wide * of_rows[0]
        if weight is not None:
            y = y * formulas.gamma(name, weight, x)
        if bias is not None:
            y = y + bias.to(y.dtype)
        kept = [one.reshape(1, *x.shape[:-1]) for one in of_rows]
        return y.to(asked.dtype), x.new_empty(0), torch.cat(kept) if len(kept) > 1 else kept[0]


def _chosen_norm(own, x, weight, bias, operation, ndim, eps, at_least) -> Tensor:
    """Decomposed from `at_least` elements on, or in a CUDA graph: `own` is then read by nobody, and not computed."""
    if x.numel() < at_least and not _is_graphed(x):
        return own
    call = calls.affine_call(operation, weight, bias, own.dtype, (0, 0, 0))
    rows, *operands = (functional.as_rows(one, ndim) for one in functional.given(x, weight, bias))
    asked = operators.forward_options(call, (), eps, checks.dtype_name(x.dtype), True, True)
    y, *_ = DecomposedNorm.apply(rows, asked, *operands)
    y = y.reshape(x.shape)
    return y.contiguous() if own.is_contiguous() else y


def _is_graphed(x: Tensor) -> bool:
    """Whether inductor, if it is what compiles, will record a CUDA graph.

    mode="reduce-overhead" says so in inductor's options, which hold while AOTAutograd traces.
    """
    return private.is_graphed_by_inductor() and x.device.type in GRAPHED


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
    """`own`, which the model's own operators made of the rest, or `chosen_norm` where somebody will go back."""
    if not (_may_be_ours(x) and operators.wants_gradient(x, weight, bias)):
        return own
    function = NAMED[operation].norm
    ndim = checks.trailing_axes(function, x, checks.shape(function, normalized_shape))
    eps = checks.eps(function, eps, x)
    return torch.ops.cunorm.chosen_norm.default(own, x, weight, bias, operation, ndim, eps, at_least)


def _may_be_ours(x: Tensor) -> bool:
    """Whether dynamo traces, and not for an export; of what a kernel reads."""
    return torch.compiler.is_dynamo_compiling() and not private.is_exporting() and x.dtype in functional.FLOATING
