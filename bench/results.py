"""Write and read results, and answer what tables, plots and bars ask of them."""

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
BEHIND_FRACTION, BEHIND_SECONDS = 0.02, 0.1e-6  # a case is behind a peer by more than the larger of both


def head(case: Case) -> dict[str, Any]:
    """Return the fields of a line that name its case."""
    fields = {"op": case.op, "direction": case.direction, "dtype": case.dtype, "rows": case.rows, "cols": case.cols}
    more = {"offset": case.offset, "weight": case.weight or None, "heads": case.heads or None}
    return fields | {name: value for name, value in more.items() if value is not None}


def case_of(line: dict[str, Any]) -> Case:
    op, direction, rows, cols, dtype = (line[k] for k in ("op", "direction", "rows", "cols", "dtype"))
    return Case(op, direction, rows, cols, dtype, line.get("offset"), line.get("weight", ""), line.get("heads", 0))


@dataclass(frozen=True)
class Measured:
    """A case with the lines of all providers that were measured in the same run."""

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
        """Return whether ours failed, or came out wrong."""
        return self.lines.get(OURS, {}).get("status") in ("wrong", "error")

    @property
    def peers(self) -> list[str]:
        """The providers that were measured beside us, fastest first."""
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
        """Return whether a peer is faster by more than counts."""
        ours, best = self.seconds(OURS), self.best_peer
        if self.refused or not ours or not best:
            return self.refused and best is not None
        return ours - best > max(BEHIND_FRACTION * best, BEHIND_SECONDS)


@dataclass(frozen=True)
class Results:
    environments: dict[str, dict[str, Any]]  # the first line of each file
    measured: list[Measured]

    def select(self, *, suite: str | None = None, **wanted: Any) -> Iterator[Measured]:
        """Return the entries of a suite whose cases have these values of their fields."""
        for entry in self.measured:
            if suite in (None, entry.suite) and all(getattr(entry.case, k) == v for k, v in wanted.items()):
                yield entry

    def by_commit(self) -> dict[str, list[str]]:
        """Return the files of each commit, without those of the suite `error`, which has a picture of its own."""
        files: dict[str, list[str]] = {}
        for name, environment in self.environments.items():
            if suite_of(name) != "error":
                files.setdefault(environment.get("commit", UNKNOWN), []).append(name)
        return files


def suite_of(file: str) -> str:
    return file.partition("-")[0]


def load(paths: Iterable[Path] | None = None, commit: str | None = None) -> Results:
    """Return the results of the files, or of all in bench/results, and with `commit` only those of that commit."""
    environments, measured = {}, []
    for path in sorted(FOLDER.glob("*.jsonl")) if paths is None else paths:
        first, *lines = read(path)
        if commit is not None and suite_of(path.stem) != "error" and first.get("commit", UNKNOWN) != commit:
            continue
        environments[path.stem] = first
        measured += group(lines, suite_of(path.stem))
    return Results(environments, measured)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file up to one that was cut short by the end of a run's time."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def group(lines: Iterable[dict[str, Any]], suite: str) -> list[Measured]:
    """Return the lines of one run by case."""
    cases: dict[Case, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "provider" in line:  # other lines say how the run ended
            cases.setdefault(case_of(line), {})[line["provider"]] = line
    return [Measured(case, by_provider, suite) for case, by_provider in cases.items()]


def distinct(measured: Iterable[Measured]) -> list[Measured]:
    """Return each case with peers once, by the measurement that is worst for us, so that no suite hides it."""
    worst: dict[Case, Measured] = {}
    for entry in measured:
        if entry.speedup is None:
            continue
        before = worst.get(entry.case)
        if before is None or entry.speedup < (before.speedup or 0):
            worst[entry.case] = entry
    return list(worst.values())


CLASSES = ("few rows", "widths", "long rows", "odd widths", "heads")


def class_of(case: Case) -> str:
    """Return the class of a case, which follows from its shape, whatever suite it was measured in."""
    if case.heads:
        return "heads"
    if case.cols % 2:
        return "odd widths"
    if case.rows <= 2048 and case.cols < 32768:
        return "few rows"
    return "long rows" if case.cols > 8192 else "widths"


@contextmanager
def lines_to(path: Path | None) -> Iterator[Callable[..., None]]:
    """Give `write(kind, **figures)`, which prints a line of JSON and adds it at once to the file, if there is one.

    The kind may be left out where all lines are of one kind. The first line begins the file anew, so that a run that
    fails before it, as without a GPU, leaves what was measured before.
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
