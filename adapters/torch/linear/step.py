"""Compute a norm with its product, y = norm(x) weightᵀ + bias, and its gradients: one text for all numbers and ranks.

    z = norm(x)    Z = ranks.gather(z)    y = numbers.product(Z, weight) + bias
    dZ = numbers.product(dy, weight)    dz = ranks.sum(dZ)    dweight = numbers.product(dyᵀ, Z)    dx = norm'(dz)

`numbers` are those of the tensors (wide.py) or FP8 (float8.py). `ranks` are one rank or those of a group (parallel.py).
Autograd does not record what is done here, but a backward pass with wide numbers is made of differentiable operators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...call.store import Float8Store
from ...plan.problem import E4M3
from ..norm import calls, dispatch, launching, repeats
from ..norm.functional import autocasts, given, nothing_else_listens
from .parallel import Ranks, Rows

NOTHING, LOCAL, GATHERED = "nothing", "local", "gathered"


class Step(NamedTuple):
    """The options that decide what a call computes. The ranks are not among them."""

    operation: str  # a name of cunorm.operation.NAMED
    eps: float
    dtype: torch.dtype  # of the normalised tensor and of y
    keep_normalized: bool = False
    sm_margin: int = 0  # of the norm's kernels in the forward pass
    backward_sm_margin: int = 0  # the same in the backward pass, where z may be computed once more
    returned: str = LOCAL  # which z is returned: NOTHING, LOCAL or GATHERED
    weight_dtype: torch.dtype | None = None  # in FP8 the gradient of weight has this dtype
    bias_dtype: torch.dtype | None = None  # the same of bias; None without a bias
    numbers: Any = None


# Values that are made in every call are plain tuples: a NamedTuple takes 0.3 us.
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, ln_weight, ln_bias
# (what `numbers.product` reads of Z, the statistics, what `numbers.results` reads after the product)
Normalised = tuple[Any, Tensor | None, Any]
# (y, z, the statistics, what is kept of Z); one rank has z if it is returned or kept.
Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class Weights(NamedTuple):
    """weight as the product of y reads it, and as the product of dz does, which is None if no gradient is wanted."""

    rows: Tensor
    row_scale: Tensor | None
    columns: Tensor | None
    column_scale: Tensor | None


class Saved(NamedTuple):
    """The tensors that a forward pass saves for its backward pass, in the order of norm/nodes_autograd.h."""

    statistics: Tensor
    x: Tensor
    weight: Tensor | None  # `columns` of Weights
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    kept: Tensor | None = None  # Z if it is kept, or in FP8 the scale of Z if all of it has one scale
    scale: Tensor | None = None  # `column_scale` of Weights


class Products(Protocol):
    """The products of a backward pass in one kind of numbers; z is computed once more when one of them needs it."""

    dtype: torch.dtype  # of y, and so of dy
    extra_bytes: int  # memory that the two halves of the pass need side by side beyond what they need in turn
    _gathering: Rows | None = None  # Z of all rows, if it was begun to be gathered

    @property
    def operands_of_dz(self) -> Any:
        """Return the tensors that `end_dz` frees."""

    def begin_gathering(self) -> None:
        """Begin to gather Z of all rows."""

    def dz(self, total: Rows, added: Tensor | None) -> None:
        """Begin to compute `total`, which is dy weight + added, summed over the ranks."""

    def end_dz(self) -> None:
        """Prepare for the gradients of weight and bias, when dz is no longer needed."""

    def weight(self) -> Tensor:
        """Return dyᵀ Z, (out, in)."""

    def bias(self) -> Tensor:
        """Return Σ dy, (out,)."""

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        """Add these rows of weight's gradient to `total`, or write them where `overwrite`."""

    def release(self) -> None:
        """Free Z, when the gradients of weight and bias are no longer needed either."""

    def end_gathering(self) -> None:
        """Wait until the gathering of Z has ended."""
        if self._gathering is not None:
            self._gathering.whole()


# A function that takes the gradients of weight and bias in autograd's place. It returns the gradients that autograd
# gets instead, or None.
Sink = Callable[[Products], tuple[Tensor | None, Tensor | None]]


def forward(
    inputs: Inputs, weights: Any, step: Step, ranks: Ranks, recipe: Any = None, wants_statistics: bool = True
) -> Forward:
    """Return what `Forward` says. `recipe` is that of the norm's launch, `numbers.recipe` of these tensors."""
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
    """Return the gradients of x, weight, bias, ln_weight and ln_bias; None for one that is not wanted.

    dy is (..., out), and never None over a group. dz is the gradient of the z that is returned.

    One rank runs the two halves of the pass in turn, in the order of `numbers` that needs less memory, or side by side.
    A group sums dz over the ranks while each computes the gradient of weight.
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
    # The gradient of a returned z of one rank alone, or of all rows, is summed with the product.
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
        whole_dz = total.result()
        if not wants_norm:
            return None, None, None
        if own_dz is not None:
            whole_dz = whole_dz.add_(matrix(own_dz, rows))
        if x.dim() != 2:
            whole_dz = whole_dz.view(x.shape)
        return norm_gradients(whole_dz, True, saved, step, norm_mask)

    def product_half() -> tuple[Tensor | None, Tensor | None]:
        if products is None:
            return None, None
        products.end_dz()
        if sink is not None:
            results = sink(products)
        else:
            results = products.weight() if mask[1] else None, products.bias() if mask[2] else None
        products.release()
        return results

    if not ranks.alone:
        if (wants[0] or ranks.gathers) and not (ranks.delayed and sink is not None):
            products.begin_gathering()
        total = begin_dz()
        product_results = product_half()
        norm_results = norm_half(total)
        if total is not None:
            total.end()
        products.end_gathering()
    elif products is not None and runs_side_by_side(x, products.extra_bytes):
        operands = products.operands_of_dz  # their memory must not be reused while the other half reads them
        if step.numbers.product_first:
            product_results, norm_results = side_by_side(x, product_half, lambda: norm_half(begin_dz()))
        else:
            norm_results, product_results = side_by_side(x, lambda: norm_half(begin_dz()), product_half)
        del operands
    elif step.numbers.product_first:
        product_results, norm_results = product_half(), norm_half(begin_dz())
    else:
        norm_results, product_results = norm_half(begin_dz()), product_half()
    (dweight, dbias), (dx, dln_weight, dln_bias) = product_results, norm_results
    if dln_bias is not None and saved.ln_bias is not None:
        dln_bias = in_dtype(dln_bias, saved.ln_bias.dtype)
    return dx, dweight, dbias, dln_weight, dln_bias


# In a CUDA graph the two halves of a backward pass run side by side on two streams, as the gradients of weight and bias
# do not depend on those of the norm. The small kernels of one half fit beside the product of the other, and so do two
# products that do not fill the GPU. Outside a graph small problems wait for the host, and events would take it more
# time. Measured: docs/tuning.md, LayerNormLinear.

MOST_EXTRA_BYTES = 128 << 20  # with more extra memory the halves run in turn

_streams: dict[tuple[int, int], Any] = {}


def runs_side_by_side(x: Tensor, extra_bytes: int) -> bool:
    return x.is_cuda and extra_bytes <= MOST_EXTRA_BYTES and torch.cuda.is_current_stream_capturing()


def side_by_side(x: Tensor, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Return (first(), second()), where first() runs on a second stream of the device of x."""
    # Each present stream has a second stream of its own. Memory that the second stream allocates is reused only after
    # another wait for the present stream, so all uses of what was freed in between come before.
    present = torch.cuda.current_stream(x.device)
    key = (x.get_device(), present.cuda_stream)
    second_stream = _streams.get(key)
    if second_stream is None:
        second_stream = _streams[key] = torch.cuda.Stream(x.device)
    second_stream.wait_stream(present)
    with torch.cuda.stream(second_stream):
        first_results = first()
    second_results = second()
    present.wait_stream(second_stream)
    return first_results, second_results


# The norm and its gradients, which are the same for all numbers.


def normalise(
    x, ln_weight, ln_bias, step: Step, wants_statistics: bool, sm_margin: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return (z, statistics), with statistics None unless they are wanted; z has the same bits every time.

    z is written to `out` if that is given, a contiguous tensor of as many elements, whose shape may be another one.
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
    x, ln_weight, ln_bias, operation: str, dtype: torch.dtype | None, sm_margin: int, float8: bool = False
) -> launching.Forward | None:
    """Return the recipe of the norm's launch; None if the tensors cannot go straight to it.

    z has `dtype`. With `float8` the kernel writes FP8 with a scale for each row, and z only if `dtype` is given.
    """
    key = ("normalise", operation, dtype, sm_margin, x.shape, ln_weight is None, ln_bias is None, float8)
    tensors = given(x, ln_weight, ln_bias)
    recipe = repeats.known_call(key, tensors)
    if recipe is not None and nothing_else_listens():
        return recipe
    if not dispatch.at_once(tensors):
        return None
    store = Float8Store(E4M3, "row", dtype is not None) if float8 else None
    call = calls.affine_call(operation, ln_weight, ln_bias, dtype, (sm_margin,) * 3, store)
    recipe = launching.recipe_of(call, tensors, sm_margin)
    repeats.remember_call(key, tensors, recipe)
    return recipe


def normalised_again(saved: Saved, step: Step, place: Tensor | None = None) -> Tensor:
    """Return this rank's z, (rows, in), computed once more in the backward pass, in `place` if that is given."""
    _, x, _, ln_weight, ln_bias, *_ = saved
    z, _ = normalise(x, ln_weight, ln_bias, step, False, step.backward_sm_margin, place)
    return z if place is not None else matrix(z, x.numel() // x.shape[-1])


def norm_gradients(dz: Tensor, in_place: bool, saved: Saved, step: Step, mask: tuple[bool, bool, bool]):
    """Return the gradients of the norm. With `in_place` dx may take the memory of dz, as nothing else refers to it."""
    statistics, x, _, ln_weight, ln_bias, *_ = saved
    read = (step.operation, dz, x, statistics, ln_weight, step.eps, mask, step.backward_sm_margin)
    bias_dtype = None if ln_bias is None else ln_bias.dtype
    return dispatch.affine_gradients(*read, in_place=in_place, bias_dtype=bias_dtype)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor if it has another dtype, as `to` takes 2 us of the host even if there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def matrix(tensor: Tensor, rows: int) -> Tensor:
    """Return a contiguous tensor as (rows, columns), as every product would copy an expanded gradient."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(rows, tensor.shape[-1])
    return tensor.contiguous()


_UNCHANGED = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager:
    """Switch autocast off, as products of the backward pass must have the dtypes of those of the forward pass."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else _UNCHANGED
