"""The problem of a norm with its product: all that decides how it is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..call import checks
from ..call.checks import Layout

NAMES = ("x", "weight", "bias", "ln_weight", "ln_bias")  # of the arrays of a call


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A norm with its product: x (rows, cols) -> y (rows, outs). Strides are in elements, from row to row."""

    norm: str
    rows: int
    cols: int
    outs: int
    dtype: str
    ln_weight: str | None = None  # its dtype
    ln_bias: str | None = None  # its dtype
    bias: bool = False
    zero_centered_gamma: bool = False
    x_stride: int = 0
    weight_stride: int = 0
    aligned: bool = True  # every array begins at a multiple of 16 bytes


def problem_of(
    norm: str, layouts: Mapping[str, Layout], zero_centered_gamma: bool, aligned: bool
) -> LinearProblem | None:
    """Return the problem of arrays by their NAMES; None where rows do not lie as the kernel reads them."""
    x, weight = layouts["x"], layouts["weight"]
    of_x, of_weight = (checks.row_strides(matrix, 1) for matrix in (x, weight))
    vectors = [layouts[name] for name in NAMES[2:] if name in layouts]
    if of_x is None or of_weight is None or of_x.inner or not all(map(checks.is_contiguous, vectors)):
        return None
    outs, cols = weight.shape
    return LinearProblem(
        norm,
        math.prod(x.shape[:-1]),
        cols,
        outs,
        x.dtype,
        ln_weight=layouts["ln_weight"].dtype if "ln_weight" in layouts else None,
        ln_bias=layouts["ln_bias"].dtype if "ln_bias" in layouts else None,
        bias="bias" in layouts,
        zero_centered_gamma=zero_centered_gamma,
        x_stride=of_x.row,
        weight_stride=of_weight.row,
        aligned=aligned,
    )
