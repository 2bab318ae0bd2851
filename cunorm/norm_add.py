"""A sum with a norm: the residual stream of transformers that normalise what a sublayer gives."""

from __future__ import annotations

from typing import Any

from .named_fusions import backward, forward


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

    Parameters and errors as in `add_layer_norm`.

    Returns
    -------
    y : array, shape of x
        Rounded once, after the sum.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.layer_norm_add(numpy.array([[1.0, 2.0, 3.0]]), numpy.array([[1.0, 1.0, 0.0]])).round(3)
    array([[-0.225,  1.   ,  1.225]])
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return forward(
        "layer_norm_add", x, operands, eps, dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin
    )[0]


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

    Parameters and errors as in `add_layer_norm`; y as in `layer_norm_add`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> cunorm.rms_norm_add(numpy.array([[3.0, 4.0]]), numpy.array([[1.0, 0.0]])).round(3)
    array([[1.849, 1.131]])
    """
    operands = {"residual": residual, "weight": weight}
    return forward(
        "rms_norm_add", x, operands, eps, dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin
    )[0]


def layer_norm_add_forward(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """`layer_norm_add` with what its backward pass needs: (y, mean, rstd), those of x.

    Parameters and errors as in `add_layer_norm`; mean and rstd as in `add_layer_norm_forward`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, mean, rstd = cunorm.layer_norm_add_forward(numpy.array([[1.0, 2.0, 3.0]]), numpy.ones((1, 3)))
    >>> mean, rstd.round(3)
    (array([2.]), array([1.225]))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return forward(
        "layer_norm_add_forward", x, operands, eps, dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin
    )


def rms_norm_add_forward(
    x: Any,
    residual: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """`rms_norm_add` with what its backward pass needs: (y, rstd).

    Parameters and errors as in `add_layer_norm`; rstd as in `add_layer_norm_forward`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, rstd = cunorm.rms_norm_add_forward(numpy.array([[3.0, 4.0]]), numpy.ones((1, 2)))
    >>> rstd.round(3)
    array([0.283])
    """
    operands = {"residual": residual, "weight": weight}
    return forward(
        "rms_norm_add_forward", x, operands, eps, dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin
    )


def layer_norm_add_backward(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any, Any]:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), dweight = Σ dy * xhat, dbias = Σ dy.

    The gradient of residual is dy itself. g = dy * weight, xhat = (x - mean) * rstd. Parameters, results and errors as
    in `add_layer_norm_backward`, with x in the place of s.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[1.0, 2.0, 3.0]])
    >>> y, mean, rstd = cunorm.layer_norm_add_forward(x, x)
    >>> dx, dweight, dbias = cunorm.layer_norm_add_backward(numpy.array([[1.0, 0.0, 0.0]]), x, mean, rstd)
    >>> dx.round(3), dbias
    (array([[ 0.204, -0.408,  0.204]]), array([1., 0., 0.]))
    """
    arrays = {"x": x, "dy": dy, "mean": mean, "rstd": rstd, "weight": weight, "bias": weight}
    return backward(
        "layer_norm_add_backward",
        arrays,
        ("x", "weight", "bias"),
        output_mask,
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )


def rms_norm_add_backward(
    dy: Any,
    x: Any,
    rstd: Any,
    weight: Any = None,
    *,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool] = (True, True),
    sm_margin: int = 0,
) -> tuple[Any, Any]:
    """dx = rstd * (g - xhat * mean(g * xhat)), dweight = Σ dy * xhat, with g = dy * weight and xhat = x * rstd.

    The gradient of residual is dy itself. Parameters, results and errors as in `add_layer_norm_backward`, with x in the
    place of s; `output_mask` is for (dx, dweight).

    Examples
    --------
    >>> import numpy, cunorm
    >>> x = numpy.array([[3.0, 4.0]])
    >>> y, rstd = cunorm.rms_norm_add_forward(x, x)
    >>> dx, dweight = cunorm.rms_norm_add_backward(numpy.array([[1.0, 0.0]]), x, rstd)
    >>> dx.round(3), dweight.round(3)
    (array([[ 0.181, -0.136]]), array([0.849, 0.   ]))
    """
    arrays = {"x": x, "dy": dy, "rstd": rstd, "weight": weight}
    return backward(
        "rms_norm_add_backward",
        arrays,
        ("x", "weight"),
        output_mask,
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )
