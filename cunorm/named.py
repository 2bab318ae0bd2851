"""The named operations: a norm with what models have before and after it, as typed functions.

The body of each says what its arguments mean, a `Call`; `named` carries that out, in a call and in `.forward` and
`.fp8`, which take the same arguments. cunorm.torch and cunorm.jax make their functions from these bodies.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import combinations, product
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from .call import checks
from .fusion import Fused, Saved
from .operation import FUSIONS, SEED, Operation, norm_add_norm

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

OPERATIONS: dict[str, Callable[..., Operation]] = {**FUSIONS, "rms_norm_add_rms_norm": norm_add_norm}
# What these operands must be, whatever the shape of x. The weight of a gated norm may have one row for each group.
KINDS = (("residual", "full"), ("z", "full"), ("weight", "column"), ("bias", "column"), ("second_weight", "column"))
KINDS_OF_GATED = (("z", "full"),)
# The operands that dropout adds: a seed and two numbers.
OF_DROPOUT = (SEED, "dropped", "factor")


class Call(NamedTuple):
    """The meaning of the arguments of a named operation."""

    function: str
    flags: tuple[bool, ...]  # of OPERATIONS[function]
    x: Any
    operands: dict[str, Any]  # without those that are absent
    eps: Any
    dtype: Any
    s_dtype: Any
    sm_margin: Any
    shapes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012  as the caller has what is reshaped


class ShapeError(ValueError):
    """Raised for a shape that does not fit, found before the arrays are."""


class NamedOperation(Protocol[P, R_co]):
    """A function with attributes that take the same arguments."""

    __name__: str

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R_co: ...

    def forward(self, *arguments: P.args, **options: P.kwargs) -> tuple[R_co, Saved]:
        """Return (results as of a call, what `backward` needs). The arrays themselves are saved, not copies of them."""
        ...

    def backward(self, saved: Saved, *gradients: Any, wanted: Sequence[str] = (), sm_margin: int = 0) -> dict[str, Any]:
        """Return the gradients of x and of the given operands, by name, from those of the results."""
        ...

    def fp8(self, *arguments: Any, granularity: str | int = "row", y_scale: Any = None, **options: Any) -> tuple:
        """Return the results with (bytes, scale) in place of y; `dtype` is "e4m3" or "e5m2"."""
        ...

    def fp8_forward(
        self, *arguments: Any, granularity: str | int = "row", y_scale: Any = None, **options: Any
    ) -> tuple:
        """Return the results with (bytes, scale, y) in place of y, y in the dtype of x."""
        ...


def operation_of(function: str, flags: tuple[bool, ...], names: tuple[str, ...]) -> Operation:
    """Return the operation of a call with operands of these names."""
    key = (function, flags, names)
    operation = _operations.get(key)
    if operation is None:
        operation = OPERATIONS[function](*flags)
        # The parts of an operation with a second norm are found by what stands for its weights.
        operation = _operations[key] = operation if operation.second else operation.given(names)
    return operation


_operations: dict[tuple, Operation] = {}


def kinds_of(function: str) -> tuple[tuple[str, str], ...]:
    return KINDS_OF_GATED if function == "rms_norm_gated" else KINDS


def prepare() -> None:
    """Make every operation, for calls that are traced, as torch.compile does: it can trace neither how an expression is
    made nor how its text is, which a hash asks for.
    """
    for function, make in OPERATIONS.items():
        for flags in product((False, True), repeat=1 + function.startswith("add_")):
            operation = make(*flags)
            optional = [name for name, _ in operation.defaults]
            needed = [name for name in operation.operands if name not in (*optional, *OF_DROPOUT)]
            dropout = OF_DROPOUT if SEED in operation.operands else ()
            for count in range(len(optional) + 1):
                for given in combinations(optional, count):
                    hash(operation_of(function, flags, (*needed, *given, *dropout)))


def _fused(call: Call) -> Fused:
    """Return what a call means, as `fuse` makes it."""
    function, flags, _, operands, _, dtype, s_dtype, _, _ = call
    if dtype is not None:
        dtype = checks.dtype_name(function, dtype)
    if s_dtype is not None:
        s_dtype = checks.dtype_name(function, s_dtype)
    key = (function, flags, tuple(operands), dtype, s_dtype)
    fused = _values.get(key)
    if fused is None:
        operation = operation_of(*key[:3])
        bounded = function.startswith("add_") or (function == "rms_norm_gated" and not flags[0])
        fused = _values[key] = Fused(operation, dtype, s_dtype, function, kinds_of(function), OF_DROPOUT, bounded, True)
    return fused


_values: dict[tuple, Fused] = {}


def reshaped(call: Call, results: Any) -> Any:
    """Return results in the shape that the caller has x in. Only operations with one result reshape x."""
    return results.reshape(call.shapes["x"]) if "x" in call.shapes else results


def named(arguments: Callable[P, R]) -> NamedOperation[P, R]:
    """Return the named operation whose calls mean the Call that `arguments` returns for the same arguments."""
    name = arguments.__name__
    of: Any = arguments  # which returns a Call, whatever it is annotated with

    @wraps(arguments)
    def function(*given: P.args, **options: P.kwargs) -> Any:
        call = of(*given, **options)
        results = _fused(call).called(call.x, call.operands, call.eps, call.sm_margin)
        return reshaped(call, results) if call.shapes else results

    def forward(*given, **options):
        call = of(*given, **options)
        results, saved = _fused(call).called_forward(call.x, call.operands, call.eps, call.sm_margin, call.shapes)
        return reshaped(call, results), saved

    def backward(saved: Saved, *gradients: Any, wanted: Sequence[str] = (), sm_margin: int = 0) -> dict[str, Any]:
        if not isinstance(saved, Saved) or saved.fused.function != name:
            got = f"that of {saved.fused.function}" if isinstance(saved, Saved) else type(saved).__name__
            raise (ValueError if isinstance(saved, Saved) else TypeError)(
                f"{name}: saved must be what {name}.forward returned; got {got}."
            )
        return saved.fused.backward(saved, *gradients, wanted=wanted, sm_margin=sm_margin)

    def in_8_bits(given, granularity, y_scale, dtype, options, *, wide):
        call = of(*given, **options)
        fused = _fused(call)
        store = fused.store(dtype, granularity, y_scale, wide=wide)
        y8, *others = fused.called_fp8(call.x, call.operands, call.eps, call.sm_margin, store, y_scale)
        if "x" not in call.shapes:
            return (y8, *others)
        scale, *y = others
        shape = call.shapes["x"]
        return (y8.reshape(shape), scale, *(array.reshape(shape) for array in y))

    def fp8(*given, granularity="row", y_scale=None, dtype="e4m3", **options):
        return in_8_bits(given, granularity, y_scale, dtype, options, wide=False)

    def fp8_forward(*given, granularity="row", y_scale=None, dtype="e4m3", **options):
        return in_8_bits(given, granularity, y_scale, dtype, options, wide=True)

    of_its_own(function)
    signature = inspect.signature(arguments)
    returned = "y, s" if "s_dtype" in signature.parameters else "y"
    forward.__doc__ = f"""(results, saved): {name}(...) and what `{name}.backward` needs.

    The arrays themselves are saved, not copies of them.

    Parameters
    ----------
    As of `{name}`.
    """
    backward.__doc__ = f"""The gradients of x and of the operands that were given, by name.

    Parameters
    ----------
    saved : Saved
        What `{name}.forward` returned.
    *gradients : array, shape of x
        Of each result, in order: {returned}; None for one on which nothing depends.
    wanted : sequence of str
        Names of operands, or "x"; all by default. The others are not computed.
    sm_margin : int
        As in a call.

    Returns
    -------
    dict of str to array
        Each in the shape and dtype of what it is the gradient of. Gradients that are equal by their formulas, as those
        of x and residual in their sum, are one array, and what is added to the norm has that of y itself: copy one
        before you write to the other.
    """
    fp8.__doc__ = f"""Return the results of {name}(...) with (bytes, scale) in place of y: y ~ bytes * scale.

    Parameters
    ----------
    granularity, dtype
        As in `layer_norm_fp8`: "row", "tensor" or 128, and "e4m3" or "e5m2".
    y_scale : float or array of one float32, optional
        For "tensor": the scale. Where y is a norm times weight plus bias its default is one that no value exceeds, as
        in `layer_norm_fp8`; else it must be given.
    others
        As of `{name}`, but neither x nor s of float64 and no tensor that wants a gradient.
    """
    fp8_forward.__doc__ = f"""Return the results of `{name}` with (bytes, scale, y) in place of y, all of one kernel."""
    of_forward, of_fp8 = signature.replace(return_annotation="tuple[Any, Saved]"), _signature_of_fp8(signature)
    shown = of_forward, inspect.signature(backward), of_fp8, of_fp8
    for attribute, of_attribute in zip((forward, backward, fp8, fp8_forward), shown, strict=True):
        of_its_own(attribute)
        attribute.__signature__ = of_attribute  # pyright: ignore[reportFunctionMemberAccess]
        attribute.__qualname__, attribute.__module__ = f"{name}.{attribute.__name__}", arguments.__module__
        setattr(function, attribute.__name__, attribute)
    return cast(NamedOperation[P, R], function)


def of_its_own(function: Any) -> None:
    """Give a function code of its own, so that profiles show its name and torch.compile counts its variants apart."""
    function.__code__ = function.__code__.replace(co_name=function.__name__)


def _signature_of_fp8(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a call with granularity and y_scale before dtype, which is the format of the bytes."""
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.name == "dtype":
            parameters.append(parameter.replace(name="granularity", default="row", annotation="str | int"))
            parameters.append(parameter.replace(name="y_scale", default=None))
            parameter = parameter.replace(default="e4m3")
        parameters.append(parameter)
    return signature.replace(parameters=parameters, return_annotation="tuple[Any, ...]")


# A body returns a Call where its annotation says what the operation returns.
_call = cast(Callable[..., Any], Call)


def _with_parameters(
    function: str, operands: dict[str, Any], zero_centered_gamma: Any = False, **parameters: Any
) -> dict[str, Any]:
    """Return the operands with the parameters of the norms that are given."""
    for name, array in parameters.items():
        if array is not None:
            operands[name] = array
        elif zero_centered_gamma and name != "bias":
            raise ValueError(f"{function}: zero_centered_gamma=True needs a {name}; got {name}=None.")
    return operands


def check_dropout_p(function: str, dropout_p: Any) -> float:
    if type(dropout_p) is not float and (isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)):
        raise TypeError(f"{function}: dropout_p must be a real number; got {checks.kind_of_option(dropout_p)}")
    dropout_p = checks.as_float(function, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{function}: dropout_p must be at least 0 and less than 1; got {dropout_p}.")
    return dropout_p


def _drops(function: str, operands: dict[str, Any], dropout_p: Any, seed: Any) -> bool:
    """Return whether anything is dropped; `operands` then get what dropout reads.

    A kernel compares 16 bits, so dropout_p is rounded to a multiple of 2^-16, and so is what scales the rest.
    """
    if not dropout_p and type(dropout_p) is float:
        return False
    dropout_p = check_dropout_p(function, dropout_p)
    if dropout_p == 0:
        return False
    if seed is None:
        raise ValueError(f"{function}: dropout_p={dropout_p} needs a seed, an array of one int64; got seed=None.")
    dropped = min(round(dropout_p * 2**16), 2**16 - 1) / 2**16
    operands |= {SEED: seed, "dropped": dropped, "factor": 1 / (1 - dropped)}
    return True


def _by_sample(call: Any) -> Any:
    """Return the call with vectors (batch, columns) shaped to broadcast against x (batch, ..., columns)."""
    axes = len(getattr(call.x, "shape", ()))
    operands, shapes = dict(call.operands), {}
    for name in ("gate", "scale", "shift"):
        shape: tuple[int, ...] = tuple(getattr(operands.get(name), "shape", ()))
        if 0 < len(shape) < axes:
            shapes[name] = shape
            operands[name] = operands[name].reshape((*shape[:-1], *(1,) * (axes - len(shape)), *shape[-1:]))
    return call._replace(operands=operands, shapes=shapes) if shapes else call


def _by_group(call: Any, group_size: Any) -> Any:
    """Return the call with an axis for groups of columns before the last, so that weight has a row for each group."""
    function, x = call.function, call.x
    shape = tuple(getattr(x, "shape", ()))
    if not shape:
        return call
    columns = shape[-1]
    of_weight = getattr(call.operands.get("weight"), "shape", None)
    if of_weight is not None and tuple(of_weight) != (columns,):
        raise ShapeError(
            f"{function}: weight must have shape ({columns},), as the last axis of x; got {tuple(of_weight)}."
        )
    if group_size is None:
        return call
    if isinstance(group_size, bool) or not isinstance(group_size, numbers.Integral):
        raise TypeError(f"{function}: group_size must be an integer; got {type(group_size).__name__}.")
    if group_size <= 0 or columns % group_size:
        raise ValueError(f"{function}: group_size must divide the columns of x, {columns}; got {group_size}.")
    arrays, shapes = {"x": x, **call.operands}, {}
    for name, array in arrays.items():
        own = getattr(array, "shape", None)
        if own is None:
            continue
        if name == "z" and tuple(own) != shape:
            raise ShapeError(f"{function}: z must have the shape of x, {shape}; got {tuple(own)}.")
        shapes[name] = tuple(own)
        arrays[name] = array.reshape((*own[:-1], columns // group_size, group_size))
    return call._replace(x=arrays.pop("x"), operands=arrays, shapes=shapes)


@named
def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    s_dtype: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + dropout(x), y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, over the last axis.

    Parameters
    ----------
    x : array, shape (..., columns)
        float16, bfloat16, float32 or float64: a NumPy, CuPy or JAX array, or a tensor. Rows may be strided.
    residual : array, shape of x
        Any of the four dtypes, as are weight and bias.
    weight, bias : array, shape (columns,), optional
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype, s_dtype : dtype or str, optional
        The dtypes of y and of s. Default: that of x.
    dropout_p : float
        Which share of x is replaced by 0; the rest is multiplied by 1 / (1 - dropout_p). At least 0, less than 1, and
        rounded to a multiple of 2^-16.
    seed : array of one int64 or two uint32
        On the device of x; needed where dropout_p is not 0. What is dropped follows from the seed, the row and the
        column alone.
    sm_margin : int
        Leaves this many multiprocessors to others, as in `layer_norm`.

    Returns
    -------
    y, s : array, shape of x
        The same bits as of the sum and `layer_norm` of it, one after the other.

    Raises
    ------
    TypeError, ValueError
        As in `layer_norm`. ValueError for a dropout_p out of its range, or without a seed.

    Notes
    -----
    ``add_layer_norm.forward(...)`` returns (results, saved), ``add_layer_norm.backward(saved, dy, ds)`` the gradients
    by name, ``add_layer_norm.fp8(...)`` (bytes, scale, s); each takes the arguments above. Every named operation has
    these attributes.

    s is rounded before its statistics are taken, and nothing reads it in between: two arrays are read and two written.
    What is dropped is drawn by Philox4x32-10, again in the backward pass, and never stored.

    Axes beyond the last are normalised together after a reshape of them to one.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[1.0, 2.0, 4.0]]), numpy.array([[0.0, 0.0, -1.0]])
    >>> y, s = cunorm.add_layer_norm(x, residual)
    >>> y.round(3), s
    (array([[-1.225,  0.   ,  1.225]]), array([[1., 2., 3.]]))
    >>> (y, s), saved = cunorm.add_layer_norm.forward(x, residual)
    >>> gradients = cunorm.add_layer_norm.backward(saved, numpy.array([[1.0, 0.0, 0.0]]), None)
    >>> gradients["x"].round(3)
    array([[ 0.204, -0.408,  0.204]])
    """
    function = "add_layer_norm"
    operands = _with_parameters(function, {"residual": residual}, zero_centered_gamma, weight=weight, bias=bias)
    flags = (bool(zero_centered_gamma), _drops(function, operands, dropout_p, seed))
    return _call(function, flags, x, operands, eps, dtype, s_dtype, sm_margin)


@named
def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    s_dtype: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + dropout(x), y = s / sqrt(mean(s²) + eps) * weight, over the last axis.

    Parameters, results and errors are those of `add_layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s = cunorm.add_rms_norm(numpy.array([[1.0, 2.0]]), numpy.array([[2.0, 2.0]]))
    >>> y.round(3), s
    (array([[0.849, 1.131]]), array([[3., 4.]]))
    """
    function = "add_rms_norm"
    operands = _with_parameters(function, {"residual": residual}, zero_centered_gamma, weight=weight)
    flags = (bool(zero_centered_gamma), _drops(function, operands, dropout_p, seed))
    return _call(function, flags, x, operands, eps, dtype, s_dtype, sm_margin)


@named
def layer_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = residual + (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis.

    Parameters and errors are those of `add_layer_norm`. y is rounded once, after the sum.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.layer_norm_add(numpy.array([[1.0, 2.0, 3.0]]), numpy.array([[1.0, 1.0, 0.0]])).round(3)
    array([[-0.225,  1.   ,  1.225]])
    """
    function = "layer_norm_add"
    operands = _with_parameters(function, {"residual": residual}, zero_centered_gamma, weight=weight, bias=bias)
    return _call(function, (bool(zero_centered_gamma),), x, operands, eps, dtype, None, sm_margin)


@named
def rms_norm_add(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = residual + x / sqrt(mean(x²) + eps) * weight, over the last axis.

    Parameters and errors are those of `add_layer_norm`. y is rounded once, after the sum.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.rms_norm_add(numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]])).round(3)
    array([[1.849, 1.131]])
    """
    function = "rms_norm_add"
    operands = _with_parameters(function, {"residual": residual}, zero_centered_gamma, weight=weight)
    return _call(function, (bool(zero_centered_gamma),), x, operands, eps, dtype, None, sm_margin)


@named
def rms_norm_add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    second_weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + x / sqrt(mean(x²) + eps) * weight, y = s / sqrt(mean(s²) + eps) * second_weight.

    Over the last axis. This stands between the sublayers of Gemma. Parameters, results and errors are those of
    `add_layer_norm`, but zero_centered_gamma is for both weights, which must be there then.

    Notes
    -----
    s is rounded before it is normalised; y and s have the bits of `rms_norm_add` and of `rms_norm` of it. CuPy arrays
    and tensors with rows of up to 48 KB and s in the dtype of x take one launch; else there are two, and s is read too.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s = cunorm.rms_norm_add_rms_norm(numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]]))
    >>> s.round(3), y.round(3)
    (array([[1.849, 1.131]]), array([[1.206, 0.738]]))
    """
    function = "rms_norm_add_rms_norm"
    weights = {"weight": weight, "second_weight": second_weight}
    operands = _with_parameters(function, {"residual": residual}, zero_centered_gamma, **weights)
    return _call(function, (bool(zero_centered_gamma),), x, operands, eps, dtype, s_dtype, sm_margin)


@named
def layer_norm_modulate(
    x: Any,
    scale: Any,
    shift: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = ((x - mean(x)) / sqrt(var(x) + eps) * weight + bias) * (1 + scale) + shift, over the last axis.

    Parameters
    ----------
    x : array, shape (batch, ..., columns)
        float16, bfloat16, float32 or float64: a NumPy, CuPy or JAX array, or a tensor. Rows may be strided.
    scale, shift : array, shape (batch, columns) or (batch, 1, ..., columns)
        Each in any of the four dtypes. Views, as chunks of one projection are, are not copied. Any other shape that
        broadcasts against x will do.
    weight, bias : array, shape (columns,), optional
        The norm's own.
    eps : float
        Added to the variance, inside the root.
    dtype : dtype or str, optional
        The dtype of y. Default: that of x.
    sm_margin : int
        Leaves this many multiprocessors to others, as in `layer_norm`.

    Returns
    -------
    y : array, shape of x

    Raises
    ------
    TypeError, ValueError
        As in `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> cunorm.layer_norm_modulate(x, numpy.ones((1, 3)), numpy.zeros((1, 3))).shape
    (1, 2, 3)
    """
    function, flags = "layer_norm_modulate", (weight is not None or bias is not None,)
    operands = _with_parameters(function, {"scale": scale, "shift": shift}, weight=weight, bias=bias)
    return _by_sample(_call(function, flags, x, operands, eps, dtype, None, sm_margin))


@named
def rms_norm_modulate(
    x: Any,
    scale: Any,
    shift: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = x / sqrt(mean(x²) + eps) * weight * (1 + scale) + shift, over the last axis.

    Parameters, results and errors are those of `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> cunorm.rms_norm_modulate(x, numpy.ones((1, 3)), numpy.zeros((1, 3))).shape
    (1, 2, 3)
    """
    function, flags = "rms_norm_modulate", (weight is not None,)
    operands = _with_parameters(function, {"scale": scale, "shift": shift}, weight=weight)
    return _by_sample(_call(function, flags, x, operands, eps, dtype, None, sm_margin))


@named
def gate_add_layer_norm_modulate(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + gate * x, y = `layer_norm_modulate` of s: its norm, times 1 + scale, plus shift.

    Parameters and errors are those of `layer_norm_modulate`; gate is like scale, residual and `s_dtype` are like those
    of `add_layer_norm`.

    Returns
    -------
    y, s : array, shape of x
        s is rounded before its statistics are taken.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s = cunorm.gate_add_layer_norm_modulate(x, x, ones, ones, ones)
    >>> s
    array([[[ 0.,  2.,  4.],
            [ 6.,  8., 10.]]])
    """
    function, flags = "gate_add_layer_norm_modulate", (weight is not None or bias is not None,)
    operands = {"residual": residual, "gate": gate, "scale": scale, "shift": shift}
    operands = _with_parameters(function, operands, weight=weight, bias=bias)
    return _by_sample(_call(function, flags, x, operands, eps, dtype, s_dtype, sm_margin))


@named
def gate_add_rms_norm_modulate(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + gate * x, y = `rms_norm_modulate` of s: its norm, times 1 + scale, plus shift.

    Parameters, results and errors are those of `gate_add_layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s = cunorm.gate_add_rms_norm_modulate(x, x, ones, ones, ones)
    >>> s
    array([[[ 0.,  2.,  4.],
            [ 6.,  8., 10.]]])
    """
    function, flags = "gate_add_rms_norm_modulate", (weight is not None,)
    operands = {"residual": residual, "gate": gate, "scale": scale, "shift": shift}
    operands = _with_parameters(function, operands, weight=weight)
    return _by_sample(_call(function, flags, x, operands, eps, dtype, s_dtype, sm_margin))


@named
def rms_norm_gated(
    x: Any,
    z: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = x / sqrt(mean(x²) + eps) * weight * silu(z), or, unless norm_before_gate, the same norm of s = x * silu(z).

    Parameters
    ----------
    x : array, shape (..., columns)
        float16, bfloat16, float32 or float64: a NumPy, CuPy or JAX array, or a tensor. Rows may be strided.
    z : array, shape of x
        The gate, in any of the four dtypes, as is weight. silu(z) = z / (1 + exp(-z)).
    weight : array, shape (columns,), optional
    eps : float
        Added to the mean of squares, inside the root.
    norm_before_gate : bool
        Which of the two. s is rounded to the dtype of x before its statistics are taken.
    group_size : int, optional
        So many neighbouring columns are normalised together, instead of all.
    dtype : dtype or str, optional
        The dtype of y. Default: that of x.
    sm_margin : int
        Leaves this many multiprocessors to others, as in `layer_norm`.

    Returns
    -------
    y : array, shape of x

    Raises
    ------
    TypeError, ValueError
        As in `rms_norm`; ValueError for a group_size that does not divide the columns.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, z = numpy.array([[3.0, 4.0, 1.0, 1.0]]), numpy.full((1, 4), 100.0)
    >>> cunorm.rms_norm_gated(x, z, group_size=2).round(3)
    array([[ 84.853, 113.137, 100.   , 100.   ]])
    """
    function = "rms_norm_gated"
    operands = _with_parameters(function, {"z": z}, weight=weight)
    return _by_group(_call(function, (bool(norm_before_gate),), x, operands, eps, dtype, None, sm_margin), group_size)
