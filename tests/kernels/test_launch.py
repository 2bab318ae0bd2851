"""launch.py called as other frameworks call it: streams, threads, and errors of CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from arrays import inputs, same_bits
from busy import spin

import cunorm
from cunorm.kernel import device, launch
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.steps import Plan

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

ROWS, DTYPE = 3, "float16"


def plan_of(direction: str, cols: int) -> Plan:
    return plan(whole("layer_norm", direction, ROWS, cols, DTYPE, DTYPE), device.current(0))


@pytest.mark.parametrize("cols", [1000, 600001])
def test_a_launch_goes_to_the_stream_that_it_is_given(cols):
    """The launch does not wait for CuPy's current stream, which is busy."""
    x, dy, weight, bias = inputs(cupy, ROWS, cols, DTYPE)
    y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias)
    dx, dweight, dbias = cunorm.layer_norm_backward(dy, x, mean, rstd, weight)
    expected = {"y": y, "mean": mean, "rstd": rstd, "dx": dx, "dweight": dweight, "dbias": dbias}
    written = {name: cupy.zeros_like(array) for name, array in expected.items()}
    workspace = cupy.zeros(plan_of("backward", cols).workspace, "uint8")
    arrays = {"x": x, "dy": dy, "weight": weight, "bias": bias, "workspace": workspace} | written
    pointers = {name: array.data.ptr for name, array in arrays.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    spin(0)
    cupy.cuda.runtime.deviceSynchronize()
    spin(1000)
    for direction, scalars in (("forward", (1e-5,)), ("backward", ())):
        solution = plan_of(direction, cols)
        given = [pointers[name] for name in solution.problem.pointers]
        launch.run(solution, 0, stream.ptr, (*given, *scalars), pointers["workspace"])
    stream.synchronize()
    assert not cupy.cuda.get_current_stream().done, "the launches went to CuPy's current stream"
    cupy.cuda.get_current_stream().synchronize()
    for name, array in expected.items():
        assert same_bits(written[name], array)


def test_a_thread_whose_first_use_of_cuda_is_a_call():
    """Only the launch makes CUDA's context current, because kernels are compiled and the pool has memory."""
    x, dy, weight, bias = inputs(cupy, ROWS, 1000, DTYPE)

    def call():
        y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias)
        return y, *cunorm.layer_norm_backward(dy, x, mean, rstd, weight)

    expected = call()
    call()
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(call).result()
    cupy.cuda.runtime.deviceSynchronize()
    for result, array in zip(results, expected, strict=True):
        assert same_bits(result, array)


def test_threads_that_launch_one_plan_at_once():
    """Each thread launches with its own arguments."""
    arrays = [inputs(cupy, ROWS, 1000, DTYPE, seed=seed) for seed in range(8)]
    expected = [cunorm.layer_norm(x, None, weight, bias) for x, _, weight, bias in arrays]
    written = [[cupy.zeros_like(y) for _ in range(500)] for y in expected]
    cupy.cuda.runtime.deviceSynchronize()

    def call(x, _, weight, bias, outs):
        for out in outs:
            cunorm.layer_norm(x, None, weight, bias, out=out)

    with ThreadPoolExecutor(len(arrays)) as threads:
        for future in [threads.submit(call, *operands, outs) for operands, outs in zip(arrays, written, strict=True)]:
            future.result()
    cupy.cuda.runtime.deviceSynchronize()
    for y, outs in zip(expected, written, strict=True):
        assert all(same_bits(out, y) for out in outs)


def test_a_launch_that_cuda_refuses():
    """The launch asks for more shared memory than there is."""
    good = plan_of("forward", 1000)
    bad = replace(good, steps=(good.steps[0]._replace(dynamic_shared=1 << 20),))
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_INVALID_VALUE"):
        launch.run(bad, 0, 0, (*[0] * len(bad.problem.pointers), 1e-5))
