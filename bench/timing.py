"""Kernel time without the host, and host time without the kernel.

Kernel time: replays of a CUDA graph whose calls pass through rotating sets of buffers, so that the host is out of it
and L2 holds nothing useful. A call's results are kept until its buffers' next turn: were they freed at once, the next
call would write into memory that is still in L2. XLA runs on streams of its own, so there it is a loop over the sets
within one jit, by the clock.

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
BURST = 16  # calls of which the host waits for none
GRAPH_BYTES = 3e9  # that a graph moves, about 0.8 ms; more makes no better figures, and costs the run its time
LAUNCHES = (10, 128)  # of a graph, at least and about at most
LOOP_BYTES = 1.6e9  # that a turn of XLA's loop moves, about 0.4 ms, beside the 3 us that a turn costs
LOOP_CALLS = 128  # of a turn, at most: XLA compiles each
LOOP_SECONDS = 0.02  # of a loop
SECONDS = 0.06  # for the turns of all that is compared
TURNS = (5, 30)  # at least, at most
METHODS = {
    "cupy": "CUDA graph, CUDA events",
    "torch": "CUDA graph, CUDA events",
    "jax": "loop in one jit over all buffer sets, wall clock",
}

Call = Callable[[], Any]
Timer = Callable[[], float]  # measures once more, and returns the seconds of one call


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


def timer(library: str, calls: Sequence[Call], bytes_a_call: int) -> Timer:
    """Each of `calls` works on its own set of buffers. `library` is whose arrays they take."""
    if library == "jax":
        return _jax(calls, bytes_a_call)
    least, most = LAUNCHES
    launches = max(least, min(most, int(GRAPH_BYTES / bytes_a_call)))
    rounds = -(-launches // len(calls))
    return {"cupy": cupy_timer, "torch": _torch}[library](calls, rounds)


def in_turns(timers: Sequence[Timer], seconds: float | None = None) -> list[Times | Exception]:
    """The times of each, or what it raised: one that fails leaves the others alone."""
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


def kernel_time(library: str, calls: Sequence[Call], bytes_a_call: int) -> Times:
    """Of one call, measured alone."""
    (found,) = in_turns([timer(library, calls, bytes_a_call)])
    if isinstance(found, Exception):
        raise found
    return found


def host_time(library: str, calls: Sequence[Call]) -> float:
    """Median seconds that a call takes to return, the queue of kernels, which are short, never being full."""
    calls = (list(calls) * BURST)[:BURST]
    if library == "jax":
        import jax

        jitted = jax.jit(calls[0].func)
        calls = [lambda call=call: jitted(*call.args) for call in calls]
    times = []
    for _ in range(TURNS[0]):
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


def _rounds(calls: Sequence[Call], rounds: int) -> list[Any]:
    kept: list[Any] = [None] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            kept[index] = call()
    return kept


def cupy_timer(calls: Sequence[Call], rounds: int) -> Timer:
    """A graph of so many rounds of the calls."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Results of two rounds at once: the pool then has whatever the capture, which may not allocate, will need.
        results = [call() for _ in range(2) for call in calls]
        stream.synchronize()
        del results
        stream.begin_capture()
        kept = _rounds(calls, rounds)
        graph = stream.end_capture()

    def measure(_kept: Any = kept) -> float:  # with the graph live the arrays that it writes
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / (rounds * len(calls))

    return measure


def _torch(calls: Sequence[Call], rounds: int) -> Timer:
    import torch

    stream = torch.cuda.current_stream()  # where the caller prepared the calls: autograd runs backward there
    for _ in range(2):
        _rounds(calls, 1)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _rounds(calls, rounds)

    def measure() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record(stream)
            graph.replay()
            stop.record(stream)
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / (rounds * len(calls))

    return measure


def _jax(calls: Sequence[Call], bytes_a_call: int) -> Timer:
    """`calls` are functools.partial of a function that JAX can trace."""
    sets = [call.args for call in calls[:LOOP_CALLS]]
    copies = min(LOOP_CALLS // len(sets), round(LOOP_BYTES / (bytes_a_call * len(sets))))
    return loop(calls[0].func, sets * max(1, copies), bytes_a_call / 2.5e12, LOOP_SECONDS)


def loop(function: Callable, sets: Sequence[tuple], estimate: float, seconds: float) -> Timer:
    """Each measurement runs function over the sets in a loop within one jit, for about as many seconds as asked for;
    `estimate` is about the seconds of one call.
    """
    import jax
    import jax.numpy as jnp

    turns = max(4, int(seconds / (len(sets) * estimate)))

    def run(sets, results):
        def turn(_, results):
            results = list(results)
            for i, arguments in enumerate(sets):
                # Without the barrier XLA would be free to take a call out of the loop, as its arguments do not change.
                arguments, _ = jax.lax.optimization_barrier((arguments, results[i - 1]))
                results[i] = function(*arguments)
            return results

        return jax.lax.fori_loop(0, turns, turn, results)

    shapes = [jax.eval_shape(function, *arguments) for arguments in sets]
    results = jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), shapes)
    compiled = jax.jit(run, donate_argnums=1).lower(sets, results).compile()

    def measure() -> float:
        nonlocal results
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(sets, results))
        return (time.perf_counter() - start) / (turns * len(sets))

    measure()
    return measure
