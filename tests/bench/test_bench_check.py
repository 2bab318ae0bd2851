"""The bench tells right results from wrong ones."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy
import pytest

from bench import suites
from bench.suites import Case


@pytest.fixture
def check(monkeypatch):
    """Return bench.check, working on NumPy arrays."""
    module = pytest.importorskip("bench.check", reason="bench.check needs CuPy: pip install -e '.[cuda13]'")
    monkeypatch.setattr(module, "cupy", numpy)
    return module


def _right(case: Case, mistake: str = "") -> tuple[SimpleNamespace, list[numpy.ndarray]]:
    """Return buffers of a case and its results in float64, rounded once."""
    rng = numpy.random.default_rng(0)
    dtype = numpy.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    shape = (case.rows, case.cols)
    x, dy = ((rng.standard_normal(shape) + mean).astype(dtype) for mean in (0.25, 0.0))
    weight, bias = ((rng.standard_normal(case.cols) + 1).astype(dtype) for _ in range(2))
    bias = bias if case.op == "layer_norm" else None
    buffers = SimpleNamespace(x=x, dy=dy, weight=weight, bias=bias)
    x, dy, weight = (array.astype(float) for array in (x, dy, weight))
    centred = x - (x.mean(axis=1, keepdims=True) if case.op == "layer_norm" else 0)
    rstd = 1 / numpy.sqrt((centred**2).mean(axis=1, keepdims=True) + case.eps)
    xhat = centred * rstd
    if case.direction == "forward":
        y = xhat * weight + (0 if bias is None or mistake == "bias" else bias.astype(float))
        return buffers, [y.astype(dtype)]
    g = dy * weight
    dx = g if mistake == "projection" else g - xhat * (g * xhat).mean(axis=1, keepdims=True)
    if case.op == "layer_norm" and mistake != "mean":
        dx = dx - g.mean(axis=1, keepdims=True)
    terms = slice(1 if mistake == "row" else 0, None)
    sums = [(dy * xhat)[terms].sum(axis=0), dy.sum(axis=0)]
    return buffers, [a.astype(dtype) for a in (dx * rstd, *sums[: 2 if case.op == "layer_norm" else 1])]


CHECKED = [
    Case(op, direction, rows, 512, dtype)
    for op in suites.OPS
    for direction in suites.DIRECTIONS
    for rows, dtype in ((64, "bfloat16"), (16, "float16"), (300, "float32"))
]
CHECKED.append(Case("layer_norm", "backward", 1, 16384, "bfloat16"))  # xhat near zero in some column


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_a_right_result_passes_the_check(check, monkeypatch, case):
    monkeypatch.setattr(check, "CHUNK", 7 * case.cols)  # several chunks, the last one short
    buffers, results = _right(case)
    assert check.wrong(case, check.errors(case, buffers, tuple(results))) == ""


@pytest.mark.parametrize(
    ("mistake", "direction", "named"),
    [
        ("bias", "forward", "y"),
        ("mean", "backward", "dx"),
        ("projection", "backward", "dx"),
        ("row", "backward", "dweight"),
    ],
)
def test_a_wrong_result_is_found(check, mistake, direction, named):
    case = Case("layer_norm", direction, 64, 512, "bfloat16")
    buffers, results = _right(case, mistake)
    assert named + " is off" in check.wrong(case, check.errors(case, buffers, tuple(results)))


def test_a_float32_dweight_is_held_against_the_limits_of_the_case(check):
    """QuACK and cuDNN take a float32 weight, so their dweight is float32, but it need only be right for bfloat16."""
    case = Case("layer_norm", "backward", 64, 512, "bfloat16")
    buffers, (dx, *sums) = _right(case)
    sums = [array.astype(numpy.float32) for array in sums]
    assert check.wrong(case, check.errors(case, buffers, (dx, *sums))) == ""


def test_nan_and_missing_rows_are_found(check):
    case = Case("rms_norm", "forward", 64, 512, "float32")
    buffers, (y,) = _right(case)
    broken = y.copy()
    broken[3, 4] = numpy.nan
    assert "y is off by inf" in check.wrong(case, check.errors(case, buffers, (broken,)))
    with pytest.raises(ValueError, match="must have shape"):
        check.errors(case, buffers, (y[1:],))
