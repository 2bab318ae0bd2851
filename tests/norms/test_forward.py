"""The forward pass is as accurate as reference.check_forward says, for all shapes, offsets, dtypes and options."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import bits, inputs, on_host, same_bits
from cases import DTYPES, OFFSETS, TIER_COLUMNS, shape_cases
from functions import OPS, bias_of, forward
from reference import check_forward, narrow, widen

import cunorm


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("xp", "rows", "cols", "dtype"), shape_cases(), indirect=["xp"])
def test_every_shape(xp, op, rows, cols, dtype):
    x, _, weight, bias = inputs(xp, rows, cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, x.shape)
    check_forward(op, (y, mean, rstd), x, weight, bias_of(op, bias))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_from_zero(xp, op, offset, cols, dtype):
    x, _, weight, bias = inputs(xp, 5, cols, dtype, offset=offset)
    for parameters in ((None, None), (weight, bias)):
        result = forward(op, x, *parameters)
        check_forward(op, result, x, parameters[0], bias_of(op, parameters[1]))


@pytest.mark.parametrize("value", [0.0, 3.0, -1e4, 0.1])
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_row_becomes_the_bias(xp, value, cols, dtype):
    row = narrow(numpy.full((1, 1), value), dtype)
    x = xp.asarray(numpy.broadcast_to(row, (3, cols)).copy())
    _, _, weight, bias = inputs(xp, 3, cols, dtype)
    result = cunorm.layer_norm_forward(x, None, weight, bias)
    check_forward("layer_norm", result, x, weight, bias)
    # Without a bias y is zero, so its error is not measured by the largest |y|, but by 1, the size of other rows' y.
    y = cunorm.layer_norm(x)
    assert abs(widen(on_host(y))).max() <= 4 * 2.0 ** (-52 if dtype == "float64" else -23)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_in_any_dtype(xp, op, dtype, weight_dtype):
    bias_dtype = DTYPES[DTYPES.index(weight_dtype) - 1]
    x, _, weight, bias = inputs(xp, 40, 1000, dtype, weight=weight_dtype, bias=bias_dtype)
    check_forward(op, forward(op, x, weight, bias), x, weight, bias_of(op, bias))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [129, 20000, 600001])
def test_y_in_any_dtype_is_rounded_once(xp, op, cols, dtype, y_dtype):
    x, _, weight, bias = inputs(xp, max(2, 400_000 // cols), cols, dtype, weight="float32")
    y, mean, rstd = forward(op, x, weight, bias, dtype=y_dtype)
    assert y.dtype.name == y_dtype
    check_forward(op, (y, mean, rstd), x, weight, bias_of(op, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("has_weight", "has_bias", "zero_centered_gamma", "has_out", "sm_margin"),
    [
        options
        for options in itertools.product([True, False], [True, False], [True, False], [True, False], [0, 4])
        if options[0] or not options[2]  # zero_centered_gamma needs a weight
    ],
)
def test_every_combination_of_options(xp, dtype, has_weight, has_bias, zero_centered_gamma, has_out, sm_margin):
    x, _, weight, bias = inputs(xp, 300, 129, dtype, weight="float32")
    weight, bias = weight if has_weight else None, bias if has_bias else None
    options = {"zero_centered_gamma": zero_centered_gamma, "sm_margin": sm_margin}
    for op in OPS:
        out = xp.empty_like(x) if has_out else None
        y, mean, rstd = forward(op, x, weight, bias, out=out, **options)
        check_forward(op, (y, mean, rstd), x, weight, bias_of(op, bias), zero_centered_gamma=zero_centered_gamma)
        assert out is None or y is out
        # The function without statistics gives the same y.
        if op == "layer_norm":
            again = cunorm.layer_norm(x, None, weight, bias, **options)
        else:
            again = cunorm.rms_norm(x, None, weight, **options)
        assert same_bits(again, y)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("cols", [2, 1000, 20000, 600001])
def test_eps_is_added_inside_the_root(xp, op, eps, cols):
    x, _, weight, bias = inputs(xp, 3, cols, "float32")
    check_forward(op, forward(op, x, weight, bias, eps=eps), x, weight, bias_of(op, bias), eps=eps)


@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 4, 5), 1), ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 4), ((6,), 1)])
def test_any_number_of_trailing_axes(xp, shape, axes):
    normalized = shape[len(shape) - axes :]
    leading = shape[: len(shape) - axes]
    cols = int(numpy.prod(normalized))
    flat, _, weight, bias = inputs(xp, int(numpy.prod(leading)), cols, "float32")
    x, weight, bias = flat.reshape(shape), weight.reshape(normalized), bias.reshape(normalized)
    y, mean, rstd = cunorm.layer_norm_forward(x, normalized, weight, bias)
    assert (y.shape, mean.shape, rstd.shape) == (shape, leading, leading)
    result = (y.reshape(-1, cols), mean.reshape(-1), rstd.reshape(-1))
    check_forward("layer_norm", result, flat, weight.reshape(-1), bias.reshape(-1))
    # If normalized_shape is not passed, it is the shape of weight. For one axis it may be an int.
    assert same_bits(cunorm.layer_norm(x, None, weight, bias), y)
    assert axes > 1 or same_bits(cunorm.layer_norm(x, normalized[0], weight, bias), y)


@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(xp, op, bad, cols, dtype):
    rows = 9 if cols < 100_000 else 3
    x, _, weight, bias = inputs(xp, rows, cols, dtype)
    clean = forward(op, x, weight, bias)
    x[1, cols // 2] = bad
    dirty = forward(op, x, weight, bias)
    others = [row for row in range(rows) if row != 1]
    for before, after in zip(clean, dirty, strict=True):
        assert before is None or same_bits(bits(before)[others], bits(after)[others])
    row = widen(on_host(dirty[0]))[1]
    assert not numpy.isfinite(row).all(), "the bad element vanished from its row"
    if op == "layer_norm" or bad != bad:
        assert numpy.isnan(row).all()
