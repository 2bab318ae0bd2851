"""A norm with scale and shift for each sample, as diffusion transformers have it."""

from __future__ import annotations

from typing import Any

from .named_fusions import backward, forward


def layer_norm_modulate(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * (1 + scale) + shift, over the last axis.

    Parameters
    ----------
    x : array, shape (batch, ..., columns)
        float16, bfloat16, float32 or float64: a NumPy, CuPy or JAX array, or a tensor. Rows may be strided.
    scale, shift : array, shape (batch, columns) or (batch, 1, ..., columns)
        Any of the four dtypes, each. Views, as chunks of one projection are, are not copied. Also any other shape that
        broadcasts against x.
    eps : float
        Added to the variance, inside the root.
    dtype : dtype or str, optional
        Of y. Default: that of x.

    Returns
    -------
    y : array, shape of x

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> cunorm.layer_norm_modulate(x, numpy.ones((1, 3)), numpy.zeros((1, 3))).shape
    (1, 2, 3)
    """
    scale, shift = of_samples(x, scale, shift)
    return forward("layer_norm_modulate", x, {"scale": scale, "shift": shift}, eps, dtype, sm_margin=sm_margin)[0]


def layer_norm_modulate_forward(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """`layer_norm_modulate` with what its backward pass needs: (y, mean, rstd), as of `add_layer_norm_forward`.

    Parameters and errors as in `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> y, mean, rstd = cunorm.layer_norm_modulate_forward(x, numpy.ones((1, 3)), numpy.zeros((1, 3)))
    >>> rstd.shape
    (1, 2)
    """
    scale, shift = of_samples(x, scale, shift)
    return forward("layer_norm_modulate_forward", x, {"scale": scale, "shift": shift}, eps, dtype, sm_margin=sm_margin)


def layer_norm_modulate_backward(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    scale: Any,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), dscale = Σ dy * xhat, dshift = Σ dy.

    Sums are of the rows that share a vector. g = dy * (1 + scale), xhat = (x - mean) * rstd.

    Parameters
    ----------
    dy : array, shape of x
        The gradient of y, in any of the four dtypes.
    x, scale : array
        As in the forward pass.
    mean, rstd : array
        What `layer_norm_modulate_forward` returned.
    output_mask : tuple of three bool
        Which of (dx, dscale, dshift) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dscale, dshift : array, shape and dtype of scale

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, scale = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, mean, rstd = cunorm.layer_norm_modulate_forward(x, scale, scale)
    >>> dx, dscale, dshift = cunorm.layer_norm_modulate_backward(numpy.ones_like(x), x, mean, rstd, scale)
    >>> dshift
    array([[2., 2., 2.]])
    """
    (vectors,) = of_samples(x, scale)
    # shift is not read: scale has its shape and dtype.
    arrays = {"x": x, "dy": dy, "mean": mean, "rstd": rstd, "scale": vectors, "shift": vectors}
    gradients = backward(
        "layer_norm_modulate_backward", arrays, ("x", "scale", "shift"), output_mask, sm_margin=sm_margin
    )
    return as_given(gradients, x, scale, scale)


def rms_norm_modulate(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> Any:
    """y = x / sqrt(mean(x²) + eps) * (1 + scale) + shift, over the last axis.

    Parameters, results and errors as in `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> cunorm.rms_norm_modulate(x, numpy.ones((1, 3)), numpy.zeros((1, 3))).shape
    (1, 2, 3)
    """
    scale, shift = of_samples(x, scale, shift)
    return forward("rms_norm_modulate", x, {"scale": scale, "shift": shift}, eps, dtype, sm_margin=sm_margin)[0]


def rms_norm_modulate_forward(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """`rms_norm_modulate` with what its backward pass needs: (y, rstd), as of `add_rms_norm_forward`.

    Parameters and errors as in `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.arange(6.0).reshape(1, 2, 3)
    >>> y, rstd = cunorm.rms_norm_modulate_forward(x, numpy.ones((1, 3)), numpy.zeros((1, 3)))
    >>> rstd.shape
    (1, 2)
    """
    scale, shift = of_samples(x, scale, shift)
    return forward("rms_norm_modulate_forward", x, {"scale": scale, "shift": shift}, eps, dtype, sm_margin=sm_margin)


def rms_norm_modulate_backward(
    dy: Any,
    x: Any,
    rstd: Any,
    scale: Any,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dx = rstd * (g - xhat * mean(g * xhat)), dscale = Σ dy * xhat, dshift = Σ dy.

    Sums are of the rows that share a vector. g = dy * (1 + scale), xhat = x * rstd.

    Parameters
    ----------
    dy : array, shape of x
        The gradient of y, in any of the four dtypes.
    x, scale : array
        As in the forward pass.
    rstd : array
        What `rms_norm_modulate_forward` returned.
    output_mask : tuple of three bool
        Which of (dx, dscale, dshift) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dscale, dshift : array, shape and dtype of scale

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, scale = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, rstd = cunorm.rms_norm_modulate_forward(x, scale, scale)
    >>> dx, dscale, dshift = cunorm.rms_norm_modulate_backward(numpy.ones_like(x), x, rstd, scale)
    >>> dshift
    array([[2., 2., 2.]])
    """
    (vectors,) = of_samples(x, scale)
    # shift is not read: scale has its shape and dtype.
    arrays = {"x": x, "dy": dy, "rstd": rstd, "scale": vectors, "shift": vectors}
    gradients = backward(
        "rms_norm_modulate_backward", arrays, ("x", "scale", "shift"), output_mask, sm_margin=sm_margin
    )
    return as_given(gradients, x, scale, scale)


def of_samples(x: Any, *vectors: Any) -> list[Any]:
    """Vectors of samples, (batch, columns), as they broadcast against x, (batch, ..., columns)."""
    axes = len(getattr(x, "shape", ()))
    found = []
    for one in vectors:
        shape: tuple[int, ...] = tuple(getattr(one, "shape", ()))
        if 0 < len(shape) < axes:
            one = one.reshape((*shape[:-1], *(1,) * (axes - len(shape)), *shape[-1:]))
        found.append(one)
    return found


def as_given(gradients: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    """Each gradient in the shape of its operand."""
    return tuple(
        gradient if gradient is None else gradient.reshape(operand.shape)
        for gradient, operand in zip(gradients, operands, strict=True)
    )
