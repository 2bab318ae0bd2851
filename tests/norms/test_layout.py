"""Alignment, strides and `out` do not change results, and nothing is copied without need."""

from __future__ import annotations

import numpy
import pytest
from arrays import bits, in_wider_rows, inputs, misplaced, same_bits
from cases import DTYPES, TIER_COLUMNS
from functions import OPS, backward, forward

import cunorm


def all_same(a, b) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [*TIER_COLUMNS, 1024, 32768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_misaligned_base_changes_no_bit(xp, op, cols, dtype):
    x, dy, weight, bias = inputs(xp, 5 if cols < 100_000 else 2, cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    gradients = backward(op, dy, x, mean, rstd, weight)
    for offset in range(1, 8):
        x_, dy_, weight_, bias_ = (misplaced(array, offset) for array in (x, dy, weight, bias))
        assert all_same(forward(op, x_, weight_, bias_, out=misplaced(x, offset)), (y, mean, rstd))
        assert all_same(backward(op, dy_, x_, mean, rstd, weight_), gradients)
    # Each array alone is misplaced.
    assert same_bits(forward(op, misplaced(x, 1), weight, bias)[0], y)
    assert same_bits(forward(op, x, misplaced(weight, 1), bias)[0], y)
    assert same_bits(forward(op, x, weight, misplaced(bias, 1))[0], y)
    assert same_bits(forward(op, x, weight, bias, out=misplaced(x, 1))[0], y)
    assert all_same(backward(op, misplaced(dy, 1), x, mean, rstd, weight), gradients)
    assert all_same(backward(op, dy, misplaced(x, 1), mean, rstd, weight), gradients)
    assert all_same(backward(op, dy, x, mean, rstd, misplaced(weight, 1)), gradients)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("padding", [1, 8])
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_in_memory(xp, op, padding, cols, dtype):
    """x, dy and out are columns of wider matrices. The elements between the rows of out stay."""
    x, dy, weight, bias = inputs(xp, 5 if cols < 100_000 else 2, cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    gradients = backward(op, dy, x, mean, rstd, weight)
    x_, dy_ = in_wider_rows(x, padding), in_wider_rows(dy, padding)
    buffer = xp.full((x.shape[0], cols + padding), 7, dtype)
    assert all_same(forward(op, x_, weight, bias, out=buffer[:, :cols]), (y, mean, rstd))
    assert (buffer[:, cols:].astype("float32") == 7).all()
    assert all_same(backward(op, dy_, x_, mean, rstd, weight), gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [129, 4096, 20000, 600001])
def test_strided_rows_are_not_copied(op, cols):
    """A call takes far less memory than x has, from a pool of its own."""
    import cupy

    x, dy, weight, bias = inputs(cupy, 2**24 // cols, cols, "bfloat16")
    x, dy = in_wider_rows(x, 8), in_wider_rows(dy, 8)
    y, mean, rstd = forward(op, x, weight, bias)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        forward(op, x, weight, bias, out=y)
        assert pool.total_bytes() < x.nbytes / 16
        pool.free_all_blocks()
        backward(op, dy, x, mean, rstd, weight, output_mask=(True, False, False))
        assert pool.total_bytes() < x.nbytes * (1 + 1 / 16)  # dx has as many bytes as x


VIEWS = {
    "transposed": lambda xp, a: xp.ascontiguousarray(a.T).T,
    "rows backwards": lambda xp, a: xp.ascontiguousarray(a[::-1])[::-1],
    "columns backwards": lambda xp, a: xp.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "every second column": lambda xp, a: xp.repeat(a, 2, axis=1)[:, ::2],
    "every second row": lambda xp, a: xp.repeat(a, 2, axis=0)[::2],
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("cols", [33, 1000, 20000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_strides(xp, op, view, cols, dtype):
    x, dy, weight, bias = inputs(xp, 6, cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    gradients = backward(op, dy, x, mean, rstd, weight)
    x_, dy_ = VIEWS[view](xp, x), VIEWS[view](xp, dy)
    assert x_.strides != x.strides
    assert all_same(forward(op, x_, weight, bias), (y, mean, rstd))
    assert all_same(backward(op, dy_, x_, mean, rstd, weight), gradients)
    out = VIEWS[view](xp, xp.zeros_like(x))
    assert forward(op, x, weight, bias, out=out)[0] is out
    assert same_bits(xp.ascontiguousarray(out), y)


LEADING = {
    "the first rows of each": lambda a: a[:, :2],  # no single stride leads from row to row
    "every second row": lambda a: a[:, ::2],  # one stride leads from row to row
    "axes exchanged": lambda a: a.swapaxes(0, 1),
}


@pytest.mark.parametrize("view", LEADING)
@pytest.mark.parametrize("cols", [33, 1000])
def test_several_leading_axes(xp, view, cols):
    x, dy, weight, bias = inputs(xp, 24, cols, "float16")
    x, dy = (LEADING[view](array.reshape(4, 6, cols)) for array in (x, dy))
    copies = [xp.ascontiguousarray(array) for array in (x, dy)]
    assert x.strides != copies[0].strides
    y, mean, rstd = forward("layer_norm", copies[0], weight, bias)
    assert all_same(forward("layer_norm", x, weight, bias), (y, mean, rstd))
    gradients = backward("layer_norm", dy, x, mean, rstd, weight)
    assert all_same(gradients, backward("layer_norm", *copies[::-1], mean, rstd, weight))


@pytest.mark.parametrize("op", OPS)
def test_strided_parameters_and_statistics(xp, op):
    x, dy, weight, bias = inputs(xp, 6, 129, "float32")
    y, mean, rstd = forward(op, x, weight, bias)
    gradients = backward(op, dy, x, mean, rstd, weight)

    def spread(array):
        return None if array is None else xp.repeat(array, 2)[::2]

    assert all_same(forward(op, x, spread(weight), spread(bias)), (y, mean, rstd))
    assert all_same(backward(op, dy, x, spread(mean), spread(rstd), spread(weight)), gradients)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [33, 1000, 20000])
def test_one_row_seen_many_times(xp, op, cols):
    """All rows of a broadcast x or dy have one address."""
    x, dy, weight, bias = inputs(xp, 1, cols, "float16")
    many = (300, cols)
    expected = forward(op, xp.ascontiguousarray(xp.broadcast_to(x, many)), weight, bias)
    result = forward(op, xp.broadcast_to(x, many), weight, bias)
    assert all_same(result, expected)
    _, mean, rstd = result
    gradients = backward(op, xp.broadcast_to(dy, many), xp.broadcast_to(x, many), mean, rstd, weight)
    copies = (xp.ascontiguousarray(xp.broadcast_to(array, many)) for array in (dy, x))
    assert all_same(gradients, backward(op, *copies, mean, rstd, weight))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_in_place(xp, op, cols, dtype):
    x, _, weight, bias = inputs(xp, 3, cols, dtype)
    y, mean, rstd = forward(op, x, weight, bias)
    strided = in_wider_rows(x, 8)
    assert all_same(forward(op, strided, weight, bias, out=strided), (y, mean, rstd))
    assert forward(op, x, weight, bias, out=x)[0] is x
    assert same_bits(x, y)


def test_out_beside_x_in_one_buffer(xp):
    """The rows interleave but share no element."""
    x, _, weight, bias = inputs(xp, 5, 64, "float32")
    buffer = xp.zeros((5, 128), "float32")
    buffer[:, :64] = x
    y = cunorm.layer_norm(buffer[:, :64], None, weight, bias, out=buffer[:, 64:])
    assert same_bits(y, cunorm.layer_norm(x, None, weight, bias))
    assert same_bits(buffer[:, :64], x)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_nothing_is_written_outside_the_results(xp, op, cols):
    """The elements before and behind y in one buffer keep their bits, and so do the inputs."""
    arrays = inputs(xp, 3, cols, "bfloat16")
    x, dy, weight, bias = arrays
    before = [array.copy() for array in arrays]
    for offset in (64, 67):
        buffer = xp.full(3 * cols + 2 * offset, 7, x.dtype)
        out = buffer[offset : offset + 3 * cols].reshape(3, cols)
        _, mean, rstd = forward(op, x, weight, bias, out=out)
        assert (bits(buffer[:offset]) == bits(buffer[:1])).all()
        assert (bits(buffer[-offset:]) == bits(buffer[:1])).all()
        assert buffer[0] == 7
        backward(op, dy, x, mean, rstd, weight)
    assert all_same(arrays, before)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 0, 8)])
def test_no_rows(xp, shape):
    x = xp.zeros(shape, "float16")
    weight = xp.ones(8, "float32")
    y, mean, rstd = cunorm.layer_norm_forward(x, None, weight)
    assert (y.shape, mean.shape, rstd.shape, y.dtype) == (shape, shape[:-1], shape[:-1], numpy.float16)
    dx, dweight, dbias = cunorm.layer_norm_backward(x, x, mean, rstd, weight)
    assert (dx.shape, dweight.dtype) == (shape, numpy.float32)
    assert (dweight == 0).all()
    assert (dbias == 0).all()
    assert dweight.shape == dbias.shape == (8,)
