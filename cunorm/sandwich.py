"""A norm after a sublayer and one before the next: what stands between the sublayers of Gemma.

One launch where a CTA holds a row, else two, `rms_norm_add` and `rms_norm`: the second reads s, which the first wrote,
from memory again. The backward pass is that of either, one after the other.
"""

from __future__ import annotations

from typing import Any

from .call import checks
from .call.backend import Twice, backend_of
from .named_fusions import KINDS
from .operation import sandwiched, sandwiched_at_once


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

    Over the last axis.

    Parameters
    ----------
    x : array, shape (..., columns)
        float16, bfloat16, float32 or float64: a NumPy, CuPy or JAX array, or a tensor. Rows may be strided.
    residual : array, shape of x
        Any of the four dtypes, as of the weights.
    weight, second_weight : array, shape (columns,), optional
    eps : float
        Added to the mean of squares, inside the root, of both norms.
    zero_centered_gamma : bool
        Multiply by 1 + weight and 1 + second_weight: both must be there.
    dtype, s_dtype : dtype or str, optional
        Of y and of s. Default: those of x.

    Returns
    -------
    y, s : array, shape of x
        The same bits as of `rms_norm_add` and `rms_norm` of it, one after the other.

    Raises
    ------
    TypeError, ValueError
        As of `rms_norm`.

    Notes
    -----
    s is rounded before it is normalised. One launch, in which x and residual are read and s and y written, of CuPy
    arrays with rows of up to 48 KB and s in the dtype of x; else two, and s is read too.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, s = cunorm.rms_norm_add_rms_norm(numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]]))
    >>> s.round(3), y.round(3)
    (array([[1.849, 1.131]]), array([[1.206, 0.738]]))
    """
    function = "rms_norm_add_rms_norm"
    y, s, _, _ = _forward(
        function,
        x,
        residual,
        weight,
        second_weight,
        eps,
        zero_centered_gamma,
        dtype,
        s_dtype,
        statistics=False,
        sm_margin=sm_margin,
    )
    return y, s


def rms_norm_add_rms_norm_forward(
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
) -> tuple[Any, Any, Any, Any]:
    """`rms_norm_add_rms_norm` with what its backward pass needs: (y, s, rstd, second_rstd), of x and of s.

    Parameters and errors as in `rms_norm_add_rms_norm`.

    Returns
    -------
    y, s : array, shape of x
    rstd, second_rstd : array, shape of x without its last axis
        float32 (float64 for float64 x, or s).

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]])
    >>> y, s, rstd, second_rstd = cunorm.rms_norm_add_rms_norm_forward(x, residual)
    >>> rstd.round(3), second_rstd.round(3)
    (array([0.283]), array([0.653]))
    """
    function = "rms_norm_add_rms_norm_forward"
    return _forward(
        function,
        x,
        residual,
        weight,
        second_weight,
        eps,
        zero_centered_gamma,
        dtype,
        s_dtype,
        statistics=True,
        sm_margin=sm_margin,
    )


def rms_norm_add_rms_norm_backward(
    dy: Any,
    ds: Any,
    x: Any,
    s: Any,
    rstd: Any,
    second_rstd: Any,
    weight: Any = None,
    second_weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool, bool] = (True, True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """dresidual = t = ds + second_rstd * (g - ŝ * mean(g * ŝ)), dsecond_weight = Σ dy * ŝ,
    dx = rstd * (h - xhat * mean(h * xhat)), dweight = Σ t * xhat.

    ŝ = s * second_rstd, g = dy * second_weight, xhat = x * rstd, h = t * weight.

    Parameters
    ----------
    dy, ds : array, shape of x, or None
        The gradients of y and of s, in any of the four dtypes; one may be None.
    x, weight, second_weight : array
        As in the forward pass.
    s, rstd, second_rstd : array
        What `rms_norm_add_rms_norm_forward` returned.
    zero_centered_gamma : bool
        As in the forward pass.
    output_mask : tuple of four bool
        Which of (dx, dresidual, dweight, dsecond_weight) are wanted; the others come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dresidual : array, shape and dtype of s
        In this dtype t is rounded before dx and dweight are computed of it.
    dweight, dsecond_weight : array, shape (columns,), dtype of its weight (without one of x and of s)

    Raises
    ------
    TypeError, ValueError
        As of `rms_norm`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, residual = numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]])
    >>> y, s, rstd, second_rstd = cunorm.rms_norm_add_rms_norm_forward(x, residual)
    >>> gradients = cunorm.rms_norm_add_rms_norm_backward(x, None, x, s, rstd, second_rstd)
    >>> gradients[1].round(3)  # dresidual
    array([[-0.629,  1.027]])
    """
    function = "rms_norm_add_rms_norm_backward"
    _check_weights(function, weight, second_weight, zero_centered_gamma)
    wants_x, wants_residual, wants_weight, wants_second = checks.check_flags(function, output_mask, 4)
    if dy is None and ds is None:
        raise ValueError(f"{function}: dy or ds must be an array; got None for both.")
    backend = backend_of(function, s, "s")
    first, _, then = sandwiched(bool(zero_centered_gamma))
    options: dict[str, Any] = {"demanded": KINDS, "s_dtype": None, "sm_margin": sm_margin}
    arrays = {"x": s, "s": s, "dy": dy, "ds": ds, "rstd": second_rstd, "second_weight": second_weight}
    wanted = _names(x=wants_x or wants_residual or wants_weight, second_weight=wants_second)
    of_s = backend.backward(function, then, arrays, wanted, **options)
    of_x: dict[str, Any] = {}
    wanted = _names(x=wants_x, weight=wants_weight)
    if wanted:
        arrays = {"x": x, "dy": of_s["x"], "rstd": rstd, "weight": weight}
        of_x = backend_of(function, x).backward(function, first, arrays, wanted, **options)
    dresidual = of_s["x"] if wants_residual else None
    return of_x.get("x"), dresidual, of_x.get("weight"), of_s.get("second_weight")


def _names(**wanted: bool) -> tuple[str, ...]:
    return tuple(name for name, one in wanted.items() if one)


def _forward(
    function: str,
    x: Any,
    residual: Any,
    weight: Any,
    second_weight: Any,
    eps: float,
    zero_centered_gamma: bool,
    dtype: Any,
    s_dtype: Any,
    *,
    statistics: bool,
    sm_margin: int,
) -> tuple[Any, Any, Any, Any]:
    _check_weights(function, weight, second_weight, zero_centered_gamma)
    first, then, _ = sandwiched(bool(zero_centered_gamma))
    dtype, s_dtype = (None if one is None else checks.dtype_name(function, one) for one in (dtype, s_dtype))
    backend = backend_of(function, x)
    if isinstance(backend, Twice):
        given = {"residual": residual, "weight": weight, "second_weight": second_weight}
        found = backend.forward_twice(
            function,
            sandwiched_at_once(bool(zero_centered_gamma)),
            x,
            {name: one for name, one in given.items() if one is not None or name == "residual"},
            eps,
            demanded=KINDS,
            dtype=dtype,
            s_dtype=s_dtype,
            statistics=statistics,
            sm_margin=sm_margin,
        )
        if found is not None:
            return found["y"], found["s"], found.get("rstd"), found.get("second_rstd")
    options: dict[str, Any] = {"demanded": KINDS, "s_dtype": None, "statistics": statistics, "sm_margin": sm_margin}
    operands = {"residual": residual} | ({} if weight is None else {"weight": weight})
    results, _, rstd = backend.forward(function, first, x, operands, eps, dtype=s_dtype, **options)
    s = results["y"]
    operands = {} if second_weight is None else {"second_weight": second_weight}
    dtype = dtype or checks.dtype_name(function, x.dtype)
    results, _, second_rstd = backend.forward(function, then, s, operands, eps, dtype=dtype, **options)
    return results["y"], s, rstd, second_rstd


def _check_weights(function: str, weight: Any, second_weight: Any, zero_centered_gamma: bool) -> None:
    for name, one in (("weight", weight), ("second_weight", second_weight)):
        if zero_centered_gamma and one is None:
            raise ValueError(f"{function}: zero_centered_gamma=True needs a {name}; got {name}=None.")
