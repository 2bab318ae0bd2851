"""torch's memory and streams on a GPU, where tensors lie in it, and what is known of the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.checks import Layout, row_strides
from ...call.recipe import LaunchRecipe
from ...kernel import device
from ...plan.problem import RowStrides
from .. import private

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

stream, current_device, empty = private.stream, private.current_device, private.empty


def contiguously(shape: Sequence[int], dtype: torch.dtype) -> Memory:
    shape = tuple(shape)
    strides = [*accumulate(shape[:0:-1], mul, initial=1)][: len(shape)]
    return shape, tuple(strides[::-1]), dtype


def properties_of(function: str, x: Tensor) -> device.Device:
    """The GPU of x, as CuPy sees it."""
    try:
        return device.current(x.get_device())
    except ImportError as error:
        raise ImportError(
            f"{function}: tensors on a GPU need CuPy; it could not be imported ({error}). {device.INSTALL}."
        ) from error
    except RuntimeError as error:  # CuPy's errors of CUDA are such
        raise RuntimeError(
            f"{function}: CuPy cannot use {x.device}, which input is on: {error}. Compare the driver, by nvidia-smi, "
            "with what `python -m cunorm info` says."
        ) from error


def row_strides_of(tensor: Tensor | None, ndim: int) -> RowStrides | None:
    return None if tensor is None else row_strides(Layout(tuple(tensor.shape), tensor.stride(), "", ""), ndim)


def memory(shape: Sequence[int], dtype: str) -> Memory:
    return contiguously(shape, getattr(torch, dtype))


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
        pointer & 15 and one is not None and broadcasting.read_by_vectors(name, tuple(one.shape), tuple(of_x))
        for name, pointer, one in zip(names, pointers, tensors, strict=True)
    )
