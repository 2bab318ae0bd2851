"""`layer_norm_linear` of few rows on CuPy arrays in one launch, where that was measured to win."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import cupy
import numpy

from ..call import checks
from ..kernel import device, launch
from ..operation import NORMS
from . import one_launch
from .one_launch import LinearProblem, OneLaunchPlan
from .problem import Named

NAMES = ("x", "weight", "bias", "ln_weight", "ln_bias")


def forward(
    op: str,
    arrays: tuple[cupy.ndarray | None, ...],
    layouts: Named,
    eps: float,
    *,
    zero_centered_gamma: bool,
    statistics: bool,
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None] | None:
    """(y, mean, rstd), or None: split. `arrays` are those of NAMES; their device is current."""
    x, weight = arrays[0], arrays[1]
    assert x is not None
    assert weight is not None
    aligned = not any(one.data.ptr % 16 for one in arrays if one is not None)
    solution = _chosen(op, layouts, zero_centered_gamma, aligned, x.data.device_id)
    if solution is None:
        return None
    leading = x.shape[:-1]
    y = cupy.ndarray((*leading, len(weight)), x.dtype)
    kept = {name: cupy.ndarray(leading, numpy.float32) for name in NORMS[op].statistics if statistics}
    given = {**dict(zip(NAMES, arrays, strict=True)), **kept, "y": y}
    present = {name: one.data.ptr for name, one in given.items() if one is not None}
    pointers = [present.get(name, 0) for name in solution.problem.pointers]
    stream = cupy.cuda.get_current_stream().ptr
    launch.run(solution, x.data.device_id, stream, (*pointers, ctypes.c_float(eps).value))
    return y, kept.get("mean"), kept.get("rstd")


@lru_cache(maxsize=4096)
def _chosen(op: str, named: Named, zero_centered_gamma: bool, aligned: bool, device_id: int) -> OneLaunchPlan | None:
    problem = problem_of(op, named, zero_centered_gamma, aligned)
    return None if problem is None else one_launch.chosen(problem, device.current(device_id))


def problem_of(op: str, named: Named, zero_centered_gamma: bool, aligned: bool) -> LinearProblem | None:
    """What a launch is asked for; None where rows do not lie as it reads them."""
    layouts = dict(named)
    x, weight = layouts["x"], layouts["weight"]
    of_x, of_weight = (checks.row_strides(one, 1) for one in (x, weight))
    vectors = [layouts[name] for name in NAMES[2:] if name in layouts]
    if of_x is None or of_weight is None or of_x.inner or not all(map(checks.is_contiguous, vectors)):
        return None
    outs, cols = weight.shape
    return LinearProblem(
        op,
        math.prod(x.shape[:-1]),
        cols,
        outs,
        x.dtype,
        ln_weight=layouts["ln_weight"].dtype if "ln_weight" in layouts else None,
        ln_bias=layouts["ln_bias"].dtype if "ln_bias" in layouts else None,
        bias="bias" in layouts,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=of_x.row,
        weight_stride=of_weight.row,
        aligned=aligned,
    )
