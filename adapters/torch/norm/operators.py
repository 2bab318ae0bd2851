"""Norms and fused operations as operators of torch, for torch.compile, export, functorch, dispatch modes and tensor
subclasses.

    torch.ops.cunorm.fused_norm -> (y, s, statistics)             differentiable: exported programs and dynamo's graphs
                                                                  hold it
    torch.ops.cunorm.fused_norm_forward -> (y, s, statistics)     the kernels: compiled code calls them in place of
    torch.ops.cunorm.fused_norm_backward -> gradients             `fused_norm` and its derivative, and modes see them

These serve all operations, as prologue and epilogue are texts. Every text is parsed by the grammar of expressions and
is never pasted into a kernel, so that a saved program cannot bring CUDA code of its own.

`names` has the names of the operands, first of the tensors, then of the numbers. The prologue "" stands for none. s is
empty if it is not among `returns`, and statistics (as formulas.py has them) are empty if they are not wanted. The last
axis is normalised.

`fused_norm` has no kernel: wherever it is differentiated or compiled it is `Norm`, an autograd.Function around the
other two, which therefore need no derivative of their own. A derivative registered by torch.library.register_autograd
would run in compiled code as well, where nothing is differentiated, and cost the host time (docs/tuning.md). dynamo
does not see the Function either: it would hide the operator of an exported program in a subgraph and leave the program
without a derivative.
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
# x and operands that are not read count only by their shapes; `dtypes` has the dtypes of all of them.
_library.define(
    f"fused_norm_backward(Tensor? dy, Tensor? ds, Tensor x, Tensor[] operands, Tensor? s, Tensor statistics, "
    f"{_OPERATION}, float eps, ScalarType s_dtype, str[] dtypes, bool[] wanted, int sm_margin) -> Tensor[]"
)
fused_norm = torch.ops.cunorm.fused_norm.default
fused_norm_forward = torch.ops.cunorm.fused_norm_forward.default
fused_norm_backward = torch.ops.cunorm.fused_norm_backward.default


class Forward(NamedTuple):
    """What the forward operators take besides tensors, in their order."""

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

    def backward(self, dtypes: list[str]) -> Backward:
        """Return the options of the backward operator, with every gradient wanted."""
        wanted = [True] * len(dtypes)
        return Backward(*self[:7], self.s_dtype, dtypes, wanted, self.backward_sm_margin)


class Backward(NamedTuple):
    """What the backward operator takes besides tensors, in its order."""

    norm: str
    prologue: str
    epilogue: str
    names: Sequence[str]
    numbers: Sequence[float]
    returns: Sequence[str]
    eps: float
    s_dtype: torch.dtype
    dtypes: list[str]  # those of x and the operands
    wanted: Sequence[bool]  # whether the gradients of x and the operands are wanted
    sm_margin: int


def forward_options(
    call: Call, numbers: Sequence[float], eps: float, x_dtype: str, wants_statistics: bool, differentiated: bool
) -> Forward:
    """Return the options by which the operators are told of a call."""
    operation, (forward, backward, inference) = call.whole, call.sm_margins
    dtype, s_dtype = (getattr(torch, name or x_dtype) for name in (call.dtype, call.s_dtype))
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


def backward_options(
    call: Call, numbers: Sequence[float], eps: float, dtypes: list[str], wanted: Sequence[bool]
) -> Backward:
    """Return the options of the backward operator; `dtypes` and `wanted` have one entry for each tensor of the call."""
    return forward_options(call, numbers, eps, dtypes[0], True, True).backward(dtypes)._replace(wanted=wanted)


def described(options: Forward | Backward, operands: Sequence[Any]) -> Call:
    """Return the call that options describe for as many tensors as `operands`; raise ValueError if there is none."""
    count, names = len(operands), tuple(options.names)  # the first operands are tensors, the others numbers
    if count + len(options.numbers) != len(names):
        raise ValueError(
            f"fused_norm: names must have one for each operand; got {len(names)} for {count} tensors and "
            f"{len(options.numbers)} numbers."
        )
    operation = _operation(options.norm, options.prologue, options.epilogue, names, tuple(options.returns))
    s_dtype = checks.dtype_name(options.s_dtype) if options.prologue else None
    dtype = checks.dtype_name(options.dtype) if isinstance(options, Forward) else None
    margins = (options.sm_margin,) * 3
    return call_of("fused_norm", operation, names[:count], names[count:], (), dtype, s_dtype, margins)


@lru_cache(maxsize=4096)
def _operation(norm: str, prologue: str, epilogue: str, names: tuple[str, ...], returns: tuple[str, ...]) -> Operation:
    """Return the operation of these texts: one of NAMED if it is a plain norm."""
    if not prologue and returns == ("y",):
        for plain in NAMED.values():
            if plain.norm == norm and {*names} <= {*plain.operands} and plain.given(names).epilogue.text == epilogue:
                return plain
    before_norm, after_norm = _parsed(prologue, "x", names) if prologue else None, _parsed(epilogue, "xhat", names)
    used = {*after_norm.names, *(before_norm.names if before_norm else ())}
    unused = tuple(name for name in names if name not in used)  # their gradients are zero
    return composed(norm, before_norm, Expression((*after_norm.names, *unused), after_norm.steps), returns)


def _parsed(text: str, first: str, names: tuple[str, ...]) -> Expression:
    """Parse a text into an expression of `first` and those of the names that occur in it."""
    expression = parse(text, (first, *names))
    return Expression((first, *(name for name in names if name in expression.uses)), expression.steps)


# The kernels. On the CPU they are torch's own where it has one, as only its derivatives of higher order are wrong.
# decomposition.py hands the functions by formulas to other compilers.


def _forward_cuda(x, operands, *arguments):
    options = Forward(*arguments)
    call, tensors = described(options, operands), [x, *operands]
    recipe = checks.raising_as_torch(launching.recipe_of, call, tensors, options.sm_margin)
    numbers, eps, wants_statistics = options.numbers, options.eps, options.wants_statistics
    results, statistics = checks.raising_as_torch(launching.forward_by, recipe, tensors, numbers, eps, wants_statistics)
    return _three(x, options, dict(zip(call.operation.returns, results, strict=True)), statistics)


def _forward_cpu(x, operands, *arguments):
    options = Forward(*arguments)
    call = described(options, operands)
    if not has_own_kernel(call, x, operands):
        return forward_by_formulas(x, operands, *arguments)
    _check(call, [x, *operands])
    weight, bias = weight_and_bias(options.names, operands)
    y, statistics = forward_by_torch(call.affine, x, weight, bias, options.eps, options.dtype)
    return _three(x, options, {"y": y}, statistics)


def forward_by_formulas(x, operands, *arguments):
    """Return what `fused_norm_forward` does, by torch's own operators."""
    options = Forward(*arguments)
    call = described(options, operands)
    _check(call, [x, *operands])
    values = values_of(call, [x, *operands], options.numbers)
    results, statistics = formulas.forward(call.operation, values, options.eps, options.dtype, options.s_dtype)
    return _three(x, options, results, statistics)


def _three(
    x: Tensor, options: Forward, results: dict[str, Tensor], statistics: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, s, statistics) as the operators do: s and statistics are empty if they are not wanted."""
    s = results["s"] if "s" in options.returns else _absent(x)
    return results["y"], s, statistics if options.wants_statistics else _absent(x)


def _absent(x: Tensor) -> Tensor:
    return x.new_empty(0)


def weight_and_bias(names: Sequence[str], operands: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return (weight, bias) of the operands of these names, None for one that is missing."""
    by_name = dict(zip(names, operands, strict=True))
    return by_name.get("weight"), by_name.get("bias")


def values_of(call: Call, tensors: Sequence[Tensor], numbers: Sequence[float]) -> dict[str, Tensor | float]:
    """Return x and the operands by name."""
    return dict(zip((*call.names, *call.numbers), (*tensors, *numbers), strict=True))


def _check(call: Call, tensors: Sequence[Tensor]) -> None:
    layouts = {
        name: checks.layout(call.function, name, tensor) for name, tensor in zip(call.names, tensors, strict=True)
    }
    x = layouts.pop("x")
    checks.raising_as_torch(broadcasting.check_operands, call.function, x, layouts, demanded=call.demanded)


def has_own_kernel(call: Call, x: Tensor, operands: Sequence[Tensor]) -> bool:
    """Say whether torch has a kernel on the CPU for this call: for a plain norm."""
    columns = x.shape[-1:]
    return call.affine is not None and all(operand.shape == columns for operand in operands)


def forward_by_torch(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (y, statistics) of a plain norm, without derivatives, by torch's kernel where it has one."""
    compute = formulas.compute_dtype(x)
    if not formulas.subtracts_mean(name):
        statistics = formulas.statistics_of(NAMED[name].norm, x.to(compute), eps)
        return formulas.affine(name, x, statistics, weight, bias).to(dtype).contiguous(), statistics.contiguous()
    # For a 16-bit x torch's kernel returns mean and rstd in float32 only if weight is float32.
    wide = x if x.dtype is dtype and weight is not None else x.to(compute)
    weight = None if weight is None else formulas.gamma(name, weight, x)
    bias = None if bias is None else bias.to(compute)
    y, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
    return y.to(dtype).contiguous(), torch.stack((mean, rstd)).view(2, *x.shape[:-1])


def backward_by_torch(
    name: str, dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Return the gradients `wanted` by name, in the dtype of the arithmetic, by torch's kernel where it has one."""
    if not formulas.subtracts_mean(name):
        return formulas.affine_backward(name, dy, x, statistics, weight, wanted)
    compute, shape = statistics.dtype, x.shape[-1:]
    mean, rstd = statistics.contiguous()[..., None]  # torch's kernel assumes that they are contiguous
    gamma = rstd.new_ones(shape) if weight is None else formulas.gamma(name, weight, x)
    # torch's kernel computes x * rstd - mean * rstd, which loses all digits if |mean| is much larger than the standard
    # deviation; so the mean is subtracted first.
    names = ("x", "weight", "bias")
    mask, centred, zeros = [name in wanted for name in names], x.to(compute) - mean, torch.zeros_like(mean)
    backward = torch.ops.aten.native_layer_norm_backward.default
    gradients = backward(dy.to(compute), centred, shape, zeros, rstd, gamma, gamma, mask)
    return {name: gradient for name, gradient in zip(names, gradients, strict=True) if name in wanted}


def _backward_cuda(dy, ds, x, operands, s, statistics, *arguments):
    options = Backward(*arguments)
    call, tensors = described(options, operands), [x, *operands]
    layouts = {
        name: checks.layout_in_memory(call.function, name, tensor)._replace(dtype=dtype)
        for name, tensor, dtype in zip(call.names, tensors, options.dtypes, strict=True)
    }
    family = family_of(call, layouts)
    if s is not None:
        tensors.append(s)
    saved = Saved((*call.names, "s") if s is not None else call.names, tensors, options.numbers, statistics)
    recipe = launching.backward_recipe_of(family, saved, dy, ds, call.wanted(tuple(options.wanted)))
    return _each_once(launching.backward_by(recipe, saved, dy, ds))


def _backward_cpu(dy, ds, x, operands, s, statistics, *arguments):
    options = Backward(*arguments)
    call = described(options, operands)
    if not has_own_kernel(call, x, operands) or wants_gradient(dy, x, *operands):
        return backward_by_formulas(dy, ds, x, operands, s, statistics, *arguments)
    weight, _ = weight_and_bias(options.names, operands)
    wanted = call.wanted(tuple(options.wanted))
    by_name = backward_by_torch(call.affine, dy, x, statistics, weight, wanted)
    return _in_dtypes(options, [by_name[name] for name in wanted])


def backward_by_formulas(dy, ds, x, operands, s, statistics, *arguments):
    """Return what `fused_norm_backward` does, by torch's own operators."""
    options = Backward(*arguments)
    call, tensors = described(options, operands), [x, *operands]
    if wants_gradient(dy, ds, *tensors, s):
        statistics = statistics_again(call, options, tensors, s)
    return formula_gradients(call, options, dy, ds, tensors, s, statistics)


def formula_gradients(call: Call, options: Backward, dy, ds, tensors, s, statistics) -> list[Tensor]:
    """Return the gradients that `options` wants of `tensors`, which are x and the operands, by formulas.py."""
    values, wanted = values_of(call, tensors, options.numbers), call.wanted(tuple(options.wanted))
    gradients = formulas.backward(call.operation, values, s, {"dy": dy, "ds": ds}, statistics, wanted, options.s_dtype)
    return _in_dtypes(options, gradients)


def _in_dtypes(options: Backward, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients in the dtypes and the layout in which the kernels write them."""
    dtypes = [getattr(torch, dtype) for dtype, wants in zip(options.dtypes, options.wanted, strict=True) if wants]
    return _each_once([gradient.to(dtype).contiguous() for gradient, dtype in zip(gradients, dtypes, strict=True)])


def _each_once(gradients: list[Tensor]) -> list[Tensor]:
    """Clone gradients that are the same tensor as an earlier one, as an operator must not return a tensor twice."""
    return [
        gradient.clone() if any(gradient is earlier for earlier in gradients[:i]) else gradient
        for i, gradient in enumerate(gradients)
    ]


def statistics_again(call: Call, options: Backward, tensors: Sequence[Tensor], s: Tensor | None) -> Tensor:
    """Compute the statistics again, from s or from what s is made of, so that the result can be differentiated."""
    if s is None:
        rows = formulas.rows_of(call.operation, values_of(call, tensors, options.numbers), options.s_dtype)
    else:
        rows = s.to(formulas.compute_dtype(s))
    return formulas.statistics_of(call.operation.norm, rows, options.eps)


# The fakes work on shapes and dtypes alone. They check these, so that a trace holds only calls that fit.


@torch.library.register_fake("cunorm::fused_norm_forward", lib=_library)
def _forward_fake(x, operands, *arguments):
    options = Forward(*arguments)
    _check(described(options, operands), [x, *operands])
    y = x.new_empty(x.shape, dtype=options.dtype)
    s = x.new_empty(x.shape, dtype=options.s_dtype) if "s" in options.returns else _absent(x)
    if not options.wants_statistics:
        return y, s, _absent(x)
    compute = getattr(torch, compute_dtype(checks.dtype_name(options.s_dtype)))
    return y, s, x.new_empty((len(NORMS[options.norm].statistics), *x.shape[:-1]), dtype=compute)


@torch.library.register_fake("cunorm::fused_norm_backward", lib=_library)
def _backward_fake(dy, ds, x, operands, s, statistics, *arguments):
    options = Backward(*arguments)
    described(options, operands)
    return [
        x.new_empty(tensor.shape, dtype=getattr(torch, dtype))
        for tensor, dtype, wants in zip((x, *operands), options.dtypes, options.wanted, strict=True)
        if wants
    ]


# Derivatives.


class Norm(torch.autograd.Function):
    """fused_norm_forward of x, options and operands with its derivative, which functorch can transform too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, options, *operands):
        return fused_norm_forward(x, list(operands), *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, options, *operands = inputs
        _, s, statistics = output
        call, returned = described(options, operands), "s" in options.returns
        ctx.mark_non_differentiable(statistics, *(() if returned else (s,)))
        ctx.set_materialize_grads(False)
        x_wants, _, *wanted = ctx.needs_input_grad
        read = call.saved(call.wanted((x_wants, *wanted)))
        tensors = (x, *operands)
        named = [*zip(call.names, tensors, strict=True)]
        # A tensor that is not read is not saved: another one of its shape, which is saved anyway, stands for it.
        substitutes = [s if returned else x, *(tensor for name, tensor in named if name in read)]
        saved = [
            tensor if name in read else next((another for another in substitutes if alike(tensor, another)), tensor)
            for name, tensor in named
        ]
        ctx.save_for_backward(s if returned else None, statistics if options.wants_statistics else None, *saved)
        ctx.options = options.backward([checks.dtype_name(tensor.dtype) for tensor in tensors])

    @staticmethod
    def backward(ctx, dy, ds, _):
        s, statistics, *tensors = ctx.saved_tensors
        x_wants, _, *wanted = ctx.needs_input_grad
        options = ctx.options._replace(wanted=(x_wants, *wanted))
        dx, *operand_gradients = gradients(described(options, wanted), options, dy, ds, tensors, s, statistics)
        return dx, None, *operand_gradients


class NormBackward(torch.autograd.Function):
    """fused_norm_backward of a plain norm with its derivative, which can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy, statistics, options, x, *operands):
        return tuple(fused_norm_backward(dy, None, x, list(operands), None, statistics, *options))

    @staticmethod
    def setup_context(ctx, inputs, output):
        dy, _, ctx.options, x, *operands = inputs
        weight, _ = weight_and_bias(ctx.options.names, operands)
        ctx.save_for_backward(dy, x, weight)
        ctx.name = described(ctx.options, operands).affine

    @staticmethod
    def backward(ctx, *gradients):
        dy, x, weight = ctx.saved_tensors
        names, options = ("x", *ctx.options.names), ctx.options
        wanted = [name for name, wants in zip(names, options.wanted, strict=True) if wants]
        by_name = dict(zip(wanted, gradients, strict=True))
        incoming = [by_name.get(name) for name in ("x", "weight", "bias")]
        grad_dy, grad_x, grad_weight = formulas.second_backward(ctx.name, *incoming, dy, x, weight, options.eps)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        grad_operands = (grad_weight if name == "weight" else None for name in options.names)
        return grad_dy.to(dy.dtype), None, None, grad_x.to(x.dtype), *grad_operands


def gradients(
    call: Call,
    options: Backward,
    dy: Tensor | None,
    ds: Tensor | None,
    tensors: Sequence[Tensor],
    s: Tensor | None,
    statistics: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of `tensors`, which are x and the operands; None for one that `options` does not want."""
    names = call.wanted(tuple(options.wanted))
    if not names or (dy is None and ds is None):
        return [None] * len(tensors)
    # Operators that take lists cannot be batched for autograd.grad(is_grads_batched=True).
    batched = any(gradient is not None and private.is_batched(gradient) for gradient in (dy, ds))
    by_formulas = private.in_forward_mode() or batched or (torch.is_grad_enabled() and not call.affine)
    if statistics is None or by_formulas:
        statistics = statistics_again(call, options, tensors, s)
    computed_as = dict(zip(names, names, strict=True))
    if by_formulas:
        results = formula_gradients(call, options, dy, ds, tensors, s, statistics)
    elif call.affine:
        results = NormBackward.apply(dy, statistics, options, *tensors)
    else:  # equal gradients are computed once
        x, *operands = tensors
        kinds = {name: "full" for name, tensor in zip(call.names, tensors, strict=True) if alike(tensor, x)}
        present, dtypes = (*call.names, *call.numbers), dict(zip(call.names, options.dtypes, strict=True))
        computed_as = broadcasting.same_gradients(call.operation, names, present, kinds, dtypes)
        names = [name for name in call.names if name in computed_as.values()]
        options = options._replace(wanted=[name in names for name in call.names])
        results = fused_norm_backward(dy, ds, x, operands, s, statistics, *options)
    by_name = dict(zip(names, results, strict=True))
    return [by_name.get(computed_as.get(name)) for name in call.names]


def alike(tensor: Tensor, x: Tensor) -> bool:
    """Say whether shapes are equal; a size that a trace holds open is not compared with that of another axis."""
    return tensor.dim() == x.dim() and tensor.shape == x.shape


def _apply(x, operands, *arguments):
    """Apply `Norm` to the arguments of its operator, or formulas under functorch, which operators cannot serve."""
    if private.under_functorch():
        return forward_by_formulas(x, operands, *arguments)
    return Norm.apply(x, Forward(*arguments), *operands)


def _apply_backward(dy, ds, x, operands, s, statistics, *arguments):
    """Apply `NormBackward` to the arguments of its operator, or formulas under functorch and beyond plain norms."""
    options = Backward(*arguments)
    if private.under_functorch() or not described(options, operands).affine:
        return backward_by_formulas(dy, ds, x, operands, s, statistics, *arguments)
    return list(NormBackward.apply(dy, statistics, options, x, *operands))


def wants_gradient(*arguments: Any) -> bool:
    """Say whether autograd follows any of the tensors, also of those in a list."""
    if not torch.is_grad_enabled():
        return False
    listed = (value for argument in arguments if isinstance(argument, list | tuple) for value in argument)
    return any(isinstance(value, Tensor) and value.requires_grad for value in (*arguments, *listed))


def register_kernels(operator: Any, apply: Callable[..., Any], **kernels: Callable[..., Any]) -> None:
    """Register the kernels of an operator by device; called directly it has the derivative of `apply`, which takes the
    same arguments and applies an autograd.Function.

    Nothing is registered for its autograd key, so that compiled code does not pay for it. In eager mode autograd is
    still on in a kernel written in Python, unless the call comes from compiled code or a Function. torch cannot know
    that the kernel uses autograd, and warns in the backward pass. While torch.compile traces, py_impl serves the
    autograd key.
    """

    def differentiable(run: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*arguments):
            return apply(*arguments) if wants_gradient(*arguments) else run(*arguments)

        return compute

    def below_autograd(*arguments):
        with private.below_autograd():
            return operator(*arguments)

    for device, run in kernels.items():
        _library.impl(operator.name(), differentiable(run), device)
        if private.dispatch_key:
            operator.py_impl(getattr(private.dispatch_key, f"Autograd{device}"))(differentiable(below_autograd))


_library.impl("fused_norm", _apply, "CompositeImplicitAutograd")
register_kernels(fused_norm_forward, _apply, CPU=_forward_cpu, CUDA=_forward_cuda)
register_kernels(fused_norm_backward, _apply_backward, CPU=_backward_cpu, CUDA=_backward_cuda)


# vmap: the batch is one more leading axis. An operand then belongs to a group of rows, and every sample has sums of its
# own. A seed must give the same numbers to each sample, so with a seed torch's own operators run, sample by sample.


@torch.library.register_vmap("cunorm::fused_norm_forward", lib=_library)
def _forward_vmap(info, in_dims, x, operands, *arguments):
    options, (x_dim, operand_dims, *_) = Forward(*arguments), in_dims
    if SEED in options.names:
        by_sample = torch.vmap(lambda *tensors: forward_by_formulas(*tensors, *arguments), (x_dim, operand_dims))
        return by_sample(x, operands), (0, 0, 0)
    x = _batch_first(x, x_dim, info.batch_size)
    operands = [
        operand if dim is None else _broadcast(x, operand, dim)
        for operand, dim in zip(operands, operand_dims, strict=True)
    ]
    y, s, statistics = fused_norm_forward(x, operands, *arguments)
    return (y, s, statistics), (0, 0 if "s" in options.returns else None, 1 if options.wants_statistics else None)


@torch.library.register_vmap("cunorm::fused_norm_backward", lib=_library)
def _backward_vmap(info, in_dims, *inputs):
    tensors, tensor_dims, arguments = inputs[:6], tuple(in_dims[:6]), inputs[6:]
    options = Backward(*arguments)
    if SEED in options.names:
        by_sample = torch.vmap(lambda *tensors: tuple(backward_by_formulas(*tensors, *arguments)), tensor_dims)
        gradients = by_sample(*tensors)
        return list(gradients), [0] * len(gradients)

    def batched(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        return None if tensor is None else _batch_first(tensor, dim, info.batch_size)

    operands = [*map(batched, tensors[3], tensor_dims[3])]
    dy, ds, x, s, statistics = (batched(tensors[place], tensor_dims[place]) for place in (0, 1, 2, 4, 5))
    broadcast = [_broadcast(x, operand, 0) for operand in operands]
    gradients = fused_norm_backward(dy, ds, x, broadcast, s, statistics.movedim(0, 1), *arguments)
    shapes = [tensor.shape for tensor, wants in zip((x, *operands), options.wanted, strict=True) if wants]
    return [tensor.reshape(shape) for tensor, shape in zip(gradients, shapes, strict=True)], [0] * len(gradients)


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _broadcast(x: Tensor, operand: Tensor, dim: int) -> Tensor:
    """Return an operand that differs between samples, shaped to broadcast against x (batch, ..., columns)."""
    operand = operand.movedim(dim, 0)
    return operand.reshape(len(operand), *(1,) * (x.dim() - operand.dim()), *operand.shape[1:])
