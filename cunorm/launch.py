"""Runs a `Plan` on pointers: the only file that launches. Device `device_id` must be current.

Everything that stays the same from call to call is prepared once for each plan, device and thread; a call writes its
arguments into a block whose addresses the driver knows. On an H200's host 3.7 us, 3.2 of them cuLaunchKernel, where a
cupy.cuda.Function takes 6.6 with the ten arguments of the forward pass.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import lru_cache, partial

from .compile import kernel
from .norm.plan import Plan, Step

# Parameters of the entries in source.py, as the module `struct` writes them. Only the last may be less than 8 bytes.
FORWARD = {"float32": "PPPPPPqqqf", "float64": "PPPPPPqqqd"}  # x, y, weight, bias, mean, rstd, rows, strides, eps
BACKWARD = "PPPPPPPPqqq"  # x, dy, weight, mean, rstd, dx, dweight and dbias or partials of them, rows, strides
SUM_PARTIALS = "PPPqq"  # partials, first, second, groups, cols


def run_forward(
    plan: Plan,
    device_id: int,
    stream: int,
    *,
    x: int,
    y: int,
    weight: int,
    bias: int,
    mean: int,
    rstd: int,
    eps: float,
) -> None:
    """Every pointer is an int, 0 where there is no array; `stream` is a cudaStream_t."""
    problem = plan.problem
    ((write, launch),) = prepared(plan, device_id).launches
    write(x, y, weight, bias, mean, rstd, problem.rows, problem.x_stride, problem.y_stride, eps)
    launch(stream)


def run_backward(
    plan: Plan,
    device_id: int,
    stream: int,
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
    """As run_forward; `workspace` has plan.workspace bytes."""
    problem = plan.problem
    _, wants_dweight, wants_dbias = problem.output_mask
    if plan.workspace:
        sums = workspace, workspace + plan.workspace // 2 if wants_dweight else workspace
    else:
        sums = dweight, dbias
    for step, (write, launch) in zip(plan.steps, prepared(plan, device_id).launches, strict=True):
        if step.spec.kernel == "sum_partials":
            first, second = dweight if wants_dweight else dbias, dbias if wants_dbias else dweight
            write(workspace, first, second, plan.groups, problem.cols)
        else:
            strides = (problem.x_stride, problem.y_stride)
            write(x, dy, weight, mean, rstd, dx, *sums, problem.rows, *strides)
        launch(stream)


class Prepared(threading.local):
    """The launches of a plan. Python calls __init__ again in every thread: each has its own blocks of arguments."""

    def __init__(self, plan: Plan, device_id: int):
        self.launches = tuple(prepare(step, device_id, _parameters(plan, step)) for step in plan.steps)


@lru_cache(maxsize=4096)
def prepared(plan: Plan, device_id: int) -> Prepared:
    """Plans are told apart by identity: no comparing on every call."""
    return Prepared(plan, device_id)


def _parameters(plan: Plan, step: Step) -> str:
    if step.spec.kernel == "sum_partials":
        return SUM_PARTIALS
    return FORWARD[plan.problem.statistics] if plan.problem.direction == "forward" else BACKWARD


def prepare(step: Step, device_id: int, parameters: str) -> tuple[Callable[..., None], Callable[[int], None]]:
    """`write(*arguments)` and `launch(stream)`, for one thread at a time."""
    import cupy

    cupy.cuda.runtime.setDevice(device_id)  # a thread that never called CUDA's runtime has no context to launch in
    function = kernel(step.spec, device_id)
    layout, count = struct.Struct(parameters), len(parameters)
    words = (ctypes.c_uint64 * (2 * count))()  # where each argument is, then the arguments; the driver copies them
    address = ctypes.addressof(words)
    words[:count] = [address + 8 * (count + i) for i in range(count)]
    launch_kernel, threads, shared = cupy.cuda.driver.launchKernel, step.spec.threads, step.dynamic_shared
    x, y, z = step.grid

    def launch(stream: int) -> None:
        launch_kernel(function.ptr, x, y, z, threads, 1, 1, shared, stream, address, 0)

    return partial(layout.pack_into, words, 8 * count), launch  # the first keeps `words` alive
