"""The functions on NumPy arrays, in float64 with one rounding at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from .call import checks
from .call.checks import Layout
from .plan.problem import FLOAT8


def forward(
    function: str,
    x: numpy.ndarray,
    normalized_shape: int | Sequence[int] | None,
    weight: numpy.ndarray | None,
    bias: numpy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: numpy.ndarray | None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[numpy.ndarray, numpy.ndarray | None, numpy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    named = {"x": x, "weight": weight, "bias": bias, "out": out}
    layouts = {name: layout(function, name, array) for name, array in named.items() if array is not None}
    shape, y_dtype = checks.check_forward(
        function,
        layouts["x"],
        normalized_shape,
        layouts.get("weight"),
        layouts.get("bias"),
        layouts.get("out"),
        None if dtype is None else checks.dtype_name(function, dtype),
        zero_centered_gamma=zero_centered_gamma,
    )
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, sm_margin, None)
    if out is not None:
        inputs = [(name, layouts[name], pointer(named[name])) for name in ("x", "weight", "bias") if name in layouts]
        _check_out(function, "out", out, inputs, len(shape))
    y = numpy.empty(x.shape, numpy_dtype(function, y_dtype)) if out is None else out
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    leading = x.shape[: x.ndim - len(shape)]
    values = x.astype(numpy.float64, order="C")
    with numpy.errstate(all="ignore"):
        mean = values.mean(axes, keepdims=True) if function.startswith("layer_norm") else numpy.float64(0)
        values = values - mean
        if function.startswith("layer_norm"):
            lost = values.mean(axes, keepdims=True)  # by the rounding of mean
            values -= lost
            mean = mean + lost
        rstd = 1 / numpy.sqrt((values * values).mean(axes, keepdims=True) + eps)
        values *= rstd
        if weight is not None:
            values *= _gamma(weight, zero_centered_gamma)
        if bias is not None:
            values += bias.astype(numpy.float64)
        y[...] = rounded(values, y.dtype)
        if not statistics:
            return y, None, None
        kind = numpy.float64 if layouts["x"].dtype == "float64" else numpy.float32
        mean = numpy.broadcast_to(mean, rstd.shape)
        return y, mean.reshape(leading).astype(kind), rstd.reshape(leading).astype(kind)


def backward(
    function: str,
    dy: numpy.ndarray,
    x: numpy.ndarray,
    mean: numpy.ndarray | None,
    rstd: numpy.ndarray,
    weight: numpy.ndarray | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    dx_out: numpy.ndarray | None,
    sm_margin: int,
) -> tuple[numpy.ndarray | None, numpy.ndarray | None, numpy.ndarray | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    named = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "dx_out": dx_out}
    layer_norm = function.startswith("layer_norm")
    optional = ("weight", "dx_out") if layer_norm else ("weight", "dx_out", "mean")
    layouts = {
        name: layout(function, name, array)
        for name, array in named.items()
        if array is not None or name not in optional
    }
    shape = checks.check_backward(
        function,
        layouts["dy"],
        layouts["x"],
        layouts.get("mean"),
        layouts["rstd"],
        layouts.get("weight"),
        layouts.get("dx_out"),
        zero_centered_gamma=zero_centered_gamma,
    )
    checks.check_sm_margin(function, sm_margin, None)
    mask = checks.check_output_mask(function, output_mask, 3 if layer_norm else 2, dx_out)
    wants_dx, wants_dweight, wants_dbias = mask
    if dx_out is not None:
        inputs = [(name, layouts[name], pointer(named[name])) for name in layouts if name != "dx_out"]
        _check_out(function, "dx_out", dx_out, inputs, len(shape))
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    columns = (*rstd.shape, *(1,) * len(shape))
    with numpy.errstate(all="ignore"):
        grad = dy.astype(numpy.float64, order="C")
        xhat = x.astype(numpy.float64, order="C")
        if mean is not None:
            xhat = xhat - mean.astype(numpy.float64).reshape(columns)
        xhat = xhat * rstd.astype(numpy.float64).reshape(columns)
        dx = dx_out
        if wants_dx:
            g = grad if weight is None else grad * _gamma(weight, zero_centered_gamma)
            c1 = (g * xhat).mean(axes, keepdims=True)
            c2 = g.mean(axes, keepdims=True) if layer_norm else 0.0
            dx = numpy.empty(x.shape, x.dtype) if dx_out is None else dx_out
            dx[...] = rounded((g - c2 - xhat * c1) * rstd.astype(numpy.float64).reshape(columns), x.dtype)
        parameter = x.dtype if weight is None else weight.dtype
        dweight = rounded(sum_of_rows(grad * xhat, rstd.ndim), parameter) if wants_dweight else None
        dbias = rounded(sum_of_rows(grad, rstd.ndim), parameter) if wants_dbias else None
    return dx, dweight, dbias


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a NumPy array; TypeError for anything else."""
    if not isinstance(array, numpy.ndarray) or isinstance(array, numpy.ma.MaskedArray):
        must_be = "a NumPy array" if name == "x" else "a NumPy array, as x is"
        raise TypeError(f"{function}: {name} must be {must_be}; got {type(array).__name__}. Convert it.")
    strides = checks.strides_in_elements(function, name, array.shape, array.strides, array.dtype.itemsize or 1)
    return Layout(array.shape, strides, array.dtype.name, "cpu")


def _check_out(function: str, name: str, out: numpy.ndarray, inputs: Sequence[tuple[str, Layout, int]], ndim: int):
    """What must hold of an array that is written."""
    checks.check_out_memory(function, name, layout(function, name, out), pointer(out), inputs, ndim)
    if not out.flags.writeable:
        raise ValueError(f"{function}: {name} must be writeable; got a read-only array.")


def pointer(array: numpy.ndarray) -> int:
    return array.__array_interface__["data"][0]


def numpy_dtype(function: str, name: str) -> numpy.dtype:
    if name == "bfloat16" or name in FLOAT8:
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(f"{function}: {name} in NumPy needs ml_dtypes: pip install ml_dtypes.") from error
        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def _gamma(weight: numpy.ndarray, zero_centered_gamma: bool) -> numpy.ndarray:
    gamma = weight.astype(numpy.float64)
    return 1 + gamma if zero_centered_gamma else gamma


def sum_of_rows(values: numpy.ndarray, leading: int) -> numpy.ndarray:
    """The sum over the first axes. NumPy adds in pairs only along contiguous memory; elsewhere one by one, with an
    error that grows with the number of rows.
    """
    shape = values.shape[leading:]
    columns = numpy.ascontiguousarray(values.reshape(math.prod(values.shape[:leading]), math.prod(shape)).T)
    return columns.sum(axis=1).reshape(shape)


def rounded(values: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """float64 values in `dtype`, rounded once. ml_dtypes takes two steps to bfloat16, by way of float32: rounding the
    first to odd (cut off, and the last bit set if anything was lost) makes the second right.
    """
    if dtype.name != "bfloat16":
        return values.astype(dtype)
    single = numpy.atleast_1d(values.astype(numpy.float32))
    word = single.view(numpy.uint32)
    lost = single != values
    word -= abs(single) > abs(values)
    word |= lost
    return single.reshape(values.shape).astype(dtype)
