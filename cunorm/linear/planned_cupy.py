"""`layer_norm_linear` of few rows on CuPy arrays, by the plan that plan.py chooses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import cupy
import numpy

from ..kernel import device, launch
from ..operation import NORMS
from ..plan.steps import OtherPlan
from . import plan
from .checks import LinearOptions, Named
from .problem import problem_of


def forward(
    options: LinearOptions, arrays: Mapping[str, Any], layouts: Named
) -> tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray | None] | None:
    """Return (y, mean, rstd), or None where norm and product are split. The device of `arrays` is current."""
    x, weight = arrays["x"], arrays["weight"]
    given = {name: array for name, array in arrays.items() if array is not None}
    aligned = not any(array.data.ptr % 16 for array in given.values())
    solution = _chosen(options.norm, layouts, options.zero_centered_gamma, aligned, x.data.device_id)
    if solution is None:
        return None
    leading = x.shape[:-1]
    y = cupy.ndarray((*leading, len(weight)), x.dtype)
    names = NORMS[options.norm].statistics if options.statistics else ()
    statistics = {name: cupy.ndarray(leading, numpy.float32) for name in names}
    present = {name: array.data.ptr for name, array in {**given, **statistics, "y": y}.items()}
    pointers = [present.get(name, 0) for name in solution.problem.pointers]
    workspace = cupy.ndarray(solution.workspace, numpy.uint8) if solution.workspace else None
    stream, eps = cupy.cuda.get_current_stream().ptr, ctypes.c_float(options.eps).value
    place = workspace.data.ptr if workspace is not None else 0
    launch.run(solution, x.data.device_id, stream, (*pointers, eps), place)
    return y, statistics.get("mean"), statistics.get("rstd")


@lru_cache(maxsize=4096)
def _chosen(norm: str, named: Named, zero_centered_gamma: bool, aligned: bool, device_id: int) -> OtherPlan | None:
    problem = problem_of(norm, dict(named), zero_centered_gamma, aligned)
    return None if problem is None else plan.chosen(problem, device.current(device_id))
