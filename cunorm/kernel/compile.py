"""Compile kernels by NVRTC, for this GPU or for any, and keep them on disk.

A call on a GPU and `python -m cunorm compile --all` without one name files by the same function, `kernel_file`. So a
container that was filled on a machine without a GPU compiles nothing when it runs. CuPy's own cache cannot do this,
because the private functions that make its keys need a GPU.
"""

from __future__ import annotations

import hashlib
import re
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from .. import logs, private
from ..plan.resources import RESERVED, launch_shared
from ..plan.spec import KernelSpec, NormSpec, OtherSpec, SumSpec
from . import device
from .cache import cache_directory, keep_file
from .source import Baked, entry_name, source

OPTIONS = ("--std=c++17", "-fmad=false")  # numbers.cuh says why
AS_CUPY = ("-ftz=true", "-default-device")  # the options that CuPy adds; NVRTC 13.0 needs the second for lambdas
# Leaves out the declarations of textures, launches by kernels and the like, which saves 15 ms of 130 to 400.
MINIMAL, KNOWS_MINIMAL = "--minimal", (12, 4)
# On a machine with a driver NVRTC caches kernels, and then does not report registers and shared memory.
NO_CACHE, KNOWS_NO_CACHE = "--no-cache", (12, 9)
DIGEST = hashlib.sha256().digest_size


class CompileError(RuntimeError):
    """NVRTC rejected a kernel. The message holds its log: a bug in cunorm, or an NVRTC that is too old."""


class Resources(NamedTuple):
    """The resources that ptxas says a kernel uses: registers a thread, and bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


_kernels: dict[tuple[KernelSpec, int], Future] = {}
_lock = threading.Lock()


def kernel(spec: KernelSpec, device_id: int) -> Any:
    """Return the compiled kernel, a cupy.cuda.Function. Device `device_id` must be current.

    Threads may call at once: one of them compiles, and the others wait for it.
    """
    key = (spec, device_id)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            mine = kernel is None
            if kernel is None:
                kernel = _kernels[key] = Future()
        if mine:
            try:
                kernel.set_result(_load(spec, device_id))
            except BaseException as error:
                del _kernels[key]
                kernel.set_exception(error)
    return kernel.result()


def _load(spec: KernelSpec, device_id: int) -> Any:
    import cupy

    driver = cupy.cuda.driver
    module = cupy.cuda.Module()
    gpu = device.current(device_id)
    module.load(machine_code(spec, gpu.arch))
    function = module.get_function(entry_name(spec))
    dynamic = launch_shared(spec, gpu)
    if dynamic:
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic)
    if spec.cluster > 8:
        driver.funcSetAttribute(function.ptr, device.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    shared = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr) + dynamic
    carveout = _carveout(spec, shared)
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
    return function


def _expressions(spec: KernelSpec) -> str:
    """Describe what the kernel computes before and after the norm, for the message of an error."""
    if not isinstance(spec, NormSpec):
        return ""
    prologue, epilogue = spec.operation.prologue, spec.operation.epilogue
    before = f"s = {prologue.text}, " if prologue else ""
    return f" of {before}y = {epilogue.text}"


def _carveout(spec: KernelSpec, shared: int) -> int:
    """Return the per cent of an SM's memory that is shared memory and not L1, so that 2048 threads fit on an SM.

    Left to itself the driver gave kernels that need little so little (8 KB on an H200, by ncu) that seven CTAs of 64
    threads filled it. The sums of partial sums get as much as the kernels before and after them, and norms as much as
    the product that begins beside them, because an SM must be empty to change it: on an H100, early backward passes of
    LayerNorm, 8595 x 7808 of float32, take 270 us, else 361.
    """
    if isinstance(spec, SumSpec) or (isinstance(spec, NormSpec) and spec.lets_next_begin):
        return 100
    ctas = min(32, 2048 // spec.threads)
    return min(100, -(-100 * ctas * (shared + RESERVED) // (228 << 10)))


def machine_code(spec: KernelSpec, arch: int) -> bytes:
    """Return the kernel for an architecture: from the cache, else compiled and put there. It needs no GPU.

    It is PTX where NVRTC does not know the architecture; the driver reads either.
    """
    file = kernel_file(spec, arch)
    with suppress(OSError):
        content = (cache_directory() / file).read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
            return content[DIGEST:]
    _, code = _compile(source(spec), entry_name(spec), _target(spec, arch), spec)
    _keep(file, code)
    return code


def kernel_file(spec: KernelSpec, arch: int) -> str:
    """Return the name of a kernel's file, a digest of everything that its machine code depends on."""
    inputs = repr((nvrtc_build(), OPTIONS, AS_CUPY, arch, source(spec)))
    return f"cunorm_{hashlib.sha256(inputs.encode()).hexdigest()[:40]}.cubin"


def _keep(file: str, code: bytes) -> str:
    """Keep a file with its digest in front, so that one that a crash cut short is compiled again."""
    return keep_file(file, hashlib.sha256(code).digest() + code)


def compile_for(spec: KernelSpec, arch: int, baked: Baked | None = None, keep: bool = False) -> Resources:
    """Compile for any architecture without a GPU, and return what the kernel uses.

    With `keep` the kernel is kept as by machine_code, and RuntimeError is raised if it cannot be.
    """
    log, code = _compile(source(spec, baked), entry_name(spec), _machine(spec, arch), spec)
    if keep and (reason := _keep(kernel_file(spec, arch), code)):
        raise RuntimeError(f"the kernels cannot be kept: {reason}.")
    return _parse_resources(log)


@lru_cache(maxsize=512)
def ptx(spec: KernelSpec, baked: Baked, arch: int) -> str:
    """Return the PTX of an entry whose parameters are all pointers, for XLA. It needs no GPU."""
    return compile_ptx(source(spec, baked), entry_name(spec), arch, spec)


def compile_ptx(text: str, name: str, arch: int, spec: KernelSpec | None = None) -> str:
    """Return the PTX of any CUDA text, without globals that nothing reads, which NVRTC makes of templates' constants.

    With them the driver takes twice as long to load a kernel that it has compiled before, 0.13 ms instead of 0.06.
    """
    text = _compile(text, name, f"compute_{arch}", spec)[1].decode()
    declaration = re.compile(r"\.global [^=;]*?([\w$]+)(\[\d+\])?( = .*)?;\n", re.MULTILINE)
    return declaration.sub(lambda match: match[0] if text.count(match[1]) > 1 else "", text)


def why_ptx_is_too_new() -> str:
    """Return why the driver cannot read the PTX that NVRTC writes, and what to do; "" if it can."""
    import cupy

    version, driver = private.nvrtc().getVersion(), cupy.cuda.runtime.driverGetVersion()
    if 1000 * version[0] + 10 * version[1] <= driver:
        return ""
    return (
        f"the PTX of NVRTC {version[0]}.{version[1]} is too new for the driver, of CUDA {driver // 1000}."
        f"{driver % 1000 // 10}; update the driver, or install nvidia-cuda-nvrtc of its version"
    )


@cache
def _nvrtc_version() -> tuple[int, int]:
    return private.nvrtc().getVersion()


@cache
def nvrtc_build() -> tuple[object, ...]:
    """Return NVRTC's version and its build: the wheel that it came in, else its file's size and date."""
    version = _nvrtc_version()  # loads it
    with suppress(OSError):  # only Linux has this file
        mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
        for library in (Path(path) for path in mapped if "/libnvrtc.so" in path):
            packages = library.parents[3:4]  # site-packages, of site-packages/nvidia/cu13/lib/libnvrtc.so.13
            name = f"nvidia_cuda_nvrtc*-{version[0]}.*.dist-info"  # another CUDA's may be installed too
            wheels = sorted(wheel.name for folder in packages for wheel in folder.glob(name))
            file = library.stat()
            return *version, *(wheels or (file.st_size, file.st_mtime_ns))
    return version


def _target(spec: KernelSpec, arch: int) -> str:
    """Return NVRTC's name of the architecture, or of PTX for the newest one before it if NVRTC does not know it."""
    known = private.nvrtc().getSupportedArchs()
    return _machine(spec, arch) if arch in known else f"compute_{max(older for older in known if older < arch)}"


def _machine(spec: KernelSpec, arch: int) -> str:
    return f"sm_{arch}{'a' if isinstance(spec, OtherSpec) and spec.of_one_arch else ''}"


def _compile(text: str, name: str, target: str, spec: KernelSpec | None) -> tuple[str, bytes]:
    """Return (the log of ptxas, the code). Nothing else calls NVRTC's compiler."""
    nvrtc = private.nvrtc()
    start = perf_counter()
    is_ptx = target.startswith("compute")
    options = (*OPTIONS, *AS_CUPY, f"-arch={target}", *(() if is_ptx else ("--ptxas-options=-v",)))
    options += (MINIMAL,) if _nvrtc_version() >= KNOWS_MINIMAL else ()
    options += (NO_CACHE,) if _nvrtc_version() >= KNOWS_NO_CACHE else ()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        code = nvrtc.getPTX(program) if is_ptx else nvrtc.getCUBIN(program)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        of = _expressions(spec) if spec else ""
        raise CompileError(f"cunorm: NVRTC could not compile {name}{of} for {target}:\n{log}\n{spec or ''}") from error
    finally:
        nvrtc.destroyProgram(program)
    logs.compiled(name, target, perf_counter() - start, spec)
    return log, code


def _parse_resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem"),
    )
