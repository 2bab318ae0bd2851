"""Fused operations on DTensors: each device runs the operation on its own rows, which are complete.

x keeps its placement if its rows are sharded. It is gathered first if its normalised axis is sharded, if it is a
partial sum, or if the operation has a seed. An operand is sharded as x is along the axes that both have, and replicated
along those where it is broadcast; there its gradient is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ...operation import SEED
from .gpu import strides


def run(
    run_local: Callable[..., Any],
    call: Any,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    wants_statistics: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Run `run_local`, which is dispatch.run, on the rows of each device, and return its results as DTensors."""
    x, *operands = tensors
    mesh = x.device_mesh
    has_seed = SEED in call.names  # the numbers drawn depend on the index of a row among all rows
    placements = [
        placement if _by_rows(placement, x.ndim) and not has_seed else Replicate() for placement in x.placements
    ]
    local = [_placed(x, placements).to_local()]
    for name, operand in zip(call.names[1:], operands, strict=True):
        if name == SEED and not isinstance(operand, DTensor):
            local.append(operand)
            continue
        if not isinstance(operand, DTensor):
            raise TypeError(f"{call.function}: {name} must be a DTensor, as x is; got {type(operand).__name__}.")
        pairs = [_operand_placement(operand, x, placement) for placement in placements]
        placed = _placed(operand, [placement for placement, _ in pairs])
        local.append(placed.to_local(grad_placements=[gradient_placement for _, gradient_placement in pairs]))
    results, statistics = run_local(call, local, numbers, eps, wants_statistics)

    def distributed(tensor: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> Tensor:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=strides(shape))

    if statistics is not None:
        statistics_placements = [
            Shard(placement.dim % x.ndim + 1) if isinstance(placement, Shard) else placement for placement in placements
        ]
        statistics = distributed(statistics, (len(statistics), *x.shape[:-1]), statistics_placements)
    return [distributed(result, x.shape, placements) for result in results], statistics


def _placed(tensor: DTensor, placements: list[Placement]) -> DTensor:
    """Return the tensor with these placements; one that has them is not redistributed, as that would sum its gradient
    at once.
    """
    return tensor if list(tensor.placements) == placements else tensor.redistribute(placements=placements)


def _by_rows(placement: Placement, ndim: int) -> bool:
    """Say whether a placement shards rows, and not the normalised axis."""
    return type(placement) is Shard and placement.dim % ndim != ndim - 1


def _operand_placement(operand: Tensor, x: Tensor, placement: Placement) -> tuple[Placement, Placement]:
    """Return the placements of an operand and of its gradient along an axis of the mesh where x has `placement`."""
    if not isinstance(placement, Shard):
        return Replicate(), Replicate()
    axis = placement.dim % x.ndim - x.ndim + operand.ndim
    if axis >= 0 and operand.shape[axis] == x.shape[placement.dim] != 1:
        return Shard(axis), Shard(axis)
    return Replicate(), Partial()
