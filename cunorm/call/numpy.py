"""NumPy arrays: every operation in float64 with one rounding at the end, and one of s."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..expression.philox import uniform
from ..expression.texts import evaluate
from ..expression.value import Expression
from ..operation import NORMS, SEED, Operation, affine, derivative
from ..plan.problem import BLOCK, FLOAT8, compute_dtype
from . import broadcasting, checks
from .backend import Norm
from .broadcasting import Given, Kinds
from .checks import Layout
from .store import MOST_MULTIPLIER, Float8Store, check_rows, check_x, scale_of, scales_shape


def norm(
    asked: Norm, x: Any, weight: Any, bias: Any, eps: float, out: Any, statistics: bool
) -> tuple[numpy.ndarray, ...]:
    """Run `Backend.norm`."""
    return _norm(asked, x, weight, bias, eps, out, statistics)


def norm_float8(
    asked: Norm, x: Any, weight: Any, bias: Any, eps: float, store: Float8Store, scale: Any
) -> tuple[numpy.ndarray, ...]:
    """Run `Backend.norm_float8`."""
    check_x(asked[0], layout(asked[0], "x", x))
    return _norm((*asked[:3], None, asked[4]), x, weight, bias, eps, None, False, store, scale)


def _norm(
    asked: Norm,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    out: Any,
    statistics: bool,
    store: Float8Store | None = None,
    scale: Any = None,
) -> tuple[numpy.ndarray, ...]:
    function, normalized_shape, zero_centered_gamma, dtype, sm_margin = asked
    named = {"x": x, "weight": weight, "bias": bias, "out": out}
    layouts = {name: layout(function, name, array) for name, array in named.items() if array is not None or name == "x"}
    parameters = (normalized_shape, layouts.get("weight"), layouts.get("bias"), layouts.get("out"))
    dtype = None if dtype is None else checks.dtype_name(function, dtype)
    shape, y_dtype = checks.check_forward(
        function, layouts["x"], *parameters, dtype, zero_centered_gamma=zero_centered_gamma
    )
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, sm_margin, None)
    if out is not None:
        _check_out(function, "out", named, layouts, len(shape))
    operands = {name: one for name, one in named.items() if one is not None and name not in ("x", "out")}
    operation = affine("layer_norm" if function.startswith("layer_norm") else "rms_norm", bool(zero_centered_gamma))
    if store and store.granularity == "tensor":
        scale = scale_of(numpy, operation, store, math.prod(shape), operands, scale)
    results = _results(function, operation, x, operands, eps, (y_dtype, layouts["x"].dtype), len(shape), store, scale)
    if out is not None:
        out[...] = results["y"]
        results["y"] = out
    kept = NORMS[operation.norm].statistics if statistics else ()
    return tuple(results[name] for name in (*(store.results(("y",)) if store else ("y",)), *kept))


def norm_backward(
    asked: Norm, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, dx_out: Any, output_mask: Any
) -> tuple[numpy.ndarray | None, ...]:
    """Run `Backend.norm_backward`."""
    function, _, zero_centered_gamma, _, sm_margin = asked
    subtracts_mean = function.startswith("layer_norm")
    named = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "dx_out": dx_out}
    optional = ("weight", "dx_out") if subtracts_mean else ("weight", "dx_out", "mean")
    layouts = {
        name: layout(function, name, array)
        for name, array in named.items()
        if array is not None or name not in optional
    }
    required = (layouts["dy"], layouts["x"], layouts.get("mean"), layouts["rstd"])
    optional = (layouts.get("weight"), layouts.get("dx_out"))
    shape = checks.check_backward(function, *required, *optional, zero_centered_gamma=zero_centered_gamma)
    checks.check_sm_margin(function, sm_margin, None)
    mask = checks.check_output_mask(function, output_mask, 3 if subtracts_mean else 2, dx_out)
    if dx_out is not None:
        _check_out(function, "dx_out", named, layouts, len(shape))
    wanted = [name for name, one in zip(("x", "weight", "bias"), mask, strict=True) if one]
    operation = affine("layer_norm" if subtracts_mean else "rms_norm", bool(zero_centered_gamma))
    arrays = {name: array for name, array in named.items() if array is not None and name != "dx_out"}
    parameter = x if weight is None else weight
    dtypes = {"x": x.dtype, "weight": parameter.dtype, "bias": parameter.dtype}
    kinds = {name: "column" for name in ("weight",) if name in arrays}
    gradients = _gradients(operation, arrays, wanted, kinds, dtypes, len(shape), x.dtype.name, function)
    if dx_out is not None:
        dx_out[...] = gradients["x"]
        gradients["x"] = dx_out
    return gradients.get("x"), gradients.get("weight"), gradients.get("bias")


def forward(
    function: str,
    operation: Operation,
    x: numpy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
    float8: Float8Store | None = None,
    scale: Any = None,
) -> tuple[dict[str, numpy.ndarray], numpy.ndarray | None, numpy.ndarray | None]:
    """Run `Backend.forward`."""
    of_x = layout(function, "x", x)
    given = {name: _given(function, name, array) for name, array in {"x": x, **operands}.items()}
    broadcasting.check_operands(function, of_x, {name: given[name] for name in operands}, demanded=demanded)
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, sm_margin, None)
    if float8:
        check_rows(function, of_x, s_dtype)
        if float8.granularity == "tensor":
            scale = scale_of(numpy, operation, float8, x.shape[-1], operands, scale)
    dtypes = dtype or of_x.dtype, s_dtype or of_x.dtype
    by_name = _results(function, operation, x, operands, eps, dtypes, 1, float8, scale)
    results = {name: by_name[name] for name in (float8.results(operation.returns) if float8 else operation.returns)}
    return (results, by_name.get("mean"), by_name["rstd"]) if statistics else (results, None, None)


def _results(
    function: str,
    operation: Operation,
    x: numpy.ndarray,
    operands: Mapping[str, Any],
    eps: float,
    dtypes: tuple[str, str],
    ndim: int,
    store: Float8Store | None,
    scale: Any,
) -> dict[str, numpy.ndarray]:
    """All results and statistics by name, y left out where bytes alone are stored. `dtypes`: of y and of s; `ndim` axes
    are normalised.
    """
    operation = operation.given(operands)
    y_dtype, row_dtype = (numpy_dtype(function, name) for name in dtypes)
    axes, leading = tuple(range(x.ndim - ndim, x.ndim)), x.shape[: x.ndim - ndim]
    values = {name: _wide(name, array, x.shape) for name, array in {"x": x, **operands}.items()}
    results: dict[str, numpy.ndarray] = {}
    with numpy.errstate(all="ignore"):
        rows = values["x"]
        if operation.prologue is not None:
            results["s"] = rounded(_full(operation.prologue, values, x.shape), row_dtype)
            rows = results["s"].astype(numpy.float64)
        kind = compute_dtype(row_dtype.name)
        if NORMS[operation.norm].subtracts_mean:
            mean = rows.mean(axes, keepdims=True)
            rows = rows - mean
            lost = rows.mean(axes, keepdims=True)  # by the rounding of mean
            rows -= lost
            results["mean"] = (mean + lost).astype(kind, "C").reshape(leading)
        rstd = 1 / numpy.sqrt((rows * rows).mean(axes, keepdims=True) + eps)
        results["rstd"] = rstd.astype(kind, "C").reshape(leading)
        exact = _full(operation.epilogue, values | {"xhat": rows * rstd}, x.shape)
        if store is None or store.wide:
            results["y"] = rounded(exact, y_dtype)
        if store:
            cols = math.prod(x.shape[x.ndim - ndim :])
            y8, y8_scale = quantise(
                exact.astype(numpy.float32).reshape(-1, cols), store.granularity, store.format, scale
            )
            shape = scales_shape(store.granularity, leading, cols)
            results |= {"y8": y8.reshape(x.shape), "y8_scale": y8_scale.reshape(shape)}
    return {name: _contiguous(array) for name, array in results.items()}


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: Kinds,
    s_dtype: str | None,
    sm_margin: int,
) -> dict[str, numpy.ndarray]:
    """Run `Backend.backward`."""
    checks.check_sm_margin(function, sm_margin, None)
    needed = ("x", *NORMS[operation.norm].statistics)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    of_x = layout(function, "x", arrays["x"])
    operands = {name: given[name] for name in operation.operands if name in given}
    kinds = broadcasting.check_operands(function, of_x, operands, demanded=demanded)
    s = given.get("s")
    row_dtype = s_dtype or (s.dtype if isinstance(s, Layout) else of_x.dtype)
    broadcasting.check_backward(function, operation, given, row_dtype)
    compute = numpy.dtype(compute_dtype(row_dtype))
    dtypes = {
        name: compute if kinds.get(name) == "scalar" else getattr(arrays.get(name, arrays["x"]), "dtype", compute)
        for name in wanted
    }
    names = {name: of.dtype for name, of in given.items() if isinstance(of, Layout)}
    same = broadcasting.same_gradients(operation, wanted, operands, kinds, names)
    gradients = _gradients(
        operation, arrays, tuple(dict.fromkeys(same.values())), kinds, dtypes, 1, row_dtype, function
    )
    return {name: gradients[of] for name, of in same.items()}


def _gradients(
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    kinds: Mapping[str, str],
    dtypes: Mapping[str, numpy.dtype],
    ndim: int,
    row_dtype: str,
    function: str,
) -> dict[str, numpy.ndarray]:
    """The gradients `wanted` by name, each in its dtype of `dtypes`. An operand that was left out is a column."""
    present = [name for name in operation.operands if name in arrays]
    derivatives = derivative(operation, wanted, present)
    shape = arrays["x"].shape
    axes = tuple(range(len(shape) - ndim, len(shape)))
    values = {name: _wide(name, array, shape) for name, array in arrays.items()}
    values.setdefault("dy", numpy.zeros(shape))
    with numpy.errstate(all="ignore"):
        rows = values.get("s", values["x"])
        if "s" not in values and operation.prologue is not None:
            rows = rounded(_full(operation.prologue, values, shape), numpy_dtype(function, row_dtype))
            rows = rows.astype(numpy.float64)
        mean, rstd = (numpy.expand_dims(values[name], axes) if name in values else 0 for name in ("mean", "rstd"))
        values["xhat"] = (rows - mean) * rstd
        if derivatives.g is not None:
            g = _full(derivatives.g, values, shape)
            c1 = (g * values["xhat"]).mean(axes, keepdims=True)
            c2 = g.mean(axes, keepdims=True) if NORMS[operation.norm].subtracts_mean else 0.0
            values["ds"] = (g - c2 - values["xhat"] * c1) * rstd + values.get("ds", 0.0)
        gradients: dict[str, numpy.ndarray] = {}
        for name, expression in (*derivatives.early, *derivatives.late):
            part = _full(expression, values, shape)
            gradients[name] = gradients[name] + part if name in gradients else part
        return {
            name: _contiguous(rounded(_summed(gradients[name], name, arrays, kinds, ndim), dtypes[name]))
            for name in wanted
        }


def _summed(
    gradient: numpy.ndarray, name: str, arrays: Mapping[str, Any], kinds: Mapping[str, str], ndim: int
) -> numpy.ndarray:
    """The gradient of an operand, in its shape, of that by elements."""
    kind = "full" if name == "x" else kinds.get(name, "column")
    if kind == "full":
        return gradient
    if kind == "scalar":
        return numpy.asarray(gradient.sum())
    if kind == "column":
        total = sum_of_rows(gradient, gradient.ndim - ndim)
        return total.reshape(arrays[name].shape) if name in arrays else total
    shape = arrays[name].shape
    return gradient.sum(broadcasting.broadcast_axes(shape, gradient.shape)).reshape(shape)


def _given(function: str, name: str, array: Any) -> Given:
    """Return what the checks know of an array or a number. An array without axes is a number."""
    if isinstance(array, numbers.Real):
        return broadcasting.number(function, name, array)
    given = layout(function, name, array)
    if given.shape or name in ("x", SEED):
        return given
    checks.check_dtype(function, name, given)
    return float(array)


def _wide(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if name == SEED:
        seed = numpy.ascontiguousarray(array).reshape(-1).view(numpy.int64)[0]
        return uniform(seed, shape, numpy)
    # Row by row: NumPy adds in pairs only along contiguous memory.
    return float(array) if isinstance(array, numbers.Real) else array.astype(numpy.float64, "C")


def _contiguous(array: numpy.ndarray) -> numpy.ndarray:
    """Copy a result as a kernel would have written it, however the operands lie."""
    return numpy.asarray(array, order="C")


def _full(expression: Expression, values: Mapping[str, Any], shape: tuple[int, ...]) -> numpy.ndarray:
    """The value of an expression for every element of x."""
    return numpy.broadcast_to(evaluate(expression, values, numpy), shape)


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a NumPy array; TypeError for anything else."""
    if not isinstance(array, numpy.ndarray) or isinstance(array, numpy.ma.MaskedArray):
        must_be = "a NumPy array" if name == "x" else "a NumPy array, as x is"
        raise TypeError(f"{function}: {name} must be {must_be}; got {type(array).__name__}. Convert it.")
    strides = checks.strides_in_elements(function, name, array.shape, array.strides, array.dtype.itemsize or 1)
    return Layout(array.shape, strides, array.dtype.name, "cpu")


def _check_out(
    function: str, name: str, named: Mapping[str, numpy.ndarray], layouts: Mapping[str, Layout], ndim: int
) -> None:
    """Check an array that is written, named in errors."""
    inputs = [(one, layouts[one], pointer(named[one])) for one in layouts if one != name]
    out = named[name]
    checks.check_out_memory(function, name, layouts[name], pointer(out), inputs, ndim)
    if not out.flags.writeable:
        raise ValueError(f"{function}: {name} must be writeable; got a read-only array. Pass a copy.")


def pointer(array: numpy.ndarray) -> int:
    return array.__array_interface__["data"][0]


def numpy_dtype(function: str, name: str) -> numpy.dtype:
    if name == "bfloat16" or name in FLOAT8:
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(
                f"{function}: {name} in NumPy needs ml_dtypes; it could not be imported. pip install ml_dtypes."
            ) from error
        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def sum_of_rows(values: numpy.ndarray, leading: int) -> numpy.ndarray:
    """The sum over the first axes. NumPy adds in pairs only along contiguous memory; elsewhere one by one, with an
    error that grows with the number of rows.
    """
    shape = values.shape[leading:]
    columns = numpy.ascontiguousarray(values.reshape(math.prod(values.shape[:leading]), math.prod(shape)).T)
    return columns.sum(axis=1).reshape(shape)


def rounded(values: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """float64 values in `dtype`, rounded once. ml_dtypes takes two steps to bfloat16, by way of float32: rounding the
    first to odd (cut off, and the last bit set if anything was lost) makes the second right.
    """
    if dtype.name != "bfloat16":
        return values.astype(dtype)
    single = numpy.atleast_1d(values.astype(numpy.float32))
    word = single.view(numpy.uint32)
    lost = single != values
    word -= abs(single) > abs(values)
    word |= lost
    return single.reshape(values.shape).astype(dtype)


def quantise(
    y: numpy.ndarray, granularity: str | int, name: str, scale: Any = None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The bytes of float32 rows, y[rows, cols], and what makes numbers of them again."""
    rows, cols = y.shape
    largest_number = numpy.float32(FLOAT8[name])
    with numpy.errstate(all="ignore"):
        if granularity == "tensor":
            scales = numpy.asarray(scale, numpy.float32)
            return _bytes(y * (numpy.float32(1) / scales), name), scales
        width = BLOCK if granularity == BLOCK else cols
        blocks = -(-cols // width)
        padded = numpy.pad(y, ((0, 0), (0, blocks * width - cols))).reshape(rows, blocks, width)
        largest = abs(padded).max(axis=2)
        quotient = largest_number / largest
        most = numpy.float32(MOST_MULTIPLIER)
        tiny = quotient > most
        multiplier = numpy.where(tiny, most, quotient)
        scales = numpy.where(tiny, numpy.where(largest == 0, numpy.float32(1), 1 / most), largest / largest_number)
        scales = scales + (largest - largest)  # NaN where the largest is not finite
        scaled = (padded * multiplier[:, :, None]).reshape(rows, blocks * width)[:, :cols]
        return _bytes(scaled, name), scales


def _bytes(values: numpy.ndarray, name: str) -> numpy.ndarray:
    """Round to nearest even; what is too large becomes the largest number."""
    largest = FLOAT8[name]
    return numpy.clip(values, -largest, largest).astype(numpy_dtype("cunorm", name)).view(numpy.uint8)
