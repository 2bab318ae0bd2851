"""How long kernels take, without the host: for `tune`, and for the bench.

Kernel time: replays of a CUDA graph whose calls pass through rotating sets of buffers, so that the host is out of it
and L2 holds nothing useful. A call's results are kept until its buffers' next turn: were they freed at once, the next
call would write into memory that is still in L2.

Whatever is compared is timed in turns, in an order that is drawn anew for each: the chip's clock and heat, and what the
one before left in L2, are then alike for all of them. In an order that is turned round those at its ends run twice in a
row: 32 x 1024, which L2 nearly holds, LayerNorm of Liger 1.75 us and 1.99 by turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

L2_BYTES = 64 << 20
GRAPH_BYTES = 3e9  # that a graph moves, about 0.8 ms; more makes no better figures, and costs the run its time
LAUNCHES = (10, 128)  # of a graph, at least and about at most
SECONDS = 0.06  # for the turns of all that is compared
TURNS = (5, 30)  # at least, at most

Call = Callable[[], Any]
Timer = Callable[[], float]  # measures once more, and returns the seconds of one call


class Times(NamedTuple):
    """Seconds of one call."""

    median: float
    p20: float
    p80: float


def buffers_needed(bytes_a_call: int) -> int:
    """Return how many sets of buffers have four times the bytes of the L2 cache, at least 2 and at most 256."""
    return max(2, min(256, -(-4 * L2_BYTES // bytes_a_call)))


def launches_of_graph(bytes_a_call: int) -> int:
    least, most = LAUNCHES
    return max(least, min(most, int(GRAPH_BYTES / bytes_a_call)))


def in_turns(timers: Sequence[Timer], seconds: float | None = None) -> list[Times | Exception]:
    """Return the times of each, or what it raised: one that fails leaves the others alone."""
    seconds = SECONDS if seconds is None else seconds
    times: list[list[float]] = [[] for _ in timers]
    failed: dict[int, Exception] = {}
    order = random.Random(0)
    least, most = TURNS
    end = 0.0
    for turn in range(most + 1):
        if turn == 1:  # the first was a warm-up
            times = [[] for _ in timers]
            end = time.perf_counter() + seconds
        elif turn > least and time.perf_counter() > end:
            break
        for which in order.sample(range(len(timers)), len(timers)):
            if which not in failed:
                try:
                    times[which].append(timers[which]())
                except Exception as error:
                    failed[which] = error
    return [failed[i] if i in failed else _times(taken) for i, taken in enumerate(times)]


def cupy_timer(calls: Sequence[Call], rounds: int) -> Timer:
    """Return a CUDA graph of so many rounds of the calls."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Results of two rounds at once: the pool then has whatever the capture, which may not allocate, will need.
        results = [call() for _ in range(2) for call in calls]
        stream.synchronize()
        del results
        stream.begin_capture()
        kept = rounds_of(calls, rounds)
        graph = stream.end_capture()

    def measure(_kept: Any = kept) -> float:  # with the graph live the arrays that it writes
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / (rounds * len(calls))

    return measure


def rounds_of(calls: Sequence[Call], rounds: int) -> list[Any]:
    """Return the results of so many rounds of the calls, the last of each."""
    kept: list[Any] = [None] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            kept[index] = call()
    return kept


def _times(seconds: Sequence[float]) -> Times:
    return Times(*(float(numpy.percentile(seconds, p)) for p in (50, 20, 80)))
