"""`layer_norm_linear` in 8 bits on CuPy arrays: the norm writes bytes and scales, cuBLASLt multiplies them."""

from __future__ import annotations

import cupy
import numpy

from ..call import checks
from ..call import cupy as norms
from ..call.cupy import layout
from ..call.store import Float8Store
from ..kernel import device, launch
from ..plan.problem import E4M3, RowStrides
from . import gemm, problem
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
) -> cupy.ndarray:
    """Return y."""
    named = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    layouts = tuple(
        (name, layout(function, name, array))
        for name, array in named.items()
        if array is not None or name in ("x", "weight")
    )
    problem.check_forward(function, layouts, zero_centered_gamma)
    problem.check_float8(function, layouts)
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
        y = gemm.multiply_rows(z.reshape(-1, x.shape[-1]), rows, scales, bias, x.dtype)
    return y.reshape(*x.shape[:-1], len(weight))


def cast_rows(a: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    """The bytes of a matrix in e4m3, and the scale of each of its rows. Its device must be current."""
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
