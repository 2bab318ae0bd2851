"""The forward and the backward pass of a norm with its product over the ranks of a group, without autograd.

Each rank has some of the weight's rows. With sequence parallelism it also has its part of the rows of x (R_r):

    z_r = norm(x_r)          Z = rows of all ranks' z, in rank order          y = Z W_rᵀ + bias_r
    dZ = Σ over the ranks of dy W_r       dz_r = dZ[R_r]       dW_r = dyᵀ Z       dx_r = norm's backward of dz_r

Without it every rank has all rows of x and Z = norm(x); the sum over the ranks then reaches every rank whole. The
gradients of the norm's parameters are of the rows that the rank has: whoever trains adds them up over the ranks.

What the backward pass communicates depends on which gradients any rank wants, never on which it was given: a rank that
wants fewer, or uses its results differently from others, still takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from . import symmetric
from .exchange import GATHER, SUM, Exchange, Gathering, exchange_by_collectives, group_of, in_turn
from .passes import Options, Sink, _Product, in_dtype_of, matrix, norm_gradients, normalise


class Ranks(NamedTuple):
    """A call's place among the ranks, and how it communicates."""

    group: str  # its name, by which operators know it
    size: int
    sequence: bool  # x has the rows of this rank alone
    returned: str  # which z is returned: "nothing", "local" or "gathered"
    delayed: bool  # the gradient of weight is computed after the backward pass
    overlap_gather: bool  # forward: the product of own rows while the others come (ub_overlap_ag)
    bulk_gather: bool  # backward: z gathered under the product of dz (ub_bulk_dgrad)
    bulk_sum: bool  # backward: dz summed under the product of dW (ub_bulk_wgrad)
    overlap_sum: bool  # backward: the product of dz in parts, each sent when it is done (ub_overlap_rs_dgrad)
    wanted: int = 0  # what some rank wants of the backward pass: bits of exchange.py

    @property
    def gathers_returned(self) -> bool:
        return self.sequence and self.returned == "gathered"

    @property
    def gathers(self) -> bool:
        """True if some rank needs z of all rows for the gradient of weight."""
        return bool(self.wanted & GATHER)

    @property
    def sums(self) -> bool:
        """True if some rank needs the gradient of z."""
        return bool(self.wanted & SUM)


class Forward(NamedTuple):
    y: Tensor
    returned: Tensor | None
    statistics: Tensor | None
    kept: Tensor | None  # Z, if options.keep_normalized


def exchange_of(ranks: Ranks, overlaps: bool, like: Tensor) -> Exchange:
    """`overlaps`: a product runs meanwhile, and hiding the exchange under it wins."""
    if overlaps:
        found = symmetric.exchange(group_of(ranks.group), like.device)
        if found is not None:
            return found
    return exchange_by_collectives(ranks.group)


def takes_part(
    tensors: tuple[Tensor | None, ...], differentiated: bool, ranks: Ranks, sink: Sink | None
) -> tuple[Tensor | None, Sink | None]:
    """(anchor, sink) of a step of autograd. Where nothing of this rank requires a gradient `anchor` does, so that the
    step is there for the other ranks; a frozen weight has a sink where `backward_dw` is a collective.
    """
    anchor = None if differentiated else tensors[0].new_empty(0).requires_grad_()
    return anchor, sink if ranks.gathers or tensors[1].requires_grad else None


def forward(
    x, weight, bias, ln_weight, ln_bias, options: Options, ranks: Ranks, wants_statistics: bool = True
) -> Forward:
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    if not ranks.sequence:
        z, statistics = normalise(x, ln_weight, ln_bias, options, wants_statistics, options.sm_margin)
        kept = z if options.keep_normalized else None
        returned = None if ranks.returned == "nothing" else z if kept is None else z.clone()
        return Forward(F.linear(z, weight, bias), returned, statistics, kept)
    size = ranks.size * rows * cols * options.dtype.itemsize
    in_parts = ranks.overlap_gather and symmetric.worth(size)
    exchange = exchange_of(ranks, in_parts, x)
    gathering = exchange.gathering(rows, cols, x, options.dtype)
    _, statistics = normalise(x, ln_weight, ln_bias, options, wants_statistics, options.sm_margin, gathering.own)
    gathering.start(wanted_next=not in_parts)
    if in_parts:
        y = _product_in_parts(gathering, exchange, rows, weight, bias)
    else:
        y = F.linear(gathering.come(), weight, bias)
    returned = kept = None
    if options.keep_normalized or ranks.returned == "gathered":
        kept = gathering.whole(keep=True)
    else:
        gathering.whole()
    if ranks.returned == "local":
        returned = gathering.own.clone().view(x.shape)
    elif ranks.returned == "gathered":  # a second one, where the first is kept: the user may change his
        returned = (kept.clone() if options.keep_normalized else kept).view(_of_all(x, ranks))
    if x.dim() != 2:
        y = y.view(*_of_all(x, ranks)[:-1], weight.shape[0])
    return Forward(y, returned, statistics, kept if options.keep_normalized else None)


def _of_all(x: Tensor, ranks: Ranks) -> tuple[int, ...]:
    """The shape of all rows."""
    return ranks.size * x.shape[0], *x.shape[1:]


def _product_in_parts(gathering: Gathering, exchange: Exchange, rows: int, weight: Tensor, bias: Tensor | None):
    """y (all rows, out): own rows while the others come, then these in the order of the ranks after this one."""
    y = gathering.own.new_empty((exchange.ranks * rows, len(weight)))
    *others, own = in_turn(exchange.rank, exchange.ranks)
    for rank in (own, *others):
        z, part = gathering.of(rank), y[rank * rows : (rank + 1) * rows]
        if bias is None:
            torch.mm(z, weight.t(), out=part)
        else:
            torch.addmm(bias, z, weight.t(), out=part)
    return y


def gradients(
    dy: Tensor | None,
    dreturned: Tensor | None,
    x: Tensor,
    weight: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    statistics: Tensor,
    kept: Tensor | None,
    options: Options,
    ranks: Ranks,
    mask: tuple[bool, bool, bool, bool, bool],
    sink: Sink | None = None,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, ln_weight and ln_bias, None where not wanted."""
    wants_dx, wants_dweight, wants_dbias, *wants_ln = mask
    norm_mask = (wants_dx, *wants_ln)
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    all_rows = rows * ranks.size if ranks.sequence else rows
    dy = x.new_zeros((all_rows, len(weight)), dtype=options.dtype) if dy is None else matrix(dy, all_rows)

    ends: list[Callable[[], object]] = []

    def z_again() -> Callable[[], Tensor]:
        """Begins what makes z of all rows once more; a collective with sequence parallelism."""
        if kept is not None:
            return lambda: matrix(kept, all_rows)
        if not ranks.sequence:
            return lambda: matrix(normalise(x, ln_weight, ln_bias, options, False, options.backward_sm_margin)[0], rows)
        overlaps = ranks.bulk_gather and symmetric.worth(all_rows * cols * options.dtype.itemsize)
        exchange = exchange_of(ranks, overlaps, x)
        gathering = exchange.gathering(rows, cols, x, options.dtype)
        normalise(x, ln_weight, ln_bias, options, False, options.backward_sm_margin, gathering.own)
        gathering.start()
        if delayed:
            return gathering.whole
        ends.append(gathering.whole)
        return gathering.come

    delayed = ranks.delayed and sink is not None
    if delayed:
        again = lambda: z_again()()  # noqa: E731
    elif sink is not None or wants_dweight or ranks.gathers:
        again = z_again()
    else:
        again = None

    before = dreturned if ranks.gathers_returned else None  # the sum over the ranks
    total = _gradient_of_z(dy, weight, before, rows, ranks, ends) if any(norm_mask) or ranks.sums else None
    product = _Product(dy, again, weight)
    if sink is not None:
        dweight, dbias = sink(product)
    else:
        dweight = product.weight() if wants_dweight else None
        dbias = product.bias() if wants_dbias else None
    del product, again
    dx = dln_weight = dln_bias = None
    if total is not None:
        dz = total()
        if dreturned is not None and before is None:
            dz = dz.add_(matrix(dreturned, rows))
        if any(norm_mask):
            dz = dz.view(x.shape)
            dx, dln_weight, dln_bias = norm_gradients(dz, True, x, statistics, ln_weight, options, norm_mask)
    for end in ends:
        end()
    return dx, dweight, dbias, dln_weight, in_dtype_of(ln_bias, dln_bias)


def _gradient_of_z(
    dy: Tensor, weight: Tensor, before: Tensor | None, rows: int, ranks: Ranks, ends: list[Callable[[], object]]
) -> Callable[[], Tensor]:
    """Begins dZ = Σ over the ranks of dy W_r + `before`; its result is dz (rows, in) of the rows that this rank has.

    What must come at the end of the pass is added to `ends`.
    """
    if not ranks.sequence:
        return reduced(dy @ weight, rows, ranks)
    size = len(dy) * weight.shape[1] * dy.dtype.itemsize
    worth = symmetric.worth(size)
    in_parts = ranks.overlap_sum and worth
    exchange = exchange_of(ranks, worth and (ranks.bulk_sum or ranks.overlap_sum), dy)
    before = None if before is None else matrix(before, len(dy))
    summing = exchange.summing(rows, weight.shape[1], dy, dy.dtype)
    ends.append(summing.end)
    if not in_parts:
        _product_into(summing.terms, dy, weight, before)
        summing.start()
        return summing.result
    for rank in in_turn(exchange.rank, exchange.ranks):
        part = slice(rank * rows, (rank + 1) * rows)
        _product_into(summing.terms[part], dy[part], weight, None if before is None else before[part])
        summing.send(rank)
    return summing.result


def reduced(terms: Tensor, rows: int, ranks: Ranks) -> Callable[[], Tensor]:
    """Begins their sum over the ranks; its result is that of the rows that this rank has."""
    if not ranks.sequence:
        return exchange_of(ranks, False, terms).sum_for_all(terms)
    overlaps = (ranks.bulk_sum or ranks.overlap_sum) and symmetric.worth(terms.numel() * terms.element_size())
    exchange = exchange_of(ranks, overlaps, terms)
    summing = exchange.summing(rows, terms.shape[1], terms, terms.dtype)
    summing.terms.copy_(terms)
    summing.start()

    def result() -> Tensor:
        found = summing.result()
        summing.end()
        return found

    return result


def _product_into(out: Tensor, dy: Tensor, weight: Tensor, before: Tensor | None) -> None:
    if before is None:
        torch.mm(dy, weight, out=out)
    else:
        torch.addmm(before, dy, weight, out=out)
