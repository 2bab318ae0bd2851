"""Measure the host time of a call and where it goes: `python -m bench.host`.

A call returns before its kernel has run, and the time until it returns is measured. For comparison there are bare
launches of a CuPy RawKernel, one with the ten arguments of the forward pass and one with three.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable
from threading import get_ident

import cupy
import numpy

import cunorm
from bench.suites import Case
from bench.workload import Workload
from cunorm.call import cupy as gpu
from cunorm.kernel import device, launch
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan

CALLS = 64  # without waiting for the GPU, whose queue holds a thousand
REPETITIONS = 301
ROWS, COLS = 16, 1024  # the kernel is shorter than the call

BARE = """
extern "C" __global__ void three(const void* x, void* y, long long n) {}
extern "C" __global__ void ten(const void* x, void* y, const void* weight, const void* bias, float* mean, float* rstd,
                               long long rows, long long x_stride, long long y_stride, float eps) {}
"""


def host_microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each call, in turns, less that of calling a Python function."""
    calls = {"nothing": lambda: None, **calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            timeit.timeit(call, number=4)
            times[name].append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
            cupy.cuda.runtime.deviceSynchronize()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: medians[name] - medians["nothing"] for name in list(calls)[1:]}


def calls() -> dict[str, Callable[[], object]]:
    problem = whole("layer_norm", "forward", ROWS, COLS, "bfloat16", "bfloat16")
    solution = plan(problem, device.current(0))
    buffers = Workload(Case("layer_norm", "backward", ROWS, COLS, "bfloat16")).sets[0]
    x, weight, bias, mean, rstd, dy = (vars(buffers)[n] for n in ("x", "weight", "bias", "mean", "rstd", "dy"))
    y = cupy.empty_like(x)
    arrays = {"x": x, "y": y, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd}
    pointers = tuple(arrays[name].data.ptr for name in problem.pointers)
    ((write, start, _),) = launch.prepared(solution, 0, get_ident())
    write(*pointers, 1e-5)  # "cuLaunchKernel, prepared" launches with these arguments
    options = ("layer_norm", None, False, None, 0, False)
    bare = cupy.RawModule(code=BARE)
    three, ten = bare.get_function("three"), bare.get_function("ten")
    n, eps = numpy.int64(COLS), numpy.float32(1e-5)
    return {
        "bare RawKernel launch, 3 arguments": lambda: three((1,), (128,), (x, y, n)),
        "bare RawKernel launch, 10 arguments": lambda: ten(
            (1,), (128,), (x, y, weight, bias, mean, rstd, n, n, n, eps)
        ),
        "cuLaunchKernel, prepared": lambda: start(0),
        "arguments written": lambda: write(*pointers, 1e-5),
        "launch.run": lambda: launch.run(solution, 0, 0, (*pointers, 1e-5)),
        "cupy.ndarray": lambda: cupy.ndarray(x.shape, x.dtype),
        "gpu.norm": lambda: gpu.norm(options, (x, weight, bias), 1e-5, None),
        "layer_norm": lambda: cunorm.layer_norm(x, None, weight, bias),
        "layer_norm, out given": lambda: cunorm.layer_norm(x, None, weight, bias, out=y),
        "rms_norm": lambda: cunorm.rms_norm(x, None, weight),
        "layer_norm_forward": lambda: cunorm.layer_norm_forward(x, None, weight, bias),
        "layer_norm_backward": lambda: cunorm.layer_norm_backward(dy, x, mean, rstd, weight),
        "rms_norm_backward": lambda: cunorm.rms_norm_backward(dy, x, rstd, weight),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    times = host_microseconds(calls())
    call, forward, run = times["layer_norm"], times["gpu.norm"], times["launch.run"]
    raw, written, allocated = times["cuLaunchKernel, prepared"], times["arguments written"], times["cupy.ndarray"]
    steps = {
        "kind of x": call - forward,
        "recipe looked up, device and stream": forward - run - allocated,
        "y allocated": allocated,
        "launch found": run - raw - written,
        "arguments written": written,
        "cuLaunchKernel": raw,
    }
    print(f"layer_norm of {ROWS} x {COLS} bfloat16, weight and bias; {device.current(0).name}, CuPy {cupy.__version__}")
    print(f"{'step':40}{'us':>8}")
    for name, microseconds in steps.items():
        print(f"{name:40}{microseconds:8.2f}")
    bare = [times[f"bare RawKernel launch, {count} arguments"] for count in (3, 10)]
    print(f"\n{'call':40}{'us':>8}{'/ bare 3':>10}{'/ bare 10':>11}")
    for name, microseconds in times.items():
        print(f"{name:40}{microseconds:8.2f}{microseconds / bare[0]:10.2f}{microseconds / bare[1]:11.2f}")


if __name__ == "__main__":
    main()
