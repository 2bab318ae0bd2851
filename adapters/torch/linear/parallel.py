"""A LayerNormLinear's place among the ranks of a tensor-parallel group: what its constructor was told, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import compare, compares_always
from .ranks import Group, wanted

NO_GROUP = (
    "Tensor parallel group not initialized. Call set_tensor_parallel_group() before forward pass when tp_size > 1."
)


class TensorParallel:
    """Copies share the group, pickles leave it out: a process group can be neither copied nor pickled."""

    exact = False  # ranks may want different gradients
    _agreed: Group | None = None  # of calls with gradients enabled

    def __init__(
        self,
        mode: str | None,
        size: int,
        sequence_parallel: bool,
        delayed: bool,
        overlaps: dict[str, bool],
    ):
        self.size = size
        self.exchanges = mode == "column" and size > 1
        self.sequence = sequence_parallel and size > 1
        self.group: Any = None
        self.asked = delayed, overlaps
        self._ranks: Group | None = None
        self._compared = False

    def set_group(self, group: Any) -> None:
        """ValueError for another size than that of the constructor, or a group that this rank is not in."""
        size = size_of(group)
        if size != self.size:
            raise ValueError(
                f"LayerNormLinear: the tensor-parallel group must have tp_size={self.size} ranks; got one of {size}."
            )
        self.group = group
        self._compared = False
        self._agreed = None
        delayed, overlaps = self.asked
        self._ranks = Group(group.group_name, size, self.sequence, delayed, **overlaps)

    def local(self, weights: Sequence[Any], biases: Sequence[Any], of_norm: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Return this rank's tensors of the parameters of a module."""
        return weights, biases, of_norm

    def ranks(self) -> Group:
        if self._ranks is None:
            raise RuntimeError(f"LayerNormLinear: {NO_GROUP}")
        return self._ranks

    def check_rows(self, function: str, x: Tensor) -> None:
        if self.sequence and x.dim() < 2:
            raise RuntimeError(
                f"{function}: with sequence parallelism input must have an axis of rows, (rows, ..., in); got shape "
                f"{tuple(x.shape)}."
            )

    def wanted_by(self, inputs: Sequence[Tensor | None]) -> int:
        """What this rank wants of the backward pass of a call of (x, weight, bias, ln_weight, ln_bias), in bits."""
        return wanted(inputs, self.sequence)

    def agreed(self, wanted: int, x: Tensor, dtype: torch.dtype) -> Group:
        """The place of a call among the ranks, its `wanted` what any rank wants: all take part in what one waits for.

        A module's first call tells the others, as does its first with gradients enabled, one that wants more than any
        rank wanted before, and with TORCH_DISTRIBUTED_DEBUG=DETAIL every call; then all ranks must have as many rows.
        What was wanted once is taken part in until the group is set again.
        """
        before = self._agreed if wanted else self._ranks
        if self._compared and before is not None and not wanted & ~before.wanted and not compares_always():
            return before
        before = before or self.ranks()
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return before._replace(wanted=wanted | before.wanted)
        rows = x.numel() // max(x.shape[-1], 1)
        wanted = compare(self.group, rows, x.shape[-1], dtype, x.device, wanted, self.exact)
        self._compared = True
        if not wanted:
            return before
        self._agreed = before._replace(wanted=wanted | before.wanted)
        return self._agreed

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": None, "_ranks": None, "_agreed": None}


def size_of(group: Any) -> int:
    """Its number of ranks, this one among them."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "LayerNormLinear: a tensor-parallel group needs torch.distributed; got one where no process group is "
            "initialised. Call torch.distributed.init_process_group() first."
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            "LayerNormLinear: this process must be a rank of the tensor-parallel group; got a group that it is not in."
        )
    return size


def size_of_given(group: Any, tp_size: int) -> int:
    """The size of a group. ValueError where another `tp_size` was given beside it; 1, the default, counts as none."""
    size = size_of(group)
    if tp_size not in (1, size):
        raise ValueError(
            f"LayerNormLinear: tp_size must be the number of ranks of tp_group, {size}; got tp_size={tp_size}. Leave "
            "one of them out."
        )
    return size
