"""`layer_norm_linear` on CuPy arrays and CuPy's current stream.

It is the norm's kernel and then cuBLASLt, or of few rows what a table of measurements names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy

from ..call import checks
from ..call import cupy as norms
from ..call.cupy import layout
from ..call.store import Float8Store
from ..kernel import device, launch
from ..plan.plain_problems import plain
from ..plan.plan import plan
from ..plan.problem import E4M3, RowStrides
from . import checks as linear_checks
from . import gemm, planned_cupy
from . import plan as linear_plan
from .checks import LinearOptions
from .float8_plan import RowsProblem, plan_rows

Arrays = Mapping[str, Any]


def forward(options: LinearOptions, arrays: Arrays) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    layouts = linear_checks.layouts_of(options.function, arrays, layout)
    linear_checks.check_forward(options.function, layouts, options.zero_centered_gamma)
    x, weight = arrays["x"], arrays["weight"]
    with cupy.cuda.Device(x.data.device_id):
        if x.size <= linear_plan.ROWS[-1] * x.shape[-1]:
            results = planned_cupy.forward(options, arrays, layouts)
            if results is not None:
                return results
        z, mean, rstd = _normalised(options, arrays)
        y = gemm.multiply(_matrix(z), weight.T, arrays["bias"])
    return y.reshape(*x.shape[:-1], len(weight)), mean, rstd


def forward_float8(options: LinearOptions, arrays: Arrays) -> cupy.ndarray:
    """Return y: the norm writes bytes and scales, cuBLASLt multiplies them."""
    function = options.function
    layouts = linear_checks.layouts_of(function, arrays, layout)
    linear_checks.check_forward(function, layouts, options.zero_centered_gamma)
    linear_checks.check_float8(function, layouts)
    x, weight = arrays["x"], arrays["weight"]
    arch = device.current(x.data.device_id).arch
    if arch < 89:
        raise RuntimeError(
            f"{function}: fp8='row' needs a GPU of compute capability 8.9 or later; got {arch // 10}.{arch % 10}. "
            "Leave fp8=None."
        )
    with cupy.cuda.Device(x.data.device_id):
        of_norm = options.of_norm("fp8", x.shape[-1], Float8Store(E4M3, "row", wide=False))
        z, z_scale = norms.norm_float8(of_norm, (x, arrays["ln_weight"], arrays["ln_bias"]), options.eps, None)
        rows, row_scale = cast_rows(weight)
        y = gemm.multiply_rows(_matrix(z), rows, (z_scale.reshape(-1), row_scale), arrays["bias"], x.dtype)
    return y.reshape(*x.shape[:-1], len(weight))


def backward(options: LinearOptions, arrays: Arrays, output_mask: Any) -> tuple[cupy.ndarray | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so.

    dweight comes first: the normalised tensor is gone before its gradient is there.
    """
    required = linear_checks.required_of_backward(options.norm)
    layouts = linear_checks.layouts_of(options.function, arrays, layout, required)
    linear_checks.check_backward(options.function, layouts, options.zero_centered_gamma)
    wants_dx, wants_dweight, wants_dbias, *wants_ln = linear_checks.check_output_mask(options.function, output_mask)
    x = arrays["x"]
    dweight = dbias = dx = dln_weight = dln_bias = None
    with cupy.cuda.Device(x.data.device_id):
        rows = _matrix(arrays["dy"])
        if wants_dweight:
            z, _, _ = _normalised(options, arrays)
            dweight = gemm.multiply(rows.T, _matrix(z))
            del z
        if wants_dbias:
            dbias = _column_sums(rows)
        mask = (wants_dx, *wants_ln)[: 3 if options.norm == "layer_norm" else 2]
        if any(mask):
            dz = gemm.multiply(rows, arrays["weight"]).reshape(x.shape)
            of_norm = options.of_norm("backward", None, mask)
            read = (dz, x, arrays["mean"], arrays["rstd"], arrays["ln_weight"])
            dx, dln_weight, dln_bias = norms.norm_backward(of_norm, read, None)
    return dx, dweight, dbias, dln_weight, dln_bias


def cast_rows(a: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Return the bytes of a matrix in e4m3, and the scale of each of its rows. Its device must be current."""
    bytes, scales = cupy.ndarray(a.shape, numpy.uint8), cupy.ndarray(a.shape[:1], numpy.float32)
    stride = checks.row_strides(layout("layer_norm_linear", "weight", a), 1)
    if stride is None:
        a, stride = cupy.ascontiguousarray(a), RowStrides(a.shape[1])
    device_id = a.data.device_id
    rows, cols = a.shape
    task = RowsProblem(rows, cols, a.dtype.name, E4M3, stride.row, a.data.ptr % 16 == 0)
    solution = plan_rows(task, device.current(device_id))
    stream = cupy.cuda.get_current_stream().ptr
    launch.run(solution, device_id, stream, (a.data.ptr, bytes.data.ptr, scales.data.ptr))
    return bytes, scales


def _normalised(options: LinearOptions, arrays: Arrays) -> tuple[cupy.ndarray, Any, Any]:
    """Return (z, mean, rstd), statistics None unless asked for."""
    x = arrays["x"]
    of_norm = options.of_norm("forward", x.shape[-1], options.statistics)
    z, *statistics = norms.norm(of_norm, (x, arrays["ln_weight"], arrays["ln_bias"]), options.eps, None)
    mean, rstd = (None, *statistics)[-2:] if statistics else (None, None)
    return z, mean, rstd


def _column_sums(dy: cupy.ndarray) -> cupy.ndarray:
    """Return Σ dy over the rows of (rows, cols), by a backward pass for dbias alone, which reads nothing else.

    cuBLASLt has an epilogue for it, which on an H200 was off by 1.7 ulp in float16 (48 rows, 320 -> 64).
    """
    rows, cols = dy.shape
    if rows == 0:
        return cupy.zeros(cols, dy.dtype)
    strides = checks.row_strides(layout("layer_norm_linear_backward", "dy", dy), 1)
    if strides is None:
        dy, strides = cupy.ascontiguousarray(dy), cols
    device_id = dy.data.device_id
    aligned = dy.data.ptr % 16 == 0
    given = {"wanted": ("bias",), "strides": {"dy": strides}, "aligned": aligned}
    task = plain("layer_norm", "backward", rows, cols, dy.dtype.name, **given)
    solution = plan(task, device.current(device_id))
    sums, workspace = cupy.empty(cols, dy.dtype), cupy.cuda.alloc(solution.workspace)
    stream = cupy.cuda.get_current_stream().ptr
    launch.run(solution, device_id, stream, (dy.data.ptr, sums.data.ptr), workspace.ptr)
    return sums


def _matrix(array: cupy.ndarray) -> cupy.ndarray:
    return array.reshape(-1, array.shape[-1])
