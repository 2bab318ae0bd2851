"""Kernel time: CUDA-graph replays over rotating buffers, so that the host is out of it and L2 holds nothing useful."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import cupy

L2_BYTES = 64 << 20


def buffers_needed(bytes_a_call: int) -> int:
    """Sets of buffers whose rotation passes through four times the L2 cache."""
    return max(2, min(256, -(-4 * L2_BYTES // bytes_a_call)))


def median_seconds(calls: Sequence[Callable[[], None]], replays: int = 11) -> float:
    """Median over replays of the time of one call; each of `calls` works on its own set of buffers."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(max(1, 20 // len(calls))):
            for call in calls:
                call()
        graph = stream.end_capture()
        launches = max(1, 20 // len(calls)) * len(calls)
        graph.launch(stream)
        times = []
        for _ in range(replays):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / launches)
    return statistics.median(times)
