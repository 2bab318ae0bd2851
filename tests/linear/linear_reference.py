"""The norm with its product in wide arithmetic, and how near to it a result must be.

x (rows, in) and weight (out, in) are NumPy or CuPy matrices, compared on the host. z is the normalised tensor, and dz
is its gradient. Both may be rounded to the dtype of x, as the two operators do, with errors that are independent of
each other. So y and dweight may be off by the rounding of z, and dx, dln_weight and dln_bias by that of dz. Each may
also be off by what its own sums and its own rounding cost. What the norm computes may be off by what reference.py
allows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
from reference import (
    BACKWARD_ULPS,
    FORMATS,
    FORWARD_ULPS,
    SUM_ULPS,
    Statistics,
    narrow,
    normalise,
    scale_of,
    ulp,
    widen,
)

Array = Any
ROUNDINGS = 6  # how many standard deviations of its sum of rounding errors a result may be off

NORMALIZATION = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
NAMES = ("dx", "dweight", "dbias", "dln_weight", "dln_bias")


class Call(NamedTuple):
    """The arrays and options of a call, on which its results depend."""

    op: str
    x: Array
    weight: Array
    bias: Array | None
    ln_weight: Array | None
    ln_bias: Array | None
    dy: Array
    eps: float
    zero_centered_gamma: bool = False
    dz: Array | None = None  # a gradient that reaches z from elsewhere


def inputs(
    op: str, rows: int, cols: int, outs: int, dtype: str, *, offset: float = 1.0, ln_dtype: str | None = None, **options
) -> Call:
    """Return rows of mean +-offset and standard deviation 1, and parameters that differ from neutral ones."""
    random = numpy.random.default_rng(rows + cols + outs)

    def normal(*shape: int, kind: str = dtype, scale: float = 1.0, shift: float = 0.0) -> Array:
        return narrow(shift + scale * random.standard_normal(shape), kind)

    sign = 1.0 - 2.0 * (numpy.arange(rows) % 2)
    x = narrow(random.standard_normal((rows, cols)) + offset * sign[:, None], dtype)
    ln_dtype = ln_dtype or dtype
    return Call(
        op,
        x,
        normal(outs, cols, scale=cols**-0.5),
        normal(outs),
        normal(cols, kind=ln_dtype, scale=0.5, shift=0.0 if options.get("zero_centered_gamma") else 1.0),
        normal(cols, kind=ln_dtype) if op == "layer_norm" else None,
        normal(rows, outs, shift=0.5),
        0.3,
        **options,
    )


def check_forward(call: Call, y: Array, *, rounded_mean: bool = False) -> None:
    """Check y. With `rounded_mean`, the mean may have been rounded before z was computed, as torch does."""
    dtype = call.x.dtype.name
    wide = _wide(call)
    statistics, z = _normalised(wide)
    of_z = _of_z(wide, statistics, z, dtype, rounded_mean)
    expected = z @ wide.weight.T
    if wide.bias is not None:
        expected = expected + wide.bias
    _assert_within("y", y, expected, _of_product(z, of_z, wide.weight.T, 0, dtype), dtype)


def check_backward(call: Call, gradients: tuple[Array | None, ...], *, rounded_mean: bool = False) -> None:
    """Check (dx, dweight, dbias, dln_weight, dln_bias), except those that are None. `rounded_mean` is as above."""
    dtype = call.x.dtype.name
    ln_dtype = dtype if call.ln_weight is None else call.ln_weight.dtype.name
    eps = _eps(dtype)
    wide = _wide(call)
    statistics, z = _normalised(wide)
    mean, rstd, xhat = statistics
    of_z = _of_z(wide, statistics, z, dtype, rounded_mean)
    dz = wide.dy @ wide.weight
    of_dz = _of_product(wide.dy, 0, wide.weight, 0, dtype)
    if wide.dz is not None:
        dz = dz + wide.dz
    of_dz = of_dz + _of_rounding(dz, dtype)
    scale = scale_of(wide.ln_weight, call.zero_centered_gamma)
    offset = (abs(mean) * rstd).clip(1.0, None)
    g, of_g = dz * scale, of_dz * abs(scale)
    c1 = (g * xhat).mean(axis=1, keepdims=True)
    c2 = g.mean(axis=1, keepdims=True) if call.op == "layer_norm" else 0 * c1
    of_means = ROUNDINGS * numpy.sqrt((of_g**2).mean(axis=1, keepdims=True) / g.shape[1])
    of_kernel = BACKWARD_ULPS * offset * eps * _largest(abs(g) + abs(c2) + abs(xhat * c1))
    expected = {
        "dx": (rstd * (g - c2 - xhat * c1), rstd * (of_g + of_means * (1 + abs(xhat)) + of_kernel), dtype),
        "dweight": (wide.dy.T @ z, _of_product(wide.dy.T, 0, z, of_z, dtype), dtype),
        "dbias": (wide.dy.sum(0), _of_sum(wide.dy, 0, eps), dtype),
        "dln_weight": ((dz * xhat).sum(0), _of_sum(abs(dz) * (abs(xhat) + offset), of_dz * xhat, eps), ln_dtype),
        "dln_bias": (dz.sum(0), _of_sum(dz, of_dz, eps), ln_dtype),
    }
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is not None:
            _assert_within(name, gradient, *expected[name])


class Normalised(NamedTuple):
    statistics: Statistics
    z: Array


def _normalised(wide: Call) -> Normalised:
    statistics = normalise(wide.op, wide.x, wide.eps)
    z = statistics.xhat * scale_of(wide.ln_weight, wide.zero_centered_gamma)
    return Normalised(statistics, z if wide.ln_bias is None else z + wide.ln_bias)


def _wide(call: Call) -> Call:
    arrays = [value.get() if hasattr(value, "get") else value for value in call]
    return Call(*[widen(value) if isinstance(value, numpy.ndarray) else value for value in arrays])


# These functions say how far a number may be off, before its own rounding.


def _eps(dtype: str) -> float:
    """Return the eps of the arithmetic, which is float64 for float64 and else float32."""
    return 2.0 ** (1 - FORMATS["float64" if dtype == "float64" else "float32"][0])


def _of_z(wide: Call, statistics: Statistics, z: Array, dtype: str, rounded_mean: bool) -> Array:
    of_norm = FORWARD_ULPS * _eps(dtype) * _largest(z)
    if rounded_mean:
        scale = scale_of(wide.ln_weight, wide.zero_centered_gamma)
        of_norm = of_norm + _eps(dtype) * abs(statistics.mean * statistics.rstd * scale)
    return _of_rounding(z, dtype) + of_norm


def _of_rounding(values: Array, dtype: str) -> Array:
    """Return the error of rounding such values. The distance of subnormal neighbours does not shrink with them."""
    return numpy.maximum(abs(values) * 2.0 ** -FORMATS[dtype][0], ulp(0 * values, dtype) / 2)


def _of_product(a: Array, of_a: Array | int, b: Array, of_b: Array | int, dtype: str) -> Array:
    """Return the error of the product a b, from the independent errors of its operands and from its sums."""
    operands = (of_a + 0 * a) ** 2 @ b**2 + a**2 @ (of_b + 0 * b) ** 2
    sums = a.shape[1] ** 0.5 * _largest(a) * abs(b).max(axis=0, keepdims=True)
    return ROUNDINGS * numpy.sqrt(operands) + SUM_ULPS * _eps(dtype) * sums


def _of_sum(terms: Array, of_terms: Array | int, eps: float) -> Array:
    """Return the error of the sum over rows."""
    independent = ROUNDINGS * numpy.sqrt(((of_terms + 0 * terms) ** 2).sum(0))
    return independent + SUM_ULPS * eps * (len(terms) ** 0.5 * abs(terms).max(axis=0) + abs(terms.sum(0)))


def _largest(values: Array) -> Array:
    return abs(values).max(axis=1, keepdims=True)


def _assert_within(name: str, actual: Array, expected: Array, allowed: Array, dtype: str) -> None:
    assert actual.dtype.name == dtype, f"{name} has dtype {actual.dtype.name}, not {dtype}"
    actual = widen(actual.get() if hasattr(actual, "get") else actual)
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, not {expected.shape}"
    error = abs(actual - expected)
    allowed = allowed + ulp(expected, dtype) / 2
    wrong = ~(error <= allowed)  # NaN is wrong
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.size} are wrong, by up to {float((error / allowed).max()):.3g} times "
        "what is allowed"
    )
