"""Measures cases: each provider's result is checked, then timed. What goes wrong is in its line and stops nothing."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import timing
from bench.providers import Provider
from bench.suites import Case

Line = dict[str, Any]
ROOF = "roof"


def environment(found: list[tuple[Provider, str]], missing: dict[str, str]) -> Line:
    """The first line of a file of results."""
    import cupy

    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "date": datetime.date.today().isoformat(),
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "providers": {provider.name: version for provider, version in found},
        "missing": missing,
    }


def run(
    cases: list[Case],
    found: list[tuple[Provider, str]],
    missing: dict[str, str],
    out: TextIO | None,
    console: Console,
) -> list[Line]:
    """Measure every case with every provider; write each line as soon as it is known."""
    lines = []

    def note(line: Line) -> None:
        lines.append(line)
        if out is not None:
            out.write(json.dumps(line) + "\n")
            out.flush()

    gc.freeze()  # what the libraries made on import: collecting it after every case costs a third of the run
    note(environment(found, missing))
    for name, reason in missing.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            title = f"{case.op} {case.direction} {case.dtype} {case.rows} x {case.cols}"
            progress.update(task, description=title)
            measured = []
            for line in _measure(case, [provider for provider, _ in found]):
                note(line)
                measured.append(line)
            progress.console.print(title + ": " + "  ".join(map(_brief, measured)), markup=False, highlight=False)
            progress.advance(task)
    return lines


def _measure(case: Case, providers: list[Provider]) -> Iterator[Line]:
    """A line for the roof and one for each provider."""
    import cupy

    from bench.workload import Workload

    head = {"op": case.op, "direction": case.direction, "dtype": case.dtype, "rows": case.rows, "cols": case.cols}
    if case.offset is not None:
        head["offset"] = case.offset
    try:
        workload = Workload(case)
        if case.offset is None:
            yield head | {"provider": ROOF, "status": "ok"} | _timed(case, "cupy", workload.roof())
    except cupy.cuda.memory.OutOfMemoryError as error:
        yield head | {"provider": ROOF, "status": "error", "reason": str(error)}
        return
    for provider in providers:
        reason = provider.unsupported(case)
        if reason:
            yield head | {"provider": provider.name, "status": "unsupported", "reason": reason}
            continue
        start = time.perf_counter()
        try:
            line = _measure_provider(case, provider, workload)
        except Exception as error:
            line = {"status": "error", "reason": f"{type(error).__name__}: {error}"[:400]}
        with contextlib.suppress(Exception):
            provider.reset()
        _free()
        yield head | {"provider": provider.name} | line | {"took": round(time.perf_counter() - start, 2)}
    del workload
    _free()


def _measure_provider(case: Case, provider: Provider, workload: Any) -> Line:
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
            return {"status": "ok"} | line
        mistake = check.wrong(case, errors)
        if mistake:
            return {"status": "wrong", "reason": mistake} | line
        calls += [provider.prepare(case, buffers) for buffers in lent[1:]]
        return {"status": "ok"} | line | _timed(case, provider.library, calls)


def _timed(case: Case, library: str, calls: list[timing.Call]) -> Line:
    times = timing.kernel_time(library, calls)
    return {
        "method": timing.METHODS[library],
        "cold": timing.is_cold(case.bytes_moved),
        "microseconds": round(times.median * 1e6, 3),
        "p20": round(times.p20 * 1e6, 3),
        "p80": round(times.p80 * 1e6, 3),
        "gigabytes_per_second": round(case.bytes_moved / times.median * 1e-9, 1),
        "host_microseconds": round(timing.host_time(library, calls, times.median) * 1e6, 2),
    }


def _stream(library: str) -> contextlib.AbstractContextManager[Any]:
    """torch captures no work of its default stream, and autograd runs backward on the stream of forward."""
    if library != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def _free() -> None:
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
    return f"{line['provider']} {line['gigabytes_per_second']:.0f}"
