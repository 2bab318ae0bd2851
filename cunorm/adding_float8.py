"""A norm of a sum with y in 8 bits, for a product that reads such numbers: the residual stream of transformers that
serve. The sum keeps its dtype.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from .named_fusions import check_zero_centered, forward8
from .operation import NORMS, Operation, added

RESIDUAL = ("residual",)
Key = tuple[str, bool, tuple[str, ...]]  # norm, zero_centered_gamma and the operands that are given
_operations: dict[Key, Operation] = {}


def prepare() -> None:
    """Make every operation, for calls that are traced, as torch.compile does: it can trace neither how an expression is
    made nor how its text is, which a hash asks for.
    """
    given = (RESIDUAL, (*RESIDUAL, "weight"), (*RESIDUAL, "bias"), (*RESIDUAL, "weight", "bias"))
    for key in product(NORMS, (False, True), given):
        hash(_operation(key))


def _operation(key: Key) -> Operation:
    found = _operations.get(key)
    if found is None:
        norm, zero_centered_gamma, names = key
        found = _operations[key] = added(norm, zero_centered_gamma).given(names)
    return found


def add_layer_norm_fp8(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """s = residual + x; bytes and scale of y = layer_norm(s, ...) as of `layer_norm_fp8`: y ~ bytes * scale.

    Parameters
    ----------
    x, residual, weight, bias, eps, zero_centered_gamma, s_dtype, sm_margin
        As in `add_layer_norm`, but neither x nor s of float64.
    granularity, scale, dtype
        As in `layer_norm_fp8`.

    Returns
    -------
    bytes : array of uint8, shape of x
        To be read as float8_e4m3fn or float8_e5m2; of torch tensors and JAX arrays of that dtype.
    scale : array of float32
        As of `layer_norm_fp8`.
    s : array, shape of x

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As of `layer_norm_fp8`.

    Notes
    -----
    One kernel. s is rounded before it is normalised; bytes and scale have the bits of `layer_norm_fp8` of it.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[[1.0, 2.0, 4.0]], [[0.0, 0.0, -1.0]]], "float32")
    >>> bytes, scale, s = cunorm.add_layer_norm_fp8(x, residual)
    >>> [hex(one) for one in bytes[0]], (scale * 448).round(3), s
    (['0xfe', '0x0', '0x7e'], array([1.225], dtype=float32), array([[1., 2., 3.]], dtype=float32))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    return _added("add_layer_norm_fp8", x, operands, eps, s_dtype, zero_centered_gamma, options)


def add_rms_norm_fp8(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """s = residual + x; bytes and scale of y = rms_norm(s, ...) as of `rms_norm_fp8`: y ~ bytes * scale.

    Parameters, results and errors as in `add_layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[[1.0, 2.0]], [[2.0, 2.0]]], "float32")
    >>> bytes, scale, s = cunorm.add_rms_norm_fp8(x, residual, eps=0.0)
    >>> [hex(one) for one in bytes[0]], (scale * 448).round(3), s
    (['0x7a', '0x7e'], array([1.131], dtype=float32), array([[3., 4.]], dtype=float32))
    """
    operands = {"residual": residual, "weight": weight}
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    return _added("add_rms_norm_fp8", x, operands, eps, s_dtype, zero_centered_gamma, options)


def add_layer_norm_fp8_forward(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """`add_layer_norm_fp8` with y itself, of the same kernel: (bytes, scale, y, s), y in the dtype of x.

    Parameters and errors as in `add_layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[[1.0, 2.0, 4.0]], [[0.0, 0.0, -1.0]]], "float32")
    >>> bytes, scale, y, s = cunorm.add_layer_norm_fp8_forward(x, residual)
    >>> y.round(3)
    array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    return _added("add_layer_norm_fp8_forward", x, operands, eps, s_dtype, zero_centered_gamma, options)


def add_rms_norm_fp8_forward(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """`add_rms_norm_fp8` with y itself, of the same kernel: (bytes, scale, y, s), y in the dtype of x.

    Parameters and errors as in `add_layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[[1.0, 2.0]], [[2.0, 2.0]]], "float32")
    >>> bytes, scale, y, s = cunorm.add_rms_norm_fp8_forward(x, residual, eps=0.0)
    >>> y.round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    operands = {"residual": residual, "weight": weight}
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    return _added("add_rms_norm_fp8_forward", x, operands, eps, s_dtype, zero_centered_gamma, options)


def _added(
    function: str,
    x: Any,
    operands: dict[str, Any],
    eps: float,
    s_dtype: Any,
    zero_centered_gamma: bool,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    check_zero_centered(function, operands["weight"], zero_centered_gamma)
    norm = "layer_norm" if "layer_norm" in function else "rms_norm"
    given = (*RESIDUAL, *(name for name in ("weight", "bias") if operands.get(name) is not None))
    operation = _operation((norm, bool(zero_centered_gamma), given))
    operands = {name: operands[name] for name in given}
    return forward8(function, operation, x, operands, eps, s_dtype, **options)
