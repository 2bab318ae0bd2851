"""LayerNormLinear's call in FP8: checked, the bytes of weight fetched, and one step of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norm.dispatch import at_once
from ..norm.functional import autocast_dtype, given
from ..private import applied, nothing_listens
from . import float8_operators, functional
from .float8_casts import STEP, cast_rows
from .float8_context import check_available
from .float8_passes import Dtypes, Float8Options, Saved, forward, gradients, norm_recipe
from .float8_weights import WeightCache
from .functional import NO_MARGINS, check, in_one_step, margins_of_pass
from .parameters import joined
from .passes import Sink, without_autocast
from .recipes import Recipe

FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_NOTHING = nullcontext()


class Call(NamedTuple):
    """What follows for a call from its options and the layouts of its tensors."""

    options: Float8Options
    norm: Any  # the recipe of the norm in 8 bits, None where it is looked for again
    differentiable: bool  # some tensor requires a gradient
    of_norm: bool  # one of x, ln_weight, ln_bias does


def known(function, x, weight, bias, ln_weight, ln_bias, eps, operation, recipe: Recipe, wants_z, margins):
    """The Call of an earlier call of `norm_linear` with tensors like these, which was checked; None for nothing."""
    return functional.known(
        _key(function, recipe, wants_z, margins), x, weight, bias, ln_weight, ln_bias, eps, operation
    )


def _key(function: str, recipe: Recipe, wants_z: bool, sm_margins: tuple[int, int, int]) -> tuple:
    return function, recipe.scheme, wants_z, sm_margins


def norm_linear(
    function: str,
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    eps: float,
    operation: str,
    recipe: Recipe,
    cache: WeightCache,
    *,
    is_first_microbatch: bool | None,
    fp8_output: bool,
    wants_z: bool,
    sink: Sink | None,
    sm_margins: tuple[int, int, int] = NO_MARGINS,
) -> tuple[Any, Tensor | None]:
    """(y, z): y (..., out), or with `fp8_output` the pair of its bytes and their scales by row; z if it is wanted.

    The parameters `parts` are weight, one after the other.
    """
    weight = joined(parts)
    tensors = (x, weight, bias, ln_weight, ln_bias)
    check(function, *tensors, operation)
    _check_float8(function, *tensors)
    wanting = [t is not None and t.requires_grad for t in tensors]
    differentiable, of_norm = any(wanting), wanting[0] or wanting[3] or wanting[4]
    differentiated = differentiable and torch.is_grad_enabled()
    cast = autocast_dtype(x)
    margins = margins_of_pass(sm_margins, differentiated)
    options = Float8Options(operation, float(eps), cast or x.dtype, recipe.scheme, *margins)
    if torch.compiler.is_compiling():
        _check_output(function, fp8_output, differentiated)
        options = (*float8_operators.flat(options), wants_z, differentiated and of_norm)
        return float8_operators.norm_linear(*tensors, *options)[:2]
    call = Call(options, None, differentiable, of_norm)
    if cast is None and sm_margins[0] == sm_margins[2] and at_once(given(x, ln_weight, ln_bias)):
        call = call._replace(norm=norm_recipe(x, ln_weight, ln_bias, options, wants_z))
        functional.remember_known(call, _key(function, recipe, wants_z, sm_margins), *tensors, eps, operation)
    with _NOTHING if cast is None else torch.autocast(x.device.type, enabled=False):
        return run(function, call, parts, *tensors, cache, is_first_microbatch, fp8_output, wants_z, sink)


def run(
    function: str,
    call: Call,
    parts: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    cache: WeightCache,
    is_first_microbatch: bool | None,
    fp8_output: bool,
    wants_z: bool,
    sink: Sink | None,
) -> tuple[Any, Tensor | None]:
    """`norm_linear` of tensors that are checked."""
    options, norm, differentiable, of_norm = call
    differentiated = differentiable and torch.is_grad_enabled()
    _check_output(function, fp8_output, differentiated)
    if differentiated:
        trained = weight.requires_grad
        fetch = partial(cache.of, parts, weight, options.scheme, of_norm, trained, is_first_microbatch)
        return _apply(x, weight, bias, ln_weight, ln_bias, fetch, options, norm, wants_z, sink)
    weights = cache.of(parts, weight, options.scheme, False, False, is_first_microbatch)
    y, z, _, _ = forward(x, weights, bias, ln_weight, ln_bias, options, False, wants_z, norm)
    if fp8_output:
        y8, scale, _, _ = cast_rows(y.view(-1, y.shape[-1]))
        return (y8.view(y.shape), scale.view(y.shape[:-1])), z
    return y, z


def _check_output(function: str, fp8_output: bool, differentiated: bool) -> None:
    if fp8_output and differentiated:
        raise ValueError(
            f"{function}: fp8_output=True needs a call without gradients, as numbers of 8 bits have none; got input or "
            "parameters that want one. Use torch.no_grad()."
        )


def _check_float8(function: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> None:
    """What FP8 asks beyond what every call does."""
    if x.dtype not in FLOATING or weight.dtype not in FLOATING:
        name, tensor = ("weight", weight) if x.dtype in FLOATING else ("input", x)
        raise TypeError(
            f"{function}: in FP8 {name} must have dtype {', '.join(map(str, FLOATING))}; got {tensor.dtype}. Convert "
            "it, or leave the context."
        )
    outs, cols = weight.shape
    if cols % STEP or outs % STEP:
        name, size = ("in_features", cols) if cols % STEP else ("out_features", outs)
        raise ValueError(f"{function}: in FP8 {name} must be a multiple of {STEP}; got {size}. Pad the weight.")
    # torch.export traces tensors of a class of its own, which the operator takes.
    if not torch.compiler.is_exporting() and not in_one_step(x, weight, *others):
        raise RuntimeError(
            f"{function}: FP8 is for plain tensors, and for first derivatives by backward(); got a subclass of Tensor, "
            "or a call under functorch or forward-mode differentiation. Leave the context."
        )
    if not torch.compiler.is_compiling():  # in compiled code the operator looks
        check_available(function, x)


class _NormLinear(torch.autograd.Function):
    """(y, z), z None unless wanted. `fetch()` finds the bytes of weight, here, where nothing is recorded."""

    @staticmethod
    def forward(ctx, x, weight, bias, ln_weight, ln_bias, fetch, options, norm, wants_z, sink):
        weights = fetch()
        found = forward(x, weights, bias, ln_weight, ln_bias, options, True, wants_z, norm)
        ctx.set_materialize_grads(False)
        columns = (weights.columns, weights.column_scale)
        ctx.save_for_backward(*Saved(x, *columns, ln_weight, ln_bias, found.statistics, found.z_scale))
        ctx.call = options, Dtypes(weight.dtype, None if bias is None else bias.dtype), sink
        return found.y, found.z

    @staticmethod
    def backward(ctx, dy, dz):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LayerNormLinear: in FP8 there are first derivatives alone; got create_graph=True. Leave the context."
            )
        options, dtypes, sink = ctx.call
        saved = Saved(*ctx.saved_tensors)
        # What listens, such as a dispatch mode for this pass alone, sees the operator.
        by = gradients if sink is not None or nothing_listens() else float8_operators.listened_gradients
        with without_autocast("cuda" if saved.x.is_cuda else saved.x.device.type):
            results = by(dy, dz, saved, options, dtypes, ctx.needs_input_grad[:5], sink)
        return *results, None, None, None, None, None


_apply = applied(_NormLinear)
