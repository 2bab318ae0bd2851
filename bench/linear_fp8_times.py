"""Times of a part of the layer in 8 bits, in turns, and what must be moved for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import timing

SECONDS = 0.3  # a shape
Calls = Mapping[str, Sequence[Callable[[], Any]]]  # for each contender a call for each set of buffers


def bytes_of_cast(rows: int, cols: int) -> int:
    """That a cast of 16 bits moves, but for scales."""
    return 3 * rows * cols


def bytes_of_product(rows: int, cols: int, outs: int) -> int:
    return rows * cols + outs * cols + 2 * rows * outs


def measured(calls: Calls, moved: int) -> dict[str, Any]:
    """Microseconds by contender, or what it raised."""
    timers, failed = [], {}
    for name, sets in calls.items():
        try:
            timers.append((name, timing.timer("torch", sets, moved)))
        except Exception as error:  # a product that this torch has not
            failed[name] = str(error)[:200]
    times = timing.in_turns([one for _, one in timers], SECONDS)
    found = {
        name: str(one)[:200] if isinstance(one, Exception) else round(one.median * 1e6, 2)
        for (name, _), one in zip(timers, times, strict=True)
    }
    return found | failed


def shares(times: Mapping[str, Any], of: str) -> dict[str, float]:
    """What part of its time a contender would take at the speed of another; without those that failed."""
    base = times.get(of)
    if not isinstance(base, float):
        return {}
    return {name: round(base / one, 3) for name, one in times.items() if isinstance(one, float) and name != of}
