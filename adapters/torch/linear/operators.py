"""The norm with its product as operators, one a pass: what torch.compile and export see of `layer_norm_linear`.

    torch.ops.cunorm.norm_linear -> (y, z, statistics)              differentiable, as `norm` in norm/operators.py
    torch.ops.cunorm.norm_linear_forward -> (y, z, statistics)      what is left of it in compiled code
    torch.ops.cunorm.norm_linear_backward -> (dx, dweight, dbias, dln_weight, dln_bias)

z is the normalised tensor; names and options as in passes.py. Gradients that are not wanted are empty.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ..norm import formulas
from ..norm.operators import _absent, _library, register_kernels
from .passes import Options, gradients, normalise

_OPTIONS = "str operation, float eps, ScalarType dtype, bool keep_normalized, int sm_margin, int backward_sm_margin"
_FORWARD = (
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? ln_weight, Tensor? ln_bias, {_OPTIONS}) "
    "-> (Tensor y, Tensor z, Tensor statistics)"
)
_library.define(f"norm_linear{_FORWARD}")
_library.define(f"norm_linear_forward{_FORWARD}")
_library.define(
    "norm_linear_backward(Tensor? dy, Tensor? dz, Tensor x, Tensor weight, Tensor? ln_weight, Tensor? ln_bias, "
    f"Tensor statistics, Tensor? z, {_OPTIONS}, bool[5] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)"
)
norm_linear = torch.ops.cunorm.norm_linear.default
norm_linear_forward = torch.ops.cunorm.norm_linear_forward.default
norm_linear_backward = torch.ops.cunorm.norm_linear_backward.default


def forward_in_steps(x, weight, bias, ln_weight, ln_bias, *options):
    options = Options(*options)
    z, statistics = normalise(x, ln_weight, ln_bias, options, True, options.sm_margin)
    return F.linear(z, weight, bias), z, statistics


def backward_in_steps(dy, dz, x, weight, ln_weight, ln_bias, statistics, z, *options):
    *options, mask = options
    results = gradients(dy, dz, x, weight, ln_weight, ln_bias, statistics, z, Options(*options), tuple(mask))
    return tuple(_absent(x) if result is None else result for result in results)


@torch.library.register_fake("cunorm::norm_linear_forward", lib=_library)
def _forward_fake(x, weight, bias, ln_weight, ln_bias, operation, eps, dtype, *_):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    statistics = x.new_empty((1 + formulas.subtracts_mean(operation), *x.shape[:-1]), dtype=formulas.compute_dtype(x))
    return y, x.new_empty(x.shape, dtype=dtype), statistics


@torch.library.register_fake("cunorm::norm_linear_backward", lib=_library)
def _backward_fake(dy, dz, x, weight, ln_weight, ln_bias, statistics, z, *options):
    mask = options[-1]
    ln_dtype = x.dtype if ln_weight is None else ln_weight.dtype
    cols = x.shape[-1:]
    dln_bias = x.new_empty(cols, dtype=ln_dtype if ln_bias is None else ln_bias.dtype)
    dln_weight = x.new_empty(cols, dtype=ln_dtype)
    dweight = torch.empty_like(weight, memory_format=torch.preserve_format)
    results = (x.new_empty(x.shape), dweight, weight.new_empty(len(weight)), dln_weight, dln_bias)
    return tuple(result if wanted else _absent(x) for result, wanted in zip(results, mask, strict=True))


class NormLinear(torch.autograd.Function):
    """norm_linear_forward and its derivative; a backward pass that is to be differentiated goes in single steps."""

    @staticmethod
    def forward(*arguments):
        return norm_linear_forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ln_weight, ln_bias, *options = inputs
        _, z, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.options = Options(*options)
        kept = z if ctx.options.keep_normalized else None
        ctx.save_for_backward(statistics, x, weight, ln_weight, ln_bias, kept)

    @staticmethod
    def backward(ctx, dy, dz, _):
        mask = ctx.needs_input_grad[:5]
        statistics, *inputs, z = ctx.saved_tensors
        tensors = (*inputs, statistics, z)
        if torch.is_grad_enabled():
            results = gradients(dy, dz, *tensors, ctx.options, mask)
        else:
            results = norm_linear_backward(dy, dz, *tensors, *ctx.options, list(mask))
        wanted = [result if wants else None for result, wants in zip(results, mask, strict=True)]
        return *wanted, *[None] * len(ctx.options)


_library.impl("norm_linear", NormLinear.apply, "CompositeImplicitAutograd")
register_kernels(norm_linear_forward, NormLinear, CPU=forward_in_steps, CUDA=forward_in_steps)
for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear_backward", backward_in_steps, _device)  # made of differentiable steps
