"""Run rms_norm_add_rms_norm on tensors.

The forward pass is one launch where a CTA holds a row, else two. The backward pass is two launches; autograd alone
would need a third one to add up the gradients of s.
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
    """Return (y, s) of `tensors`, which are x and the operands of these names."""
    dtypes = checks.dtype_name(dtype), checks.name_or_none(s_dtype)
    calls = _calls_of(zero_centered_gamma, names, *dtypes, sm_margins)
    if torch.compiler.is_compiling():  # the operators raise as torch does
        return _run(calls, tensors, eps)
    return checks.raising_as_torch(_run, calls, tensors, eps)


class _Calls(NamedTuple):
    first: Call  # computes s from x
    then: Call  # computes y from s
    backward: Call  # its backward pass is that of `then`, with the gradient of s added
    at_once: Call  # computes both


@private.constant
def _calls_of(
    zero_centered_gamma: bool,
    names: tuple[str, ...],
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int],
) -> _Calls:
    first_names = tuple(name for name in names if name != "second_weight")
    next_names = tuple(name for name in names if name == "second_weight")
    first, then, backward = norm_add_norm_steps(zero_centered_gamma)
    function = "rms_norm_add_rms_norm"
    return _Calls(
        call_of(function, first, first_names, (), KINDS, s_dtype, None, sm_margins),
        call_of(function, then, next_names, (), KINDS, dtype, None, sm_margins),
        call_of(function, backward, next_names, (), KINDS, dtype, None, sm_margins),
        call_of(function, norm_add_norm(zero_centered_gamma), names, (), KINDS, dtype, None, sm_margins),
    )


def _run(calls: _Calls, tensors: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    count = len(calls.first.names)
    if not torch.compiler.is_compiling() and dispatch.at_once(tensors):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _apply(calls, eps, *tensors)
        if _is_one_launch(tensors[0], calls.first.dtype):
            recipe = launching.recipe_of(calls.at_once, tensors, calls.at_once.sm_margins[2])
            (y, s), _ = launching.forward_by(recipe, tensors, (), eps, False)
            return y, s
    (s,), _ = dispatch.run(calls.first, tensors[:count], (), eps, False)
    (y,), _ = dispatch.run(calls.then, (s, *tensors[count:]), (), eps, False)
    return y, s


def _is_one_launch(x: Tensor, s_dtype: str | None) -> bool:
    """Say whether one kernel computes both y and s."""
    return runs_norm_add_norm(Layout(tuple(x.shape), (), checks.dtype_name(x.dtype), ""), s_dtype)


class _NormAddNorm(torch.autograd.Function):
    """The operation on plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, calls, eps, *tensors):
        count = len(calls.first.names)
        first_tensors, then_operands = tensors[:count], tensors[count:]
        margin = calls.at_once.sm_margins[0]
        if _is_one_launch(first_tensors[0], calls.first.dtype):
            recipe = launching.recipe_of(calls.at_once, tensors, margin)
            (y, s), statistics = launching.forward_by(recipe, tensors, (), eps, True)
            x_statistics, s_statistics = statistics.split(1)
            first, then = _family(calls.first, first_tensors), _family(calls.then, (s, *then_operands))
        else:
            first_recipe = launching.recipe_of(calls.first, first_tensors, margin)
            (s,), x_statistics = launching.forward_by(first_recipe, first_tensors, (), eps, True)
            then_tensors = (s, *then_operands)
            then_recipe = launching.recipe_of(calls.then, then_tensors, margin)
            (y,), s_statistics = launching.forward_by(then_recipe, then_tensors, (), eps, True)
            first, then = first_recipe.family, then_recipe.family
        wants_s = any(ctx.needs_input_grad[2 : 2 + count])
        masks = ctx.needs_input_grad[2 : 2 + count], (wants_s, *ctx.needs_input_grad[2 + count :])
        names = calls.first.saved(calls.first.wanted(masks[0]))
        saved = [first_tensors[calls.first.names.index(name)] for name in names]
        ctx.save_for_backward(x_statistics, s_statistics, s, *then_operands, *saved)
        ctx.set_materialize_grads(False)
        ctx.call = calls, eps, masks, first, family(calls.backward, then.layouts), names
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        calls, eps, masks, first, then, names = ctx.call
        if dy is None and ds is None:
            return None, None, *[None] * (len(masks[0]) + len(masks[1]) - 1)
        x_statistics, s_statistics, s, *saved_tensors = ctx.saved_tensors
        then_operands, saved = saved_tensors[: len(masks[1]) - 1], saved_tensors[len(masks[1]) - 1 :]
        then_saved = Saved((*calls.then.names[1:], "s"), (*then_operands, s), (), s_statistics)
        s_gradient, *then_gradients = dispatch.gradients_of(then, then_saved, eps, dy, ds, masks[1])
        gradients = [None] * len(masks[0])
        if any(masks[0]):
            # s = residual + norm(x): the gradient of residual is that of s, and no kernel writes it.
            mask = tuple(wants and name != "residual" for name, wants in zip(calls.first.names, masks[0], strict=True))
            if any(mask):
                first_saved = Saved(names, saved, (), x_statistics)
                gradients = [*dispatch.gradients_of(first, first_saved, eps, s_gradient, None, mask)]
            place = calls.first.names.index("residual")
            if masks[0][place]:
                gradients[place] = s_gradient.to(getattr(torch, first.layouts["residual"].dtype))
        return None, None, *gradients, *then_gradients


def _family(call: Call, tensors: Sequence[Tensor]) -> Family:
    return family(call, launching.layouts_of(call, tensors))


_apply = private.applied(_NormAddNorm)
