"""The tables of shapes and dtypes that tests normalise, and the reason for each row length."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Columns(NamedTuple):
    cols: int
    rows: tuple[int, ...]
    reason: str


# Row counts: 0; 1 and 3 leave a CTA partly empty; 8 fills it; 4096 fills the GPU; 70000 is beyond 65535, the limit of
# a grid's second dimension, and beyond what is resident at once.
SHAPES = (
    Columns(1, (0, 1, 3, 8, 4096, 70000), "a row is its own mean"),
    Columns(2, (1, 3, 4096, 70000), "xhat is +-1, and dx cancels"),
    Columns(7, (1, 8, 4096, 70000), "odd, and less than a vector of 16 bits"),
    Columns(31, (3, 8, 70000), "one column short of a warp"),
    Columns(33, (1, 3, 4096, 70000), "one column more than a warp"),
    Columns(127, (1, 8, 4096, 70000), "rows begin at every alignment"),
    Columns(128, (0, 1, 3, 4096, 70000), "whole vectors in every dtype"),
    Columns(129, (1, 8, 4096, 70000), "a last vector of one column"),
    Columns(768, (1, 3, 4096, 70000), "a model's width, no power of two"),
    Columns(1000, (0, 1, 8, 4096), "whole vectors that fill no warp"),
    Columns(1998, (1, 3, 4096), "rows begin at multiples of 4 bytes"),
    Columns(3840, (1, 3, 4096), "a model's width"),
    Columns(4096, (0, 1, 8, 4096), "a full shape"),
    Columns(5120, (1, 3, 4096), "a model's width, no power of two"),
    Columns(8191, (1, 8, 4096), "odd and long: no row but the first is aligned"),
    Columns(8192, (0, 1, 3, 4096), "a full shape"),
    Columns(12288, (1, 8, 4096), "a model's width"),
    Columns(16384, (1, 3, 4096), "a full shape"),
    Columns(16385, (1, 8, 300), "one more than 16384, odd: the last vector of the row holds one column"),
    Columns(32768, (0, 1, 3, 300), "a full shape"),
    Columns(65536, (1, 8, 300), "a full shape, held by a cluster or streamed as the dtype has it"),
    Columns(65537, (0, 1, 3, 8), "beyond 16 bits, odd, whatever divides it among CTAs leaves one column over"),
    Columns(131072, (1, 3, 8), "a full shape, held by a cluster or streamed as the dtype has it"),
    Columns(262144, (1, 3, 8), "a full shape, held by a cluster or streamed as the dtype has it"),
    Columns(524296, (0, 1, 3, 8), "whole vectors, longer than any row held in registers"),
    Columns(600001, (1, 3), "odd, longer than any row held in registers"),
)

# NumPy has one path for all shapes, so on the host few rows, of lengths up to HOST_COLUMNS, are enough.
HOST_ROWS = 8
HOST_COLUMNS = 1000
GPU_ELEMENTS = 2**26
FLOAT64_ELEMENTS = 2**22  # their reference is NumPy's longdouble


def shape_cases() -> list[Any]:
    """Return (xp, rows, cols, dtype) for every shape and dtype: on the host where it is small, and on the GPU."""
    cases = []
    for cols, row_counts, _ in SHAPES:
        for rows, dtype in itertools.product(row_counts, DTYPES):
            elements = rows * cols
            name = f"{rows}x{cols}-{dtype}"
            if rows <= HOST_ROWS and cols <= HOST_COLUMNS:
                cases.append(pytest.param("host", rows, cols, dtype, id=f"host-{name}"))
            if elements <= (FLOAT64_ELEMENTS if dtype == "float64" else GPU_ELEMENTS):
                cases.append(pytest.param("gpu", rows, cols, dtype, id=f"gpu-{name}", marks=pytest.mark.gpu))
    return cases


# These row lengths reach every tier (a part of a warp, a warp, a CTA, a cluster, streamed). On the host conftest.py
# leaves those above HOST_COLUMNS out.
TIER_COLUMNS = (7, 129, 1000, 8191, 12288, 20001, 65537, 262144, 600001)


def adapter_cases() -> list[Any]:
    """Return (xp, rows, cols, dtype) on the GPU, for what an adapter can get wrong: which plan it runs, what it passes.

    There is a row length of each tier, with few rows and many. The core's tests show that kernels are right for every
    shape.
    """
    return [
        pytest.param("gpu", rows, cols, dtype, id=f"gpu-{rows}x{cols}-{dtype}", marks=pytest.mark.gpu)
        for cols, dtype in itertools.product(TIER_COLUMNS, DTYPES)
        for rows in (8, min(4096, FLOAT64_ELEMENTS // cols))
    ]


OFFSETS = (1e2, 1e4)  # |mean| / std
