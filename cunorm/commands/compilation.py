"""Many kernels compiled at once, and what is wrong with any of them. It needs no GPU; results are kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ..kernel import compile, source
from ..kernel.cache import cache_directory, keep_file
from ..kernel.compile import Resources
from ..plan.resources import SHARED_LIMIT, shared_memory
from ..plan.spec import KernelSpec
from .cache import RESULTS_FILE

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
    """Return what is wrong with a kernel; empty if nothing is.

    It must not keep a part of its rows in local memory, nor take more shared memory than there is.
    """
    faults = []
    if used.spill_stores or used.spill_loads:
        faults.append(f"spills {used.spill_stores} bytes of stores, {used.spill_loads} of loads")
    elif used.stack:
        faults.append(f"uses {used.stack} bytes of local memory")
    if used.shared > SHARED_LIMIT:
        faults.append(f"uses {used.shared} bytes of shared memory of {SHARED_LIMIT}")
    elif used.shared != shared_memory(spec):
        faults.append(f"uses {used.shared} bytes of shared memory; resources.py says {shared_memory(spec)}")
    return ", ".join(faults)


@contextmanager
def compiler(keep: bool) -> Iterator[CompileOne]:
    """Yield a function that compiles a kernel and returns its resources.

    With `keep` the kernel goes into the kernel cache too, where a call finds it.

    What ptxas says of a kernel is kept in any case, in a file beside the kernels, which `cache clear` removes.
    """
    # All that the result depends on besides the source and the architecture.
    salt = repr((compile.nvrtc_build(), compile.OPTIONS, compile.AS_CUPY, Resources._fields))
    known, new = _read(), {}

    def compile_one(spec: KernelSpec, arch: int) -> Resources:
        text = f"{salt}\nsm_{arch}\n{source.source(spec)}"
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        if key not in known or (keep and not _is_kept(compile.kernel_file(spec, arch))):
            known[key] = new[key] = list(compile.compile_for(spec, arch, keep=keep))
        return Resources(*known[key])

    try:
        yield compile_one
    finally:  # what was compiled before an interruption is kept too
        if new:  # another process may have added to the file since it was read
            keep_file(RESULTS_FILE, json.dumps(_read() | new).encode())


def _read() -> dict[str, list[int]]:
    try:
        return json.loads((cache_directory() / RESULTS_FILE).read_text())
    except (OSError, ValueError):
        return {}


def _is_kept(file: str) -> bool:
    try:
        return (cache_directory() / file).exists()
    except OSError:
        return False
