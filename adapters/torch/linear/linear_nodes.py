"""A norm with its product as norm/nodes.py describes passes: by the recipes that Python's own call follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..norm import dispatch, launching, nodes, norm_nodes
from ..norm.functional import given
from .ranks import ALONE
from .step import Saved, Step, gradients, norm_gradients


def of_norm_linear(
    step: Step,
    recipe: launching.Forward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
) -> nodes.Call | None:
    """What serves calls of the five tensors; None where Python alone does. `recipe` is the norm's."""
    if step.sm_margin != step.backward_sm_margin:  # z is computed again by the same launch
        return None
    of_bias = None if ln_bias is None else ln_bias.dtype
    tensors = given(x, ln_weight, ln_bias)

    def of_norm(family: Any, kept: Any, eps: float, dz: Tensor, _: None, mask: Any) -> list[Tensor | None]:
        names, of_name = family.call.names, dict(zip(kept.names, kept.tensors, strict=True))
        wants = dict(zip(names, mask, strict=True))
        every = tuple(wants.get(name, False) for name in ("x", "weight", "bias"))
        read = Saved(kept.statistics, of_name["x"], None, of_name.get("weight"), None)
        dx, dweight, dbias = norm_gradients(dz, True, read, step, every)
        found = {"x": dx, "weight": dweight, "bias": dbias if dbias is None else dbias.to(of_bias)}
        return [found[name] for name in names]

    saved = ("x",) if ln_weight is None else ("x", "weight")
    which = norm_nodes.describe(recipe, tensors, (), step.eps, of_norm, dispatch.launchable, saved=saved, in_place=True)
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
    of_sums = None if sums is None else (sums.plan, sums.gradients[0])
    return nodes.linear_call(which, x, others, dy, of_sums, step.keep_normalized, backward)
