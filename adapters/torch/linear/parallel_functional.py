"""LayerNormLinear's call over the ranks of a group: checked, and one step of autograd, or one operator of a trace."""

from __future__ import annotations

import torch
from torch import Tensor

from ...norm import checks
from ..norm.functional import applied, autocast_dtype
from . import parallel_operators
from .functional import NO_MARGINS, _check_dtypes, check, in_one_step, margins_of_pass
from .parallel import TensorParallel
from .parallel_passes import forward, gradients
from .passes import Options, Sink, without_autocast


def norm_linear(
    function: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float,
    operation: str,
    keep_normalized: bool,
    parallel: TensorParallel,
    sink: Sink | None,
    sm_margins: tuple[int, int, int] = NO_MARGINS,
) -> tuple[Tensor, Tensor | None]:
    """(y, z), z None unless it is returned. The arguments are those of this rank."""
    ranks = parallel.ranks()
    tensors = (x, weight, bias, ln_weight, ln_bias)
    check(function, *tensors, operation)
    cast = autocast_dtype(x)
    if cast is None:
        _check_dtypes(function, x, weight=weight, bias=bias)
    else:
        tensors = (x, weight.to(cast), None if bias is None else bias.to(cast), ln_weight, ln_bias)
    if type(eps) is not float:
        eps = checks.eps(function, eps, x)
    parallel.check_rows(function, x)
    if not in_one_step(*tensors):
        raise RuntimeError(
            f"{function}: over several ranks it is for plain tensors, and for first derivatives by backward(); got a "
            "subclass of Tensor, or a call under functorch or forward-mode differentiation."
        )
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    margins = margins_of_pass(sm_margins, differentiated)
    options = Options(operation, eps, cast or x.dtype, keep_normalized, *margins)
    if torch.compiler.is_compiling():  # the operator compares
        y, z = parallel_operators.norm_linear(*tensors, *options, *ranks)[:2]
        return y, z if ranks.returned != "nothing" else None
    parallel.compare(x, options.dtype)
    if differentiated:
        return _apply(*tensors, options, ranks, sink)
    with torch.no_grad():
        return forward(*tensors, options, ranks)[:2]


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ln_weight, ln_bias, options, ranks, sink):
        found = forward(x, weight, bias, ln_weight, ln_bias, options, ranks)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, ln_weight, ln_bias, found.statistics, found.kept)
        ctx.call = options, ranks, sink
        return found.y, found.returned

    @staticmethod
    def backward(ctx, dy, dz):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LayerNormLinear: over several ranks there are first derivatives alone; got create_graph=True."
            )
        options, ranks, sink = ctx.call
        x, *others = ctx.saved_tensors
        with without_autocast(x.device.type):
            results = gradients(dy, dz, x, *others, options, ranks, ctx.needs_input_grad[:5], sink)
        return *results, None, None, None


_apply = applied(_NormLinear)
