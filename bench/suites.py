"""What is measured: cases, ranges of columns, and the committed sets of cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from cunorm.norm.problem import whole

OPS = ("layer_norm", "rms_norm")
DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}
LARGE = 1 << 26  # elements from which a problem counts as large


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape, weight (and bias) in the dtype of x.

    `offset` is |mean| / std of each row; None is the usual one, 0.25. A case with an offset is checked, not timed.
    """

    op: str
    direction: str
    rows: int
    cols: int
    dtype: str
    offset: float | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes that must go through memory: each input read once, each output written once; not mean and rstd."""
        return whole(self.op, self.direction, self.rows, self.cols, self.dtype, self.dtype).bytes_moved

    @property
    def eps(self) -> float:
        return EPS[self.op]


def parse_sizes(texts: Iterable[str]) -> list[int]:
    """Sizes of a list whose entries are numbers or `a:b`, a doubled until it is beyond b: 32:128 is 32, 64, 128."""
    sizes = []
    for text in texts:
        try:
            low, high = map(int, text.split(":")) if ":" in text else (int(text), int(text))
        except ValueError:
            low, high = 0, 0
        if not 0 < low <= high:
            raise ValueError(
                f"bench: a size must be a positive number or a range a:b with 0 < a <= b; got {text!r}. "
                "Write 4096, or 32:262144."
            )
        while low <= high:
            sizes.append(low)
            low *= 2
    return list(dict.fromkeys(sizes))


def grid(
    ops: Iterable[str], directions: Iterable[str], dtypes: Iterable[str], cols: Iterable[int], rows: Iterable[int] = ()
) -> list[Case]:
    """Every combination; without rows as many as make a large problem."""
    rows = list(rows)
    return [
        Case(op, direction, row, col, dtype)
        for op, dtype, direction, col in itertools.product(ops, dtypes, directions, cols)
        for row in rows or [-(-LARGE // col)]
    ]


# The shapes whose peers were measured before this bench was there.
ANCHORS = {
    49152: (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    16384: (256, 1024, 4096, 8192, 16384, 32768, 65536),
    1048576: (128,),
    1024: (131072,),
    64: (262144,),
    512: (4096,),
    32: (4096,),
    1: (16384,),
}


def _anchors() -> list[Case]:
    cases = []
    for rows, cols in ANCHORS.items():
        cases += grid(["layer_norm"], DIRECTIONS, ["bfloat16"], cols, [rows])
    cases += grid(["layer_norm"], DIRECTIONS, ["float16"], (4096, 12288), [4096])
    return cases + grid(["rms_norm"], DIRECTIONS, ["bfloat16"], ANCHORS[16384], [16384])


def _error() -> list[Case]:
    return [Case("layer_norm", "forward", 256, 4096, "float32", 10.0**power) for power in range(-1, 6)]


SUITES = {
    "anchors": (_anchors, "the shapes of the peers' first measurements, forward and backward"),
    "roof": (
        lambda: grid(OPS, DIRECTIONS, DTYPES.values(), parse_sizes(["32:262144"])),
        "64 M elements, 32 to 262144 columns, every dtype",
    ),
    "triton": (
        lambda: grid(["layer_norm"], DIRECTIONS, ["float16"], range(1024, 15873, 512), [4096]),
        "the Triton tutorial's table: 4096 rows, fp16",
    ),
    "small": (
        lambda: grid(OPS, DIRECTIONS, ["bfloat16"], (1024, 4096, 16384), (1, 32, 512)),
        "1, 32 and 512 rows",
    ),
    "error": (_error, "error of y of LayerNorm against |mean| / std, fp32; nothing is timed"),
}


def suite(name: str) -> list[Case]:
    return SUITES[name][0]()
