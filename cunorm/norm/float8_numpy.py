"""The norms with y in 8 bits on NumPy arrays: y in float32, rounded once, then what kernels_cu/rows/float8.cuh does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from .. import numpy_arrays
from ..call import store as float8
from ..plan.problem import BLOCK, FLOAT8


def forward(
    function: str,
    x: numpy.ndarray,
    normalized_shape: int | Sequence[int] | None,
    weight: numpy.ndarray | None,
    bias: numpy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    granularity: str | int,
    scale: Any,
    dtype: Any,
    sm_margin: int,
    output: bool,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray | None]:
    """Return (bytes, scale, y), y None unless asked for."""
    float8.check_x(function, numpy_arrays.layout(function, "x", x))
    name = float8.check_format(function, dtype)
    float8.check_granularity(function, granularity, scale)

    def y_in(kind: str | None) -> tuple[numpy.ndarray, tuple[int, ...]]:
        """y, and the shape of x without its normalised axes."""
        y, _, rstd = numpy_arrays.forward(
            function,
            x,
            normalized_shape,
            weight,
            bias,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            out=None,
            dtype=kind,
            sm_margin=sm_margin,
            statistics=True,
        )
        assert rstd is not None
        return y, rstd.shape

    y, leading = y_in("float32")
    cols = math.prod(x.shape[len(leading) :])
    if granularity == "tensor" and scale is None:
        scale = float8.static_scale(
            numpy, function.startswith("layer"), cols, weight, bias, zero_centered_gamma, FLOAT8[name]
        )
    found, scales = quantise(y.reshape(-1, cols), granularity, name, scale)
    shape = float8.scales_shape(granularity, leading, cols)
    return found.reshape(x.shape), scales.reshape(shape), y_in(None)[0] if output else None


def quantise(
    y: numpy.ndarray, granularity: str | int, name: str, scale: Any = None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The bytes of float32 rows, y[rows, cols], and what makes numbers of them again."""
    rows, cols = y.shape
    largest_number = numpy.float32(FLOAT8[name])
    with numpy.errstate(all="ignore"):
        if granularity == "tensor":
            scales = numpy.asarray(scale, numpy.float32)
            return _rounded(y * (numpy.float32(1) / scales), name), scales
        width = BLOCK if granularity == BLOCK else cols
        blocks = -(-cols // width)
        padded = numpy.pad(y, ((0, 0), (0, blocks * width - cols))).reshape(rows, blocks, width)
        largest = abs(padded).max(axis=2)
        quotient = largest_number / largest
        most = numpy.float32(float8.MOST_MULTIPLIER)
        tiny = quotient > most
        multiplier = numpy.where(tiny, most, quotient)
        scales = numpy.where(tiny, numpy.where(largest == 0, numpy.float32(1), 1 / most), largest / largest_number)
        scales = scales + (largest - largest)  # NaN where the largest is not finite
        scaled = (padded * multiplier[:, :, None]).reshape(rows, blocks * width)[:, :cols]
        return _rounded(scaled, name), scales


def _rounded(values: numpy.ndarray, name: str) -> numpy.ndarray:
    """To nearest even; what is too large becomes the largest."""
    largest = FLOAT8[name]
    return numpy.clip(values, -largest, largest).astype(numpy_arrays.numpy_dtype("cunorm", name)).view(numpy.uint8)
