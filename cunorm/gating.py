"""A norm with a gate, as state-space models and linear attention have it."""

from __future__ import annotations

import numbers
from typing import Any

from .call import checks
from .named_fusions import backward, forward

# The weight's shape is checked here: with groups of columns it is one for each.
KINDS = (("z", "full"),)
NAMES = ("x", "z", "weight")


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
        The gate, in any of the four dtypes, as weight. silu(z) = z / (1 + exp(-z)).
    weight : array, shape (columns,), optional
    eps : float
        Added to the mean of squares, inside the root.
    norm_before_gate : bool
        Which of the two. s is rounded to the dtype of x before its statistics are taken.
    group_size : int, optional
        So many neighbouring columns are normalised together, instead of all.
    dtype : dtype or str, optional
        Of y. Default: that of x.

    Returns
    -------
    y : array, shape of x

    Raises
    ------
    TypeError, ValueError
        As of `rms_norm`; ValueError for a group_size that does not divide the columns.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, z = numpy.array([[3.0, 4.0, 1.0, 1.0]]), numpy.full((1, 4), 100.0)
    >>> cunorm.rms_norm_gated(x, z, group_size=2).round(3)
    array([[ 84.853, 113.137, 100.   , 100.   ]])
    """
    function = "rms_norm_gated"
    of_x, operands = _in_groups(function, group_size, x, z, weight)
    (y,) = forward(
        function, of_x, operands, eps, dtype, kinds=KINDS, norm_before_gate=norm_before_gate, sm_margin=sm_margin
    )
    return y.reshape(x.shape)


def rms_norm_gated_forward(
    x: Any,
    z: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """`rms_norm_gated` with what its backward pass needs: (y, rstd).

    Parameters and errors as in `rms_norm_gated`.

    Returns
    -------
    y : array, shape of x
    rstd : array, shape (...), with group_size (..., groups)
        float32 (float64 for float64 x).

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[3.0, 4.0, 1.0, 1.0]])
    >>> y, rstd = cunorm.rms_norm_gated_forward(x, x, group_size=2)
    >>> rstd.round(3)
    array([[0.283, 1.   ]])
    """
    function = "rms_norm_gated_forward"
    of_x, operands = _in_groups(function, group_size, x, z, weight)
    y, rstd = forward(
        function, of_x, operands, eps, dtype, kinds=KINDS, norm_before_gate=norm_before_gate, sm_margin=sm_margin
    )
    return y.reshape(x.shape), rstd


def rms_norm_gated_backward(
    dy: Any,
    x: Any,
    rstd: Any,
    z: Any,
    weight: Any = None,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dx = rstd * (g - xhat * mean(g * xhat)), dz = dy * weight * xhat * silu'(z), dweight = Σ dy * silu(z) * xhat.

    g = dy * weight * silu(z), xhat = x * rstd. Unless norm_before_gate g = dy * weight, xhat = s * rstd, and with
    t = rstd * (g - xhat * mean(g * xhat)) dx = t * silu(z), dz = t * x * silu'(z), dweight = Σ dy * xhat.

    Parameters
    ----------
    dy : array, shape of x
        The gradient of y, in any of the four dtypes.
    x, z, weight, norm_before_gate, group_size
        As in the forward pass.
    rstd : array
        What `rms_norm_gated_forward` returned.
    output_mask : tuple of three bool
        Which of (dx, dz, dweight) are wanted; the others are not computed and come as None.

    Returns
    -------
    dx, dz : array, shape and dtype of x and of z
    dweight : array, shape and dtype of weight; None without a weight

    Raises
    ------
    TypeError, ValueError
        As of `rms_norm_gated`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[3.0, 4.0, 1.0, 1.0]])
    >>> y, rstd = cunorm.rms_norm_gated_forward(x, x)
    >>> dx, dz, dweight = cunorm.rms_norm_gated_backward(numpy.ones((1, 4)), x, rstd, x, numpy.ones(4))
    >>> dweight.round(2)
    array([3.3 , 6.05, 0.28, 0.28])
    """
    function = "rms_norm_gated_backward"
    of_x, operands = _in_groups(function, group_size, x, z, weight, dy=dy)
    arrays = {"x": of_x, "rstd": rstd, **operands}
    *mask, of_weight = checks.check_flags(function, output_mask, 3)
    mask = (*mask, of_weight and weight is not None)
    gradients = backward(
        function, arrays, NAMES, mask, kinds=KINDS, norm_before_gate=norm_before_gate, sm_margin=sm_margin
    )
    shapes = (x.shape, x.shape, x.shape[-1:])
    dx, dz, dweight = (
        None if one is None else one.reshape(shape) for one, shape in zip(gradients, shapes, strict=True)
    )
    return dx, dz, dweight


def _in_groups(
    function: str, group_size: int | None, x: Any, z: Any, weight: Any, **others: Any
) -> tuple[Any, dict[str, Any]]:
    """x and the rest with an axis for groups of columns before the last one; a weight is then one for each group."""
    operands = {"z": z, "weight": weight, **others}
    columns = x.shape[-1] if getattr(x, "shape", ()) else 0
    shape_of_weight = getattr(weight, "shape", None)
    if shape_of_weight is not None and tuple(shape_of_weight) != (columns,):
        raise ValueError(f"{function}: weight must have shape ({columns},), as the last axis of x; got {weight.shape}.")
    if group_size is None:
        return x, operands
    if isinstance(group_size, bool) or not isinstance(group_size, numbers.Integral):
        raise TypeError(f"{function}: group_size must be an integer; got {type(group_size).__name__}.")
    if group_size <= 0 or columns % group_size:
        raise ValueError(f"{function}: group_size must divide the columns of x, {columns}; got {group_size}.")

    def in_groups(name: str, one: Any) -> Any:
        shape = getattr(one, "shape", None)
        if shape is None:
            return one
        if name != "weight" and shape != x.shape:
            raise ValueError(f"{function}: {name} must have the shape of x, {tuple(x.shape)}; got {tuple(shape)}.")
        return one.reshape((*shape[:-1], columns // group_size, group_size))

    return in_groups("x", x), {name: in_groups(name, one) for name, one in operands.items()}
