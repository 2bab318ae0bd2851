"""One text for all numbers and ranks computes a norm with its product, y = norm(x) weightᵀ + bias, and its gradients.

    z = norm(x)    Z = ranks.gather(z)    y = numbers.product(Z, weight) + bias
    dZ = numbers.product(dy, weight)    dz = ranks.sum(dZ)    dweight = numbers.product(dyᵀ, Z)    dx = norm'(dz)

`numbers` are those of the tensors (wide.py) or of 8 bits (float8.py); `ranks` are one, or those of a group (ranks.py).
Nothing here is recorded by autograd, but that a backward pass of wide numbers is made of differentiable operators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..norm import calls, dispatch, launching, repeats
from ..norm.functional import autocasts, given, nothing_else_listens
from .parallel import Ranks, Rows

NOTHING, LOCAL, GATHERED = "nothing", "local", "gathered"


class Step(NamedTuple):
    """The options that decide what a call computes; over which ranks is told beside it."""

    operation: str  # a name of cunorm.operation.NAMED
    eps: float
    dtype: torch.dtype  # of the normalised tensor and of y
    keep_normalized: bool = False
    sm_margin: int = 0  # of the norm's kernels in the forward pass
    backward_sm_margin: int = 0  # in the backward one, where z may be computed once more
    returned: str = LOCAL  # which z is returned: NOTHING, LOCAL or GATHERED
    weight_dtype: torch.dtype | None = None  # of the gradients of weight and bias in 8 bits
    bias_dtype: torch.dtype | None = None  # None without a bias
    numbers: Any = None


# Those that are made at every call are plain tuples: a NamedTuple takes 0.3 us.
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, ln_weight, ln_bias
# What `product` of the same numbers reads of Z, the statistics, and what `results` of them reads after the product.
Normalised = tuple[Any, Tensor | None, Any]
# y, z as `returned` says (of one rank also where it is kept), the statistics, what is kept.
Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class Weights(NamedTuple):
    """weight as the product of y reads it and as that of dz does; None where no gradient is asked for."""

    rows: Tensor
    row_scale: Tensor | None
    columns: Tensor | None
    column_scale: Tensor | None


class Saved(NamedTuple):
    """The tensors that a backward pass reads of its forward pass, in the order of norm/nodes_autograd.h."""

    statistics: Tensor
    x: Tensor
    weight: Tensor | None  # `columns` of Weights
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    kept: Tensor | None = None  # Z, if it is kept; its scale, where that is one for the tensor
    scale: Tensor | None = None  # `column_scale` of Weights


class ProductGradients(Protocol):
    """Computes the gradients of weight and bias of one backward pass when they are asked for."""

    dtype: torch.dtype  # of y, and so of dy

    def weight(self) -> Tensor:
        """Return dyᵀ Z, (out, in)."""
        ...

    def bias(self) -> Tensor:
        """Return Σ dy, (out,)."""
        ...

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        """Add these rows of weight's gradient to `total`, or write them where `overwrite`."""
        ...


class Products(ProductGradients, Protocol):
    """Both products of a backward pass in one kind of numbers."""

    extra_bytes: int  # that both halves of the pass hold at once beyond what one after the other does
    operands_of_dz: Any  # which `end_dz` lets go

    def begin_gathering(self) -> None:
        """Begin to gather Z of all rows, which comes meanwhile."""
        ...

    def dz(self, total: Rows, added: Tensor | None) -> None:
        """Begin `total`, dy weight + added, summed over the ranks."""
        ...

    def end_dz(self) -> None:
        """Prepare for the gradients of weight and bias: dz is not asked for any more."""
        ...

    def release(self) -> None:
        """Let Z go: the gradients of weight and bias are not asked for any more either."""
        ...

    def end_gathering(self) -> None:
        """Wait until nothing of Z is under way any more."""
        ...


# What takes the gradients of weight and bias in autograd's place; it returns what autograd is told, None for nothing.
Sink = Callable[[ProductGradients], tuple[Tensor | None, Tensor | None]]


def forward(
    inputs: Inputs, weights: Any, step: Step, ranks: Ranks, recipe: Any = None, wants_statistics: bool = True
) -> Forward:
    """Return y, and what is wanted besides. `recipe` of the norm's launch is `numbers.recipe` of these tensors."""
    x, _, bias, _, _ = inputs
    numbers = step.numbers
    normalised = numbers.normalised(inputs, step, ranks, recipe, wants_statistics)
    y = numbers.product(normalised[0], weights, bias, step.dtype)
    if y.dim() != x.dim():
        y = y.view(*ranks.shape_of_all(x)[:-1], y.shape[-1])
    returned, kept = numbers.results(normalised, x, step, ranks)
    return y, returned, normalised[1], kept


def gradients(
    dy: Tensor | None,
    dz: Tensor | None,
    saved: Saved,
    step: Step,
    ranks: Ranks,
    mask: tuple[bool, bool, bool, bool, bool],
    sink: Sink | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias, ln_weight and ln_bias, None where not wanted.

    dy is (..., out), over ranks never None; dz is that of the z which is returned.

    One rank has one half of the pass after the other, in the order that `numbers` hold least in, or both side by side.
    Over a group dz is summed while the gradient of weight is computed.
    """
    norm_mask = mask[0], mask[3], mask[4]
    wants_norm = any(norm_mask)
    x = saved.x
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    products: Products | None = None
    if dy is not None:
        dy = matrix(dy, rows * ranks.size if ranks.sequence else rows)
        wants = mask[1] or sink is not None, mask[2] or (sink is not None and step.bias_dtype is not None)
        products = step.numbers.products(dy, saved, step, ranks, wants)
    # The gradient of what is returned of one rank, or of all rows, is summed with the rest.
    summed_dz, own_dz = (dz, None) if ranks.alone or step.returned == GATHERED else (None, dz)

    def begin_dz() -> Rows | None:
        if products is None or not (wants_norm or ranks.sums):
            return None
        total = ranks.summing(rows, cols, dy)
        products.dz(total, None if summed_dz is None else matrix(summed_dz, len(dy)))
        return total

    def norm_half(total: Rows | None) -> tuple[Tensor | None, ...]:
        if total is None:
            if dz is None or not wants_norm:
                return None, None, None
            return norm_gradients(dz, False, saved, step, norm_mask)
        all_of_dz = total.result()
        if not wants_norm:
            return None, None, None
        if own_dz is not None:
            all_of_dz = all_of_dz.add_(matrix(own_dz, rows))
        if x.dim() != 2:
            all_of_dz = all_of_dz.view(x.shape)
        return norm_gradients(all_of_dz, True, saved, step, norm_mask)

    def product_half() -> tuple[Tensor | None, Tensor | None]:
        if products is None:
            return None, None
        products.end_dz()
        if sink is not None:
            of_product = sink(products)
        else:
            of_product = products.weight() if mask[1] else None, products.bias() if mask[2] else None
        products.release()
        return of_product

    if not ranks.alone:
        if (wants[0] or ranks.gathers) and not (ranks.delayed and sink is not None):
            products.begin_gathering()
        total = begin_dz()
        of_product = product_half()
        of_norm = norm_half(total)
        if total is not None:
            total.end()
        products.end_gathering()
    elif products is not None and runs_side_by_side(x, products.extra_bytes):
        operands = products.operands_of_dz  # what one half reads may not be written by the other
        if step.numbers.product_first:
            of_product, of_norm = side_by_side(x, product_half, lambda: norm_half(begin_dz()))
        else:
            of_norm, of_product = side_by_side(x, lambda: norm_half(begin_dz()), product_half)
        del operands
    elif step.numbers.product_first:
        of_product = product_half()
        of_norm = norm_half(begin_dz())
    else:
        of_norm = norm_half(begin_dz())
        of_product = product_half()
    (dweight, dbias), (dx, dln_weight, dln_bias) = of_product, of_norm
    if dln_bias is not None and saved.ln_bias is not None:
        dln_bias = in_dtype(dln_bias, saved.ln_bias.dtype)
    return dx, dweight, dbias, dln_weight, dln_bias


# Two halves of a backward pass side by side are what a CUDA graph wins by a second stream. The gradients of weight and
# bias and those of the norm need nothing of each other: the small kernels of one half fit beside the product of the
# other, and two products that do not fill the GPU beside each other. Only in a graph: outside one the host is what
# takes the time of small problems, and events would add to it. Measured: docs/tuning.md, LayerNormLinear.

MOST_EXTRA_BYTES = 128 << 20  # that may be held at once beyond what one half after the other holds

_streams: dict[tuple[int, int], Any] = {}


def runs_side_by_side(x: Tensor, extra_bytes: int) -> bool:
    return x.is_cuda and extra_bytes <= MOST_EXTRA_BYTES and torch.cuda.is_current_stream_capturing()


def side_by_side(x: Tensor, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Return (first(), second()), the first on a second stream of the device of x."""
    # Whatever the second stream allocates it reuses only behind another wait for the present stream: there is one for
    # each, and all that was freed meanwhile was used in its order.
    present = torch.cuda.current_stream(x.device)
    key = (x.get_device(), present.cuda_stream)
    second_stream = _streams.get(key)
    if second_stream is None:
        second_stream = _streams[key] = torch.cuda.Stream(x.device)
    second_stream.wait_stream(present)
    with torch.cuda.stream(second_stream):
        of_first = first()
    of_second = second()
    present.wait_stream(second_stream)
    return of_first, of_second


# The norm and its gradients, which are the same of all numbers.


def normalise(
    x, ln_weight, ln_bias, step: Step, wants_statistics: bool, sm_margin: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return (z, statistics), statistics None unless wanted; z has the same bits every time.

    `out`: where z is written, contiguous and with as many elements, in a shape of its own.
    """
    operation, eps, dtype, *_ = step
    if not torch.is_grad_enabled():
        recipe = recipe_at_once(x, ln_weight, ln_bias, operation, dtype, sm_margin)
        if recipe is not None:
            tensors = given(x, ln_weight, ln_bias)
            (z,), statistics = launching.forward_by(recipe, tensors, (), eps, wants_statistics, out)
            return z, statistics
    margins = (sm_margin, step.backward_sm_margin, sm_margin)
    call = calls.affine_call(operation, ln_weight, ln_bias, dtype, margins)
    (z,), statistics = dispatch.by_operator(call, given(x, ln_weight, ln_bias), (), eps, wants_statistics)
    return z if out is None else out.copy_(z.view(out.shape)), statistics


def recipe_at_once(
    x, ln_weight, ln_bias, operation: str, dtype: torch.dtype, sm_margin: int
) -> launching.Forward | None:
    """Return the recipe of the norm's launch; None where the tensors cannot go straight to it."""
    key = ("normalise", operation, dtype, sm_margin, x.shape, ln_weight is None, ln_bias is None)
    tensors = given(x, ln_weight, ln_bias)
    recipe = repeats.known_call(key, tensors)
    if recipe is not None and nothing_else_listens():
        return recipe
    if not dispatch.at_once(tensors):
        return None
    call = calls.affine_call(operation, ln_weight, ln_bias, dtype, (sm_margin,) * 3)
    recipe = launching.recipe_of(call, tensors, sm_margin)
    repeats.remember_call(key, tensors, recipe)
    return recipe


def norm_gradients(dz: Tensor, own: bool, saved: Saved, step: Step, mask: tuple[bool, bool, bool]):
    """Return the gradients of the norm. `own`: nobody else holds dz, so dx may take its memory."""
    statistics, x, _, ln_weight, *_ = saved
    operation, eps, sm_margin = step.operation, step.eps, step.backward_sm_margin
    return dispatch.affine_gradients(operation, dz, x, statistics, ln_weight, eps, mask, sm_margin, in_place=own)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert by `to`, which takes 2 us of the host where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def matrix(tensor: Tensor, rows: int) -> Tensor:
    """Make (rows, columns) of it as products read it: an expanded gradient would be copied by every one."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(rows, tensor.shape[-1])
    return tensor.contiguous()


_UNCHANGED = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager:
    """Switch autocast off: products of a backward pass have the dtypes that those of the forward pass had."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else _UNCHANGED
