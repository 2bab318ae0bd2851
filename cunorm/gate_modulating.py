"""A norm of a residual stream with what a gate lets in, and its modulation: blocks of diffusion transformers."""

from __future__ import annotations

from typing import Any

from .modulating import as_given, of_samples
from .named_fusions import backward, forward


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
    of_gate, of_scale = of_samples(x, gate, scale)
    # residual and shift are not read: s and scale have their shapes and dtypes.
    arrays = {"x": x, "residual": s, "s": s, "dy": dy, "ds": ds, "mean": mean, "rstd": rstd}
    arrays |= {"gate": of_gate, "scale": of_scale, "shift": of_scale}
    names = ("x", "residual", "gate", "scale", "shift")
    gradients = backward("gate_add_layer_norm_modulate_backward", arrays, names, output_mask, sm_margin=sm_margin)
    return as_given(gradients, x, s, gate, scale, scale)


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
    of_gate, of_scale = of_samples(x, gate, scale)
    # residual and shift are not read: s and scale have their shapes and dtypes.
    arrays = {"x": x, "residual": s, "s": s, "dy": dy, "ds": ds, "rstd": rstd}
    arrays |= {"gate": of_gate, "scale": of_scale, "shift": of_scale}
    names = ("x", "residual", "gate", "scale", "shift")
    gradients = backward("gate_add_rms_norm_modulate_backward", arrays, names, output_mask, sm_margin=sm_margin)
    return as_given(gradients, x, s, gate, scale, scale)


def _gated(x: Any, residual: Any, gate: Any, scale: Any, shift: Any) -> dict[str, Any]:
    gate, scale, shift = of_samples(x, gate, scale, shift)
    return {"residual": residual, "gate": gate, "scale": scale, "shift": shift}
