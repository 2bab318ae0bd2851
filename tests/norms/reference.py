"""The norms and their gradients in wide arithmetic, and how near to them a result must be.

All arrays are matrices of rows, NumPy or CuPy. The wide format is float64, or NumPy's longdouble for float64 arrays.
The reference starts from the inputs as they are after their rounding to 16 or 32 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy

Array = Any

# dtype: (bits of precision, least exponent of a normal number)
FORMATS = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126), "float64": (53, -1022)}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}

FORWARD_ULPS = 4
MEAN_ULPS = 4
RSTD_ULPS = 4
BACKWARD_ULPS = 8
SUM_ULPS = 4
PROMISED_OFFSET = 1e4  # up to this |mean| / std the accuracy of a 16-bit dx is promised, as the saved mean is float32

# CuPy computes the reference of a CuPy array with more elements than this, and NumPy that of a smaller one.
ON_GPU_ABOVE = 2**22


def module_of(array: Array) -> Any:
    """Return the module of an array: numpy or cupy."""
    if isinstance(array, numpy.ndarray | numpy.generic):
        return numpy
    import cupy

    return cupy


def widen(array: Array) -> Array:
    """Return the same values in wide format."""
    xp = module_of(array)
    if array.dtype.name == "bfloat16":
        bits = array.view(numpy.uint16).astype(numpy.uint32) << 16
        return bits.view(numpy.float32).astype(numpy.float64)
    if array.dtype.name == "float64" and xp is not numpy:
        raise ValueError("CuPy has nothing wider than float64: bring float64 arrays to the host.")
    return array.astype(numpy.longdouble if array.dtype.name in ("float64", "longdouble") else numpy.float64)


def ulp(values: Array, dtype: str) -> Array:
    """Return the distance of neighbouring numbers of `dtype` at the magnitude of wide `values`."""
    xp = module_of(values)
    precision, least = FORMATS[dtype]
    _, exponent = xp.frexp(values)  # |values| in [2^(exponent-1), 2^exponent)
    exponent = xp.where(values == 0, least + 1, xp.maximum(exponent, least + 1))
    return xp.ldexp(xp.ones_like(values), (exponent - precision).astype(numpy.int32))


def narrow(values: Array, dtype: str) -> Array:
    """Return wide `values` in `dtype`, rounded once, ties to even."""
    xp = module_of(values)
    unit = ulp(values, dtype)
    rounded = xp.rint(values / unit) * unit
    if dtype == "bfloat16":
        bits = rounded.astype(numpy.float32).view(numpy.uint32) >> 16
        return bits.astype(numpy.uint16).view(ml_dtypes.bfloat16)
    return rounded.astype(dtype)


class Statistics(NamedTuple):
    mean: Array  # (rows, 1), zero for rms_norm
    rstd: Array  # (rows, 1)
    xhat: Array  # (rows, cols)


def normalise(op: str, x: Array, eps: float) -> Statistics:
    mean = x.mean(axis=1, keepdims=True)
    if op == "rms_norm":
        mean = mean * 0
    centred = x - mean
    rstd = 1 / ((centred * centred).mean(axis=1, keepdims=True) + eps) ** 0.5
    return Statistics(mean, rstd, centred * rstd)


def scale_of(weight: Array | None, zero_centered_gamma: bool) -> Array | float:
    return 1.0 if weight is None else weight + 1 if zero_centered_gamma else weight


def check_forward(
    op: str,
    result: tuple[Array, Array | None, Array | None],
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
) -> None:
    """Check (y, mean, rstd) against the reference, except those that are None.

    The error of y is less than 4 ulp of the row's largest |y| in the format of the arithmetic, which is float32, or
    float64 for float64 x. The largest is taken before and after the bias is added, because in a short row the bias may
    cancel all values. If the format of y is narrower, the error may be half an ulp of y more. So a 16-bit y is within 1
    ulp of the correctly rounded value, unless it is so much smaller than the row's largest that float32 is no better.
    The error of mean is at most half an ulp of itself and 4 ulp of the standard deviation, and that of rstd is at most
    4 ulp of itself.
    """
    x_dtype, y_dtype = x.dtype.name, result[0].dtype.name
    arithmetic = "float64" if x_dtype == "float64" else "float32"
    x, weight, bias, y, mean, rstd = _wide(x, weight, bias, *result)
    expected = normalise(op, x, EPS[op] if eps is None else eps)
    scaled = expected.xhat * scale_of(weight, zero_centered_gamma)
    y_expected = scaled if bias is None else scaled + bias
    largest = module_of(scaled).maximum(_row_largest(scaled), _row_largest(y_expected))
    allowed = FORWARD_ULPS * ulp(largest, arithmetic)
    _assert_within("y", y, y_expected, allowed + _rounding(y_expected, y_dtype, arithmetic))
    if mean is not None:
        deviation = MEAN_ULPS * ulp(1 / expected.rstd, arithmetic)
        _assert_within("mean", mean, expected.mean[:, 0], (deviation + ulp(expected.mean, arithmetic) / 2)[:, 0])
    if rstd is not None:
        _assert_within("rstd", rstd, expected.rstd[:, 0], RSTD_ULPS * ulp(expected.rstd, arithmetic)[:, 0])


def check_backward(
    op: str,
    result: tuple[Array | None, Array | None, Array | None],
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
) -> None:
    """Check (dx, dweight, dbias) against the reference, which is made from x alone, except those that are None.

    dx is the difference of three terms, rstd * (g - c2 - xhat * c1), which may cancel. The row's scale is the largest
    sum of their magnitudes, and |mean| * rstd is what the rounding of a saved mean costs. The error of dx is less than
    8 ulp * max(1, |mean| * rstd) of the row's scale in the format of the arithmetic. If x has 16 bits, half an ulp of
    dx is added; up to |mean| * rstd = 1e4 the error is then at most 1 ulp of the row's scale.
    The error of dweight and dbias is less than 4 eps * (sqrt(rows) * the largest term of their column + their own
    magnitude) and one rounding. A term of dweight is |dy| * (|xhat| + max(1, |mean| * rstd)), and one of dbias is |dy|.
    """
    x_dtype = x.dtype.name
    arithmetic = "float64" if x_dtype == "float64" else "float32"
    parameter_dtype = x_dtype if weight is None else weight.dtype.name
    x, dy, weight, dx, dweight, dbias = _wide(x, dy, weight, *result)
    mean, rstd, xhat = normalise(op, x, EPS[op] if eps is None else eps)
    offset = (abs(mean) * rstd).clip(1.0, None)
    if dx is not None:
        g = dy * scale_of(weight, zero_centered_gamma)
        c1 = (g * xhat).mean(axis=1, keepdims=True)
        c2 = g.mean(axis=1, keepdims=True) if op == "layer_norm" else c1 * 0
        dx_expected = rstd * (g - c2 - xhat * c1)
        scale = _row_largest(rstd * (abs(g) + abs(c2) + abs(xhat * c1)))
        allowed = BACKWARD_ULPS * offset * ulp(scale, arithmetic) + _rounding(dx_expected, x_dtype, arithmetic)
        if x_dtype != arithmetic:
            xp = module_of(allowed)
            allowed = xp.where(offset <= PROMISED_OFFSET, xp.minimum(allowed, ulp(scale, x_dtype)), allowed)
        _assert_within("dx", dx, dx_expected, allowed)
    eps_of_sum = SUM_ULPS * 2.0 ** (1 - FORMATS[arithmetic][0])
    for name, sums, terms, sizes in (
        ("dweight", dweight, dy * xhat, abs(dy) * (abs(xhat) + offset)),
        ("dbias", dbias, dy, abs(dy)),
    ):
        if sums is not None:
            expected = terms.sum(axis=0)
            largest = sizes.max(axis=0) if len(x) else expected
            allowed = eps_of_sum * (len(x) ** 0.5 * largest + abs(expected))
            _assert_within(name, sums, expected, allowed + _rounding(expected, parameter_dtype, arithmetic))


def _wide(x: Array, *arrays: Array | None) -> list[Array | None]:
    """Return all arrays widened, on the host unless x is large and CuPy can do it."""
    to_host = x.size <= ON_GPU_ABOVE or x.dtype.name == "float64"
    return [
        None if array is None else widen(array.get() if to_host and hasattr(array, "get") else array)
        for array in (x, *arrays)
    ]


def _row_largest(values: Array) -> Array:
    return abs(values).max(axis=1, keepdims=True)


def _rounding(expected: Array, dtype: str, arithmetic: str) -> Array | float:
    """Return the error of the rounding at the store, which is 0 unless the format is narrower than the arithmetic."""
    return ulp(expected, dtype) / 2 if FORMATS[dtype][0] < FORMATS[arithmetic][0] else 0.0


def _assert_within(name: str, actual: Array, expected: Array, allowed: Array) -> None:
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, not {expected.shape}"
    xp = module_of(actual)
    error = abs(actual - expected)
    wrong = ~(error <= allowed)  # NaN is wrong
    if not wrong.any():
        return
    allowed = xp.broadcast_to(allowed, error.shape)
    excess = xp.where(error == error, error / allowed, xp.inf)
    worst = tuple(map(int, numpy.unravel_index(int(excess.argmax()), error.shape)))
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong; the worst, at {worst}, is "
        f"{float(actual[worst])!r} instead of {float(expected[worst])!r}: {float(excess[worst]):.3g} times the allowed "
        f"{float(allowed[worst]):.3g}"
    )
