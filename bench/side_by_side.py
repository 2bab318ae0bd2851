"""Take measurements that get ready side by side, and are then taken one after the other, each in its own process.

Compiling takes many times as long as what is timed, but nothing may run beside what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Figures = dict[str, Any]
Job = tuple[Any, ...]


def in_turns(
    prepare: Callable[..., Callable[[], Figures]], jobs: Iterable[Job], seconds: float
) -> Iterator[tuple[Job, Figures]]:
    """Return (job, what `prepare(*job)()` returns) of every job, in their order.

    `prepare` runs in all processes at once. When the last is ready, or after `seconds`, what it returned is called in
    one process after another. A job that fails, or is not ready by then, has {"error": ...}.
    """
    context = get_context("spawn")
    began = time.monotonic()
    workers = []
    for job in jobs:
        end, other = context.Pipe()
        process = context.Process(target=_work, args=(prepare, job, other), daemon=True)
        process.start()
        other.close()
        workers.append((job, process, end))
    late = [worker for worker in workers if not worker[2].poll(max(0.0, seconds - (time.monotonic() - began)))]
    for _, process, _ in late:
        process.kill()
        process.join()
    for worker in workers:
        job, process, end = worker
        yield job, {"error": f"not ready after {seconds:.0f} s"} if worker in late else _taken(end)
        process.join()


def _taken(end: Connection) -> Figures:
    """Let a process that is ready, or has failed, take its measurement, and return that or its error."""
    try:
        error = end.recv()
        if error is not None:
            return error
        end.send(None)
        return end.recv()
    except (EOFError, ConnectionError):
        return {"error": "its process ended"}


def _work(prepare: Callable[..., Callable[[], Figures]], job: Job, end: Connection) -> None:
    try:
        measure = prepare(*job)
        end.send(None)
        end.recv()
        end.send(measure())
    except Exception as error:
        end.send({"error": f"{type(error).__name__}: {error}"[:500]})
