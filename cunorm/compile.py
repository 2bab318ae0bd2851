"""From a kernel's text to the kernel: NVRTC, for this GPU or for any, and the cache of compiled kernels."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

from .device import NON_PORTABLE_CLUSTER_SIZE_ALLOWED
from .norm.spec import KernelSpec, SumSpec, dynamic_shared
from .source import Baked, entry_name, source

OPTIONS = ("--std=c++17", "-fmad=false")  # platform.cuh says why
AS_CUPY = ("-ftz=true", "-default-device")  # what CuPy adds; NVRTC 13.0 wants the second for lambdas


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message holds its log: a bug in cunorm, or an NVRTC that is too old."""


class Resources(NamedTuple):
    """What ptxas says that a kernel uses: registers a thread, and bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


_kernels: dict[tuple[KernelSpec, int], Future] = {}
_lock = threading.Lock()


def kernel(spec: KernelSpec, device_id: int) -> Any:
    """The compiled kernel, a callable `(grid, block, args)` (cupy.cuda.Function). Device `device_id` must be current.

    Threads may call at once: one of them compiles, the others wait for it.
    """
    key = (spec, device_id)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            mine = found is None
            if found is None:
                found = _kernels[key] = Future()
        if mine:
            try:
                found.set_result(_compile(spec))
            except BaseException as error:
                del _kernels[key]
                found.set_exception(error)
    return found.result()


def _compile(spec: KernelSpec) -> Any:
    import cupy

    try:
        compiled = cupy.RawModule(code=source(spec), options=OPTIONS).get_function(entry_name(spec))
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(
            f"cunorm: NVRTC could not compile {entry_name(spec)}{_expressions(spec)} for {spec}:\n{error}"
        ) from error
    dynamic = dynamic_shared(spec)
    if dynamic:
        compiled.max_dynamic_shared_size_bytes = dynamic
    if spec.cluster > 8:
        cupy.cuda.driver.funcSetAttribute(compiled.kernel.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    compiled.preferred_shared_memory_carveout = _carveout(spec.threads, compiled.shared_size_bytes + dynamic)
    return compiled.kernel


def _expressions(spec: KernelSpec) -> str:
    """What the kernel computes before and after the norm, for the message of an error."""
    if isinstance(spec, SumSpec):
        return ""
    prologue, epilogue = spec.operation.prologue, spec.operation.epilogue
    before = f"s = {prologue.text}, " if prologue else ""
    return f" of {before}y = {epilogue.text}"


def _carveout(threads: int, shared: int) -> int:
    """Per cent of the SM's memory to be shared memory rather than L1, so that 2048 threads fit an SM.

    Left to itself the driver gave kernels that need little so little (8 KB on an H200, by ncu) that seven CTAs of 64
    threads filled it. Each CTA takes 1 KB besides its own.
    """
    ctas = min(32, 2048 // threads)
    return min(100, -(-100 * ctas * (shared + 1024) // (228 << 10)))


def compile_for(spec: KernelSpec, arch: int, baked: Baked | None = None) -> Resources:
    """Compile for any architecture, with no GPU and no driver: what the kernel uses."""
    text, options = source(spec, baked), ("--ptxas-options=-v",)
    log, _ = _compile_offline(text, entry_name(spec), f"sm_{arch}", *options, computes=_expressions(spec))
    return _parse_resources(log)


@lru_cache(maxsize=512)
def ptx(spec: KernelSpec, baked: Baked, arch: int) -> str:
    """The PTX of an entry with pointers alone, for XLA to launch; with no GPU and no driver."""
    return compile_ptx(source(spec, baked), entry_name(spec), arch, _expressions(spec))


def compile_ptx(text: str, name: str, arch: int, computes: str = "") -> str:
    """The PTX of any CUDA text, without the globals that NVRTC makes of the templates' constants and nothing reads.

    With them the driver takes twice as long to load a kernel that it has compiled before, 0.13 ms instead of 0.06.
    What the text `computes` stands in the message of an error.
    """
    _, text = _compile_offline(text, name, f"compute_{arch}", computes=computes)
    unread = re.compile(r"\.global [^=;]*?([\w$]+)(\[\d+\])?( = .*)?;\n", re.MULTILINE)
    return unread.sub(lambda found: found[0] if text.count(found[1]) > 1 else "", text)


def why_ptx_is_too_new() -> str:
    """Why the driver cannot read the PTX that NVRTC writes, and what to do; empty if it can."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    version, driver = nvrtc.getVersion(), cupy.cuda.runtime.driverGetVersion()
    if 1000 * version[0] + 10 * version[1] <= driver:
        return ""
    return (
        f"the PTX of NVRTC {version[0]}.{version[1]} is too new for the driver, of CUDA {driver // 1000}."
        f"{driver % 1000 // 10}; update the driver, or install nvidia-cuda-nvrtc of its version"
    )


def _compile_offline(text: str, name: str, target: str, *options: str, computes: str = "") -> tuple[str, str]:
    """(log, PTX), the latter empty for a target that is machine code."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, *AS_CUPY, f"-arch={target}", *options))
        code = nvrtc.getPTX(program) if target.startswith("compute") else b""
        return nvrtc.getProgramLog(program), code.decode()
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"cunorm: NVRTC could not compile {name}{computes} for {target}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _parse_resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem"),
    )
