"""Fused operations on DTensors: each device has whole rows, and runs the operation on what it has of them.

x stays as its rows are sharded; one whose normalised axis is sharded, or that is a sum yet to be made, is gathered
first, as is x beside a seed. An operand is sharded as x along the axes that it has in common with it, and is whole
along those where it is repeated: there its gradient is a sum yet to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ...operation import SEED


def is_sharded(tensors: Sequence[Tensor]) -> bool:
    return isinstance(tensors[0], DTensor)


def run(
    of_rows: Callable[..., Any],
    call: Any,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    wants_statistics: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """What `of_rows`, dispatch.run, makes of each device's rows, as DTensors."""
    x, *operands = tensors
    mesh = x.device_mesh
    # What is drawn follows from the number of a row among all of them.
    whole = SEED in call.names
    rows = [one if _by_rows(one, x.ndim) and not whole else Replicate() for one in x.placements]
    local = [_placed(x, rows).to_local()]
    for name, operand in zip(call.names[1:], operands, strict=True):
        if name == SEED and not isinstance(operand, DTensor):
            local.append(operand)
            continue
        if not isinstance(operand, DTensor):
            raise TypeError(f"{call.function}: {name} must be a DTensor, as x is; got {type(operand).__name__}.")
        places = [_of_operand(operand, x, one) for one in rows]
        kept = [place for place, _ in places]
        local.append(_placed(operand, kept).to_local(grad_placements=[one for _, one in places]))
    results, statistics = of_rows(call, local, numbers, eps, wants_statistics)

    def gathered(one: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> Tensor:
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        return DTensor.from_local(one, mesh, placements, run_check=False, shape=shape, stride=tuple(strides))

    if statistics is not None:
        of_statistics = [Shard(one.dim % x.ndim + 1) if isinstance(one, Shard) else one for one in rows]
        statistics = gathered(statistics, (len(statistics), *x.shape[:-1]), of_statistics)
    return [gathered(one, x.shape, rows) for one in results], statistics


def _placed(tensor: DTensor, placements: list[Placement]) -> DTensor:
    """Itself where it is there already: the gradient of a redistribution is summed at once."""
    return tensor if list(tensor.placements) == placements else tensor.redistribute(placements=placements)


def _by_rows(placement: Placement, ndim: int) -> bool:
    return type(placement) is Shard and placement.dim % ndim != ndim - 1


def _of_operand(operand: Tensor, x: Tensor, placement: Placement) -> tuple[Placement, Placement]:
    """(where an operand is, where its gradient is) along an axis of the mesh where x is as `placement` says."""
    if not isinstance(placement, Shard):
        return Replicate(), Replicate()
    axis = placement.dim % x.ndim - x.ndim + operand.ndim
    if axis >= 0 and operand.shape[axis] == x.shape[placement.dim] != 1:
        return Shard(axis), Shard(axis)
    return Replicate(), Partial()
