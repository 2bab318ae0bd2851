"""The gradients are as accurate as reference.check_backward says, for all shapes, offsets, dtypes and options."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import bits, inputs, on_host, same_bits
from cases import DTYPES, OFFSETS, TIER_COLUMNS, shape_cases
from functions import OPS, backward, forward
from reference import check_backward, narrow, widen

import cunorm

MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]


def gradients(op, x, dy, weight, **options):
    """Return the gradients, from what our own forward pass saved."""
    forward_options = {key: value for key, value in options.items() if key in ("zero_centered_gamma", "eps")}
    _, mean, rstd = forward(op, x, weight, **forward_options)
    options.pop("eps", None)
    return backward(op, dy, x, mean, rstd, weight, **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("xp", "rows", "cols", "dtype"), shape_cases(), indirect=["xp"])
def test_every_shape(xp, op, rows, cols, dtype):
    x, dy, weight, _ = inputs(xp, rows, cols, dtype)
    result = gradients(op, x, dy, weight)
    assert (type(result[0]), result[0].dtype, result[0].shape) == (type(x), x.dtype, x.shape)
    assert (result[1].dtype, result[1].shape) == (weight.dtype, weight.shape)
    check_backward(op, result, dy, x, weight)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [8, 3000])
@pytest.mark.parametrize("cols", [33, 1000])
def test_weight_gradients_lose_no_row(xp, op, rows, cols):
    """Weights are float32, because the rounding of 16-bit gradients would hide a row among thousands."""
    x, dy, weight, _ = inputs(xp, rows, cols, "bfloat16", weight="float32")
    check_backward(op, gradients(op, x, dy, weight), dy, x, weight)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_from_zero(xp, op, offset, cols, dtype):
    x, dy, weight, _ = inputs(xp, 5, cols, dtype, offset=offset)
    check_backward(op, gradients(op, x, dy, weight), dy, x, weight)


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_rows(xp, value, cols, dtype):
    _, dy, weight, _ = inputs(xp, 3, cols, dtype)
    row = narrow(numpy.full((1, 1), value), dtype)
    x = xp.asarray(numpy.broadcast_to(row, (3, cols)).copy())
    check_backward("layer_norm", gradients("layer_norm", x, dy, weight), dy, x, weight)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_dy_in_any_dtype(xp, op, dtype, weight_dtype):
    dy_dtype = DTYPES[DTYPES.index(weight_dtype or dtype) - 1]
    x, dy, weight, _ = inputs(xp, 40, 1000, dtype, weight=weight_dtype, dy=dy_dtype)
    weight = weight if weight_dtype else None
    result = gradients(op, x, dy, weight)
    assert result[0].dtype.name == dtype
    assert result[1].dtype.name == (weight_dtype or dtype)
    check_backward(op, result, dy, x, weight)


@pytest.mark.parametrize(("has_weight", "zero_centered_gamma"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sm_margin", [0, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cols", [129, 20000, 600001])
def test_every_combination_of_options(xp, cols, mask, sm_margin, has_weight, zero_centered_gamma):
    """A gradient that is not wanted is None, and the others do not depend on that."""
    x, dy, weight, _ = inputs(xp, 300 if cols < 1000 else 3, cols, "float16", weight="float32")
    weight = weight if has_weight else None
    options = {"zero_centered_gamma": zero_centered_gamma, "sm_margin": sm_margin}
    for op in OPS:
        result = gradients(op, x, dy, weight, output_mask=mask, **options)
        check_backward(op, result, dy, x, weight, zero_centered_gamma=zero_centered_gamma)
        wanted = mask if op == "layer_norm" else (*mask[:2], False)
        assert tuple(gradient is not None for gradient in result) == wanted


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [1e-3, 1.0])
def test_eps_comes_with_rstd(xp, op, eps):
    x, dy, weight, _ = inputs(xp, 30, 1000, "float32")
    check_backward(op, gradients(op, x, dy, weight, eps=eps), dy, x, weight, eps=eps)


@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 4, 5), 2), ((2, 3, 4, 5), 4), ((6,), 1)])
def test_any_number_of_trailing_axes(xp, shape, axes):
    normalized, leading = shape[len(shape) - axes :], shape[: len(shape) - axes]
    cols = int(numpy.prod(normalized))
    flat, dy, weight, _ = inputs(xp, int(numpy.prod(leading)), cols, "float32")
    x, weight = flat.reshape(shape), weight.reshape(normalized)
    _, mean, rstd = cunorm.layer_norm_forward(x, normalized, weight)
    dx, dweight, dbias = cunorm.layer_norm_backward(dy.reshape(shape), x, mean, rstd, weight)
    assert (dx.shape, dweight.shape, dbias.shape) == (shape, normalized, normalized)
    result = (dx.reshape(-1, cols), dweight.reshape(-1), dbias.reshape(-1))
    check_backward("layer_norm", result, dy, flat, weight.reshape(-1))


@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_nan_and_infinity_stay_in_their_row_of_dx(xp, op, bad, where, cols):
    rows = 9 if cols < 100_000 else 3
    x, dy, weight, _ = inputs(xp, rows, cols, "bfloat16")
    clean, _, _ = gradients(op, x, dy, weight)
    {"x": x, "dy": dy}[where][1, cols // 2] = bad
    dirty, _, _ = gradients(op, x, dy, weight)
    others = [row for row in range(rows) if row != 1]
    assert same_bits(bits(clean)[others], bits(dirty)[others])
    assert not numpy.isfinite(widen(on_host(dirty))[1]).all(), "the bad element vanished from its row"


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("rows", "cols"), [(600, 8192), (20, 600_000)], ids=["partial sums", "a kernel for columns"])
def test_sums_over_rows_by_two_multiprocessors(op, rows, cols):
    import cupy

    x, dy, weight, _ = inputs(cupy, rows, cols, "bfloat16")
    margin = cupy.cuda.Device().attributes["MultiProcessorCount"] - 2
    check_backward(op, gradients(op, x, dy, weight, sm_margin=margin), dy, x, weight)
