"""`layer_norm_linear`: a norm and the product that reads it, y = norm(x) kernel + bias.

The norm is that of primitives.py, the product XLA's own: both have JAX's rules, and so has what is made of them.
`jax.checkpoint` lets go of the normalised tensor z, and the backward pass computes it once more where a gradient of
kernel is wanted; mean and rstd are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...call import checks
from ...call.checks import Layout
from ...call.store import MOST_MULTIPLIER, Float8Store
from ...linear import checks as linear_checks
from ...linear.checks import LinearOptions
from ...operation import affine
from ...plan.problem import E4M3, FLOAT8
from ..norm import arrays as norms
from ..norm import float8, formulas, primitives, sharding
from ..norm.formulas import Arrays, Task
from ..norm.functional import array


def layer_norm_linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    ln_weight: jax.Array | None = None,
    ln_bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
    keep_normalized: bool = False,
    precision: Any = None,
    out_sharding: Any = None,
    fp8: str | None = None,
) -> jax.Array:
    """y = z kernel + bias, z = (x - mean(x)) / sqrt(var(x) + eps) * ln_weight + ln_bias over the last axis of x.

    Parameters
    ----------
    x : jax.Array or numpy.ndarray, shape (..., in)
        float16, bfloat16, float32 or (with jax_enable_x64) float64.
    kernel : jax.Array or numpy.ndarray, shape (in, out)
        Of the dtype of x. In Flax's layout: `cunorm.layer_norm_linear` takes its transpose, for JAX arrays too.
    bias : jax.Array or numpy.ndarray, shape (out,), optional
        Of the dtype of x.
    ln_weight, ln_bias : jax.Array or numpy.ndarray, shape (in,), optional
        Any of the four dtypes, each independently of x. An RMSNorm has no ln_bias.
    eps : float
        Added to the variance, inside the root. A number, not a traced value.
    normalization : "LayerNorm" or "RMSNorm"
        The latter is z = x / sqrt(mean(x²) + eps) * ln_weight.
    zero_centered_gamma : bool
        Multiply by 1 + ln_weight.
    keep_normalized : bool
        Keep z for the backward pass instead of computing it once more from x: as much memory as x takes, for the time
        of one forward pass of the norm.
    precision : jax.lax.Precision, str or what else jax.lax.dot_general takes, optional
        Of the products, those of the backward pass too. Default: jax_default_matmul_precision.
    out_sharding : jax.sharding.NamedSharding or PartitionSpec, optional
        Of y, over explicit axes of a mesh, as jnp.dot takes it. Needed where rows of x and columns of kernel are split
        over the same axis: XLA then gathers z, and scatters its gradient.
    fp8 : "tensor", optional
        Take the product of the forward pass in 8 bits, e4m3: z with a scale that none exceeds, whatever x is, kernel
        with that of its largest number, both powers of two. in and out must be multiples of 16, x not float64. kernel
        is cast in every call, which reads it twice. Gradients are those without fp8: their products have 16 bits.
        XLA (jax 0.11) takes its product in 8 bits with xla_gpu_enable_triton_gemm=False, in XLA_FLAGS or among the
        compiler_options of jax.jit; else it multiplies the same bytes as numbers of 16 bits.

    Returns
    -------
    y : jax.Array, shape (..., out), of the dtype of x

    Raises
    ------
    TypeError
        An argument of the wrong kind or dtype, kernel or bias of another dtype than x.
    ValueError
        A shape or value that does not fit, an unknown normalization, an RMSNorm with ln_bias.
    ImportError
        A program for a GPU without CuPy.

    Notes
    -----
    z is rounded to the dtype of x. Products of 16 bits add in float32 and are rounded at their end, as gradients are.
    y is rounded once where XLA leaves the bias to cuBLASLt, else once more after bias is added. On NVIDIA GPUs z comes
    from cunorm's kernel, elsewhere from jax.numpy, and the product is XLA's. Forward mode is right, of any order, in
    jax.numpy as that of `layer_norm` is, its terms rounded to 16 bits where z is. For the backward pass x, mean, rstd
    and the parameters are kept; z is computed again only where the gradient of kernel is wanted.

    Rows belong in x: of single rows, `jax.vmap` over them too, products have a float32 result, which takes longer.
    Rows may be split over devices, and kernel along `out`: no communication forward, unless both are over one axis
    (sequence parallelism), where z is gathered, and once more in the backward pass. Of a kernel that is split along
    `in` XLA gathers the parts or sums over them; over explicit axes of a mesh JAX refuses it.
    kernels_cu/norms/norm_forward.cu.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from cunorm.jax import layer_norm_linear
    >>> x, kernel, bias = jnp.array([[1.0, 3.0]]), jnp.array([[1.0], [-2.0]]), jnp.array([1.0])
    >>> layer_norm_linear(x, kernel, bias).round()
    Array([[-2.]], dtype=float32)
    """
    name = "layer_norm_linear"
    norm = linear_checks.op(name, normalization, ln_bias)
    arrays = {"x": x, "kernel": kernel, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    if fp8 not in (None, "tensor"):
        raise ValueError(f"{name}: fp8 must be None or 'tensor', for XLA has no product by rows; got {fp8!r}.")
    options = LinearOptions(name, norm, eps, zero_centered_gamma)
    of_product = ProductOptions(precision, out_sharding, keep_normalized, fp8=fp8 is not None)
    return norm_linear(options, arrays, of_product)[0]


class ProductOptions(NamedTuple):
    """What a call asks for its product and z, as `layer_norm_linear` says."""

    precision: Any = None
    out_sharding: Any = None
    keep_normalized: bool = False
    mixed: bool = False  # x may have another dtype than kernel, which z and y have
    fp8: bool = False


DEFAULT = ProductOptions()


def norm_linear(
    options: LinearOptions, named: Mapping[str, Any], of_product: ProductOptions = DEFAULT
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (y, {mean, rstd}) of the arrays of a call by name, None for one that is not given.

    Statistics are there only if they are asked for. For kernel (in, out) there may be weight (out, in). eps is checked
    here.
    """
    function = options.function
    options = options._replace(eps=checks.check_eps(function, options.eps))
    arrays = given(function, named, required=("x", "kernel", "weight"))
    linear_checks.check_forward(function, layouts(arrays), bool(options.zero_centered_gamma), of_product.mixed)
    if of_product.fp8:
        linear_checks.check_float8(function, layouts(arrays))
    axis = 0 if "kernel" in arrays else 1
    matrix = arrays["weight" if axis else "kernel"]
    task = norm_task(options, matrix.dtype.name, arrays)
    product = Product(axis, of_product.precision, of_product.out_sharding)
    call = Call(task, product, options.statistics, bool(of_product.keep_normalized), of_product.fp8)
    return FORWARD[options.norm](call, norm_inputs(task, arrays), matrix, arrays.get("bias"))


def given(function: str, named: Mapping[str, Any], required: tuple[str, ...]) -> dict[str, jax.Array]:
    return {name: array(function, name, a) for name, a in named.items() if a is not None or name in required}


def layouts(arrays: Mapping[str, jax.Array]) -> linear_checks.Named:
    return tuple((name, Layout(a.shape, (), a.dtype.name, "")) for name, a in arrays.items())


# By this module's name for it what the norm calls an array.
NAMES = {"x": "x", "mean": "mean", "rstd": "rstd", "ln_weight": "weight", "ln_bias": "bias"}


def norm_task(options: LinearOptions, dtype: str, arrays: Mapping[str, jax.Array]) -> Task:
    """Return the task of the norm, whose z has this dtype. Without a bias its gradient has the dtype of the weight."""
    given = {NAMES[name]: array.dtype.name for name, array in arrays.items() if name in NAMES}
    parameter = given.get("weight", given["x"])
    dtypes = {"weight": parameter, "bias": parameter} | given
    operation = affine(options.norm, bool(options.zero_centered_gamma))
    return Task(operation, 1, options.eps, dtype, 0, tuple(dtypes.items()))


def norm_inputs(task: Task, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays that the norm takes, by the names that it has for them."""
    return sharding.prepared(task, {NAMES[name]: a for name, a in arrays.items() if name in NAMES})


class Product(NamedTuple):
    """A product of the last axis of z with one of a matrix."""

    axis: int  # of the matrix: 0 of kernel (in, out), 1 of weight (out, in)
    precision: Any
    out_sharding: Any = None

    def __call__(self, z: jax.Array, matrix: jax.Array) -> jax.Array:
        """Multiply in the dtype of z, adding in float32 and rounding once; with a vector the result stays float32.

        XLA makes of a vector's product elementwise ones in the dtype of the result and their sum: in 16 bits each would
        be rounded (H200, jax 0.11: 15 to 90 times the error of one rounding). In float32 it writes a matrix's product
        twice, the second time to round it (8192, 4096 -> 12288: 400 MB more), where of 16 bits it leaves adding the
        bias and rounding to cuBLASLt.
        """
        vector = 1 in (math.prod(z.shape[:-1]), *matrix.shape)
        dtype = jnp.promote_types(z.dtype, jnp.float32) if vector else z.dtype
        dimensions = (((z.ndim - 1,), (self.axis,)), ((), ()))
        return jax.lax.dot_general(z, matrix, dimensions, self.precision, dtype, out_sharding=self.out_sharding)


class Call(NamedTuple):
    """What a program is made for, apart from its arrays."""

    task: Task
    product: Product
    statistics: bool
    keep_normalized: bool
    fp8: bool


def _program(op: str):
    """Make one program for all calls alike, as norm/functional.py has them."""

    def forward(call: Call, inputs, matrix, bias):
        def both(inputs, matrix, bias):
            results = primitives.forward(call.task, inputs, statistics=call.statistics)
            z = results.pop("y")
            y = call.product(z, matrix)
            if bias is not None:
                y = _add(y, bias.astype(y.dtype))
            return y.astype(z.dtype), results

        kept = jax.checkpoint_policies.save_only_these_names(primitives.STATISTICS)
        exact = both if call.keep_normalized else jax.checkpoint(both, policy=kept)
        return (_in_8_bits(call, exact) if call.fp8 else exact)(inputs, matrix, bias)

    forward.__name__ = forward.__qualname__ = f"cunorm_{op}_linear"
    return jax.jit(forward, static_argnums=0)


FORWARD = {op: _program(op) for op in linear_checks.OPS.values()}


def _in_8_bits(call: Call, exact: Callable) -> Callable:
    """Return the program with the product in 8 bits, whose derivative is that of the exact product."""

    @jax.custom_jvp
    def forward(inputs, matrix, bias):
        y = _product_in_8_bits(call.task, inputs, matrix, call.product)
        if bias is not None:
            y = y + bias.astype(y.dtype)
        return y.astype(matrix.dtype), {}

    @forward.defjvp
    def _jvp(primals, tangents):
        return forward(*primals), jax.jvp(exact, primals, tangents)[1]

    return forward


def _product_in_8_bits(
    task: Task, inputs: Arrays, matrix: jax.Array, multiply: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Return z matrix, written as what XLA makes its FP8 product of: conversions, scales, the product of one axis.

    Each has one scale: no z exceeds that of z, whatever x is, and that of matrix fits its largest number. Scales are
    powers of two, so that bytes times a scale are exact in 16 bits, as they are where XLA gives the scales to its
    product.
    """
    store = Float8Store(E4M3, "tensor", wide=False)
    z_scale = _power_of_two(norms.unexceeded(task, inputs, store))
    z = norms.stored(task.stored(store), dict(inputs), z_scale)["y8"]
    wide = matrix.astype(jnp.float32)
    largest = jax.lax.bitcast_convert_type(float8.bits_of_magnitudes(wide).max(), jnp.float32)
    scale = _power_of_two(largest / FLOAT8[E4M3])
    bytes, _ = float8.quantise(wide, "tensor", E4M3, scale)
    # XLA allows itself more precision than it is asked for, and would leave the rounding out.
    bytes = jax.lax.optimization_barrier(bytes)
    # float16 has not the range of a scale.
    dtype = jnp.bfloat16 if matrix.dtype == jnp.bfloat16 else jnp.float32
    return multiply(z.astype(dtype) * z_scale.astype(dtype), bytes.astype(dtype) * scale.astype(dtype))


def _power_of_two(scale: jax.Array) -> jax.Array:
    """Return the next power of two that is not smaller. NaN stays NaN."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(scale < jnp.inf, jnp.maximum(rounded, 1 / MOST_MULTIPLIER), scale + (scale - scale))


@jax.custom_jvp
def _add(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias


@_add.defjvp
def _jvp_of_add(primals, tangents):
    """Sum the gradient of bias in float32; by JAX's own rule it would be a sum over the rows in 16 bits."""
    y_dot, bias_dot = (dot.astype(jnp.promote_types(dot.dtype, jnp.float32)) for dot in tangents)
    return _add(*primals), (y_dot + bias_dot).astype(primals[0].dtype)


@partial(jax.jit, static_argnums=(0, 1))
def gradients(task: Task, wanted: tuple[str, ...], dy, weight, inputs) -> dict[str, jax.Array]:
    """Return the gradients of dx, dweight, dbias, dln_weight and dln_bias that are wanted.

    They are of dy, weight (out, in) and what the norm took, with mean and rstd.
    """
    product = Product(1, None)
    results = {}
    if "dweight" in wanted:
        read = {name: array for name, array in inputs.items() if name not in task.norm.statistics}
        z = primitives.forward(task, read, statistics=False)["y"]
        (results["dweight"],) = jax.linear_transpose(lambda weight: product(z, weight).astype(z.dtype), weight)(dy)
    if "dbias" in wanted:
        wide = jnp.promote_types(dy.dtype, jnp.float32)
        results["dbias"] = dy.sum(tuple(range(dy.ndim - 1)), dtype=wide).astype(dy.dtype)
    of_norm = tuple(name for name in OF_NORM if OF_NORM[name] in wanted)
    if of_norm:
        (dz,) = jax.linear_transpose(lambda z: product(z, weight).astype(z.dtype), inputs["x"])(dy)
        of_inputs = primitives.backward(task, {"dy": dz} | formulas.kept(task, inputs), of_norm)
        results |= {OF_NORM[name]: gradient for name, gradient in of_inputs.items()}
    return results


OF_NORM = {"dx": "dx", "dweight": "dln_weight", "dbias": "dln_bias"}  # by the norm's name for them
