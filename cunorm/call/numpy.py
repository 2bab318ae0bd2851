"""The backend of NumPy arrays: float64 with one rounding at the end, and one of s."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from ..expression.philox import uniform
from ..expression.texts import evaluate
from ..expression.value import Expression
from ..operation import NORMS, SEED, derivative
from ..plan.problem import BLOCK, FLOAT8, compute_dtype
from . import broadcasting, checks
from .backend import Arrays, CallOptions
from .broadcasting import Given
from .checks import Layout, NormOptions, NormTuple
from .store import MOST_MULTIPLIER, Float8Store, check_rows, check_x, scale_of, scales_shape


def norm(options: NormTuple, arrays: Sequence[Any], eps: float, out: Any) -> tuple[numpy.ndarray, ...]:
    """Run `Backend.norm`."""
    options = NormOptions(*options)
    results = _norm(options, arrays, eps, out, None)
    statistics = NORMS[options.norm].statistics if options.returns else ()
    return tuple(results[name] for name in ("y", *statistics))


def norm_float8(options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> tuple[numpy.ndarray, ...]:
    """Run `Backend.norm_float8`."""
    options = NormOptions(*options)
    check_x(options.function, layout(options.function, "x", arrays[0]))
    results = _norm(options, arrays, eps, None, scale)
    return tuple(results[name] for name in options.returns.results(("y",)))


def _norm(options: NormOptions, arrays: Sequence[Any], eps: float, out: Any, scale: Any) -> dict[str, numpy.ndarray]:
    """Return all results and statistics by name."""
    function = options.function
    given: dict[str, Any] = dict(zip(("x", "weight", "bias", "out"), (*arrays, out), strict=True))
    layouts = {name: layout(function, name, array) for name, array in given.items() if array is not None or name == "x"}
    if options.dtype is not None:
        options = options._replace(dtype=checks.dtype_name(function, options.dtype))
    shape, y_dtype = checks.check_forward(options, layouts)
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, options.sm_margin, None)
    if out is not None:
        _check_out(function, "out", given, layouts, len(shape))
    given = {name: array for name, array in given.items() if array is not None and name != "out"}
    store = options.returns if isinstance(options.returns, Float8Store) else None
    if store and store.granularity == "tensor":
        scale = scale_of(numpy, options.operation, store, math.prod(shape), given, scale)
    call = CallOptions(function, options.operation, dtype=y_dtype, store=store, ndim=len(shape))
    results = _results(call, given, eps, scale)
    if out is not None:
        out[...] = results["y"]
        results["y"] = out
    return results


def norm_backward(options: NormTuple, arrays: Sequence[Any], dx_out: Any) -> tuple[numpy.ndarray | None, ...]:
    """Run `Backend.norm_backward`."""
    options = NormOptions(*options)
    function = options.function
    names = ("dy", "x", "mean", "rstd", "weight", "dx_out")
    given: dict[str, Any] = dict(zip(names, (*arrays, dx_out), strict=True))
    layouts = {
        name: layout(function, name, array)
        for name, array in given.items()
        if array is not None or name in options.required
    }
    shape = checks.check_backward(options, layouts)
    checks.check_sm_margin(function, options.sm_margin, None)
    mask = checks.check_output_mask(function, options.returns, 3 if options.norm == "layer_norm" else 2, dx_out)
    if dx_out is not None:
        _check_out(function, "dx_out", given, layouts, len(shape))
    wanted = [name for name, is_wanted in zip(("x", "weight", "bias"), mask, strict=True) if is_wanted]
    given = {name: array for name, array in given.items() if array is not None and name != "dx_out"}
    x = given["x"]
    parameter = given.get("weight", x)
    dtypes = {"x": x.dtype, "weight": parameter.dtype, "bias": parameter.dtype}
    call = CallOptions(function, options.operation, s_dtype=x.dtype.name, ndim=len(shape))
    gradients = _gradients(call, given, wanted, {"weight": "column"}, dtypes)
    if dx_out is not None:
        dx_out[...] = gradients["x"]
        gradients["x"] = dx_out
    return gradients.get("x"), gradients.get("weight"), gradients.get("bias")


def forward(options: CallOptions, arrays: Arrays, eps: float, scale: Any = None) -> dict[str, numpy.ndarray]:
    """Run `Backend.forward`."""
    function, operation, store = options.function, options.operation, options.store
    x = layout(function, "x", arrays["x"])
    operands = {name: _given(function, name, array) for name, array in arrays.items() if name != "x"}
    broadcasting.check_operands(function, x, operands, demanded=options.demanded)
    eps = checks.check_eps(function, eps)
    checks.check_sm_margin(function, options.sm_margin, None)
    if store:
        check_rows(function, x, options.s_dtype)
        if store.granularity == "tensor":
            scale = scale_of(numpy, operation, store, x.shape[-1], arrays, scale)
    results = _results(options, arrays, eps, scale)
    names = store.results(operation.returns) if store else operation.returns
    return {name: results[name] for name in (*names, *(operation.statistics if options.statistics else ()))}


def _results(options: CallOptions, arrays: Arrays, eps: float, scale: Any) -> dict[str, numpy.ndarray]:
    """Return all results and statistics by name, without y where bytes alone are stored."""
    operation, store, ndim = options.operation.given(arrays), options.store, options.ndim
    x = arrays["x"]
    names = options.dtype or x.dtype.name, options.s_dtype or x.dtype.name
    y_dtype, row_dtype = (numpy_dtype(options.function, name) for name in names)
    axes, leading = tuple(range(x.ndim - ndim, x.ndim)), x.shape[: x.ndim - ndim]
    values = {name: _wide(name, array, x.shape) for name, array in arrays.items()}
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


def backward(options: CallOptions, arrays: Arrays, wanted: Sequence[str]) -> dict[str, numpy.ndarray]:
    """Run `Backend.backward`."""
    function, operation = options.function, options.operation
    checks.check_sm_margin(function, options.sm_margin, None)
    needed = ("x", *NORMS[operation.norm].statistics)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    given = {name: _given(function, name, array) for name, array in arrays.items()}
    x = layout(function, "x", arrays["x"])
    operands = {name: given[name] for name in operation.operands if name in given}
    kinds = broadcasting.check_operands(function, x, operands, demanded=options.demanded)
    s = given.get("s")
    row_dtype = options.s_dtype or (s.dtype if isinstance(s, Layout) else x.dtype)
    broadcasting.check_backward(function, operation, given, row_dtype)
    compute = numpy.dtype(compute_dtype(row_dtype))
    dtypes = {
        name: compute if kinds.get(name) == "scalar" else getattr(arrays.get(name, arrays["x"]), "dtype", compute)
        for name in wanted
    }
    names = {name: array.dtype for name, array in given.items() if isinstance(array, Layout)}
    same = broadcasting.same_gradients(operation, wanted, operands, kinds, names)
    computed = tuple(dict.fromkeys(same.values()))
    gradients = _gradients(options._replace(s_dtype=row_dtype), arrays, computed, kinds, dtypes)
    return {name: gradients[source] for name, source in same.items()}


def _gradients(
    options: CallOptions,
    arrays: Arrays,
    wanted: Sequence[str],
    kinds: Mapping[str, str],
    dtypes: Mapping[str, numpy.dtype],
) -> dict[str, numpy.ndarray]:
    """Return the gradients `wanted` by name, each in its dtype of `dtypes`. An operand that was left out is a column.

    The options have the dtype of the normalised rows as s_dtype.
    """
    operation, ndim = options.operation, options.ndim
    present = [name for name in operation.operands if name in arrays]
    derivatives = derivative(operation, wanted, present)
    shape = arrays["x"].shape
    axes = tuple(range(len(shape) - ndim, len(shape)))
    values = {name: _wide(name, array, shape) for name, array in arrays.items()}
    values.setdefault("dy", numpy.zeros(shape))
    with numpy.errstate(all="ignore"):
        rows = values.get("s", values["x"])
        if "s" not in values and operation.prologue is not None:
            rows = rounded(
                _full(operation.prologue, values, shape),
                numpy_dtype(options.function, options.s_dtype or arrays["x"].dtype.name),
            )
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
    """Return the gradient of an operand, in its shape, from that of each of the elements that it stands for."""
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
    """Return the value of an expression for every element of x."""
    return numpy.broadcast_to(evaluate(expression, values, numpy), shape)


def layout(function: str, name: str, array: Any) -> Layout:
    """Return the layout of a NumPy array; raise TypeError for anything else."""
    if not isinstance(array, numpy.ndarray) or isinstance(array, numpy.ma.MaskedArray):
        must_be = "a NumPy array" if name == "x" else "a NumPy array, as x is"
        raise TypeError(f"{function}: {name} must be {must_be}; got {type(array).__name__}. Convert it.")
    strides = checks.strides_in_elements(function, name, array.shape, array.strides, array.dtype.itemsize or 1)
    return Layout(array.shape, strides, array.dtype.name, "cpu")


def _check_out(
    function: str, name: str, named: Mapping[str, numpy.ndarray], layouts: Mapping[str, Layout], ndim: int
) -> None:
    """Check the array of this name, which is written to."""
    inputs = [(other, layouts[other], pointer(named[other])) for other in layouts if other != name]
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
    """Return the sum over the `leading` first axes.

    NumPy adds in pairs only along contiguous memory. Elsewhere it adds one by one, with an error that grows with the
    number of rows.
    """
    shape = values.shape[leading:]
    columns = numpy.ascontiguousarray(values.reshape(math.prod(values.shape[:leading]), math.prod(shape)).T)
    return columns.sum(axis=1).reshape(shape)


def rounded(values: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """Round float64 values to `dtype` once.

    ml_dtypes takes two steps to bfloat16, by way of float32. The second is right if the first rounds to odd: it cuts
    off, and sets the last bit if anything was lost.
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
    """Return the bytes of float32 rows, y[rows, cols], and the scales that make numbers of them again."""
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
