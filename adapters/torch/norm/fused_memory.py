"""Layouts, copies and addresses of the tensors of a fused operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.checks import Layout
from ...call.recipe import LaunchRecipe
from . import checks, gpu
from .gpu import Memory


def layout(function: str, name: str, tensor: Tensor) -> Layout:
    kind = checks.unlike_strided(tensor)
    if kind:
        raise TypeError(f"{function}: {name} must be a strided tensor; got {kind}. Convert it first.")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Layout(shape, strides, checks.dtype_name(tensor.dtype), str(tensor.device))


def memory(shape: Sequence[int], dtype: str) -> Memory:
    return gpu.contiguously(shape, getattr(torch, dtype))


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    return memory(shape, "float32")[1]


def copies(
    recipe: LaunchRecipe, names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    shapes = shapes | dict(recipe.expanded)
    return tuple((names.index(name), shapes[name]) for name in recipe.copies)


def copied(tensors: Sequence[Tensor | None], copies: tuple, pointers: list[int]) -> list[Tensor | None]:
    """The tensors, those of `copies` made contiguous and their pointers with them. Hold them until the launch."""
    found = list(tensors)
    for place, shape in copies:
        found[place] = tensors[place].expand(shape).contiguous()
        pointers[place] = found[place].data_ptr()
    return found


def aligned(
    names: Sequence[str], pointers: Sequence[int], tensors: Sequence[Tensor | None], of_x: tuple[int, ...]
) -> bool:
    """All tensors that are read by packs begin at multiples of 16 bytes; what torch allocates does."""
    together = 0
    for pointer in pointers:
        together |= pointer
    if not together & 15:
        return True
    return not any(
        pointer & 15 and one is not None and broadcasting.read_by_packs(name, tuple(one.shape), tuple(of_x))
        for name, pointer, one in zip(names, pointers, tensors, strict=True)
    )
