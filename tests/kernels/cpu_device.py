"""Run plans on the CPU: g++ compiles the text of a kernel with the platform.cuh of cpu/.

No package on PyPI does this (HIP-CPU, CuPBoP and GPU Ocelot are not there).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy

from cunorm.kernel import launch, source
from cunorm.kernel.launch import NUMBERS
from cunorm.kernel.source import Baked
from cunorm.plan.resources import dynamic_shared
from cunorm.plan.spec import KernelSpec
from cunorm.plan.steps import WORKSPACE, Plan, Step

STAND_IN = Path(__file__).parent / "cpu"
# -ffp-contract=off is the -fmad=false of a GPU: fused operations are written as multiply_add.
# Kernels are not optimised, because compiling one takes longer than running it.
OPTIONS = ("-std=c++20", "-ffp-contract=off", "-w", f"-I{STAND_IN}")
# gold links three times as fast as the linker that g++ takes by itself.
LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
PLATFORM = '#include "platform.cuh"\n'
ENTRY = (
    "\nusing namespace cunorm;\n"  # is between the files of a kernel, which others begin with too, and its own lines
)
ALIGNMENT = 128  # kernels look at addresses modulo this only
POISON = 255  # such bytes are NaN in every format, so that what a kernel leaves unwritten shows
ORDERS = ("ascending", "descending", "even before odd")
SECONDS = 120  # a launch may take so long
KEPT = 7 * 24 * 3600  # seconds that an unused program stays in the cache


class Launch(NamedTuple):
    """How a program runs its kernel. The fields have the order of tests/kernels/cpu/main.cpp."""

    grid_x: int
    grid_y: int
    grid_z: int
    threads: int
    cluster: int = 1
    order: int = 0
    dynamic_shared: int = 0


class Build(NamedTuple):
    """Compiler options that make a program look for mistakes while it runs."""

    kernel: tuple[str, ...] = ()  # options for the kernel's text
    runtime: tuple[str, ...] = ()  # options for tests/kernels/cpu
    link: tuple[str, ...] = ()


BUILDS = {
    "results": Build(("-fno-exceptions", "-fno-asynchronous-unwind-tables")),
    # AddressSanitizer checks global memory, and UndefinedBehaviorSanitizer the bounds of arrays and alignment.
    "memory": Build(
        ("-g1", "-fsanitize=address,undefined,bounds-strict", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
        ("-DCUNORM_ADDRESS",),
        ("-fsanitize=address,undefined",),
    ),
    # races.cpp takes the place of ThreadSanitizer's library.
    "races": Build(("-g1", "-fsanitize=thread"), ("-DCUNORM_RACES",)),
}


def divided(plan: Plan, arguments: Sequence[float]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the arguments of launch.run by name: (pointers, scalars)."""
    names = plan.problem.pointers
    pointers, scalars = arguments[: len(names)], arguments[len(names) :]
    return dict(zip(names, pointers, strict=True)), dict(zip(plan.problem.scalars, scalars, strict=True))


class SanitizerError(AssertionError):
    """A sanitizer, or the machine itself, stopped a launch."""


@dataclass(frozen=True)
class Machine:
    """A stand-in for a GPU.

    Threads run in the order `order`. `edit` changes the texts of kernels. Launches get `missing` bytes of dynamic
    shared memory less than they ask for.
    """

    build: str = "results"
    order: str = "ascending"
    edit: Callable[[str], str] = str
    missing: int = 0

    def run(self, plan: Plan, scalars: Mapping[str, float], /, **arrays: numpy.ndarray | None) -> None:
        """Launch a plan on NumPy arrays, which are passed by the names of the problem's operands."""
        given = {name: arrays.get(name) for name in plan.problem.pointers}
        with memory(given | {WORKSPACE: poisoned(plan.workspace)}) as pointers:
            *addresses, workspace = pointers.values()
            launch.run(plan, self, 0, (*addresses, *(scalars[name] for name in plan.problem.scalars)), workspace)

    def text(self, spec: KernelSpec, baked: Baked | None = None) -> str:
        """Return the text of a program: the kernel's text with the stand-in's platform.cuh, and its entry."""
        text, count = re.subn(
            r'^#line 1 "rows/platform\.cuh"\n.*?(?=^#line \d+ "(?!rows/(?:platform|numbers|memory|threads)))',
            PLATFORM,
            self.edit(source.source(spec, baked)),
            flags=re.DOTALL | re.MULTILINE,
        )
        assert count == 1, "source.source holds no platform.cuh"
        return f"{text}\nconst cpu::Kernel cpu::kernel = cpu::Erased<&{source.entry_name(spec)}>::kernel;\n"

    def prepare(self, step: Step, baked: Baked | None = None) -> tuple[Callable, Callable]:
        """Prepare a step as launch.prepare does. With `baked`, the kernel has only pointers as parameters."""
        text = self.text(step.spec, baked)
        cluster = _number(r"__cluster_dims__\((\d+), 1, 1\)", text) or 1
        assert step.spec.threads <= _number(r"__launch_bounds__\((\d+)", text)
        assert step.grid[0] % cluster == 0
        needed = dynamic_shared(step.spec)
        assert step.dynamic_shared >= needed
        shared = max(0, needed - self.missing)
        how = Launch(*step.grid, step.spec.threads, cluster, ORDERS.index(self.order), shared)
        original = text if self.edit is str else Machine().text(step.spec, baked)
        files, _, _ = original.partition(ENTRY)
        path = program(text, self.build, files if text.startswith(files) else PLATFORM)
        written: list[int | float] = []

        pointers = "P" * (len(step.pointers) if baked is None else len(baked.pointers))
        numbers = NUMBERS[step.spec.compute][0] * len(step.scalars) + "q" * len(step.integers)

        def write(*arguments):
            written[:] = (*arguments, *(() if baked else step.integers))

        return write, lambda stream: run(path, how, pointers + ("" if baked else numbers), written)


def poisoned(size: int) -> numpy.ndarray:
    """Return so many bytes of NaN, aligned as device memory is."""
    buffer = numpy.full(size + ALIGNMENT, POISON, "uint8")
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]


_spans: list[tuple[int, int]] = []  # (first address, bytes) of the arrays that a launch may touch


@contextlib.contextmanager
def memory(arrays: dict[str, numpy.ndarray | None]):
    """Yield the pointers of arrays, 0 for None, and let launch.py prepare kernels for the CPU meanwhile."""
    present = [array for array in arrays.values() if array is not None]
    spans: list[tuple[int, int]] = []
    for low, high in sorted(map(numpy.lib.array_utils.byte_bounds, present)):
        if spans and low < spans[-1][1]:  # two arrays share a buffer, or one array is passed twice
            low, high = spans[-1][0], max(high, spans.pop()[1])
        spans.append((low, high))
    _spans[:] = [(low, high - low) for low, high in spans if high > low]
    with mock.patch.object(launch, "prepare", lambda step, machine: machine.prepare(step)):
        yield {name: 0 if a is None else a.__array_interface__["data"][0] for name, a in arrays.items()}
    _spans.clear()


def run(path: Path, how: Launch, parameters: str, arguments: Sequence[int | float]) -> None:
    """Send arrays and arguments to the program, and put into the arrays what comes back, as its main.cpp says.

    `parameters` has a letter for each argument, as in launch.py.
    """
    views = [numpy.frombuffer((ctypes.c_char * size).from_address(low), "uint8") for low, size in _spans]
    words = [*how, len(views), len(arguments)]
    for low, size in _spans:
        words += [size, low % ALIGNMENT]
    for parameter, argument in zip(parameters, arguments, strict=True):
        words += _argument(parameter, argument)
    job = struct.pack(f"{len(words)}q", *words) + b"".join(view.tobytes() for view in views)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run([path], input=job, capture_output=True, timeout=SECONDS, env=environment)
    if result.returncode:
        raise SanitizerError(f"exit status {result.returncode}\n{result.stderr.decode(errors='replace')}")
    start = 0
    for view in views:
        view[:] = numpy.frombuffer(result.stdout, "uint8", len(view), start)
        start += len(view)
    assert start == len(result.stdout)


def _argument(parameter: str, argument: int | float) -> tuple[int, int, int]:
    """Return (bytes, number of the array or -1, offset or value) of an argument."""
    packed = struct.pack(parameter, argument)
    if parameter == "P":
        for number, (low, size) in enumerate(_spans):
            if low <= argument < low + size:
                return len(packed), number, int(argument - low)
    return len(packed), -1, int.from_bytes(packed, "little", signed=len(packed) == 8)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def missing() -> str:
    """Return why kernels cannot be run here, or an empty text."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the fibers of tests/kernels/cpu are for Linux on x86-64"
    return "" if shutil.which("g++") else "g++ is not installed"


@functools.cache
def program(text: str, build: str, first: str = PLATFORM) -> Path:
    """Return the program that runs a kernel's text. Other texts begin with `first` too."""
    rest = text.removeprefix(first)
    objects, headers = _runtime(build), _headers(first, build)
    key = _key(rest, str(objects), str(headers), *BUILDS[build].kernel)

    def make(folder: Path) -> Path:
        (folder / "kernel.cpp").write_text(rest)
        before = ("-include", headers.with_suffix(""))  # g++ looks for the same name with .gch
        _compile(*OPTIONS, *BUILDS[build].kernel, *before, "-c", folder / "kernel.cpp", "-o", folder / "kernel.o")
        _compile(*LINKER, *BUILDS[build].link, folder / "kernel.o", *objects, "-pthread", "-o", folder / "program")
        return folder / "program"

    return _cached(f"{key}.program", make)


@functools.cache
def _headers(text: str, build: str) -> Path:
    """Return what several texts begin with, compiled once, which makes compiling a kernel faster."""
    headers = "".join(path.read_text() for path in sorted(STAND_IN.glob("*.?uh")) + sorted(STAND_IN.glob("*.hpp")))

    def make(folder: Path) -> Path:
        (folder / "headers.hpp").write_text(text)
        _compile(*OPTIONS, *BUILDS[build].kernel, folder / "headers.hpp", "-o", folder / "headers.gch")
        return folder / "headers.gch"

    return _cached(f"{_key(headers, text, *BUILDS[build].kernel)}.hpp.gch", make)


@functools.cache
def _runtime(build: str) -> tuple[Path, ...]:
    """Return the object files of tests/kernels/cpu."""
    everything = "".join(path.read_text() for path in sorted(STAND_IN.iterdir()))
    objects = []
    for file in sorted(STAND_IN.glob("*.cpp")):

        def make(folder: Path, file=file) -> Path:
            _compile(*OPTIONS, "-O1", *BUILDS[build].runtime, "-c", file, "-o", folder / "object")
            return folder / "object"

        objects.append(_cached(f"{_key(everything, file.name, *BUILDS[build].runtime)}.o", make))
    return tuple(objects)


def _cached(name: str, make: Callable[[Path], Path]) -> Path:
    """Return the file `name` of the cache, and make it if it is missing. It appears whole, also for other processes."""
    path = _cache() / name
    if path.exists():
        os.utime(path)
    else:
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            make(Path(folder)).replace(path)
    return path


@functools.cache
def _cache() -> Path:
    """Return the folder of the cache, after removing files that were not used for long."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cunorm" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    for path in cache.glob("*.*"):
        with contextlib.suppress(FileNotFoundError):  # another worker was first
            if path.stat().st_mtime < time.time() - KEPT:
                path.unlink()
    return cache


def _compile(*arguments: object) -> None:
    result = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, f"g++ {' '.join(map(str, arguments))}\n{result.stderr}"


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((_compiler(), *OPTIONS, *parts)).encode()).hexdigest()[:32]
