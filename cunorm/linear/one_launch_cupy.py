"""`layer_norm_linear` of few rows on CuPy arrays in one launch, where it was measured to win."""

from __future__ import annotations

import ctypes

import cupy
import numpy

from ..call import checks
from ..call.checks import Layout
from ..kernel import device, launch
from . import one_launch
from .one_launch import LinearProblem


def forward(
    op: str,
    arrays: dict[str, cupy.ndarray | None],
    layouts: dict[str, Layout],
    eps: float,
    *,
    zero_centered_gamma: bool,
    statistics: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None] | None:
    """(y, mean, rstd), or None: split. `arrays` are x, weight, bias, ln_weight and ln_bias, their device is current."""
    device_id = int(layouts["x"].device)
    gpu = device.current(device_id)
    problem = problem_of(op, arrays, layouts, zero_centered_gamma)
    solution = None if problem is None else one_launch.chosen(problem, gpu)
    if problem is None or solution is None:
        return None
    x = layouts["x"]
    y = cupy.ndarray((*x.shape[:-1], problem.outs), arrays["x"].dtype)
    names = ("mean", "rstd") if op == "layer_norm" else ("rstd",)
    kept = {name: cupy.ndarray(x.shape[:-1], numpy.float32) for name in names} if statistics else {}
    given = arrays | kept | {"y": y}
    pointers = [0 if given.get(name) is None else given[name].data.ptr for name in solution.problem.pointers]
    launch.run(solution, device_id, cupy.cuda.get_current_stream().ptr, (*pointers, ctypes.c_float(eps).value))
    return y, kept.get("mean"), kept.get("rstd")


def problem_of(
    op: str, arrays: dict[str, cupy.ndarray | None], layouts: dict[str, Layout], zero_centered_gamma: bool
) -> LinearProblem | None:
    """What a launch is asked for; None where rows do not lie as it reads them."""
    x, weight = layouts["x"], layouts["weight"]
    strides = [checks.row_strides(one, 1) for one in (x, weight)]
    vectors = [layouts[name] for name in ("bias", "ln_weight", "ln_bias") if name in layouts]
    if any(one is None or one.inner for one in strides) or not all(map(checks.is_contiguous, vectors)):
        return None
    of_x, of_weight = (one.row for one in strides if one is not None)
    outs, cols = weight.shape
    dtypes = {name: layouts[name].dtype if name in layouts else None for name in ("ln_weight", "ln_bias")}
    return LinearProblem(
        op,
        arrays["x"].size // cols,
        cols,
        outs,
        x.dtype,
        **dtypes,
        bias="bias" in layouts,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=of_x,
        weight_stride=of_weight,
        aligned=not any(one.data.ptr % 16 for one in arrays.values() if one is not None),
    )
