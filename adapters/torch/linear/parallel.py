"""Run a call on one rank, or over the ranks of a group, each of which has some rows of weight.

With sequence parallelism each rank of a group also has its part of the rows of x (R_r):

    z_r = norm(x_r)          Z = rows of all ranks' z, in rank order          y = Z W_rᵀ + bias_r
    dZ = Σ over the ranks of dy W_r       dz_r = dZ[R_r]       dW_r = dyᵀ Z       dx_r = norm's backward of dz_r

Without it every rank has all rows of x and Z = norm(x), and every rank gets the whole sum over the ranks. A rank's
gradients of the norm's parameters are those of its rows, and the trainer adds them up over the ranks.

What the backward pass communicates depends on which gradients any rank wants, never on which gradients it gets. A rank
that wants fewer, or uses its results differently from others, still takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import symmetric
from .exchange import (
    ENABLED,
    GATHER,
    SUM,
    Exchange,
    OwnRows,
    Rows,
    compare,
    compares_always,
    exchange_by_collectives,
    group_of,
)


class Limits(NamedTuple):
    """How error messages name a case that has first derivatives of plain tensors alone."""

    subject: str
    where: str
    remedy: str = ""


class Place:
    """The place of a module or of a call among ranks."""

    sequence = False  # x has the rows of this rank alone
    local: Callable[..., Any] | None = None  # takes a module's parameters and returns this rank's tensors of them

    def check_rows(self, function: str, x: Tensor) -> None:
        if self.sequence and x.dim() < 2:
            raise RuntimeError(
                f"{function}: with sequence parallelism input must have an axis of rows, (rows, ..., in); got shape "
                f"{tuple(x.shape)}."
            )

    def wanted_by(self, inputs: Sequence[Any]) -> int:
        """Return what this rank wants of the backward pass of (x, weight, bias, ln_weight, ln_bias), in bits."""
        if not torch.is_grad_enabled():
            return 0
        x, weight, _, ln_weight, ln_bias = inputs
        summed = any(tensor is not None and tensor.requires_grad for tensor in (x, ln_weight, ln_bias))
        return ENABLED | SUM * summed | GATHER * (self.sequence and weight.requires_grad)


class Alone(Place):
    """The place of a call that runs on one rank."""

    alone = True
    gathers = sums = False
    overlap_gather = bulk_gather = False
    wanted = 0
    limits = None

    def ranks(self) -> Alone:
        return self

    def agreed(self, wanted: int, x: Tensor, dtype: torch.dtype) -> Alone:
        return self

    def shape_of_all(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def gathering(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype, overlaps: bool) -> Rows:
        return OwnRows()

    def summing(self, rows: int, cols: int, dy: Tensor) -> Rows:
        return OwnRows()


ALONE = Alone()


class Group(NamedTuple):
    """The place of a call among the ranks of a group, and how it communicates."""

    group: str  # its name, by which operators know it
    size: int
    sequence: bool  # x has the rows of this rank alone
    delayed: bool  # the gradient of weight is computed after the backward pass
    overlap_gather: bool  # forward: own rows are multiplied while the others come (ub_overlap_ag)
    bulk_gather: bool  # backward: z is gathered during the product of dz (ub_bulk_dgrad)
    bulk_sum: bool  # backward: dz is summed during the product of dW (ub_bulk_wgrad)
    overlap_sum: bool  # backward: dz is multiplied in parts, and each is sent when it is done (ub_overlap_rs_dgrad)
    wanted: int = 0  # what some rank wants of the backward pass: bits of exchange.py

    alone = False
    limits = Limits("over several ranks it", "over several ranks")

    @property
    def gathers(self) -> bool:
        """Return whether some rank needs z of all rows for the gradient of weight."""
        return bool(self.wanted & GATHER)

    @property
    def sums(self) -> bool:
        """Return whether some rank needs the gradient of z."""
        return bool(self.wanted & SUM)

    def shape_of_all(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the x of all ranks."""
        return (self.size * x.shape[0], *x.shape[1:]) if self.sequence else tuple(x.shape)

    def gathering(self, rows: int, cols: int, like: Tensor, dtype: torch.dtype, overlaps: bool) -> Rows:
        """Return Rows that gather (rows, cols) of each rank, with `overlaps` during a product if that is faster."""
        if not self.sequence:
            return OwnRows()
        overlaps = overlaps and symmetric.worth(self.size * rows * cols * dtype.itemsize)
        gathering = self._exchange(overlaps, like).gathering(rows, cols, like, dtype)
        gathering.in_parts = overlaps
        return gathering

    def summing(self, rows: int, cols: int, dy: Tensor) -> Rows:
        """Return Rows that sum (all rows, cols) of each rank, as a product of dy gives it."""
        if not self.sequence:
            return self._exchange(False, dy).summing_for_all()
        worth = symmetric.worth(len(dy) * cols * dy.element_size())
        exchange = self._exchange(worth and (self.bulk_sum or self.overlap_sum), dy)
        summing = exchange.summing(rows, cols, dy, dy.dtype)
        summing.in_parts = worth and self.overlap_sum
        return summing

    def _exchange(self, overlaps: bool, like: Tensor) -> Exchange:
        exchange = symmetric.exchange(group_of(self.group), like.device) if overlaps else None
        return exchange_by_collectives(self.group) if exchange is None else exchange


Ranks = Alone | Group


def gathered(own: Tensor, ranks: Ranks, overlaps: bool = False, keep: bool = False) -> Callable[[], Tensor]:
    """Begin to gather (rows, cols) of every rank, and return a function that returns (ranks * rows, cols)."""
    gathering = ranks.gathering(*own.shape, own, own.dtype, overlaps)
    gathering.start(own)
    return lambda: gathering.whole(keep)


# A module's place among the ranks of a tensor-parallel group, with checks of what its constructor was told.

NO_GROUP = (
    "Tensor parallel group not initialized. Call set_tensor_parallel_group() before forward pass when tp_size > 1."
)


class TensorParallel(Place):
    """The place of a module among the ranks of a tensor-parallel group.

    Copies share the group and pickles leave it out, as a process group can be neither copied nor pickled.
    """

    exact = False  # ranks may want different gradients
    _agreed: Group | None = None  # the place of calls with gradients enabled

    def __init__(self, mode: str | None, size: int, sequence_parallel: bool, delayed: bool, overlaps: dict[str, bool]):
        self.size = size
        self.exchanges = mode == "column" and size > 1
        self.sequence = sequence_parallel and size > 1
        self.group: Any = None
        self.options = delayed, overlaps
        self._ranks: Group | None = None
        self._compared = False

    def set_group(self, group: Any) -> None:
        """Set the group; raise ValueError if its size is not the constructor's, or if this rank is not in it."""
        size = size_of(group)
        if size != self.size:
            raise ValueError(
                f"LayerNormLinear: the tensor-parallel group must have tp_size={self.size} ranks; got one of {size}. "
                "Pass such a group, or its size to the constructor."
            )
        self.group = group
        self._compared = False
        self._agreed = None
        delayed, overlaps = self.options
        self._ranks = Group(group.group_name, size, self.sequence, delayed, **overlaps)

    def ranks(self) -> Group:
        if self._ranks is None:
            raise RuntimeError(f"LayerNormLinear: {NO_GROUP}")
        return self._ranks

    def agreed(self, wanted: int, x: Tensor, dtype: torch.dtype) -> Group:
        """Return the place of a call, with what any rank wants in `wanted`, as all take part in what one waits for.

        The ranks compare their calls in a module's first call, in its first call with gradients enabled, in one that
        wants more than any rank wanted before, and with TORCH_DISTRIBUTED_DEBUG=DETAIL in every call. They must then
        have the same number of rows. They take part in what was wanted once until the group is set again.
        """
        known = self._agreed if wanted else self._ranks
        if self._compared and known is not None and not wanted & ~known.wanted and not compares_always():
            return known
        known = known or self.ranks()
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return known._replace(wanted=wanted | known.wanted)
        rows = x.numel() // max(x.shape[-1], 1)
        wanted = compare(self.group, rows, x.shape[-1], dtype, x.device, wanted, self.exact)
        self._compared = True
        if not wanted:
            return known
        self._agreed = known._replace(wanted=wanted | known.wanted)
        return self._agreed

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": None, "_ranks": None, "_agreed": None}


def size_of(group: Any) -> int:
    """Return the number of ranks of a group, which this process must be in."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "LayerNormLinear: a tensor-parallel group needs torch.distributed; got one where no process group is "
            "initialised. Call torch.distributed.init_process_group() first."
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            "LayerNormLinear: this process must be a rank of the tensor-parallel group; got a group that it is not in. "
            "Pass the group of this process."
        )
    return size


def size_of_given(group: Any, tp_size: int) -> int:
    """Return the size of a group; raise ValueError if `tp_size` is another one, except for 1, the default."""
    size = size_of(group)
    if tp_size not in (1, size):
        raise ValueError(
            f"LayerNormLinear: tp_size must be the number of ranks of tp_group, {size}; got tp_size={tp_size}. Leave "
            "one of them out."
        )
    return size
