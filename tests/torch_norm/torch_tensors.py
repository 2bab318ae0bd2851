"""Torch tensors of the arrays that the other tests use, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# On the CPU, inductor would have g++ compile each graph for minutes.
compiled_on_devices = pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)


def tensor(array: Any) -> torch.Tensor:
    """Return a tensor in the memory of a NumPy or CuPy array."""
    if not isinstance(array, numpy.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor | None) -> Any:
    """Return NumPy's or CuPy's view of a tensor."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.is_cuda:
        import cupy

        torch.cuda.synchronize()
        return cupy.from_dlpack(tensor)
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors are equal to the bit, NaNs included."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def norm_of(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double()))


def assert_no_farther(
    replaced: dict[str, torch.Tensor], untouched: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: Any
) -> None:
    """Assert that output and gradients of a model in `dtype`, in this order, are no farther from float64 than before.

    Errors of rounding are of the same kind but not the same, so they may be twice as large. Some gradients are zero but
    for rounding (that of a bias of keys, which softmax does not see): their errors are to be small beside the other
    gradients.
    """
    largest = max(map(norm_of, list(exact.values())[1:]))
    for key, expected in exact.items():
        distance, before = (norm_of(result[key].double() - expected) for result in (replaced, untouched))
        room = torch.finfo(dtype).eps * (8 * norm_of(expected) + 0.1 * largest)
        assert distance <= 2 * before + room, f"{key}: {distance}, {before} before, of {norm_of(expected)}"
