"""A norm for compiled code: its forward pass in torch's own operators, its backward pass our kernel.

    torch.ops.cunorm.chosen_norm -> y

The compiler sees reductions and products in the forward pass, and joins them with what stands beside them; in the
backward pass it sees one call, torch.ops.cunorm.norm_backward. Or it sees what the model's own operators made: that is
chosen where the operator is decomposed, in AOTAutograd, when it is known whether there will be a CUDA graph. With one
a step does not wait for the host. Nobody but `accelerate` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...operation import NAMED
from .. import private
from . import checks, formulas, functional, operators

# Devices whose kernels a CUDA graph replays.
GRAPHED = ("cuda",)

operators._library.define(
    "chosen_norm(Tensor own, Tensor x, Tensor? weight, Tensor? bias, str operation, int ndim, float eps, "
    "int at_least) -> Tensor"
)


class DecomposedNorm(operators.Norm):
    """The same derivative of other operators."""

    @staticmethod
    def forward(x, weight, bias, operation, ndim, eps, dtype, *_):
        """y comes of mean and rstd, not of `statistics`, which would have to be in memory before y is begun."""
        checks.forward(operation, x, ndim, weight, bias, dtype)
        axes, wide = tuple(range(-ndim, 0)), x.to(formulas.compute_dtype(x))
        if formulas.subtracts_mean(operation):
            variance, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
            of_rows = [mean, (variance + eps).rsqrt()]
            y = (wide - mean) * of_rows[1]
        else:
            of_rows = [(wide.square().mean(axes, keepdim=True) + eps).rsqrt()]
            y = wide * of_rows[0]
        if weight is not None:
            y = y * formulas.gamma(operation, weight, x)
        if bias is not None:
            y = y + bias.to(y.dtype)
        kept = [one.reshape(1, *x.shape[:-ndim]) for one in of_rows]
        return y.to(dtype), torch.cat(kept) if len(kept) > 1 else kept[0]


def _chosen_norm(own, x, weight, bias, operation, ndim, eps, at_least) -> Tensor:
    """Decomposed from `at_least` elements on, or in a CUDA graph: `own` is then read by nobody, and not computed."""
    if x.numel() < at_least and not _is_graphed(x):
        return own
    y, _ = DecomposedNorm.apply(x, weight, bias, operation, ndim, eps, own.dtype, True, 0, 0)
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
