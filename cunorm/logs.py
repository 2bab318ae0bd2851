"""The lines of `logging.getLogger("cunorm")`: at INFO, and at WARNING for what a version of a package lacks.

Each tells of something that happens once: a kernel is compiled, a slower way is taken, a layout must be copied. None
tells of every call, so none costs a call its microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

logger = logging.getLogger("cunorm")


def compiled(name: str, target: str, seconds: float, spec: Any = None) -> None:
    """Log that NVRTC compiled `name` for `target`: sm_90, or compute_90 for PTX."""
    logger.info("compiled %s for %s in %.3f s%s", name, target, seconds, f": {spec}" if spec else "")


@cache
def not_kept(reason: str) -> None:
    """Log, once for each reason, that compiled files cannot be kept on disk."""
    logger.info("what is compiled is not kept, and compiled again by the next process: %s", reason)


def fell_back(function: str, taken: str, reason: str) -> None:
    """Log that `function` works by `taken`, which is not the fast way."""
    logger.info("%s: %s (%s)", function, taken, reason)


def expanded(function: str, name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Log that an operand is expanded, as kernels have none that broadcasts as `name` does."""
    logger.info("%s: %s of shape %s is expanded to that of x, %s, in each call", function, name, shape, to)


def copied(function: str, names: Iterable[str], arrays: Iterable[Any], copies: Sequence[bool]) -> None:
    """Log that every call of `function` copies the `arrays` that `copies` marks, as kernels cannot walk their strides.

    An array is whatever has a shape and strides in elements: a Layout, or a tensor, whose strides are a method.
    """
    if True not in copies:
        return
    for name, array, copy in zip(names, arrays, copies, strict=True):
        if copy:
            shape, strides = tuple(array.shape), array.stride() if hasattr(array, "stride") else array.strides
            logger.info("%s: %s of shape %s and strides %s is copied in each call", function, name, shape, strides)


def missing(message: str) -> None:
    """Log that a name which cunorm uses is not in this version of its package."""
    logger.warning("%s", message)


def untested(package: str, version: str, tested: str) -> None:
    """Log that `package` is newer than what cunorm was tested with."""
    logger.warning("%s %s is newer than what cunorm was tested with, %s", package, version, tested)
