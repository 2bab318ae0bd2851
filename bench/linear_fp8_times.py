"""Times of parts of the layer in 8 bits, in turns, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import timing

SECONDS = 0.3  # for a shape
Calls = Mapping[str, Sequence[Callable[[], Any]]]  # for each contender a call for each set of buffers


def bytes_of_cast(rows: int, cols: int) -> int:
    """Return the bytes that a cast from 16 bits moves, without the scales."""
    return 3 * rows * cols


def bytes_of_product(rows: int, cols: int, outs: int) -> int:
    return rows * cols + outs * cols + 2 * rows * outs


def measured(calls: Calls, moved: int) -> dict[str, Any]:
    """Return each contender's microseconds, or what it raised."""
    timers, failed = [], {}
    for name, sets in calls.items():
        try:
            timers.append((name, timing.timer("torch", sets, moved)))
        except Exception as error:  # this torch may lack a product
            failed[name] = str(error)[:200]
    times = timing.in_turns([timer for _, timer in timers], SECONDS)
    microseconds = {
        name: str(taken)[:200] if isinstance(taken, Exception) else round(taken.median * 1e6, 2)
        for (name, _), taken in zip(timers, times, strict=True)
    }
    return microseconds | failed


def shares(times: Mapping[str, Any], of: str) -> dict[str, float]:
    """Return which part of its time each contender would take at the speed of one of them, without failed ones."""
    base = times.get(of)
    if not isinstance(base, float):
        return {}
    return {name: round(base / time, 3) for name, time in times.items() if isinstance(time, float) and name != of}
