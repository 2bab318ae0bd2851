"""The public functions of the norms with y in 8 bits, for products on tensor cores that read such numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call.backend import backend_of
from .call.store import store_of


def layer_norm_fp8(
    x: Any,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """bytes = round(y * q), q = min(F / max|y|, 2^100), scale = 1 / q, for y = layer_norm(x, ...): y ~ bytes * scale.

    F is the largest number of the format, 448 of e4m3 and 57344 of e5m2. y is rounded once, from float32, to nearest
    even; what is too large becomes the largest number.

    Parameters
    ----------
    x, normalized_shape, weight, bias, eps, zero_centered_gamma, sm_margin
        As in `layer_norm`, but no x of float64.
    granularity : "row", "tensor" or 128
        What shares a scale: the normalised axes of a row, all of y, or 128 neighbouring columns of a row.
    scale : float or array of one float32, optional
        For "tensor" alone: the scale. Default: one that no value of y exceeds whatever x is,
        max(|weight| sqrt(cols - 1) + |bias|) / F.
    dtype : "e4m3" or "e5m2"

    Returns
    -------
    bytes : array of uint8, shape of x
        To be read as float8_e4m3fn or float8_e5m2; of torch tensors and JAX arrays of that dtype.
    scale : array of float32
        The shape of x without its normalised axes; for "tensor" of no axes; for 128 with one more, of
        ceil(cols / 128) blocks. max|y| / F but for a row of zeros, which has 1, and a row with an infinite number or
        NaN, which has NaN.

    Raises
    ------
    TypeError, ValueError
        As in `layer_norm`; and for a granularity, scale or dtype that is none of these, or a tensor or array that wants
        a gradient.
    NotImplementedError
        An array of another library than NumPy, CuPy, torch and JAX.

    Notes
    -----
    Scales and bytes of a row do not depend on other rows. FP8 Formats for Deep Learning, Micikevicius and others,
    2022; kernels_cu/rows/float8.cuh.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale = cunorm.layer_norm_fp8(numpy.array([[1.0, 2.0, 3.0]], "float32"))
    >>> [hex(one) for one in bytes[0]], (scale * 448).round(3)
    (['0xfe', '0x0', '0x7e'], array([1.225], dtype=float32))
    """
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    name = "layer_norm_fp8"
    return _forward(name, x, normalized_shape, weight, bias, eps, zero_centered_gamma, output=False, **options)


def rms_norm_fp8(
    x: Any,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """bytes = round(y * q), q = min(F / max|y|, 2^100), scale = 1 / q, for y = rms_norm(x, ...): y ~ bytes * scale.

    Parameters, results and errors as in `layer_norm_fp8`; the scale that none exceeds is max(|weight|) sqrt(cols) / F.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale = cunorm.rms_norm_fp8(numpy.array([[3.0, 4.0]], "float32"), eps=0.0)
    >>> [hex(one) for one in bytes[0]], (scale * 448).round(3)
    (['0x7a', '0x7e'], array([1.131], dtype=float32))
    """
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    name = "rms_norm_fp8"
    return _forward(name, x, normalized_shape, weight, None, eps, zero_centered_gamma, output=False, **options)


def layer_norm_fp8_forward(
    x: Any,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """`layer_norm_fp8` with y itself, of the same kernel: (bytes, scale, y), y in the dtype of x.

    Parameters and errors as in `layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale, y = cunorm.layer_norm_fp8_forward(numpy.array([[1.0, 2.0, 3.0]], "float32"))
    >>> y.round(3)
    array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    name = "layer_norm_fp8_forward"
    return _forward(name, x, normalized_shape, weight, bias, eps, zero_centered_gamma, output=True, **options)


def rms_norm_fp8_forward(
    x: Any,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """`rms_norm_fp8` with y itself, of the same kernel: (bytes, scale, y), y in the dtype of x.

    Parameters and errors as in `layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale, y = cunorm.rms_norm_fp8_forward(numpy.array([[3.0, 4.0]], "float32"), eps=0.0)
    >>> y.round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    options = {"granularity": granularity, "scale": scale, "dtype": dtype, "sm_margin": sm_margin}
    name = "rms_norm_fp8_forward"
    return _forward(name, x, normalized_shape, weight, None, eps, zero_centered_gamma, output=True, **options)


def _forward(
    name: str,
    x: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: float,
    zero_centered_gamma: bool,
    *,
    granularity: str | int,
    scale: Any,
    dtype: Any,
    sm_margin: int,
    output: bool,
) -> tuple[Any, ...]:
    store = store_of(name, dtype, granularity, scale, wide=output)
    asked = (name, normalized_shape, zero_centered_gamma, None, sm_margin)
    return backend_of(name, x).norm_float8(asked, x, weight, bias, eps, store, scale)
