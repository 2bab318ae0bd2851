"""The product of two matrices in 8 bits, with a scale for each of their rows or one for each matrix."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..private import scaled_mm
from .float8_casts import scaled
from .step import in_dtype

# To so many rows the product goes with unit scales, and its result is scaled after. On an H200, torch 2.11, with scales
# for rows and so, us: 16 rows of 4096 -> 12288 18.4 and 15.8, 32 rows 20.2 and 18.8, 64 rows 17.6 and 19.6; 16 rows of
# 1024 -> 3072 6.0 and 5.1, 128 rows 6.1 and 5.9.
FEW_ROWS = 32

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
    """(a a_scale) (b b_scale) + bias (out,), in `dtype`.

    a (rows, in), b and b_scale as `as_right` makes them, in and out multiples of 16; scales in float32, that of a
    (rows,), or both of no axes. `fast` as in RowwiseScaling. On the CPU by a product of the numbers that the bytes
    stand for, in float32.
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
    if by_row and a.shape[0] <= FEW_ROWS:
        one = _one(a)
        whole = scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        return scaled(whole, a_scale, b_scale, bias, dtype)
    of_product = dtype
    if by_row:
        a_scale = a_scale.unsqueeze(1)
        # Elsewhere than on Hopper torch has scales for rows from CUTLASS, in bfloat16.
        of_product = dtype if _is_hopper(a.get_device()) else torch.bfloat16
    inside = None
    if bias is not None and dtype is of_product and dtype is not torch.float32:  # which cuBLASLt writes without a bias
        inside = in_dtype(bias, dtype)
    y = scaled_mm(a, b, a_scale, b_scale, bias=inside, out_dtype=of_product, use_fast_accum=fast)
    if bias is not None and inside is None:
        y = y + bias
    return in_dtype(y, dtype)


def _numbers(bytes: Tensor, scale: Tensor) -> Tensor:
    return bytes.float() * (scale[:, None] if scale.dim() == 1 else scale)


def _one(a: Tensor) -> Tensor:
    """The number, on the device of a: kept, but for what a graph makes, which is written in its replays alone."""
    one = _ones.get(a.get_device())
    if one is None:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            return torch.ones((), device=a.device)
        one = _ones[a.get_device()] = torch.ones(()).to(a.device)  # there for all streams when this returns
    return one


@cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9
