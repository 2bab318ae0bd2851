"""Exchange what products read and write between ranks of a group: rows are gathered, sums are scattered or go to all.

A matrix of all rows holds those of rank 0 first, then those of rank 1. `Exchange` uses torch.distributed's collectives,
on any backend. Nobody waits for a collective before its result is read.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..norm.functional import FLOATING
from ..private import group_of

# torch 2.13 has new names for these two, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class Rows:
    """Rows of a matrix on their way between ranks: each rank's own are gathered, or those for each rank are summed."""

    place: Tensor | None = None  # where this rank writes what it hands in; None for anywhere
    own: Tensor  # if rows are gathered, those of this rank, (rows, cols)
    in_parts: bool = False  # the product reads or writes the matrix rank by rank, in the order of `in_turn`
    exchange: Any = None

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        """Begin the exchange with all that this rank hands in.

        With `wanted_next` nothing is launched on the present stream before the result is read.
        """
        raise NotImplementedError

    def of(self, rank: int) -> Tensor:
        """Return the gathered rows of a rank, for later work on the present stream."""
        raise NotImplementedError

    def come(self) -> Tensor:
        """Return all gathered rows, (ranks * rows, cols), while other ranks may still read those of this one."""
        return self.whole()

    def whole(self, keep: bool = False) -> Tensor:
        """Return all gathered rows after the exchange has ended. With `keep` they outlast the next exchange."""
        raise NotImplementedError

    def send(self, rank: int) -> None:
        """Send the terms that `rank` sums, which stand in `place`. The ranks come in the order of `in_turn`."""
        raise NotImplementedError

    def result(self) -> Tensor:
        """Return the summed rows of this rank, to which nothing else refers."""
        raise NotImplementedError

    def end(self) -> None:
        """Wait, after the result, until the exchange has ended, for later work on the present stream."""


class OwnRows(Rows):
    """Rows of the only rank, which stay where they are: an exchange has ended when it begins."""

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        self.own = rows

    def of(self, rank: int) -> Tensor:
        return self.own

    def whole(self, keep: bool = False) -> Tensor:
        return self.own

    def send(self, rank: int) -> None:
        pass

    def result(self) -> Tensor:
        return self.own


# With fewer bytes of all rows NCCL works on the present stream, as a second stream would cost more than it gains.
# Measured: docs/tuning.md, several GPUs.
SECOND_STREAM_FROM = 16 << 20


def _is_async(rows: Tensor) -> bool:
    return not rows.is_cuda or rows.nbytes >= SECOND_STREAM_FROM


class Exchange:
    """An exchange by the collectives of torch.distributed."""

    def __init__(self, group: Any):
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def gathering(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype) -> Rows:
        return _Gathering(self, like.new_empty((self.ranks * rows, cols), dtype=dtype))

    def summing(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype) -> Rows:
        return _Summing(self, like.new_empty((self.ranks * rows, cols), dtype=dtype))

    def summing_for_all(self) -> Rows:
        return _SummingForAll(self)


class _Gathering(Rows):
    def __init__(self, exchange: Exchange, rows: Tensor):
        self.exchange, self._rows = exchange, rows
        self._count = rows.shape[0] // exchange.ranks
        self.place = self.own = self._part(exchange.rank)
        self._work: Any = None

    def _part(self, rank: int) -> Tensor:
        return self._rows.narrow(0, rank * self._count, self._count)

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        put(rows, self.own)
        is_async = not wanted_next and _is_async(self._rows)
        self._work = _all_gather(self._rows, self.own, group=self.exchange.group, async_op=is_async)

    def of(self, rank: int) -> Tensor:
        if rank != self.exchange.rank:
            self.come()
        return self._part(rank)

    def whole(self, keep: bool = False) -> Tensor:
        if self._work is not None:
            _wait(self._work)
            self._work = None
        return self._rows


class _Summing(Rows):
    def __init__(self, exchange: Exchange, terms: Tensor):
        self.exchange, self.place = exchange, terms
        self._sent = 0

    def send(self, rank: int) -> None:
        self._sent += 1
        if self._sent == self.exchange.ranks:
            self.start(self.place)

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        exchange, terms = self.exchange, self.place
        put(rows, terms)
        self._sum = terms.new_empty((len(terms) // exchange.ranks, terms.shape[1]))
        self._work = _reduce_scatter(self._sum, terms, group=exchange.group, async_op=_is_async(terms))

    def result(self) -> Tensor:
        _wait(self._work)
        return self._sum


class _SummingForAll(Rows):
    """Sums all rows, which every rank has, in place on every rank."""

    def __init__(self, exchange: Exchange):
        self.exchange = exchange

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        self._rows = rows
        self._work = dist.all_reduce(rows, group=self.exchange.group, async_op=_is_async(rows))

    def result(self) -> Tensor:
        _wait(self._work)
        return self._rows


def put(rows: Tensor, place: Tensor) -> None:
    """Copy rows to their place unless they were written there."""
    if rows is not place:
        place.copy_(rows)


def _wait(work: Any) -> None:
    """Wait for a collective, on the current stream for NCCL; None stands for one that has ended."""
    if work is not None:
        work.wait()


def in_turn(rank: int, ranks: int) -> list[int]:
    """Return the ranks in turn, from the one after this one to this one itself."""
    return [(rank + step) % ranks for step in range(1, ranks + 1)]


_exchanges: dict[str, Exchange] = {}


def exchange_by_collectives(name: str) -> Exchange:
    group = group_of(name)
    exchange = _exchanges.get(name)
    if exchange is None or exchange.group is not group:  # an earlier group may have had the name
        for old_name in [name for name, exchange in _exchanges.items() if not is_registered(exchange.group)]:
            del _exchanges[old_name]
        exchange = _exchanges[name] = Exchange(group)
    return exchange


def is_registered(group: Any) -> bool:
    """Return whether a group is the one that has its name, as it is until it is destroyed."""
    try:
        return group_of(group.group_name) is group
    except RuntimeError:
        return False


# Bits that say what a rank wants of the backward pass.
ENABLED = 1  # gradients are enabled
SUM = 2  # the gradient of z, summed over the ranks
GATHER = 4  # the gradient of weight, for which z of all rows is gathered
OF_TENSORS = 8  # the gradient of x; the next bits are those of weight, bias, ln_weight and ln_bias


def compare(
    group: Any, rows: int, cols: int, dtype: torch.dtype, device: torch.device, wanted: int, exact: bool
) -> int:
    """Compare the calls of all ranks and return what any rank wants; a collective.

    Every rank raises ValueError, which names all ranks, if rows, columns or dtypes differ, or if gradients are enabled
    on some ranks alone. With `exact` it also does if the ranks want different gradients.
    """
    own = torch.tensor([rows, cols, FLOATING.index(dtype), wanted], dtype=torch.int64, device=device)
    calls = own.new_empty((dist.get_world_size(group), 4))
    _all_gather(calls.view(-1), own, group=group)
    table = calls.tolist()
    shapes = [(rows, cols, FLOATING[index]) for rows, cols, index, _ in table]
    if len(set(shapes)) > 1:
        each = ", ".join(f"rank {rank}: {rows} x {cols}, {dtype}" for rank, (rows, cols, dtype) in enumerate(shapes))
        raise ValueError(
            f"LayerNormLinear: every rank of the group must call it with as many rows, of one length and dtype; got "
            f"{each}."
        )
    wishes = [row[3] for row in table]
    if len({wish & ENABLED for wish in wishes}) > 1:
        without = ", ".join(str(rank) for rank, wish in enumerate(wishes) if not wish & ENABLED)
        raise ValueError(
            "LayerNormLinear: gradients must be enabled on every rank of the group or on none, as the backward pass of "
            f"one rank waits for that of the others; got none on rank {without}. Use torch.no_grad() on every rank or "
            "on none."
        )
    if exact and len(set(wishes)) > 1:
        raise ValueError(
            "LayerNormLinear: with torch.compile and with parameters that are DTensors input and parameters must "
            "require gradients on every rank of the group alike; got others on rank "
            f"{', '.join(str(rank) for rank, wish in enumerate(wishes) if wish != wishes[0])} than on rank 0."
        )
    return functools.reduce(operator.or_, wishes)


def compares_always() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG=DETAIL has every call compared, not only a module's first."""
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
