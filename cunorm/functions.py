"""The plain norms, and those with an FP8 output. Each hands its arrays to the backend of the kind of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call.backend import Array, backend_of, known
from .call.store import store_of


def layer_norm(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out: Array | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x.

    Parameters
    ----------
    x : array, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64: a NumPy array, a CuPy array, or any array with `__dlpack__` on a CUDA
        device. It is read where it lies if its rows are contiguous and one or two strides lead from row to row, as in
        the heads of a packed QKV, qkv.reshape(tokens, 3 * heads, cols)[:, :heads]. Else it is copied.
    normalized_shape : int or sequence of int, optional
        The last axes of x, over which mean and (biased) variance are taken. Default: the shape of `weight`, or the last
        axis.
    weight, bias : array, shape normalized_shape, optional
        Any of the four dtypes, each independently of x.
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    out : array, shape of x, optional
        Where y is written; may be x itself, otherwise shares no memory with the inputs. Laid out as x may be.
    dtype : dtype or str, optional
        Of y. Default: that of `out`, or of x.
    sm_margin : int
        Leaves the work of this many multiprocessors to others, such as communication that runs at the same time: the
        kernel launches no more CTAs than the remaining ones hold.

    Returns
    -------
    y : array, shape of x
        Of the kind of x (a CuPy array for a DLPack producer), on its device, ordered on the current stream of CuPy.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A shape, value or device that does not fit, or an `out` (`dx_out`) that overlaps an input.

    Notes
    -----
    Arithmetic in float32 (float64 for float64 x) with one rounding at the end. A row's result is the same to the bit
    whatever the other rows are. Ba, Kiros, Hinton, Layer Normalization, 2016; kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.layer_norm(numpy.array([[1.0, 2.0, 3.0]])).round(3)
    array([[-1.225,  0.   ,  1.225]])
    """
    options = ("layer_norm", normalized_shape, zero_centered_gamma, dtype, sm_margin, False)
    backend = known.get(type(x)) or backend_of("layer_norm", x)
    return backend.norm(options, (x, weight, bias), eps, out)[0]


def rms_norm(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    out: Array | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Array:
    """y = x / sqrt(mean(x²) + eps) * weight, over the last axes of x.

    Parameters, results and errors as in `layer_norm`. Zhang, Sennrich, Root Mean Square Layer Normalization, 2019;
    kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.rms_norm(numpy.array([[3.0, 4.0]]), eps=0.0).round(3)
    array([[0.849, 1.131]])
    """
    options = ("rms_norm", normalized_shape, zero_centered_gamma, dtype, sm_margin, False)
    backend = known.get(type(x)) or backend_of("rms_norm", x)
    return backend.norm(options, (x, weight, None), eps, out)[0]


def layer_norm_forward(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out: Array | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Array, Array, Array]:
    """Return `layer_norm` and what its backward pass needs: (y, mean, rstd), rstd = 1 / sqrt(var(x) + eps).

    Parameters and errors as in `layer_norm`.

    Returns
    -------
    y : array, shape of x
    mean, rstd : array, shape of x without its normalised axes
        float32 (float64 for float64 x).

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, mean, rstd = cunorm.layer_norm_forward(numpy.array([[1.0, 2.0, 3.0]]), eps=0.0)
    >>> mean, rstd.round(3)
    (array([2.]), array([1.225]))
    """
    options = ("layer_norm_forward", normalized_shape, zero_centered_gamma, dtype, sm_margin, True)
    backend = known.get(type(x)) or backend_of("layer_norm_forward", x)
    return backend.norm(options, (x, weight, bias), eps, out)


def rms_norm_forward(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    out: Array | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Array, Array]:
    """Return `rms_norm` and what its backward pass needs: (y, rstd), rstd = 1 / sqrt(mean(x²) + eps).

    Parameters and errors as in `layer_norm`; rstd as in `layer_norm_forward`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, rstd = cunorm.rms_norm_forward(numpy.array([[3.0, 4.0]]), eps=0.0)
    >>> rstd.round(3)
    array([0.283])
    """
    options = ("rms_norm_forward", normalized_shape, zero_centered_gamma, dtype, sm_margin, True)
    backend = known.get(type(x)) or backend_of("rms_norm_forward", x)
    return backend.norm(options, (x, weight, None), eps, out)


def layer_norm_backward(
    dy: Any,
    x: Array,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    dx_out: Array | None = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), dweight = Σ dy * xhat, dbias = Σ dy, with g = dy * weight.

    xhat = (x - mean) * rstd. The sums of dweight and dbias go over all rows, in float32 (float64 for float64 x), in a
    fixed order: the same input gives the same bits.

    Parameters
    ----------
    dy : array, shape of x
        The gradient of y, in any of the four dtypes.
    x : array
        The input of the forward pass.
    mean, rstd : array, shape of x without its normalised axes
        What `layer_norm_forward` returned. Their shape says which axes of x are normalised.
    weight : array, shape of the normalised axes, optional
    zero_centered_gamma : bool
        As in the forward pass.
    output_mask : tuple of three bool
        Which of (dx, dweight, dbias) are wanted; the others are not computed and come as None.
    dx_out : array, shape and dtype of x, optional
        Where dx is written; may be dy or x itself, otherwise shares no memory with the inputs. Laid out as x may be;
        not for JAX arrays.
    sm_margin : int
        As in `layer_norm`.

    Returns
    -------
    dx : array, shape and dtype of x
        Contiguous, unless it is `dx_out`.
    dweight, dbias : array, shape of the normalised axes, dtype of weight (of x without a weight)

    Raises
    ------
    TypeError, ValueError
        As in `layer_norm`.

    Notes
    -----
    kernels_cu/norms/norm_backward.cu, kernels_cu/norms/sum_partials.cu.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[1.0, 2.0, 4.0]])
    >>> y, mean, rstd = cunorm.layer_norm_forward(x)
    >>> dx, dweight, dbias = cunorm.layer_norm_backward(numpy.array([[1.0, 0.0, 0.0]]), x, mean, rstd)
    >>> dx.round(3), dbias
    (array([[ 0.229, -0.344,  0.115]]), array([1., 0., 0.]))
    """
    options = ("layer_norm_backward", None, zero_centered_gamma, None, sm_margin, output_mask)
    backend = known.get(type(x)) or backend_of("layer_norm_backward", x)
    return backend.norm_backward(options, (dy, x, mean, rstd, weight), dx_out)


def rms_norm_backward(
    dy: Any,
    x: Array,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
    dx_out: Array | None = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """dx = rstd * (g - xhat * mean(g * xhat)), dweight = Σ dy * xhat, with g = dy * weight and xhat = x * rstd.

    Parameters, results and errors as in `layer_norm_backward`; `output_mask` is for (dx, dweight).

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[3.0, 4.0]])
    >>> y, rstd = cunorm.rms_norm_forward(x)
    >>> dx, dweight = cunorm.rms_norm_backward(numpy.array([[1.0, 0.0]]), x, rstd)
    >>> dx.round(3), dweight.round(3)
    (array([[ 0.181, -0.136]]), array([0.849, 0.   ]))
    """
    options = ("rms_norm_backward", None, zero_centered_gamma, None, sm_margin, output_mask)
    backend = known.get(type(x)) or backend_of("rms_norm_backward", x)
    dx, dweight, _ = backend.norm_backward(options, (dy, x, None, rstd, weight), dx_out)
    return dx, dweight


def layer_norm_fp8(
    x: Array,
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
) -> tuple[Array, Array]:
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
    >>> [hex(byte) for byte in bytes[0]], (scale * 448).round(3)
    (['0xfe', '0x0', '0x7e'], array([1.225], dtype=float32))
    """
    store = store_of("layer_norm_fp8", dtype, granularity, scale, wide=False)
    options = ("layer_norm_fp8", normalized_shape, zero_centered_gamma, None, sm_margin, store)
    return backend_of("layer_norm_fp8", x).norm_float8(options, (x, weight, bias), eps, scale)


def rms_norm_fp8(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Array, Array]:
    """bytes = round(y * q), q = min(F / max|y|, 2^100), scale = 1 / q, for y = rms_norm(x, ...): y ~ bytes * scale.

    Parameters, results and errors as in `layer_norm_fp8`; the scale that none exceeds is max(|weight|) sqrt(cols) / F.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale = cunorm.rms_norm_fp8(numpy.array([[3.0, 4.0]], "float32"), eps=0.0)
    >>> [hex(byte) for byte in bytes[0]], (scale * 448).round(3)
    (['0x7a', '0x7e'], array([1.131], dtype=float32))
    """
    store = store_of("rms_norm_fp8", dtype, granularity, scale, wide=False)
    options = ("rms_norm_fp8", normalized_shape, zero_centered_gamma, None, sm_margin, store)
    return backend_of("rms_norm_fp8", x).norm_float8(options, (x, weight, None), eps, scale)


def layer_norm_fp8_forward(
    x: Array,
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
) -> tuple[Array, Array, Array]:
    """Return `layer_norm_fp8` and y itself, of the same kernel: (bytes, scale, y), y in the dtype of x.

    Parameters and errors as in `layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale, y = cunorm.layer_norm_fp8_forward(numpy.array([[1.0, 2.0, 3.0]], "float32"))
    >>> y.round(3)
    array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """
    store = store_of("layer_norm_fp8_forward", dtype, granularity, scale, wide=True)
    options = ("layer_norm_fp8_forward", normalized_shape, zero_centered_gamma, None, sm_margin, store)
    return backend_of("layer_norm_fp8_forward", x).norm_float8(options, (x, weight, bias), eps, scale)


def rms_norm_fp8_forward(
    x: Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    granularity: str | int = "row",
    scale: Any = None,
    dtype: Any = "e4m3",
    sm_margin: int = 0,
) -> tuple[Array, Array, Array]:
    """Return `rms_norm_fp8` and y itself, of the same kernel: (bytes, scale, y), y in the dtype of x.

    Parameters and errors as in `layer_norm_fp8`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> bytes, scale, y = cunorm.rms_norm_fp8_forward(numpy.array([[3.0, 4.0]], "float32"), eps=0.0)
    >>> y.round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    store = store_of("rms_norm_fp8_forward", dtype, granularity, scale, wide=True)
    options = ("rms_norm_fp8_forward", normalized_shape, zero_centered_gamma, None, sm_margin, store)
    return backend_of("rms_norm_fp8_forward", x).norm_float8(options, (x, weight, None), eps, scale)
