"""What cunorm says of itself: the lines of `logging.getLogger("cunorm")`, all of them at INFO.

Each is of something that happens once (a kernel is compiled, a way that is not the fast one is taken, a layout that
must be copied is met), never of a call, so none stands on the path of a microsecond.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

logger = logging.getLogger("cunorm")


def compiled(name: str, target: str, seconds: float, spec: Any = None) -> None:
    """NVRTC made `name` for `target` (sm_90, or compute_90 where it is PTX)."""
    logger.info("compiled %s for %s in %.3f s%s", name, target, seconds, _in_short(spec))


def fell_back(function: str, taken: str, reason: str) -> None:
    """`function` does what was asked by `taken`, which is not the way that is fast."""
    logger.info("%s: %s (%s)", function, taken, reason)


def copied(function: str, names: Iterable[str], arrays: Iterable[Any], copies: Iterable[bool]) -> None:
    """Every call of `function` copies those of `arrays` that `copies` marks: kernels cannot walk their strides.

    An array is whatever has a shape and strides in elements: a Layout, or a tensor, whose strides are a method.
    """
    for name, array, copy in zip(names, arrays, copies, strict=True):
        if copy:
            shape, strides = tuple(array.shape), array.stride() if hasattr(array, "stride") else array.strides
            logger.info("%s: %s of shape %s and strides %s is copied in each call", function, name, shape, strides)


def _in_short(spec: Any) -> str:
    """The fields of a KernelSpec that differ from their defaults, without the kernel's name."""
    if not is_dataclass(spec):
        return ""
    values = ((field, getattr(spec, field.name)) for field in fields(spec) if field.name != "kernel")
    return ": " + ", ".join(f"{field.name}={_shown(value)}" for field, value in values if value != field.default)


def _shown(value: Any) -> str:
    """A shape inside a spec as its numbers alone."""
    return "/".join(str(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else str(value)
