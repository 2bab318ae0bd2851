"""Fused operations as operators of torch: what torch.compile, export, dispatch modes and exported programs see.

    torch.ops.cunorm.fused_norm -> (y, s, statistics)             differentiable
    torch.ops.cunorm.fused_norm_forward -> (y, s, statistics)     the kernels: what is left of `fused_norm` and its
    torch.ops.cunorm.fused_norm_backward -> gradients             derivative in compiled code, as in operators.py

One pair serves all operations: prologue and epilogue are texts. A text is read by the grammar of expressions, whoever
wrote it, and is never part of a kernel's text itself: a saved program can bring no CUDA of its own.

`names` are those of the operands: of the tensors, then of the numbers. A prologue "" is none; s is empty if it is not
among `returns`, statistics if not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...call import broadcasting
from ...expression.grammar import parse
from ...expression.value import Expression
from ...fusion import composed
from ...operation import NORMS, Operation
from ...plan.problem import compute_dtype
from ..private import is_batched, under_functorch
from . import checks, fused_formulas, fused_launching, fused_memory, operators
from .fused_launching import Call, call_of

_library = operators._library
_OPERATION = "str norm, str prologue, str epilogue, str[] names, float[] numbers, str[] returns"
_FORWARD = (
    f"(Tensor x, Tensor[] operands, {_OPERATION}, float eps, ScalarType dtype, ScalarType s_dtype, "
    "bool wants_statistics, int sm_margin, int backward_sm_margin) -> (Tensor y, Tensor s, Tensor statistics)"
)
_library.define(f"fused_norm{_FORWARD}")
_library.define(f"fused_norm_forward{_FORWARD}")
# Of x and operands that are not read the shape alone counts; `dtypes` are those of all of them.
_library.define(
    f"fused_norm_backward(Tensor? dy, Tensor? ds, Tensor x, Tensor[] operands, Tensor? s, Tensor statistics, "
    f"{_OPERATION}, float eps, ScalarType s_dtype, str[] dtypes, bool[] wanted, int sm_margin) -> Tensor[]"
)
fused_norm = torch.ops.cunorm.fused_norm.default
fused_norm_forward = torch.ops.cunorm.fused_norm_forward.default
fused_norm_backward = torch.ops.cunorm.fused_norm_backward.default


def texts_of(call: Call) -> tuple[str, str, str, list[str]]:
    """norm, prologue, epilogue and names, as the operators take them."""
    operation = call.whole
    prologue = "" if operation.prologue is None else operation.prologue.text
    return operation.norm, prologue, operation.epilogue.text, [*call.names[1:], *call.numbers]


def call_from(
    norm: str,
    prologue: str,
    epilogue: str,
    names: Sequence[str],
    count: int,
    returns: Sequence[str],
    dtype: torch.dtype | None,
    s_dtype: torch.dtype,
    sm_margin: int = 0,
) -> Call:
    """The call that an operator's arguments mean; the first `count` operands are tensors, the others numbers.

    ValueError for what is none: nothing of it is compiled then.
    """
    key = (norm, prologue, epilogue, tuple(names), tuple(returns))
    y, s = (None if one is None else checks.dtype_name(one) for one in (dtype, s_dtype if prologue else None))
    return call_of(
        "fused_norm", _operation(*key), tuple(names[:count]), tuple(names[count:]), (), y, s, (sm_margin,) * 3
    )


@lru_cache(maxsize=4096)
def _operation(norm: str, prologue: str, epilogue: str, names: tuple[str, ...], returns: tuple[str, ...]) -> Operation:
    before = _parsed(prologue, "x", names) if prologue else None
    after = _parsed(epilogue, "xhat", names)
    used = {*after.names, *(before.names if before else ())}
    unused = tuple(name for name in names if name not in used)  # their gradients are zero
    return composed(norm, before, Expression((*after.names, *unused), after.steps), returns)


def _count(operands: Sequence[Any], names: Sequence[str], numbers: Sequence[float]) -> int:
    """How many operands are tensors."""
    if len(operands) + len(numbers) != len(names):
        raise ValueError(
            f"fused_norm: names must have one for each operand; got {len(names)} for {len(operands)} tensors and "
            f"{len(numbers)} numbers."
        )
    return len(operands)


def _parsed(text: str, first: str, names: tuple[str, ...]) -> Expression:
    """The expression with the names that occur."""
    found = parse(text, (first, *names))
    return Expression((first, *(name for name in names if name in found.uses)), found.steps)


# The kernels, and torch's own operators for the CPU.


def _forward_cuda(
    x, operands, norm, prologue, epilogue, names, numbers, returns, eps, dtype, s_dtype, statistics, sm_margin, _
):
    call = call_from(norm, prologue, epilogue, names, _count(operands, names, numbers), returns, dtype, s_dtype)
    tensors = [x, *operands]
    found = checks.raising_as_torch(
        fused_launching.forward, call, tensors, numbers, eps, statistics, sm_margin=sm_margin
    )
    results, of_rows, _ = found
    by_name = dict(zip(call.operation.returns, results, strict=True))
    s = by_name["s"] if "s" in by_name else operators._absent(x)
    return by_name["y"], s, operators._absent(x) if of_rows is None else of_rows


def forward_by_formulas(
    x, operands, norm, prologue, epilogue, names, numbers, returns, eps, dtype, s_dtype, statistics, sm_margin, _
):
    call = call_from(norm, prologue, epilogue, names, _count(operands, names, numbers), returns, dtype, s_dtype)
    _check(call, [x, *operands])
    values = values_of(call, [x, *operands], numbers)
    results, found = fused_formulas.forward(call.operation, values, eps, dtype, s_dtype)
    s = results["s"] if "s" in returns else operators._absent(x)
    return results["y"], s, found if statistics else operators._absent(x)


def values_of(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float]) -> dict[str, Tensor | float]:
    """x and the operands by name."""
    return dict(zip((*call.names, *call.numbers), (*tensors, *numbers), strict=True))


def _check(call: Call, tensors: Sequence[Tensor]) -> None:
    layouts = {name: checks.layout(call.function, name, one) for name, one in zip(call.names, tensors, strict=True)}
    x = layouts.pop("x")
    checks.raising_as_torch(broadcasting.check_operands, call.function, x, layouts, demanded=call.demanded)


def _backward_cuda(
    dy,
    ds,
    x,
    operands,
    s,
    statistics,
    norm,
    prologue,
    epilogue,
    names,
    numbers,
    returns,
    eps,
    s_dtype,
    dtypes,
    wanted,
    sm_margin,
):
    call = call_from(
        norm, prologue, epilogue, names, _count(operands, names, numbers), returns, None, s_dtype, sm_margin
    )
    tensors = [x, *operands]
    layouts = {
        name: fused_memory.layout(call.function, name, tensor)._replace(dtype=dtype)
        for name, tensor, dtype in zip(call.names, tensors, dtypes, strict=True)
    }
    family = fused_launching.family(call, layouts)
    saved = call.names if s is None else (*call.names, "s")
    given = tensors if s is None else [*tensors, s]
    return _each_once(
        fused_launching.backward(family, saved, given, numbers, dy, ds, statistics, call.wanted(tuple(wanted)))
    )


def _each_once(gradients: list[Tensor]) -> list[Tensor]:
    """An operator must not return a tensor twice."""
    return [one.clone() if any(one is other for other in gradients[:i]) else one for i, one in enumerate(gradients)]


def backward_by_formulas(
    dy,
    ds,
    x,
    operands,
    s,
    statistics,
    norm,
    prologue,
    epilogue,
    names,
    numbers,
    returns,
    eps,
    s_dtype,
    dtypes,
    wanted,
    sm_margin,
):
    call = call_from(norm, prologue, epilogue, names, _count(operands, names, numbers), returns, None, s_dtype)
    values = values_of(call, [x, *operands], numbers)
    if operators.wants_gradient(dy, ds, x, *operands, s):
        statistics = _statistics(call, values, s, s_dtype, eps)
    names = call.wanted(tuple(wanted))
    found = fused_formulas.backward(call.operation, values, s, {"dy": dy, "ds": ds}, statistics, names, s_dtype)
    of = [getattr(torch, dtype) for dtype, wants in zip(dtypes, wanted, strict=True) if wants]
    return _each_once([one.to(dtype).contiguous() for one, dtype in zip(found, of, strict=True)])


def alike(one: Tensor, x: Tensor) -> bool:
    """Whether shapes are equal; an open size is not compared with that of another axis."""
    return one.dim() == x.dim() and one.shape == x.shape


def _statistics(call: Call, values, s: Tensor | None, s_dtype: torch.dtype, eps: float) -> Tensor:
    """Once more, of s or of what it is made of: the result can be differentiated."""
    if s is None:
        rows = fused_formulas.rows_of(call.operation, values, s_dtype)
    else:
        rows = s.to(getattr(torch, compute_dtype(checks.dtype_name(s.dtype))))
    return fused_formulas.statistics_of(call.operation, rows, eps)


# Shapes and dtypes alone, checked: a trace holds only calls that fit.


@torch.library.register_fake("cunorm::fused_norm_forward", lib=_library)
def _forward_fake(
    x, operands, norm, prologue, epilogue, names, numbers, returns, eps, dtype, s_dtype, statistics, sm_margin, _
):
    call = call_from(norm, prologue, epilogue, names, _count(operands, names, numbers), returns, dtype, s_dtype)
    _check(call, [x, *operands])
    y = x.new_empty(x.shape, dtype=dtype)
    s = x.new_empty(x.shape, dtype=s_dtype) if "s" in returns else operators._absent(x)
    if not statistics:
        return y, s, operators._absent(x)
    compute = getattr(torch, compute_dtype(checks.dtype_name(s_dtype)))
    return y, s, x.new_empty((len(NORMS[norm].statistics), *x.shape[:-1]), dtype=compute)


@torch.library.register_fake("cunorm::fused_norm_backward", lib=_library)
def _backward_fake(
    dy,
    ds,
    x,
    operands,
    s,
    statistics,
    norm,
    prologue,
    epilogue,
    names,
    numbers,
    returns,
    eps,
    s_dtype,
    dtypes,
    wanted,
    sm_margin,
):
    call_from(norm, prologue, epilogue, names, _count(operands, names, numbers), returns, None, s_dtype)
    return [
        x.new_empty(tensor.shape, dtype=getattr(torch, dtype))
        for tensor, dtype, wants in zip((x, *operands), dtypes, wanted, strict=True)
        if wants
    ]


# Derivatives.


class FusedNorm(torch.autograd.Function):
    """fused_norm_forward of x, options and operands, and its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, options, *operands):
        return fused_norm_forward(x, list(operands), *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, options, *operands = inputs
        _, s, statistics = output
        norm, prologue, epilogue, names, numbers, returns, eps, _, s_dtype, wants_statistics, _, sm_margin = options
        count = _count(operands, names, numbers)
        call = call_from(norm, prologue, epilogue, names, count, returns, None, s_dtype, sm_margin)
        returned = "s" in returns
        ctx.mark_non_differentiable(statistics, *(() if returned else (s,)))
        ctx.set_materialize_grads(False)
        x_wants, _, *wanted = ctx.needs_input_grad
        rows = s if returned else x
        read = call.saved(call.wanted((x_wants, *wanted)))
        # What is not read is not kept: of an array like x any other shows the shape.
        kept = [
            rows if name not in read and alike(one, x) else one
            for name, one in zip(call.names, (x, *operands), strict=True)
        ]
        ctx.save_for_backward(s if returned else None, statistics if wants_statistics else None, *kept)
        ctx.call, ctx.options = call, (norm, prologue, epilogue, names, numbers, returns, eps, s_dtype, sm_margin)
        ctx.dtypes = [checks.dtype_name(one.dtype) for one in (x, *operands)]

    @staticmethod
    def backward(ctx, dy, ds, _):
        s, statistics, *tensors = ctx.saved_tensors
        x_wants, _, *wanted = ctx.needs_input_grad
        mask = (x_wants, *wanted)
        dx, *found = gradients(ctx.call, ctx.options, dy, ds, tensors, s, statistics, mask, ctx.dtypes)
        return dx, None, *found


def gradients(
    call: Call,
    options: tuple,
    dy: Tensor | None,
    ds: Tensor | None,
    tensors: Sequence[Tensor],
    s: Tensor | None,
    statistics: Tensor | None,
    mask: Sequence[bool],
    dtypes: list[str],
) -> list[Tensor | None]:
    """Those of x and of the operands, None where `mask` says so, differentiable where that is wanted.

    `options` are the operation's, as fused_norm_backward takes them.
    """
    *operation, eps, s_dtype, sm_margin = options
    numbers = operation[4]
    values = values_of(call, tensors, numbers)
    if statistics is None or torch.is_grad_enabled():
        statistics = _statistics(call, values, s, s_dtype, eps)
    names = call.wanted(tuple(mask))
    of = dict(zip(call.names, dtypes, strict=True))
    batched = any(one is not None and is_batched(one) for one in (dy, ds))  # for which lists have no fallback
    if torch.is_grad_enabled() or batched:
        found = fused_formulas.backward(call.operation, values, s, {"dy": dy, "ds": ds}, statistics, names, s_dtype)
        by_name = {name: one.to(getattr(torch, of[name])) for name, one in zip(names, found, strict=True)}
        return [by_name.get(name) for name in call.names]
    # Equal gradients are computed once.
    kinds = {name: "full" for name, one in zip(call.names, tensors, strict=True) if alike(one, tensors[0])}
    same = broadcasting.same_gradients(call.operation, names, values, kinds, of)
    first = dict.fromkeys(same.values())
    wanted = [name in first for name in call.names]
    found = fused_norm_backward(
        dy, ds, tensors[0], list(tensors[1:]), s, statistics, *operation, eps, s_dtype, dtypes, wanted, sm_margin
    )
    by_name = dict(zip((name for name in call.names if name in first), found, strict=True))
    return [by_name[same[name]] if name in same else None for name in call.names]


class _Listed:
    """FusedNorm with the arguments of its operator; under functorch, where an operator cannot be a Function, steps."""

    @staticmethod
    def apply(x, operands, *options):
        if under_functorch():
            return forward_by_formulas(x, operands, *options)
        return FusedNorm.apply(x, options, *operands)


_library.impl("fused_norm", _Listed.apply, "CompositeImplicitAutograd")
operators.register_kernels(fused_norm_forward, _Listed, CPU=forward_by_formulas, CUDA=_forward_cuda)
for _device, _run in (("CPU", backward_by_formulas), ("CUDA", _backward_cuda)):
    _library.impl("fused_norm_backward", _run, _device)


# vmap: torch's own operators, sample by sample.


@torch.library.register_vmap("cunorm::fused_norm_forward", lib=_library)
def _forward_vmap(info, in_dims, x, operands, *options):
    def run(x, *operands):
        return forward_by_formulas(x, operands, *options)

    of_x, of_operands, *_ = in_dims
    return torch.vmap(run, (of_x, *of_operands))(x, *operands), (0, 0, 0)


@torch.library.register_vmap("cunorm::fused_norm_backward", lib=_library)
def _backward_vmap(info, in_dims, dy, ds, x, operands, s, statistics, *options):
    given = (dy, ds, x, s, statistics, *operands)
    dims = (*in_dims[:3], *in_dims[4:6], *in_dims[3])

    def run(*tensors):
        tensors = iter(tensors)
        dy, ds, x, s, statistics, *operands = (None if one is None else next(tensors) for one in given)
        return tuple(backward_by_formulas(dy, ds, x, operands, s, statistics, *options))

    present = [(one, dim) for one, dim in zip(given, dims, strict=True) if one is not None]
    tensors, places = zip(*present, strict=True)
    found = torch.vmap(run, places)(*tensors)
    return list(found), [0] * len(found)
