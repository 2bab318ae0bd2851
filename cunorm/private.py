"""Private names of other packages: how they are looked up, and those of CuPy.

The names of a framework stand in one file: here, in torch/private.py or in jax/private.py. A name that a version does
not have costs what it is for, and a line in the log when it is looked up. No import fails for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NoReturn

from . import logs

# The oldest and the newest version that the tests passed with, as docs/compatibility.md shows them.
TESTED = {
    "cupy": ("14.2", "14.2"),
    "diffusers": ("0.42", "0.42"),
    "flax": ("0.12", "0.12"),
    "jax": ("0.10", "0.11"),
    "numpy": ("2.0", "2.4"),
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.17"),
}
PACKAGES = {"cupy_backends": "cupy"}  # parts of another package
ABSENT = object()


class Missing:
    """Stands for a name that this version of a package does not have, and raises an error that says so when called."""

    def __init__(self, message: str):
        self.message = message

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(self.message)

    def __bool__(self) -> bool:
        return False


def look_up(path: str, costs: str, instead: Any = None) -> Any:
    """Return the object at `path`, written as "module:name.of.it".

    Where the package has none, it is `instead`, or a `Missing` that raises when it is called. `costs` is a clause that
    says what is then slower, or no longer there.
    """
    try:
        return resolve(path)
    except (ImportError, AttributeError) as error:
        if not _is_of_version(error):
            raise
    missing = miss(path, costs)
    return missing if instead is None else instead


def has(path: str, costs: str) -> bool:
    """Return whether a package has a name, which is used where it stands, as the value of a flag that changes."""
    return look_up(path, costs, ABSENT) is not ABSENT


def resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return attrgetter(name)(import_module(module))


def miss(path: str, costs: str) -> Missing:
    """Log that there is no `path`, or that it has changed."""
    message = _message(path, costs)
    logs.missing(message)
    return Missing(f"cunorm: {message}. Use {tested(path)}.")


def _is_of_version(error: Exception) -> bool:
    """Return whether a name is missing from a package that is installed."""
    return not isinstance(error, ModuleNotFoundError) or "." in (error.name or "")


def _message(path: str, costs: str) -> str:
    package = package_of(path)
    version = getattr(import_module(package), "__version__", "of an unknown version")
    return f"{package} {version} has no {path.replace(':', '.')}, so {costs}"


def package_of(path: str) -> str:
    """Return the package whose version decides what is at `path`."""
    top = path.partition(":")[0].partition(".")[0]
    return PACKAGES.get(top, top)


def tested(module: str) -> str:
    """Return in words the versions of its package that cunorm was tested with."""
    package = package_of(module)
    oldest, newest = TESTED[package]
    return f"{package} {oldest}" if oldest == newest else f"{package} {oldest} to {newest}"


def check_version(package: str) -> None:
    """Log one line where what is imported is newer than the versions that cunorm was tested with."""
    _check_version(package, getattr(sys.modules.get(package), "__version__", ""))


@cache
def _check_version(package: str, version: str) -> None:
    if _minor(version) > _minor(TESTED[package][1]):
        logs.untested(package, version, tested(package))


def _minor(version: str) -> tuple[int, ...]:
    """Return (2, 13) of "2.13.0+cpu", () of what begins otherwise."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


# CuPy's, looked up when they are first used: cunorm is imported without CuPy.


@cache
def nvrtc() -> Any:
    """Return CuPy's module of NVRTC, by which kernels are compiled; raise NotImplementedError if there is none."""
    return _required("cupy_backends.cuda.libs.nvrtc", "no kernel can be compiled")


@cache
def cublas() -> Any:
    """Return CuPy's module of cuBLAS; raise NotImplementedError without one, ImportError without the library."""
    return _required("cupy_backends.cuda.libs.cublas", "layer_norm_linear has no products without nvmath-python")


def _required(module: str, costs: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not _is_of_version(error):
            raise
        raise NotImplementedError(f"cunorm: {_message(module, costs)}. Use {tested(module)}.") from error


@cache
def compute_type() -> tuple[Callable[[Any], Any], Any]:
    """Return CuPy's function that tells in which type products are computed, and what it returns for TF32."""
    path, costs = "cupy._core._routines_linalg", "float32 products are never TF32, whatever CUPY_TF32 says"
    question = look_up(f"{path}:get_compute_type", costs, instead=lambda dtype: None)
    return question, look_up(f"{path}:COMPUTE_TYPE_TF32", costs, instead=object())
