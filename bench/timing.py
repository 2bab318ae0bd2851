"""Kernel time without the host, and host time without the kernel.

Kernel time: replays of a CUDA graph whose calls pass through rotating sets of buffers, so that the host is out of it
and L2 holds nothing useful. A call's results are kept until its buffers' next turn: were they freed at once, the next
call would write into memory that is still in L2. XLA runs on streams of its own, so there it is one jit of all sets,
timed by the clock over calls that are not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

L2_BYTES = 64 << 20
BURST = 16  # calls of which the host waits for none
LAUNCHES = 20  # at least, in a graph
REPLAYS = 15  # at most, of a graph
SECONDS = 0.5  # for the replays of one graph, or for the host times of one provider
METHODS = {
    "cupy": "CUDA graph, CUDA events",
    "torch": "CUDA graph, CUDA events",
    "jax": "one jit of all buffer sets, wall clock over asynchronous calls",
}

Call = Callable[[], Any]


class Times(NamedTuple):
    """Seconds of one call."""

    median: float
    p20: float
    p80: float


def buffers_needed(bytes_a_call: int) -> int:
    """Sets of buffers whose rotation passes through four times the L2 cache, 256 at most."""
    return max(2, min(256, -(-4 * L2_BYTES // bytes_a_call)))


def is_cold(bytes_a_call: int) -> bool:
    """Whether the rotation passes through at least twice the L2 cache; the smallest problems stay in it."""
    return buffers_needed(bytes_a_call) * bytes_a_call >= 2 * L2_BYTES


def kernel_time(library: str, calls: Sequence[Call]) -> Times:
    """Time of one call; each of `calls` works on its own set of buffers. `library` is whose arrays they take."""
    return {"cupy": _cupy, "torch": _torch, "jax": _jax}[library](calls)


def host_time(library: str, calls: Sequence[Call], kernel: float) -> float:
    """Median seconds that a call takes to return, the queue of kernels, each of `kernel` seconds, being short."""
    calls = (list(calls) * BURST)[:BURST]
    if library == "jax":
        import jax

        jitted = jax.jit(calls[0].func)
        calls = [lambda call=call: jitted(*call.args) for call in calls]
    times = []
    for _ in range(_repeats(kernel * BURST)):
        synchronize(library)
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    synchronize(library)
    return float(numpy.median(times[len(calls) :]))


def synchronize(library: str) -> None:
    if library == "jax":
        import jax

        jax.effects_barrier()
    import cupy

    cupy.cuda.Device().synchronize()


def _times(seconds: Sequence[float]) -> Times:
    return Times(*(float(numpy.percentile(seconds, p)) for p in (50, 20, 80)))


def _repeats(seconds: float) -> int:
    """How often what takes so long is repeated: slow ones less often."""
    return max(3, min(REPLAYS, int(SECONDS / seconds)))


def _rounds(calls: Sequence[Call]) -> int:
    return max(1, LAUNCHES // len(calls))


def _run(calls: Sequence[Call]) -> None:
    kept: list[Any] = [None] * len(calls)
    for _ in range(_rounds(calls)):
        for index, call in enumerate(calls):
            kept[index] = call()


def _cupy(calls: Sequence[Call]) -> Times:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Results of two rounds at once: the pool then has whatever the capture, which may not allocate, will need.
        results = [call() for _ in range(2) for call in calls]
        stream.synchronize()
        del results
        stream.begin_capture()
        _run(calls)
        graph = stream.end_capture()
        start = time.perf_counter()
        graph.launch(stream)
        stream.synchronize()
        times = []
        for _ in range(_repeats(time.perf_counter() - start)):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / (_rounds(calls) * len(calls)))
    return _times(times)


def _torch(calls: Sequence[Call]) -> Times:
    import torch

    stream = torch.cuda.current_stream()  # where the caller prepared the calls: autograd runs backward there
    for _ in range(2):
        _run(calls)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _run(calls)
    start = time.perf_counter()
    graph.replay()
    stream.synchronize()
    times = []
    for _ in range(_repeats(time.perf_counter() - start)):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        graph.replay()
        stop.record(stream)
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / (_rounds(calls) * len(calls)))
    return _times(times)


def _jax(calls: Sequence[Call]) -> Times:
    """`calls` are functools.partial of a function that JAX can trace."""
    import jax

    function = calls[0].func

    @jax.jit
    def run_all(sets):
        results = []
        for arguments in sets:
            if results:  # one after the other: XLA would else be free to merge them
                arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
            results.append(function(*arguments))
        return results

    sets = [call.args for call in calls]
    jax.block_until_ready(run_all(sets))
    times = []
    repeats = max(2, LAUNCHES // len(calls))
    for _ in range(REPLAYS):
        start = time.perf_counter()
        for _ in range(repeats):
            results = run_all(sets)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / (repeats * len(calls)))
    return _times(times)
