"""Casts of matrices to FP8 by rows, columns and normalised columns: each byte is the nearest to value * q."""

from __future__ import annotations

from typing import Any, NamedTuple

import cpu_device
import float8_casts
import numpy
import pytest
from arrays import in_wider_rows
from cpu_device import ORDERS, Machine
from cpu_functions import FEW_SMS, MANY_SMS, SMALL, WITHOUT_CLUSTERS, unwritten
from float8_casts import (
    TYPES,
    cast_columns,
    cast_rows,
    check_columns,
    check_rows,
    largest_of,
    matrix,
    normalised,
    normalised_columns,
)

from cunorm.kernel.device import Device

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing() or "-")
OPERATIONS = ("layer_norm", "rms_norm", "zero_centered_layer_norm", "zero_centered_rms_norm")


class Run(NamedTuple):
    rows: int
    cols: int
    dtype: str
    device: Device
    reason: str


ROWS = (
    Run(1, 16, "bfloat16", SMALL, "a row of two vectors"),
    Run(70, 100, "float16", SMALL, "a warp a row, odd vectors, 16 rows a CTA"),
    Run(33, 1000, "bfloat16", FEW_SMS, "a warp of four vectors"),
    Run(9, 4096, "float16", FEW_SMS, "four warps a row"),
    Run(21, 3003, "float32", SMALL, "rows at odd addresses, partial vectors"),
    Run(7, 12288, "bfloat16", FEW_SMS, "a CTA a row"),
    Run(5, 28673, "bfloat16", SMALL, "a cluster of two, odd"),
    Run(3, 40000, "float32", MANY_SMS, "a cluster of eight"),
    Run(40, 17001, "bfloat16", WITHOUT_CLUSTERS, "streamed, odd"),
    Run(3, 9000, "float32", WITHOUT_CLUSTERS, "streamed"),
)


@needs_machine
@pytest.mark.parametrize("run", ROWS, ids=lambda run: run.reason)
def test_rows(run):
    """Bytes and scales are the same with and without sums and maxima of the columns."""
    dtype = "e5m2" if run.cols % 3 == 0 else "e4m3"
    a = matrix(run.rows, run.cols, run.dtype)
    rows = cast_rows(Machine(), a, dtype, device=run.device, sums=True, maxima=True)
    check_rows(a, rows, dtype)
    alone = cast_rows(Machine(), a, dtype, device=run.device)
    assert (alone.cast == rows.cast).all()
    assert (alone.scales == rows.scales).all()


@needs_machine
@pytest.mark.parametrize("options", [{"sums": True}, {"maxima": True}, {"power_of_2": True}, {"given": 0.01}], ids=str)
@pytest.mark.parametrize("run", [ROWS[1], ROWS[5], ROWS[8]], ids=lambda run: run.reason)
def test_options_of_rows(run, options):
    a = matrix(run.rows, run.cols, run.dtype)
    known = {name: options[name] for name in ("given", "power_of_2") if name in options}
    check_rows(a, cast_rows(Machine(), a, "e4m3", device=run.device, **options), "e4m3", **known)


@needs_machine
@pytest.mark.parametrize(("cols", "dtype"), [(130, "bfloat16"), (5000, "float32"), (17001, "float16")])
def test_what_is_not_finite_is_seen(cols, dtype):
    what_is_not_finite(Machine(), cols, dtype, SMALL)


def what_is_not_finite(machine: Machine, cols: int, dtype: str, device: Device) -> None:
    """Check that only the rows and columns with infinity or NaN have a NaN scale and a maximum that is not finite."""
    a = matrix(19, cols, dtype)
    a[3, cols - 1], a[7, 5], a[11, 17] = numpy.inf, numpy.nan, -numpy.inf
    rows = cast_rows(machine, a, "e4m3", device=device, sums=True, maxima=True)
    check_rows(a, rows, "e4m3")
    assert list(numpy.flatnonzero(numpy.isnan(rows.scales))) == [3, 7, 11]
    assert list(numpy.flatnonzero(~numpy.isfinite(rows.maxima))) == [5, 17, cols - 1]
    _, scales = cast_columns(machine, a, "e4m3", maxima=rows.maxima)
    assert list(numpy.flatnonzero(numpy.isnan(scales))) == [5, 17, cols - 1]


@needs_machine
def test_tiny_and_huge_numbers():
    """q is at most 2^100, and a row of zeros has the scale 1."""
    a = unwritten((4, 40), "float32")
    a[...] = numpy.linspace(-1, 1, 40)
    a *= numpy.float32([[1e-35], [0], [3e38], [1e-30]])
    for power_of_2 in (False, True):
        rows = cast_rows(Machine(), a, "e4m3", power_of_2=power_of_2)
        check_rows(a, rows, "e4m3", power_of_2=power_of_2)
        assert rows.scales is not None
        assert list(rows.scales[[0, 1, 3]]) == [numpy.float32(2.0**-100), 1, numpy.float32(2.0**-100)]


COLUMNS = (
    Run(16, 64, "bfloat16", SMALL, "a part of a tile"),
    Run(129, 65, "float16", SMALL, "a row and a column past a tile"),
    Run(500, 200, "bfloat16", FEW_SMS, "several tiles to a CTA"),
    Run(1, 33, "float32", SMALL, "one row"),
    Run(131, 1003, "float32", MANY_SMS, "odd columns"),
)


@needs_machine
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("run", COLUMNS, ids=lambda run: run.reason)
def test_columns(run, dtype):
    a = matrix(run.rows, run.cols, run.dtype)
    maxima = largest_of(a.astype("float32"), 0)
    for power_of_2 in (False, True):
        options = {"power_of_2": power_of_2}
        cast = cast_columns(Machine(), a, dtype, maxima=maxima, device=run.device, **options)
        check_columns(a.astype("float32"), *cast, maxima, dtype, **options)
    cast, _ = cast_columns(Machine(), a, dtype, given=0.02, device=run.device)
    check_columns(a.astype("float32"), cast, None, None, dtype, given=0.02)


@needs_machine
def test_padding_is_zero_whatever_the_scale():
    a = matrix(19, 40, "bfloat16")
    a[2, 7], a[3, 9] = numpy.nan, numpy.inf
    maxima = largest_of(a.astype("float32"), 0)
    cast = cast_columns(Machine(), a, "e5m2", maxima=maxima)
    check_columns(a.astype("float32"), *cast, maxima, "e5m2")


def rows_and_columns(machine: Machine, rows: int, cols: int, dtype: str) -> None:
    check_both(machine, matrix(rows, cols, dtype))


def check_both(machine: Machine, a: numpy.ndarray) -> None:
    rows = cast_rows(machine, a, "e4m3", sums=True, maxima=True)
    check_rows(a, rows, "e4m3")
    check_columns(a.astype("float32"), *cast_columns(machine, a, "e4m3", maxima=rows.maxima), rows.maxima, "e4m3")


def saved(x: numpy.ndarray, operation: str) -> tuple[Any, numpy.ndarray]:
    """Return (mean, rstd) as the forward pass keeps them."""
    exact = x.astype("float64")
    mean = exact.mean(1, keepdims=True) if "layer" in operation else numpy.zeros((len(x), 1))
    rstd = 1 / numpy.sqrt(numpy.square(exact - mean).mean(1) + 1e-5)
    return mean[:, 0].astype("float32") if "layer" in operation else None, rstd.astype("float32")


def parameters(cols: int, weight: str | None, bias: str | None) -> list[numpy.ndarray | None]:
    vectors: list[numpy.ndarray | None] = []
    for seed, dtype in enumerate((weight, bias)):
        vector = None
        if dtype:
            vector = unwritten(cols, dtype)
            vector[...] = numpy.random.default_rng(seed).standard_normal(cols).astype(vector.dtype)
            vector[:3] = 0
        vectors.append(vector)
    return vectors


@needs_machine
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "weight", "bias"),
    [
        (130, 96, "bfloat16", "bfloat16", "bfloat16"),
        (45, 131, "float16", "float32", None),
        (20, 50, "float32", None, "float16"),
        (17, 40, "bfloat16", None, None),
    ],
)
def test_normalised_columns(operation, rows, cols, dtype, weight, bias):
    """The scale of a column follows from weight and bias, so it is known before x is."""
    x = matrix(rows, cols, dtype)
    gamma, beta = parameters(cols, weight, bias)
    mean, rstd = saved(x, operation)
    z, bound = normalised(x, mean, rstd, gamma, beta, operation)
    for name, power_of_2 in zip(TYPES, (False, True), strict=True):
        cast, scales = normalised_columns(Machine(), x, mean, rstd, gamma, beta, operation, name, power_of_2=power_of_2)
        check_columns(z, cast, scales, bound, name, power_of_2=power_of_2)
    assert (abs(z) <= bound * (1 + 2**-20)).all()


def normalised_ones(machine: Machine, operation: str) -> None:
    x = matrix(45, 131, "bfloat16")
    gamma, beta = parameters(131, "float32", "float32" if "layer" in operation else None)
    mean, rstd = saved(x, operation)
    z, bound = normalised(x, mean, rstd, gamma, beta, operation)
    cast, scales = normalised_columns(machine, x, mean, rstd, gamma, beta, operation, "e4m3")
    check_columns(z, cast, scales, bound, "e4m3")


@needs_machine
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_bound_is_met(operation):
    """A column with one large number in each row reaches the bound: its bytes are the largest of the format."""
    x = unwritten((16, 64), "float32")
    x[...] = 0
    x[:, 5] = 1e6
    gamma, beta = parameters(64, "float32", "float32")
    assert gamma is not None
    assert beta is not None
    beta[:] = abs(beta) * numpy.sign(gamma + operation.startswith("zero"))
    mean, rstd = saved(x, operation)
    cast, _ = normalised_columns(Machine(), x, mean, rstd, gamma, beta, operation, "e4m3")
    assert set(cast[5] & 0x7F) == {0x7E}


def layouts(rows: int, cols: int, dtype: str) -> dict[str, numpy.ndarray]:
    a = matrix(rows, cols, dtype)
    vector_cols = 16 // a.itemsize
    shifted = unwritten(rows * cols + 1, dtype)[1:].reshape(rows, cols)
    shifted[...] = a
    views = {"wider rows": in_wider_rows(a, vector_cols), "wider by one": in_wider_rows(a, 1)}
    for view in views.values():
        view.base[:, cols:] = numpy.nan
    return views | {"misplaced": shifted}


@needs_machine
@pytest.mark.parametrize("build", ["results", "memory"])
@pytest.mark.parametrize("name", layouts(2, 2, "float32"))
@pytest.mark.parametrize(("rows", "cols", "dtype"), [(21, 136, "float16"), (9, 1000, "float32")])
def test_layouts(rows, cols, dtype, name, build):
    a = layouts(rows, cols, dtype)[name]
    check_both(Machine(build), a)


@needs_machine
@pytest.mark.parametrize("build", ["memory", "races"])
@pytest.mark.parametrize("run", [ROWS[1], ROWS[3], ROWS[6], ROWS[8]], ids=lambda run: run.reason)
def test_sanitizers_find_nothing(run, build):
    a = matrix(run.rows, run.cols, run.dtype)
    for order in ORDERS:
        cast_rows(Machine(build, order), a, "e4m3", device=run.device, sums=True, maxima=True)
    columns = numpy.ascontiguousarray(a[:, :150])
    maxima = largest_of(columns.astype("float32"), 0)
    cast_columns(Machine(build), columns, "e4m3", maxima=maxima)


@needs_machine
@pytest.mark.parametrize(
    ("dtype", "y", "bias", "cols"),
    [
        ("float32", "bfloat16", "bfloat16", 4096),
        ("bfloat16", "bfloat16", None, 48),
        ("float32", "float32", "float16", 37),
    ],
)
def test_scales_of_a_product(dtype, y, bias, cols):
    random = numpy.random.default_rng(0)
    product = matrix(5, cols, dtype)
    row_scale, column_scale = unwritten(5, "float32"), unwritten(cols, "float32")
    row_scale[...], column_scale[...] = random.random(5), random.random(cols)
    _, beta = parameters(cols, None, bias)
    actual = unwritten((5, cols), y)
    float8_casts.scaled(Machine(), product, row_scale, column_scale, beta, actual)
    exact = product.astype("float32") * row_scale[:, None] * column_scale
    exact = exact if beta is None else exact + beta.astype("float32")
    assert (actual == exact.astype(actual.dtype)).all()
