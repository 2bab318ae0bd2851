"""Describe passes whose launches are known to nodes.cpp, so that no Python runs in the backward pass.

Most of the host's time in an autograd.Function is Python's (docs/tuning.md). nodes.cpp is compiled once for each
version of torch and of Python, by `build` or in the background of the first call that wants a gradient, and is kept
beside the kernels. Without it, or without a compiler, Python computes the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import logs
from ...kernel import launch
from ...kernel.cache import cache_directory, write
from ...kernel.compile import DIGEST
from ...plan.steps import WORKSPACE, Plan, Step
from .. import private
from . import repeats
from .gpu import Memory

SOURCES = tuple(Path(__file__).with_name(name) for name in ("nodes.cpp", "nodes_autograd.h", "nodes_passes.h"))
OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")

Call = Callable[..., tuple[Tensor, ...] | None]  # takes the tensors of a call; returns None if it cannot serve them


class Work(NamedTuple):
    """What a pass launches and writes."""

    plan: Plan
    results: Mapping[str, Memory]  # by name
    rstd_offset: int = 0  # bytes from mean to rstd
    numbers: Mapping[str, float] = {}  # by name


def kept_file() -> Path:
    """Return the path of the compiled file, whose name is a hash of all that it depends on."""
    inputs = repr(
        ([source.read_bytes() for source in SOURCES], OPTIONS, torch.__version__, sys.implementation.cache_tag)
    )
    return cache_directory() / f"cunorm_nodes_{hashlib.sha256(inputs.encode()).hexdigest()[:40]}.so"


def build() -> str:
    """Compile nodes.cpp, unless that is done, and load it; return why it cannot be used, "" if it can.

    Compiling takes some 15 s. If several processes call this, one compiles and the others wait for it.
    """
    try:
        try:
            load()
        except ImportError:
            _compile(kept_file())
        if torch.cuda.is_available():
            _get_ready()
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def build_in_background() -> None:
    """Start `build` in a process of its own, once. Calls run by Python until `module` finds what it made.

    Nothing is started with CUNORM_NODES=0. Of the processes that torchrun starts on a machine only the first one starts
    it. The process may outlive this one, so that a script that ends early leaves the file to the next.
    """
    global _was_started
    if _was_started or _ready is not None:
        return
    _was_started = True
    is_left_out = os.environ.get("CUNORM_NODES") == "0" or os.environ.get("LOCAL_RANK", "0") != "0"
    if is_left_out or not sys.executable or kept_file().exists():
        return
    if shutil.which(compiler()) is None:
        _say_once(f"{compiler()} could not be found")
        return
    logs.logger.info(
        "compiling %s in the background, once for this version of torch: CUNORM_NODES=0 is for never", SOURCES[0].name
    )
    program = f"from {__name__} import build; build()"
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    with suppress(OSError):
        subprocess.Popen(
            (sys.executable, "-c", program),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def module() -> Any:
    """Return the compiled module, ready to launch; None while there is none. It is looked for once a second."""
    global _look_again_at
    if _ready is None and monotonic() >= _look_again_at:
        _look_again_at = monotonic() + 1
        if torch.cuda.is_available():
            try:
                _get_ready()
            except ImportError as error:
                _say_once(str(error))
    return _ready


def load() -> Any:
    """Return the compiled module; raise ImportError with the reason if there is none that can be used."""
    global _loaded
    with _loading:
        if _loaded is None:
            try:
                file = kept_file().resolve(strict=True)
                _must_be_safe(file, file.parent)
                content = file.read_bytes()
            except OSError as error:
                raise ImportError(str(error)) from error
            if hashlib.sha256(content[:-DIGEST]).digest() != content[-DIGEST:]:
                raise ImportError(f"{file} is damaged")
            loader = importlib.machinery.ExtensionFileLoader("cunorm_nodes", str(file))
            spec = importlib.util.spec_from_file_location("cunorm_nodes", file, loader=loader)
            _loaded = importlib.util.module_from_spec(spec)
    return _loaded


_loading = threading.Lock()
_loaded: Any = None
_ready: Any = None  # the module _loaded, once it can launch
_look_again_at = 0.0
_was_started = False  # build_in_background was called before


def _get_ready() -> None:
    """Tell the module the addresses of CUDA's and torch's functions, and forget calls described without the module."""
    global _ready
    if _ready is None:
        compiled = load()
        compiled.set_driver(*_functions())
        _ready = compiled
        repeats._calls.clear()


def _functions() -> tuple[int | None, ...]:
    """Return the addresses of the functions that nodes.cpp calls."""
    current_stream = private.current_stream()
    if current_stream is None:
        raise ImportError("this torch does not tell C++ its current stream")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = (
            driver.cuLaunchKernelEx,
            driver.cuCtxGetCurrent,
            driver.cuCtxSetCurrent,
            current_stream,
            driver.cuStreamIsCapturing,
        )
    except (OSError, AttributeError) as error:
        raise ImportError(f"a function of CUDA is missing: {error}") from error
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


@functools.cache
def _say_once(reason: str) -> None:
    logs.fell_back("nodes of autograd", "by Python", reason)


def _must_be_safe(*paths: Path) -> None:
    """Raise ImportError if another user may write to one of the files or folders."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise ImportError(
                f"{path} must belong to this user or to root, and nobody else may write to it; it belongs to user "
                f"{status.st_uid}, with mode {status.st_mode & 0o7777:o}. CUNORM_CACHE_DIR may name another folder"
            )


def _compile(file: Path) -> None:
    """Compile nodes.cpp into `file`, where it is loaded from, unless another process has done so meanwhile."""
    import fcntl  # not on Windows

    try:
        file.parent.mkdir(0o755, parents=True, exist_ok=True)
        _must_be_safe(file.parent)
        with open(file.with_suffix(".lock"), "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as lock:
            with suppress(OSError):  # the file system may have no locks; a process that ends frees its own
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                load()
            except ImportError:
                content = _compiled()
                write(file, content + hashlib.sha256(content).digest(), 0o644)
                load()
    except OSError as error:
        raise ImportError(f"{file} cannot be written ({error}); CUNORM_CACHE_DIR may name another folder") from error


def _compiled() -> bytes:
    """Compile nodes.cpp and return the bytes of the library; raise ImportError if the compiler fails."""
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    libraries = (f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "nodes.so"
        inputs = (*OPTIONS, *(f"-I{header}" for header in headers), str(SOURCES[0]), "-o", str(library), *libraries)
        logs.logger.info("compiling %s, once for this version of torch", SOURCES[0].name)
        try:
            run = subprocess.run((compiler(), *inputs), capture_output=True, text=True)
        except OSError as error:
            raise ImportError(f"{compiler()} could not be run ({error})") from error
        if run.returncode:
            lines = run.stderr.strip().splitlines()
            reason = next((line for line in lines if "error" in line), lines[-1] if lines else str(run.returncode))
            raise ImportError(f"{compiler()} failed: {reason}")
        return library.read_bytes()


def forward_pass(
    work: Work,
    tensors: Mapping[str, Tensor],
    statistics: Memory,
    saved: Sequence[str],
    backward: Callable[..., Sequence[Tensor | None] | None],
) -> Any:
    """Return a pass for tensors like these, in aligned memory, as `call_of` takes it; None if nothing can serve them.

    `saved` are the names of what the backward pass reads besides statistics.
    `backward(norm_pass, gradients, statistics, saved, mask)` is that pass in Python: it returns the gradients of the
    tensors from those of the results, or None once `add_backward` has described it. `mask` has a bit for each tensor.
    """
    compiled = module()
    if compiled is None:
        return None
    launches = _launches(work, next(iter(tensors.values())).get_device(), (*tensors,))
    places = tuple((*tensors, *work.results).index(name) for name in saved)
    return compiled.make_pass(len(tensors), launches, statistics, places, backward)


def call_of(norm_pass: Any) -> Call | None:
    """Return a function that runs a pass on its tensors; None for no pass."""
    return None if norm_pass is None else functools.partial(module().call, norm_pass)


def linear_call(
    norm_pass: Any,
    x: Tensor,
    others: Sequence[Tensor],
    dy: Tensor,
    sums: Work | None,
    keep_normalized: bool,
    backward: Callable[..., Sequence[Tensor | None]],
) -> Call:
    """Return a function (x, weight, bias, *others) -> (y, z), with z = norm(x, *others) and y = z weightᵀ + bias.

    `norm_pass` is that of the norm, and `dy` has the shape (rows, out). `sums` sums dy to dbias; None without a bias.
    `backward(gradients, statistics, saved, mask)` is as in `forward_pass`.
    """
    launches = ((), 0, 0, 0, ()) if sums is None else _launches(sums, x.get_device(), ("dy",))
    compiled, norm_inputs = module(), (x, *others)
    linear_pass = compiled.make_linear_pass(
        norm_pass, sums is not None, keep_normalized, norm_inputs, dy, launches, backward
    )
    return functools.partial(compiled.call_linear, linear_pass)


def add_backward(
    norm_pass: Any,
    work: Work,
    gradients: Mapping[str, Tensor | None],
    statistics: Tensor,
    saved: Mapping[str, Tensor],
    mask: int,
    places: Sequence[int],
    in_place: bool = False,
) -> bool:
    """Describe a backward pass for tensors like these, by name; return False if that is not possible.

    `places` has for each tensor the place of its gradient among the results, -1 if it is not wanted, or -2 - i if it is
    the i-th of `gradients` itself. With `in_place` dx takes the memory of dy.
    """
    compiled = module()
    saved_tensors = (statistics, *saved.values())
    read = (*(tensor for tensor in gradients.values() if tensor is not None), *saved_tensors)
    if compiled is None or any(tensor.data_ptr() % 16 for tensor in read):
        return False
    launches = _launches(work, statistics.get_device(), (*gradients, *saved), in_place)
    compiled.add_backward(norm_pass, tuple(gradients.values()), saved_tensors, mask, launches, tuple(places))
    return True


def _launches(work: Work, index: int, read: Sequence[str], in_place: bool = False) -> tuple:
    """Return the results and launches of a pass that reads tensors of these names, as nodes.cpp takes them."""
    plan, results, rstd_offset, numbers = work
    names = (*read, "mean", "rstd", *results, WORKSPACE)
    places = {name: place for place, name in enumerate(names)}
    if in_place:
        places["dx"] = places["dy"]
    context = launch.context(index)
    launches = tuple(_launch(step, index, places, numbers) for step in plan.steps)
    return tuple(results.values()), plan.workspace, rstd_offset, context, launches


def _launch(step: Step, index: int, places: Mapping[str, int], numbers: Mapping[str, float]) -> tuple:
    """Return a launch as nodes.cpp takes it; `places` are those of names among the arguments of the pass."""
    function = launch.address(step, index)
    number_format = launch.NUMBERS[step.spec.compute]
    value_places = [places.get(name, -1) for name, _ in step.pointers]
    values = [offset if name in places else 0 for name, offset in step.pointers]
    values += [struct.unpack("q", struct.pack(number_format, numbers[name]))[0] for name in step.scalars]
    values += [(number + 2**63) % 2**64 - 2**63 for number in step.integers]  # the same 64 bits, with a sign
    value_places += [-1] * (len(values) - len(value_places))
    early = int(step.begins_early)
    return function, *step.grid, step.spec.threads, step.dynamic_shared, early, tuple(value_places), tuple(values)
