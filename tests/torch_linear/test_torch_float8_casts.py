"""Casts of tensors to FP8 operands are held to the table of float8_casts.py, on the stand-in and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from float8_casts import (
    Rows,
    check_columns,
    check_rows,
    largest_of,
    matrix,
    normalised,
)
from test_float8_casts import parameters, saved

torch = pytest.importorskip("torch")

from torch_launches import on_the_stand_in  # noqa: E402

from cunorm.torch.linear import float8_arithmetic as casts  # noqa: E402
from cunorm.torch.linear.float8_arithmetic import as_right  # noqa: E402

DEVICES = ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(21, 136), (33, 1000), (5, 12288), (3, 20000)]
ON_A_GPU = [*SHAPES, (4000, 64), (1000, 4096), (513, 12288), (70, 28672), (300, 100000), (9, 300001)]


@pytest.fixture(params=DEVICES)
def kind(request, monkeypatch) -> str:
    """Return the device of the tensors, and let those on the CPU launch on the stand-in."""
    if request.param == "cuda":
        return "cuda"
    on_the_stand_in(monkeypatch, casts)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return "cpu"


def to(kind: str, array: Any) -> Any:
    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16).to(kind)
    return torch.from_numpy(array.copy()).to(kind)


def back(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.float()).numpy()


def shapes(kind: str) -> list[tuple[int, int]]:
    return ON_A_GPU if kind == "cuda" else SHAPES[:3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_then_columns(kind, dtype):
    for rows, cols in shapes(kind):
        a = matrix(rows, cols, dtype)
        a[0, 1], a[1, 2] = numpy.nan, numpy.inf
        for name, power_2 in (("e4m3", False), ("e5m2", True)):
            options = {"power_2_scale": power_2}
            given = to(kind, a)
            rows_cast = casts.cast_rows(given, name, column_sums=True, column_amax=True, **options)
            check_rows(a, Rows(*map(back, rows_cast)), name, power_of_2=power_2)
            rounded = casts.cast_rows(given, name, column_sums=True, sum_dtype=torch.bfloat16, **options)[2]
            numpy.testing.assert_array_equal(back(rounded), back(rows_cast[2].bfloat16()))
            columns = casts.cast_columns(given, rows_cast[3], name, **options)
            maxima = largest_of(a.astype("float32"), 0)
            check_columns(a.astype("float32"), *map(back, columns), maxima, name, power_of_2=power_2)


def test_a_scale_that_is_given(kind):
    a = matrix(37, 72, "bfloat16")
    scale = to(kind, numpy.float32([0.03]).reshape(()))
    a8, same, sums, amax = casts.cast_rows(to(kind, a), scale=scale, column_sums=True)
    assert same is scale
    assert amax is None
    check_rows(a, Rows(back(a8), None, back(sums), None), "e4m3", given=0.03)
    a8, same = casts.cast_columns(to(kind, a), None, scale=scale)
    assert same is scale
    check_columns(a.astype("float32"), back(a8), None, None, "e4m3", given=0.03)


def test_right_operands(kind):
    """A cast for the right side of a product has the bits and strides of a view of a plain cast."""
    a = to(kind, matrix(37, 72, "bfloat16"))
    amax = casts.cast_rows(a, column_amax=True)[3]
    for given in (None, to(kind, numpy.float32([0.03]).reshape(()))):
        casting = (
            lambda **options: casts.cast_rows(a, **options)[:2],
            lambda **options: casts.cast_columns(a, amax, **options),
        )
        for cast in casting:
            for result, view in zip(cast(scale=given, right=True), as_right(*cast(scale=given)), strict=True):
                assert (result.shape, result.stride()) == (view.shape, view.stride())
                numpy.testing.assert_array_equal(back(result), back(view))


@pytest.mark.parametrize("operation", ["layer_norm", "zero_centered_rms_norm"])
def test_normalised_columns(kind, operation):
    for rows, cols in [(45, 136), (20, 33)] if kind == "cpu" else [(45, 136), (20, 33), (1000, 4096), (2050, 512)]:
        x = matrix(rows, cols, "bfloat16")
        gamma, beta = parameters(cols, "float32", "bfloat16")
        mean, rstd = saved(x, operation)
        statistics = numpy.stack([statistic for statistic in (mean, rstd) if statistic is not None])
        given = [to(kind, array) for array in (x, statistics, gamma, beta)]
        z8, scales = map(back, casts.normalised_columns(*given, operation))
        z, bound = normalised(x, mean, rstd, gamma, beta, operation)
        check_columns(z, z8, scales, bound, "e4m3")


def test_scaled(kind):
    random = numpy.random.default_rng(0)
    product = random.standard_normal((16, 48)).astype("float32")
    rows, columns, bias = (random.standard_normal(size).astype("float32") for size in (16, 48, 48))
    y = casts.scaled(*(to(kind, array) for array in (product, rows, columns, bias)), torch.float32)
    numpy.testing.assert_array_equal(back(y), product * rows[:, None] * columns + bias)
    y = casts.scaled(*(to(kind, array) for array in (product, rows, columns)), None, torch.float32)
    numpy.testing.assert_array_equal(back(y), product * rows[:, None] * columns)


def test_nothing_to_cast(kind):
    a8, scale, sums, amax = casts.cast_rows(torch.empty(0, 32, device=kind), column_sums=True, column_amax=True)
    assert (a8.shape, scale.shape) == ((0, 32), (0,))
    assert back(sums).tolist() == back(amax).tolist() == [0] * 32
    a8, scale = casts.cast_columns(torch.empty(0, 32, device=kind), amax)
    assert (a8.shape, back(scale).tolist()) == ((32, 0), [1] * 32)


def test_float64_is_refused(kind):
    with pytest.raises(TypeError, match="float16, bfloat16 or float32; got float64"):
        casts.cast_rows(torch.ones(16, 32, device=kind, dtype=torch.float64))


@pytest.mark.gpu
def test_the_same_bits_every_time():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first, again = (casts.cast_rows(a, column_sums=True, column_amax=True) for _ in range(2))
    pairs = zip(first, again, strict=True)
    assert all(torch.equal(before.view(torch.uint8), after.view(torch.uint8)) for before, after in pairs)


@pytest.mark.gpu
def test_a_product_of_what_was_cast():
    """Products of a linear layer with per-row scales are close to those of the numbers themselves."""
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    x8, x_scale, _, _ = casts.cast_rows(x)
    w8, w_scale, _, _ = casts.cast_rows(w)
    y = torch._scaled_mm(x8, w8.t(), scale_a=x_scale[:, None], scale_b=w_scale[None], out_dtype=torch.bfloat16)
    exact = x.double() @ w.double().t()
    assert (y.double() - exact).norm() / exact.norm() < 0.045
    dy = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    _, _, _, dy_amax = casts.cast_rows(dy, column_amax=True)
    _, _, _, x_amax = casts.cast_rows(x, column_amax=True)
    a, a_scale = casts.cast_columns(dy, dy_amax)
    b, b_scale = casts.cast_columns(x, x_amax)
    dw = torch._scaled_mm(a, b.t(), scale_a=a_scale[:, None], scale_b=b_scale[None], out_dtype=torch.bfloat16)
    exact = dy.double().t() @ x.double()
    assert (dw.double() - exact).norm() / exact.norm() < 0.045
