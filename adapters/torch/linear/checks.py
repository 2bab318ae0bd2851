"""What LayerNormLinear's constructor asks of its arguments."""

from __future__ import annotations

from typing import Any

SYMMETRIC_REDUCTIONS = (None, "multimem_all_reduce", "two_shot", "one_shot")  # of TransformerEngine


def check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"LayerNormLinear: {name} must be an int; got {type(size).__name__}.")
        if size <= 0:
            raise ValueError(f"LayerNormLinear: {name} must be 1 or more; got {size}.")


def check_mode(parallel_mode: Any) -> None:
    if parallel_mode == "row":
        raise NotImplementedError(
            "LayerNormLinear: parallel_mode must be None or 'column'; got 'row'. A norm cannot be split along its row."
        )
    if parallel_mode not in (None, "column"):
        raise ValueError(f"LayerNormLinear: parallel_mode must be None or 'column'; got {parallel_mode!r}.")


def check_overlaps(symmetric_ar_type: Any, delay_wgrad_compute: bool, ub_bulk_wgrad: bool) -> None:
    if symmetric_ar_type not in SYMMETRIC_REDUCTIONS:
        raise ValueError(
            f"LayerNormLinear: symmetric_ar_type must be one of {', '.join(map(repr, SYMMETRIC_REDUCTIONS))}; got "
            f"{symmetric_ar_type!r}."
        )
    if delay_wgrad_compute and ub_bulk_wgrad:
        raise ValueError(
            "LayerNormLinear: ub_bulk_wgrad=True needs the gradient of weight in the backward pass, which sums are to "
            "be hidden under; got delay_wgrad_compute=True. Set one of them."
        )


def local_features(out_features: int, parallel_mode: str | None, tp_size: int) -> int:
    """Those of one rank."""
    if parallel_mode is None:
        return out_features
    if out_features % tp_size:
        raise ValueError(
            f"LayerNormLinear: out_features must be a multiple of the number of ranks; got "
            f"out_features={out_features}, tp_size={tp_size}: {out_features} is not divisible by {tp_size}."
        )
    return out_features // tp_size
