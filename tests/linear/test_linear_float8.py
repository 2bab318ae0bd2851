"""`layer_norm_linear(fp8="row")`: its product in FP8 is close to the exact one; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cpu_cupy
import cpu_device
import ml_dtypes
import numpy
import pytest
from arrays import on_host
from cpu_functions import FEW_SMS
from float8_casts import Rows, check_rows, matrix

import cunorm

NORMS = ("LayerNorm", "RMSNorm")


@pytest.fixture
def linear(xp):
    """The array module xp, skipped where it has no FP8 products."""
    if xp is not numpy:
        from cunorm.linear import gemm

        if gemm.bindings() is None:
            pytest.skip("nvmath-python is not installed")
    return xp


def arguments(xp: Any, rows: tuple[int, ...], cols: int, outs: int, dtype: str) -> list[Any]:
    """Return x, weight, bias, ln_weight and ln_bias, at random."""
    random = numpy.random.default_rng(0)
    shapes = ((*rows, cols), (outs, cols), (outs,), (cols,), (cols,))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return [xp.asarray(random.standard_normal(shape).astype(kind)) for shape in shapes]


def exact(x: Any, weight: Any, bias: Any, ln_weight: Any, ln_bias: Any, normalization: str, centred: bool) -> Any:
    """Return y in float64."""
    x, weight, bias, gamma, beta = (on_host(array).astype("float64") for array in (x, weight, bias, ln_weight, ln_bias))
    if normalization == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    z = x / numpy.sqrt(numpy.square(x).mean(-1, keepdims=True) + 1e-5) * (gamma + centred)
    return (z + beta if normalization == "LayerNorm" else z) @ weight.T + bias


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize(("rows", "cols", "outs"), [((5, 7), 64, 48), ((130,), 512, 160), ((1,), 960, 64)])
def test_close_to_the_numbers(linear, rows, cols, outs, normalization, dtype):
    """Both operands are rounded to four bits. Independent errors then add up to about 0.0376 of y."""
    given = arguments(linear, rows, cols, outs, dtype)
    ln_bias = given[4] if normalization == "LayerNorm" else None
    for centred in (False, True):
        options = {"normalization": normalization, "zero_centered_gamma": centred}
        y = cunorm.layer_norm_linear(*given[:4], ln_bias, fp8="row", **options)
        assert (y.shape, y.dtype, type(y)) == ((*rows, outs), given[0].dtype, type(given[0]))
        expected = exact(*given, normalization, centred)
        error = numpy.linalg.norm(on_host(y).astype("float64") - expected) / numpy.linalg.norm(expected)
        assert 0.01 < error < 0.045


def test_a_row_does_not_know_the_others(linear):
    given = arguments(linear, (130,), 512, 64, "bfloat16")
    whole = on_host(cunorm.layer_norm_linear(*given, fp8="row")).astype("float32")
    part = on_host(cunorm.layer_norm_linear(given[0][3:40], *given[1:], fp8="row")).astype("float32")
    numpy.testing.assert_allclose(part, whole[3:40], rtol=2**-7, atol=2**-5)


def test_what_is_not_finite_stays_so(linear):
    given = arguments(numpy, (4,), 64, 32, "float32")
    given[0][1, 3], given[1][5, 7] = numpy.inf, numpy.nan
    y = on_host(cunorm.layer_norm_linear(*map(linear.asarray, given), fp8="row"))
    assert numpy.isnan(y[1]).all()
    assert numpy.isnan(y[:, 5]).all()
    assert numpy.isfinite(numpy.delete(numpy.delete(y, 1, 0), 5, 1)).all()


WRONG = [
    (64, 40, "bfloat16", {}, ValueError, r"multiples of 16 with fp8; got shape \(40, 64\)"),
    (40, 64, "float32", {}, ValueError, "multiples of 16"),
    (64, 64, "float64", {}, TypeError, "float16, bfloat16 or float32 with fp8; got float64"),
    (64, 64, "float32", {"fp8": "tensor"}, ValueError, "fp8 must be None or 'row'; got 'tensor'"),
    (64, 64, "float32", {"eps": -1.0}, ValueError, "eps must be finite"),
]


@pytest.mark.parametrize(("cols", "outs", "dtype", "options", "error", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_what_is_wrong_is_said(xp, cols, outs, dtype, options, error, message):
    with pytest.raises(error, match=message):
        cunorm.layer_norm_linear(*arguments(xp, (4,), cols, outs, dtype), **({"fp8": "row"} | options))


def test_kinds_without_it_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(NotImplementedError, match="x must be an array of a library that this function knows"):
        cunorm.layer_norm_linear(torch.ones(4, 16), torch.ones(16, 16), fp8="row")


@pytest.mark.gpu
def test_without_nvmath_it_is_said(monkeypatch):
    import cupy

    from cunorm.linear import gemm

    monkeypatch.setattr(gemm, "bindings", lambda: None)
    with pytest.raises(RuntimeError, match="through nvmath-python, which is not installed"):
        cunorm.layer_norm_linear(*arguments(cupy, (4,), 64, 32, "float16"), fp8="row")


@pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing() or "-")
def test_cupy_casts_weights(monkeypatch):
    """CuPy casts weights right on the stand-in, also one that is a part of a wider matrix."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from cunorm.linear import cupy_arrays

    class Runs:
        @staticmethod
        def run(plan, device_id, stream, pointers):
            views = dict(zip(plan.problem.pointers, pointers, strict=True))
            arrays = {arrays_at: made[pointer] for arrays_at, pointer in views.items()}
            cpu_device.Machine().run(plan, {}, **arrays)

    made: dict[int, numpy.ndarray] = {}

    def new(shape, dtype):
        array = cpu_cupy.Array(shape, dtype)
        made[array.data.ptr] = array
        return array

    cupy = SimpleNamespace(ndarray=new, cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))
    monkeypatch.setattr(cupy_arrays, "cupy", cupy)
    monkeypatch.setattr(cupy_arrays, "launch", Runs)
    monkeypatch.setattr(cupy_arrays, "device", SimpleNamespace(current=lambda _: FEW_SMS))
    monkeypatch.setattr(cupy_arrays, "layout", layout)
    wide = cpu_cupy.asarray(matrix(48, 96, "bfloat16"))
    for weight in (wide, wide[:, :64]):
        made[weight.data.ptr] = weight
        weight_bytes, scales = cupy_arrays.cast_rows(weight)
        check_rows(weight.get(), Rows(weight_bytes.get(), scales.get(), None, None), "e4m3")


def layout(function: str, name: str, array: Any) -> Any:
    from cunorm.call.checks import Layout

    return Layout(array.shape, tuple(stride // array.itemsize for stride in array.strides), array.dtype.name, "0")
