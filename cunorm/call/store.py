"""How FP8 output is stored: checks of the arguments, and the numbers that all frameworks share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..operation import NORMS, Operation
from ..plan.problem import BLOCK, FLOAT8, SCALES
from . import checks
from .checks import Layout

NAMES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
MOST_MULTIPLIER = 2.0**100  # kernels_cu/rows/float8.cuh: beyond it a row counts as too small


class Float8Store(NamedTuple):
    """How an operation writes FP8 output, y8 and y8_scale. y itself is written too if the store is `wide`."""

    format: str  # a key of FLOAT8
    granularity: str | int
    wide: bool

    def results(self, returns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of what a call returns, in order, with FP8 output in place of y among `returns`."""
        of_y = ("y8", "y8_scale", *(("y",) if self.wide else ()))
        return tuple(result for name in returns for result in (of_y if name == "y" else (name,)))

    def written(self, returns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the same names without a scale for all of y, as kernels read that."""
        results = self.results(returns)
        return tuple(name for name in results if name != "y8_scale" or self.granularity != "tensor")


def check_x(function: str, x: Layout) -> None:
    checks.check_dtype(function, "x", x)
    if x.dtype == "float64":
        raise TypeError(f"{function}: x must have dtype float16, bfloat16 or float32; got float64. Convert it.")


def check_rows(function: str, x: Layout, s_dtype: str | None) -> None:
    """Check x of a fused operation, and what is normalised."""
    check_x(function, x)
    if s_dtype == "float64":
        raise TypeError(f"{function}: s_dtype must be float16, bfloat16 or float32; got float64.")


def check_format(function: str, dtype: object) -> str:
    """Return the full name of the format."""
    named = isinstance(dtype, str)
    name = dtype if named else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).removeprefix("torch.")
    name = NAMES.get(name, name)
    if name not in FLOAT8:
        raise TypeError(f"{function}: dtype must be 'e4m3' or 'e5m2'; got {dtype!r}.")
    return name


def check_granularity(function: str, granularity: object, scale: Any) -> None:
    """Check the granularity and the scale that is given."""
    if isinstance(granularity, bool) or granularity not in tuple(SCALES):
        raise ValueError(f"{function}: granularity must be 'row', 'tensor' or {BLOCK}; got {granularity!r}.")
    if scale is None:
        return
    if granularity != "tensor":
        raise ValueError(
            f"{function}: scale is for granularity='tensor', others find their scales; got granularity={granularity!r}."
        )
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        if not (0 < checks.as_float(function, "scale", scale) < math.inf):
            raise ValueError(f"{function}: scale must be positive and finite; got {scale}.")
    elif _dtype_name(scale) != "float32" or math.prod(scale.shape) != 1:
        came = f"{getattr(scale, 'dtype', type(scale).__name__)} of shape {getattr(scale, 'shape', ())}"
        raise TypeError(f"{function}: scale must be a number or an array of one float32; got {came}.")


def _dtype_name(array: Any) -> str:
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "name", str(dtype).removeprefix("torch."))


def store_of(function: str, dtype: object, granularity: Any, scale: Any, *, wide: bool) -> Float8Store:
    """Return the store that such arguments of a call ask for."""
    check_granularity(function, granularity, scale)
    return Float8Store(check_format(function, dtype), granularity, wide)


def scales_shape(granularity: str | int, leading: tuple[int, ...], cols: int) -> tuple[int, ...]:
    return {"row": leading, "tensor": (), BLOCK: (*leading, -(-cols // BLOCK))}[granularity]


def largest_normalised(subtracts_mean: bool, cols: int) -> float:
    """Return what none of cols numbers with mean square 1 exceeds, with mean 0 or without a mean.

    With mean 0 that is sqrt(cols - 1): the other numbers then add up to minus the largest.
    """
    return math.sqrt(max(1, cols - 1) if subtracts_mean else cols)


def scale_of(
    xp: Any, operation: Operation, float8: Float8Store, cols: int, operands: Mapping[str, Any], scale: Any
) -> Any:
    """Return the one scale of all of y, an array without axes.

    It is the given one, or of an affine operation the one that no value exceeds. `xp` is numpy or cupy.
    """
    if scale is not None:
        return xp.asarray(scale, "float32").reshape(())
    return affine_scale(xp, operation, FLOAT8[float8.format], cols, operands.get("weight"), operands.get("bias"))


def affine_scale(xp: Any, operation: Operation, largest: float, cols: int, weight: Any, bias: Any) -> Any:
    """Return a scale for all of y that no value exceeds, whatever x is; `largest` is the format's largest number."""
    zero_centered = weight is not None and dict(operation.defaults)["weight"] == 0
    subtracts_mean = NORMS[operation.norm].subtracts_mean
    return static_scale(xp, subtracts_mean, cols, weight, bias, zero_centered, largest)


def static_scale(
    xp: Any, layer_norm: bool, cols: int, weight: Any, bias: Any, zero_centered_gamma: bool, largest: float
) -> Any:
    """Return the largest (|gamma| sqrt(cols - 1) + |beta|) / F, a scale that no value of y exceeds, whatever x is.

    `xp` is numpy, cupy or jax.numpy.
    """
    gamma = xp.ones((), "float32") if weight is None else weight.astype("float32")
    bound = abs(gamma + 1 if zero_centered_gamma else gamma) * largest_normalised(layer_norm, cols)
    if bias is not None:
        bound = bound + abs(bias.astype("float32"))
    scale = (bound.max() / largest).astype("float32")
    return xp.where(scale > 0, scale, xp.ones((), "float32"))
