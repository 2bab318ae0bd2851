"""Measure cases: each provider's result is checked, then all are timed in turns.

What goes wrong stands in the provider's line and stops nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console

from bench import timing
from bench.providers import Provider
from bench.results import ROOF, head
from bench.suites import Case

Line = dict[str, Any]
HOST_ELEMENTS = 1 << 16  # up to which host times are taken, as they do not depend on the shape


class DeviceLostError(RuntimeError):
    """Raised when no kernel runs any more in this process after a provider's fault."""

    def __init__(self, provider: str, reason: str):
        super().__init__(f"{provider} left the GPU unusable: {reason}")
        self.provider, self.reason = provider, reason


@dataclass
class Contender:
    """A provider or a roof in a case: its line so far, and what measures it once more."""

    name: str
    line: Line
    timer: timing.Timer | None = None
    variant: Any = None  # a roof has one


@dataclass
class Runner:
    """One run of the bench; `deadline` is a time of time.perf_counter."""

    providers: list[tuple[Provider, str]]  # each with its version
    out: TextIO | None
    console: Console
    roofs: Any = None  # bench.roofs.Roofs; None: no roof
    deadline: float = float("inf")
    peer_seconds: float = float("inf")  # a peer may take this long to be prepared in the whole run
    lines: list[Line] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)

    def note(self, line: Line) -> None:
        """Keep a line, and write it to the file at once."""
        self.lines.append(line)
        if self.out is not None:
            self.out.write(json.dumps(line) + "\n")
            self.out.flush()

    def run(self, cases: list[Case]) -> None:
        gc.freeze()  # or what the libraries made on import would be traversed after every case
        begun = time.perf_counter()
        for done, case in enumerate(cases):
            if time.perf_counter() > self.deadline:
                self.note({"left_out": len(cases) - done, "because": "the run's time was over"})
                self.console.print(f"time is over; {len(cases) - done} cases left out", markup=False)
                break
            start = time.perf_counter()
            try:
                measured = list(self._measure(case))
            except DeviceLostError as broken:
                line = {"provider": broken.provider, "status": "error", "reason": str(broken)}
                self.note(head(case) | line)
                raise
            for line in measured:
                self.note(line)
            self.console.print(
                f"[{done + 1}/{len(cases)}, {start - begun:.0f} s] {case}: " + "  ".join(map(_brief, measured)),
                markup=False,
                highlight=False,
            )

    def _measure(self, case: Case) -> Iterator[Line]:
        """Return a line for the roof and one for each provider."""
        import cupy

        from bench.workload import Workload

        try:
            workload = Workload(case)
        except cupy.cuda.memory.OutOfMemoryError as error:
            yield head(case) | {"provider": ROOF, "status": "error", "reason": str(error)}
            _free()
            return
        contenders = [self._prepared(case, provider, workload) for provider, _ in self.providers]
        timed = [contender for contender in contenders if contender.timer is not None]
        roofs = self._roofs(case, workload) if timed else []
        running = [*timed[:1], *roofs, *timed[1:]]
        taken = timing.in_turns([contender.timer for contender in running if contender.timer is not None])
        for contender, times in zip(running, taken, strict=True):
            if isinstance(times, Exception):
                contender.line = {"status": "error", "reason": _reason(times)}
                _check_device(contender.name, times)
            else:
                contender.line |= _figures(case, times)
        measured = (roof for roof in roofs if "microseconds" in roof.line)
        best = min(measured, key=lambda roof: roof.line["microseconds"], default=None)
        if best is not None:
            yield head(case) | {"provider": ROOF} | best.line | {"kernel": best.variant.describe()}
        for contender in contenders:
            yield head(case) | {"provider": contender.name} | contender.line
        for provider, _ in self.providers:
            with contextlib.suppress(Exception):
                provider.reset()
        del contenders, timed, roofs, running, measured, best, contender, workload
        _free()

    def _roofs(self, case: Case, workload: Any) -> list[Contender]:
        if self.roofs is None or case.offset is not None:
            return []
        try:
            calls = self.roofs.calls(workload.streamed())
            line = {"status": "ok", "method": timing.METHODS["cupy"]}
            contenders = [
                Contender(ROOF, dict(line), timing.timer("cupy", over, case.bytes_moved), variant)
                for variant, over in calls
            ]
        except Exception as error:
            self.console.print(f"no roof for {case}: {_reason(error)}", markup=False)
            _check_device(ROOF, error)
            return []
        if case.elements <= HOST_ELEMENTS and contenders:
            host = timing.host_time("cupy", calls[0][1])
            for contender in contenders:
                contender.line["host_microseconds"] = round(host * 1e6, 2)
        return contenders

    def _prepared(self, case: Case, provider: Provider, workload: Any) -> Contender:
        """Return the provider's contender, checked, and ready to be timed if its result is right."""
        reason = provider.unsupported(case)
        if reason:
            return Contender(provider.name, {"status": "unsupported", "reason": reason})
        first = provider is self.providers[0][0]
        if not first and self.spent.get(provider.name, 0.0) > self.peer_seconds:
            reason = f"its {self.peer_seconds:g} seconds of preparing are spent"
            return Contender(provider.name, {"status": "unsupported", "reason": reason})
        start = time.perf_counter()
        try:
            line, timer = _prepare(case, provider, workload)
        except Exception as error:
            line, timer = {"status": "error", "reason": _reason(error)}, None
            _check_device(provider.name, error)
        took = time.perf_counter() - start
        self.spent[provider.name] = self.spent.get(provider.name, 0.0) + took
        return Contender(provider.name, line | {"took": round(took, 2)}, timer)


def _prepare(case: Case, provider: Provider, workload: Any) -> tuple[Line, timing.Timer | None]:
    from bench import check
    from bench.workload import to_cupy

    with _stream(provider.library):
        lent = workload.lend(provider.library)
        calls = [provider.prepare(case, lent[0])]
        results = calls[0]()
        timing.synchronize(provider.library)
        if not isinstance(results, tuple | list):
            results = (results,)
        errors = check.errors(case, workload.sets[0], tuple(map(to_cupy, results)))
        del results
        line: Line = {"errors": {name: float(f"{error:.3g}") for name, error in errors.items()}}
        if case.offset is not None:
            return {"status": "ok"} | line, None
        mistake = check.wrong(case, errors)
        if mistake:
            return {"status": "wrong", "reason": mistake} | line, None
        calls += [provider.prepare(case, buffers) for buffers in lent[1:]]
        line |= {"status": "ok", "method": timing.METHODS[provider.library]}
        if case.elements <= HOST_ELEMENTS:
            line["host_microseconds"] = round(timing.host_time(provider.library, calls) * 1e6, 2)
        return line, timing.timer(provider.library, calls, case.bytes_moved)


def _figures(case: Case, times: timing.Times) -> Line:
    return {
        "cold": timing.is_cold(case.bytes_moved),
        "microseconds": round(times.median * 1e6, 3),
        "p20": round(times.p20 * 1e6, 3),
        "p80": round(times.p80 * 1e6, 3),
        "gigabytes_per_second": round(case.bytes_moved / times.median * 1e-9, 1),
    }


def _check_device(name: str, error: Exception) -> None:
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except Exception:
        raise DeviceLostError(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _stream(library: str) -> contextlib.AbstractContextManager[Any]:
    """Return the stream to prepare on: torch cannot capture its default stream, on which autograd would run then."""
    if library != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def _free() -> None:
    """Free all memory, which may be done only between cases: graphs write to memory that is back in the pool."""
    import cupy

    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


def _brief(line: Line) -> str:
    if line["status"] != "ok":
        return f"{line['provider']} {line['status']}"
    if "microseconds" not in line:
        return f"{line['provider']} {max(line['errors'].values()):.3g} eps"
    return f"{line['provider']} {line['microseconds']:.2f} us"
