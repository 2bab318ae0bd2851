"""`layer_norm_linear` on CuPy arrays, on CuPy's current stream: the norm's kernel, then cuBLASLt.

Of few rows it is one launch where that was measured to win.
"""

from __future__ import annotations

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
from . import gemm, one_launch, one_launch_cupy
from . import problem as linear_problem
from .float8_plan import RowsProblem, plan_rows


def forward(
    function: str,
    op: str,
    x: cupy.ndarray,
    weight: cupy.ndarray,
    bias: cupy.ndarray | None,
    ln_weight: cupy.ndarray | None,
    ln_bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    statistics: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    layouts = _layouts(function, x=x, weight=weight, bias=bias, ln_weight=ln_weight, ln_bias=ln_bias)
    linear_problem.check_forward(function, layouts, zero_centered_gamma)
    with cupy.cuda.Device(x.data.device_id):
        if x.size <= one_launch.ROWS[-1] * x.shape[-1]:
            arrays = (x, weight, bias, ln_weight, ln_bias)
            options = {"zero_centered_gamma": zero_centered_gamma, "statistics": statistics}
            found = one_launch_cupy.forward(op, arrays, layouts, eps, **options)
            if found is not None:
                return found
        z, mean, rstd = _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics)
        y = gemm.multiply(_matrix(z), weight.T, bias)
    return y.reshape(*x.shape[:-1], len(weight)), mean, rstd


def forward_float8(
    function: str,
    op: str,
    x: cupy.ndarray,
    weight: cupy.ndarray,
    bias: cupy.ndarray | None,
    ln_weight: cupy.ndarray | None,
    ln_bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
) -> cupy.ndarray:
    """Return y: the norm writes bytes and scales, cuBLASLt multiplies them."""
    layouts = _layouts(function, x=x, weight=weight, bias=bias, ln_weight=ln_weight, ln_bias=ln_bias)
    linear_problem.check_forward(function, layouts, zero_centered_gamma)
    linear_problem.check_float8(function, layouts)
    arch = device.current(x.data.device_id).arch
    if arch < 89:
        raise RuntimeError(
            f"{function}: fp8='row' needs a GPU of compute capability 8.9 or later; got {arch // 10}.{arch % 10}. "
            "Leave fp8=None."
        )
    with cupy.cuda.Device(x.data.device_id):
        asked = (f"{op}_fp8", x.shape[-1], zero_centered_gamma, None, 0)
        z, z_scale = norms.norm_float8(asked, x, ln_weight, ln_bias, eps, Float8Store(E4M3, "row", wide=False), None)
        rows, row_scale = cast_rows(weight)
        scales = (z_scale.reshape(-1), row_scale)
        y = gemm.multiply_rows(_matrix(z), rows, scales, bias, x.dtype)
    return y.reshape(*x.shape[:-1], len(weight))


def backward(
    function: str,
    op: str,
    dy: cupy.ndarray,
    x: cupy.ndarray,
    mean: cupy.ndarray | None,
    rstd: cupy.ndarray,
    weight: cupy.ndarray,
    ln_weight: cupy.ndarray | None,
    ln_bias: cupy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
) -> tuple[cupy.ndarray | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so.

    dweight comes first: the normalised tensor is gone before its gradient is there.
    """
    named = {"dy": dy, "x": x, "rstd": rstd, **({"mean": mean} if op == "layer_norm" else {})}
    layouts = _layouts(function, **named, weight=weight, ln_weight=ln_weight, ln_bias=ln_bias, required=tuple(named))
    linear_problem.check_backward(function, layouts, zero_centered_gamma)
    wants_dx, wants_dweight, wants_dbias, *wants_ln = linear_problem.check_output_mask(function, output_mask)
    dweight = dbias = dx = dln_weight = dln_bias = None
    with cupy.cuda.Device(x.data.device_id):
        rows = _matrix(dy)
        if wants_dweight:
            z, _, _ = _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, False)
            dweight = gemm.multiply(rows.T, _matrix(z))
            del z
        if wants_dbias:
            dbias = _column_sums(rows)
        mask = (wants_dx, *wants_ln)[: 3 if op == "layer_norm" else 2]
        if any(mask):
            dz = gemm.multiply(rows, weight).reshape(x.shape)
            asked = (f"{op}_backward", None, zero_centered_gamma, None, 0)
            of_mean = mean if op == "layer_norm" else None
            dx, dln_weight, dln_bias = norms.norm_backward(asked, dz, x, of_mean, rstd, ln_weight, None, mask)
    return dx, dweight, dbias, dln_weight, dln_bias


def cast_rows(a: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Return the bytes of a matrix in e4m3, and the scale of each of its rows. Its device must be current."""
    found, scales = cupy.ndarray(a.shape, numpy.uint8), cupy.ndarray(a.shape[:1], numpy.float32)
    stride = checks.row_strides(layout("layer_norm_linear", "weight", a), 1)
    if stride is None:
        a, stride = cupy.ascontiguousarray(a), RowStrides(a.shape[1])
    device_id = a.data.device_id
    rows, cols = a.shape
    task = RowsProblem(rows, cols, a.dtype.name, E4M3, stride.row, a.data.ptr % 16 == 0)
    solution = plan_rows(task, device.current(device_id))
    stream = cupy.cuda.get_current_stream().ptr
    launch.run(solution, device_id, stream, (a.data.ptr, found.data.ptr, scales.data.ptr))
    return found, scales


def _layouts(function: str, *, required: tuple[str, ...] = ("x", "weight"), **arrays: Any) -> linear_problem.Named:
    return tuple(
        (name, layout(function, name, array)) for name, array in arrays.items() if array is not None or name in required
    )


def _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics):
    asked = (f"{op}_forward", x.shape[-1], zero_centered_gamma, None, 0)
    z, *kept = norms.norm(asked, x, ln_weight, ln_bias, eps, None, statistics)
    mean, rstd = (None, *kept)[-2:] if statistics else (None, None)
    return z, mean, rstd


def _column_sums(dy: cupy.ndarray) -> cupy.ndarray:
    """Σ dy over the rows of (rows, cols): a backward pass that is asked for dbias alone reads nothing else.

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
