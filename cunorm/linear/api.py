"""`layer_norm_linear`: the public functions of the norm with the product that reads it."""

from __future__ import annotations

from typing import Any

from ..call import checks
from ..call.backend import Array, products_of
from . import checks as linear_checks


def layer_norm_linear(
    x: Array,
    weight: Any,
    bias: Any = None,
    ln_weight: Any = None,
    ln_bias: Any = None,
    eps: float = 1e-5,
    *,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    fp8: str | None = None,
) -> Array:
    """y = z weightᵀ + bias, z = (x - mean(x)) / sqrt(var(x) + eps) * ln_weight + ln_bias over the last axis of x.

    Parameters
    ----------
    x : array, shape (..., in)
        float16, bfloat16, float32 or float64: a NumPy array, a CuPy array, a torch tensor, a JAX array, or any
        array with `__dlpack__` on a CUDA device.
    weight : array, shape (out, in)
        Of the dtype of x. In this layout for JAX arrays too; `cunorm.jax.layer_norm_linear` takes Flax's, (in, out).
    bias : array, shape (out,), optional
        Of the dtype of x.
    ln_weight, ln_bias : array, shape (in,), optional
        Any of the four dtypes, each independently of x. An RMSNorm has no ln_bias.
    eps : float
        Added to the variance, inside the root.
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * ln_weight.
    zero_centered_gamma : bool
        Multiply by 1 + ln_weight.
    fp8 : "row", optional
        Take the product in 8 bits, e4m3: each row of z and of weight with a scale of its own (`layer_norm_fp8`). in and
        out must be multiples of 16. For NumPy and CuPy arrays; for torch `cunorm.torch.LayerNormLinear` in a context.
        weight is cast in every call, which reads it once.

    Returns
    -------
    y : array, shape (..., out), of the dtype of x
        Of the kind of x (a CuPy array for a DLPack producer), on its device, ordered on the current stream of CuPy.

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A shape, value or device that does not fit.
    ImportError
        On a GPU, cuBLAS cannot be loaded.
    RuntimeError
        fp8 on a GPU below compute capability 8.9, or whose cuBLASLt has no such product.

    Notes
    -----
    On a GPU z is rounded to the dtype of x, and the product adds in float32 (float64 for float64). Products of float32
    are TF32 where CuPy is set so (CUPY_TF32=1, or cupy._core.set_compute_type), and not by default. cuBLASLt adds bias
    in its epilogue where nvmath-python is installed (`pip install nvmath-python`); else gemmEx adds to it. On the
    host everything is float64 with one rounding at the end. cunorm/linear/gemm.py, kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, weight, bias = numpy.array([[1.0, 2.0, 3.0]]), numpy.array([[1.0, 0.0, -1.0]]), numpy.array([1.0])
    >>> cunorm.layer_norm_linear(x, weight, bias).round(3)
    array([[-1.449]])
    """
    name = "layer_norm_linear"
    if fp8 not in (None, "row"):
        raise ValueError(f"{name}: fp8 must be None or 'row'; got {fp8!r}.")
    options = _options(name, normalization, ln_bias, eps, zero_centered_gamma)
    arrays = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    products = products_of(name, x)
    if fp8 is None:
        return products.forward(options, arrays)[0]
    in_8_bits = getattr(products, "forward_float8", None)
    if in_8_bits is None:
        raise NotImplementedError(
            f"{name}: x must be an array of a library that this function knows, as NumPy and CuPy; got "
            f"{type(x).__name__}. Pass CuPy arrays (cupy.from_dlpack)."
        )
    return in_8_bits(options, arrays)


def layer_norm_linear_forward(
    x: Array,
    weight: Any,
    bias: Any = None,
    ln_weight: Any = None,
    ln_bias: Any = None,
    eps: float = 1e-5,
    *,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
) -> tuple[Array, Any, Array]:
    """Return `layer_norm_linear` and what its backward pass needs: (y, mean, rstd), rstd = 1 / sqrt(var(x) + eps).

    Parameters and errors as in `layer_norm_linear`.

    Returns
    -------
    y : array, shape (..., out)
    mean, rstd : array, shape (...)
        float32 (float64 for float64 x). Of an RMSNorm mean is None.

    Examples
    --------
    >>> import numpy, cunorm
    >>> y, mean, rstd = cunorm.layer_norm_linear_forward(numpy.array([[1.0, 2.0, 3.0]]), numpy.eye(3), eps=0.0)
    >>> mean, rstd.round(3)
    (array([2.]), array([1.225]))
    """
    name = "layer_norm_linear_forward"
    options = _options(name, normalization, ln_bias, eps, zero_centered_gamma)._replace(statistics=True)
    arrays = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    y, mean, rstd = products_of(name, x).forward(options, arrays)
    return y, mean if normalization == "LayerNorm" else None, rstd


def layer_norm_linear_backward(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    ln_weight: Any = None,
    ln_bias: Any = None,
    *,
    eps: float,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> tuple[Any, Any, Any, Any, Any]:
    """dweight = dyᵀ z, dbias = Σ dy, and with dz = dy weight the gradients of the norm as in `layer_norm_backward`.

    The forward pass does not keep z; it is computed once more from x, for which `eps` must be that of the forward pass.

    Parameters
    ----------
    dy : array, shape (..., out), of the dtype of x
    x, weight, ln_weight, ln_bias, eps, normalization, zero_centered_gamma
        As in the forward pass.
    mean, rstd : array, shape (...)
        What `layer_norm_linear_forward` returned.
    output_mask : tuple of five bool
        Which of the results are wanted; the others are not computed and come as None.

    Returns
    -------
    dx : array, shape and dtype of x
    dweight, dbias : array, shape (out, in) and (out,), of the dtype of x
    dln_weight, dln_bias : array, shape (in,), dtype of ln_weight (of x without one)
        Of an RMSNorm dln_bias is None.

    Raises
    ------
    TypeError, ValueError, ImportError
        As in `layer_norm_linear`.

    Examples
    --------
    >>> import numpy, cunorm
    >>> x, weight = numpy.array([[1.0, 2.0, 4.0]]), numpy.eye(3)
    >>> y, mean, rstd = cunorm.layer_norm_linear_forward(x, weight)
    >>> dy = numpy.array([[1.0, 0.0, 0.0]])
    >>> dx, dweight, dbias, _, _ = cunorm.layer_norm_linear_backward(dy, x, mean, rstd, weight, eps=1e-5)
    >>> dx.round(3), dbias
    (array([[ 0.229, -0.344,  0.115]]), array([1., 0., 0.]))
    """
    name = "layer_norm_linear_backward"
    options = _options(name, normalization, ln_bias, eps, zero_centered_gamma)
    arrays = {"dy": dy, "x": x, "mean": mean if options.norm == "layer_norm" else None, "rstd": rstd}
    arrays |= {"weight": weight, "ln_weight": ln_weight, "ln_bias": ln_bias}
    return products_of(name, x).backward(options, arrays, output_mask)


def _options(
    function: str, normalization: object, ln_bias: Any, eps: object, zero_centered_gamma: Any
) -> linear_checks.LinearOptions:
    norm = linear_checks.op(function, normalization, ln_bias)
    return linear_checks.LinearOptions(function, norm, checks.check_eps(function, eps), zero_centered_gamma)
