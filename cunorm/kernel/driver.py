"""The functions of the CUDA driver that CuPy does not bind, by ctypes: launches and queries with attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
PROGRAMMATIC_STREAM_SERIALIZATION = 6
INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_...


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _config(grid: tuple[int, int, int], threads: int, shared: int, attribute: int, *value: int) -> Config:
    return Config(*grid, threads, 1, 1, shared, None, _attribute(attribute, *value), 1)


@cache
def _attribute(attribute: int, *value: int) -> Any:
    """Return an attribute, which launches share because the driver only reads it."""
    return ctypes.pointer(Attribute(attribute, 0, value))


def early_launch(
    kernel: int, grid: tuple[int, int, int], threads: int, shared: int, arguments: int
) -> Callable[[int], None]:
    """Return `launch(stream)` for a kernel that may begin before the one before it ends, and waits for that itself.

    `arguments` is the address of the arguments' addresses. Only one thread at a time may call it.
    """
    config = _config(grid, threads, shared, PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    call, of_config = _library().cuLaunchKernelEx, ctypes.byref(config)
    of_kernel, of_arguments = ctypes.c_void_p(kernel), ctypes.c_void_p(arguments)

    def launch(stream: int) -> None:
        config.stream = stream
        error = call(of_config, of_kernel, of_arguments, None)
        if error:
            raise RuntimeError(f"cunorm: cuLaunchKernelEx failed with CUDA error {error}.")

    return launch


def resident_clusters(kernel: int, size: int, threads: int, shared: int) -> int:
    """Return how many clusters of `size` CTAs of a kernel run at once."""
    config = _config((size, 1, 1), threads, shared, CLUSTER_DIMENSION, size, 1, 1)
    count = ctypes.c_int()
    error = _library().cuOccupancyMaxActiveClusters(ctypes.byref(count), ctypes.c_void_p(kernel), ctypes.byref(config))
    if error == INVALID_CLUSTER_SIZE:
        return 0
    if error:
        raise RuntimeError(f"cunorm: cuOccupancyMaxActiveClusters({size} CTAs) failed with CUDA error {error}.")
    return count.value
