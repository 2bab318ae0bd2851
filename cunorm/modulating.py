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
    scale, shift = _of_samples(x, scale, shift)
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
    scale, shift = _of_samples(x, scale, shift)
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
    (of_samples,) = _of_samples(x, scale)
    # shift is not read: scale has its shape and dtype.
    arrays = {"x": x, "dy": dy, "mean": mean, "rstd": rstd, "scale": of_samples, "shift": of_samples}
    gradients = backward(
        "layer_norm_modulate_backward", arrays, ("x", "scale", "shift"), output_mask, sm_margin=sm_margin
    )
    return _as_given(gradients, x, scale, scale)


def gate_add_layer_norm_modulate(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + gate * x, y = (s - mean(s)) / sqrt(var(s) + eps) * (1 + scale) + shift, over the last axis.

    Parameters and errors as in `layer_norm_modulate`; gate is as scale, residual and `s_dtype` as in `add_layer_norm`.

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
    return forward(
        "gate_add_layer_norm_modulate",
        x,
        _gated(x, residual, gate, scale, shift),
        eps,
        dtype,
        s_dtype,
        sm_margin=sm_margin,
    )


def gate_add_layer_norm_modulate_forward(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-5,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """`gate_add_layer_norm_modulate` with what its backward pass needs: (y, s, mean, rstd), those of s.

    Parameters and errors as in `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s, mean, rstd = cunorm.gate_add_layer_norm_modulate_forward(x, x, ones, ones, ones)
    >>> rstd.shape
    (1, 2)
    """
    operands = _gated(x, residual, gate, scale, shift)
    return forward("gate_add_layer_norm_modulate_forward", x, operands, eps, dtype, s_dtype, sm_margin=sm_margin)


def gate_add_layer_norm_modulate_backward(
    dy: Any,
    ds: Any,
    x: Any,
    s: Any,
    mean: Any,
    rstd: Any,
    gate: Any,
    scale: Any,
    *,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any, Any]:
    """dx = gate * t, dresidual = t, dgate = Σ t * x, dscale = Σ dy * xhat, dshift = Σ dy.

    Sums are of the rows that share a vector. t is the whole gradient of s,
    ds + rstd * (g - mean(g) - xhat * mean(g * xhat)); g = dy * (1 + scale),
    xhat = (s - mean) * rstd.

    Parameters
    ----------
    dy, ds : array, shape of x, or None
        The gradients of y and of s, in any of the four dtypes; one may be None.
    x, gate, scale : array
        As in the forward pass.
    s, mean, rstd : array
        What `gate_add_layer_norm_modulate_forward` returned.
    output_mask : tuple of five bool
        Which of (dx, dresidual, dgate, dscale, dshift) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dresidual : array, shape and dtype of s
    dgate : array, shape and dtype of gate
    dscale, dshift : array, shape and dtype of scale

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s, mean, rstd = cunorm.gate_add_layer_norm_modulate_forward(x, x, ones, ones, ones)
    >>> dy = numpy.ones_like(x)
    >>> gradients = cunorm.gate_add_layer_norm_modulate_backward(dy, dy, x, s, mean, rstd, ones, ones)
    >>> gradients[4]  # dshift
    array([[2., 2., 2.]])
    """
    of_gate, of_scale = _of_samples(x, gate, scale)
    # residual and shift are not read: s and scale have their shapes and dtypes.
    arrays = {"x": x, "residual": s, "s": s, "dy": dy, "ds": ds, "mean": mean, "rstd": rstd}
    arrays |= {"gate": of_gate, "scale": of_scale, "shift": of_scale}
    names = ("x", "residual", "gate", "scale", "shift")
    gradients = backward("gate_add_layer_norm_modulate_backward", arrays, names, output_mask, sm_margin=sm_margin)
    return _as_given(gradients, x, s, gate, scale, scale)


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
    scale, shift = _of_samples(x, scale, shift)
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
    scale, shift = _of_samples(x, scale, shift)
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
    (of_samples,) = _of_samples(x, scale)
    # shift is not read: scale has its shape and dtype.
    arrays = {"x": x, "dy": dy, "rstd": rstd, "scale": of_samples, "shift": of_samples}
    gradients = backward(
        "rms_norm_modulate_backward", arrays, ("x", "scale", "shift"), output_mask, sm_margin=sm_margin
    )
    return _as_given(gradients, x, scale, scale)


def gate_add_rms_norm_modulate(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """s = residual + gate * x, y = s / sqrt(mean(s²) + eps) * (1 + scale) + shift, over the last axis.

    Parameters and errors as in `layer_norm_modulate`; gate is as scale, residual and `s_dtype` as in `add_layer_norm`.

    Returns
    -------
    y, s : array, shape of x
        s is rounded before its statistics are taken.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s = cunorm.gate_add_rms_norm_modulate(x, x, ones, ones, ones)
    >>> s
    array([[[ 0.,  2.,  4.],
            [ 6.,  8., 10.]]])
    """
    return forward(
        "gate_add_rms_norm_modulate",
        x,
        _gated(x, residual, gate, scale, shift),
        eps,
        dtype,
        s_dtype,
        sm_margin=sm_margin,
    )


def gate_add_rms_norm_modulate_forward(
    x: Any,
    residual: Any,
    gate: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-6,
    *,
    dtype: Any = None,
    s_dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """`gate_add_rms_norm_modulate` with what its backward pass needs: (y, s, rstd), those of s.

    Parameters and errors as in `layer_norm_modulate`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s, rstd = cunorm.gate_add_rms_norm_modulate_forward(x, x, ones, ones, ones)
    >>> rstd.shape
    (1, 2)
    """
    operands = _gated(x, residual, gate, scale, shift)
    return forward("gate_add_rms_norm_modulate_forward", x, operands, eps, dtype, s_dtype, sm_margin=sm_margin)


def gate_add_rms_norm_modulate_backward(
    dy: Any,
    ds: Any,
    x: Any,
    s: Any,
    rstd: Any,
    gate: Any,
    scale: Any,
    *,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any, Any]:
    """dx = gate * t, dresidual = t, dgate = Σ t * x, dscale = Σ dy * xhat, dshift = Σ dy.

    Sums are of the rows that share a vector. t is the whole gradient of s,
    ds + rstd * (g - xhat * mean(g * xhat)); g = dy * (1 + scale),
    xhat = s * rstd.

    Parameters
    ----------
    dy, ds : array, shape of x, or None
        The gradients of y and of s, in any of the four dtypes; one may be None.
    x, gate, scale : array
        As in the forward pass.
    s, rstd : array
        What `gate_add_rms_norm_modulate_forward` returned.
    output_mask : tuple of five bool
        Which of (dx, dresidual, dgate, dscale, dshift) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dresidual : array, shape and dtype of s
    dgate : array, shape and dtype of gate
    dscale, dshift : array, shape and dtype of scale

    Raises
    ------
    TypeError, ValueError
        As of `layer_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, ones = numpy.arange(6.0).reshape(1, 2, 3), numpy.ones((1, 3))
    >>> y, s, rstd = cunorm.gate_add_rms_norm_modulate_forward(x, x, ones, ones, ones)
    >>> dy = numpy.ones_like(x)
    >>> gradients = cunorm.gate_add_rms_norm_modulate_backward(dy, dy, x, s, rstd, ones, ones)
    >>> gradients[4]  # dshift
    array([[2., 2., 2.]])
    """
    of_gate, of_scale = _of_samples(x, gate, scale)
    # residual and shift are not read: s and scale have their shapes and dtypes.
    arrays = {"x": x, "residual": s, "s": s, "dy": dy, "ds": ds, "rstd": rstd}
    arrays |= {"gate": of_gate, "scale": of_scale, "shift": of_scale}
    names = ("x", "residual", "gate", "scale", "shift")
    gradients = backward("gate_add_rms_norm_modulate_backward", arrays, names, output_mask, sm_margin=sm_margin)
    return _as_given(gradients, x, s, gate, scale, scale)


def _gated(x: Any, residual: Any, gate: Any, scale: Any, shift: Any) -> dict[str, Any]:
    gate, scale, shift = _of_samples(x, gate, scale, shift)
    return {"residual": residual, "gate": gate, "scale": scale, "shift": shift}


def _of_samples(x: Any, *vectors: Any) -> list[Any]:
    """Vectors of samples, (batch, columns), as they broadcast against x, (batch, ..., columns)."""
    axes = len(getattr(x, "shape", ()))
    found = []
    for one in vectors:
        shape: tuple[int, ...] = tuple(getattr(one, "shape", ()))
        if 0 < len(shape) < axes:
            one = one.reshape((*shape[:-1], *(1,) * (axes - len(shape)), *shape[-1:]))
        found.append(one)
    return found


def _as_given(gradients: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    """Each gradient in the shape of its operand."""
    return tuple(
        gradient if gradient is None else gradient.reshape(operand.shape)
        for gradient, operand in zip(gradients, operands, strict=True)
    )
