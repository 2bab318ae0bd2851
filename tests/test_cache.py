"""Compiled kernels: one compilation in a process, also among threads; and processes that share a cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from arrays import inputs, same_bits
from problems import problem

import cunorm
from cunorm import compile
from cunorm.device import KNOWN
from cunorm.norm.plan import plan
from cunorm.norm.spec import KernelSpec


def spec_of(cols: int) -> KernelSpec:
    return plan(problem("forward", 8, cols, "float16"), KNOWN[90]).steps[0].spec


@pytest.fixture
def counted_compiles(monkeypatch):
    """Stands in for the compiler, slowly; the list of what it was asked for."""
    compiled: list[KernelSpec] = []

    def compile_slowly(spec):
        compiled.append(spec)
        time.sleep(0.2)
        return object()

    monkeypatch.setattr(compile, "_compile", compile_slowly)
    monkeypatch.setattr(compile, "_kernels", {})
    return compiled


def call_at_once(function, threads: int) -> list:
    """What `function` returned or raised in each of so many threads that start together."""
    barrier = threading.Barrier(threads)
    results = []

    def run():
        barrier.wait()
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_threads_share_one_compilation(counted_compiles):
    spec = spec_of(1000)
    results = call_at_once(lambda: compile.kernel(spec, 0), 8)
    assert len(counted_compiles) == 1
    assert len(set(map(id, results))) == 1
    compile.kernel(spec, 1)
    assert len(counted_compiles) == 2, "each device has its own module"


def test_different_kernels_compile_side_by_side(counted_compiles):
    pending = iter([spec_of(cols) for cols in range(1, 9)])
    start = time.perf_counter()
    call_at_once(lambda: compile.kernel(next(pending), 0), 8)
    assert len(counted_compiles) == 8
    assert time.perf_counter() - start < 8 * 0.2, "one after the other"


def test_a_failed_compilation_reaches_every_thread_and_can_be_repeated(monkeypatch):
    spec = spec_of(1000)

    def fail(spec):
        time.sleep(0.2)
        raise compile.CompileError("no")

    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "_compile", fail)
    assert [type(result) for result in call_at_once(lambda: compile.kernel(spec, 0), 4)] == [compile.CompileError] * 4
    monkeypatch.setattr(compile, "_compile", lambda spec: "compiled")
    assert compile.kernel(spec, 0) == "compiled"


@pytest.mark.gpu
def test_threads_that_call_at_once_compile_once(monkeypatch):
    import cupy

    compiled = []
    compile_one = compile._compile
    monkeypatch.setattr(compile, "_compile", lambda spec: compiled.append(spec) or compile_one(spec))
    monkeypatch.setattr(compile, "_kernels", {})
    x, _, weight, bias = inputs(cupy, 40, 1013, "float16")

    def call():
        y = cunorm.layer_norm(x, None, weight, bias)
        cupy.cuda.get_current_stream().synchronize()
        return y

    cupy.cuda.runtime.deviceSynchronize()
    results = call_at_once(call, 8)
    assert len(compiled) == 1
    for result in results:
        assert not isinstance(result, Exception), result
        assert same_bits(result, results[0])


PROGRAM = """
import sys, time
import cupy, numpy, cunorm
print("ready", flush=True)
sys.stdin.readline()
x = cupy.asarray(numpy.random.default_rng(0).standard_normal((64, 1003)).astype("float32"))
start = time.perf_counter()
y, mean, rstd = cunorm.layer_norm_forward(x)
dx, dweight, dbias = cunorm.layer_norm_backward(x, x, mean, rstd)
cupy.cuda.runtime.deviceSynchronize()
print(time.perf_counter() - start, hash(y.tobytes() + dx.tobytes() + dweight.tobytes()))
"""


def start(cache: str) -> subprocess.Popen:
    environment = os.environ | {"CUPY_CACHE_DIR": cache, "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=cache, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.gpu
def test_processes_that_compile_at_once_into_one_cache(tmp_path):
    processes = [start(str(tmp_path)) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(output.split()[1])
    assert len(set(outputs)) == 1


@pytest.mark.gpu
def test_a_second_process_reads_the_cache(tmp_path):
    """It compiles nothing: no file is added."""
    counts = []
    for _ in range(2):
        output, errors = start(str(tmp_path)).communicate("go\n", timeout=120)
        assert output, errors
        counts.append(sum(path.is_file() for path in tmp_path.rglob("*")))
    assert counts[0] == counts[1] > 0
