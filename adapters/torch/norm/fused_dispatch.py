"""Which way a fused operation of tensors takes.

The ways are those of functional.py: a plain CUDA tensor in eager mode goes straight to the launch; a CUDA tensor in a
dispatch mode or a subclass to the operators, as whatever torch.compile and export trace does; any other device,
forward-mode derivatives and functorch to torch's own operators. A DTensor's rows go these ways on each device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ...call import broadcasting
from ..private import in_forward_mode, nothing_else_listens, nothing_listens, under_functorch
from . import (
    checks,
    functional,
    fused_formulas,
    fused_launching,
    fused_memory,
    fused_operators,
    launching,
    nodes,
    norm_nodes,
    operators,
    repeats,
)
from .fused_launching import Call


def run(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, wants_statistics: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """(results in the order of `returns`, statistics as formulas.py has them, None unless wanted)

    `tensors` are Call.names, of the type Tensor at least; `numbers` are Call.numbers.
    """
    if torch.compiler.is_compiling():
        if torch.onnx.is_in_onnx_export():  # which knows no operators of ours
            return _own(call, tensors, numbers, eps, wants_statistics)
        return _by_operator(call, tensors, numbers, eps, wants_statistics)
    compiled = None
    if not wants_statistics:
        compiled = _known(call, tensors, numbers, eps)
        if compiled is not None and (results := compiled(*tensors)) is not None:
            return results, None
    if at_once(tensors):
        if not wants_statistics and compiled is None:
            compiled = _describe(call, tensors, numbers, eps)
            if compiled is not None and (results := compiled(*tensors)) is not None:
                return results, None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            results = _apply(call, numbers, eps, wants_statistics, *tensors)
            return (results[:-1], results[-1]) if wants_statistics else (results, None)
        margin = call.sm_margins[2]
        results, statistics, _ = fused_launching.forward(
            call, tensors, numbers, eps, wants_statistics, sm_margin=margin
        )
        return results, statistics
    if "torch.distributed.tensor" in sys.modules:  # somebody may hand us a DTensor
        from . import fused_sharding

        if fused_sharding.is_sharded(tensors):
            return fused_sharding.run(run, call, tensors, numbers, eps, wants_statistics)
    x, *operands = [
        fused_memory.layout(call.function, name, one) for name, one in zip(call.names, tensors, strict=True)
    ]
    broadcasting.check_operands(
        call.function, x, dict(zip(call.names[1:], operands, strict=True)), demanded=call.demanded
    )
    elsewhere = not tensors[0].is_cuda or torch.onnx.is_in_onnx_export()
    if elsewhere or in_forward_mode() or under_functorch():
        return _own(call, tensors, numbers, eps, wants_statistics)
    return _by_operator(call, tensors, numbers, eps, wants_statistics)


def _known(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float) -> nodes.Call | None:
    """What serves a call like an earlier one."""
    key = (tensors[0].shape, eps, *numbers)
    earlier = call.compiled.get(key, ())
    if not earlier or not nothing_else_listens():
        return None
    for known, compiled in earlier:
        if known(*tensors):
            return compiled
    return repeats.again(call.compiled, key, tuple(tensors))


def _describe(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float) -> nodes.Call | None:
    """What serves calls like this one."""
    if len({id(tensor) for tensor in tensors}) < len(tensors):  # repeats.py does not remember such
        return None
    which = norm_nodes.of_fused(call, tensors, numbers, eps, gradients_of, functional.launchable)
    compiled = nodes.call_of(which)
    if compiled is not None:
        key = (tensors[0].shape, eps, *numbers)
        repeats.remember(call.compiled, key, tuple(tensors), compiled, launching.RECIPES)
    return compiled


def at_once(tensors: Sequence[Tensor]) -> bool:
    """As functional.py has it."""
    for tensor in tensors:
        if type(tensor) not in functional.PLAIN or not tensor.is_cuda or tensor.is_neg():
            return False
        # Of int64 a seed is; the launch refuses others.
        if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.dtype is torch.int64):
            return False
    return nothing_listens()


class _Fused(torch.autograd.Function):
    """A fused operation on plain CUDA tensors in eager mode."""

    @staticmethod
    def forward(ctx, call, numbers, eps, wants_statistics, *tensors):
        margin = call.sm_margins[0]
        results, statistics, family = fused_launching.forward(call, tensors, numbers, eps, True, sm_margin=margin)
        names = call.saved(call.wanted(ctx.needs_input_grad[4:]))
        places, returns = call.names, call.operation.returns
        saved = [results[returns.index("s")] if name == "s" else tensors[places.index(name)] for name in names]
        ctx.save_for_backward(statistics, *saved)
        ctx.set_materialize_grads(False)
        ctx.call = family, names, numbers, eps
        if not wants_statistics:
            return tuple(results)
        ctx.mark_non_differentiable(statistics)
        return *results, statistics

    @staticmethod
    def backward(ctx, *gradients):
        family, names, numbers, eps = ctx.call
        statistics, *saved = ctx.saved_tensors
        # With statistics there is one more of these, None.
        given = dict(zip(family.call.operation.returns, gradients, strict=False))
        dy, ds = given.get("y"), given.get("s")
        found = gradients_of(family, names, saved, numbers, eps, dy, ds, statistics, ctx.needs_input_grad[4:])
        return None, None, None, None, *found


def gradients_of(family, names, saved, numbers, eps, dy, ds, statistics, mask) -> list[Tensor | None]:
    """The gradients of the tensors of a call, None where `mask` says so."""
    if not all(one is None or functional.launchable(one) for one in (dy, ds)):
        return _through_torch(family, names, saved, numbers, eps, dy, ds, statistics, mask)
    wanted = family.call.wanted(mask)
    given = fused_launching.given_through(family, wanted, dy)
    computed = tuple(name for name in wanted if name not in given)
    if computed:
        found = fused_launching.backward(family, names, saved, numbers, dy, ds, statistics, computed)
        given |= dict(zip(computed, found, strict=True))
    return [given.get(name) for name in family.call.names]


_apply = functional.applied(_Fused)


def _through_torch(family, names, saved, numbers, eps, dy, ds, statistics, mask):
    """The backward pass by the operators, or for second derivatives by torch's own."""
    call, layouts, _ = family
    given = dict(zip(names, saved, strict=True))
    dtypes = [layouts[name].dtype for name in call.names]
    # Of what was not read, and not saved, the shape alone counts.
    tensors = [
        given[name] if name in given else statistics.new_empty(()).expand(layouts[name].shape) for name in call.names
    ]
    options = _options(call, numbers, eps, dtypes[0])
    *operation, eps, _, s_dtype = options
    return fused_operators.gradients(
        call, (*operation, eps, s_dtype, call.sm_margins[1]), dy, ds, tensors, given.get("s"), statistics, mask, dtypes
    )


def _by_operator(call, tensors, numbers, eps, wants_statistics):
    x, *operands = tensors
    wants_gradient = operators.wants_gradient(*tensors)
    forward, backward, inference = call.sm_margins
    margins = (forward if wants_gradient else inference, backward)
    statistics = wants_statistics or wants_gradient
    options = (*_options(call, numbers, eps, checks.dtype_name(x.dtype)), statistics, *margins)
    if torch.compiler.is_compiling():
        y, s, found = fused_operators.fused_norm(x, operands, *options)
    else:
        y, s, found = fused_operators.FusedNorm.apply(x, options, *operands)
    by_name = {"y": y, "s": s}
    return [by_name[name] for name in call.operation.returns], found if wants_statistics else None


def _options(call: Call, numbers: Sequence[float], eps: float, x_dtype: str) -> tuple:
    """As the operators take them, up to s_dtype."""
    norm, prologue, epilogue, names = fused_operators.texts_of(call)
    dtype, s_dtype = (getattr(torch, one or x_dtype) for one in (call.dtype, call.s_dtype))
    return norm, prologue, epilogue, names, [*numbers], [*call.operation.returns], eps, dtype, s_dtype


def _own(call, tensors, numbers, eps, wants_statistics):
    """torch's own operators, with autograd's derivatives."""
    values = fused_operators.values_of(call, tensors, numbers)
    *_, dtype, s_dtype = _options(call, numbers, eps, checks.dtype_name(tensors[0].dtype))
    results, statistics = fused_formulas.forward(call.operation, values, eps, dtype, s_dtype)
    return [results[name] for name in call.operation.returns], statistics.detach() if wants_statistics else None
