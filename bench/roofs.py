"""Find the fastest streaming kernel by bytes and reads : writes, once, and keep it beside the results.

A search has two stages: every variant runs for a few launches, then the best run in turns. A case then times the
winners of its size and of the sizes beside it over its own buffers, and its roof is the fastest of them there.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import timing
from bench.roof import Kernels, Variant, distinct

Key = tuple[int, int]  # reads for one write, log2 of the bytes of an array
FINALISTS = 6  # variants that the first stage keeps
KEPT = 2  # variants that the second stage keeps
COARSE_BYTES = 4e8  # a measurement of the first stage moves at least these
COARSE = 3  # measurements of each variant in the first stage


def key_of(reads: int, array_bytes: int) -> Key:
    """Return the key of arrays of a size; below 1 MB their time is latency, so four sizes in a row share a key."""
    power = round(math.log2(max(1, array_bytes)))
    return reads, power if power >= 20 else power // 4 * 4


def candidates(known: dict[Key, list[Variant]], key: Key) -> list[Variant]:
    """Return the winners of a size, and the first of each neighbour that is known."""
    reads, power = key
    beside = [known[near][0] for step in (-1, 1) if known.get(near := (reads, power + step))]
    return list(dict.fromkeys([*known.get(key, ()), *beside]))


def fastest(times: Sequence[tuple[Variant, float]], count: int) -> list[Variant]:
    return [variant for variant, _ in sorted(times, key=lambda pair: pair[1])[:count]]


class Roofs:
    """The winners on this GPU, read from `path` where an earlier command of the same day wrote them."""

    def __init__(self, path: Path | None):
        import cupy

        self.path, self.kernels = path, Kernels()
        self.about = {
            "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "date": datetime.date.today().isoformat(),
        }
        self.known: dict[Key, list[Variant]] = {}
        self.microseconds: dict[Key, list[float]] = {}
        if path is not None and path.exists():
            with suppress(ValueError, KeyError, TypeError):  # if the file was cut short, search again
                self._read(path)

    def calls(self, sets: Sequence[tuple[Any, Any, Any]]) -> list[tuple[Variant, list[Callable[[], None]]]]:
        """Return the candidates for sets of (a, b or None, out), and their calls over them."""
        reads, size = 1 if sets[0][1] is None else 2, sets[0][2].nbytes
        key = key_of(reads, size)
        if key not in self.known:
            self._search(key, sets)
        return [(variant, self._over(variant, sets)) for variant in candidates(self.known, key)]

    def _over(self, variant: Variant, sets: Sequence[tuple[Any, Any, Any]]) -> list[Callable[[], None]]:
        return [self.kernels.call(variant, *arrays) for arrays in sets]

    def _search(self, key: Key, sets: Sequence[tuple[Any, Any, Any]]) -> None:
        reads, size = key[0], sets[0][2].nbytes
        moved = (reads + 1) * size
        tried = distinct(self.kernels.variants[reads], max(1, size // 16), self.kernels.sms)
        rounds = max(1, round(COARSE_BYTES / (moved * len(sets))))
        coarse = []
        for variant in tried:
            # A GPU that has less shared memory refuses some variants.
            with suppress(Exception):
                measure = timing.cupy_timer(self._over(variant, sets), min(rounds, 4))
                coarse.append((variant, min(measure() for _ in range(COARSE))))
        finalists = [variant for variant in fastest(coarse, FINALISTS) if self._copies(variant, sets[0])]
        timers = [timing.timer("cupy", self._over(variant, sets), moved) for variant in finalists]
        times = [
            (variant, taken.median)
            for variant, taken in zip(finalists, timing.in_turns(timers), strict=True)
            if not isinstance(taken, Exception)
        ]
        self.known[key] = fastest(times, KEPT)
        self.microseconds[key] = [round(seconds * 1e6, 3) for seconds in sorted(seconds for _, seconds in times)[:KEPT]]
        self._write()

    def _copies(self, variant: Variant, arrays: tuple[Any, Any, Any]) -> bool:
        """Return whether every whole 16 bytes arrive."""
        return wrong(self.kernels, variant, *arrays) == 0

    def _read(self, path: Path) -> None:
        content = json.loads(path.read_text())
        if {name: content[name] for name in self.about} != self.about:
            return
        for entry in content["winners"]:
            key = (entry["reads"], entry["log2_bytes"])
            self.known[key] = [Variant(**fields) for fields in entry["variants"]]
            self.microseconds[key] = entry["microseconds"]

    def _write(self) -> None:
        if self.path is None:
            return
        winners = [
            {
                "reads": key[0],
                "log2_bytes": key[1],
                "microseconds": self.microseconds[key],
                "variants": [asdict(variant) for variant in kept],
            }
            for key, kept in sorted(self.known.items())
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.about | {"winners": winners}, indent=1) + "\n")


def wrong(kernels: Kernels, variant: Variant, a: Any, b: Any, out: Any) -> int:
    """Return how many 8-byte words of `out` a variant leaves wrong, without a tail below 16 bytes."""
    import cupy

    def words(array: Any) -> Any:
        return array.reshape(-1).view(cupy.uint8)[: out.nbytes // 16 * 16].view(cupy.uint64)

    result = words(out)
    expected = words(a) if b is None or variant.stages else words(a) ^ words(b)
    result[...] = ~expected
    kernels.call(variant, a, b, out)()
    return int((result != expected).sum())
