"""A kernel is compiled once in a process, also among threads, and processes share a cache on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from arrays import inputs, same_bits
from command_line import assert_fails_in_one_line, command, output_of, without_a_home
from nvrtc import needs_nvrtc
from problems import problem

import cunorm
from cunorm import logs
from cunorm.kernel import cache, compile
from cunorm.kernel.device import KNOWN
from cunorm.plan.plan import plan
from cunorm.plan.spec import KernelSpec


def spec_of(cols: int) -> KernelSpec:
    return plan(problem("forward", 8, cols, "float16"), KNOWN[90]).steps[0].spec


@pytest.fixture
def counted_compiles(monkeypatch):
    """The list of kernels that a slow stand-in for the compiler was asked for."""
    compiled: list[KernelSpec] = []

    def compile_slowly(spec, device_id):
        compiled.append(spec)
        time.sleep(0.2)
        return object()

    monkeypatch.setattr(compile, "_load", compile_slowly)
    monkeypatch.setattr(compile, "_kernels", {})
    return compiled


def call_at_once(function, threads: int) -> list:
    """Call `function` in so many threads at once, and return what each returned or raised."""
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


def test_different_kernels_compile_side_by_side(monkeypatch):
    all_compiling = threading.Barrier(8)
    monkeypatch.setattr(compile, "_load", lambda spec, device_id: all_compiling.wait(timeout=30))
    monkeypatch.setattr(compile, "_kernels", {})
    pending = iter([spec_of(cols) for cols in range(1, 9)])
    arrivals = call_at_once(lambda: compile.kernel(next(pending), 0), 8)
    assert set(arrivals) == set(range(8)), "one after the other"


def test_a_failed_compilation_reaches_every_thread_and_can_be_repeated(monkeypatch):
    spec = spec_of(1000)

    def fail(spec, device_id):
        time.sleep(0.2)
        raise compile.CompileError("no")

    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "_load", fail)
    assert [type(result) for result in call_at_once(lambda: compile.kernel(spec, 0), 4)] == [compile.CompileError] * 4
    monkeypatch.setattr(compile, "_load", lambda spec, device_id: "compiled")
    assert compile.kernel(spec, 0) == "compiled"


@pytest.mark.gpu
def test_threads_that_call_at_once_compile_once(monkeypatch):
    import cupy

    compiled = []
    load = compile._load
    monkeypatch.setattr(compile, "_load", lambda spec, device_id: compiled.append(spec) or load(spec, device_id))
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


@pytest.fixture
def nvrtc_calls(monkeypatch, tmp_path):
    """The list of architectures that NVRTC compiled for, with an empty kernel cache."""
    from cupy_backends.cuda.libs import nvrtc

    calls = []
    compile_program = nvrtc.compileProgram

    def counted(program, options):
        calls.append(next(option for option in options if option.startswith("-arch=")))
        compile_program(program, options)

    monkeypatch.setattr(nvrtc, "compileProgram", counted)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    return calls


@pytest.mark.slow
@needs_nvrtc
def test_machine_code_is_kept_for_each_architecture(nvrtc_calls, tmp_path):
    first = compile.machine_code(spec_of(100), 90)
    assert first.startswith(b"\x7fELF")
    assert compile.machine_code(spec_of(100), 90) == first
    assert compile.machine_code(spec_of(100), 80) != first
    assert nvrtc_calls == ["-arch=sm_90", "-arch=sm_80"]
    assert {path.name[:7] for path in (tmp_path / "cache").iterdir()} == {"cunorm_"}


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: b"?" + content])
def test_a_damaged_file_is_compiled_again(nvrtc_calls, damage):
    code = compile.machine_code(spec_of(100), 90)
    file = cache.cache_directory() / compile.kernel_file(spec_of(100), 90)
    file.write_bytes(damage(file.read_bytes()))
    assert compile.machine_code(spec_of(100), 90) == code
    assert compile.machine_code(spec_of(100), 90) == code
    assert len(nvrtc_calls) == 2


@needs_nvrtc
def test_another_text_options_or_nvrtc_are_another_file(monkeypatch):
    files = {compile.kernel_file(spec_of(cols), arch) for cols in (100, 101) for arch in (80, 90)}
    for name, value in (("OPTIONS", ("--std=c++20",)), ("AS_CUPY", ()), ("nvrtc_build", lambda: (99, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(compile, name, value)
            files.add(compile.kernel_file(spec_of(100), 90))
    assert len(files) == 7


@needs_nvrtc
def test_another_build_of_an_nvrtc_is_another_file(monkeypatch, tmp_path):
    """13.0 had several builds. The wheel's version tells them apart, wherever and whenever it was installed."""
    read, seen = Path.read_text, set()
    monkeypatch.setattr(compile, "_nvrtc_version", lambda: (13, 0))
    for folder, wheel, date in [
        ("one/site-packages/nvidia/cu13/lib", "13.0.48", 1),
        ("two/site-packages/nvidia/cu13/lib", "13.0.48", 2),
        ("two/site-packages/nvidia/cu13/lib", "13.0.88", 2),
        ("toolkit", None, 1),
        ("toolkit", None, 2),
    ]:
        library = tmp_path / folder / "libnvrtc.so.13"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"")
        os.utime(library, (date, date))
        for old in tmp_path.rglob("*.dist-info"):
            old.rmdir()
        if wheel:
            (library.parents[3] / f"nvidia_cuda_nvrtc-{wheel}.dist-info").mkdir()
            (library.parents[3] / f"nvidia_cuda_nvrtc_cu11-11.{date}.0.dist-info").mkdir()
        with monkeypatch.context() as patch:
            maps = {"/proc/self/maps": f"7f00-7f01 r-xp 00000000 00:00 1    {library}\n"}
            patch.setattr(Path, "read_text", lambda path, maps=maps: maps.get(str(path)) or read(path))
            seen.add(compile.nvrtc_build.__wrapped__())
    assert len(seen) == 4


UNKEPT = {
    "no folder can be": lambda patch: patch.setenv("CUNORM_CACHE_DIR", "/dev/null/cache"),
    "no home": without_a_home,
    "a full disk": lambda patch: patch.setattr(cache.os, "replace", no_space),
}


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("name", UNKEPT)
def test_kernels_that_cannot_be_kept_cost_time_and_one_line(nvrtc_calls, monkeypatch, lines, tmp_path, name):
    logs.not_kept.cache_clear()
    UNKEPT[name](monkeypatch)
    assert compile.machine_code(spec_of(100), 90) == compile.machine_code(spec_of(100), 90)
    compile.machine_code(spec_of(101), 90)
    assert len(nvrtc_calls) == 3
    assert len([line for line in lines() if "CUNORM_CACHE_DIR" in line]) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_of_the_cache_are_for_whom_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        cache.write(tmp_path / "folder" / "file", b"content")
    finally:
        os.umask(before)
    file = tmp_path / "folder" / "file"
    assert file.stat().st_mode & 0o777 == mode
    assert file.parent.stat().st_mode & 0o777 == 0o755 & ~umask
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.slow
@needs_nvrtc
def test_filling_a_cache_that_cannot_be_written_fails(tmp_path):
    options = ("--cols", "100", "--dtype", "float16", "--arch", "90")
    result = command(tmp_path, "compile", "--all", *options, environment={"CUNORM_CACHE_DIR": "/dev/null/cache"})
    assert_fails_in_one_line(result, 1, "the kernels cannot be kept: /dev/null/cache cannot be written")


@needs_nvrtc
@pytest.mark.parametrize(("version", "knows"), [((12, 3), False), ((12, 4), True)])
def test_an_nvrtc_is_told_what_it_may_leave_out_if_it_knows_how(monkeypatch, version, knows):
    from cupy_backends.cuda.libs import nvrtc

    given = []
    compile_program = nvrtc.compileProgram
    monkeypatch.setattr(nvrtc, "compileProgram", lambda *a: (given.extend(a[1]), compile_program(*a)))
    monkeypatch.setattr(compile, "_nvrtc_version", lambda: version)
    compile.compile_for(spec_of(100), 90)
    assert ("--minimal" in given) == knows


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_gets_ptx(nvrtc_calls, monkeypatch):
    from cupy_backends.cuda.libs import nvrtc

    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: [75, 80, 90])
    assert b".target sm_90" in compile.machine_code(spec_of(100), 100)
    assert nvrtc_calls == ["-arch=compute_90"]


PROGRAM = """
import sys, time
import cupy, numpy, cunorm
from cupy_backends.cuda.libs import nvrtc
def refuse(*_): raise AssertionError("NVRTC was called")
if "refuse" in sys.argv: nvrtc.createProgram = nvrtc.compileProgram = refuse
print("ready", flush=True)
sys.stdin.readline()
x = cupy.asarray(numpy.random.default_rng(0).standard_normal((64, 1003)).astype("float32"))
weight = cupy.asarray(numpy.ones(1003, "float32"))
start = time.perf_counter()
y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, weight)
dx, dweight, dbias = cunorm.layer_norm_backward(x, x, mean, rstd, weight)
cupy.cuda.runtime.deviceSynchronize()
print(time.perf_counter() - start, hash(y.tobytes() + dx.tobytes() + dweight.tobytes()))
"""


def start(cache: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"CUNORM_CACHE_DIR": cache, "CUPY_CACHE_DIR": cache, "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    program = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(program, env=environment, cwd=cache, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


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
    """The second process compiles nothing, so that no file is added."""
    counts = []
    for _ in range(2):
        output, errors = start(str(tmp_path)).communicate("go\n", timeout=120)
        assert output, errors
        counts.append(sum(path.is_file() for path in tmp_path.rglob("*")))
    assert counts[0] == counts[1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("filled", [True, False], ids=["filled without a GPU", "empty"])
def test_a_container_that_was_filled_without_a_gpu_compiles_nothing(tmp_path, filled):
    """`command` hides the GPUs. The program refuses to call NVRTC, so it fails where the cache is empty."""
    import cupy

    if filled:
        options = ("--cols", "1003", "--dtype", "float32", "--arch", cupy.cuda.Device().compute_capability)
        output_of(command(tmp_path, "compile", "--all", *options, environment={"CUNORM_CACHE_DIR": str(tmp_path)}))
    process = start(str(tmp_path), "refuse")
    _, errors = process.communicate("go\n", timeout=120)
    assert (process.returncode == 0) == filled, errors
    assert ("NVRTC was called" in errors) != filled
