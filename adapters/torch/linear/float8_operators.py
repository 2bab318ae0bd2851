"""The norm with its product in FP8 as operators, one a pass: what torch.compile sees of it.

    torch.ops.cunorm.fp8_norm_linear -> (y, z, statistics, z_scale, columns, column_scale)      differentiable
    torch.ops.cunorm.fp8_norm_linear_forward -> the same                        what is left of it in compiled code
    torch.ops.cunorm.fp8_norm_linear_backward -> (dx, dweight, dbias, dln_weight, dln_bias)

Names as in float8_passes.py; the recipe's fields are constants of the call. What is not wanted is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norm import formulas
from ..norm.operators import _absent, _library, register_kernels
from .float8_casts import DTYPES
from .float8_context import check_available
from .float8_passes import Dtypes, Float8Options, Saved, forward, gradients
from .float8_weights import quantised
from .recipes import E4M3, Scheme

_OPTIONS = (
    "str operation, float eps, ScalarType dtype, bool by_row, str gradient, bool[] power_2, float[] least, "
    "bool[] fast, bool high_precision_wgrad, int sm_margin, int backward_sm_margin"
)
_FORWARD = (
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? ln_weight, Tensor? ln_bias, {_OPTIONS}, bool wants_z, "
    "bool wants_columns) -> (Tensor y, Tensor z, Tensor statistics, Tensor z_scale, Tensor columns, "
    "Tensor column_scale)"
)
_library.define(f"fp8_norm_linear{_FORWARD}")
_library.define(f"fp8_norm_linear_forward{_FORWARD}")
_library.define(
    "fp8_norm_linear_backward(Tensor? dy, Tensor? dz, Tensor x, Tensor columns, Tensor column_scale, "
    f"Tensor? ln_weight, Tensor? ln_bias, Tensor statistics, Tensor z_scale, {_OPTIONS}, ScalarType weight_dtype, "
    "ScalarType bias_dtype, bool[5] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)"
)
norm_linear = torch.ops.cunorm.fp8_norm_linear.default
norm_linear_forward = torch.ops.cunorm.fp8_norm_linear_forward.default
norm_linear_backward = torch.ops.cunorm.fp8_norm_linear_backward.default
OPTIONS = 11  # arguments that `flat` makes


def flat(options: Float8Options) -> tuple:
    """As operators take them."""
    operation, eps, dtype, (by_row, gradient, *triples, high_precision), *margins = options
    return operation, eps, dtype, by_row, gradient, *map(list, triples), high_precision, *margins


def _options(operation, eps, dtype, by_row, gradient, power_2, least, fast, high_precision, *margins) -> Float8Options:
    triples = map(tuple, (power_2, least, fast))
    return Float8Options(operation, eps, dtype, Scheme(by_row, gradient, *triples, high_precision), *margins)


def _forward(x, weight, bias, ln_weight, ln_bias, *others):
    *options, wants_z, wants_columns = others
    check_available("LayerNormLinear", x)
    options = _options(*options)
    weights = quantised(weight, options.scheme, wants_columns)
    y, z, statistics, z_scale = forward(x, weights, bias, ln_weight, ln_bias, options, True, wants_z)
    found = (y, z, statistics, z_scale, weights.columns, weights.column_scale)
    return tuple(_absent(x) if one is None else one for one in found)


def _backward(dy, dz, x, columns, column_scale, ln_weight, ln_bias, statistics, z_scale, *others):
    *options, weight_dtype, bias_dtype, mask = others
    saved = Saved(x, columns, column_scale, ln_weight, ln_bias, statistics, z_scale)
    results = gradients(dy, dz, saved, _options(*options), Dtypes(weight_dtype, bias_dtype), tuple(mask))
    return tuple(_absent(x) if result is None else result for result in results)


def listened_gradients(dy, dz, saved: Saved, options: Float8Options, dtypes: Dtypes, mask, _) -> list[Tensor | None]:
    """Computes what `gradients` does, by the operator, which a dispatch mode sees."""
    x, columns, column_scale, ln_weight, ln_bias, statistics, z_scale = saved
    columns, column_scale, z_scale = (_absent(x) if one is None else one for one in (columns, column_scale, z_scale))
    read = (dy, dz, x, columns, column_scale, ln_weight, ln_bias, statistics, z_scale)
    results = norm_linear_backward(*read, *flat(options), dtypes.weight, dtypes.bias or dtypes.weight, list(mask))
    return [result if wants else None for result, wants in zip(results, mask, strict=True)]


@torch.library.register_fake("cunorm::fp8_norm_linear_forward", lib=_library)
def _forward_fake(x, weight, bias, ln_weight, ln_bias, operation, eps, dtype, by_row, *others):
    *_, wants_z, wants_columns = others
    outs, cols = weight.shape
    leading = x.shape[:-1]

    def scale(*shape: int) -> Tensor:
        return x.new_empty(shape if by_row else (), dtype=torch.float32)

    return (
        x.new_empty((*leading, outs), dtype=dtype),
        x.new_empty(x.shape, dtype=dtype) if wants_z else _absent(x),
        x.new_empty((1 + formulas.subtracts_mean(operation), *leading), dtype=torch.float32),
        _absent(x) if by_row else scale(),
        x.new_empty((cols, outs), dtype=DTYPES[E4M3]).t() if wants_columns else _absent(x),
        scale(1, cols) if wants_columns else _absent(x),
    )


@torch.library.register_fake("cunorm::fp8_norm_linear_backward", lib=_library)
def _backward_fake(dy, dz, x, columns, column_scale, ln_weight, ln_bias, *others):
    *_, weight_dtype, bias_dtype, mask = others
    cols = x.shape[-1]
    outs = columns.shape[0] if dy is None else dy.shape[-1]
    ln_dtype = x.dtype if ln_weight is None else ln_weight.dtype
    results = (
        x.new_empty(x.shape),
        x.new_empty((outs, cols), dtype=weight_dtype),
        x.new_empty((outs,), dtype=bias_dtype),
        x.new_empty((cols,), dtype=ln_dtype),
        x.new_empty((cols,), dtype=ln_dtype if ln_bias is None else ln_bias.dtype),
    )
    return tuple(result if wanted else _absent(x) for result, wanted in zip(results, mask, strict=True))


class NormLinear(torch.autograd.Function):
    """fp8_norm_linear_forward and its derivative."""

    @staticmethod
    def forward(*arguments):
        return norm_linear_forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, ln_weight, ln_bias, *options = inputs
        _, _, statistics, z_scale, columns, column_scale = output
        ctx.mark_non_differentiable(statistics, z_scale, columns, column_scale)
        ctx.set_materialize_grads(False)
        ctx.options = options[:OPTIONS]
        ctx.dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.save_for_backward(x, columns, column_scale, ln_weight, ln_bias, statistics, z_scale)

    @staticmethod
    def backward(ctx, dy, dz, *_):
        mask = ctx.needs_input_grad[:5]
        results = norm_linear_backward(dy, dz, *ctx.saved_tensors, *ctx.options, *ctx.dtypes, list(mask))
        wanted = [result if wants else None for result, wants in zip(results, mask, strict=True)]
        return *wanted, *[None] * (OPTIONS + 2)


_library.impl("fp8_norm_linear", NormLinear.apply, "CompositeImplicitAutograd")
register_kernels(norm_linear_forward, NormLinear, CPU=_forward, CUDA=_forward)
for _device in ("CPU", "CUDA"):
    _library.impl("fp8_norm_linear_backward", _backward, _device)
