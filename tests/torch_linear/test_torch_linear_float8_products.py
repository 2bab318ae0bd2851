"""Operands of LayerNormLinear in FP8 have the defined bytes, and its products are near those in float64.

On the CPU, products are emulated with the same bytes. Every case runs on a GPU too.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy
import pytest

torch = pytest.importorskip("torch")

import torch_plain  # noqa: E402
from torch_linear_float8 import ERROR, by_recipe, inputs, make, relative  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

from cunorm.torch.linear import float8, float8_arithmetic  # noqa: E402
from cunorm.torch.linear.float8 import quantised  # noqa: E402
from cunorm.torch.linear.float8_arithmetic import (  # noqa: E402
    LARGEST,
    as_right,
    cast_columns,
    cast_rows,
    normalised_columns,
    product,
    scale_of_tensor,
)
from cunorm.torch.linear.parallel import ALONE  # noqa: E402
from cunorm.torch.linear.step import Saved, Step, forward  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
# An element of a product may be off by this part of Σ |a||b|: an operand is off by 2^-4 of itself, in e5m2 by 2^-3.
ELEMENT = 2.0**-3
E5M2_ELEMENT = 2.0**-2 * 0.75
FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def bits(tensor: Any) -> Any:
    return tensor.cpu().view(torch.uint8).numpy()


# The bytes of casts.


def check_scaled(cast: Any, scale: Any, values: Any, dtype: str, power_2: bool) -> None:
    """Assert that rows of `cast` are ml_dtypes' rounding of the float32 rows of `values` times their multipliers."""
    largest = numpy.float32(LARGEST[dtype])
    with numpy.errstate(all="ignore"):
        amax = abs(values).max(1, initial=0)
        q = numpy.minimum(largest / amax, numpy.float32(2.0**100))
        if power_2:
            q = numpy.where(numpy.isnan(q), q, (q.view("int32") & 0x7F800000).view("float32"))
        rounded = (values * q[:, None]).clip(-largest, largest).astype(FORMATS[dtype])
        expected = numpy.where(amax == 0, 1, 1 / q)
    nan = numpy.isnan(rounded.astype("float32"))  # a NaN may have either sign
    numpy.testing.assert_array_equal(numpy.where(nan, cast & 0x7F, cast), numpy.where(nan, 0x7F, rounded.view("uint8")))
    numpy.testing.assert_array_equal(numpy.isnan(scale), ~numpy.isfinite(amax))
    finite = numpy.isfinite(amax)
    numpy.testing.assert_allclose(scale[finite], expected[finite], rtol=0 if power_2 else 2.0**-23)


def special(rows: int, cols: int) -> Any:
    """Return rows of every kind: plain, zero, tiny, huge, with an infinity, with a NaN, with the largest at the end."""
    values = random(rows, cols, dtype=torch.float32)
    values[1] = 0
    values[2] *= 1e-36
    values[3] *= 1e30
    values[4, 5] = math.inf
    values[5, 6] = math.nan
    values[6, -1] = -100
    values[7] = -0.0
    return values


@on_devices
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(33, 100), (16, 256)])
def test_casts(device, rows, cols, power_2, dtype):
    values = special(rows, cols).to(device)
    cast, scale, sums, amax = cast_rows(values, dtype, power_2_scale=power_2, column_sums=True, column_amax=True)
    assert cast.shape == (rows, cols)
    check_scaled(bits(cast), scale.cpu().numpy(), values.cpu().numpy(), dtype, power_2)
    numpy.testing.assert_array_equal(amax.cpu().numpy(), abs(values.cpu().numpy()).max(0))
    finite = values.cpu()[6:].to(device)
    _, _, sums, amax = cast_rows(finite, dtype, column_sums=True, column_amax=True)
    torch.testing.assert_close(sums.double(), finite.double().sum(0), rtol=1e-5, atol=1e-4)
    # A cast by columns has the rows of the transposed matrix, with zeros up to a multiple of 16.
    columns = special(cols, rows).t().contiguous().to(device)
    amax = columns.abs().amax(0)
    cast, scale = cast_columns(columns, amax, dtype, power_2_scale=power_2)
    assert cast.shape == (cols, -(-rows // 16) * 16)
    assert not bits(cast)[:, rows:].any()
    check_scaled(bits(cast)[:, :rows], scale.cpu().numpy(), columns.t().cpu().numpy(), dtype, power_2)


@on_devices
def test_casts_with_a_scale_that_is_given(device):
    values = random(20, 48, device=device, dtype=torch.float32)
    scale = scale_of_tensor(values)
    assert float(scale) == pytest.approx(float(values.abs().max()) / 448, rel=1e-6)
    cast, same_scale, _, _ = cast_rows(values, scale=scale)
    assert same_scale is scale
    expected = (values.cpu().numpy() * (1 / scale.cpu().numpy())).clip(-448, 448).astype(FORMATS["e4m3"])
    numpy.testing.assert_array_equal(bits(cast), expected.view("uint8"))
    columns, _ = cast_columns(values, None, scale=scale)
    assert same(columns[:, :20].contiguous(), cast.t().contiguous())


@on_devices
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0], 1.0),
        ([math.inf, 1.0], 1.0),
        ([math.nan, 1.0], 1.0),
        ([1e-44, 0.0], 2.0**-127),
        ([-3.0, 1.0], 3 / 448),
    ],
)
def test_scale_of_a_tensor_is_transformer_engines(device, values, expected):
    """The scale is 1 if the largest is 0, infinite or NaN; an infinite multiplier becomes float32's largest number."""
    scale = scale_of_tensor(torch.tensor([values], device=device))
    assert float(scale) == pytest.approx(expected, rel=1e-3, abs=1e-38)
    assert float(scale_of_tensor(torch.tensor([values], device=device), least=448.0)) == 1.0
    power_2 = scale_of_tensor(torch.tensor([[3.0]], device=device), power_2_scale=True)
    assert float(power_2) == 2.0**-7


@on_devices
@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm", "zero_centered_layer_norm", "zero_centered_rms_norm"])
def test_nothing_exceeds_the_static_scale(device, operation):
    """Rows with one large number come as near to the bound as rows can, and some biases are larger than the bound."""
    from cunorm.torch.norm import formulas

    rows, cols = 64, 64
    x = 1e-3 * random(rows, cols, device=device, dtype=torch.float32)
    x[torch.arange(rows), torch.arange(rows) % cols] += 100.0 * (1 - 2 * (torch.arange(rows, device=device) % 2))
    weight = random(cols, device=device, dtype=torch.float32) * 0.1
    bias = random(cols, device=device, dtype=torch.float32, seed=1) * 3 if "layer" in operation else None
    statistics = torch_plain.statistics_of(operation, x, 1, 1e-5)
    z = formulas.affine(operation, x, statistics, weight, bias)
    z8, scale = normalised_columns(x, statistics, weight, bias, operation)
    assert z8.shape == (cols, rows)
    gamma = weight.abs() if not operation.startswith("zero") else (1 + weight).abs()
    bound = gamma * math.sqrt(cols - ("layer" in operation)) + (0 if bias is None else bias.abs())
    torch.testing.assert_close(scale * 448, bound, rtol=1e-6, atol=0)
    assert (z.abs().amax(0) <= bound * (1 + 1e-5)).all()
    torch.testing.assert_close(z8.float() * scale[:, None], z.t(), rtol=2.0**-4, atol=float(scale.max()) * 2.0**-9)


# Products.


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 200])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_product(device, biased, by_row, rows, dtype):
    """A product is that of the numbers which the bytes stand for, multiplied in float64."""
    a, b = random(rows, 64, dtype=torch.float32), random(48, 64, dtype=torch.float32)
    bias = random(48, dtype=dtype) if biased else None
    scales = (None, None) if by_row else (torch.tensor(0.02), torch.tensor(0.03))
    (a8, a_scale), (b8, b_scale) = (cast_rows(m, scale=s)[:2] for m, s in zip((a, b), scales, strict=True))
    wide = [t.double() * (s.double()[:, None] if by_row else s.double()) for t, s in ((a8, a_scale), (b8, b_scale))]
    expected = wide[0] @ wide[1].t() + (0 if bias is None else bias.double())
    left, on_the_right = [t.to(device) for t in (a8, a_scale)], as_right(b8.to(device), b_scale.to(device))
    y = product(*left, *on_the_right, dtype, None if bias is None else bias.to(device))
    assert (y.dtype, y.shape) == (dtype, (rows, 48))
    tolerance = {torch.float32: 1e-3 if device == "cuda" else 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
    torch.testing.assert_close(y.cpu().double(), expected, rtol=tolerance[dtype], atol=4 * tolerance[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_how_torch_is_asked(monkeypatch, bias, hopper, by_row, rows, dtype):
    """Nothing that a GPU would refuse is asked of torch, which has these products on the CPU too, without biases."""
    own = torch._scaled_mm

    def scaled_mm(a, b, a_scale, b_scale, *, bias=None, out_dtype, use_fast_accum):
        assert b.stride(0) == 1
        assert bias is None or bias.dtype is out_dtype is not torch.float32
        few = rows <= float8_arithmetic.ROWS_SCALED_AFTER
        assert a_scale.shape == ((rows, 1) if by_row and not few else ())
        assert b_scale.shape == ((1, 48) if by_row and not few else ())
        assert out_dtype is torch.bfloat16 or hopper or not by_row or few
        y = own(a, b, a_scale, b_scale, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
        return (y if bias is None else y + bias).to(out_dtype)

    monkeypatch.setattr(float8_arithmetic, "scaled_mm", scaled_mm)
    monkeypatch.setattr(float8_arithmetic, "_is_hopper", lambda index: hopper)
    a, b = random(rows, 64, dtype=torch.float32), random(48, 64, dtype=torch.float32)
    scales = (None, None) if by_row else (torch.tensor(0.02), torch.tensor(0.03))
    left, on_the_right = (cast_rows(m, scale=s)[:2] for m, s in zip((a, b), scales, strict=True))
    given = (*left, *as_right(*on_the_right), dtype, random(48, dtype=torch.float32) if bias else None, True)
    y, expected = float8_arithmetic._by_torch(*given), float8_arithmetic._emulated(*given)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=2.0**-7, atol=0.1 if bias else 2.0**-7)


@on_devices
@by_recipe
def test_each_product_is_near(device, recipe):
    """y, dz and dweight are near float64's in the Frobenius norm, and each element within a part of Σ |a||b|."""
    check_products(device, recipe)


def check_products(device: str, recipe: Any) -> None:
    scheme = recipe.scheme
    module = make(device, bias=False)
    x, dy = inputs(device)
    weights = quantised(module.weight.detach(), scheme, True)
    numbers = float8.Float8(scheme)
    step = Step("layer_norm", 1e-5, torch.float32, weight_dtype=torch.float32, numbers=numbers)
    ln = (module.layer_norm_weight.detach(), module.layer_norm_bias.detach())
    y, z, statistics, kept = forward((x.detach(), module.weight, None, *ln), weights, step, ALONE)
    saved = Saved(statistics, x.detach(), weights.columns, *ln, kept, weights.column_scale)
    rounded = numbers.products(dy, saved, step, ALONE, (True, True))
    dz = product(rounded.rows, rounded.scale, weights.columns, weights.column_scale, torch.float32)
    z, w, g = (t.detach().cpu().double() for t in (z, module.weight, dy))
    rounded.end_dz()
    near(y, z, w.t(), "e4m3")
    near(dz, g, w, scheme.gradient)
    if scheme.high_precision_wgrad:
        torch.testing.assert_close(rounded.weight().cpu().double(), g.t() @ z, rtol=1e-4, atol=1e-3)
    else:
        near(rounded.weight(), g.t(), z, scheme.gradient)
    torch.testing.assert_close(rounded.bias().cpu().double(), g.sum(0), rtol=1e-5, atol=1e-3)


def near(result: Any, a: Any, b: Any, dtype: str) -> None:
    """Assert that `result` is the product of a and b but for the rounding of both to 8 bits."""
    result, expected = result.cpu().double(), a @ b
    assert relative(result, expected) <= ERROR[dtype], relative(result, expected)
    allowed = (ELEMENT if dtype == "e4m3" else E5M2_ELEMENT) * (a.abs() @ b.abs())
    # Besides, numbers below the format's least normal one may be lost, and one scale for a tensor makes many such.
    least = 2.0**-10 if dtype == "e4m3" else 2.0**-17
    flushed = least / LARGEST[dtype] * (a.abs().max() * b.abs().sum(0) + a.abs().sum(1)[:, None] * b.abs().max())
    assert ((result - expected).abs() <= allowed + flushed).all()
