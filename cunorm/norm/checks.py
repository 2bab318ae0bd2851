"""What the norms ask of their arguments: every rule, and every message that states one.

Arrays are known only by their `Layout`, so the same rules hold in every framework.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .problem import ITEMSIZE


class Layout(NamedTuple):
    """An array without its memory. `strides` in elements; `device` is "cpu" or a CUDA device's number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str | int


def check_forward(
    function: str,
    x: Layout,
    normalized_shape: int | Sequence[int] | None,
    weight: Layout | None,
    bias: Layout | None,
    out: Layout | None,
    dtype: str | None,
    *,
    zero_centered_gamma: bool,
) -> tuple[tuple[int, ...], str]:
    """Check the arguments of a forward function; return (normalized_shape, dtype of y)."""
    check_dtype(function, "x", x)
    if normalized_shape is None:
        shape = weight.shape if weight is not None else x.shape[-1:]
    else:
        shape = _as_shape(function, normalized_shape)
    if not shape:
        raise ValueError(f"{function}: x must have at least one axis to normalise; got shape {x.shape}.")
    if x.shape[-len(shape) :] != shape:
        named = "normalized_shape" if normalized_shape is not None else "the shape of weight"
        raise ValueError(
            f"{function}: {named} must be the last axes of x; got {shape} for x of shape {x.shape}. "
            "Pass the shape of the axes to normalise over."
        )
    if math.prod(shape) == 0:
        raise ValueError(f"{function}: the normalised axes must not be empty; got normalized_shape {shape}.")
    _check_parameter(function, "weight", weight, shape, x)
    _check_parameter(function, "bias", bias, shape, x)
    if zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    y_dtype = dtype or (out.dtype if out is not None else x.dtype)
    if y_dtype not in ITEMSIZE:
        raise TypeError(f"{function}: dtype must be one of {_names()}; got {y_dtype}.")
    if out is not None:
        check_same_device(function, "out", out, x)
        if out.shape != x.shape:
            raise ValueError(f"{function}: out must have the shape of x, {x.shape}; got {out.shape}.")
        if out.dtype != y_dtype:
            raise TypeError(f"{function}: out must have dtype {y_dtype}; got {out.dtype}. Pass dtype={out.dtype!r}.")
    return shape, y_dtype


def check_backward(
    function: str,
    dy: Layout,
    x: Layout,
    mean: Layout | None,
    rstd: Layout,
    weight: Layout | None,
    *,
    zero_centered_gamma: bool,
) -> tuple[int, ...]:
    """Check the arguments of a backward function; return normalized_shape."""
    check_dtype(function, "x", x)
    check_dtype(function, "dy", dy)
    check_same_device(function, "dy", dy, x)
    if dy.shape != x.shape:
        raise ValueError(f"{function}: dy must have the shape of x, {x.shape}; got {dy.shape}.")
    statistics = "float64" if x.dtype == "float64" else "float32"
    rank = len(rstd.shape)
    for name, array in (("mean", mean), ("rstd", rstd)):
        if array is None:
            continue
        check_same_device(function, name, array, x)
        if array.shape != x.shape[:rank] or rank >= len(x.shape):
            raise ValueError(
                f"{function}: {name} must have the shape of x without its normalised axes; got {array.shape} for x of "
                f"shape {x.shape}. Pass what {function.replace('backward', 'forward')} returned."
            )
        if array.dtype != statistics:
            raise TypeError(f"{function}: {name} must have dtype {statistics} for x of {x.dtype}; got {array.dtype}.")
    shape = x.shape[rank:]
    if math.prod(shape) == 0:
        raise ValueError(f"{function}: the normalised axes must not be empty; got {shape}.")
    _check_parameter(function, "weight", weight, shape, x)
    if zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    return shape


def dtype_name(function: str, dtype: object) -> str:
    """The name of a dtype given as a string, a NumPy dtype or a scalar type."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if name not in ITEMSIZE:
        raise TypeError(f"{function}: dtype must be one of {_names()}; got {dtype!r}.")
    return str(name)


def check_eps(function: str, eps: object) -> float:
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"{function}: eps must be a real number; got {type(eps).__name__}.")
    value = float(eps)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{function}: eps must be finite and not negative; got {value}.")
    return value


def check_sm_margin(function: str, sm_margin: object, sms: int | None) -> int:
    """`sms` is the device's number of multiprocessors, None on the host."""
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, numbers.Integral):
        raise TypeError(f"{function}: sm_margin must be an integer; got {type(sm_margin).__name__}.")
    margin = int(sm_margin)
    if margin < 0 or (sms is not None and margin >= sms):
        limit = "" if sms is None else f" and below the device's {sms} multiprocessors"
        raise ValueError(f"{function}: sm_margin must be 0 or more{limit}; got {margin}.")
    return margin


def check_output_mask(function: str, output_mask: object, length: int) -> tuple[bool, bool, bool]:
    """Three flags; a missing third one (rms_norm has no bias) is False."""
    if not isinstance(output_mask, Sequence) or isinstance(output_mask, str):
        raise TypeError(f"{function}: output_mask must be a tuple of {length} bools; got {type(output_mask).__name__}.")
    if len(output_mask) != length:
        raise ValueError(f"{function}: output_mask must have {length} entries; got {len(output_mask)}.")
    flags = [bool(flag) for flag in output_mask]
    return (flags[0], flags[1], flags[2] if length == 3 else False)


@lru_cache(maxsize=4096)
def row_stride(layout: Layout, normalized_ndim: int) -> int | None:
    """Elements from one row to the next if `layout` is a matrix with contiguous rows, else None: it must be copied."""
    expected = 1
    first = len(layout.shape) - normalized_ndim
    for size, stride in zip(reversed(layout.shape[first:]), reversed(layout.strides[first:]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    result: int | None = None
    for size, stride in zip(reversed(layout.shape[:first]), reversed(layout.strides[:first]), strict=True):
        if size == 1:
            continue
        if result is None:
            result, expected = stride, stride * size
        elif stride != expected:
            return None
        else:
            expected *= size
    return math.prod(layout.shape[first:]) if result is None else result


def check_out_memory(
    function: str, out: Layout, out_pointer: int, inputs: Sequence[tuple[str, Layout, int]], normalized_ndim: int
) -> None:
    """`out` may be x itself; any other overlap with an input, or with itself, is an error."""
    if 0 in out.shape:
        return
    stride = row_stride(out, normalized_ndim)
    cols = math.prod(out.shape[len(out.shape) - normalized_ndim :])
    rows = math.prod(out.shape) // cols
    self_overlap = any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True))
    if self_overlap or (stride is not None and rows > 1 and abs(stride) < cols):
        raise ValueError(f"{function}: every element of out must have its own memory; got strides {out.strides}.")
    for name, layout, pointer in inputs:
        if name == "x" and pointer == out_pointer and (layout.strides, layout.dtype) == (out.strides, out.dtype):
            continue
        if _may_overlap(out, out_pointer, layout, pointer, normalized_ndim):
            raise ValueError(
                f"{function}: out must be x itself or share no memory with {name}; got arrays that overlap. "
                f"Pass a separate array."
            )


def _may_overlap(a: Layout, a_pointer: int, b: Layout, b_pointer: int, normalized_ndim: int) -> bool:
    """Exact for two matrices of equal row stride (slices of one buffer); otherwise compares the ranges of addresses."""
    if 0 in a.shape or 0 in b.shape:
        return False
    a_low, a_high = _address_range(a, a_pointer)
    b_low, b_high = _address_range(b, b_pointer)
    if a_high <= b_low or b_high <= a_low:
        return False
    if len(a.shape) != len(b.shape):
        return True
    a_stride, b_stride = row_stride(a, normalized_ndim), row_stride(b, normalized_ndim)
    if a_stride is None or b_stride is None:
        return True
    pitch = a_stride * ITEMSIZE[a.dtype]
    if pitch <= 0 or pitch != b_stride * ITEMSIZE[b.dtype]:
        return True
    cols = math.prod(a.shape[len(a.shape) - normalized_ndim :])
    a_width, b_width = cols * ITEMSIZE[a.dtype], cols * ITEMSIZE[b.dtype]
    offset = (b_pointer - a_pointer) % pitch
    return offset < a_width or offset + b_width > pitch


def _address_range(layout: Layout, pointer: int) -> tuple[int, int]:
    reach = [(n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True)]
    itemsize = ITEMSIZE[layout.dtype]
    low = pointer + itemsize * sum(r for r in reach if r < 0)
    return low, pointer + itemsize * (sum(r for r in reach if r > 0) + 1)


def _names() -> str:
    return ", ".join(ITEMSIZE)


def check_dtype(function: str, name: str, array: Layout) -> None:
    if array.dtype not in ITEMSIZE:
        raise TypeError(f"{function}: {name} must have dtype {_names()}; got {array.dtype}. Convert it first.")


def check_same_device(function: str, name: str, array: Layout, x: Layout) -> None:
    if array.device != x.device:
        raise ValueError(
            f"{function}: {name} must be on the device of x, {x.device}; got device {array.device}. Move one of them."
        )


def _check_parameter(function: str, name: str, array: Layout | None, shape: tuple[int, ...], x: Layout) -> None:
    if array is None:
        return
    check_dtype(function, name, array)
    check_same_device(function, name, array, x)
    if array.shape != shape:
        axes = "the last axis" if len(shape) == 1 else f"the last {len(shape)} axes"
        raise ValueError(f"{function}: {name} must have shape {shape} to match {axes} of x; got {array.shape}.")


def _as_shape(function: str, normalized_shape: object) -> tuple[int, ...]:
    entries = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(
            f"{function}: normalized_shape must be an int or a sequence of ints; got {type(normalized_shape).__name__}."
        )
    if not all(isinstance(entry, numbers.Integral) and not isinstance(entry, bool) for entry in entries):
        raise TypeError(f"{function}: normalized_shape must hold ints; got {tuple(entries)!r}.")
    if not entries:
        raise ValueError(f"{function}: normalized_shape must name at least one axis; got ().")
    return tuple(int(entry) for entry in entries)
