"""`layer_norm` and `rms_norm` on JAX arrays, eager and traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import jax
import jax.numpy as jnp

from ...call import checks
from ...call.checks import Layout, NormOptions
from ...operation import NORMS
from . import primitives, sharding
from .formulas import Task


def layer_norm(
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> jax.Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x.

    Parameters
    ----------
    x : jax.Array or numpy.ndarray, shape (..., *normalized_shape)
        float16, bfloat16, float32 or (with jax_enable_x64) float64.
    normalized_shape : int or sequence of int, optional
        The last axes of x, over which mean and (biased) variance are taken. Default: the shape of `weight`, or the last
        axis.
    weight, bias : jax.Array or numpy.ndarray, shape normalized_shape, optional
        Any of the four dtypes, each independently of x.
    eps : float
        Added to the variance, inside the root. A number, not a traced value: it stands in the kernel's text.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype : dtype or str, optional
        Of y. Default: that of x.
    sm_margin : int
        Leaves the work of this many multiprocessors to others, such as communication that runs at the same time.

    Returns
    -------
    y : jax.Array, shape of x

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype.
    ValueError
        A shape or value that does not fit.
    ImportError
        A program for a GPU without CuPy.

    Notes
    -----
    On NVIDIA GPUs cunorm's kernels, elsewhere jax.numpy, as is decided when a program is lowered. Arithmetic in float32
    (float64 for float64 x) with one rounding at the end. Ba, Kiros, Hinton, Layer Normalization, 2016;
    kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.jax import layer_norm
    >>> jax.jit(layer_norm)(jnp.array([[1.0, 2.0, 3.0]])).round(3)
    Array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """
    options = NormOptions("layer_norm", normalized_shape, zero_centered_gamma, dtype, sm_margin, False)
    return norm(options, (x, weight, bias), eps)


def rms_norm(
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    dtype: Any = None,
    sm_margin: int = 0,
) -> jax.Array:
    """y = x / sqrt(mean(x²) + eps) * weight, over the last axes of x.

    Parameters, results and errors as in `layer_norm`. Zhang, Sennrich, Root Mean Square Layer Normalization, 2019;
    kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cunorm.jax import rms_norm
    >>> jax.jit(rms_norm)(jnp.array([[3.0, 4.0]])).round(1)
    Array([[0.8, 1.1]], dtype=float32)
    """
    options = NormOptions("rms_norm", normalized_shape, zero_centered_gamma, dtype, sm_margin, False)
    return norm(options, (x, weight, None), eps)


def norm(options: NormOptions, arrays: Sequence[Any], eps: float) -> jax.Array:
    """Return y of x, weight and bias."""
    given, task = checked(options, arrays, eps)
    return FORWARD[options.norm](task, False, given)["y"]


def checked(options: NormOptions, arrays: Sequence[Any], eps: float) -> tuple[dict[str, jax.Array], Task]:
    """Return those of x, weight and bias that are given, by name, and the rest of the call."""
    function = options.function
    named = dict(zip(("x", "weight", "bias"), arrays, strict=True))
    given = {name: array(function, name, value) for name, value in named.items() if value is not None or name == "x"}
    layouts = {name: Layout(value.shape, (), value.dtype.name, "") for name, value in given.items()}
    if options.dtype is not None:
        options = options._replace(dtype=checks.dtype_name(function, options.dtype))
    shape, y_dtype = checks.check_forward(options, layouts)
    check_x64(function, "dtype", y_dtype)
    task = Task(
        operation=options.operation,
        ndim=len(shape),
        eps=checks.check_eps(function, eps),
        dtype=y_dtype,
        sm_margin=checks.check_sm_margin(function, options.sm_margin, None),
        dtypes=tuple((name, layout.dtype) for name, layout in layouts.items()),
    )
    return sharding.prepared(task, given), task


def check_x64(function: str, argument: str, dtype: str | None) -> None:
    if dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError(f"{function}: {argument} float64 needs jax_enable_x64; got it without.")


def array(function: str, name: str, value: Any) -> jax.Array:
    if isinstance(value, jax.Array):
        return value
    if not isinstance(value, numpy.ndarray):
        raise TypeError(f"{function}: {name} must be a JAX or NumPy array; got {type(value).__name__}.")
    return jnp.asarray(value)


def _program(op: str):
    """Make one program for all calls alike: a model of many layers is traced and lowered once for each kind of call."""

    def forward(task: Task, statistics: bool, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return primitives.forward(task, arrays, statistics=statistics)

    forward.__name__ = forward.__qualname__ = f"cunorm_{op}"
    return jax.jit(forward, static_argnums=(0, 1))


FORWARD = {op: _program(op) for op in NORMS}
