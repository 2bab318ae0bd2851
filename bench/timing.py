"""Measure kernel time without the host, and host time without the kernel, of any library.

cunorm/commands/timing.py times CUDA graphs in turns. XLA runs on streams of its own, so its kernel time is that of a
loop over the sets within one jit, by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy

from cunorm.commands.timing import (
    L2_BYTES,
    TURNS,
    Call,
    Timer,
    Times,
    buffers_needed,
    cupy_timer,
    in_turns,
    launches_of_graph,
    rounds_of,
)

BURST = 16  # calls in a row, which are so few that the host waits for none
LOOP_BYTES = 1.6e9  # a turn of XLA's loop moves these, in about 0.4 ms, so that its overhead of 3 us is small
LOOP_CALLS = 128  # a turn has no more, because XLA compiles each
LOOP_SECONDS = 0.02  # a loop takes about this long
METHODS = {
    "cupy": "CUDA graph, CUDA events",
    "torch": "CUDA graph, CUDA events",
    "jax": "loop in one jit over all buffer sets, wall clock",
}


def is_cold(bytes_a_call: int) -> bool:
    """Return whether the buffers take at least twice the L2 cache; those of the smallest problems stay in it."""
    return buffers_needed(bytes_a_call) * bytes_a_call >= 2 * L2_BYTES


def timer(library: str, calls: Sequence[Call], bytes_a_call: int) -> Timer:
    """Return a timer of calls that work each on its own set of buffers, which are arrays of `library`."""
    if library == "jax":
        return _jax(calls, bytes_a_call)
    rounds = -(-launches_of_graph(bytes_a_call) // len(calls))
    return {"cupy": cupy_timer, "torch": _torch}[library](calls, rounds)


def kernel_time(library: str, calls: Sequence[Call], bytes_a_call: int) -> Times:
    """Return the times of one call, measured without others."""
    (taken,) = in_turns([timer(library, calls, bytes_a_call)])
    if isinstance(taken, Exception):
        raise taken
    return taken


def host_time(library: str, calls: Sequence[Call]) -> float:
    """Return the median seconds until a call returns; kernels are short and few, so that their queue is never full."""
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


def _torch(calls: Sequence[Call], rounds: int) -> Timer:
    import torch

    stream = torch.cuda.current_stream()  # the caller prepared the calls on it, so autograd runs backward on it
    for _ in range(2):
        rounds_of(calls, 1)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        rounds_of(calls, rounds)

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
    """Return a timer of calls that are functools.partial of a function that JAX can trace."""
    sets = [call.args for call in calls[:LOOP_CALLS]]
    copies = min(LOOP_CALLS // len(sets), round(LOOP_BYTES / (bytes_a_call * len(sets))))
    return loop(calls[0].func, sets * max(1, copies), bytes_a_call / 2.5e12, LOOP_SECONDS)


def loop(function: Callable, sets: Sequence[tuple], estimate: float, seconds: float) -> Timer:
    """Return a timer that runs `function` over the sets in a loop within one jit.

    A loop takes about `seconds`, if one call takes about `estimate` seconds.
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
