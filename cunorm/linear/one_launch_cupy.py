"""`layer_norm_linear` of few rows on CuPy arrays in one launch, where that was measured to win."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import cupy
import numpy

from ..kernel import device, launch
from ..operation import NORMS
from . import one_launch
from .one_launch import NAMES, OneLaunchPlan, problem_of
from .problem import Named


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
    problem = problem_of(op, dict(named), zero_centered_gamma, aligned)
    return None if problem is None else one_launch.chosen(problem, device.current(device_id))
