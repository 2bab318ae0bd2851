"""weight in 8 bits, as the forward product reads it and as the backward one does: one object, kept where it may be."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private import version_of
from .float8_casts import cast_columns, cast_rows, scale_of_tensor
from .recipes import Scheme
from .step import Weights


def quantised(weight: Tensor, scheme: Scheme, wants_columns: bool) -> Weights:
    """From the parameter's own dtype, each layout by one rounding."""
    by_row, power_2, least = scheme.of_weight
    scale = None if by_row else scale_of_tensor(weight, power_2_scale=power_2, least=least)
    wants_amax = by_row and wants_columns
    options: dict[str, Any] = {"scale": scale, "power_2_scale": power_2, "right": True}
    rows, row_scale, _, amax = cast_rows(weight, column_amax=wants_amax, **options)
    columns = cast_columns(weight, amax, **options) if wants_columns else (None, None)
    return Weights(rows, row_scale, *columns)


class _Kept(NamedTuple):
    weights: Weights
    of_weight: tuple  # what the bytes depend on besides the parameters
    stamp: tuple | None  # what the parameters were, where that can be known


class WeightCache:
    """The bytes of a module's weight between calls, replaced as a whole.

    `trains`: an optimizer may change weight, of which its version need not tell: torch's fused ones leave it as it was,
    as do those of other libraries, and FSDP when it gathers weight anew. A call differentiated by weight sets it.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self._kept: _Kept | None = None
        self._captured: list[Weights] = []  # read by CUDA graphs, which may run as long as the module is there

    def clear(self) -> None:
        self._kept = None

    def of(
        self,
        parts: Sequence[Tensor],
        is_first_microbatch: bool | None,
        whole: Tensor,
        scheme: Scheme,
        wants_columns: bool,
        trained: bool,
    ) -> Weights:
        """Those of `whole`, the parameters `parts` one after the other; kept or found as `is_first_microbatch` says.

        None keeps and finds them as long as the parameters are the same tensors in the same memory with the same
        version, but not those of a weight that an optimizer may change (`trained`: this call is differentiated by
        weight), nor while a CUDA graph is captured: it would go on reading what may be replaced.
        """
        self.trains = self.trains or trained
        capturing = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_first_microbatch is None and (capturing or (self.trains and any(part.requires_grad for part in parts))):
            return quantised(whole, scheme, wants_columns)
        if is_first_microbatch is not True and self._serves(scheme, wants_columns):
            weights, _, stamp = self._kept
            if is_first_microbatch is False or _holds(stamp, parts):
                if capturing and not any(weights is one for one in self._captured):
                    self._captured.append(weights)
                return weights
        found, stamp = quantised(whole, scheme, wants_columns), _stamp(parts)
        if is_first_microbatch is not None or stamp is not None:
            self._kept = _Kept(found, scheme.of_weight, stamp)
        return found

    def _serves(self, scheme: Scheme, wants_columns: bool) -> bool:
        if self._kept is None or self._kept.of_weight != scheme.of_weight:
            return False
        columns = self._kept.weights.columns
        # What was made in inference mode cannot be saved for a backward pass.
        return not wants_columns or (columns is not None and not columns.is_inference())


def _stamp(parts: Sequence[Tensor]) -> tuple | None:
    """What tells a tensor from others and from what it was before.

    `part.data = other` changes nothing of it but its storage, and other memory may come to lie at the same address. Its
    attributes stand for the tensor: a weak reference to it would forbid torch.utils.swap_tensors.
    """
    stamps = []
    for part in parts:
        version = version_of(part)
        if version is None:
            return None
        stamps.append((part.__dict__, weakref.ref(part.untyped_storage()), part.data_ptr(), version))
    return tuple(stamps)


def _holds(stamp: tuple | None, parts: Sequence[Tensor]) -> bool:
    if stamp is None:
        return False
    for (attributes, storage, address, version), part in zip(stamp, parts, strict=True):
        if attributes is not part.__dict__ or storage() is not part.untyped_storage():
            return False
        if address != part.data_ptr() or version != version_of(part):
            return False
    return True
