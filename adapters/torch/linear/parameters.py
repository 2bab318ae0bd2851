"""Check the arguments of LayerNormLinear's constructor, and read parameters that are parts of one tensor as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norm.functional import PLAIN
from ..private import under_functorch

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
    """Return how many output features one rank has."""
    if parallel_mode is None:
        return out_features
    if out_features % tp_size:
        raise ValueError(
            f"LayerNormLinear: out_features must be a multiple of the number of ranks; got "
            f"out_features={out_features}, tp_size={tp_size}: {out_features} is not divisible by {tp_size}."
        )
    return out_features // tp_size


class Part(NamedTuple):
    weight: str  # names of parameters
    bias: str
    rows: int


def parts_of(split: Any, out_features: int, ranks: int = 1) -> list[Part]:
    """Return the parts that `parameters_split` names, with the rows of one of `ranks`."""
    name = "LayerNormLinear"
    if split is None:
        return [Part("weight", "bias", out_features // ranks)]
    if not split:
        raise ValueError(f"{name}: parameters_split must name at least one part; got {split!r}.")
    if isinstance(split, Mapping):
        sizes = dict(split)
    elif isinstance(split, Sequence) and not isinstance(split, str):
        sizes = dict.fromkeys(split, out_features // len(split))
        if len(sizes) != len(split):
            raise ValueError(f"{name}: parameters_split must name every part once; got {split!r}.")
    else:
        raise TypeError(
            f"{name}: parameters_split must be a sequence of names or a dict of sizes; got {type(split).__name__}."
        )
    if not all(isinstance(key, str) for key in sizes):
        raise TypeError(f"{name}: parameters_split must name its parts by str; got {list(sizes)!r}.")
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes.values()):
        raise TypeError(f"{name}: parameters_split must have int sizes; got {list(sizes.values())!r}.")
    if sum(sizes.values()) != out_features or min(sizes.values()) <= 0:
        raise ValueError(
            f"{name}: the parts of parameters_split must be positive and add up to out_features={out_features}; got "
            f"{list(sizes.values())}."
        )
    for key, size in sizes.items():
        if size % ranks:
            raise RuntimeError(
                f"{name}: every part of parameters_split must be a multiple of the number of ranks, {ranks}; got "
                f"{key!r} of {size} rows."
            )
    stems = [key.rstrip("_") for key in sizes]
    return [
        Part(f"{stem}_weight", f"{stem}_bias", size // ranks) for stem, size in zip(stems, sizes.values(), strict=True)
    ]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts one after the other: a view if they lie in memory like that, else a copy."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling() or under_functorch():
        return torch.cat(list(parts))
    return _Joined.apply(*parts)


def _neighbours(parts: Sequence[Tensor]) -> bool:
    """Return whether the parts lie one after the other in one piece of memory."""
    if not all(type(part) in PLAIN and part.is_contiguous() for part in parts):
        return False
    return all(
        a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
        and a.dtype is b.dtype
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in itertools.pairwise(parts)
    )


@torch.no_grad()
def lay_side_by_side(parts: Sequence[Tensor]) -> None:
    """Give the parts one piece of memory if they lie apart; they stay the same parameters."""
    if len(parts) == 1 or not all(type(part) in PLAIN for part in parts) or parts[0].is_meta or _neighbours(parts):
        return
    for part, place in zip(parts, torch.cat(list(parts)).split([len(part) for part in parts]), strict=True):
        part.data = place


class _Joined(torch.autograd.Function):
    """Joins parts. If the whole gets no gradient, as with a Sink, the parts get none; torch.cat gives them zeros."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.rows = [len(part) for part in parts]
        ctx.set_materialize_grads(False)
        if not _neighbours(parts):
            return torch.cat(parts)
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None:
            return (None,) * len(ctx.rows)
        # The gradient of a returned bias may lie in memory of the caller, to which autograd would then add.
        return (gradient.clone() if gradient.dim() == 1 else gradient).split(ctx.rows)
