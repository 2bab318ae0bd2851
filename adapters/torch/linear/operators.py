"""The norm with its product as operators, one for each pass, which torch.compile and export see.

    torch.ops.cunorm.norm_linear -> (y, z, statistics, kept, columns, column_scale)          differentiable
    torch.ops.cunorm.norm_linear_forward -> the same                     what compiled code has in its place
    torch.ops.cunorm.norm_linear_backward -> (dx, dweight, dbias, dln_weight, dln_bias)

The names are those of step.py. The arguments have an FP8 recipe as the fields of its Scheme, with an empty `gradient`
for wide numbers, and a group as its name, as torch's own functional collectives do, with an empty name for one rank.
A result that is not wanted is empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..norm import formulas
from ..norm.operators import _absent, _library, register_kernels
from .exchange import ENABLED, SUM, compare, compares_always, group_of
from .float8 import Float8, quantised
from .float8_arithmetic import DTYPES
from .parallel import ALONE, Group, Ranks
from .planned import run_again
from .recipes import E4M3, Scheme, check_available
from .step import GATHERED, LOCAL, NOTHING, Saved, Step, forward, gradients
from .wide import WIDE

_OPTIONS = (
    "str operation, float eps, ScalarType dtype, bool keep_normalized=False, int sm_margin=0, "
    "int backward_sm_margin=0, str returned='local', ScalarType? weight_dtype=None, ScalarType? bias_dtype=None, "
    "bool by_row=False, str gradient='', bool[] power_2=[], float[] least=[], bool[] fast=[], "
    "bool high_precision_wgrad=False, str group='', int ranks=1, bool sequence=False, bool delayed=False, "
    "bool overlap_gather=False, bool bulk_gather=False, bool bulk_sum=False, bool overlap_sum=False, int wanted=0"
)
_FORWARD = (
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor? ln_weight, Tensor? ln_bias, {_OPTIONS}) "
    "-> (Tensor y, Tensor z, Tensor statistics, Tensor kept, Tensor columns, Tensor column_scale)"
)
_library.define(f"norm_linear{_FORWARD}")
_library.define(f"norm_linear_forward{_FORWARD}")
_library.define(
    "norm_linear_backward(Tensor? dy, Tensor? dz, Tensor statistics, Tensor x, Tensor? weight, Tensor? ln_weight, "
    f"Tensor? ln_bias, Tensor? kept, Tensor? scale, bool[5] output_mask, {_OPTIONS}) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dln_weight, Tensor dln_bias)"
)
norm_linear = torch.ops.cunorm.norm_linear.default
norm_linear_forward = torch.ops.cunorm.norm_linear_forward.default
norm_linear_backward = torch.ops.cunorm.norm_linear_backward.default

# torch leaves out the last arguments of a call if they are the defaults.
_DEFAULTS = (False, 0, 0, LOCAL, None, None, False, "", [], [], [], False, "", 1, *[False] * 6, 0)
_OF_STEP = len(Step._fields) - 1  # how many arguments a Step has; those of `numbers` follow
_OF_NUMBERS = len(Scheme._fields)
_compared: dict[tuple, bool] = {}  # by group and shape, whether the ranks were compared with gradients enabled


def flat(step: Step, ranks: Ranks, wanted: int) -> tuple:
    """Return the arguments of an operator; `wanted` is what some rank wants, or this one if the operator compares."""
    scheme = step.numbers.scheme
    numbers = (False, "", [], [], [], False)
    if scheme is not None:
        by_row, gradient, *triples, high_precision = scheme
        numbers = (by_row, gradient, *map(list, triples), high_precision)
    group = ("", 1, *[False] * 6) if ranks.alone else ranks[:-1]
    return *step[:-1], *numbers, *group, wanted


def _read(options: tuple) -> tuple[Step, Ranks, int]:
    """Return what `flat` was given."""
    options = (*options, *_DEFAULTS[len(options) - 3 :])
    step, numbers, group = options[:_OF_STEP], options[_OF_STEP:][:_OF_NUMBERS], options[_OF_STEP + _OF_NUMBERS :]
    by_row, gradient, *triples, high_precision = numbers
    scheme = Scheme(by_row, gradient, *map(tuple, triples), high_precision) if gradient else None
    ranks = Group(*group) if group[0] else ALONE
    return Step(*step, WIDE if scheme is None else Float8(scheme)), ranks, group[-1]


def forward_in_steps(x, weight, bias, ln_weight, ln_bias, *options):
    step, ranks, wanted = _read(options)
    if step.numbers is not WIDE:
        check_available("LayerNormLinear", x)
    if not ranks.alone:
        _compare_once(x, weight, step, ranks)
    inputs = x, weight, bias, ln_weight, ln_bias
    is_wide = step.numbers is WIDE and ranks.alone
    if is_wide and not wanted and step.returned == NOTHING and not step.keep_normalized:
        planned = run_again(inputs, step)
        if planned is not None:
            y, statistics = planned
            return _present(x, (y, None, statistics, None, None, None))
    weights = step.numbers.weights(weight, bool(wanted & SUM), True, lambda *given: quantised(*given[:3]))
    y, z, statistics, kept = forward(inputs, weights, step, ranks)
    if kept is z:
        kept = None
    _, _, columns, scale = weights
    if columns is weight:
        columns = None
    return _present(x, (y, z, statistics, kept, columns, scale))


def _present(x: Tensor, results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the results as an operator does, with an empty tensor for None."""
    return tuple(_absent(x) if result is None else result for result in results)


def _compare_once(x: Tensor, weight: Tensor, step: Step, ranks: Group) -> None:
    """Compare the ranks at the first call with a shape of weight, as a compiled program knows no modules."""
    key, enabled = (ranks.group, weight.shape), bool(ranks.wanted & ENABLED)
    compared_enabled = _compared.get(key)
    if compared_enabled is not None and compared_enabled >= enabled and not compares_always():
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _compared[key] = enabled or bool(compared_enabled)
    rows = x.numel() // x.shape[-1]
    compare(group_of(ranks.group), rows, x.shape[-1], step.dtype, x.device, ranks.wanted, exact=True)


def backward_in_steps(dy, dz, *arguments):
    saved, mask, options = Saved(*arguments[:7]), arguments[7], arguments[8:]
    step, ranks, _ = _read(options)
    if dy is None and not ranks.alone:  # the other ranks wait for the products of this one
        dy = saved.x.new_zeros((*ranks.shape_of_all(saved.x)[:-1], len(saved.weight)), dtype=step.dtype)
    return _present(saved.x, gradients(dy, dz, saved, step, ranks, tuple(mask)))


@torch.library.register_fake("cunorm::norm_linear_forward", lib=_library)
def _forward_fake(x, weight, bias, ln_weight, ln_bias, *options):
    step, ranks, wanted = _read(options)
    outs, cols = weight.shape
    shape, full_shape, scheme = x.shape, ranks.shape_of_all(x), step.numbers.scheme

    def scale(*shape: int) -> Tensor:
        return x.new_empty(shape if scheme.by_row else (), dtype=torch.float32)

    z = kept = columns = column_scale = None
    if step.returned != NOTHING or (ranks.alone and step.keep_normalized and scheme is None):
        z = x.new_empty(full_shape if step.returned == GATHERED else shape, dtype=step.dtype)
    if scheme is None and step.keep_normalized and not ranks.alone:
        rows = (ranks.size * (x.numel() // cols), cols) if ranks.sequence else shape
        kept = x.new_empty(rows, dtype=step.dtype)
    if scheme is not None and not scheme.by_row:
        kept = scale()
    if scheme is not None and wanted & SUM:
        columns, column_scale = x.new_empty((cols, outs), dtype=DTYPES[E4M3]).t(), scale(1, cols)
    statistics = (1 + formulas.subtracts_mean(step.operation), *shape[:-1])
    y = x.new_empty((*full_shape[:-1], outs), dtype=step.dtype)
    statistics = x.new_empty(statistics, dtype=formulas.compute_dtype(x))
    return _present(x, (y, z, statistics, kept, columns, column_scale))


@torch.library.register_fake("cunorm::norm_linear_backward", lib=_library)
def _backward_fake(dy, dz, *arguments):
    (_, x, weight, ln_weight, ln_bias, *_), mask, options = arguments[:7], arguments[7], arguments[8:]
    step, _, _ = _read(options)
    cols = x.shape[-1:]
    outs = len(weight) if dy is None else dy.shape[-1]
    ln_dtype = x.dtype if ln_weight is None else ln_weight.dtype
    wide = step.numbers is WIDE
    results = (
        x.new_empty(x.shape),
        torch.empty_like(weight) if wide else x.new_empty((outs, *cols), dtype=step.weight_dtype),
        x.new_empty((outs,), dtype=step.dtype if wide else step.bias_dtype or step.dtype),
        x.new_empty(cols, dtype=ln_dtype),
        x.new_empty(cols, dtype=ln_dtype if ln_bias is None else ln_bias.dtype),
    )
    return _present(x, (result if wants else None for result, wants in zip(results, mask, strict=True)))


class NormLinear(torch.autograd.Function):
    """norm_linear_forward and its derivative, by single steps if the backward pass is to be differentiated."""

    @staticmethod
    def forward(*arguments):
        return norm_linear_forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ln_weight, ln_bias, *ctx.options = inputs
        _, z, statistics, kept, columns, column_scale = output
        step, ranks, wanted = _read(tuple(ctx.options))
        wide = step.numbers is WIDE
        has_z = step.returned != NOTHING or (wide and ranks.alone and step.keep_normalized)
        ctx.mark_non_differentiable(statistics, kept, columns, column_scale, *([] if has_z else [z]))
        ctx.set_materialize_grads(False)
        if wide:
            kept = None if not step.keep_normalized else z if ranks.alone else kept
            saved = Saved(statistics, x, weight, ln_weight, ln_bias, kept)
        else:
            kept = None if step.numbers.scheme.by_row else kept
            columns, column_scale = (columns, column_scale) if wanted & SUM else (None, None)
            saved = Saved(statistics, x, columns, ln_weight, ln_bias, kept, column_scale)
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, dy, dz, *_):
        mask, saved = ctx.needs_input_grad[:5], Saved(*ctx.saved_tensors)
        step, ranks, _ = _read(tuple(ctx.options))
        if torch.is_grad_enabled() and ranks.alone and step.numbers is WIDE:
            results = gradients(dy, dz, saved, step, ranks, mask)
        else:
            results = norm_linear_backward(dy, dz, *saved, list(mask), *ctx.options)
        wanted = [result if wants else None for result, wants in zip(results, mask, strict=True)]
        return *wanted, *[None] * len(ctx.options)


_library.impl("norm_linear", NormLinear.apply, "CompositeImplicitAutograd")
register_kernels(norm_linear_forward, NormLinear.apply, CPU=forward_in_steps, CUDA=forward_in_steps)
for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear_backward", backward_in_steps, _device)  # for wide numbers its steps are differentiable
