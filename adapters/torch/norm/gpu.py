"""torch's memory and streams on a GPU, the strides and addresses of tensors, and the properties of the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.recipe import LaunchRecipe
from ...kernel import device
from .. import private

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

stream, current_device, empty = private.stream, private.current_device, private.empty


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple([*accumulate(shape[:0:-1], mul, initial=1)][: len(shape)][::-1])


def contiguously(shape: Sequence[int], dtype: torch.dtype) -> Memory:
    """Return a contiguous Memory of this shape and dtype."""
    return tuple(shape), strides(shape), dtype


def properties_of(function: str, x: Tensor) -> device.Device:
    """Return the properties of the GPU of x, as CuPy sees them."""
    try:
        return device.current(x.get_device())
    except ImportError as error:
        raise ImportError(
            f"{function}: tensors on a GPU need CuPy; it could not be imported ({error}). {device.INSTALL}."
        ) from error
    except RuntimeError as error:  # CuPy's errors of CUDA are of this type
        raise RuntimeError(
            f"{function}: CuPy cannot use {x.device}, which input is on: {error}. Compare the driver, by nvidia-smi, "
            "with what `python -m cunorm info` says."
        ) from error


def memory(shape: Sequence[int], dtype: str) -> Memory:
    """Return a contiguous Memory of this shape and dtype, by the name of the dtype."""
    return contiguously(shape, getattr(torch, dtype))


def copies(
    recipe: LaunchRecipe, names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the places among `names` and the shapes of the tensors that a recipe wants copied."""
    shapes = shapes | dict(recipe.expanded)
    return tuple((names.index(name), shapes[name]) for name in recipe.copies)


def copied(tensors: Sequence[Tensor | None], copies: tuple, pointers: list[int]) -> list[Tensor | None]:
    """Return the tensors with contiguous copies of those of `copies`, and put their addresses into `pointers`.

    The caller must hold the result until the launch.
    """
    results = list(tensors)
    for place, shape in copies:
        results[place] = tensors[place].expand(shape).contiguous()
        pointers[place] = results[place].data_ptr()
    return results


def aligned(
    names: Sequence[str],
    pointers: Sequence[int],
    tensors: Sequence[Tensor | None],
    x_shape: Sequence[int],
    target: Tensor | None,
) -> bool:
    """Say whether all that is read or written by vectors begins at multiples of 16 bytes, as what torch allocates does.

    `tensors` are those of `names`, and others that are not read by vectors. `target` is written to if it is given.
    """
    if target is not None and target.data_ptr() & 15:
        return False
    together = 0
    for pointer in pointers:
        together |= pointer
    if not together & 15:
        return True
    return not any(
        pointer & 15 and tensor is not None and broadcasting.read_by_vectors(name, tuple(tensor.shape), tuple(x_shape))
        for name, pointer, tensor in zip(names, pointers, tensors, strict=False)
    )
