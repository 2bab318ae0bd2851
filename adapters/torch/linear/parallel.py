"""A LayerNormLinear's place among the ranks of a tensor-parallel group: what its constructor was told, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import compare, compares_always
from .parallel_passes import Ranks

NO_GROUP = (
    "Tensor parallel group not initialized. Call set_tensor_parallel_group() before forward pass when tp_size > 1."
)


class TensorParallel:
    """Copies share the group, pickles leave it out: a process group can be neither copied nor pickled."""

    of_tensors = True  # a module's parameters are this rank's tensors

    def __init__(
        self,
        mode: str | None,
        size: int,
        sequence_parallel: bool,
        returned: str,
        delayed: bool,
        overlaps: dict[str, bool],
    ):
        self.size = size
        self.exchanges = mode == "column" and size > 1
        self.sequence = sequence_parallel and size > 1
        self.group: Any = None
        self.asked = returned, delayed, overlaps
        self._ranks: Ranks | None = None
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
        returned, delayed, overlaps = self.asked
        self._ranks = Ranks(group.group_name, size, self.sequence, returned, delayed, **overlaps)

    def local(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tensors of parameters that are split."""
        return list(parameters)

    def local_of_norm(self, parameter: Tensor | None) -> Tensor | None:
        return parameter

    def ranks(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError(f"LayerNormLinear: {NO_GROUP}")
        return self._ranks

    def check_rows(self, function: str, x: Tensor) -> None:
        if self.sequence and x.dim() < 2:
            raise RuntimeError(
                f"{function}: with sequence parallelism input must have an axis of rows, (rows, ..., in); got shape "
                f"{tuple(x.shape)}."
            )

    def compare(self, x: Tensor, dtype: torch.dtype) -> None:
        """A first call, and with TORCH_DISTRIBUTED_DEBUG=DETAIL every call, looks whether all ranks have such rows."""
        if self._compared and not compares_always():
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        compare(self.group, x.numel() // max(x.shape[-1], 1), x.shape[-1], dtype, x.device)
        self._compared = True

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"group": None, "_ranks": None}


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
