"""The cases that are measured, ranges of columns, and the committed sets of cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cunorm.plan.plain_problems import whole

OPS = ("layer_norm", "rms_norm")
DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}
MEGA = 1 << 20
LARGE = 64 * MEGA  # elements from which a problem counts as large


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape.

    `offset` is |mean| / std of each row, or None for the usual 0.25. A case with an offset is checked, not timed.
    """

    op: str
    direction: str
    rows: int
    cols: int
    dtype: str
    offset: float | None = None
    weight: str = ""  # the dtype of weight and bias, or that of x if empty
    heads: int = 0  # x is the first heads of a packed QKV (rows / heads, 3 * heads, cols), or a matrix if 0

    @property
    def weight_dtype(self) -> str:
        return self.weight or self.dtype

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of x without the columns."""
        return (self.rows // self.heads, self.heads) if self.heads else (self.rows,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The key that sampling draws, so that both norms and directions of a shape come together."""
        return self.rows, self.cols, self.heads

    @property
    def bytes_moved(self) -> int:
        """Bytes that must go through memory: each input read once, each output written once; not mean and rstd."""
        return whole(self.op, self.direction, self.rows, self.cols, self.dtype, self.weight_dtype).bytes_moved

    @property
    def eps(self) -> float:
        return EPS[self.op]

    def __str__(self) -> str:
        weight = f" ({self.weight} weight)" if self.weight else ""
        heads = f", {self.heads} heads of a packed QKV" if self.heads else ""
        return f"{self.op} {self.direction} {self.dtype}{weight} {self.rows} x {self.cols}{heads}"


def parse_sizes(texts: Iterable[str]) -> list[int]:
    """Return the sizes of a list of numbers and of `a:b`, which doubles a up to b: 32:128 is 32, 64, 128."""
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
    ops: Iterable[str],
    directions: Iterable[str],
    dtypes: Iterable[str],
    cols: Iterable[int],
    rows: Iterable[int] = (),
    elements: int = LARGE,
) -> list[Case]:
    """Return every combination; without rows there are as many as make a problem of so many elements."""
    rows = list(rows)
    return [
        Case(op, direction, row, col, dtype)
        for op, dtype, direction, col in itertools.product(ops, dtypes, directions, cols)
        for row in rows or [-(-elements // col)]
    ]


def _bf16(cols: Iterable[int], rows: Iterable[int] = (), elements: int = LARGE) -> list[Case]:
    """Return both norms and directions in bfloat16, with a float32 weight in a third of the cases."""
    cases = grid(OPS, DIRECTIONS, ["bfloat16"], cols, rows, elements)
    # A stride of 3 through the list would meet the same widths wherever their number is a multiple of 3.
    places = {shape: i for i, shape in enumerate(dict.fromkeys(case.shape for case in cases))}

    def turn(case: Case) -> int:
        return places[case.shape] + OPS.index(case.op) + DIRECTIONS.index(case.direction)

    return [replace(case, weight="float32") if turn(case) % 3 == 0 else case for case in cases]


# Rows by columns, shapes that are kept so that results can be compared with earlier ones.
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


WIDTHS = range(256, 8193, 64)
LONG = (12288, 262144)  # the first and the last
ODD = (*range(1001, 1100, 2), 4097, 8191, 50257)
FEW_ROWS, FEW_COLS = (1, 8, 64, 512, 2048), (512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_COLS, HEAD_ROWS = 16, (64, 96, 128, 256), 131072


def _long(step: int = LONG[0]) -> list[Case]:
    return _bf16([*range(LONG[0], LONG[1], step), LONG[1]])


SUITES: dict[str, tuple[Callable[..., list[Case]], str]] = {
    "widths": (
        lambda: [case for elements in (MEGA, 8 * MEGA, LARGE) for case in _bf16(WIDTHS, elements=elements)],
        "every multiple of 64 from 256 to 8192 columns, at 1, 8 and 64 M elements",
    ),
    "long": (_long, "12288 to 262144 columns by --step, 64 M elements"),
    "few": (lambda: _bf16(FEW_COLS, FEW_ROWS), "1 to 2048 rows of 512 to 16384 columns"),
    "map": (
        lambda: _bf16(FEW_COLS, (*FEW_ROWS, 8192, 32768)),
        "few and more rows of the same columns: the picture of rows and columns",
    ),
    "heads": (
        lambda: [replace(case, heads=HEADS) for case in _bf16(HEAD_COLS, [HEAD_ROWS])],
        "the q heads of a packed QKV, a view",
    ),
    "odd": (lambda: _bf16(ODD), "odd numbers of columns, 64 M elements"),
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


def suite(name: str, step: int | None = None) -> list[Case]:
    return _long(step) if name == "long" and step else SUITES[name][0]()


def drawn(cases: Iterable[Case], count: int | None, seed: int) -> list[Case]:
    """Return the cases of `count` shapes, or of all, in an order drawn by the seed.

    If a run's time allows only the first ones, they are a fair sample.
    """
    by_shape: dict[tuple, list[Case]] = {}
    for case in cases:
        by_shape.setdefault(case.shape, []).append(case)
    shapes = list(by_shape)
    random.Random(seed).shuffle(shapes)
    return [case for shape in shapes[:count] for case in by_shape[shape]]
