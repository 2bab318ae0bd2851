"""The bars this project sets itself, held against results: which hold, which do not, by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy

from bench.results import OURS, ROOF, Measured, Results


class Bar(NamedTuple):
    what: str
    at_least: float
    cases: int  # how many were measured
    held: int
    worst: float | None
    where: str  # the worst case

    @property
    def holds(self) -> bool | None:
        """None where nothing was measured."""
        return self.held == self.cases if self.cases else None


def bars(results: Results) -> list[Bar]:
    """Every bar, in the order of the issue that set them."""

    def large(direction: str, low: int, high: int) -> Iterator[Measured]:
        for entry in results.select(direction=direction):
            if entry.large and low <= entry.case.cols <= high and entry.case.offset is None:
                yield entry

    def of_roof(entries: Iterable[Measured]) -> list[tuple[Measured, float]]:
        return _with(entries, lambda entry: entry.of_roof)

    def speedup(entries: Iterable[Measured]) -> list[tuple[Measured, float]]:
        return _with(entries, lambda entry: entry.speedup)

    layer_norm = (entry for entry in large("backward", 512, 65536) if entry.case.op == "layer_norm")
    return [
        _bar(
            "forward, >= 64 M elements, 256 to 131072 columns: of the roof",
            0.97,
            of_roof(large("forward", 256, 131072)),
        ),
        _bar(
            "forward, >= 64 M elements, 32 to 128 and 262144 columns: of the roof",
            0.93,
            of_roof([*large("forward", 32, 128), *large("forward", 262144, 262144)]),
        ),
        _bar(
            "backward, >= 64 M elements, 512 to 65536 columns: of the roof",
            0.90,
            of_roof(large("backward", 512, 65536)),
        ),
        _bar("LayerNorm backward, the same: times the best peer", 1.3, speedup(layer_norm)),
        _bar(
            "backward, >= 64 M elements, 128 to 256 and 131072 to 262144 columns: of the roof",
            0.85,
            of_roof([*large("backward", 128, 256), *large("backward", 131072, 262144)]),
        ),
        _bar(
            "backward, 4096 rows, 1024 to 15872 columns, fp16 (the Triton tutorial's table): times the best peer",
            1.0,
            speedup(results.select(suite="triton", direction="backward")),
        ),
        _bar("1, 32 and 512 rows: times the best peer", 1.0, speedup(results.select(suite="small"))),
        _bar("the peers' first shapes: times the best peer", 0.98, speedup(results.select(suite="anchors"))),
        _bar(
            "host time of a bare RawKernel launch / that of `cunorm.layer_norm` (both CuPy; the bar is 1.5 times)",
            1 / 1.5,
            _with(results.select(op="layer_norm", direction="forward", suite="small"), _host),
        ),
    ]


def _host(entry: Measured) -> float | None:
    ours, bare = (entry.lines.get(name, {}).get("host_microseconds") for name in (OURS, ROOF))
    return bare / ours if ours and bare else None


def _with(entries: Iterable[Measured], value: Callable[[Measured], float | None]) -> list[tuple[Measured, float]]:
    """The entries that have the value: a case without peers says nothing of peers, and one of ours that failed is 0."""
    found = []
    for entry in entries:
        if entry.lines.get(OURS, {}).get("status") in ("wrong", "error"):
            found.append((entry, 0.0))
        elif (measured := value(entry)) is not None:
            found.append((entry, measured))
    return found


def _bar(what: str, at_least: float, values: list[tuple[Measured, float]]) -> Bar:
    if not values:
        return Bar(what, at_least, 0, 0, None, "")
    held = int(numpy.sum([value >= at_least for _, value in values]))
    entry, worst = min(values, key=lambda pair: pair[1])
    case = entry.case
    where = f"{case.op} {case.direction} {case.dtype} {case.rows} x {case.cols}"
    if entry.peers and "peer" in what:
        where += f" ({entry.peers[0]})"
    return Bar(what, at_least, len(values), held, worst, where)
