"""Compare norms with FP8 output with the roof for their bytes: `python -m bench.float8 [--out FILE] [--elements N]`.

x has 16 bits, so 3 bytes an element move. The roof is the fastest kernel that reads both halves of x and writes as many
bytes as y8 has. The norm that writes y in 16 bits is timed too, and all take turns over the same buffers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy

import cunorm

from . import timing
from .results import lines_to
from .roofs import Roofs

ELEMENTS = 1 << 26
COLS = (1024, 1600, 2048, 4096, 5120, 7168, 8192, 12288, 16384)
GRANULARITIES = ("row", 128, "tensor")
SECONDS = 0.15  # for a case
PERIOD = 2**22 - 3  # after which the numbers of x repeat; it is a prime


def measure(roofs: Roofs, norm: str, cols: int, elements: int) -> list[dict[str, Any]]:
    """Return a line for each granularity."""
    import cupy

    rows = elements // cols
    moved = 3 * rows * cols
    numbers = cupy.asarray(numpy.random.default_rng(0).standard_normal(PERIOD))
    xs = [cupy.resize(numbers, (rows, cols)).astype("bfloat16") for _ in range(timing.buffers_needed(moved))]
    outs = [cupy.empty((rows, cols), "uint8") for _ in xs]
    weight, bias = cupy.ones(cols, "bfloat16"), cupy.zeros(cols, "bfloat16")
    parameters = (weight, bias) if norm == "layer_norm" else (weight,)
    scale = cupy.full((), 0.02, "float32")

    def quantised(granularity: str | int) -> list[Callable[[], Any]]:
        options = {"granularity": granularity, "scale": scale if granularity == "tensor" else None}
        function = getattr(cunorm, f"{norm}_fp8")
        return [lambda x=x: function(x, None, *parameters, **options) for x in xs]

    halves = [x.view("uint8").reshape(2, -1) for x in xs]
    roof = roofs.calls([(a, b, out.reshape(-1)) for (a, b), out in zip(halves, outs, strict=True)])
    wide = [lambda x=x: getattr(cunorm, norm)(x, None, *parameters) for x in xs]
    norms = [wide, *map(quantised, GRANULARITIES)]
    with ThreadPoolExecutor() as pool:  # compiles side by side: one after the other would take most of the run
        list(pool.map(lambda calls: calls[0](), norms))
    contenders = [*(calls for _, calls in roof), *norms]
    times = timing.in_turns([timing.timer("cupy", calls, moved) for calls in contenders], SECONDS)
    fastest = min(taken.median for taken in times[: len(roof)] if not isinstance(taken, Exception))
    of_wide = times[len(roof)]
    lines = []
    for granularity, taken in zip(GRANULARITIES, times[len(roof) + 1 :], strict=True):
        line = {"norm": norm, "rows": rows, "cols": cols, "granularity": granularity, "roof_us": fastest * 1e6}
        if isinstance(taken, Exception):
            line["error"] = str(taken)
        else:
            line |= {"us": taken.median * 1e6, "of_roof": fastest / taken.median}
        if not isinstance(of_wide, Exception):
            line["wide_us"] = of_wide.median * 1e6
        lines.append({name: round(value, 3) if isinstance(value, float) else value for name, value in line.items()})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    arguments = parser.parse_args()
    roofs = Roofs(None)
    with lines_to(arguments.out) as write:
        for norm, cols in product(("layer_norm", "rms_norm"), COLS):
            for line in measure(roofs, norm, cols, arguments.elements):
                write(**line)


if __name__ == "__main__":
    main()
