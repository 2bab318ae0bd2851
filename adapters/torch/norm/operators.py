"""The norms as operators of torch: what torch.compile, export, functorch, dispatch modes and tensor subclasses see.

    torch.ops.cunorm.norm_forward -> (y, statistics)       torch.ops.cunorm.norm_backward -> (dx, dweight, dbias)

`op` is "layer_norm" or "rms_norm", `ndim` the number of normalised axes, `statistics` as formulas.py has it: empty if
not wanted. Gradients that are not wanted are empty too.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from . import checks, formulas, launching

_library = torch.library.Library("cunorm", "DEF")
_library.define(
    "norm_forward(Tensor x, Tensor? weight, Tensor? bias, str op, int ndim, float eps, bool zero_centered_gamma, "
    "ScalarType dtype, bool wants_statistics, int sm_margin, int backward_sm_margin) -> (Tensor y, Tensor statistics)"
)
_library.define(
    "norm_backward(Tensor dy, Tensor x, Tensor statistics, Tensor? weight, str op, float eps, "
    "bool zero_centered_gamma, bool[3] output_mask, int sm_margin) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
norm_forward = torch.ops.cunorm.norm_forward.default
norm_backward = torch.ops.cunorm.norm_backward.default


# The kernels, and torch's own operators for the CPU, which decomposition.py shows to others as well.

_checked: set[Hashable] = set()  # calls of norm_backward that fit


def _forward_cuda(x, weight, bias, op, ndim, eps, zero_centered_gamma, dtype, wants_statistics, sm_margin, _):
    options = (zero_centered_gamma, dtype, sm_margin, wants_statistics)
    y, statistics, _ = launching.forward(op, x, ndim, weight, bias, eps, *options)
    return y, _absent(x) if statistics is None else statistics


def forward_by_formulas(x, weight, bias, op, ndim, eps, zero_centered_gamma, dtype, wants_statistics, sm_margin, _):
    checks.forward(op, x, ndim, weight, bias, zero_centered_gamma, dtype)
    statistics = formulas.statistics_of(op, x, ndim, eps)
    y = formulas.forward(op, x, statistics, weight, bias, zero_centered_gamma)
    return _result(y, dtype), statistics.contiguous() if wants_statistics else _absent(x)


def _backward_cuda(dy, x, statistics, weight, op, eps, zero_centered_gamma, output_mask, sm_margin):
    named = (dy, x, statistics, weight)
    key = (op, *[None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in named])
    if key not in _checked:
        checks.backward(op, *named)
        if len(_checked) >= launching.RECIPES:
            _checked.clear()
        _checked.add(key)
    family = launching.family(op, x.dim() - statistics.dim() + 1, zero_centered_gamma, x)
    gradients = launching.backward(family, dy, x, statistics, weight, tuple(output_mask), sm_margin)
    return tuple(_absent(x) if gradient is None else gradient for gradient in gradients)


def backward_by_formulas(dy, x, statistics, weight, op, eps, zero_centered_gamma, output_mask, sm_margin):
    checks.backward(op, dy, x, statistics, weight)
    gradients = formulas.backward(op, dy, x, statistics, weight, zero_centered_gamma, tuple(output_mask))
    parameter = x.dtype if weight is None else weight.dtype
    return tuple(
        _absent(x) if gradient is None else _result(gradient, dtype)
        for gradient, dtype in zip(gradients, (x.dtype, parameter, parameter), strict=True)
    )


def _result(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as the kernels write it."""
    return values.to(dtype).contiguous()


_library.impl("norm_forward", _forward_cuda, "CUDA")
_library.impl("norm_forward", forward_by_formulas, "CPU")
_library.impl("norm_backward", _backward_cuda, "CUDA")
_library.impl("norm_backward", backward_by_formulas, "CPU")


# Shapes and dtypes alone.


@torch.library.register_fake("cunorm::norm_forward", lib=_library)
def _forward_fake(x, weight, bias, op, ndim, eps, zero_centered_gamma, dtype, wants_statistics, sm_margin, _):
    checks.forward(op, x, ndim, weight, bias, zero_centered_gamma, dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    if not wants_statistics:
        return y, _absent(x)
    shape = (2 if op == "layer_norm" else 1, *x.shape[:-ndim])
    return y, x.new_empty(shape, dtype=formulas.compute_dtype(x))


@torch.library.register_fake("cunorm::norm_backward", lib=_library)
def _backward_fake(dy, x, statistics, weight, op, eps, zero_centered_gamma, output_mask, sm_margin):
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


def _setup_forward(ctx, inputs, output):
    x, weight, bias, op, ndim, eps, zero_centered_gamma, _, wants_statistics, _, sm_margin = inputs
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(x, weight, statistics if wants_statistics else None)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.options = op, ndim, eps, zero_centered_gamma, sm_margin


def _forward_backward(ctx, dy, _):
    x, weight, statistics = ctx.saved_tensors
    op, ndim, eps, zero_centered_gamma, sm_margin = ctx.options
    if statistics is None:
        statistics = formulas.statistics_of(op, x.detach(), ndim, eps)
    mask = ctx.needs_input_grad[:3]
    dx, dweight, dbias = backward(dy, x, statistics, weight, op, eps, zero_centered_gamma, mask, sm_margin)
    if dbias is not None:
        dbias = dbias.to(ctx.bias_dtype)
    return dx, dweight, dbias, None, None, None, None, None, None, None, None


def _setup_backward(ctx, inputs, output):
    dy, x, statistics, weight, op, eps, zero_centered_gamma, ctx.output_mask, _ = inputs
    ctx.save_for_backward(dy, x, weight)
    ctx.options = op, x.dim() - statistics.dim() + 1, eps, zero_centered_gamma


def _backward_backward(ctx, *gradients):
    dy, x, weight = ctx.saved_tensors
    op, ndim, eps, zero_centered_gamma = ctx.options
    gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.output_mask, strict=True)]
    grad_dy, grad_x, grad_weight = formulas.second_backward(
        op, *gradients, dy, x, ndim, weight, eps, zero_centered_gamma
    )
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_dy.to(dy.dtype), grad_x.to(x.dtype), None, grad_weight, None, None, None, None, None


torch.library.register_autograd("cunorm::norm_forward", _forward_backward, setup_context=_setup_forward, lib=_library)
torch.library.register_autograd(
    "cunorm::norm_backward", _backward_backward, setup_context=_setup_backward, lib=_library
)


class TransformedForward(torch.autograd.Function):
    """norm_forward under functorch: what is registered with an operator is lost where its transforms are nested."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_forward)
    backward = staticmethod(_forward_backward)

    @staticmethod
    def forward(*arguments):
        return norm_forward(*arguments)


class TransformedBackward(torch.autograd.Function):
    """norm_backward under functorch."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_backward)
    backward = staticmethod(_backward_backward)

    @staticmethod
    def forward(*arguments):
        return norm_backward(*arguments)


def backward(dy, x, statistics, weight, op, eps, zero_centered_gamma, output_mask, sm_margin):
    """norm_backward, differentiable wherever it is called; None for what is not wanted."""
    run = TransformedBackward.apply if under_functorch() else norm_backward
    gradients = run(dy, x, statistics, weight, op, eps, zero_centered_gamma, list(output_mask), sm_margin)
    return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, output_mask, strict=True))


def under_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# vmap: the batch is one more leading axis, as long as weight and bias are common to it.


@torch.library.register_vmap("cunorm::norm_forward", lib=_library)
def _forward_vmap(info, in_dims, x, weight, bias, *options):
    op, ndim, eps, zero_centered_gamma, dtype, wants_statistics, sm_margin, backward_sm_margin = options
    x = _batch_first(x, in_dims[0], info.batch_size)
    if in_dims[1] is None and in_dims[2] is None:
        y, statistics = norm_forward(x, weight, bias, *options)
    else:
        plain = (op, ndim, eps, False, formulas.compute_dtype(x), wants_statistics, sm_margin, backward_sm_margin)
        y, statistics = norm_forward(x, None, None, *plain)
        if weight is not None:
            y = y * formulas.gamma(_beside(x, weight, in_dims[1], ndim), zero_centered_gamma, x)
        if bias is not None:
            y = y + _beside(x, bias, in_dims[2], ndim).to(y.dtype)
        y = y.to(dtype)
    return (y, statistics), (0, 1 if wants_statistics else None)


@torch.library.register_vmap("cunorm::norm_backward", lib=_library)
def _backward_vmap(info, in_dims, dy, x, statistics, weight, op, eps, zero_centered_gamma, output_mask, sm_margin):
    dy = _batch_first(dy, in_dims[0], info.batch_size)
    x = _batch_first(x, in_dims[1], info.batch_size)
    statistics = _batch_first(statistics, in_dims[2], info.batch_size).movedim(0, 1)
    ndim = x.dim() - statistics.dim() + 1
    wants_dx, *wants_parameters = output_mask
    dx = dweight = dbias = _absent(x)
    if wants_dx and in_dims[3] is None:
        options = (op, eps, zero_centered_gamma, [True, False, False], sm_margin)
        dx, _, _ = norm_backward(dy, x, statistics, weight, *options)
    # Every sample has its own sums.
    mask = (wants_dx and in_dims[3] is not None, *wants_parameters)
    if any(mask):
        beside = None if weight is None else _beside(x, weight, in_dims[3], ndim)
        gradients = formulas.backward(op, dy, x, statistics, beside, zero_centered_gamma, mask, batch_ndim=1)
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
