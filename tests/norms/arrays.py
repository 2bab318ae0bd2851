"""The arrays that tests normalise, and the comparison of results to the bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
from reference import ON_GPU_ABOVE, narrow

Array = Any

PERIOD = 2**22 - 3  # a prime number of elements, after which the noise of large arrays repeats
GUARD = 16  # elements behind a misplaced array


class Inputs(NamedTuple):
    x: Array
    dy: Array
    weight: Array
    bias: Array


def inputs(
    xp: Any,
    rows: int,
    cols: int,
    dtype: str,
    *,
    offset: float = 1.0,
    weight: str | None = None,
    bias: str | None = None,
    dy: str | None = None,
    seed: int = 0,
) -> Inputs:
    """Return rows of standard deviation 1 and mean +offset, -offset, ..., and a dy on which both terms of dx depend.

    `weight`, `bias` and `dy` name the dtypes of these arrays where they are not that of x.
    """
    random = numpy.random.default_rng(seed)
    source = xp if rows * cols > ON_GPU_ABOVE else numpy

    def noise() -> Array:
        # Large arrays repeat the noise, with a period that fits no row.
        numbers = source.asarray(random.standard_normal(min(rows * cols, PERIOD)))
        return source.resize(numbers, (rows, cols))

    z = noise()
    sign = 1.0 - 2.0 * (source.arange(rows) % 2)
    x = xp.asarray(narrow(z + offset * sign[:, None], dtype))
    z *= 0.5
    z += noise()
    z += 0.5
    parameters = random.standard_normal((2, cols))
    return Inputs(
        x,
        xp.asarray(narrow(z, dy or dtype)),
        xp.asarray(narrow(1 + 0.25 * parameters[0], weight or dtype)),
        xp.asarray(narrow(parameters[1], bias or weight or dtype)),
    )


def misplaced(array: Array, offset: int) -> Array:
    """Return a copy of a C-contiguous array that begins `offset` elements after a 256-byte boundary."""
    buffer = _aligned_buffer(array, array.size + offset + GUARD)
    copy = buffer[offset : offset + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def _aligned_buffer(array: Array, size: int) -> Array:
    if hasattr(array, "get"):
        import cupy

        return cupy.empty(size, array.dtype)
    buffer = numpy.empty(size + 256, array.dtype)
    return buffer[-buffer.ctypes.data % 256 // buffer.itemsize :][:size]


def in_wider_rows(array: Array, padding: int) -> Array:
    """Return a copy of a matrix as the first columns of one with `padding` columns more."""
    rows, cols = array.shape
    wider = type(array)((rows, cols + padding), array.dtype)
    wider[...] = 0
    wider[:, :cols] = array
    return wider[:, :cols]


def on_host(array: Array) -> numpy.ndarray:
    return array.get() if hasattr(array, "get") else array


def bits(array: Array) -> Array:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def same_bits(a: Array | None, b: Array | None) -> bool:
    """Return whether arrays are equal to the bit, NaNs included; None equals None."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool((bits(a) == bits(b)).all())
