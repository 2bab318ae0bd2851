"""The norms with FP8 output: bytes are the nearest to y * q, scales are right, and rows do not depend on others."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import ml_dtypes
import numpy
import pytest
from arrays import in_wider_rows, inputs, on_host, same_bits
from cpu_functions import MANY_SMS, MANY_WITHOUT_CLUSTERS, SMALL, WITHOUT_CLUSTERS
from functions import OPS

import cunorm
from cunorm.kernel.device import Device

GRANULARITIES = ("row", 128, "tensor")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing() or "-")


def float8(op: str, x: Any, weight: Any = None, bias: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return (bytes, scale, y)."""
    if op == "layer_norm":
        return cunorm.layer_norm_fp8_forward(x, None, weight, bias, **options)
    return cunorm.rms_norm_fp8_forward(x, None, weight, **options)


def wide(op: str, x: Any, weight: Any = None, bias: Any = None, **options: Any) -> numpy.ndarray:
    """Return y in float32, as it is before it is rounded to 8 bits."""
    parameters = (weight, bias) if op == "layer_norm" else (weight,)
    return on_host(getattr(cunorm, op)(x, None, *parameters, dtype="float32", **options))


def blocks(y: numpy.ndarray, granularity: str | int) -> numpy.ndarray:
    """Return y as [rows, blocks, columns that share a scale], with zeros behind the last column."""
    rows, cols = y.shape
    width = granularity if isinstance(granularity, int) else cols
    return numpy.pad(y, ((0, 0), (0, -cols % width))).reshape(rows, -1, width)


def check(y: numpy.ndarray, y8: Any, scale: Any, granularity: str | int, dtype: str) -> None:
    """Check every byte against the definition, from float32 y, and scales within 1 ulp."""
    y8, scale = on_host(y8), on_host(scale)
    assert (y8.dtype, y8.shape, scale.dtype) == (numpy.uint8, y.shape, numpy.float32)
    largest_number = numpy.float32(LARGEST[dtype])
    if granularity == "tensor":
        multiplier = numpy.float32(1) / scale.reshape(1, 1)
    else:
        largest = abs(blocks(y, granularity)).max(axis=2)
        assert scale.size == largest.size
        expected = numpy.where(largest == 0, 1, largest.astype(numpy.float64) / largest_number)
        numpy.testing.assert_allclose(scale.reshape(largest.shape), expected, rtol=2**-23)
        with numpy.errstate(divide="ignore"):
            multiplier = numpy.minimum(largest_number / largest, numpy.float32(2**100))
    with numpy.errstate(over="ignore"):
        scaled = blocks(y, granularity) * multiplier[:, :, None]
    scaled = numpy.clip(scaled, -largest_number, largest_number).reshape(len(y), -1)[:, : y.shape[1]]
    wrong = numpy.argwhere(scaled.astype(TYPES[dtype]).view(numpy.uint8) != y8)
    assert len(wrong) == 0, f"{len(wrong)} bytes of {y8.size} are wrong, the first at {wrong[0]}"


class Run(NamedTuple):
    rows: int
    cols: int
    dtype: str
    device: Device
    reason: str


RUNS = (
    Run(300, 7, "bfloat16", SMALL, "a lane a row"),
    Run(9, 100, "float16", SMALL, "two lanes a row, odd"),
    Run(9, 224, "bfloat16", SMALL, "four lanes of seven vectors, two of them to a block"),
    Run(40, 768, "float16", SMALL, "a warp a row, whole blocks"),
    Run(7, 1601, "bfloat16", SMALL, "a warp of seven vectors, odd"),
    Run(12, 1024, "float32", SMALL, "a block to a warp"),
    Run(3, 4096, "bfloat16", SMALL, "a CTA a row"),
    Run(270, 1000, "float16", SMALL, "many rows, unpacked by a warp each"),
    Run(70, 4096, "bfloat16", SMALL, "many rows, RMSNorm's unpacked by a CTA each"),
    Run(18, 16384, "bfloat16", SMALL, "many rows in three places"),
    Run(131, 2048, "bfloat16", SMALL, "many rows, by two, and the last alone"),
    Run(48, 5640, "float16", SMALL, "many rows, by two, some threads without a third vector"),
    Run(3, 10240, "bfloat16", SMALL, "a full shape of five vectors"),
    Run(9, 10248, "bfloat16", MANY_SMS, "a cluster of 4 for few rows"),
    Run(2, 12300, "float32", SMALL, "a CTA, the last block of 12 columns"),
    Run(3, 16393, "bfloat16", MANY_SMS, "few rows, odd"),
    Run(4, 65537, "float16", SMALL, "a cluster that takes several rows, odd"),
    Run(3, 131080, "bfloat16", SMALL, "a cluster of 4 that takes several rows"),
    Run(2, 40010, "float32", WITHOUT_CLUSTERS, "streamed, odd"),
    Run(90, 32792, "float32", MANY_WITHOUT_CLUSTERS, "streamed, several rows a CTA"),
)


# One scale for all is the simplest: no maximum is looked for. Every second run has it, of each sort of kernel one.
@needs_machine
@pytest.mark.parametrize(
    ("run", "granularity"),
    [*product(RUNS, GRANULARITIES[:2]), *product(RUNS[::2], GRANULARITIES[2:])],
    ids=lambda value: value.reason if isinstance(value, Run) else str(value),
)
def test_the_kernels_on_the_stand_in(monkeypatch, run, granularity):
    check_on_stand_in(monkeypatch, run, granularity, cpu_device.Machine())


@needs_machine
@pytest.mark.parametrize("dtype", TYPES)
def test_the_edges_on_the_stand_in(monkeypatch, dtype):
    cpu_cupy.play(monkeypatch, SMALL)
    check_rounding(cpu_cupy.asarray, dtype)
    check_edges(cpu_cupy.asarray, 1000, "row" if dtype == "e4m3" else 128)


def check_on_stand_in(monkeypatch: Any, run: Run, granularity: str | int, machine: cpu_device.Machine) -> None:
    cpu_cupy.play(monkeypatch, run.device, machine)
    for op, dtype in zip(OPS, TYPES, strict=True):
        x, _, weight, bias = map(cpu_cupy.asarray, inputs(numpy, run.rows, run.cols, run.dtype))
        y8, scale, y = float8(op, x, weight, bias, granularity=granularity, dtype=dtype)
        check(wide(op, x, weight, bias), y8, scale, granularity, dtype)
        assert same_bits(on_host(y), on_host(getattr(cunorm, op)(x, None, *(weight, bias)[: 2 if op == OPS[0] else 1])))


@needs_machine
@pytest.mark.parametrize("build", ["memory", "races"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("cols", [33, 1600, 5001])
def test_sanitizers_find_nothing(monkeypatch, cols, granularity, build):
    cpu_cupy.play(monkeypatch, SMALL, cpu_device.Machine(build))
    x, _, weight, bias = map(cpu_cupy.asarray, inputs(numpy, 5, cols, "float16"))
    float8("layer_norm", x, weight, bias, granularity=granularity)


CASES = [(1, 1), (40, 24), (33, 1000), (8, 4096), (5, 20000), (2, 300000)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("rows", "cols"), CASES)
@pytest.mark.parametrize("op", OPS)
def test_bytes_and_scales(xp, op, rows, cols, granularity, dtype):
    for kind in ("bfloat16", "float32"):
        x, _, weight, bias = inputs(xp, rows, cols, kind, weight="float32")
        options = {"zero_centered_gamma": kind == "float32"}
        y8, scale, y = float8(op, x, weight, bias, granularity=granularity, dtype=dtype, **options)
        check(wide(op, x, weight, bias, **options), y8, scale, granularity, dtype)
        assert (type(y8), y.dtype) == (type(x), x.dtype)
        again = getattr(cunorm, f"{op}_fp8")(
            x, None, *(weight, bias)[: 2 if op == "layer_norm" else 1], granularity=granularity, dtype=dtype, **options
        )
        assert all(same_bits(a, b) for a, b in zip(again, (y8, scale), strict=True))


def check_edges(asarray: Any, cols: int, granularity: str | int) -> None:
    """Check rows of zeros, of tiny numbers, and of infinity and NaN. Their scale is NaN, as saturation hides them."""
    x = numpy.ones((5, cols), "float32")
    x[1], x[2, -1], x[3, 0] = 0, numpy.inf, numpy.nan
    weight = numpy.linspace(-1, 1, cols, dtype="float32")
    options = {"granularity": granularity}
    y8, scale = map(on_host, cunorm.rms_norm_fp8(asarray(x), None, asarray(weight), **options))
    scale = scale.reshape(5, -1)
    assert (scale[1] == 1).all(), "the scale of zeros"
    assert not (y8[1] & 0x7F).any()
    assert numpy.isnan(scale[2]).any(), "an infinite x makes NaN of it"
    assert numpy.isnan(scale[3]).all(), "the scale of NaN"
    assert numpy.isfinite(scale[[0, 4]]).all()
    assert same_bits(y8[0], y8[4])
    x = asarray(inputs(numpy, 3, cols, "float32").x)
    weight[:] = numpy.inf
    _, scale = map(on_host, cunorm.rms_norm_fp8(x, None, asarray(weight), **options))
    assert numpy.isnan(scale).all(), "the scale of infinity"
    weight[:] = 1e-30
    _, scale = map(on_host, cunorm.rms_norm_fp8(x, None, asarray(weight), **options))
    assert (scale == numpy.float32(2.0**-100)).all(), "the scale of tiny numbers"


@pytest.mark.parametrize("granularity", ["row", 128])
@pytest.mark.parametrize("cols", [24, 1000, 20000])
def test_rows_at_the_edges(xp, cols, granularity):
    check_edges(xp.asarray, cols, granularity)


def check_rounding(asarray: Any, dtype: str) -> None:
    """Check every number of the format, every tie, their neighbours, and numbers that are too large.

    The weight is zeros, so that y is the bias, which has these numbers.
    """
    numbers = numpy.arange(128, dtype=numpy.uint8).view(TYPES[dtype]).astype("float32")
    numbers = numbers[numpy.isfinite(numbers)]
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = numpy.concatenate([numbers, ties, numpy.float32([LARGEST[dtype] * 1.04, LARGEST[dtype] * 2, 3e38])])
    values = numpy.concatenate([values, *(numpy.nextafter(values, numpy.float32(to)) for to in (-1, 1e38))])
    values = values[(values == 0) | (abs(values) >= 2.0**-126)]  # kernels flush smaller ones to zero
    values = numpy.concatenate([values, -values[values != 0]])
    x = inputs(numpy, 2, len(values), "float32").x
    arrays = map(asarray, (x, numpy.zeros_like(values), values))
    x, weight, bias = arrays
    y8, scale = cunorm.layer_norm_fp8(x, None, weight, bias, granularity="tensor", scale=1.0, dtype=dtype)
    check(numpy.stack([values, values]), y8, scale, "tensor", dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_to_the_nearest_and_of_two_to_the_even(xp, dtype):
    check_rounding(xp.asarray, dtype)


@pytest.mark.parametrize("op", OPS)
def test_no_value_exceeds_the_scale_that_is_known_beforehand(xp, op):
    """A row with one number that differs comes nearest to the bound."""
    x = numpy.zeros((1, 1000), "float32")
    x[0, 3] = 1e4
    weight, bias = (xp.asarray(numpy.full(1000, value, "float32")) for value in (2.0, 1.5))
    y8, scale, _ = float8(op, xp.asarray(x), weight, bias, granularity="tensor", eps=0.0)
    largest = abs(wide(op, xp.asarray(x), weight, bias, eps=0.0)).max()
    assert 0.999 < largest / (448 * float(scale)) < 1 + 2**-20
    assert on_host(y8)[0, 3] == 0x7E


@pytest.mark.parametrize("scale", [0.01, "array"])
def test_a_scale_that_is_given(xp, scale):
    x = inputs(xp, 9, 1000, "float16").x
    given = xp.asarray(numpy.array([0.001], "float32")) if scale == "array" else scale
    y8, used = cunorm.layer_norm_fp8(x, granularity="tensor", scale=given)
    check(wide("layer_norm", x), y8, used, "tensor", "e4m3")
    assert float(used) == numpy.float32(0.001 if scale == "array" else scale)


@pytest.mark.parametrize("granularity", ["row", 128])
@pytest.mark.parametrize("cols", [100, 1000, 4096, 16393, 40000])
def test_a_row_does_not_know_the_others(xp, cols, granularity):
    x, _, weight, bias = inputs(xp, 300, cols, "bfloat16")
    whole = float8("layer_norm", x, weight, bias, granularity=granularity)
    for rows, first, last in ((x, 0, 1), (x, 7, 37), (in_wider_rows(x, 5), 5, 205)):
        part = float8("layer_norm", rows[first:last], weight, bias, granularity=granularity)
        assert all(same_bits(a, b[first:last]) for a, b in zip(part, whole, strict=True))


def test_any_number_of_axes(xp):
    x, _, weight, bias = inputs(xp, 6, 60, "float32")
    flat = cunorm.layer_norm_fp8(x, None, weight, bias)
    y8, scale = cunorm.layer_norm_fp8(x.reshape(2, 3, 5, 12), None, weight.reshape(5, 12), bias.reshape(5, 12))
    assert (y8.shape, scale.shape) == ((2, 3, 5, 12), (2, 3))
    assert same_bits(y8.reshape(6, 60), flat[0])
    y8, scale = cunorm.layer_norm_fp8(x[:0], None, weight, bias, granularity=128)
    assert (y8.shape, scale.shape) == ((0, 60), (0, 1))


WRONG = [
    ({"dtype": "float16"}, TypeError, "dtype must be 'e4m3' or 'e5m2'"),
    ({"granularity": "block"}, ValueError, "granularity must be 'row', 'tensor' or 128"),
    ({"granularity": 64}, ValueError, "granularity must be"),
    ({"granularity": [1, 128]}, ValueError, "granularity must be"),
    ({"scale": 1.0}, ValueError, "scale is for granularity='tensor'"),
    ({"granularity": "tensor", "scale": 0.0}, ValueError, "positive and finite"),
    ({"granularity": "tensor", "scale": numpy.ones(2, "float32")}, TypeError, "one float32"),
    ({"eps": -1.0}, ValueError, "eps must be finite"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said(xp, options, error, message):
    with pytest.raises(error, match=message):
        cunorm.layer_norm_fp8(xp.ones((2, 32), "float32"), **options)


def test_other_arrays_are_refused(xp):
    with pytest.raises(TypeError, match="float16, bfloat16 or float32; got float64"):
        cunorm.rms_norm_fp8(xp.ones((2, 32)))
    with pytest.raises(TypeError, match="x must be"):
        cunorm.rms_norm_fp8([1.0, 2.0])
