"""The problems of LayerNorm and RMSNorm with nothing before or after them, by the dtypes of their arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..operation import NAMED, name_of
from .problem import ITEMSIZE, SCALES, Problem, RowStrides, backward_problem, forward_problem

# What a plain pass takes, in the order in which the frameworks gather it.
FORWARD = ("x", "weight", "bias", "y", "mean", "rstd", "eps")
BACKWARD = ("dy", "x", "mean", "rstd", "weight", "dx", "dweight", "dbias")


def plain(
    norm: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: str,
    weight: str | None = None,
    bias: str | None = None,
    *,
    y: str | None = None,
    zero_centered_gamma: bool = False,
    wanted: Collection[str] = ("x", "weight", "bias"),
    strides: Mapping[str, int | RowStrides] | None = None,
    sm_margin: int = 0,
    aligned: bool = True,
    overwrites: bool = False,
) -> Problem:
    """A pass of one of NAMED, by dtypes; `y` is that of y or of dy, by default that of x.

    dweight and dbias have the dtype of weight, without one that of x.
    """
    operation = NAMED[name_of(norm, zero_centered_gamma)]
    dtypes = {"x": dtype, "y" if direction == "forward" else "dy": y or dtype}
    dtypes |= {name: one for name, one in (("weight", weight), ("bias", bias)) if one}
    if direction == "forward":
        return forward_problem(operation, rows, cols, dtypes, strides=strides, sm_margin=sm_margin, aligned=aligned)
    dtypes |= {"dweight": weight or dtype, "dbias": weight or dtype}
    found = backward_problem(
        operation, rows, cols, dtypes, wanted, strides=strides, sm_margin=sm_margin, aligned=aligned
    )
    return replace(found, overwrites=overwrites)


def float8_problem(
    norm: str,
    rows: int,
    cols: int,
    dtype: str,
    weight: str | None = None,
    bias: str | None = None,
    *,
    y8: str,
    granularity: str | int,
    y: str | None = None,
    zero_centered_gamma: bool = False,
    x_rows: int | RowStrides | None = None,
    sm_margin: int = 0,
    aligned: bool = True,
) -> Problem:
    """The forward pass of one of NAMED with FP8 output and its scales; with y too, in the dtype that is given."""
    named = {"x": dtype, "weight": weight, "bias": bias, "y8": y8, "y": y}
    return forward_problem(
        NAMED[name_of(norm, zero_centered_gamma)],
        rows,
        cols,
        {name: one for name, one in named.items() if one},
        kinds={"y8_scale": SCALES[granularity]},
        strides={} if x_rows is None else {"x": x_rows},
        sm_margin=sm_margin,
        aligned=aligned,
    )


def whole(
    norm: str, direction: str, rows: int, cols: int, dtype: str, weight: str | None = None, y: str | None = None
) -> Problem:
    """`plain` with weight, with bias where there is one, and with every gradient; contiguous and aligned."""
    weight = weight or dtype
    if norm == "rms_norm":
        return plain(norm, direction, rows, cols, dtype, weight, y=y, wanted=("x", "weight"))
    return plain(norm, direction, rows, cols, dtype, weight, weight if direction == "forward" else None, y=y)


def every_gradient(problem: Problem, *, own_dtypes: bool = False) -> Problem:
    """The backward pass of such a row with every gradient of the norm: of what a row's shape depends on, what takes the
    most. Beside dy and weight of the problem's own dtypes, or dy like x and a weight as wide as the widest vector that
    it reads.
    """
    columns = [one.dtype for one in problem.operands if one.kind == "column" and not one.written]
    widest = max(columns, key=lambda dtype: ITEMSIZE[dtype], default=None if own_dtypes else problem.row_dtype)
    wanted = ("x", "weight", "bias") if problem.norm.subtracts_mean else ("x", "weight")
    dy = problem.by_name["dy"].dtype if own_dtypes else problem.row_dtype
    norm, cols, dtype = problem.operation.norm, problem.cols, problem.row_dtype
    return plain(norm, "backward", 1, cols, dtype, widest, y=dy, wanted=wanted)
