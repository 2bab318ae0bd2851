"""Casts of matrices to FP8: their definition in NumPy, and the kernels on a Machine of cpu_device.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy
from cpu_device import Machine
from cpu_functions import SMALL, aligned, row_stride, unwritten

from cunorm.call.store import NAMES
from cunorm.kernel.device import Device
from cunorm.linear.float8_plan import (
    ColumnsProblem,
    ProductProblem,
    RowsProblem,
    plan_columns,
    plan_product,
    plan_rows,
)
from cunorm.linear.float8_spec import padded
from cunorm.operation import NAMED, NORMS

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def matrix(rows: int, cols: int, dtype: str, seed: int = 0) -> numpy.ndarray:
    """Return a matrix whose rows and columns have many magnitudes, with one row and one column of zeros."""
    random = numpy.random.default_rng(seed)
    values = random.standard_normal((rows, cols))
    values *= numpy.exp(random.standard_normal((rows, 1)) + random.standard_normal(cols))
    array = unwritten((rows, cols), dtype)
    array[...] = values.astype(array.dtype)
    array[rows // 2], array[:, cols // 3] = 0, 0
    return array


def multipliers(largest: numpy.ndarray, dtype: str, power_of_2: bool = False) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return (q, scale) for these largest values. A value times q is rounded, and a byte times scale is the value."""
    number = numpy.float32(LARGEST[dtype])
    with numpy.errstate(all="ignore"):
        q = numpy.minimum(number / largest, numpy.float32(2.0**100))
        if power_of_2:
            q = numpy.where(numpy.isfinite(q), numpy.exp2(numpy.floor(numpy.log2(q.astype("float64")))), q)
        scale = (1 / q.astype("float64")) if power_of_2 else largest.astype("float64") / number
        scale = numpy.maximum(scale, 2.0**-100)
        scale = numpy.where(largest == 0, 1, numpy.where(numpy.isfinite(largest), scale, numpy.nan))
    return q.astype("float32"), scale


def rounded(values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """Return the nearest FP8 numbers, as float32."""
    with numpy.errstate(all="ignore"):
        return numpy.clip(values, -LARGEST[dtype], LARGEST[dtype]).astype(TYPES[dtype]).astype("float32")


def check_bytes(actual: numpy.ndarray, values: numpy.ndarray, q: Any, dtype: str) -> None:
    """Check every byte. One NaN is as good as another, and so is a zero of either sign."""
    assert (actual.dtype, actual.shape) == (numpy.uint8, values.shape)
    with numpy.errstate(all="ignore"):
        expected = rounded(values * q, dtype)
    got = actual.view(TYPES[dtype]).astype("float32")
    same = (got == expected) | (got != got) & (expected != expected)
    wrong = numpy.argwhere(~same)
    assert len(wrong) == 0, f"{len(wrong)} bytes of {actual.size} are wrong, the first at {wrong[0]}"


def check_scales(actual: numpy.ndarray, expected: numpy.ndarray) -> None:
    assert actual.dtype == numpy.float32
    numpy.testing.assert_allclose(actual, expected, rtol=2**-23, err_msg="scales")


class Rows(NamedTuple):
    """A matrix that was cast by rows: its bytes, the scales of rows, the sums and maxima of columns."""

    cast: numpy.ndarray
    scales: numpy.ndarray | None
    sums: numpy.ndarray | None
    maxima: numpy.ndarray | None


def check_rows(a: numpy.ndarray, rows: Rows, dtype: str, *, given: Any = None, power_of_2: bool = False) -> None:
    """Check bytes and scales by rows, and sums and maxima of columns against float64."""
    values = a.astype("float32")
    if given is None:
        q, scales = multipliers(largest_of(values, 1), dtype, power_of_2)
        assert rows.scales is not None
        check_scales(rows.scales, scales)
        check_bytes(rows.cast, values, q[:, None], dtype)
    else:
        check_bytes(rows.cast, values, numpy.float32(1) / numpy.float32(given), dtype)
    exact = a.astype("float64")
    with numpy.errstate(invalid="ignore"):
        if rows.sums is not None:
            bound = abs(exact).sum(0) * 2**-23 * (3 + numpy.log2(len(a)) + len(a) / 16)
            wrong = ~(abs(rows.sums - exact.sum(0)) <= bound) & numpy.isfinite(exact.sum(0))
            assert not wrong.any(), f"the sums of columns {numpy.flatnonzero(wrong)[:5]} are wrong"
            assert not numpy.isfinite(rows.sums[~numpy.isfinite(exact.sum(0))]).any(), "a sum should not be finite"
    if rows.maxima is not None:
        numpy.testing.assert_array_equal(rows.maxima, largest_of(values, 0), err_msg="maxima of columns")


def largest_of(values: numpy.ndarray, axis: int) -> numpy.ndarray:
    """Return max|value| along an axis, which is NaN if a value is."""
    return abs(values).max(axis=axis, initial=0).astype("float32")


def check_columns(
    values: numpy.ndarray, actual: numpy.ndarray, scales: Any, largest: Any, dtype: str, *, given: Any = None, **options
) -> None:
    """Check bytes and scales by columns of float32 values (rows, cols), and the zeros behind the rows."""
    rows, cols = values.shape
    assert actual.shape == (cols, padded(rows))
    assert not actual[:, rows:].any(), "padding is zero"
    if given is None:
        q, expected = multipliers(largest, dtype, **options)
        check_scales(scales, expected)
    else:
        q = numpy.full(cols, numpy.float32(1) / numpy.float32(given))
    check_bytes(numpy.ascontiguousarray(actual[:, :rows].T), values, q, dtype)


def normalised(
    x: numpy.ndarray, mean: Any, rstd: numpy.ndarray, weight: Any, bias: Any, operation: str
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return z in float32, rounded as the kernel rounds it, and the bound of |z| for each column."""
    gamma = numpy.float32(1) if weight is None else weight.astype("float32")
    if operation.startswith("zero") and weight is not None:
        gamma = gamma + numpy.float32(1)
    beta = numpy.float32(0) if bias is None else bias.astype("float32")
    cols = x.shape[1]
    root = numpy.sqrt(numpy.float32(max(1, cols - 1) if NORMS[NAMED[operation].norm].subtracts_mean else cols))
    xhat = x.astype("float32")
    xhat = (xhat - mean[:, None] if mean is not None else xhat) * rstd[:, None]

    def fused(a, b, c):  # a * b + c, rounded once, except for one case in 2^29
        return (a.astype("float64") * b + c).astype("float32")

    bound = fused(numpy.full(cols, root), numpy.float64(1) * abs(gamma), numpy.float64(1) * abs(beta))
    return fused(xhat, numpy.float64(1) * gamma, numpy.float64(1) * beta), bound


# On the stand-in.


def cast_rows(
    machine: Machine, a: numpy.ndarray, dtype: str, *, device: Device = SMALL, given: Any = None, **options: bool
) -> Rows:
    rows, cols = a.shape
    problem = RowsProblem(
        rows, cols, a.dtype.name, NAMES[dtype], row_stride(a), aligned(a), given=given is not None, **options
    )
    results = Rows(
        unwritten((rows, cols), "uint8"),
        None if given is not None else unwritten(rows, "float32"),
        unwritten(cols, "float32") if problem.sums else None,
        unwritten(cols, "float32") if problem.maxima else None,
    )
    known = {} if given is None else {"given": numpy.full(1, given, "float32")}
    arrays = {"bytes": results.cast, "scales": results.scales, "sums": results.sums, "maxima": results.maxima}
    run(machine, plan_rows(problem, device), a=a, **arrays, **known)
    return results


def cast_columns(
    machine: Machine,
    a: numpy.ndarray,
    dtype: str,
    *,
    maxima: Any = None,
    given: Any = None,
    power_of_2: bool = False,
    device: Device = SMALL,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    rows, cols = a.shape
    problem = ColumnsProblem(
        rows, cols, a.dtype.name, NAMES[dtype], row_stride(a), aligned(a), given is not None, power_of_2
    )
    cast, scales = unwritten((cols, padded(rows)), "uint8"), unwritten(cols, "float32")
    known = {"maxima": maxima, "scales": scales} if given is None else {"given": numpy.full(1, given, "float32")}
    run(machine, plan_columns(problem, device), a=a, bytes=cast, **known)
    return cast, scales


def normalised_columns(
    machine: Machine,
    x: numpy.ndarray,
    mean: Any,
    rstd: numpy.ndarray,
    weight: Any,
    bias: Any,
    operation: str,
    dtype: str,
    *,
    power_of_2: bool = False,
    device: Device = SMALL,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    rows, cols = x.shape
    given = {name: parameter for name, parameter in (("weight", weight), ("bias", bias)) if parameter is not None}
    problem = ColumnsProblem(
        rows,
        cols,
        x.dtype.name,
        NAMES[dtype],
        row_stride(x),
        aligned(x),
        power_of_2=power_of_2,
        operation=NAMED[operation].given(given),
        affine=tuple((name, parameter.dtype.name) for name, parameter in given.items()),
        affine_aligned=aligned(*given.values()),
    )
    cast, scales = unwritten((cols, padded(rows)), "uint8"), unwritten(cols, "float32")
    statistics = {"rstd": rstd} | ({} if mean is None else {"mean": mean})
    run(machine, plan_columns(problem, device), a=x, bytes=cast, scales=scales, **given, **statistics)
    return cast, scales


def scaled(
    machine: Machine, product: numpy.ndarray, row_scale: Any, column_scale: Any, bias: Any, y: numpy.ndarray
) -> None:
    name = None if bias is None else bias.dtype.name
    fits = aligned(product, column_scale, bias, y)
    problem = ProductProblem(*product.shape, product.dtype.name, y.dtype.name, name, fits)
    known = {} if bias is None else {"bias": bias}
    arrays = {"product": product, "row_scale": row_scale, "column_scale": column_scale}
    run(machine, plan_product(problem, SMALL), **arrays, **known, y=y)


def run(machine: Machine, plan: Any, **arrays: Any) -> None:
    assert {name for name, array in arrays.items() if array is not None} == set(plan.problem.pointers)
    machine.run(plan, {}, **arrays)
