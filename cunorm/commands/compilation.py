"""Many kernels compiled at once, and what is wrong with any of them. Without a GPU, results are kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from .. import compile, source
from ..compile import Resources
from ..norm.spec import KernelSpec, shared_memory
from . import cache

SHARED_LIMIT = 48 << 10  # bytes that a CTA can declare, on every architecture

CompileOne = Callable[[KernelSpec, int], Resources]


class Compiled(NamedTuple):
    """A kernel for an architecture. `used` is None if NVRTC rejected it; `fault` is empty if all is well."""

    spec: KernelSpec
    arch: int
    used: Resources | None
    fault: str


def compile_all(work: Iterable[tuple[KernelSpec, int]], compile_one: CompileOne) -> Iterator[Compiled]:
    """Compile each (kernel, architecture) with as many threads as there are cores, in order; NVRTC releases the GIL."""

    def compiled(item: tuple[KernelSpec, int]) -> Compiled:
        spec, arch = item
        try:
            used = compile_one(spec, arch)
        except compile.CompileError as error:
            return Compiled(spec, arch, None, str(error))
        return Compiled(spec, arch, used, fault(spec, used))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(compiled, work)


def fault(spec: KernelSpec, used: Resources) -> str:
    """What a kernel must not do: keep a part of its rows in local memory, or take more shared memory than there is."""
    faults = []
    if used.spill_stores or used.spill_loads:
        faults.append(f"spills {used.spill_stores} bytes of stores, {used.spill_loads} of loads")
    elif used.stack:
        faults.append(f"uses {used.stack} bytes of local memory")
    if used.shared > SHARED_LIMIT:
        faults.append(f"uses {used.shared} bytes of shared memory of {SHARED_LIMIT}")
    elif used.shared != shared_memory(spec):
        faults.append(f"uses {used.shared} bytes of shared memory; tiers.py says {shared_memory(spec)}")
    return ", ".join(faults)


@contextmanager
def offline() -> Iterator[CompileOne]:
    """Compile without a GPU. What ptxas says is kept in a file beside CuPy's kernels, which `cache clear` removes.

    A directory that cannot be written costs time, nothing else.
    """
    from cupy_backends.cuda.libs import nvrtc

    # All that the result depends on besides the source and the architecture.
    salt = repr((nvrtc.getVersion(), compile.OPTIONS, compile.AS_CUPY, Resources._fields))
    path = cache.directory() / cache.RESULTS_FILE
    known, new = _read(path), {}

    def compile_one(spec: KernelSpec, arch: int) -> Resources:
        text = f"{salt}\nsm_{arch}\n{source.source(spec)}"
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        if key not in known:
            known[key] = new[key] = list(compile.compile_for(spec, arch))
        return Resources(*known[key])

    try:
        yield compile_one
    finally:  # what was compiled before an interruption is kept too
        _add(path, new)


def _add(path: Path, new: dict[str, list[int]]) -> None:
    """Add to the file, to which another process may have added since it was read."""
    if not new:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(_read(path) | new, file)
        os.replace(file.name, path)


def _read(path: Path) -> dict[str, list[int]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


@contextmanager
def on_gpu(device_id: int) -> Iterator[CompileOne]:
    """Compile as a call on that GPU does, which leaves the kernel in CuPy's disk cache."""
    import cupy

    driver: Any = cupy.cuda.driver

    def compile_one(spec: KernelSpec, arch: int) -> Resources:
        with cupy.cuda.Device(device_id):
            kernel = compile.kernel(spec, device_id)
            return Resources(
                registers=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel.ptr),
                stack=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, kernel.ptr),
                spill_stores=0,  # the driver counts spilled bytes as local memory
                spill_loads=0,
                shared=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.ptr),
            )

    yield compile_one
