"""LayerNormLinear's call over the ranks of a group: checked, and one step of autograd, or one operator of a trace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...norm import checks
from ..norm.functional import autocast_dtype
from ..private import applied
from . import parallel_operators
from .functional import NO_MARGINS, _check_dtypes, check, in_one_step, known, margins_of_pass, remember_known
from .parallel import TensorParallel
from .parallel_passes import Ranks, forward, gradients, takes_part
from .passes import NOTHING, Options, Sink, without_autocast


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
    named = (x, weight, bias, ln_weight, ln_bias, eps, operation, keep_normalized)
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
    wanted = parallel.wanted(tensors)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    margins = margins_of_pass(sm_margins, differentiated)
    options = Options(operation, eps, cast or x.dtype, keep_normalized, *margins)
    if torch.compiler.is_compiling():  # the operator compares
        y, z = parallel_operators.norm_linear(*tensors, *options, *ranks[:-1], wanted)[:2]
        return y, z if ranks.returned != "nothing" else None
    call = Call(options, wanted, differentiated)
    if cast is None:
        remember_known(call, _function(function, sm_margins, ranks), *named)
    return _run(call, tensors, parallel, sink)


class Call(NamedTuple):
    """What follows for a call from its options, its place among the ranks and the layouts of its tensors."""

    options: Options
    wanted: int  # by this rank
    differentiated: bool


def _function(function: str, sm_margins: tuple[int, int, int], ranks: Ranks) -> tuple:
    """What tells calls apart besides their arguments."""
    return function, sm_margins, ranks, torch.is_grad_enabled()


def run_known(
    function: str,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    eps: float,
    operation: str,
    keep_normalized: bool,
    parallel: TensorParallel,
    sink: Sink | None,
    sm_margins: tuple[int, int, int],
) -> tuple[Tensor, Tensor | None] | None:
    """As `norm_linear` if there was a call like it, in eager mode and without autocast; else None."""
    call = known(_function(function, sm_margins, parallel.ranks()), *tensors, eps, operation, keep_normalized)
    return None if call is None else _run(call, tensors, parallel, sink)


def _run(call: Call, tensors: tuple, parallel: TensorParallel, sink: Sink | None) -> tuple[Tensor, Tensor | None]:
    options, wanted, differentiated = call
    ranks = parallel.agreed(wanted, tensors[0], options.dtype)
    if differentiated or ranks.sums or ranks.gathers:
        anchor, sink = takes_part(tensors, differentiated, ranks, sink)
        return _apply(*tensors, anchor, options, ranks, sink)
    with torch.no_grad() if torch.is_grad_enabled() else NOTHING:  # 2 us where it changes nothing
        return forward(*tensors, options, ranks, False)[:2]


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ln_weight, ln_bias, anchor, options, ranks, sink):
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
        with without_autocast("cuda" if x.is_cuda else x.device.type):  # a device takes 0.6 us
            results = gradients(dy, dz, x, *others, options, ranks, ctx.needs_input_grad[:5], sink)
        return *results, None, None, None, None


_apply = applied(_NormLinear)
