"""Arithmetic in FP8: casts of matrices, with scales that turn their bytes into numbers again, and their products.

    bytes = round(v * q)        q = min(F / max|v|, 2^100), F the largest number of the format        scale = 1 / q

The scale is 1 if all of v is zero, and NaN if v has an infinite number or NaN. With power_2_scale the mantissa of q is
cleared. Casts by columns are transposed, and padded with zeros to a multiple of 16, the step of a product's sum.

CUDA tensors are cast by one kernel each (kernels_cu/linear/float8_rows.cu, float8_columns.cu, float8_product.cu) on
torch's current stream; what follows from layouts and options alone is worked out once and kept. Other tensors are cast
by torch's own operators, to the same bytes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ...call.store import NAMES
from ...kernel import launch
from ...linear.float8_plan import (
    ColumnsProblem,
    ProductProblem,
    RowsProblem,
    plan_columns,
    plan_product,
    plan_rows,
)
from ...linear.float8_spec import padded
from ...operation import NAMED
from ...plan.problem import E4M3, FLOAT8, ITEMSIZE
from ...plan.steps import OtherPlan
from ..norm import checks, formulas, gpu, repeats
from ..norm.float8 import bound, power_of_2, rounded, scaling
from ..private import scaled_mm
from .step import in_dtype

STEP = 16  # a product sums in steps of so many numbers

LARGEST = {short: FLOAT8[name] for short, name in NAMES.items()}
DTYPES = {short: getattr(torch, name) for short, name in NAMES.items()}
_plans: dict[Hashable, OtherPlan] = {}


def cast_rows(
    a: Tensor,
    dtype: str = "e4m3",
    *,
    scale: Tensor | None = None,
    power_2_scale: bool = False,
    column_sums: bool = False,
    column_amax: bool = False,
    sum_dtype: torch.dtype = torch.float32,
    right: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (bytes (rows, cols), scale (rows,), Σ_rows a (cols,), max_rows |a| (cols,)) of a (rows, cols), read once.

    The last two are None unless they are wanted. `scale` is one float32 without axes for all of a, and is returned.
    With `right` bytes and scale are as `as_right` makes them. The kernel refuses float64.
    """
    if not a.is_cuda:
        wide = a.float()
        if scale is None:
            multiplier, scale = scaling(_largest(wide, 1), NAMES[dtype], power_2_scale)
            bytes = rounded(wide * multiplier[:, None], NAMES[dtype])
        else:
            bytes = rounded(wide * scale.reciprocal(), NAMES[dtype])
        bytes, scale = as_right(bytes, scale) if right else (bytes, scale)
        sums = wide.sum(0).to(sum_dtype) if column_sums else None
        return bytes, scale, sums, _largest(wide, 0) if column_amax else None
    index = a.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            options = {"scale": scale, "power_2_scale": power_2_scale}
            wanted = {"column_sums": column_sums, "column_amax": column_amax, "sum_dtype": sum_dtype}
            return cast_rows(a, dtype, **options, **wanted, right=right)
    rows, cols = a.shape
    a = _rows_contiguous(a)
    bytes, scales = _operand(rows, cols, dtype, scale, right)
    sums = gpu.empty((cols,), (1,), sum_dtype) if column_sums else None
    amax = _vector(cols) if column_amax else None
    if rows == 0 or cols == 0:
        sums, amax = (None if vector is None else vector.zero_() for vector in (sums, amax))
        return bytes, scales.fill_(1) if scale is None else scales, sums, amax
    flags = (scale is not None, power_2_scale, column_sums, column_amax)
    pointer = a.data_ptr()
    key = (a.shape, a.stride(0), a.dtype, index, dtype, flags, sum_dtype, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        layout = (rows, cols, _name(a), NAMES[dtype], a.stride(0), pointer % 16 == 0)
        problem = RowsProblem(*layout, *flags, sum_dtype=checks.dtype_name(sum_dtype))
        plan = _plan(plan_rows, problem, a, key)
    others = (scale, bytes, None if scale is not None else scales, sums, amax)
    pointers = [pointer, *[tensor.data_ptr() for tensor in others if tensor is not None]]
    workspace = gpu.empty((plan.workspace,), (1,), torch.uint8).data_ptr() if plan.workspace else 0
    launch.run(plan, index, gpu.stream(index), pointers, workspace)
    return bytes, scales, sums, amax


def cast_columns(
    a: Tensor,
    amax: Tensor | None,
    dtype: str = "e4m3",
    *,
    scale: Tensor | None = None,
    power_2_scale: bool = False,
    right: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (bytes (cols, padded rows), scale (cols,)) of a (rows, cols) and max_rows |a|, which `cast_rows` found.

    Rows are padded with zeros to a multiple of 16. `scale` and `right` are those of `cast_rows`.
    """
    if not a.is_cuda:
        multiplier, scale = scaling(amax, NAMES[dtype], power_2_scale) if scale is None else (scale.reciprocal(), scale)
        bytes = rounded(_padded(a.float() * multiplier), NAMES[dtype])
        return as_right(bytes, scale) if right else (bytes, scale)
    index = a.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return cast_columns(a, amax, dtype, scale=scale, power_2_scale=power_2_scale, right=right)
    rows, cols = a.shape
    a = _rows_contiguous(a)
    bytes, scales = _operand(cols, padded(rows), dtype, scale, right)
    if rows == 0 or cols == 0:
        return bytes, scales.fill_(1) if scale is None else scales
    pointer = a.data_ptr()
    key = (a.shape, a.stride(0), a.dtype, index, dtype, scale is not None, power_2_scale, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        layout = (rows, cols, _name(a), NAMES[dtype], a.stride(0), pointer % 16 == 0)
        plan = _plan(plan_columns, ColumnsProblem(*layout, scale is not None, power_2_scale), a, key)
    if scale is not None:
        pointers = (pointer, scale.data_ptr(), bytes.data_ptr())
    else:
        assert amax is not None
        pointers = (pointer, amax.data_ptr(), bytes.data_ptr(), scales.data_ptr())
    launch.run(plan, index, gpu.stream(index), pointers)
    return bytes, scales


def normalised_columns(
    x: Tensor,
    statistics: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    operation: str,
    *,
    power_2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what `cast_columns` does, (bytes (cols, padded rows), scale (cols,)), of the normalised rows of x.

    A column's scale is known beforehand. If cols numbers have mean 0 and mean square 1 none exceeds sqrt(cols - 1), and
    none exceeds sqrt(cols) if the mean is not 0. So max|z_j| is taken to be |gamma_j| sqrt(cols - 1) + |beta_j|.
    `statistics` are those of the forward pass, (2, rows), or (1, rows) without a mean; `operation` is one of NAMED.
    """
    if not x.is_cuda:
        z = formulas.affine(operation, x, statistics, ln_weight, ln_bias)
        multiplier, scale = scaling(bound(operation, x, ln_weight, ln_bias), E4M3, power_2_scale)
        return rounded(_padded(z * multiplier), E4M3), scale
    index = x.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return normalised_columns(x, statistics, ln_weight, ln_bias, operation, power_2_scale=power_2_scale)
    rows, cols = x.shape
    x, statistics = _rows_contiguous(x), statistics.contiguous()
    gamma, beta = (None if parameter is None else parameter.contiguous() for parameter in (ln_weight, ln_bias))
    bytes, scales = _operand(cols, padded(rows), "e4m3")
    if cols == 0:
        return bytes, scales
    pointer = x.data_ptr()
    parameter_pointers = [parameter.data_ptr() for parameter in (gamma, beta) if parameter is not None]
    affine_aligned = functools.reduce(operator.or_, parameter_pointers, 0) & 15 == 0
    dtypes = (x.dtype, None if gamma is None else gamma.dtype, None if beta is None else beta.dtype)
    key = (x.shape, x.stride(0), dtypes, index, operation, power_2_scale, affine_aligned, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        named = {name: parameter for name, parameter in (("weight", gamma), ("bias", beta)) if parameter is not None}
        problem = ColumnsProblem(
            rows,
            cols,
            _name(x),
            E4M3,
            x.stride(0),
            pointer % 16 == 0,
            power_of_2=power_2_scale,
            operation=NAMED[operation].given(("x", *named)),
            affine=tuple((name, checks.dtype_name(parameter.dtype)) for name, parameter in named.items()),
            affine_aligned=affine_aligned,
        )
        plan = _plan(plan_columns, problem, x, key)
    mean = statistics.data_ptr()
    row_statistics = (mean, mean + 4 * rows) if statistics.shape[0] == 2 else (mean,)
    pointers = (pointer, *parameter_pointers, *row_statistics, bytes.data_ptr(), scales.data_ptr())
    launch.run(plan, index, gpu.stream(index), pointers)
    return bytes, scales


def scaled(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return float32 product (rows, outs) * row_scale (rows,) * column_scale (1, outs) + bias (outs,), rounded once."""
    if not product.is_cuda:
        y = product * row_scale[:, None] * column_scale
        return (y if bias is None else y + bias.float()).to(dtype)
    index = product.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return scaled(product, row_scale, column_scale, bias, dtype)
    rows, cols = product.shape
    product, row_scale, column_scale = product.contiguous(), row_scale.contiguous(), column_scale.contiguous()
    y = gpu.empty((rows, cols), (cols, 1), dtype)
    if rows == 0 or cols == 0:
        return y
    bias = None if bias is None else bias.contiguous()
    pointers = [tensor.data_ptr() for tensor in (product, column_scale, bias, y) if tensor is not None]
    aligned = functools.reduce(operator.or_, pointers) & 15 == 0
    pointers.insert(1, row_scale.data_ptr())
    key = ("scaled", rows, cols, product.dtype, dtype, None if bias is None else bias.dtype, index, aligned)
    plan = _plans.get(key)
    if plan is None:
        names = (_name(product), checks.dtype_name(dtype), None if bias is None else checks.dtype_name(bias.dtype))
        plan = _plan(plan_product, ProductProblem(rows, cols, *names, aligned), product, key)
    launch.run(plan, index, gpu.stream(index), pointers)
    return y


def as_right(bytes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes (out, in) and scales (out,) as the right operand of a product: (in, out) and (1, out).

    A scale without axes stays as it is. Each view takes 2 us of the host, so casts for this side allocate it like this.
    """
    return bytes.t(), scale.unsqueeze(0) if scale.dim() else scale


def scale_of_tensor(a: Tensor, dtype: str = "e4m3", *, power_2_scale: bool = False, least: float = 0.0) -> Tensor:
    """Return TransformerEngine's scale of a tensor, a tensor without axes: 1 / q, q = F / max|a|.

    It is 1 if q is not finite or a is zero. A maximum below `least` counts as `least`.
    """
    if a.numel() == 0:
        return a.new_ones((), dtype=torch.float32)
    lowest, highest = a.aminmax()
    amax = torch.maximum(-lowest, highest).float().clamp(min=least)  # NaN stays NaN
    q = LARGEST[dtype] / amax
    q = torch.where(torch.isinf(q), torch.finfo(torch.float32).max, q)
    if power_2_scale:
        q = power_of_2(q)
    return torch.where((amax > 0) & torch.isfinite(amax), q, 1.0).reciprocal()


def _padded(values: Tensor) -> Tensor:
    """Transpose (rows, cols) and pad rows with zeros to a multiple of STEP."""
    return F.pad(values.t(), (0, -len(values) % STEP)).contiguous()


def _largest(wide: Tensor, axis: int) -> Tensor:
    """Return max|wide| along an axis, or 0 if the axis is empty."""
    if wide.shape[axis] == 0:
        return wide.new_zeros(wide.shape[1 - axis])
    return wide.abs().amax(axis)


def _plan(plan_of: Callable[..., OtherPlan], problem: Any, tensor: Tensor, key: Hashable) -> OtherPlan:
    return repeats.keep(_plans, key, plan_of(problem, gpu.properties_of("cast to 8 bits", tensor)))


def _name(tensor: Tensor) -> str:
    name = checks.dtype_name(tensor.dtype)
    if name not in ITEMSIZE or name == "float64":
        raise TypeError(f"cast to 8 bits: a tensor must have dtype float16, bfloat16 or float32; got {name}.")
    return name


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 or tensor.size(1) == 1 else tensor.contiguous()


def _vector(size: int) -> Tensor:
    return gpu.empty((size,), (1,), torch.float32)


def _operand(
    outer: int, inner: int, dtype: str, scale: Tensor | None = None, right: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate bytes (outer, inner) and their scales, or with `right` what `as_right` would make of them."""
    if right:
        bytes = gpu.empty((inner, outer), (1, inner), DTYPES[dtype])
        return bytes, gpu.empty((1, outer), (outer, 1), torch.float32) if scale is None else scale
    return gpu.empty((outer, inner), (inner, 1), DTYPES[dtype]), _vector(outer) if scale is None else scale


# Products.

# Up to so many rows the product has unit scales, and its result is scaled afterwards: docs/tuning.md, LayerNormLinear.
ROWS_SCALED_AFTER = 32

_ones: dict[int, Tensor] = {}


def product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """Return (a a_scale) (b b_scale) + bias (out,), in `dtype`.

    a is (rows, in), and b and b_scale are as `as_right` makes them; in and out are multiples of 16. The scales are
    float32: a_scale is (rows,), or neither scale has axes. `fast` is that of RowwiseScaling. On the CPU the numbers
    that the bytes stand for are multiplied in float32.
    """
    if a.numel() == 0:  # no rows, or nothing to add up
        y = a.new_zeros((a.shape[0], b.shape[1]), dtype=dtype)
        return y if bias is None else y + bias.to(dtype)
    return (_by_torch if a.is_cuda else _emulated)(a, a_scale, b, b_scale, dtype, bias, fast)


def _emulated(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    y = _numbers(a, a_scale) @ _numbers(b.t(), b_scale.squeeze(0)).t()
    return (y if bias is None else y + bias.float()).to(dtype)


def _by_torch(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    by_row = a_scale.dim() == 1
    if by_row and a.shape[0] <= ROWS_SCALED_AFTER:
        unit = _one(a)
        unscaled = scaled_mm(a, b, unit, unit, out_dtype=torch.float32, use_fast_accum=fast)
        return scaled(unscaled, a_scale, b_scale, bias, dtype)
    product_dtype = dtype
    if by_row:
        a_scale = a_scale.unsqueeze(1)
        # On GPUs other than Hopper torch has scales for rows from CUTLASS, in bfloat16.
        product_dtype = dtype if _is_hopper(a.get_device()) else torch.bfloat16
    fused_bias = None
    if bias is not None and dtype is product_dtype and dtype is not torch.float32:  # cuBLASLt adds no bias in float32
        fused_bias = in_dtype(bias, dtype)
    y = scaled_mm(a, b, a_scale, b_scale, bias=fused_bias, out_dtype=product_dtype, use_fast_accum=fast)
    if bias is not None and fused_bias is None:
        y = y + bias
    return in_dtype(y, dtype)


def _numbers(bytes: Tensor, scale: Tensor) -> Tensor:
    return bytes.float() * (scale[:, None] if scale.dim() == 1 else scale)


def _one(a: Tensor) -> Tensor:
    """Return 1 on the device of a. One that a graph makes is not kept, as it is written only when the graph runs."""
    unit = _ones.get(a.get_device())
    if unit is None:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return torch.ones((), device=a.device)
        unit = _ones[a.get_device()] = torch.ones(()).to(a.device)  # this waits, so that all streams can read it
    return unit


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9
