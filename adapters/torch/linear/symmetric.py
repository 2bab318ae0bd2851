"""Exchange rows through torch's symmetric memory: each GPU pulls the others' rows by its copy engines.

Every rank of a group has a buffer of the same size that all the others can read. A rank writes its rows into its own
buffer and tells the others so (READY). Each of them pulls the rows that it wants on a second stream, and says that it
has them (TAKEN). The present stream waits for all of this before the exchange ends, so that the next exchange may write
the same buffer in any stream or CUDA graph. Multicast is not used.

If a rank waits longer than the group's timeout its CUDA context ends, and torch's kernel prints rank and channel.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import logs
from ..private import symmetric_memory, timeout_of
from .exchange import Exchange, Rows, in_turn, is_registered, put

READY, TAKEN = 0, 1  # channels of signals
# With fewer bytes of all rows ub_* change nothing, because the host's time for more launches would cost more than they
# gain. Measured: docs/tuning.md, several GPUs.
LEAST = 64 << 20
SHAPES = 256  # for how many shapes a buffer keeps views

_exchanges: dict[tuple[str, torch.device], tuple[Any, SymmetricExchange | None]] = {}


def worth(size: int) -> bool:
    """Return whether it is faster to exchange so many bytes during a product; if not, ub_* change nothing.

    The answer is the same on every rank that makes the same calls.
    """
    return size >= LEAST


def exchange(group: Any, device: torch.device) -> SymmetricExchange | None:
    """Return a group's exchange; None if torch.distributed must do it. The first call for a group is a collective."""
    key = (group.group_name, device)
    known_group, symmetric_exchange = _exchanges.get(key, (None, None))
    if known_group is group:
        return symmetric_exchange
    _refuse_capture(device)
    for old_key in [name for name, (old_group, _) in _exchanges.items() if not is_registered(old_group)]:
        del _exchanges[old_key]  # with its buffers
    reason = why_not(group, device)
    if reason:
        logs.fell_back("LayerNormLinear", "rows are exchanged by torch.distributed", reason)
    symmetric_exchange = None if reason else SymmetricExchange(group, device)
    _exchanges[key] = group, symmetric_exchange
    return symmetric_exchange


def why_not(group: Any, device: torch.device) -> str | None:
    """Return why ranks cannot reach each other's memory, the same on every rank; None if they can. A collective."""
    if device.type != "cuda":
        return f"tensors on {device.type} have no symmetric memory"
    host_and_gpu = (socket.gethostname(), _boot(), str(torch.cuda.get_device_properties(device).uuid))
    ranks = _gathered(group, host_and_gpu, device)
    reasons = _gathered(group, _unreached(ranks, device), device)
    return next((reason for reason in reasons if reason), None)


def _unreached(ranks: list[tuple[str, str, str]], device: torch.device) -> str | None:
    if symmetric_memory() is None:
        return f"torch {torch.__version__} has no symmetric memory as it was"
    if len({rank[:2] for rank in ranks}) > 1:
        return "the group spans several hosts"
    if len(set(ranks)) < len(ranks):
        return "two ranks share a GPU"
    count = torch.cuda.device_count()
    visible = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(count)}
    for _, _, uuid in ranks:  # if only its own rank sees a GPU, the rendezvous will fail
        peer = visible.get(uuid, device.index)
        if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            return f"GPU {device.index} cannot reach the memory of GPU {peer}"
    return None


def _boot() -> str:
    """Return an id of the host, which tells containers apart that have the same host name on two hosts."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.exists() else ""


def _gathered(group: Any, value: Any, device: torch.device) -> list[Any]:
    """Return the values of all ranks; a collective."""
    values = [None] * dist.get_world_size(group)
    with torch.cuda.device(device):
        dist.all_gather_object(values, value, group=group)
    return values


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "LayerNormLinear: buffers for ub_* must be made before a CUDA graph is captured; got a first call, or one "
            "of more rows than before, during capture. Call the module once with this shape before."
        )


class SymmetricExchange(Exchange):
    def __init__(self, group: Any, device: torch.device):
        super().__init__(group)
        self._timeout = timeout_of(group, device)
        self.others = in_turn(self.rank, self.ranks)[:-1]
        self.side = Side(device)
        self._of_rows, self._of_terms = Buffer(group, device), Buffer(group, device)

    def gathering(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype) -> _Gathering:
        return _Gathering(self, self._of_rows, rows, cols, dtype)

    def summing(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype) -> _Summing:
        return _Summing(self, self._of_terms, rows, cols, dtype)

    def tell(self, buffer: Buffer, rank: int, what: int) -> None:
        buffer.memory.put_signal(rank, what, self._timeout)

    def hear(self, buffer: Buffer, rank: int, what: int) -> None:
        buffer.memory.wait_signal(rank, what, self._timeout)


class Side:
    """The second stream. It has a high priority, as a signal must not wait until a product leaves it room."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._begin = torch.cuda.Event()  # a new one each time takes the host longer

    @contextmanager
    def after_present(self) -> Iterator[Callable[[], Any]]:
        """Launch what is launched inside on this stream, after all earlier work of the present stream.

        Yield a function that marks a point of this stream, for `wait`.
        """
        self._begin.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._begin)
        with torch.cuda.stream(self._stream):
            yield self._stream.record_event

    def wait(self, mark: Any) -> None:
        """Make the present stream wait for a point of this one."""
        torch.cuda.current_stream(self._stream.device).wait_event(mark)


class Buffer:
    """Memory on each rank that all ranks can read, of the same size everywhere, which grows with the matrices."""

    memory: Any  # of torch.distributed._symmetric_memory
    _own: Any  # this rank's tensor, which keeps the memory

    def __init__(self, group: Any, device: torch.device):
        self._group, self._device = group, device
        self._size = 0
        self._views: dict[tuple, list[Tensor]] = {}

    def of_ranks(self, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        """Return a matrix of this shape and dtype on each rank; a collective if there is not enough memory yet."""
        views = self._views.get((shape, dtype))
        if views is None:
            size = math.prod(shape) * dtype.itemsize
            if len(self._views) >= SHAPES:
                self._views.clear()
            if size > self._size:
                _refuse_capture(self._device)
                self.memory, self._own = allocate(size, self._group, self._device)
                self._size = size
                self._views.clear()
            ranks = range(dist.get_world_size(self._group))
            views = self._views[shape, dtype] = [self.memory.get_buffer(rank, shape, dtype) for rank in ranks]
        return views


def allocate(size: int, group: Any, device: torch.device) -> tuple[Any, Tensor | None]:
    """Return symmetric memory, and this rank's tensor of it.

    No exchange is under way on any rank, so that earlier memory may be freed.
    """
    empty, rendezvous = symmetric_memory()
    torch.cuda.synchronize(device)
    own = empty(size, dtype=torch.uint8, device=device)
    return rendezvous(own, group), own


class _Exchanged(Rows):
    """Rows of a matrix of all rows, which lies in the buffer of each rank."""

    def __init__(self, exchange: SymmetricExchange, buffer: Buffer, rows: int, cols: int, dtype: torch.dtype):
        self.exchange, self._buffer, self._rows = exchange, buffer, rows
        self._of_ranks = buffer.of_ranks((exchange.ranks * rows, cols), dtype)
        self._whole = self._of_ranks[exchange.rank]
        self._end: Any = None

    def _part(self, matrix: Tensor, rank: int) -> Tensor:
        return matrix[rank * self._rows : (rank + 1) * self._rows]

    def _greet(self) -> None:
        for rank in self.exchange.others:
            self.exchange.tell(self._buffer, rank, READY)
        for rank in self.exchange.others:
            self.exchange.hear(self._buffer, rank, READY)

    def _take_leave(self, mark: Callable[[], Any]) -> None:
        for rank in self.exchange.others:
            self.exchange.tell(self._buffer, rank, TAKEN)
        for rank in self.exchange.others:
            self.exchange.hear(self._buffer, rank, TAKEN)
        self._end = mark()

    def end(self) -> None:
        if self._end is not None:
            self.exchange.side.wait(self._end)


class _Gathering(_Exchanged):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.place = self.own = self._part(self._whole, self.exchange.rank)
        self._come: dict[int, Any] = {}

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        put(rows, self.own)
        with self.exchange.side.after_present() as mark:
            self._greet()
            for rank in self.exchange.others:
                self._part(self._whole, rank).copy_(self._part(self._of_ranks[rank], rank))
                self._come[rank] = mark()
            self._take_leave(mark)

    def of(self, rank: int) -> Tensor:
        if rank in self._come:
            self.exchange.side.wait(self._come[rank])
        return self._part(self._whole, rank)

    def come(self) -> Tensor:
        self.exchange.side.wait(self._come[self.exchange.others[-1]])
        return self._whole

    def whole(self, keep: bool = False) -> Tensor:
        self.end()
        return self._whole.clone() if keep else self._whole


class _Summing(_Exchanged):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.place = self._whole
        shape = (self._rows, self.place.shape[1])
        ranks = self.exchange.ranks
        # The memory belongs to the present stream, which uses it after the exchange.
        self._sum = self._whole.new_empty(shape)
        self._terms = self._whole.new_empty((ranks, *shape)) if ranks > 2 else None
        self._come: Any = None

    def start(self, rows: Tensor, wanted_next: bool = False) -> None:
        put(rows, self._whole)
        with self.exchange.side.after_present() as mark:
            self._greet()
            for sender in self.exchange.others:
                self._pull(sender)
            self._add(mark)
            self._take_leave(mark)

    def send(self, rank: int) -> None:
        """Send to the n-th rank after this one, while the n-th rank before this one sends here."""
        exchange, buffer = self.exchange, self._buffer
        with exchange.side.after_present() as mark:
            if rank == exchange.rank:
                self._add(mark)
                self._take_leave(mark)
                return
            sender = (2 * exchange.rank - rank) % exchange.ranks
            exchange.tell(buffer, rank, READY)
            exchange.hear(buffer, sender, READY)
            self._pull(sender)

    def _pull(self, sender: int) -> None:
        terms = self._sum if self._terms is None else self._terms[sender]
        terms.copy_(self._part(self._of_ranks[sender], self.exchange.rank))

    def _add(self, mark: Callable[[], Any]) -> None:
        """Add the terms in float32 (float64 for float64), in rank order, and round once.

        The kernel is small enough to run beside a product.
        """
        own = self._part(self._whole, self.exchange.rank)
        if self._terms is None:
            torch.add(own, self._sum, out=self._sum)
        else:
            self._terms[self.exchange.rank].copy_(own)
            torch.sum(self._terms, 0, out=self._sum)
        self._come = mark()

    def result(self) -> Tensor:
        self.exchange.side.wait(self._come)
        return self._sum
