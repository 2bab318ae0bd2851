"""`info [--json]`: what there is on this machine. Never raises: a field that cannot be had says why."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from .. import __version__, private
from ..kernel import device
from ..kernel.cache import cache_directory
from ..kernel.device import INSTALL
from ..plan import tables
from .cache import kernel_files

CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
OTHER_DISTRIBUTIONS = ("numpy", "ml_dtypes", "nvmath-python", "torch", "jax", "flax")


def add_parser(commands) -> None:
    parser = commands.add_parser("info", help="show versions, GPUs and the kernel cache")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    fields = report()
    if arguments.json:
        print(json.dumps(fields, indent=2))
        return 0
    for name, value in fields.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines or ["none"]:
            print(f"{name:<14}{_in_words(line)}")
    return 0


def report() -> dict[str, Any]:
    """Return every field, by name; `{"unavailable": reason}` for one that cannot be had."""
    fields = {
        "cunorm": _field(lambda: __version__),
        "python": _field(platform.python_version),
        "platform": _field(platform.platform),
        "cupy": _field(_cupy_distributions),
    }
    fields |= {name: _field(lambda name=name: _distribution(name)) for name in OTHER_DISTRIBUTIONS}
    return fields | {
        "driver": _field(_driver),
        "cuda_runtime": _field(_cuda_runtime),
        "nvrtc": _field(_nvrtc),
        "gpus": _field(_gpus),
        "peer_access": _field(_peer_access),
        "exchange": _field(_exchange),
        "kernel_cache": _field(_kernel_cache),
        "tables": _field(_tables),
        "xla_call": _field(_xla_call),
        "next": _field(_next),
    }


def why_no_gpu() -> str | None:
    """Return why CuPy reaches no GPU; None if it does."""
    try:
        _gpus()
    except Exception as error:
        return _reason(error)
    return None


def why_no_compiler() -> str | None:
    """Return why CuPy reaches no NVRTC; None if it does."""
    try:
        _nvrtc()
    except Exception as error:
        return _reason(error)
    return None


class _AbsentError(Exception):
    """Something is not there; the message is all that there is to say."""


def _field(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return {"unavailable": _reason(error)}


def _reason(error: Exception) -> str:
    if isinstance(error, _AbsentError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =\t")]
    return ": ".join([type(error).__name__, *lines[:1]])


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise _AbsentError("not installed") from None


def _cupy_distributions() -> str:
    """Return the installed distributions of CuPy; more than one is a mistake that is hard to see otherwise."""
    installed = []
    for name in CUPY_DISTRIBUTIONS:
        try:
            installed.append(f"{metadata.version(name)} ({name})")
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        raise _AbsentError("not installed")
    return ", ".join(installed)


def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except Exception as error:
        raise _AbsentError(f"CuPy could not be imported ({_reason(error)})") from error
    return runtime


def _driver() -> str:
    version = _runtime().driverGetVersion()
    if version == 0:
        raise _AbsentError("no NVIDIA driver is loaded")
    return f"CUDA {_dotted(version)}"


def _cuda_runtime() -> str:
    return _dotted(_runtime().runtimeGetVersion())


def _nvrtc() -> str:
    return ".".join(str(part) for part in private.nvrtc().getVersion())


def _gpus() -> list[dict[str, Any]]:
    runtime = _runtime()
    _driver()
    gpus = []
    for number in range(runtime.getDeviceCount()):
        facts = runtime.getDeviceProperties(number)
        gpu = {"name": facts["name"].decode(), "arch": f"sm_{facts['major']}{facts['minor']}"}
        gpus.append(gpu | {"sms": facts["multiProcessorCount"], "memory_bytes": facts["totalGlobalMem"]})
    if not gpus:
        raise _AbsentError("the driver shows no GPU")
    return gpus


def _unreachable() -> list[str]:
    """Return the pairs of GPUs of which the first cannot read the second's memory."""
    runtime = _runtime()
    count = len(_gpus())
    pairs = [(reader, owner) for reader in range(count) for owner in range(count) if reader != owner]
    return [
        f"GPU {one} cannot reach GPU {other}" for one, other in pairs if not runtime.deviceCanAccessPeer(one, other)
    ]


def _peer_access() -> str:
    if len(_gpus()) == 1:
        raise _AbsentError("there is one GPU")
    return ", ".join(_unreachable()) or "every GPU reaches the memory of every other"


def _exchange() -> str:
    """Return how the ranks of PyTorch's LayerNormLinear on this machine hand each other rows."""
    _distribution("torch")
    reason = why_no_gpu() or ("there is one GPU" if len(_gpus()) == 1 else ", ".join(_unreachable()))
    if reason:
        return f"torch.distributed ({reason})"
    return "symmetric memory where ub_* ask for it, else torch.distributed (every GPU reaches every other)"


def _kernel_cache() -> dict[str, Any]:
    files = kernel_files()
    return {"directory": str(cache_directory()), "files": len(files), "bytes": sum(size for _, size in files)}


def _tables() -> list[str]:
    """Return the tables of launches that serve each kind of GPU, in the order in which they are asked."""
    if reason := why_no_gpu():
        raise _AbsentError(reason)
    gpus = dict.fromkeys(device.current(number) for number in range(len(_gpus())))
    lines = []
    for gpu in gpus:
        paths = [str(path) for path, _ in tables.tables_of(gpu)]
        unread = "" if tables.reads_the_users() else f" ({tables.TUNE_VARIABLE}=0: those of `tune` are not read)"
        lines.append(f"{gpu.name}: {', '.join([*paths, 'the cost rule'])}{unread}")
    return lines


def _xla_call() -> str:
    """Return how cunorm.jax launches. JAX is imported only where there is a GPU to ask it about."""
    _distribution("jax")
    reason = why_no_gpu()
    if reason:
        return f"jax.numpy ({reason})"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    choice = import_module("cunorm.jax.xla.target")
    if choice.gpu() is None:
        return "jax.numpy (JAX sees no GPU)"
    call = choice.call("info")
    return f"{call.kind} ({call.reason})"


def _next() -> str:
    """Return what to do next, by what is missing."""
    try:
        _runtime()
        _nvrtc()
    except Exception:
        return f"for a GPU {INSTALL}; without one: python -m cunorm demo"
    if why_no_gpu():
        return "python -m cunorm demo; for a GPU see that nvidia-smi shows it: cunorm runs on the host until then"
    return "python -m cunorm demo"


def _dotted(version: int) -> str:
    """Return a version of CUDA as people write it: 13.0 for 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _in_words(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "unavailable" in value:
        return f"- ({value['unavailable']})"
    return ", ".join(f"{item:,} {name}" if isinstance(item, int) else str(item) for name, item in value.items())
