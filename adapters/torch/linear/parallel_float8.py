"""LayerNormLinear's call in FP8 over the ranks of a group.

With sequence parallelism the bytes of z and the scales of its rows are gathered, half of what 16 bits are. A scale is
of one row, so nothing is reduced, and y is that of one process. For the gradient of weight z comes by columns: its
scales depend on the norm's parameters alone, which all ranks have. What a scheme by tensors scales is z of all rows,
which is gathered as it is. The gradient of z is summed in the dtype of y. All else is of each rank's own weight and dy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..norm.functional import autocast_dtype
from . import symmetric
from .exchange import Exchange
from .float8_casts import STEP, cast_columns, cast_rows, normalised_columns, scale_of_tensor
from .float8_functional import _check_float8
from .float8_passes import Dtypes, Float8Options, Forward, Saved, _normalised, _Rounded
from .float8_products import product
from .float8_weights import WeightCache, Weights
from .functional import NO_MARGINS, check, margins_of_pass
from .parallel import TensorParallel
from .parallel_passes import Ranks, _of_all, exchange_of, reduced, takes_part
from .parameters import joined
from .passes import Sink, in_dtype_of, matrix, norm_gradients, normalise, without_autocast
from .recipes import Recipe


def norm_linear(
    function: str,
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    eps: float,
    operation: str,
    recipe: Recipe,
    cache: WeightCache,
    parallel: TensorParallel,
    *,
    is_first_microbatch: bool | None,
    fp8_output: bool,
    sink: Sink | None,
    sm_margins: tuple[int, int, int] = NO_MARGINS,
) -> tuple[Any, Tensor | None]:
    """As float8_functional.norm_linear, of the arguments of this rank; which z is returned `parallel` says."""
    parallel.ranks()  # RuntimeError where there is no group
    weight = joined(parts)
    tensors = (x, weight, bias, ln_weight, ln_bias)
    check(function, *tensors, operation)
    _check_float8(function, *tensors)
    parallel.check_rows(function, x)
    wanted = parallel.wanted(tensors)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if fp8_output and differentiated:
        raise ValueError(f"{function}: fp8_output=True needs a call without gradients. Use torch.no_grad().")
    margins = margins_of_pass(sm_margins, differentiated)
    options = Float8Options(operation, float(eps), autocast_dtype(x) or x.dtype, recipe.scheme, *margins)
    ranks = parallel.agreed(wanted, x, options.dtype)
    recorded = differentiated or ranks.sums or ranks.gathers
    trained = differentiated and weight.requires_grad
    with without_autocast(x.device.type):
        with torch.no_grad():
            weights = cache.of(parts, weight, options.scheme, ranks.sums, trained, is_first_microbatch)
            if not recorded:
                y, z, _, _ = forward(x, weights, bias, ln_weight, ln_bias, options, ranks)
        if recorded:
            anchor, sink = takes_part(tensors, differentiated, ranks, sink)
            return _NormLinear.apply(*tensors, anchor, weights, options, ranks, sink)
    if fp8_output:
        y8, scale, _, _ = cast_rows(y.view(-1, y.shape[-1]))
        return (y8.view(y.shape), scale.view(y.shape[:-1])), z
    return y, z


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ln_weight, ln_bias, anchor, weights, options, ranks, sink):
        found = forward(x, weights, bias, ln_weight, ln_bias, options, ranks)
        ctx.set_materialize_grads(False)
        columns = (weights.columns, weights.column_scale)
        ctx.save_for_backward(*Saved(x, *columns, ln_weight, ln_bias, found.statistics, found.z_scale))
        ctx.call = options, Dtypes(weight.dtype, None if bias is None else bias.dtype), len(weight), ranks, sink
        return found.y, found.z

    @staticmethod
    def backward(ctx, dy, dz):
        if torch.is_grad_enabled():
            raise RuntimeError("LayerNormLinear: in FP8 there are first derivatives alone; got create_graph=True.")
        saved = Saved(*ctx.saved_tensors)
        with without_autocast(saved.x.device.type):
            return *gradients(dy, dz, saved, *ctx.call[:4], ctx.needs_input_grad[:5], ctx.call[4]), *[None] * 5


def forward(
    x: Tensor,
    weights: Weights,
    bias: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor | None,
    options: Float8Options,
    ranks: Ranks,
) -> Forward:
    """y, the z that is returned, and what the backward pass reads."""
    cols, by_row, dtype = x.shape[-1], options.scheme.by_row, options.dtype
    z_of_all = None
    if by_row:
        z8, scale, z, statistics = _normalised(x, ln_weight, ln_bias, options, True, ranks.returned != "nothing")
        z8, scale = z8.reshape(-1, cols), scale.reshape(-1)
        if ranks.sequence:
            finish = gathered(z8.view(torch.uint8), ranks, ranks.overlap_gather)
            scale = gathered(scale[:, None], ranks, False)().view(-1)
            z8 = finish().view(z8.dtype)
            if ranks.gathers_returned:  # not through the buffer that z8 lies in
                z_of_all = gathered(matrix(z, len(scale) // ranks.size), ranks, False)()
    else:
        z, statistics = normalise(x, ln_weight, ln_bias, options.plain, True, options.sm_margin)
        whole = matrix(z, x.numel() // cols)
        if ranks.sequence:
            whole = gathered(whole, ranks, ranks.overlap_gather, keep=ranks.gathers_returned)()
            z_of_all = whole
        scale = scale_of_tensor(whole, power_2_scale=options.scheme.power_2[0], least=options.scheme.least[0])
        z8 = cast_rows(whole, scale=scale)[0]
    y = product(z8, scale, weights.rows, weights.row_scale, dtype, bias, fast=options.scheme.fast[0])
    shape = _of_all(x, ranks) if ranks.sequence else tuple(x.shape)
    if ranks.gathers_returned:
        z = z_of_all.view(shape)
    returned = z if ranks.returned != "nothing" else None
    return Forward(y.view(*shape[:-1], y.shape[-1]), returned, statistics, None if by_row else scale)


def gathered(own: Tensor, ranks: Ranks, overlaps: bool, keep: bool = False) -> Callable[[], Tensor]:
    """Begins to gather (rows, cols) of every rank; its result is (ranks rows, cols)."""
    overlaps = overlaps and symmetric.worth(ranks.size * own.numel() * own.element_size())
    exchange: Exchange = exchange_of(ranks, overlaps, own)
    gathering = exchange.gathering(*own.shape, own, own.dtype)
    gathering.own.copy_(own)
    gathering.start()
    return lambda: gathering.whole(keep)


def gradients(
    dy: Tensor | None,
    dreturned: Tensor | None,
    saved: Saved,
    options: Float8Options,
    dtypes: Dtypes,
    outs: int,
    ranks: Ranks,
    mask: tuple[bool, bool, bool, bool, bool],
    sink: Sink | None,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, ln_weight and ln_bias, None where not wanted."""
    wants_dx, wants_dweight, wants_dbias, *wants_ln = mask
    norm_mask = (wants_dx, *wants_ln)
    x, columns, column_scale, ln_weight, ln_bias, statistics, _ = saved
    rows = x.numel() // x.shape[-1]
    all_rows = rows * ranks.size if ranks.sequence else rows
    dy = x.new_zeros((all_rows, outs), dtype=options.dtype) if dy is None else matrix(dy, all_rows)
    sums = wants_dbias or (sink is not None and dtypes.bias is not None)
    high_precision = options.scheme.high_precision_wgrad
    wants_product = wants_dweight or sink is not None
    rounded = _RoundedOverRanks(dy, saved, options, dtypes, wants_product, sums, high_precision, ranks)
    if (wants_product or ranks.gathers) and not (ranks.delayed and sink is not None):
        rounded.begin()
    before = dreturned if ranks.gathers_returned else None  # the sum over the ranks
    total = None
    if any(norm_mask) or ranks.sums:
        fast = options.scheme.fast[1]
        terms = product(rounded.rows, rounded.scale, columns, column_scale, options.dtype, fast=fast)
        if before is not None:
            terms = terms.add_(matrix(before, all_rows))
        total = reduced(terms, rows, ranks)
        del terms
    rounded.turn()
    if sink is not None:
        dweight, dbias = sink(rounded)
    else:
        dweight = rounded.weight() if wants_dweight else None
        dbias = rounded.bias() if wants_dbias else None
        if ranks.gathers and not wants_dweight:
            rounded.end()
    del rounded
    if total is None:
        return None, dweight, dbias, None, None
    dz = total()
    if not any(norm_mask):
        return None, dweight, dbias, None, None
    if dreturned is not None and before is None:
        dz = dz.add_(matrix(dreturned, rows))
    dz = dz.view(x.shape)
    dx, dln_weight, dln_bias = norm_gradients(dz, True, x, statistics, ln_weight, options.plain, norm_mask)
    return dx, dweight, dbias, dln_weight, in_dtype_of(ln_bias, dln_bias)


class _RoundedOverRanks(_Rounded):
    """z of all rows is gathered when it is asked for, or earlier by `begin`."""

    def __init__(self, dy: Tensor, saved: Saved, options: Float8Options, dtypes: Dtypes, *others: Any):
        super().__init__(dy, saved, options, dtypes, *others[:-1])
        self._ranks: Ranks = others[-1]
        self._begun: Callable[[], Any] | None = None

    def begin(self) -> None:
        scheme = self._options.scheme
        by_columns = scheme.by_row and not scheme.high_precision_wgrad
        self._begun = self._columns_of_all() if by_columns else self._rows_of_all()

    def end(self) -> None:
        """What was begun for other ranks alone."""
        if self._begun is not None:
            self._begun()

    def _rows_of_all(self) -> Callable[[], Tensor]:
        x, _, _, ln_weight, ln_bias, _, _ = self._saved
        options = self._options.plain
        z, _ = normalise(x, ln_weight, ln_bias, options, False, options.backward_sm_margin)
        own = matrix(z, x.numel() // x.shape[-1])
        return gathered(own, self._ranks, self._ranks.bulk_gather) if self._ranks.sequence else lambda: own

    def _columns_of_all(self) -> Callable[[], tuple[Tensor, Tensor]]:
        x, _, _, ln_weight, ln_bias, statistics, _ = self._saved
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        operation, power_2 = self._options.operation, self._options.scheme.power_2[0]
        statistics = statistics.reshape(len(statistics), rows)
        own, scale = normalised_columns(
            matrix(x, rows), statistics, ln_weight, ln_bias, operation, power_2_scale=power_2
        )
        if not self._ranks.sequence:
            return lambda: (own, scale)
        finish = gathered(own.view(torch.uint8), self._ranks, self._ranks.bulk_gather)

        def result() -> tuple[Tensor, Tensor]:
            """Columns of all ranks side by side, without the zeros at the end of each, with zeros at the end."""
            found = finish().view(self._ranks.size, cols, -1)[:, :, :rows].transpose(0, 1).reshape(cols, -1)
            return F.pad(found, (0, -found.shape[1] % STEP)).view(own.dtype), scale

        return result

    @cached_property
    def _z(self) -> Tensor:
        return (self._begun or self._rows_of_all())()

    @cached_property
    def _z_columns(self) -> tuple[Tensor, Tensor]:
        if not self._options.scheme.by_row:
            return cast_columns(self._z, None, scale=self._saved.z_scale)
        return (self._begun or self._columns_of_all())()
