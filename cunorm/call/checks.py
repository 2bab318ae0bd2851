"""Checks of the arguments of norms: every rule, and the message that states it.

Arrays are known only by their `Layout`, so the same rules hold in every framework.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..operation import Operation, affine
from ..plan.problem import ITEMSIZE, RowStrides


class Layout(NamedTuple):
    """An array without its memory. `strides` are in elements; `device` is "cpu" or a CUDA device's number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str | int


def strides_in_elements(
    function: str, name: str, shape: tuple[int, ...], strides: Sequence[int], itemsize: int
) -> tuple[int, ...]:
    """Return strides in elements for `strides` in bytes.

    The stride of an axis may be any if the axis has one element, or the array none.
    """
    whole = [stride % itemsize == 0 for stride in strides]
    if (
        not all(whole)
        and any(size > 1 and not fits for size, fits in zip(shape, whole, strict=True))
        and 0 not in shape
    ):
        raise ValueError(
            f"{function}: {name} must have strides that are multiples of its {itemsize} bytes an element; got strides "
            f"of {tuple(strides)} bytes. Pass a contiguous copy."
        )
    return tuple(stride // itemsize for stride in strides)


class NormOptions(NamedTuple):
    """What a call of a plain norm asks for besides its arrays and eps, each as the caller gave it.

    The public functions make a plain tuple of these fields, because a named one takes the host longer. Whoever works
    something out for the first time names the fields with NormOptions(*options).
    """

    function: str  # the public function, which errors name
    normalized_shape: Any
    zero_centered_gamma: Any
    dtype: Any  # the dtype of y
    sm_margin: Any
    # Forward: whether the statistics are returned too, or the Float8Store that y is written by. Backward: output_mask.
    returns: Any

    @property
    def norm(self) -> str:
        """The norm's key in NORMS."""
        return "layer_norm" if self.function.startswith("layer_norm") else "rms_norm"

    @property
    def operation(self) -> Operation:
        return affine(self.norm, bool(self.zero_centered_gamma))

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the arrays that a backward pass cannot do without."""
        return ("dy", "x", "mean", "rstd") if self.norm == "layer_norm" else ("dy", "x", "rstd")


NormTuple = tuple[str, Any, Any, Any, Any, Any]  # NormOptions as the public functions make them


def check_forward(options: NormOptions, layouts: Mapping[str, Layout]) -> tuple[tuple[int, ...], str]:
    """Check the arguments of a forward function; return (normalized_shape, dtype of y).

    `layouts` are those of x, weight, bias and out, as far as they are given. The options have a dtype's name or None.
    """
    function = options.function
    x, weight, out = layouts["x"], layouts.get("weight"), layouts.get("out")
    check_dtype(function, "x", x)
    shape = shape_of(function, options.normalized_shape, x.shape, None if weight is None else weight.shape)
    if not shape:
        raise ValueError(f"{function}: x must have at least one axis to normalise; got shape {x.shape}.")
    if x.shape[-len(shape) :] != shape:
        named = "normalized_shape" if options.normalized_shape is not None else "the shape of weight"
        raise ValueError(
            f"{function}: {named} must be the last axes of x; got {shape} for x of shape {x.shape}. "
            "Pass the shape of the axes to normalise over."
        )
    if math.prod(shape) == 0:
        raise ValueError(f"{function}: the normalised axes must not be empty; got normalized_shape {shape}.")
    _check_parameter(function, "weight", weight, shape, x)
    _check_parameter(function, "bias", layouts.get("bias"), shape, x)
    if options.zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    y_dtype = options.dtype or (out.dtype if out is not None else x.dtype)
    if y_dtype not in ITEMSIZE:
        raise TypeError(f"{function}: dtype {must_be_a_dtype(y_dtype)}")
    if out is not None:
        check_same_device(function, "out", out, x)
        if out.shape != x.shape:
            raise ValueError(f"{function}: out must have the shape of x, {x.shape}; got {out.shape}.")
        if out.dtype != y_dtype:
            raise TypeError(f"{function}: out must have dtype {y_dtype}; got {out.dtype}. Pass dtype={out.dtype!r}.")
    return shape, y_dtype


def shape_of(
    function: str,
    normalized_shape: int | Sequence[int] | None,
    x: tuple[int, ...],
    weight: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Return the shape of the normalised axes, by the shapes of x and weight where none is given."""
    if normalized_shape is not None:
        return _as_shape(function, normalized_shape)
    return x[-1:] if weight is None else weight


def check_backward(options: NormOptions, layouts: Mapping[str, Layout]) -> tuple[int, ...]:
    """Check the arguments of a backward function; return normalized_shape.

    `layouts` are those of dy, x, mean, rstd, weight and dx_out, as far as they are given.
    """
    function = options.function
    dy, x, rstd = layouts["dy"], layouts["x"], layouts["rstd"]
    weight, dx_out = layouts.get("weight"), layouts.get("dx_out")
    check_dtype(function, "x", x)
    check_dtype(function, "dy", dy)
    check_same_device(function, "dy", dy, x)
    if dy.shape != x.shape:
        raise ValueError(f"{function}: dy must have the shape of x, {x.shape}; got {dy.shape}.")
    statistics = "float64" if x.dtype == "float64" else "float32"
    rank = len(rstd.shape)
    for name in ("mean", "rstd"):
        if name not in layouts:
            continue
        array = layouts[name]
        check_same_device(function, name, array, x)
        if array.shape != x.shape[:rank] or rank >= len(x.shape):
            raise ValueError(
                f"{function}: {name} must have the shape of x without its normalised axes; got {array.shape} for x of "
                f"shape {x.shape}. Pass what {function.replace('backward', 'forward')} returned."
            )
        if array.dtype != statistics:
            raise TypeError(
                f"{function}: {name} must have dtype {statistics} for x of {x.dtype}; got {array.dtype}. Convert it."
            )
    shape = x.shape[rank:]
    if math.prod(shape) == 0:
        raise ValueError(f"{function}: the normalised axes must not be empty; got {shape}.")
    _check_parameter(function, "weight", weight, shape, x)
    if options.zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    if dx_out is not None:
        check_same_device(function, "dx_out", dx_out, x)
        if dx_out.shape != x.shape:
            raise ValueError(f"{function}: dx_out must have the shape of x, {x.shape}; got {dx_out.shape}.")
        if dx_out.dtype != x.dtype:
            raise TypeError(f"{function}: dx_out must have the dtype of x, {x.dtype}; got {dx_out.dtype}.")
    return shape


def dtype_name(function: str, dtype: object) -> str:
    """Return the name of a dtype that is given as a string, or as a dtype or scalar type of NumPy or torch."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    name = name or str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise TypeError(f"{function}: dtype {must_be_a_dtype(dtype)}")
    return str(name)


# What others call the four dtypes.
SHORT_NAMES = {
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "f32", "float", "single"),
    "float64": ("fp64", "f64", "double"),
}


def must_be_a_dtype(got: object) -> str:
    """Return what an error says of a dtype that is none of the four."""
    meant = [name for name, others in SHORT_NAMES.items() if str(got).lower() in others]
    return f"must be one of {_names()}; got {got!r}{f': did you mean {meant[0]}?' if meant else '.'}"


def as_float(function: str, name: str, number: float | numbers.Real) -> float:
    """Return a number as a float; raise ValueError for an integer or a fraction that is too large."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{function}: {name} must be finite; got a number beyond 1.8e308.") from None


def kind_of_option(option: object) -> str:
    """Return, for an error, the kind of an option that must be a number, and why an array is none."""
    kind = type(option).__name__
    if not hasattr(option, "dtype"):
        return f"{kind}."
    instead = "a static argument of jax.jit" if type(option).__module__.startswith("jax") else "float() or int() of it"
    return f"{kind}, an array, whose value is not known before the call runs: pass {instead}."


def check_eps(function: str, eps: object) -> float:
    """Return eps as a float if it is a finite number that is not negative."""
    # isinstance of an abstract class takes 0.3 us.
    if type(eps) is not float and (isinstance(eps, bool) or not isinstance(eps, numbers.Real)):
        raise TypeError(f"{function}: eps must be a real number; got {kind_of_option(eps)}")
    value = as_float(function, "eps", eps)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{function}: eps must be finite and not negative; got {value}.")
    return value


def check_sm_margin(function: str, sm_margin: object, sms: int | None) -> int:
    """Return sm_margin if it leaves one of the `sms` multiprocessors of the device, which is None on the host."""
    if type(sm_margin) is not int and (isinstance(sm_margin, bool) or not isinstance(sm_margin, numbers.Integral)):
        raise TypeError(f"{function}: sm_margin must be an integer; got {kind_of_option(sm_margin)}")
    margin = int(sm_margin)
    if margin < 0 or (sms is not None and margin >= sms):
        limit = "" if sms is None else f" and below the device's {sms} multiprocessors"
        raise ValueError(f"{function}: sm_margin must be 0 or more{limit}; got {margin}.")
    return margin


def check_flags(function: str, output_mask: object, length: int) -> tuple[bool, ...]:
    """Check flags that say which of so many gradients are wanted."""
    if not isinstance(output_mask, Sequence) or isinstance(output_mask, str):
        raise TypeError(f"{function}: output_mask must be a tuple of {length} bools; got {type(output_mask).__name__}.")
    if len(output_mask) != length:
        raise ValueError(f"{function}: output_mask must have {length} entries; got {len(output_mask)}.")
    return tuple(bool(flag) for flag in output_mask)


def check_output_mask(
    function: str, output_mask: object, length: int, dx_out: object = None
) -> tuple[bool, bool, bool]:
    """Return whether dx, dweight and dbias are wanted, of `length` flags; without a third flag dbias is not."""
    flags = check_flags(function, output_mask, length)
    if dx_out is not None and not flags[0]:
        raise ValueError(f"{function}: dx_out must be None where output_mask leaves dx out; got {output_mask}.")
    return (flags[0], flags[1], flags[2] if length == 3 else False)


@lru_cache(maxsize=4096)
def row_strides(layout: Layout, normalized_ndim: int) -> RowStrides | None:
    """Return where rows begin, if each is contiguous and two strides at most lead from row to row; None: copy it."""
    if is_contiguous(layout):
        return RowStrides(math.prod(layout.shape[len(layout.shape) - normalized_ndim :]))
    rows = _rows_of(layout, normalized_ndim)
    if rows is None or len(rows.axes) > 2:
        return None
    if len(rows.axes) < 2:
        return RowStrides(rows.axes[0].stride if rows.axes else rows.cols)
    outer, inner = rows.axes
    # Kernels count rows of two strides in 32 bits (Operand.row_arguments).
    return None if outer.size * inner.size >= 2**32 else RowStrides(inner.stride, outer.stride, inner.size)


def is_contiguous(layout: Layout) -> bool:
    """Return whether the elements lie close, the last axis innermost."""
    step = 1
    for size, stride in zip(layout.shape[::-1], layout.strides[::-1], strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


class _Axis(NamedTuple):
    size: int
    stride: int


class _Rows(NamedTuple):
    """Rows of `cols` contiguous elements, and the fewest axes that lead from row to row, outermost first."""

    axes: tuple[_Axis, ...]
    cols: int


def _rows_of(layout: Layout, normalized_ndim: int) -> _Rows | None:
    """Return the steps from row to row, None if a row is not contiguous; an array without rows has any."""
    axes = [_Axis(*axis) for axis in zip(layout.shape, layout.strides, strict=True)]
    first = len(axes) - normalized_ndim
    cols = math.prod(layout.shape[first:])
    if 0 in layout.shape:
        return _Rows((), cols)
    if _merged(axes[first:]) not in ((), (_Axis(cols, 1),)):
        return None
    return _Rows(_merged(axes[:first]), cols)


def _merged(axes: Sequence[_Axis]) -> tuple[_Axis, ...]:
    """Return the same elements in the same order by the fewest axes."""
    merged: list[_Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if merged and merged[-1].stride == axis.size * axis.stride:
            axis = _Axis(merged.pop().size * axis.size, axis.stride)
        merged.append(axis)
    return tuple(merged)


def check_out_memory(
    function: str,
    name: str,
    out: Layout,
    out_pointer: int,
    inputs: Sequence[tuple[str, Layout, int]],
    normalized_ndim: int,
) -> None:
    """Check that `out`, which errors call `name`, overlaps no input and not itself; it may be x or dy."""
    if 0 in out.shape:
        return
    if _overlaps_itself(out):
        raise ValueError(
            f"{function}: every element of {name} must have its own memory; got strides {out.strides}. Pass a copy."
        )
    itself = [other for other, _, _ in inputs if other in ("x", "dy")]
    for other, layout, pointer in inputs:
        same = pointer == out_pointer and (layout.strides, layout.dtype) == (out.strides, out.dtype)
        if other in itself and same:
            continue
        if _may_overlap(out, out_pointer, layout, pointer, normalized_ndim):
            raise ValueError(
                f"{function}: {name} must be {' or '.join(itself)} itself or share no memory with {other}; got arrays "
                "that overlap. Pass a separate array."
            )


def _overlaps_itself(layout: Layout) -> bool:
    """Return whether the steps along some axis are shorter than what the axes with shorter steps reach.

    That is so for no slice of an array whose elements have their own memory.
    """
    axes = [axis for axis in zip(layout.shape, layout.strides, strict=True) if axis[0] > 1]
    reach = 1
    for size, stride in sorted(axes, key=lambda axis: abs(axis[1])):
        if abs(stride) < reach:
            return True
        reach += (size - 1) * abs(stride)
    return False


def _may_overlap(a: Layout, a_pointer: int, b: Layout, b_pointer: int, normalized_ndim: int) -> bool:
    """Return whether two arrays may share memory.

    The answer is exact for rows, or blocks of rows such as the heads of a token, that alternate in one buffer. Other
    arrays may share memory if their ranges of addresses overlap.
    """
    if 0 in a.shape or 0 in b.shape:
        return False
    a_low, a_high = _address_range(a, a_pointer)
    b_low, b_high = _address_range(b, b_pointer)
    if a_high <= b_low or b_high <= a_low:
        return False
    if len(a.shape) != len(b.shape):
        return True
    a_rows, b_rows = _rows_of(a, normalized_ndim), _rows_of(b, normalized_ndim)
    if a_rows is None or b_rows is None:
        return True
    for outer in range(1, 1 + max(len(a_rows.axes), len(b_rows.axes))):
        a_steps, a_low, a_high = _blocks(a_rows, outer, a.dtype, a_pointer)
        b_steps, b_low, b_high = _blocks(b_rows, outer, b.dtype, b_pointer)
        # Every block of either lies some multiple of `pitch` after the first.
        pitch = math.gcd(*a_steps, *b_steps)
        offset = (b_low - a_low) % pitch if pitch else 0
        if a_high - a_low <= offset and offset + b_high - b_low <= pitch:
            return False
    return True


def _blocks(rows: _Rows, outer: int, dtype: str, pointer: int) -> tuple[list[int], int, int]:
    """Return the steps (bytes) between the blocks of the first `outer` axes, and the first one's range of addresses."""
    inner = (*rows.axes[outer:], _Axis(rows.cols, 1))
    shape, strides = zip(*inner, strict=True)
    steps = [axis.stride * ITEMSIZE[dtype] for axis in rows.axes[:outer]]
    return steps, *_address_range(Layout(shape, strides, dtype, ""), pointer)


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


WEIGHT_COMES_THIRD = " An array there is no shape: weight is the third argument, or weight=."


def _as_shape(function: str, normalized_shape: object) -> tuple[int, ...]:
    entries = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(
            f"{function}: normalized_shape must be an int or a sequence of ints; got {type(normalized_shape).__name__}."
            f"{WEIGHT_COMES_THIRD if hasattr(normalized_shape, 'dtype') else ''}"
        )
    if not all(isinstance(entry, numbers.Integral) and not isinstance(entry, bool) for entry in entries):
        raise TypeError(f"{function}: normalized_shape must hold ints; got {tuple(entries)!r}.")
    if not entries:
        raise ValueError(f"{function}: normalized_shape must name at least one axis; got ().")
    return tuple(int(entry) for entry in entries)
