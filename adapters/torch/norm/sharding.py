"""How DTensor shards the operators: rows over devices, the normalised axes whole. Registered when imported."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard

from ..private import register_sharding
from . import operators


@register_sharding(operators.norm_forward)
def _forward(x, weight, bias, operation, ndim, eps, dtype, wants_statistics, *margins):
    # Which of the tensors there are; options have no placement.
    def inputs(placement):
        parameters = [None if tensor is None else Replicate() for tensor in (weight, bias)]
        return [placement, *parameters, *[None] * (5 + len(margins))]

    strategies = [([Replicate(), Replicate()], inputs(Replicate()))]
    for axis in range(x.ndim - ndim):
        statistics = Shard(axis + 1) if wants_statistics else Replicate()
        strategies.append(([Shard(axis), statistics], inputs(Shard(axis))))
    return strategies


@register_sharding(operators.norm_backward)
def _backward(dy, x, statistics, weight, operation, eps, output_mask, *others):
    def inputs(placement, of_statistics):
        return [
            placement,
            placement,
            of_statistics,
            None if weight is None else Replicate(),
            *[None] * (3 + len(others)),
        ]

    strategies = [([Replicate()] * 3, inputs(Replicate(), Replicate()))]
    for axis in range(statistics.ndim - 1):
        sums = [Partial() if wanted else Replicate() for wanted in output_mask[1:]]
        dx = Shard(axis) if output_mask[0] else Replicate()
        strategies.append(([dx, *sums], inputs(Shard(axis), Shard(axis + 1))))
    return strategies
