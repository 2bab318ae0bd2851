"""A row has the same bits in any batch, and a gradient whenever it is computed again. Sizes may be beyond 32 bits."""

from __future__ import annotations

import numpy
import pytest
from arrays import inputs, same_bits
from cases import DTYPES, TIER_COLUMNS
from functions import OPS, backward, forward
from reference import check_forward, normalise, widen

ROW_COUNTS = (1, 8, 300, 5000)
BATCH_ELEMENTS = 2**27  # 5000 of the longest rows would take gigabytes, so the longest batch has fewer of them


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_a_row_does_not_depend_on_the_batch(op, cols, dtype):
    """The first rows of the longest batch, and its last row, have the same results and dx in a batch of their own."""
    import cupy

    counts = [rows for rows in ROW_COUNTS if rows * cols <= BATCH_ELEMENTS]
    x, dy, weight, bias = inputs(cupy, counts[-1], cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    dx = backward(op, dy, x, mean, rstd, weight)[0]
    parts = [slice(0, rows) for rows in counts[:-1]] + [slice(counts[-1] - 1, None)]
    for part in parts:
        part_y, part_mean, part_rstd = forward(op, x[part], weight, bias)
        assert same_bits(part_y, y[part])
        assert mean is None or same_bits(part_mean, mean[part])
        assert same_bits(part_rstd, rstd[part])
        part_dx = backward(op, dy[part], x[part], part_mean, part_rstd, weight)[0]
        assert same_bits(part_dx, dx[part])


@pytest.mark.gpu
@pytest.mark.parametrize("busy", ["one", "all but one"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_a_row_does_not_depend_on_free_multiprocessors(op, cols, busy):
    import cupy

    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    sm_margin = 1 if busy == "one" else sms - 1
    x, _, weight, bias = inputs(cupy, max(2, 2**20 // cols), cols, "bfloat16")
    for plain, spared in zip(
        forward(op, x, weight, bias), forward(op, x, weight, bias, sm_margin=sm_margin), strict=True
    ):
        assert same_bits(plain, spared)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_backward_twice_gives_the_same_bits(xp, op, cols, dtype):
    rows = 3 if xp is numpy else max(9, min(5000, 2**24 // cols))
    x, dy, weight, _ = inputs(xp, rows, cols, dtype)
    _, mean, rstd = forward(op, x, weight)
    first = backward(op, dy, x, mean, rstd, weight)
    for _ in range(4):
        for a, b in zip(first, backward(op, dy, x, mean, rstd, weight), strict=True):
            assert same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_more_than_2_31_elements(op):
    """Rows at the start, around element 2^31 and at the end have values. The others are zero, so sums are known."""
    import cupy

    cols = 4096
    rows = 2**31 // cols + 3
    if cupy.cuda.runtime.memGetInfo()[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    boundary = 2**31 // cols
    looked_at = [0, 1, boundary // 2, boundary - 1, boundary, boundary + 1, rows - 1]

    def put(array, rows_looked_at):
        for row, values in zip(looked_at, rows_looked_at, strict=True):
            array[row] = values

    def picked(array):
        return cupy.stack([array[row] for row in looked_at])

    some_x, some_dy, weight, bias = inputs(cupy, len(looked_at), cols, "float16")
    x = cupy.zeros((rows, cols), "float16")
    put(x, some_x)
    expected_y, expected_mean, expected_rstd = forward(op, some_x, weight, bias)
    y, mean, rstd = forward(op, x, weight, bias)
    check_forward(op, (expected_y, expected_mean, expected_rstd), some_x, weight, bias if op == "layer_norm" else None)
    assert same_bits(picked(y), expected_y)
    assert mean is None or same_bits(picked(mean), expected_mean)
    assert same_bits(picked(rstd), expected_rstd)
    # The other rows are zero and become the bias.
    between = y[2 : boundary // 2 : 1000]
    assert (between == (bias if op == "layer_norm" else 0)).all()
    del y, between

    dy = cupy.zeros((rows, cols), "float16")
    put(dy, some_dy)
    dx, dweight, dbias = backward(op, dy, x, mean, rstd, weight)
    expected_dx, _, _ = backward(op, some_dy, some_x, expected_mean, expected_rstd, weight)
    assert same_bits(picked(dx), expected_dx)
    assert not dx[2 : boundary // 2 : 1000].any()
    wide_dy = widen(some_dy.get())
    xhat = normalise(op, widen(some_x.get()), 1e-5 if op == "layer_norm" else 1e-6).xhat
    numpy.testing.assert_allclose(widen(dweight.get()), (wide_dy * xhat).sum(axis=0), rtol=1e-3, atol=1e-4)
    if op == "layer_norm":
        numpy.testing.assert_allclose(widen(dbias.get()), wide_dy.sum(axis=0), rtol=1e-3, atol=1e-4)
    del x, dy, dx
    cupy.get_default_memory_pool().free_all_blocks()
