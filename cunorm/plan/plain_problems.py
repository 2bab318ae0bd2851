"""The problems of plain LayerNorm and RMSNorm, by the dtypes of their arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..operation import NAMED, name_of
from .problem import ITEMSIZE, SCALES, Problem, RowStrides, backward_problem, forward_problem

# The arguments of a plain pass, in the order in which the frameworks gather them.
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
    """Return a pass of one of NAMED, by dtypes. `y` is the dtype of y or dy, by default that of x.

    dweight and dbias have the dtype of weight, or that of x without a weight.
    """
    operation = NAMED[name_of(norm, zero_centered_gamma)]
    parameters = {"weight": weight, "bias": bias}
    dtypes = {"x": dtype} | {name: parameter for name, parameter in parameters.items() if parameter}
    if direction == "forward":
        dtypes |= {"y": y or dtype}
        return forward_problem(operation, rows, cols, dtypes, strides=strides, sm_margin=sm_margin, aligned=aligned)
    dtypes |= {"dy": y or dtype, "dweight": weight or dtype, "dbias": weight or dtype}
    problem = backward_problem(
        operation, rows, cols, dtypes, wanted, strides=strides, sm_margin=sm_margin, aligned=aligned
    )
    return replace(problem, overwrites=overwrites)


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
    """Return the forward pass of one of NAMED with FP8 output and its scales, and with y too if its dtype is given."""
    dtypes = {"x": dtype, "weight": weight, "bias": bias, "y8": y8, "y": y}
    return forward_problem(
        NAMED[name_of(norm, zero_centered_gamma)],
        rows,
        cols,
        {name: array_dtype for name, array_dtype in dtypes.items() if array_dtype},
        kinds={"y8_scale": SCALES[granularity]},
        strides={} if x_rows is None else {"x": x_rows},
        sm_margin=sm_margin,
        aligned=aligned,
    )


def whole(
    norm: str, direction: str, rows: int, cols: int, dtype: str, weight: str | None = None, y: str | None = None
) -> Problem:
    """Return the plain pass with weight, with bias if the norm has one, and with every gradient."""
    weight = weight or dtype
    if norm == "rms_norm":
        return plain(norm, direction, rows, cols, dtype, weight, y=y, wanted=("x", "weight"))
    return plain(norm, direction, rows, cols, dtype, weight, weight if direction == "forward" else None, y=y)


def with_every_gradient(problem: Problem, *, own_dtypes: bool = False) -> Problem:
    """Return the plain backward pass of a row like those of the problem, with every gradient that the norm has.

    The weight has the dtype of the widest vector that the problem reads. With `own_dtypes` dy has the problem's dtype,
    and there is a weight only if the problem reads a vector; else dy has that of x.
    """
    columns = [column.dtype for column in problem.operands.read if column.kind == "column"]
    widest = max(columns, key=lambda dtype: ITEMSIZE[dtype], default=None if own_dtypes else problem.row_dtype)
    wanted = ("x", "weight", "bias") if problem.norm.subtracts_mean else ("x", "weight")
    dy = problem.by_name["dy"].dtype if own_dtypes else problem.row_dtype
    norm, cols, dtype = problem.operation.norm, problem.cols, problem.row_dtype
    return plain(norm, "backward", 1, cols, dtype, widest, y=dy, wanted=wanted)
