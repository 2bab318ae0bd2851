"""The norm with its product over the ranks of a group as operators: what torch.compile and export see.

    torch.ops.cunorm.parallel_norm_linear -> (y, z, statistics, kept)             differentiable, once
    torch.ops.cunorm.parallel_norm_linear_forward -> (y, z, statistics, kept)     what is left of it in compiled code
    torch.ops.cunorm.parallel_norm_linear_backward -> (dx, dweight, dbias, dln_weight, dln_bias)

The group stands in them by its name, as in torch's own functional collectives. Options as in passes.py and
parallel_passes.py; what is not wanted is empty.
"""

from __future__ import annotations

import torch

from ..norm import formulas
from ..norm.operators import _absent, _library, register_kernels
from .exchange import ENABLED, compare, compares_always, group_of
from .parallel_passes import Forward, Ranks, _of_all, forward, gradients
from .passes import Options

_OPTIONS = (
    "str operation, float eps, ScalarType dtype, bool keep_normalized, int sm_margin, int backward_sm_margin, "
    "str group, int ranks, bool sequence, str returned, bool delayed, bool overlap_gather, bool bulk_gather, "
    "bool bulk_sum, bool overlap_sum, int wanted"
)
_FORWARD = (
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? ln_weight, Tensor? ln_bias, {_OPTIONS}) "
    "-> (Tensor y, Tensor z, Tensor statistics, Tensor kept)"
)
_library.define(f"parallel_norm_linear{_FORWARD}")
_library.define(f"parallel_norm_linear_forward{_FORWARD}")
_library.define(
    "parallel_norm_linear_backward(Tensor? dy, Tensor? dz, Tensor x, Tensor weight, Tensor? ln_weight, "
    f"Tensor? ln_bias, Tensor statistics, Tensor? kept, {_OPTIONS}, bool[5] output_mask) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)"
)
norm_linear = torch.ops.cunorm.parallel_norm_linear.default
norm_linear_forward = torch.ops.cunorm.parallel_norm_linear_forward.default
norm_linear_backward = torch.ops.cunorm.parallel_norm_linear_backward.default

_compared: dict[tuple, bool] = {}  # whether with gradients enabled


def _split(options) -> tuple[Options, Ranks]:
    count = len(Options._fields)
    return Options(*options[:count]), Ranks(*options[count:])


def _forward_run(x, weight, bias, ln_weight, ln_bias, *options):
    options, ranks = _split(options)
    _compare_once(x, weight, options, ranks)
    found = forward(x, weight, bias, ln_weight, ln_bias, options, ranks)
    return tuple(_absent(x) if result is None else result for result in found)


def _compare_once(x, weight, options: Options, ranks: Ranks) -> None:
    """A compiled program knows no modules: what stands for the first call of one is that of a shape of weight."""
    key, enabled = (ranks.group, weight.shape), bool(ranks.wanted & ENABLED)
    before = _compared.get(key)
    if before is not None and before >= enabled and not compares_always():
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _compared[key] = enabled or bool(before)
    rows = x.numel() // x.shape[-1]
    compare(group_of(ranks.group), rows, x.shape[-1], options.dtype, x.device, ranks.wanted, exact=True)


def _backward_run(dy, dz, x, weight, ln_weight, ln_bias, statistics, kept, *options):
    *options, mask = options
    results = gradients(dy, dz, x, weight, ln_weight, ln_bias, statistics, kept, *_split(options), tuple(mask))
    return tuple(_absent(x) if result is None else result for result in results)


@torch.library.register_fake("cunorm::parallel_norm_linear_forward", lib=_library)
def _forward_fake(x, weight, bias, ln_weight, ln_bias, *options):
    options, ranks = _split(options)
    of_all = _of_all(x, ranks) if ranks.sequence else tuple(x.shape)
    dtype = options.dtype
    shape = {"nothing": (0,), "local": tuple(x.shape), "gathered": of_all}[ranks.returned]
    statistics = (1 + formulas.subtracts_mean(options.operation), *x.shape[:-1])
    rows = of_all if not ranks.sequence else (ranks.size * (x.numel() // x.shape[-1]), x.shape[-1])
    return Forward(
        x.new_empty((*of_all[:-1], weight.shape[0]), dtype=dtype),
        x.new_empty(shape, dtype=dtype) if ranks.returned != "nothing" else _absent(x),
        x.new_empty(statistics, dtype=formulas.compute_dtype(x)),
        x.new_empty(rows, dtype=dtype) if options.keep_normalized else _absent(x),
    )


@torch.library.register_fake("cunorm::parallel_norm_linear_backward", lib=_library)
def _backward_fake(dy, dz, x, weight, ln_weight, ln_bias, statistics, kept, *options):
    cols = x.shape[-1:]
    ln_dtype = x.dtype if ln_weight is None else ln_weight.dtype
    results = (
        x.new_empty(x.shape),
        torch.empty_like(weight, memory_format=torch.preserve_format),
        weight.new_empty(len(weight)),
        x.new_empty(cols, dtype=ln_dtype),
        x.new_empty(cols, dtype=ln_dtype if ln_bias is None else ln_bias.dtype),
    )
    return tuple(result if wanted else _absent(x) for result, wanted in zip(results, options[-1], strict=True))


class NormLinear(torch.autograd.Function):
    """norm_linear_forward and its derivative."""

    @staticmethod
    def forward(*arguments):
        return norm_linear_forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ln_weight, ln_bias, *options = inputs
        _, z, statistics, kept = output
        ctx.options, ranks = _split(options)[0], _split(options)[1]
        ctx.ranks = ranks
        ctx.mark_non_differentiable(statistics, kept, *([z] if ranks.returned == "nothing" else []))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, ln_weight, ln_bias, statistics, kept if ctx.options.keep_normalized else None)

    @staticmethod
    def backward(ctx, dy, dz, *_):
        mask = ctx.needs_input_grad[:5]
        options = (*ctx.options, *ctx.ranks)
        results = norm_linear_backward(dy, dz, *ctx.saved_tensors, *options, list(mask))
        wanted = [result if wants else None for result, wants in zip(results, mask, strict=True)]
        return *wanted, *[None] * len(options)


_library.impl("parallel_norm_linear", NormLinear.apply, "CompositeImplicitAutograd")
register_kernels(norm_linear_forward, NormLinear, CPU=_forward_run, CUDA=_forward_run)
for _device in ("CPU", "CUDA"):
    _library.impl("parallel_norm_linear_backward", _backward_run, _device)
