"""rms_norm_add_rms_norm of tensors: one launch forward where a CTA holds a row, else two; two backward, where autograd
alone would take a third to add up the gradients of s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.checks import Layout
from ...call.recipe import runs_norm_add_norm
from ...named import KINDS
from ...operation import norm_add_norm, norm_add_norm_steps
from .. import private
from . import checks, dispatch, launching
from .calls import Call, Family, call_of, family
from .launching import Saved


def run(
    zero_centered_gamma: bool,
    names: tuple[str, ...],
    tensors: Sequence[Tensor],
    eps: float,
    dtype: torch.dtype,
    s_dtype: torch.dtype | None,
    sm_margins: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """(y, s) of x and the operands of these names."""
    dtypes = checks.dtype_name(dtype), checks.name_or_none(s_dtype)
    calls = _calls_of(zero_centered_gamma, names, *dtypes, sm_margins)
    if torch.compiler.is_compiling():  # the operators raise as torch does
        return _run(calls, tensors, eps)
    return checks.raising_as_torch(_run, calls, tensors, eps)


class _Calls(NamedTuple):
    first: Call  # makes s of x
    then: Call  # makes y of s
    backward: Call  # what the backward pass of `then` is of: it adds the gradient of s
    at_once: Call  # makes both


@private.constant
def _calls_of(
    zero_centered_gamma: bool,
    names: tuple[str, ...],
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int],
) -> _Calls:
    key = (zero_centered_gamma, names, dtype, s_dtype, sm_margins)
    found = _calls.get(key)
    if found is None:
        of_first = tuple(name for name in names if name != "second_weight")
        of_next = tuple(name for name in names if name == "second_weight")
        first, then, backward = norm_add_norm_steps(zero_centered_gamma)
        function = "rms_norm_add_rms_norm"
        found = _calls[key] = _Calls(
            call_of(function, first, of_first, (), KINDS, s_dtype, None, sm_margins),
            call_of(function, then, of_next, (), KINDS, dtype, None, sm_margins),
            call_of(function, backward, of_next, (), KINDS, dtype, None, sm_margins),
            call_of(function, norm_add_norm(zero_centered_gamma), names, (), KINDS, dtype, None, sm_margins),
        )
    return found


_calls: dict[tuple, _Calls] = {}


def _run(calls: _Calls, tensors: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """(y, s)"""
    count = len(calls.first.names)
    if not torch.compiler.is_compiling() and dispatch.at_once(tensors):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _apply(calls, eps, *tensors)
        if _is_one_launch(tensors[0], calls.first.dtype):
            margin = calls.at_once.sm_margins[2]
            (y, s), _, _ = launching.forward(calls.at_once, tensors, (), eps, False, sm_margin=margin)
            return y, s
    (s,), _ = dispatch.run(calls.first, tensors[:count], (), eps, False)
    (y,), _ = dispatch.run(calls.then, (s, *tensors[count:]), (), eps, False)
    return y, s


def _is_one_launch(x: Tensor, s_dtype: str | None) -> bool:
    """Whether one kernel makes both."""
    return runs_norm_add_norm(Layout(tuple(x.shape), (), checks.dtype_name(x.dtype), ""), s_dtype)


class _NormAddNorm(torch.autograd.Function):
    """On plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, calls, eps, *tensors):
        count = len(calls.first.names)
        given, after = tensors[:count], tensors[count:]
        margin = calls.at_once.sm_margins[0]
        if _is_one_launch(given[0], calls.first.dtype):
            (y, s), statistics, _ = launching.forward(calls.at_once, tensors, (), eps, True, sm_margin=margin)
            of_x, of_s = statistics.split(1)
            first, then = _family(calls.first, given), _family(calls.then, (s, *after))
        else:
            (s,), of_x, first = launching.forward(calls.first, given, (), eps, True, sm_margin=margin)
            (y,), of_s, then = launching.forward(calls.then, (s, *after), (), eps, True, sm_margin=margin)
        wants_s = any(ctx.needs_input_grad[2 : 2 + count])
        masks = ctx.needs_input_grad[2 : 2 + count], (wants_s, *ctx.needs_input_grad[2 + count :])
        names = calls.first.saved(calls.first.wanted(masks[0]))
        saved = [given[calls.first.names.index(name)] for name in names]
        ctx.save_for_backward(of_x, of_s, s, *after, *saved)
        ctx.set_materialize_grads(False)
        ctx.call = calls, eps, masks, first, family(calls.backward, then.layouts), names
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        calls, eps, masks, first, then, names = ctx.call
        if dy is None and ds is None:
            return None, None, *[None] * (len(masks[0]) + len(masks[1]) - 1)
        of_x, of_s, s, *others = ctx.saved_tensors
        after, saved = others[: len(masks[1]) - 1], others[len(masks[1]) - 1 :]
        of_then = Saved((*calls.then.names[1:], "s"), (*after, s), (), of_s)
        dresidual, *found = dispatch.gradients_of(then, of_then, eps, dy, ds, masks[1])
        dx = [None] * len(masks[0])
        if any(masks[0]):
            # That of residual, x and operands in the order of `names`, is what comes in.
            mask = tuple(wants and name != "residual" for name, wants in zip(calls.first.names, masks[0], strict=True))
            if any(mask):
                dx = [*dispatch.gradients_of(first, Saved(names, saved, (), of_x), eps, dresidual, None, mask)]
            place = calls.first.names.index("residual")
            if masks[0][place]:
                dx[place] = dresidual.to(getattr(torch, first.layouts["residual"].dtype))
        return None, None, *dx, *found


def _family(call: Call, tensors: Sequence[Tensor]) -> Family:
    return family(call, launching.layouts_of(call, tensors))


_apply = private.applied(_NormAddNorm)
