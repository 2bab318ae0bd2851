"""A norm with its product as norm/nodes.py describes passes: by the recipes that Python's own call follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..norm import launching, nodes, norm_nodes
from ..norm.functional import launchable
from .ranks import ALONE
from .step import Saved, Step, gradients, norm_gradients


def of_norm_linear(
    step: Step,
    recipe: launching.Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
) -> nodes.Call | None:
    """What serves calls of the five tensors; None where Python alone does. `recipe` is the norm's."""
    if step.sm_margin != step.backward_sm_margin:  # z is computed again by the same launch
        return None
    bias_dtype = None if ln_bias is None else ln_bias.dtype
    norm = launching.Call(recipe, step.eps, True, step.backward_sm_margin, bias_dtype)

    def of_norm(call: launching.Call, dz: Tensor, x: Tensor, statistics: Tensor, ln_weight: Tensor | None, mask: Any):
        saved = Saved(statistics, x, None, ln_weight, None)
        dx, dweight, dbias = norm_gradients(dz, True, saved, step, mask)
        return dx, dweight, dbias if dbias is None else dbias.to(call.bias_dtype)

    which = norm_nodes.of_norm(norm, x, ln_weight, ln_bias, of_norm, launchable, in_place=True)
    if which is None:
        return None
    dy = x.new_empty(x.numel() // x.shape[-1], len(weight))
    sums = None if bias is None else launching.column_sums_recipe(dy)
    if sums is not None and sums.plan is None:
        return None
    there = (True, True, bias is not None, ln_weight is not None, ln_bias is not None)

    def backward(
        given: Sequence[Tensor | None], statistics: Tensor, saved: Sequence[Tensor], bits: int
    ) -> list[Tensor | None]:
        (dy, dz), left, wanted = given, list(saved), iter(range(sum(there)))
        x, weight = left.pop(0), left.pop(0)
        ln_weight = left.pop(0) if there[3] else None
        ln_bias = left.pop(0) if there[4] else None
        z = left.pop(0) if step.keep_normalized else None
        mask = tuple(one and bool(bits >> next(wanted) & 1) for one in there)
        found = gradients(dy, dz, Saved(statistics, x, weight, ln_weight, ln_bias, z), step, ALONE, mask)
        return [gradient for gradient, one in zip(found, there, strict=True) if one]

    others = [one for one in (ln_weight, ln_bias) if one is not None]
    of_bias = None if sums is None else (sums.plan, sums.second)
    return nodes.linear_call(which, x, others, dy, of_bias, step.keep_normalized, backward)
