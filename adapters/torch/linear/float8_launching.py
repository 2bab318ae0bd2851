"""Operands of products in 8 bits, made of CUDA tensors by one kernel each (kernels_cu/linear/float8_rows.cu,
float8_columns.cu, float8_product.cu), on torch's current stream.

What follows from layouts and options alone is worked out once and kept, as in cunorm/torch/norm/launching.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...call.store import NAMES
from ...kernel import launch
from ...linear.float8_plan import (
    CastPlan,
    ColumnsProblem,
    ProductProblem,
    RowsProblem,
    plan_columns,
    plan_product,
    plan_rows,
)
from ...linear.float8_spec import padded
from ...operation import NAMED
from ...plan.problem import ITEMSIZE
from ..norm import checks, gpu, repeats

FORMATS = {name: getattr(torch, full) for name, full in NAMES.items()}
_plans: dict[Hashable, CastPlan] = {}


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
    """(bytes (rows, cols), scale (rows,), Σ_rows a (cols,), max_rows |a| (cols,)) of a (rows, cols), read once.

    The last two are None unless wanted. `scale`: one float32 for all, which is returned. `right`: bytes and scale as
    float8_casts.as_right makes them. float64 is refused.
    """
    index = a.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            options = {"scale": scale, "power_2_scale": power_2_scale}
            wanted = {"column_sums": column_sums, "column_amax": column_amax, "sum_dtype": sum_dtype}
            return cast_rows(a, dtype, **options, **wanted, right=right)
    rows, cols = a.shape
    a = _rows_contiguous(a)
    found, scales = _operand(rows, cols, dtype, scale, right)
    sums = gpu.empty((cols,), (1,), sum_dtype) if column_sums else None
    amax = _vector(cols) if column_amax else None
    if rows == 0 or cols == 0:
        return found, scales.fill_(1) if scale is None else scales, _zeros(sums), _zeros(amax)
    flags = (scale is not None, power_2_scale, column_sums, column_amax)
    pointer = a.data_ptr()
    key = (a.shape, a.stride(0), a.dtype, index, dtype, flags, sum_dtype, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        layout = (rows, cols, _name(a), NAMES[dtype], a.stride(0), pointer % 16 == 0)
        problem = RowsProblem(*layout, *flags, sum_dtype=checks.dtype_name(sum_dtype))
        plan = _plan(plan_rows, problem, a, key)
    pointers = [pointer, *(() if scale is None else (scale.data_ptr(),)), found.data_ptr()]
    pointers += [one.data_ptr() for one in (None if scale is not None else scales, sums, amax) if one is not None]
    workspace = gpu.empty((plan.workspace,), (1,), torch.uint8).data_ptr() if plan.workspace else 0
    launch.run(plan, index, gpu.stream(index), pointers, workspace)
    return found, scales, sums, amax


def cast_columns(
    a: Tensor,
    amax: Tensor | None,
    dtype: str = "e4m3",
    *,
    scale: Tensor | None = None,
    power_2_scale: bool = False,
    right: bool = False,
) -> tuple[Tensor, Tensor]:
    """(bytes (cols, padded rows), scale (cols,)) of a (rows, cols) and max_rows |a|, which `cast_rows` found.

    Rows are padded with zeros to a multiple of 16. `scale` and `right` as there.
    """
    index = a.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return cast_columns(a, amax, dtype, scale=scale, power_2_scale=power_2_scale, right=right)
    rows, cols = a.shape
    a = _rows_contiguous(a)
    found, scales = _operand(cols, padded(rows), dtype, scale, right)
    if rows == 0 or cols == 0:
        return found, scales.fill_(1) if scale is None else scales
    pointer = a.data_ptr()
    key = (a.shape, a.stride(0), a.dtype, index, dtype, scale is not None, power_2_scale, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        layout = (rows, cols, _name(a), NAMES[dtype], a.stride(0), pointer % 16 == 0)
        plan = _plan(plan_columns, ColumnsProblem(*layout, scale is not None, power_2_scale), a, key)
    if scale is not None:
        pointers = (pointer, scale.data_ptr(), found.data_ptr())
    else:
        assert amax is not None
        pointers = (pointer, amax.data_ptr(), found.data_ptr(), scales.data_ptr())
    launch.run(plan, index, gpu.stream(index), pointers)
    return found, scales


def normalised_columns(
    x: Tensor,
    statistics: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    operation: str,
    dtype: str = "e4m3",
    *,
    power_2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """(bytes (cols, padded rows), scale (cols,)) of the normalised rows of x (rows, cols), as cast_columns makes them.

    A column's scale is known beforehand, (|gamma| sqrt(cols - 1) + |beta|) / largest (RMSNorm: sqrt(cols)).
    `statistics` are what the forward pass saved, (2, rows), or (1, rows) without a mean; `operation` is one of NAMED.
    """
    index = x.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            more = (ln_weight, ln_bias, operation, dtype)
            return normalised_columns(x, statistics, *more, power_2_scale=power_2_scale)
    rows, cols = x.shape
    x, statistics = _rows_contiguous(x), statistics.contiguous()
    gamma, beta = (None if one is None else one.contiguous() for one in (ln_weight, ln_bias))
    found, scales = _operand(cols, padded(rows), dtype)
    if cols == 0:
        return found, scales
    pointer, others = x.data_ptr(), [one.data_ptr() for one in (gamma, beta) if one is not None]
    affine_aligned = functools.reduce(operator.or_, others, 0) & 15 == 0
    dtypes = (x.dtype, None if gamma is None else gamma.dtype, None if beta is None else beta.dtype)
    key = (x.shape, x.stride(0), dtypes, index, operation, dtype, power_2_scale, affine_aligned, pointer & 15)
    plan = _plans.get(key)
    if plan is None:
        named = {name: one for name, one in (("weight", gamma), ("bias", beta)) if one is not None}
        problem = ColumnsProblem(
            rows,
            cols,
            _name(x),
            NAMES[dtype],
            x.stride(0),
            pointer % 16 == 0,
            power_of_2=power_2_scale,
            operation=NAMED[operation].given(("x", *named)),
            affine=tuple((name, checks.dtype_name(one.dtype)) for name, one in named.items()),
            affine_aligned=affine_aligned,
        )
        plan = _plan(plan_columns, problem, x, key)
    mean = statistics.data_ptr()
    kept = (mean, mean + 4 * rows) if statistics.shape[0] == 2 else (mean,)
    pointers = (pointer, *others, *kept, found.data_ptr(), scales.data_ptr())
    launch.run(plan, index, gpu.stream(index), pointers)
    return found, scales


def scaled(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """product (rows, outs) * row_scale (rows,) * column_scale (1, outs) + bias (outs,), rounded once to `dtype`."""
    index = product.get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return scaled(product, row_scale, column_scale, bias, dtype)
    rows, cols = product.shape
    product, row_scale, column_scale = product.contiguous(), row_scale.contiguous(), column_scale.contiguous()
    y = gpu.empty((rows, cols), (cols, 1), dtype)
    if rows == 0 or cols == 0:
        return y
    pointers = [product.data_ptr(), column_scale.data_ptr(), y.data_ptr()]
    if bias is not None:
        bias = bias.contiguous()
        pointers.insert(2, bias.data_ptr())
    together = 0
    for pointer in pointers:
        together |= pointer
    pointers.insert(1, row_scale.data_ptr())
    aligned = together & 15 == 0
    key = ("scaled", rows, cols, product.dtype, dtype, None if bias is None else bias.dtype, index, aligned)
    plan = _plans.get(key)
    if plan is None:
        names = (_name(product), checks.dtype_name(dtype), None if bias is None else checks.dtype_name(bias.dtype))
        plan = _plan(plan_product, ProductProblem(rows, cols, *names, aligned), product, key)
    launch.run(plan, index, gpu.stream(index), pointers)
    return y


def _plan(plan_of: Callable[..., CastPlan], problem: Any, tensor: Tensor, key: Hashable) -> CastPlan:
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
    """Memory of bytes (outer, inner) and their scales; to the right of a product, what a view would make of it."""
    if right:
        found = gpu.empty((inner, outer), (1, inner), FORMATS[dtype])
        return found, gpu.empty((1, outer), (outer, 1), torch.float32) if scale is None else scale
    return gpu.empty((outer, inner), (inner, 1), FORMATS[dtype]), _vector(outer) if scale is None else scale


def _zeros(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.zero_()
