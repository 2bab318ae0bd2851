"""What cunorm says of itself: the lines of `logging.getLogger("cunorm")`, at INFO but for what a version lacks.

Each is of something that happens once (a kernel is compiled, a way that is not the fast one is taken, a layout that
must be copied is met), never of a call, so none stands on the path of a microsecond.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

logger = logging.getLogger("cunorm")


def compiled(name: str, target: str, seconds: float, spec: Any = None) -> None:
    """NVRTC made `name` for `target` (sm_90, or compute_90 where it is PTX)."""
    logger.info("compiled %s for %s in %.3f s%s", name, target, seconds, f": {spec}" if spec else "")


@cache
def not_kept(reason: str) -> None:
    """Compiled files cannot be kept on disk. Said once for each reason, not for each kernel."""
    logger.info("what is compiled is not kept, and compiled again by the next process: %s", reason)


def fell_back(function: str, taken: str, reason: str) -> None:
    """`function` does what was asked by `taken`, which is not the way that is fast."""
    logger.info("%s: %s (%s)", function, taken, reason)


def expanded(function: str, name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Kernels have no kind of operand that broadcasts as `name` does."""
    logger.info("%s: %s of shape %s is expanded to that of x, %s, in each call", function, name, shape, to)


def copied(function: str, names: Iterable[str], arrays: Iterable[Any], copies: Sequence[bool]) -> None:
    """Every call of `function` copies those of `arrays` that `copies` marks: kernels cannot walk their strides.

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
    """`package` is newer than what cunorm was tested with."""
    logger.warning("%s %s is newer than what cunorm was tested with, %s", package, version, tested)
