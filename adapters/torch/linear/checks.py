"""What LayerNormLinear's constructor asks of its arguments, and what it has not yet."""

from __future__ import annotations

from typing import Any

import torch

# Arguments that ask for what is not here yet: what they ask for.
LATER = {
    "ub_overlap_ag": "Communication that overlaps products",
    "ub_overlap_rs": "Communication that overlaps products",
    "ub_overlap_rs_dgrad": "Communication that overlaps products",
    "ub_bulk_wgrad": "Communication that overlaps products",
    "ub_bulk_dgrad": "Communication that overlaps products",
    "symmetric_ar_type": "Reduction through symmetric memory",
}


def check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"LayerNormLinear: {name} must be an int; got {type(size).__name__}.")
        if size <= 0:
            raise ValueError(f"LayerNormLinear: {name} must be 1 or more; got {size}.")


def check_parallel(parallel_mode: Any, tp_group: Any, tp_size: Any) -> None:
    if parallel_mode == "row":
        raise NotImplementedError(
            "LayerNormLinear: parallel_mode must be None or 'column'; got 'row'. A norm cannot be split along its row."
        )
    if parallel_mode not in (None, "column"):
        raise ValueError(f"LayerNormLinear: parallel_mode must be None or 'column'; got {parallel_mode!r}.")
    if tp_group is not None:
        tp_size = torch.distributed.get_world_size(tp_group)
    check_sizes(tp_size=tp_size)
    if tp_size > 1:
        raise NotImplementedError(
            f"LayerNormLinear: tp_size must be 1; got {tp_size}. Tensor and sequence parallelism over several GPUs are "
            "to come."
        )


def refuse(**arguments: Any) -> None:
    """What TransformerEngine has and this has not yet."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(
                f"LayerNormLinear: {name} must be unset; got {value!r}. {LATER[name]} is to come."
            )
