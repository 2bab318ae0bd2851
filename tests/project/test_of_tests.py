"""The checkers reject wrong implementations, each with a mistake that test suites are known to miss."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import inputs
from cases import DTYPES
from functions import OPS
from reference import FORMATS, check_backward, check_forward, narrow, normalise, ulp, widen

ROWS, COLS = 64, 1000
EPS = 1e-3  # 1e-6, the default of rms_norm, would change rows near 1 by less than float32 can show

FORWARD_MISTAKES = {
    "none": {},
    "eps ignored": {"eps": 0.0},
    "eps outside the root": {"eps_outside": True},
    "variance divided by N - 1": {"divisor": COLS - 1},
    "mean not subtracted": {"mean": False},
    "weight ignored": {"scales": False},
    "bias ignored": {"shifts": False},
    "weight taken as zero-centred": {"gamma_offset": 1.0},
    "xhat rounded before the bias": {"rounds_xhat": True},
    "a masked column enters the variance": {"masked": 1},
}


def forward(x, weight, bias, *, op="layer_norm", **mistakes):
    """Return (y, None, None) in wide arithmetic, with mistakes."""
    dtype = x.dtype.name
    x, weight, bias = widen(x), widen(weight), widen(bias)
    eps = mistakes.get("eps", EPS)
    subtracts_mean = op == "layer_norm" and mistakes.get("mean", True)
    mean = x.mean(axis=1, keepdims=True) if subtracts_mean else numpy.zeros((len(x), 1), x.dtype)
    squares = ((x - mean) ** 2).sum(axis=1, keepdims=True) + mistakes.get("masked", 0) * mean**2
    variance = squares / mistakes.get("divisor", x.shape[1])
    rstd = 1 / (variance**0.5 + eps) if mistakes.get("eps_outside") else 1 / (variance + eps) ** 0.5
    y = (x - mean) * rstd
    if mistakes.get("rounds_xhat"):
        y = widen(narrow(y, dtype))
    if mistakes.get("scales", True):
        y = y * (weight + mistakes.get("gamma_offset", 0.0))
    if op == "layer_norm" and mistakes.get("shifts", True):
        y = y + bias
    return narrow(y, dtype), None, None


# rms_norm has no mean and no bias, so it cannot have these mistakes.
NOT_OF_RMS_NORM = {
    "mean not subtracted",
    "bias ignored",
    "a masked column enters the variance",
    "dx without its mean term",
}


def possible(mistakes):
    """Return (mistake, dtype, op) where the mistake makes a difference.

    Rounding xhat makes none where y has the precision of the arithmetic.
    """
    return [
        (mistake, dtype, op)
        for mistake, dtype, op in itertools.product(mistakes, DTYPES, OPS)
        if not (op == "rms_norm" and mistake in NOT_OF_RMS_NORM)
        and not (dtype in ("float32", "float64") and mistake == "xhat rounded before the bias")
    ]


def rejects(check, *arguments, **options) -> bool:
    try:
        check(*arguments, **options)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("mistake", "dtype", "op"), possible(FORWARD_MISTAKES))
def test_wrong_forward(op, dtype, mistake):
    x, _, weight, bias = inputs(numpy, ROWS, COLS, dtype)
    result = forward(x, weight, bias, op=op, **FORWARD_MISTAKES[mistake])
    bias = bias if op == "layer_norm" else None
    assert rejects(check_forward, op, result, x, weight, bias, eps=EPS) == (mistake != "none")


@pytest.mark.parametrize("method", ["two passes", "two passes and the mean's residual", "E[x^2] - E[x]^2"])
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_only_exact_statistics_pass_far_from_zero(method, offset):
    """Statistics are float32, as in a kernel. The mean is summed in float64, so that the method makes the error."""
    x, _, weight, bias = inputs(numpy, ROWS, COLS, "float32", offset=offset)
    mean = x.mean(axis=1, keepdims=True, dtype="float64").astype("float32")
    centred = x - mean
    if "residual" in method:
        centred = centred - centred.mean(axis=1, keepdims=True)
    variance = (centred * centred).mean(axis=1, keepdims=True)
    if "E[" in method:
        variance = abs((x * x).mean(axis=1, keepdims=True) - mean * mean)
    rstd = (1 / numpy.sqrt(variance + 1e-5)).astype("float32")
    y = centred * rstd * weight + bias
    good = "residual" in method
    assert rejects(check_forward, "layer_norm", (y, None, None), x, weight, bias) == (not good)


BACKWARD_MISTAKES = {
    "none": {},
    "dx without its mean term": {"mean_term": 0.0},
    "dx without its projection term": {"projection": 0.0},
    "dx without rstd": {"rstd": False},
    "terms divided by N - 1": {"divisor": COLS - 1},
    "weight ignored": {"scales": False},
    "weight multiplies dx, not dy": {"weight_last": True},
    "dweight misses the last row": {"rows": slice(None, -1)},
    "dweight counts a row twice": {"rows": [0, *range(ROWS)]},
    "dweight of g instead of dy": {"dweight_of_g": True},
    "dweight of x instead of xhat": {"dweight_of_x": True},
    "eps ignored": {"eps": 0.0},
}


def backward(dy, x, weight, *, op, **mistakes):
    """Return (dx, dweight, dbias) in wide arithmetic, with mistakes."""
    dtype, parameter = x.dtype.name, weight.dtype.name
    dy, x, weight = widen(dy), widen(x), widen(weight)
    _, rstd, xhat = normalise(op, x, mistakes.get("eps", EPS))
    before = mistakes.get("scales", True) and not mistakes.get("weight_last")
    g = dy * weight if before else dy
    divisor = mistakes.get("divisor", x.shape[1])
    c1 = (g * xhat).sum(axis=1, keepdims=True) / divisor * mistakes.get("projection", 1.0)
    c2 = g.sum(axis=1, keepdims=True) / divisor * mistakes.get("mean_term", 1.0) * (op == "layer_norm")
    dx = (g - c2 - xhat * c1) * (rstd if mistakes.get("rstd", True) else 1.0)
    if mistakes.get("weight_last"):
        dx = dx * weight
    rows = mistakes.get("rows", slice(None))
    terms = (g if mistakes.get("dweight_of_g") else dy) * (x if mistakes.get("dweight_of_x") else xhat)
    dbias = narrow(dy[rows].sum(axis=0), parameter) if op == "layer_norm" else None
    return narrow(dx, dtype), narrow(terms[rows].sum(axis=0), parameter), dbias


@pytest.mark.parametrize(("mistake", "dtype", "op"), possible(BACKWARD_MISTAKES))
def test_wrong_backward(op, dtype, mistake):
    x, dy, weight, _ = inputs(numpy, ROWS, COLS, dtype)
    result = backward(dy, x, weight, op=op, **BACKWARD_MISTAKES[mistake])
    assert rejects(check_backward, op, result, dy, x, weight, eps=EPS) == (mistake != "none")


@pytest.mark.parametrize("gradient", [1, 2])
def test_a_row_missing_among_many_is_seen(gradient):
    """The last of 70000 rows is missing in dweight (1) or dbias (2)."""
    x, dy, weight, _ = inputs(numpy, 70000, 7, "float32")
    gradients = list(backward(dy, x, weight, op="layer_norm"))
    assert not rejects(check_backward, "layer_norm", gradients, dy, x, weight, eps=EPS)
    gradients[gradient] = backward(dy, x, weight, op="layer_norm", rows=slice(None, -1))[gradient]
    assert rejects(check_backward, "layer_norm", gradients, dy, x, weight, eps=EPS)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_one_wrong_element_is_seen(output):
    """One element of y, mean or rstd is NaN or zero."""
    x, _, weight, bias = inputs(numpy, 8, 129, "float16")
    y, _, _ = forward(x, weight, bias)
    wide = normalise("layer_norm", widen(x), EPS)
    result = [y, wide.mean[:, 0].astype("float32"), wide.rstd[:, 0].astype("float32")]
    check_forward("layer_norm", result, x, weight, bias, eps=EPS)
    for wrong in (numpy.nan, 0.0):
        spoilt = [array.copy() for array in result]
        spoilt[output].reshape(-1)[3] = wrong
        assert rejects(check_forward, "layer_norm", spoilt, x, weight, bias, eps=EPS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_rounds_to_the_nearest_once(dtype):
    """A value becomes the nearer of its two neighbours, or the even one if both are equally near."""
    precision, least = FORMATS[dtype]
    one_ulp = 2.0 ** (1 - precision)
    tiny = 2.0 ** (least - precision + 1)
    largest = (2 - one_ulp) * 2.0 ** (1 - least)
    cases = {
        1 + one_ulp / 2: 1.0,
        1 + one_ulp * 1.5: 1 + 2 * one_ulp,
        # These lie beside a tie by less than float32 can show, so float64 -> float32 -> dtype would go wrong.
        1 + one_ulp / 2 + 2.0**-50: 1 + one_ulp,
        1 + one_ulp * 1.5 - 2.0**-50: 1 + one_ulp,
        -(1 + one_ulp / 2 + 2.0**-50): -(1 + one_ulp),
        tiny * 0.5: 0.0,
        tiny * 1.5: 2 * tiny,
        tiny * 0.75: tiny,
        largest: largest,
        0.0: 0.0,
        numpy.inf: numpy.inf,
    }
    with numpy.errstate(over="ignore", invalid="ignore"):
        rounded = narrow(numpy.array(list(cases)), dtype)
    assert rounded.dtype.name == dtype
    numpy.testing.assert_array_equal(widen(rounded), list(cases.values()))
    assert ulp(numpy.array([1.0, 1.99, 2.0, 0.0]), dtype).tolist() == [one_ulp, one_ulp, 2 * one_ulp, tiny]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_reference_is_the_same_by_cupy(dtype):
    """CuPy's arithmetic, which judges large cases, agrees with NumPy's."""
    import cupy

    x, dy, weight, _ = (widen(array) for array in inputs(numpy, 300, 1000, dtype))
    host = normalise("layer_norm", x, 1e-5)
    device = normalise("layer_norm", cupy.asarray(x), 1e-5)
    for expected, actual in zip(host, device, strict=True):
        numpy.testing.assert_allclose(actual.get(), expected, rtol=1e-13, atol=1e-13)
    raw = inputs(cupy, 3, 5, dtype).x
    numpy.testing.assert_array_equal(widen(raw).get(), widen(raw.get()))
    for values in (x, dy * 1e-30, weight * 1e30):
        numpy.testing.assert_array_equal(ulp(cupy.asarray(values), dtype).get(), ulp(values, dtype))
        numpy.testing.assert_array_equal(widen(narrow(cupy.asarray(values), dtype)).get(), widen(narrow(values, dtype)))
