"""The bars that this project sets itself: which of them hold by the results, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bench.results import BEHIND_FRACTION, BEHIND_SECONDS, OURS, ROOF, Measured, Results
from bench.suites import DIRECTIONS, FEW_ROWS, LONG, WIDTHS, Case

FRACTION, ADDED = {"forward": 0.96, "backward": 0.95}, {"forward": 0.8e-6, "backward": 2.5e-6}
LONG_FRACTION = {"forward": 0.94, "backward": 0.90}
LAST_LONG_BACKWARD = 0.85  # for the longest rows
HEADS_FRACTION = {"forward": 0.93, "backward": 0.85}
ODD_FRACTION = {"forward": 0.80, "backward": 0.75}
BEHIND_SHARE = 0.02
HOST_RATIO = 1.5

Judged = list[tuple[Measured, float]]  # each with our time over what the bar allows


class Bar(NamedTuple):
    what: str
    cases: int  # how many were measured
    held: int
    worst: tuple[tuple[float, str], ...]  # our time over what is allowed, and the case; worst first
    share: float = 1.0  # this part of the cases must hold

    @property
    def holds(self) -> bool | None:
        """Return whether the bar holds, or None if nothing was measured."""
        return self.held >= self.share * self.cases if self.cases else None


def at_width(case: Case, roof: float) -> float:
    """Return the seconds that a case of usual width may take, by the time of the roof."""
    return roof / FRACTION[case.direction] + ADDED[case.direction]


def at_length(case: Case, roof: float) -> float:
    """Return the seconds that a case of long rows may take, by the time of the roof."""
    last = case.cols >= LONG[1] and case.direction == "backward"
    return roof / (LAST_LONG_BACKWARD if last else LONG_FRACTION[case.direction])


def at_any(case: Case, roof: float) -> float | None:
    """Return the seconds that a case may take by its columns, or None where no bar is set."""
    if WIDTHS[0] <= case.cols <= WIDTHS[-1]:
        return at_width(case, roof)
    return at_length(case, roof) if case.cols >= LONG[0] else None


def beside_peers(best: float) -> float:
    """Return the seconds that we may take without being behind the best peer."""
    return best + max(BEHIND_FRACTION * best, BEHIND_SECONDS)


def bars(results: Results) -> list[Bar]:
    """Return every bar, in the order of docs/speed.md."""
    judged_bars = []

    def add(what: str, judged: Judged, share: float = 1.0, figure: str = "microseconds") -> None:
        once: dict[Case, tuple[Measured, float]] = {}  # the worst measurement of each case, of all files
        for entry, ratio in sorted(judged, key=lambda pair: -pair[1]):
            once.setdefault(entry.case, (entry, ratio))
        held = sum(ratio <= 1 for _, ratio in once.values())
        named = tuple((ratio, _where(entry, figure)) for entry, ratio in list(once.values())[:5])
        judged_bars.append(Bar(what, len(once), held, named, share))

    def roof_bar(suite: str, allowed: Callable[[Case, float], float | None], direction: str, **wanted) -> Judged:
        return _of_roof(results.select(suite=suite, direction=direction, **wanted), allowed)

    for direction in DIRECTIONS:
        limit = f"{FRACTION[direction]:g} of the roof and {ADDED[direction] * 1e6:g} us more"
        add(f"{direction}, 256 to 8192 columns by 64: {limit}", roof_bar("widths", at_width, direction))
    for direction in DIRECTIONS:
        last = f", {LAST_LONG_BACKWARD:g} at {LONG[1]}" if direction == "backward" else ""
        limit = f"{LONG_FRACTION[direction]:g} of the roof{last}"
        add(f"{direction}, {LONG[0]} to {LONG[1]} columns: {limit}", roof_bar("long", at_length, direction))
    few = [entry for entry in results.measured if entry.suite in ("few", "map") and entry.case.rows <= FEW_ROWS[-1]]
    add(f"1 to {FEW_ROWS[-1]} rows: never behind the best peer", _of_peers(few, beside_peers))
    everything = _of_peers(results.measured, beside_peers)
    add(f"every case with peers, once: behind in at most {BEHIND_SHARE:.0%}", everything, 1 - BEHIND_SHARE)
    for direction in DIRECTIONS:
        fraction = HEADS_FRACTION[direction]
        add(
            f"{direction}, heads of a packed QKV: {fraction:g} of the roof",
            roof_bar("heads", lambda case, roof, fraction=fraction: roof / fraction, direction),
        )
    add("heads of a packed QKV: no slower than the best peer", _of_peers(results.select(suite="heads"), lambda t: t))
    for direction in DIRECTIONS:
        fraction = ODD_FRACTION[direction]
        add(
            f"{direction}, odd widths: {fraction:g} of the roof",
            roof_bar("odd", lambda case, roof, fraction=fraction: roof / fraction, direction),
        )
    for direction in DIRECTIONS:
        judged = [pair for dtype in ("float16", "float32") for pair in roof_bar("roof", at_any, direction, dtype=dtype)]
        add(f"{direction}, float16 and float32, 64 M elements: as bfloat16", judged)
    host = results.select(op="layer_norm", direction="forward", suite="small")
    add(
        f"host time of `cunorm.layer_norm` (CuPy): {HOST_RATIO:g} times that of a bare launch",
        _of_host(host),
        1.0,
        "host_microseconds",
    )
    return judged_bars


def _of_roof(entries: Iterable[Measured], allowed: Callable[[Case, float], float | None]) -> Judged:
    judged = []
    for entry in entries:
        ours, roof = entry.seconds(OURS), entry.seconds(ROOF)
        if entry.refused:
            judged.append((entry, float("inf")))
        elif ours and roof and (limit := allowed(entry.case, roof)):
            judged.append((entry, ours / limit))
    return judged


def _of_peers(entries: Iterable[Measured], allowed: Callable[[float], float]) -> Judged:
    """Judge the cases that have peers."""
    judged = []
    for entry in entries:
        ours, best = entry.seconds(OURS), entry.best_peer
        if best is not None and (entry.refused or ours):
            judged.append((entry, float("inf") if entry.refused or not ours else ours / allowed(best)))
    return judged


def _of_host(entries: Iterable[Measured]) -> Judged:
    judged = []
    for entry in entries:
        ours, bare = (entry.lines.get(name, {}).get("host_microseconds") for name in (OURS, ROOF))
        if ours and bare:
            judged.append((entry, ours / (HOST_RATIO * bare)))
    return judged


def _where(entry: Measured, figure: str) -> str:
    """Return the case with our time, the roof's and the fastest peer's, as text."""
    figures = [
        f"{name} {line[figure]:.2f} us" if figure in line else f"{name} {line['status']}"
        for name in (OURS, ROOF, *entry.peers[:1])
        if (line := entry.lines.get(name))
    ]
    return f"{entry.case}: {', '.join(figures)}"
