"""torch's memory and streams on a GPU, and what is known of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ...call.checks import Layout, row_strides
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
