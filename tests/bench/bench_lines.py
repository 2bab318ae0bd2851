"""Made-up lines of results of the bench."""

from __future__ import annotations

import json

from bench.results import OURS, Results, group, head
from bench.suites import LARGE, Case

WIDE = Case("layer_norm", "forward", LARGE // 4096, 4096, "bfloat16")
BACKWARD = Case("layer_norm", "backward", LARGE // 4096, 4096, "bfloat16")


def lines_of(case: Case, **microseconds: float | None) -> list[dict]:
    """Return a line for each provider's time, where None stands for a wrong result."""
    lines = []
    for name, time in microseconds.items():
        line = head(case) | {"provider": name}
        if time is None:
            lines.append(line | {"status": "wrong", "reason": "dx is off"})
        else:
            speed = case.bytes_moved / time * 1e-3
            times = {"microseconds": time, "gigabytes_per_second": speed, "host_microseconds": 5.0}
            lines.append(line | {"status": "ok"} | times)
    return lines


def results_of(lines: list[dict], suite: str = "roof") -> Results:
    environment = {"gpu": "made up", "date": "2026-01-01", "commit": "abc", "providers": {OURS: "0"}, "missing": {}}
    return Results({suite: environment}, group(lines, suite))


def file_of(folder, name: str, commit: str | None, *lines: dict) -> None:
    """Write a file of results into the folder, with its last line cut short."""
    environment = {"gpu": "made up", "date": "2026-01-01", "providers": {OURS: "0"}, "missing": {}}
    first = environment | ({} if commit is None else {"commit": commit})
    text = "".join(json.dumps(line) + "\n" for line in (first, *lines))
    (folder / name).write_text(text + '{"op": "layer_norm", "dire')  # as at the end of a run's time
