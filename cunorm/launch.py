"""Runs a `Plan` on pointers: the only file that launches. Device `device_id` must be current; the launches go to
CuPy's current stream.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy

from .kernels import kernel
from .plan import Plan, Step

FLOAT = {"float32": numpy.float32, "float64": numpy.float64}


@lru_cache(maxsize=4096)
def _launches(plan: Plan, device_id: int) -> tuple[tuple[Step, Any, tuple[int, int, int]], ...]:
    """(step, kernel, block) of each launch. Plans are told apart by identity: no comparing on every call."""
    return tuple((step, kernel(step.spec, device_id), (step.spec.threads, 1, 1)) for step in plan.steps)


def run_forward(
    plan: Plan, device_id: int, *, x: int, y: int, weight: int, bias: int, mean: int, rstd: int, eps: float
) -> None:
    """Every pointer is an int, 0 where there is no array."""
    problem = plan.problem
    ((step, run, block),) = _launches(plan, device_id)
    strides = (problem.rows, problem.x_stride, problem.y_stride)
    run(step.grid, block, (x, y, weight, bias, mean, rstd, *strides, FLOAT[problem.statistics](eps)), step.dynamic_shared)


def run_backward(
    plan: Plan,
    device_id: int,
    *,
    x: int,
    dy: int,
    weight: int,
    mean: int,
    rstd: int,
    dx: int,
    dweight: int,
    dbias: int,
    workspace: int,
) -> None:
    """Every pointer is an int, 0 where there is no array; `workspace` has plan.workspace bytes."""
    problem = plan.problem
    _, wants_dweight, wants_dbias = problem.output_mask
    gradients = [pointer for pointer, wanted in ((dweight, wants_dweight), (dbias, wants_dbias)) if wanted]
    dweight_partials = workspace
    dbias_partials = workspace + plan.workspace // 2 if wants_dweight else workspace
    for step, run, block in _launches(plan, device_id):
        if step.spec.kernel == "sum_partials":
            arguments = (workspace, gradients[0], gradients[-1], plan.groups, problem.cols)
        else:
            arguments = (x, dy, weight, mean, rstd, dx, dweight_partials, dbias_partials)
            arguments += (problem.rows, problem.x_stride, problem.y_stride)
        run(step.grid, block, arguments, step.dynamic_shared)
