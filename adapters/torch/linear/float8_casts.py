"""Matrices in 8 bits with the scales that make numbers of them again: bytes = round(v * q), scale = 1 / q.

q = min(F / max|v|, 2^100), F the largest number of the format; the scale is 1 where all of v is zero and NaN where v
has an infinite number or NaN. With power_2_scale the mantissa of q is cleared. Here by torch's own operators, on CUDA
tensors by kernels: the same bytes. Casts by columns are transposed, and padded with zeros to what a product sums up in
steps of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ...call.store import NAMES
from ...plan.problem import FLOAT8
from ..norm import formulas
from ..norm.float8 import bound, power_of_2, rounded, scaling
from . import float8_launching

STEP = 16  # of a product's contraction

LARGEST = {short: FLOAT8[name] for short, name in NAMES.items()}
DTYPES = {short: getattr(torch, name) for short, name in NAMES.items()}


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
    """(bytes (rows, cols), scale (rows,), sums (cols,) or None, max|a| (cols,) or None), scale and max|a| in float32.

    `scale` is one for all, of no axes, which is returned then. `right`: bytes and scale as `as_right` makes them.
    """
    if a.is_cuda:
        return float8_launching.cast_rows(
            a,
            dtype,
            scale=scale,
            power_2_scale=power_2_scale,
            column_sums=column_sums,
            column_amax=column_amax,
            sum_dtype=sum_dtype,
            right=right,
        )
    wide = a.float()
    if scale is None:
        multiplier, scale = scaling(_largest(wide, 1), NAMES[dtype], power_2_scale)
        found = rounded(wide * multiplier[:, None], NAMES[dtype])
    else:
        found = rounded(wide * scale.reciprocal(), NAMES[dtype])
    if right:
        found, scale = as_right(found, scale)
    return found, scale, wide.sum(0).to(sum_dtype) if column_sums else None, _largest(wide, 0) if column_amax else None


def cast_columns(
    a: Tensor,
    amax: Tensor | None,
    dtype: str = "e4m3",
    *,
    scale: Tensor | None = None,
    power_2_scale: bool = False,
    right: bool = False,
) -> tuple[Tensor, Tensor]:
    """(bytes (cols, rows and zeros to a multiple of 16), scale (cols,)), by max|a| (cols,) or `scale`, of no axes.

    `right` as of `cast_rows`.
    """
    if a.is_cuda:
        return float8_launching.cast_columns(a, amax, dtype, scale=scale, power_2_scale=power_2_scale, right=right)
    wide = a.float()
    if scale is None:
        multiplier, scale = scaling(amax, NAMES[dtype], power_2_scale)
        found = wide * multiplier
    else:
        found = wide * scale.reciprocal()
    found = rounded(_padded(found), NAMES[dtype])
    return as_right(found, scale) if right else (found, scale)


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
    """(bytes (cols, rows and zeros), scale (cols,)) of z = norm(x), x (rows, cols), with a scale that none exceeds.

    Of cols numbers with mean 0 and mean square 1 none is beyond sqrt(cols - 1), without a mean none beyond sqrt(cols):
    max|z_j| is taken to be |gamma_j| sqrt(cols - 1) + |beta_j|. `statistics` (1 or 2, rows) as norm/formulas.py has
    them.
    """
    if x.is_cuda:
        return float8_launching.normalised_columns(
            x, statistics, ln_weight, ln_bias, operation, dtype, power_2_scale=power_2_scale
        )
    z = formulas.affine(operation, x, statistics, ln_weight, ln_bias)
    multiplier, scale = scaling(bound(operation, x, 1, ln_weight, ln_bias), NAMES[dtype], power_2_scale)
    return rounded(_padded(z * multiplier), NAMES[dtype]), scale


def as_right(bytes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The right operand of a product, (in, out) and (1, out), of bytes (out, in) and scales (out,) or of no axes.

    Views, which take 2 us of the host each: what is cast for it is allocated so.
    """
    return bytes.t(), scale.unsqueeze(0) if scale.dim() else scale


def scaled(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """product (rows, cols) in float32 by row_scale (rows,), column_scale (1, cols), with bias (cols,), in `dtype`."""
    if product.is_cuda:
        return float8_launching.scaled(product, row_scale, column_scale, bias, dtype)
    y = product * row_scale[:, None] * column_scale
    return (y if bias is None else y + bias.float()).to(dtype)


def scale_of_tensor(a: Tensor, dtype: str = "e4m3", *, power_2_scale: bool = False, least: float = 0.0) -> Tensor:
    """TransformerEngine's scale of a tensor, of no axes: 1 / q, q = F / max|a|; 1 where q is not finite or a is zero.

    A maximum below `least` counts as that.
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
    """(cols, rows and zeros) of (rows, cols)."""
    return F.pad(values.t(), (0, -len(values) % STEP)).contiguous()


def _largest(wide: Tensor, axis: int) -> Tensor:
    """max|wide| along an axis; 0 where there is nothing."""
    if wide.shape[axis] == 0:
        return wide.new_zeros(wide.shape[1 - axis])
    return wide.abs().amax(axis)
