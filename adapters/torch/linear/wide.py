"""Products in 16, 32 or 64 bits, of the tensors as they are."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..norm import checks, dispatch, launching
from ..norm.functional import HALF, given
from ..private import nothing_listens
from .exchange import in_turn
from .parallel import Ranks, Rows
from .step import (
    GATHERED,
    NOTHING,
    Inputs,
    Normalised,
    Products,
    Saved,
    Step,
    matrix,
    normalise,
    normalised_again,
    recipe_at_once,
)

# The multiplications of a product that takes a GPU longer than Python takes to ask cuBLASLt for it.
LARGE = 2**33


class Wide:
    scheme = None
    limits = None
    # In this order a z that is computed once more is freed before dz is allocated.
    product_first = True

    def check(self, function: str, inputs: Inputs, autocasts: bool) -> None:
        x, *others, _, _ = inputs
        for name, tensor in zip(("weight", "bias"), others, strict=True):
            if not autocasts and tensor is not None and tensor.dtype is not x.dtype:
                raise TypeError(
                    f"{function}: outside autocast input and {name} must have one dtype; got input of {x.dtype} and "
                    f"{name} of {tensor.dtype}. Convert one of them."
                )

    def read(self, inputs: Inputs, cast: torch.dtype | None) -> Inputs:
        """Return the tensors as products read them; autocast converts weight and bias to `cast`."""
        if cast is None:
            return inputs
        x, weight, bias, *norm_parameters = inputs
        return x, weight.to(cast), None if bias is None else bias.to(cast), *norm_parameters

    def recipe(self, x: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None, step: Step) -> Any:
        """Return the recipe of the norm's launch; None if the tensors cannot go straight to it."""
        return recipe_at_once(x, ln_weight, ln_bias, step.operation, step.dtype, step.sm_margin)

    def weights(self, weight: Tensor, wants_columns: bool, trained: bool, cached_weights: Any) -> tuple:
        """Return weight in the order of step.Weights."""
        return weight, None, weight, None

    def normalised(self, inputs: Inputs, step: Step, ranks: Ranks, recipe: Any, wants_statistics: bool) -> Normalised:
        x, _, _, ln_weight, ln_bias = inputs
        exchange = place = None
        if ranks.sequence:
            rows, cols = x.numel() // x.shape[-1], x.shape[-1]
            exchange = ranks.gathering(rows, cols, x, step.dtype, ranks.overlap_gather)
            place = exchange.place
        if recipe is None:
            z, statistics = normalise(x, ln_weight, ln_bias, step, wants_statistics, step.sm_margin, place)
        else:
            tensors = given(x, ln_weight, ln_bias)
            (z,), statistics = launching.forward_by(recipe, tensors, (), step.eps, wants_statistics, place)
        if exchange is None:
            return z, statistics, z
        exchange.start(z, not exchange.in_parts)
        return exchange, statistics, z

    def product(self, z: Tensor | Rows, weights: tuple, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if isinstance(z, Rows):
            if z.in_parts:
                return _product_in_parts(z, weights[0], bias)
            z = z.come()
        return linear(z, weights[0], bias)

    def results(self, normalised: Normalised, x: Tensor, step: Step, ranks: Ranks) -> tuple[Tensor | None, ...]:
        """Return what the call returns of z and what it keeps of Z, after the product."""
        gathered, _, z = normalised
        keeps, returned = step.keep_normalized, step.returned
        if ranks.alone:  # a z that is kept is a result too, as it has a derivative only then
            return z if keeps or returned != NOTHING else None, z if keeps else None
        whole = gathered if gathered is z else gathered.whole(keeps or returned == GATHERED)
        kept = whole if keeps else None
        if returned == NOTHING:
            return None, kept
        # The user may change what is returned, so it is a copy if the tensor is kept or belongs to an exchange.
        if returned == GATHERED:
            return (whole if kept is None else whole.clone()).view(ranks.shape_of_all(x)), kept
        return (z if whole is z and kept is None else z.clone()).view(x.shape), kept

    def products(self, dy: Tensor, saved: Saved, step: Step, ranks: Ranks, wants: tuple[bool, bool]) -> _Products:
        return _Products(dy, saved, step, ranks)


WIDE = Wide()


def linear(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return z weightᵀ + bias, by the algorithm of cuBLASLt that a table names if one does, without autograd."""
    if not has_algorithm(z, weight) or (bias is not None and not bias.is_contiguous()) or not nothing_listens():
        return F.linear(z, weight, bias)
    from ...linear import gemm

    rows, (outs, cols), index = z.numel() // z.shape[-1], weight.shape, z.get_device()
    with torch.cuda.device(index):
        y = z.new_empty(*z.shape[:-1], outs)
        pointers = z.data_ptr(), weight.data_ptr(), y.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        alignment = gemm.alignment_of(pointers[0] | pointers[1] | pointers[2] | of_bias)
        kind = gemm.kind_of_rows(rows, outs, cols, checks.dtype_name(z.dtype), bias is not None, alignment, index)
        product = gemm.of_thread.prepared(kind)
        if not product.is_there(of_bias):
            return F.linear(z, weight, bias)
        workspace = z.new_empty(product.workspace, dtype=torch.uint8)
        product.launch(*pointers, workspace.data_ptr(), torch.cuda.current_stream(index).cuda_stream)
    return y


def has_algorithm(z: Tensor, weight: Tensor) -> bool:
    """Return whether a product is large, and a table names an algorithm of cuBLASLt for it."""
    if z.numel() * len(weight) < LARGE or not z.is_cuda or not (z.is_contiguous() and weight.is_contiguous()):
        return False
    return _has_algorithm(z.numel() // z.shape[-1], *weight.shape, z.dtype, z.get_device())


@lru_cache(maxsize=1024)
def _has_algorithm(rows: int, outs: int, cols: int, dtype: torch.dtype, device_id: int) -> bool:
    if find_spec("nvmath") is None:  # else `bindings` would log that CuPy's products are others
        return False
    from ...linear import gemm

    kind = gemm.kind_of_rows(rows, outs, cols, checks.dtype_name(dtype), True, 16, device_id)
    return gemm.bindings() is not None and bool(gemm.measured(kind))


def _product_in_parts(gathering: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return y (all rows, out), with own rows first, while those of the others come in the order of `in_turn`."""
    exchange, rows = gathering.exchange, len(gathering.own)
    y = gathering.own.new_empty((exchange.ranks * rows, len(weight)))
    *others, own = in_turn(exchange.rank, exchange.ranks)
    for rank in (own, *others):
        _product(gathering.of(rank), weight.t(), bias, y[rank * rows : (rank + 1) * rows])
    return y


def _product(a: Tensor, b: Tensor, added: Tensor | None, out: Tensor | None) -> Tensor:
    """Return a b + added, written to `out` if that is given."""
    return torch.mm(a, b, out=out) if added is None else torch.addmm(added, a, b, out=out)


class _Products(Products):
    """The products of the tensors as they are. z is not computed once more if it was kept."""

    def __init__(self, dy: Tensor, saved: Saved, step: Step, ranks: Ranks):
        self.dtype = dy.dtype
        self._dy, self._saved, self._step, self._ranks = dy, saved, step, ranks
        # Each half needs one tensor of the size of z, unless z is kept anyway.
        self.extra_bytes = 0 if saved.kept is not None else saved.x.numel() * saved.x.element_size()
        self._rows: Tensor | None = None

    def begin_gathering(self) -> None:
        if self._ranks.sequence and self._saved.kept is None:
            self._gathering = self._gathered()

    def _gathered(self) -> Rows:
        x, ranks = self._saved.x, self._ranks
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        exchange = ranks.gathering(rows, cols, x, self._step.dtype, ranks.bulk_gather)
        exchange.start(normalised_again(self._saved, self._step, exchange.place))
        return exchange

    @property
    def _z(self) -> Tensor:
        """Return Z, (all rows, in)."""
        if self._rows is None:
            kept = self._saved.kept
            if kept is not None:
                self._rows = matrix(kept, len(self._dy))
            elif not self._ranks.sequence:
                self._rows = normalised_again(self._saved, self._step)
            else:
                self._rows = self._gathered().whole() if self._gathering is None else self._gathering.come()
        return self._rows

    def dz(self, total: Rows, added: Tensor | None) -> None:
        dy, weight, place = self._dy, self._saved.weight, total.place
        if not total.in_parts:
            return total.start(_product(dy, weight, added, place))
        exchange = total.exchange
        rows = len(dy) // exchange.ranks
        for rank in in_turn(exchange.rank, exchange.ranks):
            part = slice(rank * rows, (rank + 1) * rows)
            _product(dy[part], weight, None if added is None else added[part], place[part])
            total.send(rank)

    def weight(self) -> Tensor:
        """Return dyᵀ Z, laid out as weight is because autograd would copy another layout."""
        by_rows = self._saved.weight.stride(1) == 1
        return torch.mm(self._dy.t(), self._z) if by_rows else torch.mm(self._z.t(), self._dy).t()

    def bias(self) -> Tensor:
        return launching.column_sums(self._dy) if dispatch.launchable(self._dy) else self._dy.sum(0)

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        accumulate(total, self._dy[:, rows], self._z, overwrite)

    def release(self) -> None:
        self._rows = None


def accumulate(total: Tensor, dy: Tensor, z: Tensor, overwrite: bool) -> None:
    """Add dyᵀ z to `total`, or write it with `overwrite`, in the product itself, also from 16 bits to float32."""
    beta = 0 if overwrite else 1
    if total.dtype is dy.dtype:
        torch.addmm(total, dy.t(), z, beta=beta, out=total)
    elif total.is_cuda and total.dtype is torch.float32 and dy.dtype in HALF:
        torch.addmm(total, dy.t(), z, torch.float32, beta=beta, out=total)
    else:  # the CPU has no such product
        wide = torch.promote_types(total.dtype, dy.dtype)
        product = dy.t().to(wide) @ z.to(wide)
        total.copy_(product if overwrite else product.add_(total))
