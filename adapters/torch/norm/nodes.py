"""Passes whose launches are known, described for nodes.cpp: then no Python runs in the backward pass.

Of an autograd.Function's 100 us of the host, both passes, most is Python's (bench/NOTES.md). nodes.cpp is compiled once
for each version of torch and of Python, by `build`, and kept beside the kernels. Without it, or without a compiler,
Python computes the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import launch, logs
from ...compile import cache_directory, kernel, write
from ...norm.steps import Plan, Step
from .. import private
from .gpu import Memory

SOURCES = tuple(Path(__file__).with_name(name) for name in ("nodes.cpp", "nodes_autograd.h", "nodes_passes.h"))
OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
PASSES = 4096  # described at most, as they are kept for good

Call = Callable[..., tuple[Tensor, ...] | None]  # with the tensors of a call; None where they cannot be served


def kept_file() -> Path:
    """Where the compiled file is kept: named by all that it depends on."""
    inputs = repr(([one.read_bytes() for one in SOURCES], OPTIONS, torch.__version__, sys.implementation.cache_tag))
    return cache_directory() / f"cunorm_nodes_{hashlib.sha256(inputs.encode()).hexdigest()[:40]}.so"


def build() -> str:
    """Compiles nodes.cpp, 15 s, where it has not been; why it could not be, "" if it could."""
    kept = kept_file()
    if not kept.exists():
        compiler = os.environ.get("CXX", "c++")
        root = Path(torch.__file__).parent
        headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include"))
        libraries = (f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "nodes.so"
            command = [
                compiler,
                *OPTIONS,
                *(f"-I{one}" for one in headers),
                str(SOURCES[0]),
                "-o",
                str(made),
                *libraries,
            ]
            logs.logger.info("compiling %s, once for this version of torch", SOURCES[0].name)
            try:
                run = subprocess.run(command, capture_output=True, text=True)
            except OSError as error:
                return f"{compiler} could not be run ({error})"
            if run.returncode:
                return f"{compiler} failed: {run.stderr.strip().splitlines()[-1:] or run.returncode}"
            write(kept, made.read_bytes())
        module.cache_clear()
    return ""


@functools.cache
def module() -> Any:
    """What was compiled, ready to launch; None if there is none."""
    if not torch.cuda.is_available() or (found := load()) is None:
        return None
    current_stream = private.current_stream()
    if current_stream is None:
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    functions = (
        driver.cuLaunchKernelEx,
        driver.cuCtxGetCurrent,
        driver.cuCtxSetCurrent,
        current_stream,
        driver.cuStreamIsCapturing,
    )
    found.set_driver(*(ctypes.cast(one, ctypes.c_void_p).value for one in functions))
    return found


def load() -> Any:
    """The compiled module, None if there is none."""
    kept = kept_file()
    if not kept.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader("cunorm_nodes", str(kept))
    spec = importlib.util.spec_from_file_location("cunorm_nodes", kept, loader=loader)
    try:
        return importlib.util.module_from_spec(spec)
    except ImportError as error:
        logs.logger.warning("%s cannot be used: %s", kept, error)
        return None


def forward_pass(
    plan: Plan | None,
    tensors: Mapping[str, Tensor],
    results: Mapping[str, Memory],
    statistics: Memory,
    rstd_offset: int,
    numbers: Mapping[str, float],
    saved: Sequence[str],
    backward: Callable[..., Sequence[Tensor | None]],
) -> int | None:
    """A pass for tensors like these, of aligned memory, as `call_of` takes it; None where nothing can serve them.

    Whatever the plan takes goes by name. `saved` are the names of what the backward pass reads besides statistics.
    `backward(which, given, statistics, saved, mask)` is that pass by Python: the gradients of the tensors, of those
    given of the results. It may call `add_backward`. `mask` has a bit for each of the tensors.
    """
    global _described
    compiled = module()
    if compiled is None or plan is None or _described >= PASSES:
        return None
    _described += 1
    index = next(iter(tensors.values())).get_device()
    work = _work(plan, index, (*tensors,), results, rstd_offset, numbers)
    places = tuple((*tensors, *results).index(name) for name in saved)

    def later(*given: Any) -> Sequence[Tensor | None]:
        return backward(which, *given)

    which = compiled.make_pass(len(tensors), work, statistics, places, later)
    return which


def call_of(which: int | None) -> Call | None:
    """What serves calls of the tensors of a pass."""
    return None if which is None else functools.partial(module().call, which)


def linear_call(
    which: int,
    x: Tensor,
    others: Sequence[Tensor],
    dy: Tensor,
    sums: tuple[Plan, Memory] | None,
    keep_normalized: bool,
    backward: Callable[..., Sequence[Tensor | None]],
) -> Call:
    """What serves calls (x, weight, bias, *others) -> (y, z), with z = norm(x, *others), y = z weightᵀ + bias.

    `which` is the pass of the norm, (rows, out) the shape of `dy`. `sums` are its plan to dbias and what that takes,
    None without a bias. `backward(given, statistics, saved, mask)` as for `forward_pass`.
    """
    work = ((), 0, 0, 0, ())
    if sums is not None:
        plan, dbias = sums
        work = _work(plan, x.get_device(), ("dy",), {"dbias": dbias}, 0, {})
    compiled, given = module(), (x, *others)
    made = compiled.make_linear_pass(which, sums is not None, keep_normalized, given, dy, work, backward)
    return functools.partial(compiled.call_linear, made)


def add_backward(
    which: int,
    plan: Plan | None,
    given: Mapping[str, Tensor | None],
    statistics: Tensor,
    saved: Mapping[str, Tensor],
    mask: int,
    results: Mapping[str, Memory],
    rstd_offset: int,
    numbers: Mapping[str, float],
    places: Sequence[int],
    in_place: bool = False,
) -> None:
    """Describes a backward pass for tensors like these, by name. `places` are those of each gradient among the results,
    -1 where it is not wanted, -2 - i where it is the i-th of `given` itself. `in_place`: dx goes where dy is.
    """
    compiled = module()
    read = (*(one for one in given.values() if one is not None), statistics, *saved.values())
    if compiled is None or plan is None or any(one.data_ptr() % 16 for one in read):
        return
    aliases = {"dx": "dy"} if in_place else {}
    work = _work(plan, statistics.get_device(), (*given, *saved), results, rstd_offset, numbers, aliases)
    compiled.add_backward(which, tuple(given.values()), (statistics, *saved.values()), mask, work, tuple(places))


_described = 0
_kept: list[Any] = []  # kernels, whose addresses are in the descriptions


def _work(
    plan: Plan,
    index: int,
    read: Sequence[str],
    results: Mapping[str, Memory],
    rstd_offset: int,
    numbers: Mapping[str, float],
    aliases: Mapping[str, str] = {},
) -> tuple:
    """As nodes.cpp takes it."""
    context = launch.context(index)
    names = (*read, "mean", "rstd", *results, "workspace")
    places = {name: place for place, name in enumerate(names)}
    places |= {name: places[other] for name, other in aliases.items()}
    launches = tuple(_launch(step, index, places, numbers) for step in plan.steps)
    return tuple(results.values()), plan.workspace, rstd_offset, context, launches


def _launch(step: Step, index: int, places: Mapping[str, int], numbers: Mapping[str, float]) -> tuple:
    function = kernel(step.spec, index)
    _kept.append(function)
    pack = launch.NUMBERS[step.spec.compute]
    arguments = [
        *((places[name], offset) if name in places else (-1, 0) for name, offset in step.pointers),
        *((-1, struct.unpack("q", struct.pack(pack, numbers[name]))[0]) for name in step.scalars),
        *((-1, struct.unpack("q", struct.pack("Q", number % 2**64))[0]) for number in step.integers),
    ]
    of, values = zip(*arguments, strict=True)
    early = int(step.begins_early)
    return function.ptr, *step.grid, step.spec.threads, step.dynamic_shared, early, of, values
