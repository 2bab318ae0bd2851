"""The norms as operators of torch: what torch.compile, export, functorch, dispatch modes and tensor subclasses see.

    torch.ops.cunorm.norm -> (y, statistics)        differentiable: what exported programs and dynamo's graphs hold
    torch.ops.cunorm.norm_forward -> (y, statistics)            the kernels: what is left of `norm` and its derivative
    torch.ops.cunorm.norm_backward -> (dx, dweight, dbias)      in compiled code, and what modes and subclasses see

`operation` is a name of cunorm.operation.NAMED, `ndim` the number of normalised axes, `statistics` as formulas.py has
it: empty if not wanted. Gradients that are not wanted are empty too.

`norm` has no kernel: wherever it is differentiated or compiled it is `Norm`, an autograd.Function around the other two,
which therefore need no derivative of their own. One that is registered by torch.library.register_autograd runs in
compiled code as well, where nothing is differentiated: 16 us a norm in a row, 46 with nothing in the core's caches
(docs/tuning.md). Nor does dynamo see the Function: it would hide the operator of an exported program in a subgraph and
leave the program without a derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import private
from . import checks, formulas, launching

_library = torch.library.Library("cunorm", "DEF")
_FORWARD = (
    "(Tensor x, Tensor? weight, Tensor? bias, str operation, int ndim, float eps, ScalarType dtype, "
    "bool wants_statistics, int sm_margin, int backward_sm_margin) -> (Tensor y, Tensor statistics)"
)
_library.define(f"norm{_FORWARD}")
_library.define(f"norm_forward{_FORWARD}")
# `checked`: what autograd gives back to a backward pass fits the forward pass that ran.
_library.define(
    "norm_backward(Tensor dy, Tensor x, Tensor statistics, Tensor? weight, str operation, float eps, "
    "bool[3] output_mask, int sm_margin, bool checked=False) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
norm = torch.ops.cunorm.norm.default
norm_forward = torch.ops.cunorm.norm_forward.default
norm_backward = torch.ops.cunorm.norm_backward.default


# The kernels. For the CPU those of torch's own norm: only its derivatives of higher order are wrong. The formulas are
# what decomposition.py shows to others.


def _forward_cuda(x, weight, bias, operation, ndim, eps, dtype, wants_statistics, sm_margin, _):
    call = (operation, x, x.shape[-ndim:], weight, bias, eps, dtype, sm_margin, wants_statistics)
    y, statistics, _ = launching.forward(*call)
    return y, _absent(x) if statistics is None else statistics


def _forward_cpu(x, weight, bias, operation, ndim, eps, dtype, wants_statistics, *_):
    checks.forward(operation, x, ndim, weight, bias, dtype)
    y, statistics = forward_by_torch(x, weight, bias, operation, ndim, eps, dtype)
    return y, statistics if wants_statistics else _absent(x)


def forward_by_torch(x, weight, bias, operation, ndim, eps, dtype) -> tuple[Tensor, Tensor]:
    """(y, statistics) by torch's kernel where it has one; without a derivative, for arguments that fit."""
    if not formulas.subtracts_mean(operation):
        return _forward_by_formulas(x, weight, bias, operation, ndim, eps, dtype)
    compute = formulas.compute_dtype(x)
    # Of a 16-bit x torch's kernel gives mean and rstd in float32 only beside a float32 weight.
    wide = x if x.dtype is dtype and weight is not None else x.to(compute)
    weight = None if weight is None else formulas.gamma(operation, weight, x)
    bias = None if bias is None else bias.to(compute)
    y, mean, rstd = torch.native_layer_norm(wide, x.shape[-ndim:], weight, bias, eps)
    return _result(y, dtype), torch.stack((mean, rstd)).view(2, *x.shape[:-ndim])


def _backward_cpu(dy, x, statistics, weight, operation, eps, output_mask, sm_margin, checked=False):
    checks.backward(operation, dy, x, statistics, weight)
    return backward_by_torch(dy, x, statistics, weight, operation, eps, output_mask)


def backward_by_torch(dy, x, statistics, weight, operation, eps, output_mask) -> tuple[Tensor, ...]:
    """As norm_backward, by torch's kernel where it has one; without a derivative, for arguments that fit."""
    if not formulas.subtracts_mean(operation):
        gradients = formulas.backward(operation, dy, x, statistics, weight, tuple(output_mask))
        return _in_dtypes(gradients, output_mask, x, weight)
    compute, shape = statistics.dtype, x.shape[statistics.dim() - 1 :]
    mean, rstd = statistics.contiguous().view(*statistics.shape, *(1,) * len(shape))  # as the kernel reads them
    gamma = rstd.new_ones(shape) if weight is None else formulas.gamma(operation, weight, x)
    # torch's kernel takes x * rstd - mean * rstd, which loses all digits where |mean| is large beside the deviation.
    gradients = torch.ops.aten.native_layer_norm_backward.default(
        dy.to(compute), x.to(compute) - mean, shape, torch.zeros_like(mean), rstd, gamma, gamma, output_mask
    )
    return _in_dtypes(gradients, output_mask, x, weight)


def forward_by_formulas(x, weight, bias, operation, ndim, eps, dtype, wants_statistics, sm_margin, _):
    checks.forward(operation, x, ndim, weight, bias, dtype)
    y, statistics = _forward_by_formulas(x, weight, bias, operation, ndim, eps, dtype)
    return y, statistics if wants_statistics else _absent(x)


def _forward_by_formulas(x, weight, bias, operation, ndim, eps, dtype) -> tuple[Tensor, Tensor]:
    statistics = formulas.statistics_of(operation, x, ndim, eps)
    y = formulas.forward(operation, x, statistics, weight, bias)
    return _result(y, dtype), statistics.contiguous()


def _backward_cuda(dy, x, statistics, weight, operation, eps, output_mask, sm_margin, checked=False):
    if not checked:
        checks.backward(operation, dy, x, statistics, weight)
    family = launching.family(operation, x.dim() - statistics.dim() + 1, x)
    gradients = launching.backward(family, dy, x, statistics, weight, tuple(output_mask), sm_margin)
    return tuple([_absent(x) if gradient is None else gradient for gradient in gradients])


def backward_by_formulas(dy, x, statistics, weight, operation, eps, output_mask, sm_margin, checked=False):
    checks.backward(operation, dy, x, statistics, weight)
    gradients = formulas.backward(operation, dy, x, statistics, weight, tuple(output_mask))
    return _in_dtypes(gradients, output_mask, x, weight)


def _in_dtypes(gradients, output_mask, x: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    parameter = x.dtype if weight is None else weight.dtype
    dtypes = (x.dtype, parameter, parameter)
    return tuple(
        _result(gradient, dtype) if wanted else _absent(x)
        for gradient, dtype, wanted in zip(gradients, dtypes, output_mask, strict=True)
    )


def _result(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as the kernels write it."""
    return values.to(dtype).contiguous()


# Shapes and dtypes alone, checked: a trace holds only calls that fit.


@torch.library.register_fake("cunorm::norm_forward", lib=_library)
def _forward_fake(x, weight, bias, operation, ndim, eps, dtype, wants_statistics, sm_margin, _):
    checks.forward(operation, x, ndim, weight, bias, dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    if not wants_statistics:
        return y, _absent(x)
    shape = (1 + formulas.subtracts_mean(operation), *x.shape[:-ndim])
    return y, x.new_empty(shape, dtype=formulas.compute_dtype(x))


@torch.library.register_fake("cunorm::norm_backward", lib=_library)
def _backward_fake(dy, x, statistics, weight, operation, eps, output_mask, sm_margin, checked=False):
    checks.backward(operation, dy, x, statistics, weight)
    shape = x.shape[statistics.dim() - 1 :]
    dtype = x.dtype if weight is None else weight.dtype
    results = ((x.shape, x.dtype), (shape, dtype), (shape, dtype))
    return tuple(
        x.new_empty(shape, dtype=dtype) if wanted else _absent(x)
        for (shape, dtype), wanted in zip(results, output_mask, strict=True)
    )


def _absent(x: Tensor) -> Tensor:
    return x.new_empty(0)


# Derivatives.


class Norm(torch.autograd.Function):
    """norm_forward and its derivative, also under the transforms of functorch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return norm_forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, operation, ndim, eps, _, wants_statistics, _, sm_margin = inputs
        _, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.save_for_backward(statistics if wants_statistics else None, x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.options = operation, ndim, eps, sm_margin

    @staticmethod
    def backward(ctx, dy, _):
        statistics, x, weight = ctx.saved_tensors
        operation, ndim, eps, sm_margin = ctx.options
        if statistics is None:
            statistics = formulas.statistics_of(operation, x.detach(), ndim, eps)
        mask = ctx.needs_input_grad[:3]
        dx, dweight, dbias = backward(dy, x, statistics, weight, operation, eps, mask, sm_margin)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        return dx, dweight, dbias, *[None] * 7


class NormBackward(torch.autograd.Function):
    """norm_backward and its derivative, which is made of torch's own operators and can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return norm_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        dy, x, statistics, weight, operation, eps, ctx.output_mask, *_ = inputs
        ctx.save_for_backward(dy, x, weight)
        ctx.options = operation, x.dim() - statistics.dim() + 1, eps

    @staticmethod
    def backward(ctx, *gradients):
        dy, x, weight = ctx.saved_tensors
        operation, ndim, eps = ctx.options
        gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.output_mask, strict=True)]
        grad_dy, grad_x, grad_weight = formulas.second_backward(operation, *gradients, dy, x, ndim, weight, eps)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_dy.to(dy.dtype), grad_x.to(x.dtype), None, grad_weight, *[None] * 5


def backward(dy, x, statistics, weight, operation, eps, output_mask, sm_margin):
    """norm_backward, differentiable wherever it is called; None for what is not wanted. Shapes and devices fit."""
    if private.in_forward_mode():  # of which a Function knows nothing
        if not torch.compiler.is_compiling():
            checks.backward(operation, dy, x, statistics, weight)
        again = formulas.statistics_of(operation, x, x.dim() - statistics.dim() + 1, eps)
        gradients = formulas.backward(operation, dy, x, again, weight, tuple(output_mask))
        dtypes = (x.dtype, *((x if weight is None else weight).dtype,) * 2)
        return tuple(None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))
    gradients = NormBackward.apply(dy, x, statistics, weight, operation, eps, list(output_mask), sm_margin, True)
    return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, output_mask, strict=True))


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


_library.impl("norm", Norm.apply, "CompositeImplicitAutograd")
register_kernels(norm_forward, Norm, CPU=_forward_cpu, CUDA=_forward_cuda)
register_kernels(norm_backward, NormBackward, CPU=_backward_cpu, CUDA=_backward_cuda)


# vmap: the batch is one more leading axis, as long as weight and bias are common to it.


@torch.library.register_vmap("cunorm::norm_forward", lib=_library)
def _forward_vmap(info, in_dims, x, weight, bias, *options):
    operation, ndim, eps, dtype, wants_statistics, *margins = options
    x = _batch_first(x, in_dims[0], info.batch_size)
    if in_dims[1] is None and in_dims[2] is None:
        y, statistics = norm_forward(x, weight, bias, *options)
    else:
        plain = (operation, ndim, eps, formulas.compute_dtype(x), wants_statistics, *margins)
        y, statistics = norm_forward(x, None, None, *plain)
        if weight is not None:
            y = y * formulas.gamma(operation, _beside(x, weight, in_dims[1], ndim), x)
        if bias is not None:
            y = y + _beside(x, bias, in_dims[2], ndim).to(y.dtype)
        y = y.to(dtype)
    return (y, statistics), (0, 1 if wants_statistics else None)


@torch.library.register_vmap("cunorm::norm_backward", lib=_library)
def _backward_vmap(info, in_dims, dy, x, statistics, weight, operation, eps, output_mask, *others):
    dy = _batch_first(dy, in_dims[0], info.batch_size)
    x = _batch_first(x, in_dims[1], info.batch_size)
    statistics = _batch_first(statistics, in_dims[2], info.batch_size).movedim(0, 1)
    ndim = x.dim() - statistics.dim() + 1
    wants_dx, *wants_parameters = output_mask
    dx = dweight = dbias = _absent(x)
    if wants_dx and in_dims[3] is None:
        dx, _, _ = norm_backward(dy, x, statistics, weight, operation, eps, [True, False, False], *others)
    # Every sample has its own sums.
    mask = (wants_dx and in_dims[3] is not None, *wants_parameters)
    if any(mask):
        beside = None if weight is None else _beside(x, weight, in_dims[3], ndim)
        gradients = formulas.backward(operation, dy, x, statistics, beside, mask, batch_ndim=1)
        dtypes = (x.dtype, *((x if weight is None else weight).dtype,) * 2)
        computed = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
        dx, dweight, dbias = (
            absent if gradient is None else gradient
            for gradient, absent in zip(computed, (dx, dweight, dbias), strict=True)
        )
    return (dx, dweight, dbias), tuple(0 if wanted else None for wanted in output_mask)


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _beside(x: Tensor, parameter: Tensor, dim: int | None, ndim: int) -> Tensor:
    """A parameter of each sample, shaped to be multiplied with x (batch, ..., *normalized_shape)."""
    if dim is None:
        return parameter
    parameter = parameter.movedim(dim, 0)
    return parameter.reshape(len(parameter), *(1,) * (x.dim() - ndim - 1), *parameter.shape[1:])
