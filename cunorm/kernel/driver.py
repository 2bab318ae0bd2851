"""The functions of the CUDA driver that CuPy does not bind, by ctypes: launches and queries with attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
PROGRAMMATIC_STREAM_SERIALIZATION = 6
INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_...
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
TENSOR_MAP_DTYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
SWIZZLED_128B, PROMOTED_TO_128B = 3, 2  # CU_TENSOR_MAP_SWIZZLE_..., ..._L2_PROMOTION_L2_...
BOX_COLUMNS = 64  # of 16 bits, 128 bytes


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


@lru_cache(maxsize=4096)
def tensor_map(address: int, dtype: str, rows: int, cols: int, stride: int, box_rows: int) -> bytes:
    """Return the CUtensorMap of a matrix at an address, for boxes of 128 bytes by box_rows.

    The address and `stride`, which is in elements, are multiples of 16 bytes.
    """
    buffer = (ctypes.c_char * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    offset = -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    sizes, strides = (ctypes.c_uint64 * 2)(cols, rows), (ctypes.c_uint64 * 1)(2 * stride)
    box, steps = (ctypes.c_uint32 * 2)(BOX_COLUMNS, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    error = _library().cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(ctypes.addressof(buffer) + offset), TENSOR_MAP_DTYPES[dtype], len(sizes)),
        *(ctypes.c_void_p(address), sizes, strides, box, steps),
        *(0, SWIZZLED_128B, PROMOTED_TO_128B, 0),  # not interleaved; zeros beyond the matrix
    )
    if error:
        raise RuntimeError(f"cunorm: cuTensorMapEncodeTiled failed with CUDA error {error}.")
    return bytes(buffer[offset : offset + TENSOR_MAP_BYTES])


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
