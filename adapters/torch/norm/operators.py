"""Norms and fused operations as operators of torch: what torch.compile, export, functorch, dispatch modes and tensor
subclasses see.

    torch.ops.cunorm.fused_norm -> (y, s, statistics)             differentiable: what programs and dynamo's graphs hold
    torch.ops.cunorm.fused_norm_forward -> (y, s, statistics)     the kernels: what is left of `fused_norm` and its
    torch.ops.cunorm.fused_norm_backward -> gradients             derivative in compiled code, and what modes see

One pair serves all operations: prologue and epilogue are texts. A text is read by the grammar of expressions, whoever
wrote it, and is never part of a kernel's text itself: a saved program can bring no CUDA of its own.

`names` are those of the operands: of the tensors, then of the numbers. A prologue "" is none; s is empty if it is not
among `returns`, statistics (as formulas.py has them) if not wanted. The last axis is normalised.

`fused_norm` has no kernel: wherever it is differentiated or compiled it is `Norm`, an autograd.Function around the
other two, which therefore need no derivative of their own. One that is registered by torch.library.register_autograd
runs in compiled code as well, where nothing is differentiated: 16 us a norm in a row, 46 with nothing in the core's
caches (docs/tuning.md). Nor does dynamo see the Function: it would hide the operator of an exported program in a
subgraph and leave the program without a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...expression.grammar import parse
from ...expression.value import Expression
from ...fusion import composed
from ...operation import NAMED, NORMS, SEED, Operation
from ...plan.problem import compute_dtype
from .. import private
from . import checks, formulas, launching
from .calls import Call, call_of
from .calls import family as family_of
from .launching import Saved

_library = torch.library.Library("cunorm", "DEF")
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


class Forward(NamedTuple):
    """What the forward operators take beside tensors, in their order."""

    norm: str
    prologue: str
    epilogue: str
    names: Sequence[str]
    numbers: Sequence[float]
    returns: Sequence[str]
    eps: float
    dtype: torch.dtype
    s_dtype: torch.dtype
    wants_statistics: bool
    sm_margin: int
    backward_sm_margin: int

    def call(self, operands: Sequence[Any]) -> Call:
        return _call_of(self, operands, checks.dtype_name(self.dtype), (self.sm_margin,) * 3)

    def backward(self, dtypes: list[str]) -> Backward:
        """What the backward operator takes, for every gradient."""
        wanted = [True] * len(dtypes)
        return Backward(*self[:7], self.s_dtype, dtypes, wanted, self.backward_sm_margin)


class Backward(NamedTuple):
    """What the backward operator takes beside tensors, in its order."""

    norm: str
    prologue: str
    epilogue: str
    names: Sequence[str]
    numbers: Sequence[float]
    returns: Sequence[str]
    eps: float
    s_dtype: torch.dtype
    dtypes: list[str]  # of x and the operands
    wanted: Sequence[bool]  # the same
    sm_margin: int

    def call(self, operands: Sequence[Any]) -> Call:
        return _call_of(self, operands, None, (self.sm_margin,) * 3)


def forward_options(
    call: Call, numbers: Sequence[float], eps: float, x_dtype: str, wants_statistics: bool, differentiated: bool
) -> Forward:
    """How the operators are told of a call."""
    operation, (forward, backward, inference) = call.whole, call.sm_margins
    dtype, s_dtype = (getattr(torch, one or x_dtype) for one in (call.dtype, call.s_dtype))
    return Forward(
        norm=operation.norm,
        prologue="" if operation.prologue is None else operation.prologue.text,
        epilogue=operation.epilogue.text,
        names=[*call.names[1:], *call.numbers],
        numbers=[*numbers],
        returns=[*operation.returns],
        eps=eps,
        dtype=dtype,
        s_dtype=s_dtype,
        wants_statistics=wants_statistics or differentiated,
        sm_margin=forward if differentiated else inference,
        backward_sm_margin=backward,
    )


def _call_of(
    asked: Forward | Backward, operands: Sequence[Any], dtype: str | None, margins: tuple[int, int, int]
) -> Call:
    """The call that an operator's arguments mean; ValueError for what is none: nothing of it is compiled then."""
    count, names = len(operands), tuple(asked.names)  # the first operands are tensors, the others numbers
    if count + len(asked.numbers) != len(names):
        raise ValueError(
            f"fused_norm: names must have one for each operand; got {len(names)} for {count} tensors and "
            f"{len(asked.numbers)} numbers."
        )
    operation = _operation(asked.norm, asked.prologue, asked.epilogue, names, tuple(asked.returns))
    s_dtype = checks.dtype_name(asked.s_dtype) if asked.prologue else None
    return call_of("fused_norm", operation, names[:count], names[count:], (), dtype, s_dtype, margins)


@lru_cache(maxsize=4096)
def _operation(norm: str, prologue: str, epilogue: str, names: tuple[str, ...], returns: tuple[str, ...]) -> Operation:
    if not prologue and returns == ("y",):
        for plain in NAMED.values():
            if plain.norm == norm and {*names} <= {*plain.operands} and plain.given(names).epilogue.text == epilogue:
                return plain
    before = _parsed(prologue, "x", names) if prologue else None
    after = _parsed(epilogue, "xhat", names)
    used = {*after.names, *(before.names if before else ())}
    unused = tuple(name for name in names if name not in used)  # their gradients are zero
    return composed(norm, before, Expression((*after.names, *unused), after.steps), returns)


def _parsed(text: str, first: str, names: tuple[str, ...]) -> Expression:
    """The expression with the names that occur."""
    found = parse(text, (first, *names))
    return Expression((first, *(name for name in names if name in found.uses)), found.steps)


# The kernels. For the CPU those of torch's own norm where it has one: only its derivatives of higher order are wrong.
# The formulas are what decomposition.py shows to others.


def _forward_cuda(x, operands, *options):
    asked = Forward(*options)
    call = asked.call(operands)
    results, statistics, _ = checks.raising_as_torch(
        launching.forward,
        call,
        [x, *operands],
        asked.numbers,
        asked.eps,
        asked.wants_statistics,
        sm_margin=asked.sm_margin,
    )
    return _three(x, dict(zip(call.operation.returns, results, strict=True)), statistics)


def _forward_cpu(x, operands, *options):
    asked = Forward(*options)
    call = asked.call(operands)
    if not has_own_kernel(call, x, operands):
        return forward_by_formulas(x, operands, *options)
    _check(call, [x, *operands])
    weight, bias = weight_and_bias(asked.names, operands)
    y, statistics = forward_by_torch(call.affine, x, weight, bias, asked.eps, asked.dtype)
    return _three(x, {"y": y}, statistics if asked.wants_statistics else None)


def forward_by_formulas(x, operands, *options):
    asked = Forward(*options)
    call = asked.call(operands)
    _check(call, [x, *operands])
    values = values_of(call, [x, *operands], asked.numbers)
    results, statistics = formulas.forward(call.operation, values, asked.eps, asked.dtype, asked.s_dtype)
    if "s" not in asked.returns:
        results.pop("s", None)
    return _three(x, results, statistics if asked.wants_statistics else None)


def _three(x: Tensor, results: dict[str, Tensor], statistics: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return (
        results["y"],
        results["s"] if "s" in results else _absent(x),
        _absent(x) if statistics is None else statistics,
    )


def _absent(x: Tensor) -> Tensor:
    return x.new_empty(0)


def weight_and_bias(names: Sequence[str], operands: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    given = dict(zip(names, operands, strict=True))
    return given.get("weight"), given.get("bias")


def values_of(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float]) -> dict[str, Tensor | float]:
    """x and the operands by name."""
    return dict(zip((*call.names, *call.numbers), (*tensors, *numbers), strict=True))


def _check(call: Call, tensors: Sequence[Tensor]) -> None:
    layouts = {name: checks.layout(call.function, name, one) for name, one in zip(call.names, tensors, strict=True)}
    x = layouts.pop("x")
    checks.raising_as_torch(broadcasting.check_operands, call.function, x, layouts, demanded=call.demanded)


def has_own_kernel(call: Call, x: Tensor, operands: Sequence[Tensor]) -> bool:
    """Whether torch serves it on the CPU without a formula for each expression: a plain norm."""
    columns = x.shape[-1:]
    return call.affine is not None and all(one.shape == columns for one in operands)


def forward_by_torch(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(y, statistics) of a plain norm, by torch's kernel where it has one; without a derivative, for arguments that
    fit.
    """
    compute = formulas.compute_dtype(x)
    if not formulas.subtracts_mean(name):
        statistics = formulas.statistics_of(NAMED[name].norm, x.to(compute), eps)
        return formulas.affine(name, x, statistics, weight, bias).to(dtype).contiguous(), statistics.contiguous()
    # Of a 16-bit x torch's kernel gives mean and rstd in float32 only beside a float32 weight.
    wide = x if x.dtype is dtype and weight is not None else x.to(compute)
    weight = None if weight is None else formulas.gamma(name, weight, x)
    bias = None if bias is None else bias.to(compute)
    y, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
    return y.to(dtype).contiguous(), torch.stack((mean, rstd)).view(2, *x.shape[:-1])


def backward_by_torch(
    name: str, dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients `wanted` of x, weight and bias in the same way, as wide as they are computed."""
    if not formulas.subtracts_mean(name):
        values = {"x": x} if weight is None else {"x": x, "weight": weight}
        found = formulas.backward(NAMED[name], values, None, {"dy": dy}, statistics, wanted, x.dtype)
        return dict(zip(wanted, found, strict=True))
    compute, shape = statistics.dtype, x.shape[-1:]
    mean, rstd = statistics.contiguous()[..., None]  # as the kernel reads them
    gamma = rstd.new_ones(shape) if weight is None else formulas.gamma(name, weight, x)
    # torch's kernel takes x * rstd - mean * rstd, which loses all digits where |mean| is large beside the deviation.
    names = ("x", "weight", "bias")
    found = torch.ops.aten.native_layer_norm_backward.default(
        dy.to(compute),
        x.to(compute) - mean,
        shape,
        torch.zeros_like(mean),
        rstd,
        gamma,
        gamma,
        [name in wanted for name in names],
    )
    return {name: one for name, one in zip(names, found, strict=True) if name in wanted}


def _backward_cuda(dy, ds, x, operands, s, statistics, *options):
    asked = Backward(*options)
    call, tensors = asked.call(operands), [x, *operands]
    layouts = {
        name: checks.layout_in_memory(call.function, name, tensor)._replace(dtype=dtype)
        for name, tensor, dtype in zip(call.names, tensors, asked.dtypes, strict=True)
    }
    family = family_of(call, layouts)
    if s is not None:
        tensors.append(s)
    saved = Saved((*call.names, "s") if s is not None else call.names, tensors, asked.numbers, statistics)
    return _each_once(launching.backward(family, saved, dy, ds, call.wanted(tuple(asked.wanted))))


def _backward_cpu(dy, ds, x, operands, s, statistics, *options):
    asked = Backward(*options)
    call = asked.call(operands)
    if not has_own_kernel(call, x, operands) or wants_gradient(dy, x, *operands):
        return backward_by_formulas(dy, ds, x, operands, s, statistics, *options)
    weight, _ = weight_and_bias(asked.names, operands)
    wanted = call.wanted(tuple(asked.wanted))
    by_name = backward_by_torch(call.affine, dy, x, statistics, weight, wanted)
    return _in_dtypes(asked, [by_name[name] for name in wanted])


def backward_by_formulas(dy, ds, x, operands, s, statistics, *options):
    asked = Backward(*options)
    call = asked.call(operands)
    values = values_of(call, [x, *operands], asked.numbers)
    if wants_gradient(dy, ds, x, *operands, s):
        statistics = statistics_again(call, values, s, asked.s_dtype, asked.eps)
    wanted = call.wanted(tuple(asked.wanted))
    found = formulas.backward(call.operation, values, s, {"dy": dy, "ds": ds}, statistics, wanted, asked.s_dtype)
    return _in_dtypes(asked, found)


def _in_dtypes(asked: Backward, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Laid out as the kernels write them."""
    dtypes = [getattr(torch, dtype) for dtype, wants in zip(asked.dtypes, asked.wanted, strict=True) if wants]
    return _each_once([one.to(dtype).contiguous() for one, dtype in zip(gradients, dtypes, strict=True)])


def _each_once(gradients: list[Tensor]) -> list[Tensor]:
    """An operator must not return a tensor twice."""
    return [one.clone() if any(one is other for other in gradients[:i]) else one for i, one in enumerate(gradients)]


def statistics_again(call: Call, values, s: Tensor | None, s_dtype: torch.dtype, eps: float) -> Tensor:
    """Once more, of s or of what it is made of: the result can be differentiated."""
    wide = None if s is None else s.to(formulas.compute_dtype(s))
    rows = formulas.rows_of(call.operation, values, s_dtype) if wide is None else wide
    return formulas.statistics_of(call.operation.norm, rows, eps)


# Shapes and dtypes alone, checked: a trace holds only calls that fit.


@torch.library.register_fake("cunorm::fused_norm_forward", lib=_library)
def _forward_fake(x, operands, *options):
    asked = Forward(*options)
    _check(asked.call(operands), [x, *operands])
    y = x.new_empty(x.shape, dtype=asked.dtype)
    s = x.new_empty(x.shape, dtype=asked.s_dtype) if "s" in asked.returns else _absent(x)
    if not asked.wants_statistics:
        return y, s, _absent(x)
    compute = getattr(torch, compute_dtype(checks.dtype_name(asked.s_dtype)))
    return y, s, x.new_empty((len(NORMS[asked.norm].statistics), *x.shape[:-1]), dtype=compute)


@torch.library.register_fake("cunorm::fused_norm_backward", lib=_library)
def _backward_fake(dy, ds, x, operands, s, statistics, *options):
    asked = Backward(*options)
    asked.call(operands)
    return [
        x.new_empty(tensor.shape, dtype=getattr(torch, dtype))
        for tensor, dtype, wants in zip((x, *operands), asked.dtypes, asked.wanted, strict=True)
        if wants
    ]


# Derivatives.


class Norm(torch.autograd.Function):
    """fused_norm_forward of x, options and operands, and its derivative, also under the transforms of functorch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, asked, *operands):
        return fused_norm_forward(x, list(operands), *asked)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, asked, *operands = inputs
        _, s, statistics = output
        call, returned = asked.call(operands), "s" in asked.returns
        ctx.mark_non_differentiable(statistics, *(() if returned else (s,)))
        ctx.set_materialize_grads(False)
        x_wants, _, *wanted = ctx.needs_input_grad
        read = call.saved(call.wanted((x_wants, *wanted)))
        tensors = (x, *operands)
        # What is not read is not kept: another array of its shape stands for it.
        others = [s if returned else x, *(one for name, one in zip(call.names, tensors, strict=True) if name in read)]
        kept = [
            one if name in read else next((other for other in others if alike(one, other)), one)
            for name, one in zip(call.names, tensors, strict=True)
        ]
        ctx.save_for_backward(s if returned else None, statistics if asked.wants_statistics else None, *kept)
        ctx.asked = asked.backward([checks.dtype_name(one.dtype) for one in tensors])

    @staticmethod
    def backward(ctx, dy, ds, _):
        s, statistics, *tensors = ctx.saved_tensors
        x_wants, _, *wanted = ctx.needs_input_grad
        asked = ctx.asked._replace(wanted=(x_wants, *wanted))
        dx, *found = gradients(asked.call(wanted), asked, dy, ds, tensors, s, statistics)
        return dx, None, *found


class NormBackward(torch.autograd.Function):
    """fused_norm_backward of a plain norm, and its derivative, which can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy, statistics, asked, x, *operands):
        return tuple(fused_norm_backward(dy, None, x, list(operands), None, statistics, *asked))

    @staticmethod
    def setup_context(ctx, inputs, output):
        dy, _, ctx.asked, x, *operands = inputs
        weight, _ = weight_and_bias(ctx.asked.names, operands)
        ctx.save_for_backward(dy, x, weight)
        ctx.name = ctx.asked.call(operands).affine

    @staticmethod
    def backward(ctx, *gradients):
        dy, x, weight = ctx.saved_tensors
        names, asked = ("x", *ctx.asked.names), ctx.asked
        wanted = [name for name, wants in zip(names, asked.wanted, strict=True) if wants]
        given = dict(zip(wanted, gradients, strict=True))
        of = [given.get(name) for name in ("x", "weight", "bias")]
        grad_dy, grad_x, grad_weight = formulas.second_backward(ctx.name, *of, dy, x, weight, asked.eps)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        of_operands = (grad_weight if name == "weight" else None for name in asked.names)
        return grad_dy.to(dy.dtype), None, None, grad_x.to(x.dtype), *of_operands


def gradients(
    call: Call,
    asked: Backward,
    dy: Tensor | None,
    ds: Tensor | None,
    tensors: Sequence[Tensor],
    s: Tensor | None,
    statistics: Tensor | None,
) -> list[Tensor | None]:
    """Those of x and of the operands, `tensors`, None where `asked` wants none, differentiable where that is wanted."""
    names = call.wanted(tuple(asked.wanted))
    if not names or (dy is None and ds is None):
        return [None] * len(tensors)
    values = values_of(call, tensors, asked.numbers)
    batched = any(one is not None and private.is_batched(one) for one in (dy, ds))  # lists have no fallback for such
    in_steps = private.in_forward_mode() or batched or (torch.is_grad_enabled() and not call.affine)
    if statistics is None or in_steps:
        statistics = statistics_again(call, values, s, asked.s_dtype, asked.eps)
    if in_steps:
        found = formulas.backward(call.operation, values, s, {"dy": dy, "ds": ds}, statistics, names, asked.s_dtype)
        dtypes = dict(zip(call.names, asked.dtypes, strict=True))
        by_name = {name: one.to(getattr(torch, dtypes[name])) for name, one in zip(names, found, strict=True)}
        return [by_name.get(name) for name in call.names]
    if call.affine:
        by_name = dict(zip(names, NormBackward.apply(dy, statistics, asked, *tensors), strict=True))
        return [by_name.get(name) for name in call.names]
    # Equal gradients are computed once.
    kinds = {name: "full" for name, one in zip(call.names, tensors, strict=True) if alike(one, tensors[0])}
    of = dict(zip(call.names, asked.dtypes, strict=True))
    same = broadcasting.same_gradients(call.operation, names, values, kinds, of)
    first = dict.fromkeys(same.values())
    asked = asked._replace(wanted=[name in first for name in call.names])
    x, *operands = tensors
    found = fused_norm_backward(dy, ds, x, operands, s, statistics, *asked)
    by_name = dict(zip((name for name in call.names if name in first), found, strict=True))
    return [by_name[same[name]] if name in same else None for name in call.names]


def alike(one: Tensor, x: Tensor) -> bool:
    """Whether shapes are equal; an open size is not compared with that of another axis."""
    return one.dim() == x.dim() and one.shape == x.shape


class _Listed:
    """Norm with the arguments of its operator; under functorch, where an operator cannot be a Function, steps."""

    @staticmethod
    def apply(x, operands, *options):
        if private.under_functorch():
            return forward_by_formulas(x, operands, *options)
        return Norm.apply(x, Forward(*options), *operands)


class _ListedBackward:
    """The same of the backward pass, which has a Function of a plain norm alone."""

    @staticmethod
    def apply(dy, ds, x, operands, s, statistics, *options):
        asked = Backward(*options)
        if private.under_functorch() or not asked.call(operands).affine:
            return backward_by_formulas(dy, ds, x, operands, s, statistics, *options)
        return list(NormBackward.apply(dy, statistics, asked, x, *operands))


def wants_gradient(*arguments: Any) -> bool:
    """Whether autograd follows any of the tensors, also of those in a list."""
    if not torch.is_grad_enabled():
        return False
    listed = (one for argument in arguments if isinstance(argument, list | tuple) for one in argument)
    return any(isinstance(one, Tensor) and one.requires_grad for one in (*arguments, *listed))


def register_kernels(operator: Any, function: Any, **kernels: Callable[..., Any]) -> None:
    """What computes an operator that has no derivative of its own, by device; called by hand it has that of
    `function.apply`, an autograd.Function's.

    Nothing stands on its autograd key, so compiled code pays for nothing there. In eager mode autograd is still on in a
    kernel written in Python, unless the call comes from compiled code or a Function; torch cannot know that it is made
    use of, and warns in the backward pass. While torch.compile traces, py_impl stands on the autograd key.
    """

    def differentiable(run: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*arguments):
            return function.apply(*arguments) if wants_gradient(*arguments) else run(*arguments)

        return compute

    def below_autograd(*arguments):
        with private.below_autograd():
            return operator(*arguments)

    for device, run in kernels.items():
        _library.impl(operator.name(), differentiable(run), device)
        if private.dispatch_key:
            operator.py_impl(getattr(private.dispatch_key, f"Autograd{device}"))(differentiable(below_autograd))


_library.impl("fused_norm", _Listed.apply, "CompositeImplicitAutograd")
register_kernels(fused_norm_forward, _Listed, CPU=_forward_cpu, CUDA=_forward_cuda)
register_kernels(fused_norm_backward, _ListedBackward, CPU=_backward_cpu, CUDA=_backward_cuda)


# vmap: the batch is one more leading axis. Operands are then for groups of rows, and every sample has its own sums. A
# seed gives the same numbers to each sample: torch's own operators, sample by sample.


@torch.library.register_vmap("cunorm::fused_norm_forward", lib=_library)
def _forward_vmap(info, in_dims, x, operands, *options):
    asked = Forward(*options)
    of_x, of_operands, *_ = in_dims
    if SEED in asked.names:

        def run(x, *operands):
            return forward_by_formulas(x, operands, *options)

        return torch.vmap(run, (of_x, *of_operands))(x, *operands), (0, 0, 0)
    x = _batch_first(x, of_x, info.batch_size)
    operands = [one if dim is None else _beside(x, one, dim) for one, dim in zip(operands, of_operands, strict=True)]
    y, s, statistics = fused_norm_forward(x, operands, *options)
    return (y, s, statistics), (0, 0 if "s" in asked.returns else None, 1 if asked.wants_statistics else None)


@torch.library.register_vmap("cunorm::fused_norm_backward", lib=_library)
def _backward_vmap(info, in_dims, dy, ds, x, operands, s, statistics, *options):
    asked, size = Backward(*options), info.batch_size
    if SEED in asked.names:
        tensors, of_tensors = (dy, ds, x, s, statistics, *operands), (*in_dims[:3], *in_dims[4:6], *in_dims[3])

        def run(*given):
            left = iter(given)
            dy, ds, x, s, statistics, *operands = (None if one is None else next(left) for one in tensors)
            return tuple(backward_by_formulas(dy, ds, x, operands, s, statistics, *options))

        there = [(one, dim) for one, dim in zip(tensors, of_tensors, strict=True) if one is not None]
        given, places = zip(*there, strict=True)
        found = torch.vmap(run, places)(*given)
        return list(found), [0] * len(found)
    dy, ds, x, s, statistics = (
        None if one is None else _batch_first(one, dim, size)
        for one, dim in zip((dy, ds, x, s, statistics), (*in_dims[:3], *in_dims[4:6]), strict=True)
    )
    batched = [_batch_first(one, dim, size) for one, dim in zip(operands, in_dims[3], strict=True)]
    beside = [_beside(x, one, 0) for one in batched]
    found = fused_norm_backward(dy, ds, x, beside, s, statistics.movedim(0, 1), *options)
    shapes = [one.shape for one, wants in zip((x, *batched), asked.wanted, strict=True) if wants]
    return [one.reshape(shape) for one, shape in zip(found, shapes, strict=True)], [0] * len(found)


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _beside(x: Tensor, operand: Tensor, dim: int) -> Tensor:
    """An operand of each sample, shaped to broadcast against x (batch, ..., columns)."""
    operand = operand.movedim(dim, 0)
    return operand.reshape(len(operand), *(1,) * (x.dim() - operand.dim()), *operand.shape[1:])
