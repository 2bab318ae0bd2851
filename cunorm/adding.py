"""A norm of a sum: the residual stream of transformers."""

from __future__ import annotations

from typing import Any

from .named_fusions import backward, dropout, forward


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
        Any of the four dtypes, as of weight and bias.
    weight, bias : array, shape (columns,), optional
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype, s_dtype : dtype or str, optional
        Of y and of s. Default: those of x.
    dropout_p : float
        Of x so much is replaced by 0, and the rest multiplied by 1 / (1 - dropout_p): at least 0 and less than 1,
        rounded to a multiple of 2^-16.
    seed : array of one int64 or two uint32
        On the device of x; needed where dropout_p is not 0. What is dropped follows from the seed, the row and the
        column alone.
    sm_margin : int
        So many multiprocessors are left to others, as in `layer_norm`.

    Returns
    -------
    y, s : array, shape of x
        The same bits as of the sum and `layer_norm` of it, one after the other.

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`. ValueError for a dropout_p that is not one, or without a seed.

    Notes
    -----
    s is rounded before its statistics are taken, and read by nobody else in between: two arrays are read and two
    written. The backward pass takes s: `add_layer_norm_backward`. What is dropped is drawn by Philox4x32-10, again in
    the backward pass, and never stored; a call with the same seed drops the same.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s = cunorm.add_layer_norm(numpy.array([[1.0, 2.0, 4.0]]), numpy.array([[0.0, 0.0, -1.0]]))
    >>> y.round(3), s
    (array([[-1.225,  0.   ,  1.225]]), array([[1., 2., 3.]]))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return _added(
        "add_layer_norm", x, operands, eps, dtype, s_dtype, zero_centered_gamma, dropout_p, seed, sm_margin=sm_margin
    )


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

    Parameters, results and errors as in `add_layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s = cunorm.add_rms_norm(numpy.array([[1.0, 2.0]]), numpy.array([[2.0, 2.0]]))
    >>> y.round(3), s
    (array([[0.849, 1.131]]), array([[3., 4.]]))
    """
    operands = {"residual": residual, "weight": weight}
    return _added(
        "add_rms_norm", x, operands, eps, dtype, s_dtype, zero_centered_gamma, dropout_p, seed, sm_margin=sm_margin
    )


def add_layer_norm_forward(
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
) -> tuple[Any, Any, Any, Any]:
    """`add_layer_norm` with what its backward pass needs: (y, s, mean, rstd), those of s.

    Parameters and errors as in `add_layer_norm`.

    Returns
    -------
    y, s : array, shape of x
    mean, rstd : array, shape of x without its last axis
        float32 (float64 for float64 s).

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[1.0, 2.0, 4.0]])
    >>> y, s, mean, rstd = cunorm.add_layer_norm_forward(x, numpy.array([[0.0, 0.0, -1.0]]), eps=0.0)
    >>> mean, rstd.round(3)
    (array([2.]), array([1.225]))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return _added(
        "add_layer_norm_forward",
        x,
        operands,
        eps,
        dtype,
        s_dtype,
        zero_centered_gamma,
        dropout_p,
        seed,
        sm_margin=sm_margin,
    )


def add_rms_norm_forward(
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
) -> tuple[Any, Any, Any]:
    """`add_rms_norm` with what its backward pass needs: (y, s, rstd).

    Parameters and errors as in `add_layer_norm`; rstd as in `add_layer_norm_forward`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s, rstd = cunorm.add_rms_norm_forward(numpy.array([[1.0, 2.0]]), numpy.array([[2.0, 2.0]]))
    >>> rstd.round(3)
    array([0.283])
    """
    operands = {"residual": residual, "weight": weight}
    return _added(
        "add_rms_norm_forward",
        x,
        operands,
        eps,
        dtype,
        s_dtype,
        zero_centered_gamma,
        dropout_p,
        seed,
        sm_margin=sm_margin,
    )


def add_layer_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    dropout_p: float = 0.0,
    seed: Any = None,
    output_mask: tuple[bool, bool, bool, bool] = (True, True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """dresidual = ds + rstd * (g - mean(g) - xhat * mean(g * xhat)), dweight = Σ dy * xhat, dbias = Σ dy.

    dx = dropout(dresidual), of the same elements as in the forward pass; without dropout both are one array. g =
    dy * weight, xhat = (s - mean) * rstd.

    Parameters
    ----------
    dy : array, shape of s, or None
        The gradient of y, in any of the four dtypes; None if nothing depends on y.
    ds : array, shape of s, or None
        The gradient of s, likewise: what comes along the residual stream.
    s, mean, rstd : array
        What `add_layer_norm_forward` returned.
    weight : array, shape (columns,), optional
    zero_centered_gamma, dropout_p, seed
        As in the forward pass.
    output_mask : tuple of four bool
        Which of (dx, dresidual, dweight, dbias) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx, dresidual : array, shape and dtype of s
    dweight, dbias : array, shape (columns,), dtype of weight (of s without a weight)

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[1.0, 2.0, 4.0]]), numpy.array([[0.0, 0.0, -1.0]])
    >>> y, s, mean, rstd = cunorm.add_layer_norm_forward(x, residual)
    >>> dx, _, _, dbias = cunorm.add_layer_norm_backward(numpy.array([[1.0, 0.0, 0.0]]), s * 0, s, mean, rstd)
    >>> dx.round(3), dbias
    (array([[ 0.204, -0.408,  0.204]]), array([1., 0., 0.]))
    """
    # x, residual and bias are not read: s and weight have their shapes and dtypes.
    arrays = {"s": s, "dy": dy, "ds": ds, "mean": mean, "rstd": rstd, "weight": weight, "bias": weight}
    return _added_backward(
        "add_layer_norm_backward", arrays, output_mask, zero_centered_gamma, dropout_p, seed, sm_margin=sm_margin
    )


def add_rms_norm_backward(
    dy: Any,
    ds: Any,
    s: Any,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    dropout_p: float = 0.0,
    seed: Any = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dresidual = ds + rstd * (g - xhat * mean(g * xhat)), dweight = Σ dy * xhat; g = dy * weight, xhat = s * rstd.

    dx, parameters, results and errors as in `add_layer_norm_backward`; `output_mask` is for (dx, dresidual, dweight).

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s, rstd = cunorm.add_rms_norm_forward(numpy.array([[1.0, 2.0]]), numpy.array([[2.0, 2.0]]))
    >>> dx, _, dweight = cunorm.add_rms_norm_backward(numpy.array([[1.0, 0.0]]), numpy.ones((1, 2)), s, rstd)
    >>> dx.round(3), dweight.round(3)
    (array([[1.181, 0.864]]), array([0.849, 0.   ]))
    """
    arrays = {"s": s, "dy": dy, "ds": ds, "rstd": rstd, "weight": weight}
    return _added_backward(
        "add_rms_norm_backward", arrays, output_mask, zero_centered_gamma, dropout_p, seed, sm_margin=sm_margin
    )


def _added(
    function: str,
    x: Any,
    operands: dict[str, Any],
    eps: float,
    dtype: Any,
    s_dtype: Any,
    zero_centered_gamma: bool,
    dropout_p: float,
    seed: Any,
    *,
    sm_margin: int,
) -> tuple[Any, ...]:
    of_dropout = dropout(function, dropout_p, seed)
    flags: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "dropout": bool(of_dropout)}
    return forward(function, x, operands | of_dropout, eps, dtype, s_dtype, **flags, sm_margin=sm_margin)


def _added_backward(
    function: str,
    arrays: dict[str, Any],
    output_mask: tuple[bool, ...],
    zero_centered_gamma: bool,
    dropout_p: float,
    seed: Any,
    *,
    sm_margin: int,
) -> tuple[Any, ...]:
    of_dropout = dropout(function, dropout_p, seed)
    flags: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "dropout": bool(of_dropout)}
    names = ("x", "residual", *(name for name in ("weight", "bias") if name in arrays))
    arrays = {"x": arrays["s"], "residual": arrays["s"], **arrays, **of_dropout}
    return backward(function, arrays, names, output_mask, "s", **flags, sm_margin=sm_margin)
