"""Committed results: writing and reading them, and the questions that tables, plots and bars ask of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.suites import Case

OURS, ROOF = "cunorm", "roof"
FOLDER = Path(__file__).parent / "results"
UNKNOWN = "unknown"
BEHIND_FRACTION, BEHIND_SECONDS = 0.02, 0.1e-6  # more than the larger of both counts as behind a peer


def head(case: Case) -> dict[str, Any]:
    """The fields of a line that name its case."""
    fields = {"op": case.op, "direction": case.direction, "dtype": case.dtype, "rows": case.rows, "cols": case.cols}
    more = {"offset": case.offset, "weight": case.weight or None, "heads": case.heads or None}
    return fields | {name: value for name, value in more.items() if value is not None}


def case_of(line: dict[str, Any]) -> Case:
    op, direction, rows, cols, dtype = (line[k] for k in ("op", "direction", "rows", "cols", "dtype"))
    return Case(op, direction, rows, cols, dtype, line.get("offset"), line.get("weight", ""), line.get("heads", 0))


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
    def of_roof(self) -> float | None:
        """Roof time / our time."""
        ours, roof = self.seconds(OURS), self.seconds(ROOF)
        return roof / ours if ours and roof else None

    @property
    def refused(self) -> bool:
        """Whether ours failed, or came out wrong."""
        return self.lines.get(OURS, {}).get("status") in ("wrong", "error")

    @property
    def peers(self) -> list[str]:
        """Who was measured beside us, fastest first."""
        names = [name for name in self.lines if name not in (OURS, ROOF) and self.seconds(name) is not None]
        return sorted(names, key=lambda name: self.seconds(name) or 0)

    @property
    def best_peer(self) -> float | None:
        return self.seconds(self.peers[0]) if self.peers else None

    @property
    def speedup(self) -> float | None:
        """Time of the fastest peer / our time: above 1 we are faster; 0 where ours was refused."""
        if self.refused and self.peers:
            return 0.0
        ours, best = self.seconds(OURS), self.best_peer
        return best / ours if ours and best else None

    @property
    def behind(self) -> bool:
        """Whether a peer is faster by more than counts."""
        ours, best = self.seconds(OURS), self.best_peer
        if self.refused or not ours or not best:
            return self.refused and best is not None
        return ours - best > max(BEHIND_FRACTION * best, BEHIND_SECONDS)


@dataclass(frozen=True)
class Results:
    environments: dict[str, dict[str, Any]]  # by file
    measured: list[Measured]

    def select(self, *, suite: str | None = None, **wanted: Any) -> Iterator[Measured]:
        """Those of a suite and with these values of the case's fields."""
        for entry in self.measured:
            if suite in (None, entry.suite) and all(getattr(entry.case, k) == v for k, v in wanted.items()):
                yield entry

    def by_commit(self) -> dict[str, list[str]]:
        """The files of each commit, but for those of the suite `error`, which has a picture of its own."""
        found: dict[str, list[str]] = {}
        for name, environment in self.environments.items():
            if suite_of(name) != "error":
                found.setdefault(environment.get("commit", UNKNOWN), []).append(name)
        return found


def suite_of(file: str) -> str:
    return file.partition("-")[0]


def load(paths: Iterable[Path] | None = None, commit: str | None = None) -> Results:
    """The results of the files; of all in bench/results without an argument. `commit`: of that one alone."""
    environments, measured = {}, []
    for path in sorted(FOLDER.glob("*.jsonl")) if paths is None else paths:
        first, *lines = read(path)
        if commit is not None and suite_of(path.stem) != "error" and first.get("commit", UNKNOWN) != commit:
            continue
        environments[path.stem] = first
        measured += group(lines, suite_of(path.stem))
    return Results(environments, measured)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; the last one may have been cut short by the end of a run's time."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def group(lines: Iterable[dict[str, Any]], suite: str) -> list[Measured]:
    """Lines of one run, by case."""
    cases: dict[Case, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "provider" in line:  # else it says how the run ended
            cases.setdefault(case_of(line), {})[line["provider"]] = line
    return [Measured(case, by_provider, suite) for case, by_provider in cases.items()]


def distinct(measured: Iterable[Measured]) -> list[Measured]:
    """Each case once: of several measurements beside peers the one that is worst for us, so that no suite hides it."""
    found: dict[Case, Measured] = {}
    for entry in measured:
        if entry.speedup is None:
            continue
        before = found.get(entry.case)
        if before is None or entry.speedup < (before.speedup or 0):
            found[entry.case] = entry
    return list(found.values())


CLASSES = ("few rows", "widths", "long rows", "odd widths", "heads")


def class_of(case: Case) -> str:
    """What a case is hard for; by its shape, whatever suite it was measured in."""
    if case.heads:
        return "heads"
    if case.cols % 2:
        return "odd widths"
    if case.rows <= 2048 and case.cols < 32768:
        return "few rows"
    return "long rows" if case.cols > 8192 else "widths"


@contextmanager
def lines_to(path: Path | None) -> Iterator[Callable[..., None]]:
    """`write(kind, **figures)`, which prints a line of JSON and adds it at once to the file, if there is one.

    Where all lines are of one kind it has no name. The first line begins the file anew: a run that fails before it, as
    without a GPU, leaves what was measured before.
    """
    with ExitStack() as stack:
        files: list[IO[str]] = []

        def write(kind: str = "", **figures: Any) -> None:
            line = json.dumps({"kind": kind, **figures} if kind else figures)
            print(line, flush=True)
            if path is None:
                return
            if not files:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.append(stack.enter_context(path.open("w")))
            files[0].write(line + "\n")
            files[0].flush()

        yield write
