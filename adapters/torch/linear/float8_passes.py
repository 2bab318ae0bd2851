"""The forward and the backward pass of a norm with its product in FP8, on tensors and without autograd.

    y = z8 W8ᵀ + bias            z8, W8 with a scale for each row
    dz = dy8 (W8 by columns)     dy8 with a scale for each row, W8 for each of its columns
    dweight = (dy8 by columns)ᵀ (z8 by columns), z computed once more from x, with its static scales

or with one scale for each tensor, as the recipe has it. Of z nothing is kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...norm.float8 import NAMES
from ..norm import dispatch, float8, functional, launching
from . import side_by_side
from .float8_casts import as_right, cast_columns, cast_rows, normalised_columns, scale_of_tensor
from .float8_products import product
from .float8_weights import Weights
from .passes import Options, Sink, accumulate, in_dtype, in_dtype_of, matrix, norm_gradients, normalise
from .recipes import E4M3, Scheme

# Over so many rows the gradient of weight is a product in the dtype of y, if that has 16 bits, as with
# high_precision_wgrad: it is what is written that takes the time, and there are two casts less. On an H200, forward and
# backward of 4096 -> 12288 in a graph, us in 8 bits and so: 16 rows 111 and 88, 128 rows 107 and 96, 8192 rows 2257 and
# 2741.
FEW_ROWS = 128


class Float8Options(NamedTuple):
    operation: str  # a name of cunorm.operation.NAMED
    eps: float
    dtype: torch.dtype  # of y, and of z where it is returned
    scheme: Scheme
    sm_margin: int = 0  # as in Options
    backward_sm_margin: int = 0

    @property
    def plain(self) -> Options:
        """For the norm and its gradients, which are as without FP8."""
        return Options(self.operation, self.eps, self.dtype, False, self.sm_margin, self.backward_sm_margin)


class Forward(NamedTuple):
    y: Tensor  # (..., out)
    z: Tensor | None  # (..., in)
    statistics: Tensor | None
    z_scale: Tensor | None  # of no axes, of a scheme by tensors


def forward(
    x: Tensor,
    weights: Weights,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    options: Float8Options,
    wants_statistics: bool,
    wants_z: bool,
    norm: launching.Forward | None = None,
) -> Forward:
    """y, and what is wanted besides. `norm`: by `norm_recipe`, of these tensors."""
    by_row, _, _, _, (fast, _, _), _ = options.scheme
    z8, scale, z, statistics = _normalised(x, ln_weight, ln_bias, options, wants_statistics, wants_z, norm)
    if z8.dim() != 2:
        z8 = z8.reshape(-1, x.shape[-1])
    if by_row and scale.dim() != 1:
        scale = scale.reshape(-1)
    y = product(z8, scale, weights.rows, weights.row_scale, options.dtype, bias, fast=fast)
    if x.dim() != 2:
        y = y.view(*x.shape[:-1], y.shape[-1])
    return Forward(y, z, statistics, None if by_row else scale)


def _normalised(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    options: Float8Options,
    wants_statistics: bool,
    wants_z: bool,
    norm: launching.Forward | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(z8, scale, z, statistics): of rows from z in float32, in one kernel; of the tensor from z as it is returned."""
    norm = norm or norm_recipe(x, ln_weight, ln_bias, options, wants_z)
    if norm is not None:
        tensors = functional.given(x, ln_weight, ln_bias)
        results, statistics = launching.forward_by(norm, tensors, (), options.eps, wants_statistics)
        found = dict(zip(norm.written, results, strict=True))
        return found["y8"], found["y8_scale"], found.get("y"), statistics
    _, _, dtype, scheme, sm_margin, _ = options
    shape = x.shape[-1:]
    power_2, least = scheme.power_2[0], scheme.least[0]
    if not scheme.by_row:
        z, statistics = normalise(x, ln_weight, ln_bias, options.plain, wants_statistics, sm_margin)
        flat = z.reshape(-1, *shape)
        scale = scale_of_tensor(flat, power_2_scale=power_2, least=least)
        return cast_rows(flat, scale=scale)[0], scale, z if wants_z else None, statistics
    wide = options.plain._replace(dtype=torch.float32)
    z, statistics = normalise(x, ln_weight, ln_bias, wide, wants_statistics, sm_margin)
    z8, scale, _, _ = cast_rows(z.reshape(-1, *shape), power_2_scale=power_2)
    return z8, scale, z.to(dtype) if wants_z else None, statistics


def norm_recipe(
    x: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None, options: Float8Options, wants_z: bool
) -> launching.Forward | None:
    """That of the kernel which makes z8; None where there is none, or the tensors cannot go straight to it."""
    operation, _, dtype, scheme, sm_margin, _ = options
    if not scheme.by_row or scheme.power_2[0]:
        return None
    of_z = dtype if wants_z else None
    key = ("in 8 bits", operation, of_z, sm_margin, x.shape, ln_weight is None, ln_bias is None)
    tensors = functional.given(x, ln_weight, ln_bias)
    recipe = launching.known_call(key, tensors)
    if recipe is not None and functional.nothing_else_listens():
        return recipe
    if not dispatch.at_once(tensors):
        return None
    recipe = float8.row_recipe(operation, x, ln_weight, ln_bias, of_z, NAMES[E4M3], sm_margin)
    launching.remember_call(key, tensors, recipe)
    return recipe


class Saved(NamedTuple):
    """What a backward pass reads of its forward pass."""

    x: Tensor
    columns: Tensor | None  # of Weights
    column_scale: Tensor | None
    ln_weight: Tensor | None
    ln_bias: Tensor | None
    statistics: Tensor
    z_scale: Tensor | None


class Dtypes(NamedTuple):
    """Those of the gradients of parameters."""

    weight: torch.dtype
    bias: torch.dtype | None


def gradients(
    dy: Tensor | None,
    dz: Tensor | None,
    saved: Saved,
    options: Float8Options,
    dtypes: Dtypes,
    mask: tuple[bool, bool, bool, bool, bool],
    sink: Sink | None = None,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, ln_weight and ln_bias, None where not wanted; dy (..., out), dz (..., in) that of z.

    dy is read twice: for its bytes by rows, with Σ dy and the largest of each column, and for those by columns.
    """
    wants_dx, wants_dweight, wants_dbias, *wants_ln = mask
    norm_mask = (wants_dx, *wants_ln)
    x, columns, column_scale, ln_weight, ln_bias, statistics, _ = saved
    rows = x.numel() // x.shape[-1]
    scheme = options.scheme
    high_precision = rows <= FEW_ROWS and scheme.by_row and options.dtype in functional.HALF
    high_precision = high_precision or scheme.high_precision_wgrad
    rounded = None
    if dy is not None:
        dy = matrix(dy, rows)
        sums = wants_dbias or (sink is not None and dtypes.bias is not None)
        rounded = _Rounded(dy, saved, options, dtypes, wants_dweight, sums, high_precision)
    size = 0 if dy is None else dy.numel()
    # Side by side what one half has read may not be written by the other.
    held = (rounded.rows, rounded.scale) if rounded is not None and side_by_side.applies(x, size) else None

    def of_norm() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if not any(norm_mask) or (rounded is None and dz is None):
            return None, None, None
        if rounded is None:
            return norm_gradients(dz, False, x, statistics, ln_weight, options.plain, norm_mask)
        fast = options.scheme.fast[1]
        total = product(rounded.rows, rounded.scale, columns, column_scale, options.dtype, fast=fast)
        if dz is not None:
            total.add_(matrix(dz, rows))
        if x.dim() != 2:
            total = total.view(x.shape)
        return norm_gradients(total, True, x, statistics, ln_weight, options.plain, norm_mask)

    def of_product() -> tuple[Tensor | None, Tensor | None]:
        if rounded is None:
            return None, None
        rounded.turn()
        if sink is not None:
            return sink(rounded)
        return rounded.weight() if wants_dweight else None, rounded.bias() if wants_dbias else None

    # In this order the bytes by rows are gone before those by columns are there.
    (dx, dln_weight, dln_bias), (dweight, dbias) = side_by_side.run(x, size, of_norm, of_product)
    del held
    return dx, dweight, dbias, dln_weight, in_dtype_of(ln_bias, dln_bias)


class _Rounded:
    """dy in 8 bits, and the ProductGradients that follow from it; z is made once more when they are asked for."""

    rows: Tensor  # (rows, out)
    scale: Tensor  # (rows,), or of no axes

    def __init__(
        self,
        dy: Tensor,
        saved: Saved,
        options: Float8Options,
        dtypes: Dtypes,
        wants_dweight: bool,
        sums: bool,
        high_precision: bool,
    ):
        """`sums`: that of every column of dy, the gradient of bias. `high_precision`: as high_precision_wgrad."""
        self.dtype = dy.dtype
        self._saved, self._options, self._dtypes = saved, options, dtypes
        by_row, gradient, (_, _, power_2), (_, _, least), _, _ = options.scheme
        self._high_precision = high_precision
        scale = None if by_row else scale_of_tensor(dy, gradient, power_2_scale=power_2, least=least)
        columns = wants_dweight and not high_precision
        self.rows, self.scale, self._sums, amax = cast_rows(
            dy,
            gradient,
            scale=scale,
            power_2_scale=power_2,
            column_sums=sums,
            column_amax=columns and by_row,
            sum_dtype=dtypes.bias or dy.dtype,
        )
        self._dy = dy if wants_dweight else None
        self._amax, self._tensor_scale = amax, scale

    def turn(self) -> None:
        """dy is read by columns, and they alone are kept for the gradient of weight."""
        del self.rows, self.scale
        scheme = self._options.scheme
        if self._dy is not None and not self._high_precision:
            self._columns, self._column_scale = cast_columns(
                self._dy, self._amax, scheme.gradient, scale=self._tensor_scale, power_2_scale=scheme.power_2[2]
            )
            self._dy = None

    @cached_property
    def _z(self) -> Tensor:
        """(rows, in) as the norm returns it."""
        x, _, _, ln_weight, ln_bias, _, _ = self._saved
        options = self._options.plain
        z, _ = normalise(x, ln_weight, ln_bias, options, False, options.backward_sm_margin)
        return matrix(z, x.numel() // x.shape[-1])

    @cached_property
    def _z_columns(self) -> tuple[Tensor, Tensor]:
        """(bytes (in, rows and zeros), scale (in,) or of no axes)"""
        x, _, _, ln_weight, ln_bias, statistics, z_scale = self._saved
        scheme = self._options.scheme
        if not scheme.by_row:
            return cast_columns(self._z, None, scale=z_scale)
        x = matrix(x, x.numel() // x.shape[-1])
        if statistics.dim() != 2:
            statistics = statistics.reshape(statistics.shape[0], x.shape[0])
        operation = self._options.operation
        return normalised_columns(x, statistics, ln_weight, ln_bias, operation, power_2_scale=scheme.power_2[0])

    def weight(self) -> Tensor:
        if self._dy is not None:
            return in_dtype(torch.mm(self._dy.t(), self._z), self._dtypes.weight)
        return self._product(self._columns, self._column_scale, self._dtypes.weight)

    def bias(self) -> Tensor:
        return self._sums

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        if self._dy is not None:
            return accumulate(total, self._dy[:, rows], self._z, overwrite)
        # A slice of the scales may lie where no product can read it.
        scale = self._column_scale if self._column_scale.dim() == 0 else self._column_scale[rows].clone()
        found = self._product(self._columns[rows], scale, total.dtype)
        total.copy_(found) if overwrite else total.add_(found)

    def _product(self, columns: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if columns.shape[1] == 0:  # no rows of x: no kernel is launched for their columns
            return columns.new_zeros((len(columns), self._saved.x.shape[-1]), dtype=dtype)
        fast = self._options.scheme.fast[2]
        return product(columns, scale, *as_right(*self._z_columns), dtype, fast=fast)
