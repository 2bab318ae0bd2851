"""Check that a result is right: compare all rows with float64 on the GPU, in chunks, by CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy
import numpy

from bench.suites import Case

CHUNK = 1 << 23  # elements widened to float64 at a time
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}

# The errors that still count as right, in eps of the dtype. They are loose because some providers round twice, or add
# up gradients in 16 bits. A mistake (a missing term, a missing row, eps outside the root) is far beyond.
LIMITS = {
    "float16": {"y": 2.0, "dx": 2.0, "dweight": 8.0, "dbias": 8.0},
    "bfloat16": {"y": 2.0, "dx": 2.0, "dweight": 8.0, "dbias": 8.0},
    "float32": {"y": 64.0, "dx": 64.0, "dweight": 64.0, "dbias": 64.0},
}


def statistics(case: Case, x: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Return (mean, rstd) of each row in float32, where the mean of RMSNorm is 0."""
    x = x.reshape(case.rows, case.cols)
    mean, rstd = cupy.empty(case.rows, numpy.float32), cupy.empty(case.rows, numpy.float32)
    for rows in _chunks(case):
        m, r, _ = _normalise(case, x[rows])
        mean[rows], rstd[rows] = m[:, 0], r[:, 0]
    return mean, rstd


def errors(case: Case, buffers: Any, results: tuple[Any, ...]) -> dict[str, float]:
    """Return the largest error of each result in eps of the case's dtype, whatever dtype dweight and dbias have.

    Errors of y are relative to the row's largest |y|, and those of dx to the row's largest sum of its terms'
    magnitudes, because dx is a difference. Errors of dweight and dbias are relative to sqrt(rows) * the largest term of
    the column. For dweight that term is |dy| * (|xhat| + 1): the mean is float32, so an xhat near zero is no better
    known than others.
    """
    matrix = ("y",) if case.direction == "forward" else ("dx",)
    names = matrix if case.direction == "forward" else ("dx", "dweight", "dbias")
    arrays = dict(zip(names, results, strict=False))
    for name, array in arrays.items():
        expected = (case.rows, case.cols) if name in matrix else (case.cols,)
        if array is not None and array.size != numpy.prod(expected):
            raise ValueError(f"{name} must have shape {expected}; got {array.shape}")
    worst = dict.fromkeys(matrix, 0.0)
    weight = _wide(buffers.weight)
    x, all_dy = (None if a is None else a.reshape(case.rows, case.cols) for a in (buffers.x, vars(buffers).get("dy")))
    sums = {"dweight": 0.0, "dbias": 0.0}
    largest = {"dweight": 0.0, "dbias": 0.0}
    for rows in _chunks(case):
        _, rstd, xhat = _normalise(case, x[rows])
        if case.direction == "forward":
            expected = xhat * weight
            if buffers.bias is not None:
                expected += _wide(buffers.bias)
            scale = abs(expected).max(axis=1, keepdims=True)
        else:
            dy = _wide(all_dy[rows])
            g = dy * weight
            c1 = (g * xhat).mean(axis=1, keepdims=True)
            c2 = g.mean(axis=1, keepdims=True) if case.op == "layer_norm" else 0 * c1
            expected = rstd * (g - c2 - xhat * c1)
            scale = (rstd * (abs(g) + abs(c2) + abs(xhat * c1))).max(axis=1, keepdims=True)
            for name, terms, sizes in (("dweight", dy * xhat, abs(dy) * (abs(xhat) + 1)), ("dbias", dy, abs(dy))):
                sums[name] = sums[name] + terms.sum(axis=0)
                largest[name] = cupy.maximum(largest[name], sizes.max(axis=0))
        (name,) = matrix
        actual = arrays[name].reshape(case.rows, case.cols)[rows]
        worst[name] = _larger(worst[name], abs(_wide(actual) - expected) / scale, case.dtype)
    for name in ("dweight", "dbias"):
        if arrays.get(name) is not None:
            difference = abs(_wide(arrays[name].reshape(case.cols)) - sums[name])
            allowed = case.rows**0.5 * largest[name]
            worst[name] = _larger(0.0, difference / allowed, case.dtype)
    return worst


def wrong(case: Case, worst: dict[str, float]) -> str:
    """Say which errors are beyond their limits; the text is empty if none is."""
    return ", ".join(
        f"{name} is off by {error:.3g} eps (limit {LIMITS[case.dtype][name]:g})"
        for name, error in worst.items()
        if not error <= LIMITS[case.dtype][name]
    )


def _chunks(case: Case) -> Iterator[slice]:
    step = max(1, CHUNK // case.cols)
    return (slice(start, start + step) for start in range(0, case.rows, step))


def _normalise(case: Case, x: cupy.ndarray) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    x = _wide(x)
    mean = x.mean(axis=1, keepdims=True)
    if case.op == "rms_norm":
        mean = mean * 0
    x -= mean
    rstd = 1 / cupy.sqrt((x * x).mean(axis=1, keepdims=True) + case.eps)
    return mean, rstd, x * rstd


def _wide(array: cupy.ndarray) -> cupy.ndarray:
    if array.dtype.name == "bfloat16":
        return (array.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)
    return array.astype(numpy.float64)


def _larger(worst: float, relative: cupy.ndarray, dtype: str) -> float:
    """Return the largest error so far in eps, where NaN counts as infinite."""
    relative = cupy.where(cupy.isnan(relative), cupy.inf, relative)
    return max(worst, float(relative.max()) / EPS[dtype])
