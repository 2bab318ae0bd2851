"""The functions on CuPy arrays: check, plan, launch on CuPy's current stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy

from . import device, launch, problem
from .host import numpy_dtype
from .plan import plan
from .problem import Layout, Problem


def forward(
    function: str,
    x: cupy.ndarray,
    normalized_shape: int | Sequence[int] | None,
    weight: cupy.ndarray | None,
    bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: cupy.ndarray | None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    named = {"x": x, "weight": weight, "bias": bias, "out": out}
    layouts = {name: layout(function, name, array) for name, array in named.items() if array is not None}
    shape, y_dtype = problem.check_forward(
        function,
        layouts["x"],
        normalized_shape,
        layouts.get("weight"),
        layouts.get("bias"),
        layouts.get("out"),
        None if dtype is None else problem.dtype_name(function, dtype),
        zero_centered_gamma=zero_centered_gamma,
    )
    eps = problem.check_eps(function, eps)
    device_id = int(layouts["x"].device)
    properties = device.current(device_id)
    sm_margin = problem.check_sm_margin(function, sm_margin, properties.sms)
    if out is not None:
        inputs = [(name, layouts[name], named[name].data.ptr) for name in ("x", "weight", "bias") if name in layouts]
        problem.check_out_memory(function, layouts["out"], out.data.ptr, inputs, len(shape))

    with cupy.cuda.Device(device_id):
        leading = x.shape[: x.ndim - len(shape)]
        y = out
        if out is None or problem.row_stride(layouts["out"], len(shape)) is None:
            y = cupy.empty(x.shape, numpy_dtype(function, y_dtype))
        statistics_dtype = "float64" if layouts["x"].dtype == "float64" else "float32"
        layer_norm = function.startswith("layer_norm")
        mean = cupy.empty(leading, statistics_dtype) if statistics and layer_norm else None
        rstd = cupy.empty(leading, statistics_dtype) if statistics else None
        if x.size:
            x, x_stride = _readable(x, layouts["x"], len(shape))
            weight, bias = (None if a is None else cupy.ascontiguousarray(a) for a in (weight, bias))
            pointers = {"x": x, "y": y, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd}
            pointers = {name: 0 if array is None else array.data.ptr for name, array in pointers.items()}
            cols = math.prod(shape)
            task = Problem(
                op="layer_norm" if layer_norm else "rms_norm",
                direction="forward",
                rows=x.size // cols,
                cols=cols,
                x=layouts["x"].dtype,
                y=y_dtype,
                weight=layouts["weight"].dtype if weight is not None else None,
                bias=layouts["bias"].dtype if bias is not None else None,
                zero_centered_gamma=zero_centered_gamma,
                x_stride=x_stride,
                y_stride=problem.row_stride(layout(function, "out", y), len(shape)) or cols,
                sm_margin=sm_margin,
                aligned=_aligned(pointers["x"], pointers["y"], pointers["weight"], pointers["bias"]),
            )
            launch.run_forward(plan(task, properties), device_id, eps=eps, **pointers)
        if out is not None and y is not out:
            out[...] = y
            y = out
    return y, mean, rstd


def backward(
    function: str,
    dy: cupy.ndarray,
    x: cupy.ndarray,
    mean: cupy.ndarray | None,
    rstd: cupy.ndarray,
    weight: cupy.ndarray | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    sm_margin: int,
) -> tuple[cupy.ndarray | None, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    named = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight}
    layer_norm = function.startswith("layer_norm")
    optional = ("weight",) if layer_norm else ("weight", "mean")
    layouts = {
        name: layout(function, name, array)
        for name, array in named.items()
        if array is not None or name not in optional
    }
    shape = problem.check_backward(
        function,
        layouts["dy"],
        layouts["x"],
        layouts.get("mean"),
        layouts["rstd"],
        layouts.get("weight"),
        zero_centered_gamma=zero_centered_gamma,
    )
    device_id = int(layouts["x"].device)
    properties = device.current(device_id)
    sm_margin = problem.check_sm_margin(function, sm_margin, properties.sms)
    mask = problem.check_output_mask(function, output_mask, 3 if layer_norm else 2)

    with cupy.cuda.Device(device_id):
        parameter = x.dtype if weight is None else weight.dtype
        empty = cupy.empty if x.size else cupy.zeros
        dx = empty(x.shape, x.dtype) if mask[0] else None
        dweight = empty(shape, parameter) if mask[1] else None
        dbias = empty(shape, parameter) if mask[2] else None
        if x.size and any(mask):
            x, x_stride = _readable(x, layouts["x"], len(shape))
            dy, dy_stride = _readable(dy, layouts["dy"], len(shape))
            mean, rstd, weight = (None if a is None else cupy.ascontiguousarray(a) for a in (mean, rstd, weight))
            cols = math.prod(shape)
            arrays = {"x": x, "dy": dy, "weight": weight, "mean": mean, "rstd": rstd}
            arrays |= {"dx": dx, "dweight": dweight, "dbias": dbias}
            pointers = {name: 0 if array is None else array.data.ptr for name, array in arrays.items()}
            task = Problem(
                op="layer_norm" if layer_norm else "rms_norm",
                direction="backward",
                rows=x.size // cols,
                cols=cols,
                x=layouts["x"].dtype,
                y=layouts["dy"].dtype,
                weight=layouts["weight"].dtype if weight is not None else None,
                bias=None,
                zero_centered_gamma=zero_centered_gamma,
                x_stride=x_stride,
                y_stride=dy_stride,
                sm_margin=sm_margin,
                aligned=_aligned(pointers["x"], pointers["dy"], pointers["weight"], pointers["dx"]),
                output_mask=mask,
            )
            solution = plan(task, properties)
            workspace = cupy.cuda.alloc(solution.workspace)
            launch.run_backward(solution, device_id, workspace=workspace.ptr, **pointers)
    return dx, dweight, dbias


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a CuPy array; TypeError for anything else."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"{function}: {name} must be a CuPy array, as x is; got {type(array).__name__}. Convert one of them."
        )
    itemsize = array.dtype.itemsize
    strides = tuple(stride // itemsize for stride in array.strides)
    return Layout(array.shape, strides, array.dtype.name, array.device.id)


def _readable(array: cupy.ndarray, array_layout: Layout, normalized_ndim: int) -> tuple[cupy.ndarray, int]:
    """The array and its row stride; a contiguous copy if its strides are none that the kernels read."""
    stride = problem.row_stride(array_layout, normalized_ndim)
    if stride is not None:
        return array, stride
    return cupy.ascontiguousarray(array), math.prod(array.shape[array.ndim - normalized_ndim :])


def _aligned(*pointers: int) -> bool:
    return all(pointer % 16 == 0 for pointer in pointers)


def from_dlpack(function: str, name: str, array: Any) -> cupy.ndarray | None:
    """A CuPy view of a DLPack producer's array, ordered after its producer on CuPy's current stream."""
    if array is None or isinstance(array, cupy.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{function}: {name} must be an array with __dlpack__, as x is; got {type(array).__name__}.")
    if int(array.__dlpack_device__()[0]) == 1:
        raise ValueError(f"{function}: {name} must be on the device of x; got an array on the host. Move one of them.")
    try:
        return cupy.from_dlpack(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"{function}: CuPy cannot use the GPU that {name} is on: {error}. Compare the driver, by nvidia-smi, with "
            "what `python -m cunorm info` says."
        ) from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{function}: {name} cannot be read through DLPack: {error}") from error
