"""The forward and the backward pass of a norm with its product, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..norm import dispatch, launching
from ..norm.functional import HALF, autocasts, given, nothing_else_listens
from . import side_by_side


class ProductGradients(Protocol):
    """The gradients of weight and bias of one backward pass, computed when they are asked for."""

    dtype: torch.dtype  # of y, and so of dy

    def weight(self) -> Tensor:
        """dyᵀ z, (out, in)."""
        ...

    def bias(self) -> Tensor:
        """Σ dy, (out,)."""
        ...

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        """total += those rows of weight's, or = where `overwrite`."""
        ...


# What takes the gradients of weight and bias in autograd's place; it returns what autograd is told, None for nothing.
Sink = Callable[[ProductGradients], tuple[Tensor | None, Tensor | None]]


class Options(NamedTuple):
    operation: str  # a name of cunorm.operation.NAMED
    eps: float
    dtype: torch.dtype  # of the normalised tensor, weight, bias and y
    keep_normalized: bool
    sm_margin: int = 0  # of the norm's kernels in the forward pass
    backward_sm_margin: int = 0  # in the backward one, where z may be computed once more


def normalise(
    x, ln_weight, ln_bias, options: Options, wants_statistics: bool, sm_margin: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(z, statistics), None for statistics unless wanted; z has the same bits every time.

    `out`: where z is written, contiguous and with as many elements, in a shape of its own.
    """
    operation, eps, dtype, *_ = options
    if not torch.is_grad_enabled():
        recipe = recipe_at_once(x, ln_weight, ln_bias, operation, dtype, sm_margin)
        if recipe is not None:
            (z,), statistics = launching.forward_by(
                recipe, given(x, ln_weight, ln_bias), (), eps, wants_statistics, out
            )
            return z, statistics
    margins = (sm_margin, options.backward_sm_margin, sm_margin)
    call = launching.affine_call(operation, ln_weight, ln_bias, dtype, margins)
    (z,), statistics = dispatch.by_operator(call, given(x, ln_weight, ln_bias), (), eps, wants_statistics)
    return z if out is None else out.copy_(z.view(out.shape)), statistics


def recipe_at_once(
    x, ln_weight, ln_bias, operation: str, dtype: torch.dtype, sm_margin: int
) -> launching.Forward | None:
    """That of the norm's launch; None where the tensors cannot go straight to it."""
    key = ("normalise", operation, dtype, sm_margin, x.shape, ln_weight is None, ln_bias is None)
    tensors = given(x, ln_weight, ln_bias)
    recipe = launching.known_call(key, tensors)
    if recipe is not None and nothing_else_listens():
        return recipe
    if not dispatch.at_once(tensors):
        return None
    call = launching.affine_call(operation, ln_weight, ln_bias, dtype, (sm_margin,) * 3)
    recipe = launching.recipe_of(call, tensors, sm_margin)
    launching.remember_call(key, tensors, recipe)
    return recipe


def gradients(
    dy: Tensor | None,
    dz: Tensor | None,
    x: Tensor,
    weight: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    statistics: Tensor,
    z: Tensor | None,
    options: Options,
    mask: tuple[bool, bool, bool, bool, bool],
    sink: Sink | None = None,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, ln_weight and ln_bias, None where not wanted.

    dweight = dyᵀ z, dbias = Σ dy, and with dz' = dy weight + dz the gradients of the norm. dweight comes first, so that
    a z that is computed once more is gone before dz' is there.
    """
    wants_dx, wants_dweight, wants_dbias, *wants_ln = mask
    rows = x.numel() // x.shape[-1]
    if dy is not None:
        dy = matrix(dy, rows)

    def again() -> Tensor:
        if z is not None:
            return matrix(z, rows)
        return matrix(normalise(x, ln_weight, ln_bias, options, False, options.backward_sm_margin)[0], rows)

    def of_product() -> tuple[Tensor | None, Tensor | None]:
        if dy is None:
            return None, None
        product = _Product(dy, again, weight)
        if sink is not None:
            return sink(product)
        return product.weight() if wants_dweight else None, product.bias() if wants_dbias else None

    def of_norm() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        norm_mask = (wants_dx, *wants_ln)
        if not any(norm_mask) or (dy is None and dz is None):
            return None, None, None
        if dy is None:
            return norm_gradients(dz, False, x, statistics, ln_weight, options, norm_mask)
        total = torch.mm(dy, weight) if dz is None else torch.addmm(matrix(dz, rows), dy, weight)
        if x.dim() != 2:
            total = total.view(x.shape)
        return norm_gradients(total, True, x, statistics, ln_weight, options, norm_mask)

    # Each half has one tensor of the size of z to itself, unless z is kept anyway.
    size = 0 if z is not None else x.numel() * x.element_size()
    (dweight, dbias), (dx, dln_weight, dln_bias) = side_by_side.run(x, size, of_product, of_norm)
    return dx, dweight, dbias, dln_weight, in_dtype_of(ln_bias, dln_bias)


def in_dtype_of(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else in_dtype(gradient, parameter.dtype)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`to`, which takes 2 us of the host where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class _Product:
    """ProductGradients of dy (rows, out), and of z (rows, in) that is computed once more when it is needed."""

    def __init__(self, dy: Tensor, again: Callable[[], Tensor], weight: Tensor):
        self.dtype = dy.dtype
        self._dy = dy
        self._again = again
        self._by_rows = weight.stride(1) == 1
        self._kept: Tensor | None = None

    @property
    def _z(self) -> Tensor:
        if self._kept is None:
            self._kept = self._again()
        return self._kept

    def weight(self) -> Tensor:
        """Laid out as weight is: autograd would copy another layout."""
        return torch.mm(self._dy.t(), self._z) if self._by_rows else torch.mm(self._z.t(), self._dy).t()

    def bias(self) -> Tensor:
        return bias_gradient(self._dy)

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        accumulate(total, self._dy[:, rows], self._z, overwrite)


def bias_gradient(dy: Tensor) -> Tensor:
    return launching.column_sums(dy) if dispatch.launchable(dy) else dy.sum(0)


def accumulate(total: Tensor, dy: Tensor, z: Tensor, overwrite: bool) -> None:
    """total += dyᵀ z, or = where `overwrite`: in the product itself (beta), also to float32 from 16 bits."""
    beta = 0 if overwrite else 1
    if total.dtype is dy.dtype:
        torch.addmm(total, dy.t(), z, beta=beta, out=total)
    elif total.is_cuda and total.dtype is torch.float32 and dy.dtype in HALF:
        torch.addmm(total, dy.t(), z, torch.float32, beta=beta, out=total)
    else:  # the CPU has no such product
        wide = torch.promote_types(total.dtype, dy.dtype)
        product = dy.t().to(wide) @ z.to(wide)
        total.copy_(product if overwrite else product.add_(total))


def norm_gradients(dz, own: bool, x, statistics, ln_weight, options: Options, mask):
    """The gradients of the norm; `own`: nobody else holds dz, so dx may take its memory."""
    operation, eps, *_, sm_margin = options
    return dispatch.affine_gradients(operation, dz, x, statistics, ln_weight, eps, mask, sm_margin, in_place=own)


def matrix(tensor: Tensor, rows: int) -> Tensor:
    """(rows, columns) as a product reads it: an expanded gradient would be copied by every one."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(rows, tensor.shape[-1])
    return tensor.contiguous()


NOTHING = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager:
    """The products of a backward pass have the dtypes that those of the forward pass had."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else NOTHING
