"""Committed results: writing and reading them, and the questions that tables, plots and bars ask of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.suites import LARGE, Case

OURS, ROOF = "cunorm", "roof"
FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """A case with the lines of everybody measured in the same run."""

    case: Case
    lines: dict[str, dict[str, Any]]
    suite: str  # the name of the file up to a dash: a suite may be measured in parts, roof-bf16.jsonl and so on

    def seconds(self, provider: str) -> float | None:
        line = self.lines.get(provider, {})
        return line["microseconds"] * 1e-6 if "microseconds" in line else None

    @property
    def large(self) -> bool:
        return self.case.rows * self.case.cols >= LARGE

    @property
    def of_roof(self) -> float | None:
        """Roof time / our time."""
        ours, roof = self.seconds(OURS), self.seconds(ROOF)
        return roof / ours if ours and roof else None

    @property
    def peers(self) -> list[str]:
        """Who was measured beside us, fastest first."""
        names = [name for name in self.lines if name not in (OURS, ROOF) and self.seconds(name) is not None]
        return sorted(names, key=lambda name: self.seconds(name) or 0)

    @property
    def speedup(self) -> float | None:
        """Time of the fastest peer / our time: above 1 we are faster."""
        ours = self.seconds(OURS)
        return (self.seconds(self.peers[0]) or 0) / ours if ours and self.peers else None


@dataclass(frozen=True)
class Results:
    environments: dict[str, dict[str, Any]]  # by file
    measured: list[Measured]

    def select(self, *, suite: str | None = None, **wanted: Any) -> Iterator[Measured]:
        """Those of a suite and with these values of the case's fields."""
        for entry in self.measured:
            if suite in (None, entry.suite) and all(getattr(entry.case, k) == v for k, v in wanted.items()):
                yield entry


def load(paths: Iterable[Path] | None = None) -> Results:
    """The results of the files; of all in bench/results without an argument."""
    environments, measured = {}, []
    for path in sorted(FOLDER.glob("*.jsonl")) if paths is None else paths:
        first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        environments[path.stem] = first
        measured += group(lines, path.stem.partition("-")[0])
    return Results(environments, measured)


def group(lines: Iterable[dict[str, Any]], suite: str) -> list[Measured]:
    """Lines of one run, by case."""
    cases: dict[Case, dict[str, dict[str, Any]]] = {}
    for line in lines:
        case = Case(*(line[k] for k in ("op", "direction", "rows", "cols", "dtype")), line.get("offset"))
        cases.setdefault(case, {})[line["provider"]] = line
    return [Measured(case, by_provider, suite) for case, by_provider in cases.items()]


@contextmanager
def lines_to(path: Path) -> Iterator[Callable[..., None]]:
    """`write(kind, **figures)`, which prints a line of JSON and adds it to the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def write(kind: str, **figures: Any) -> None:
            line = json.dumps({"kind": kind, **figures})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        yield write
