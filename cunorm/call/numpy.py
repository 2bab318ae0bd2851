"""Fused operations on NumPy arrays, in float64 with one rounding at the end, and one of s."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..expression.philox import uniform
from ..expression.texts import evaluate
from ..expression.value import Expression
from ..norm.float8_numpy import quantise
from ..numpy_arrays import layout, numpy_dtype, rounded, sum_of_rows
from ..operation import NORMS, SEED, Operation, derivative
from ..plan.problem import compute_dtype
from . import broadcasting, checks
from .store import Float8Store, check_rows, scale_of, scales_shape


def forward(
    function: str,
    operation: Operation,
    x: numpy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
    float8: Float8Store | None = None,
    scale: Any = None,
) -> tuple[dict[str, numpy.ndarray], numpy.ndarray | None, numpy.ndarray | None]:
    """Return ({"y": y, "s": s if it is returned}, mean, rstd), statistics None unless asked for; with `float8` y8 and
    y8_scale, and y if it is wide.
    """
    of_x = layout(function, "x", x)
    given = {name: _given(function, name, array) for name, array in {"x": x, **operands}.items()}
    broadcasting.check_operands(function, of_x, {name: given[name] for name in operands}, demanded=demanded)
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, sm_margin, None)
    if float8:
        check_rows(function, of_x, s_dtype)
        if float8.granularity == "tensor":
            scale = scale_of(numpy, operation, float8, x.shape[-1], operands, scale)
    operation = operation.given(operands)
    y_dtype = numpy_dtype(function, dtype or of_x.dtype)
    row_dtype = numpy_dtype(function, s_dtype or of_x.dtype)
    values = {name: _wide(name, array, x.shape) for name, array in {"x": x, **operands}.items()}
    with numpy.errstate(all="ignore"):
        rows, mean, rstd = values["x"], None, None
        s = None
        if operation.prologue is not None:
            s = rounded(_full(operation.prologue, values, x.shape), row_dtype)
            rows = s.astype(numpy.float64)
        if NORMS[operation.norm].subtracts_mean:
            mean = rows.mean(-1, keepdims=True)
            rows = rows - mean
            lost = rows.mean(-1, keepdims=True)  # by the rounding of mean
            rows -= lost
            mean = mean + lost
        rstd = 1 / numpy.sqrt((rows * rows).mean(-1, keepdims=True) + eps)
        exact = _full(operation.epilogue, values | {"xhat": rows * rstd}, x.shape)
        of_names: dict[str, Any] = {"s": s}
        if float8 is None or float8.wide:
            of_names["y"] = rounded(exact, y_dtype)
        returns = operation.returns
        if float8:
            y8, y8_scale = quantise(
                exact.astype(numpy.float32).reshape(-1, x.shape[-1]), float8.granularity, float8.format, scale
            )
            shape = scales_shape(float8.granularity, x.shape[:-1], x.shape[-1])
            of_names |= {"y8": y8.reshape(x.shape), "y8_scale": y8_scale.reshape(shape)}
            returns = float8.results(returns)
        results = {name: _contiguous(of_names[name]) for name in returns}
        if not statistics:
            return results, None, None
        kind = compute_dtype(row_dtype.name)
        mean, rstd = (None if one is None else one.astype(kind, "C").reshape(x.shape[:-1]) for one in (mean, rstd))
        return results, mean, rstd


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: broadcasting.Kinds,
    s_dtype: str | None,
    sm_margin: int,
) -> dict[str, numpy.ndarray]:
    """The gradients `wanted`, by name. `arrays`: x, dy, ds, s, mean, rstd and the operands, None or absent where there
    is none.
    """
    checks.check_sm_margin(function, sm_margin, None)
    needed = ("x", *NORMS[operation.norm].statistics)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    of_x = layout(function, "x", arrays["x"])
    operands = {name: given[name] for name in operation.operands if name in given}
    kinds = broadcasting.check_operands(function, of_x, operands, demanded=demanded)
    s = given.get("s")
    row_dtype = s_dtype or (s.dtype if isinstance(s, checks.Layout) else of_x.dtype)
    broadcasting.check_backward(function, operation, given, row_dtype)
    compute = compute_dtype(row_dtype)
    dtypes = {name: of.dtype for name, of in given.items() if isinstance(of, checks.Layout)}
    same = broadcasting.same_gradients(operation, wanted, operands, kinds, dtypes)
    found = derivative(operation, dict.fromkeys(same.values()), operands)
    shape = of_x.shape
    values = {name: _wide(name, array, shape) for name, array in arrays.items()}
    values.setdefault("dy", numpy.zeros(shape))
    with numpy.errstate(all="ignore"):
        rows = values.get("s", values["x"])
        if "s" not in values and operation.prologue is not None:
            rows = rounded(_full(operation.prologue, values, shape), numpy_dtype(function, row_dtype))
            rows = rows.astype(numpy.float64)
        rstd = values["rstd"][..., None]
        values["xhat"] = (rows - (values["mean"][..., None] if "mean" in values else 0)) * rstd
        if found.g is not None:
            g = _full(found.g, values, shape)
            c1 = (g * values["xhat"]).mean(-1, keepdims=True)
            c2 = g.mean(-1, keepdims=True) if NORMS[operation.norm].subtracts_mean else 0.0
            values["ds"] = (g - c2 - values["xhat"] * c1) * rstd + values.get("ds", 0.0)
        gradients: dict[str, numpy.ndarray] = {}
        for name, expression in (*found.early, *found.late):
            part = _full(expression, values, shape)
            gradients[name] = gradients[name] + part if name in gradients else part
        gradients = {name: _contiguous(_reduced(one, name, arrays, kinds, compute)) for name, one in gradients.items()}
        return {name: gradients[of] for name, of in same.items()}


def _reduced(
    gradient: numpy.ndarray, name: str, arrays: Mapping[str, Any], kinds: Mapping[str, str], compute: str
) -> numpy.ndarray:
    """The gradient of an operand, in its shape and dtype, of that by elements. One that was left out is a column."""
    kind = "full" if name == "x" else kinds.get(name, "column")
    if kind == "scalar":
        return rounded(numpy.asarray(gradient.sum()), numpy.dtype(compute))
    of = arrays.get(name, arrays["x"])
    if kind == "full":
        return rounded(gradient, of.dtype)
    if kind != "column":
        return rounded(gradient.sum(broadcasting.broadcast_axes(of.shape, gradient.shape)).reshape(of.shape), of.dtype)
    total = rounded(sum_of_rows(gradient, gradient.ndim - 1), of.dtype)
    return total.reshape(of.shape) if name in arrays else total


def _given(function: str, name: str, array: Any) -> broadcasting.Given:
    """What the checks know of an array or a number. An array without axes is a number."""
    if isinstance(array, numbers.Real):
        return broadcasting.number(function, name, array)
    found = layout(function, name, array)
    if found.shape or name in ("x", SEED):
        return found
    checks.check_dtype(function, name, found)
    return float(array)


def _wide(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if name == SEED:
        seed = numpy.ascontiguousarray(array).reshape(-1).view(numpy.int64)[0]
        return uniform(seed, shape, numpy)
    # Row by row: NumPy adds in pairs only along contiguous memory.
    return float(array) if isinstance(array, numbers.Real) else array.astype(numpy.float64, "C")


def _contiguous(array: numpy.ndarray) -> numpy.ndarray:
    """As a kernel would have written it, however the operands lie."""
    return numpy.asarray(array, order="C")


def _full(expression: Expression, values: Mapping[str, Any], shape: tuple[int, ...]) -> numpy.ndarray:
    """The value of an expression for every element of x."""
    return numpy.broadcast_to(evaluate(expression, values, numpy), shape)
