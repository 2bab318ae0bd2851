"""FP8: both operands of every product are rounded to 8 bits, with a scale for each row along what is summed.

    y = z8 W8ᵀ + bias            z8, W8 with a scale for each row
    dz = dy8 (W8 by columns)     dy8 with a scale for each row, W8 with a scale for each column
    dweight = (dy8 by columns)ᵀ (z8 by columns), z computed once more from x, with its static scales

A recipe may also ask for one scale for each tensor. Nothing is kept of z.

With sequence parallelism the ranks gather the bytes of z and the scales of its rows, half as much as 16 bits. A scale
belongs to one row, so nothing is reduced, and y is the same as on one rank. For the gradient of weight they gather z by
columns, whose scales depend on the norm's parameters alone, which all ranks have. A scheme by tensors scales z of all
rows, so z is gathered as it is. dz is summed in the dtype of y. Everything else is done with each rank's own weight and
dy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..norm import functional, launching
from ..private import version_of
from .float8_arithmetic import STEP, as_right, cast_columns, cast_rows, normalised_columns, product, scale_of_tensor
from .parallel import Limits, Ranks, Rows, gathered
from .recipes import Scheme, check_available
from .step import (
    GATHERED,
    NOTHING,
    Inputs,
    Normalised,
    Products,
    Saved,
    Step,
    Weights,
    in_dtype,
    matrix,
    normalise,
    normalised_again,
    recipe_at_once,
)
from .wide import accumulate

# Up to so many rows the gradient of weight is a product in the dtype of y, if that has 16 bits, as with
# high_precision_wgrad: most of the time goes into writing the result, and two casts are saved (docs/tuning.md,
# LayerNormLinear).
FEW_ROWS = 128


class Float8(NamedTuple):
    scheme: Scheme

    limits = Limits("FP8", "in FP8", " Leave the context.")
    # In this order the bytes of dy by rows are freed before those by columns are allocated.
    product_first = False

    def check(self, function: str, inputs: Inputs, autocasts: bool) -> None:
        x, weight, *_ = inputs
        if x.dtype not in functional.FLOATING[:3] or weight.dtype not in functional.FLOATING[:3]:
            name, tensor = ("weight", weight) if x.dtype in functional.FLOATING[:3] else ("input", x)
            raise TypeError(
                f"{function}: in FP8 {name} must have dtype {', '.join(map(str, functional.FLOATING[:3]))}; got "
                f"{tensor.dtype}. Convert it, or leave the context."
            )
        outs, cols = weight.shape
        if cols % STEP or outs % STEP:
            name, size = ("in_features", cols) if cols % STEP else ("out_features", outs)
            raise ValueError(f"{function}: in FP8 {name} must be a multiple of {STEP}; got {size}. Pad the weight.")
        if not torch.compiler.is_compiling():  # in compiled code the operator checks it
            check_available(function, x)

    def read(self, inputs: Inputs, cast: torch.dtype | None) -> Inputs:
        """Return the tensors as they are, as casts read them."""
        return inputs

    def recipe(
        self, x: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None, step: Step
    ) -> launching.Forward | None:
        """Return the recipe of the kernel that makes z8; None if none does, or tensors cannot go straight to it."""
        scheme = self.scheme
        if not scheme.by_row or scheme.power_2[0]:
            return None
        z_dtype = None if step.returned == NOTHING else step.dtype
        return recipe_at_once(x, ln_weight, ln_bias, step.operation, z_dtype, step.sm_margin, float8=True)

    def weights(self, weight: Tensor, wants_columns: bool, trained: bool, cached_weights: Any) -> Weights:
        """Return weight in FP8, by the function with which a module keeps it from call to call."""
        return cached_weights(weight, self.scheme, wants_columns, trained)

    def normalised(self, inputs: Inputs, step: Step, ranks: Ranks, recipe: Any, wants_statistics: bool) -> Normalised:
        x, _, _, ln_weight, ln_bias = inputs
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        z_of_all = tensor_scale = None
        if self.scheme.by_row:
            z8, scale, z, statistics = self._by_row(x, ln_weight, ln_bias, step, recipe, wants_statistics)
            if z8.dim() != 2:
                z8, scale = z8.reshape(rows, cols), scale.reshape(rows)
            if ranks.sequence:
                finish = gathered(z8.view(torch.uint8), ranks, ranks.overlap_gather)
                scale = gathered(scale[:, None], ranks)().view(-1)
                z8 = finish().view(z8.dtype)
                if step.returned == GATHERED:  # not through the buffer that z8 lies in
                    z_of_all = gathered(matrix(z, rows), ranks)()
        else:
            z, statistics = normalise(x, ln_weight, ln_bias, step, wants_statistics, step.sm_margin)
            z_of_all = gathered(matrix(z, rows), ranks, ranks.overlap_gather, keep=step.returned == GATHERED)()
            power_2, least = self.scheme.power_2[0], self.scheme.least[0]
            scale = tensor_scale = scale_of_tensor(z_of_all, power_2_scale=power_2, least=least)
            z8 = cast_rows(z_of_all, scale=scale)[0]
        if step.returned == GATHERED:
            z = z_of_all.view(ranks.shape_of_all(x))
        return (z8, scale), statistics, (None if step.returned == NOTHING else z, tensor_scale)

    def results(self, normalised: Normalised, x: Tensor, step: Step, ranks: Ranks) -> tuple[Tensor | None, ...]:
        return normalised[2]

    def _by_row(self, x, ln_weight, ln_bias, step: Step, recipe: launching.Forward | None, wants_statistics: bool):
        """Return (z8, scale, z, statistics), by one kernel if it has a recipe; z8 is made of z in float32."""
        recipe = recipe or self.recipe(x, ln_weight, ln_bias, step)
        if recipe is not None:
            tensors = functional.given(x, ln_weight, ln_bias)
            results, statistics = launching.forward_by(recipe, tensors, (), step.eps, wants_statistics)
            by_name = dict(zip(recipe.written, results, strict=True))
            return by_name["y8"], by_name["y8_scale"], by_name.get("y"), statistics
        wide = step._replace(dtype=torch.float32)
        z, statistics = normalise(x, ln_weight, ln_bias, wide, wants_statistics, step.sm_margin)
        z8, scale, _, _ = cast_rows(z.reshape(-1, x.shape[-1]), power_2_scale=self.scheme.power_2[0])
        return z8, scale, None if step.returned == NOTHING else z.to(step.dtype), statistics

    def product(self, z: tuple[Tensor, Tensor], weights: Weights, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return product(*z, weights.rows, weights.row_scale, dtype, bias, fast=self.scheme.fast[0])

    def products(self, dy: Tensor, saved: Saved, step: Step, ranks: Ranks, wants: tuple[bool, bool]) -> _Products:
        return _Products(dy, saved, step, ranks, *wants)


class _Products(Products):
    """The products in FP8."""

    rows: Tensor  # bytes of dy, (rows, out)
    scale: Tensor  # (rows,), or without axes

    def __init__(self, dy: Tensor, saved: Saved, step: Step, ranks: Ranks, wants_weight: bool, wants_bias: bool):
        """Cast dy by rows, and find Σ dy and the largest number of each column; `end_dz` reads dy once more."""
        self.dtype, self.extra_bytes = dy.dtype, dy.numel()
        self._saved, self._step, self._ranks, self._scheme = saved, step, ranks, step.numbers.scheme
        by_row, gradient, (_, _, power_2), (_, _, least), _, high_precision = self._scheme
        # Over ranks most of the time goes into gathering, which bytes make shorter.
        few = ranks.alone and len(dy) <= FEW_ROWS and by_row and step.dtype in functional.HALF
        self._high_precision = high_precision or few
        scale = None if by_row else scale_of_tensor(dy, gradient, power_2_scale=power_2, least=least)
        columns = wants_weight and not self._high_precision
        self.rows, self.scale, self._sums, amax = cast_rows(
            dy,
            gradient,
            scale=scale,
            power_2_scale=power_2,
            column_sums=wants_bias,
            column_amax=columns and by_row,
            sum_dtype=step.bias_dtype or dy.dtype,
        )
        self._dy = dy if wants_weight else None
        self._amax, self._tensor_scale = amax, scale

    @property
    def operands_of_dz(self) -> tuple[Tensor, Tensor]:
        return self.rows, self.scale

    def begin_gathering(self) -> None:
        if self._ranks.sequence:
            self._gathering = self._gathered()

    def _gathered(self) -> Rows:
        """Begin to gather Z of all rows, as it is or as the bytes of every rank's columns."""
        x = self._saved.x
        by_columns = self._scheme.by_row and not self._high_precision
        own = self._own_columns[0].view(torch.uint8) if by_columns else normalised_again(self._saved, self._step)
        gathering = self._ranks.gathering(*own.shape, x, own.dtype, self._ranks.bulk_gather)
        gathering.start(own)
        return gathering

    def dz(self, total: Rows, added: Tensor | None) -> None:
        _, _, columns, *_, column_scale = self._saved
        fast = self._scheme.fast[1]
        terms = product(self.rows, self.scale, columns, column_scale, self._step.dtype, fast=fast)
        total.start(terms if added is None else terms.add_(added))

    def end_dz(self) -> None:
        """Cast dy by columns, which the gradient of weight needs, and free the rest of it."""
        del self.rows, self.scale
        if self._dy is not None and not self._high_precision:
            power_2 = self._scheme.power_2[2]
            self._columns, self._column_scale = cast_columns(
                self._dy, self._amax, self._scheme.gradient, scale=self._tensor_scale, power_2_scale=power_2
            )
            self._dy = None

    @cached_property
    def _own_columns(self) -> tuple[Tensor, Tensor]:
        """Return z by columns for a scheme by rows: (bytes (in, padded rows), scale (in,))."""
        statistics, x, _, ln_weight, ln_bias, *_ = self._saved
        x = matrix(x, x.numel() // x.shape[-1])
        if statistics.dim() != 2:
            statistics = statistics.reshape(len(statistics), len(x))
        operation, power_2 = self._step.operation, self._scheme.power_2[0]
        return normalised_columns(x, statistics, ln_weight, ln_bias, operation, power_2_scale=power_2)

    @cached_property
    def _z(self) -> Tensor:
        """Return Z as the norm returns it, (all rows, in)."""
        return (self._gathering or self._gathered()).whole()

    @cached_property
    def _z_columns(self) -> tuple[Tensor, Tensor]:
        """Return Z by columns: (bytes (in, all rows, padded), scale (in,) or without axes)."""
        if not self._scheme.by_row:
            return cast_columns(self._z, None, scale=self._saved.kept)
        if not self._ranks.sequence:
            return self._own_columns
        bytes = (self._gathering or self._gathered()).whole()
        # The columns of all ranks are joined without the padding of each, and the result is padded.
        own, scale = self._own_columns
        cols, rows = len(own), self._saved.x.numel() // len(own)
        bytes = bytes.view(self._ranks.size, cols, -1)[:, :, :rows].transpose(0, 1).reshape(cols, -1)
        return F.pad(bytes, (0, -bytes.shape[1] % STEP)).view(own.dtype), scale

    def weight(self) -> Tensor:
        dtype = self._step.weight_dtype
        if self._dy is not None:
            return in_dtype(torch.mm(self._dy.t(), self._z), dtype)
        return self._product(self._columns, self._column_scale, dtype)

    def bias(self) -> Tensor:
        return self._sums

    def add_to(self, total: Tensor, rows: slice, overwrite: bool) -> None:
        if self._dy is not None:
            return accumulate(total, self._dy[:, rows], self._z, overwrite)
        # A slice of the scales may lie at an address where no product can read it.
        scale = self._column_scale if self._column_scale.dim() == 0 else self._column_scale[rows].clone()
        gradient = self._product(self._columns[rows], scale, total.dtype)
        total.copy_(gradient) if overwrite else total.add_(gradient)

    def _product(self, columns: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if columns.shape[1] == 0:  # x has no rows, and no kernel is launched for their columns
            return columns.new_zeros((len(columns), self._saved.x.shape[-1]), dtype=dtype)
        return product(columns, scale, *as_right(*self._z_columns), dtype, fast=self._scheme.fast[2])

    def release(self) -> None:
        for name in ("_z", "_z_columns", "_own_columns"):
            self.__dict__.pop(name, None)


# weight in FP8.


def quantised(weight: Tensor, scheme: Scheme, wants_columns: bool) -> Weights:
    """Cast weight from its own dtype, with one rounding for each layout."""
    by_row, power_2, least = scheme.of_weight
    scale = None if by_row else scale_of_tensor(weight, power_2_scale=power_2, least=least)
    wants_amax = by_row and wants_columns
    options: dict[str, Any] = {"scale": scale, "power_2_scale": power_2, "right": True}
    rows, row_scale, _, amax = cast_rows(weight, column_amax=wants_amax, **options)
    columns = cast_columns(weight, amax, **options) if wants_columns else (None, None)
    return Weights(rows, row_scale, *columns)


class _Cached(NamedTuple):
    weights: Weights
    of_weight: tuple  # what the bytes depend on besides the parameters
    stamp: tuple | None  # the state of the parameters; None if it cannot be known


class WeightCache:
    """Keeps the bytes of a module's weight from call to call.

    With `trains` an optimizer may change weight without a change of its version, as torch's fused optimizers, those of
    other libraries, and FSDP when it gathers weight anew do. A call that is differentiated by weight sets it.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self._cached: _Cached | None = None
        self._captured: list[Weights] = []  # CUDA graphs read these, and may run as long as the module exists

    def clear(self) -> None:
        self._cached = None

    def of(
        self,
        parts: Sequence[Tensor],
        is_first_microbatch: bool | None,
        whole: Tensor,
        scheme: Scheme,
        wants_columns: bool,
        trained: bool,
    ) -> Weights:
        """Return the bytes of `whole`, which is the parameters `parts` one after the other, from the cache or cast.

        With is_first_microbatch=True they are cast and cached, with False they come from the cache. With None they come
        from the cache if the parameters are the same tensors in the same memory with the same version. But they are
        cast if an optimizer may change weight (`trained` says that this call is differentiated by weight), and while a
        CUDA graph is captured, as the graph would go on reading bytes that may be replaced.
        """
        self.trains = self.trains or trained
        capturing = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_first_microbatch is None and (capturing or (self.trains and any(part.requires_grad for part in parts))):
            return quantised(whole, scheme, wants_columns)
        if is_first_microbatch is not True and self._serves(scheme, wants_columns):
            weights, _, stamp = self._cached
            if is_first_microbatch is False or _holds(stamp, parts):
                if capturing and not any(weights is captured for captured in self._captured):
                    self._captured.append(weights)
                return weights
        weights, stamp = quantised(whole, scheme, wants_columns), _stamp(parts)
        if is_first_microbatch is not None or stamp is not None:
            self._cached = _Cached(weights, scheme.of_weight, stamp)
        return weights

    def _serves(self, scheme: Scheme, wants_columns: bool) -> bool:
        if self._cached is None or self._cached.of_weight != scheme.of_weight:
            return False
        columns = self._cached.weights.columns
        # A tensor that was made in inference mode cannot be saved for a backward pass.
        return not wants_columns or (columns is not None and not columns.is_inference())


def _stamp(parts: Sequence[Tensor]) -> tuple | None:
    """Return a value that tells each tensor from others and from its earlier states; None if that cannot be known.

    `part.data = tensor` changes only the storage of a part, and other memory may later lie at the same address. The
    dictionary of attributes stands for the tensor, as a weak reference to a tensor would forbid
    torch.utils.swap_tensors.
    """
    stamps = []
    for part in parts:
        version = version_of(part)
        if version is None:
            return None
        stamps.append((part.__dict__, weakref.ref(part.untyped_storage()), part.data_ptr(), version))
    return tuple(stamps)


def _holds(stamp: tuple | None, parts: Sequence[Tensor]) -> bool:
    """Return whether the tensors are in the state of a stamp."""
    if stamp is None:
        return False
    for (attributes, storage, address, version), part in zip(stamp, parts, strict=True):
        if attributes is not part.__dict__ or storage() is not part.untyped_storage():
            return False
        if address != part.data_ptr() or version != version_of(part):
            return False
    return True
