"""Norms and fused operations as nodes.py describes passes: from the recipes that Python's own calls follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...call.recipe import scalars_of
from . import fused_launching, launching, nodes

Gradients = Callable[..., Sequence[Tensor | None]]
Plain = Callable[[Tensor], bool]  # whether nothing listens that a launch for this gradient would bypass


def of_norm(
    call: launching.Call,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gradients: Gradients,
    plain: Plain,
    in_place: bool = False,
) -> Any:
    """A pass of (x, weight, bias); None where Python alone serves them. `gradients(call, dy, x, statistics, weight,
    mask)` are those of the three. `in_place`: dx may take the memory of dy.
    """
    recipe = call.recipe
    if recipe.plan is None or recipe.copied or not recipe.aligned:
        return None
    given = {"x": x, "weight": weight, "bias": bias}
    tensors = {name: one for name, one in given.items() if one is not None}
    # What is described outlives the call, and must not keep tensors.
    every, names = tuple(given), tuple(tensors)
    saved_names = tuple(name for name in ("x", "weight") if name in names)

    def backward(which: Any, given: Sequence[Tensor], statistics: Tensor, saved: Sequence[Tensor], bits: int) -> Any:
        (dy,), by_name = given, dict(zip(saved_names, saved, strict=True))
        wanted = _wanted(names, bits)
        mask = ("x" in wanted, "weight" in wanted, "bias" in wanted)
        if plain(dy) and describe(which, dy, statistics, by_name, wanted, mask, bits):
            return None
        found = gradients(call, dy, by_name["x"], statistics, by_name.get("weight"), mask)
        return [one for name, one in zip(every, found, strict=True) if name in names]

    def describe(which, dy, statistics, saved, wanted, mask, bits) -> bool:
        x, weight, margin = saved["x"], saved.get("weight"), call.backward_margin
        of = launching.backward_recipe_of(recipe.family, mask, margin, dy, x, weight, None)
        *_, dtype = of.second
        if of.copied or not of.aligned or (mask[2] and dtype is not call.bias_dtype):
            return False
        into_dy = in_place and mask[0] and launching.takes_dx(dy, of.plan, of.first)
        written = wanted[1:] if into_dy else wanted  # x is the first
        results = {f"d{name}": of.first if name == "x" else of.second for name in written}
        places = _places(names, written)
        if into_dy:
            places[0] = -2
        work = (results, of.rstd_offset, {}, places, into_dy)
        return nodes.add_backward(which, of.plan, {"dy": dy}, statistics, saved, bits, *work)

    numbers = dict.fromkeys(recipe.plan.problem.scalars, call.eps)
    results = {"y": recipe.first}
    offset = recipe.rstd_offset
    return nodes.forward_pass(recipe.plan, tensors, results, recipe.second, offset, numbers, saved_names, backward)


def of_fused(
    call: fused_launching.Call,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    gradients: Gradients,
    plain: Plain,
) -> Any:
    """A pass of such tensors; None where Python alone serves them. `gradients(family, names, saved, numbers, eps,
    dy, ds, statistics, mask)` are those of the tensors.
    """
    margin, _, inference_margin = call.sm_margins
    pointers = [tensor.data_ptr() for tensor in tensors]
    recipe = fused_launching.recipe_of(call, tensors, pointers, margin)
    if recipe.plan is None or recipe.copies or margin != inference_margin or any(one % 16 for one in pointers):
        return None
    family, returns = recipe.family, call.operation.returns
    names = call.saved(call.wanted(tuple(one.requires_grad for one in tensors)))
    by_name = dict(zip(call.numbers, numbers, strict=True))

    def backward(which: Any, given: Sequence[Any], statistics: Tensor, saved: Sequence[Tensor], bits: int) -> Any:
        found = dict(zip(returns, given, strict=True))
        dy, ds = found.get("y"), found.get("s")
        mask = tuple(bool(bits >> place & 1) for place in range(len(call.names)))
        if all(one is None or plain(one) for one in given) and describe(which, dy, ds, statistics, saved, bits):
            return None
        return gradients(family, names, saved, numbers, eps, dy, ds, statistics, mask)

    def describe(which, dy, ds, statistics, saved, bits) -> bool:
        wanted = _wanted(call.names, bits)
        through = fused_launching.given_through(family, wanted, dy)
        computed = tuple(name for name in wanted if name not in through)
        if not computed:
            return False
        read = (dy, ds, *saved)
        pointers = [0 if one is None else one.data_ptr() for one in read]
        of = fused_launching.backward_recipe_of(family, names, read, pointers, statistics, computed)
        if of.plan is None or of.copies or of.sums or of.zeros is not None:
            return False
        places = [-1] * len(call.names)
        for name, place in zip(computed, of.places, strict=True):
            places[call.names.index(name)] = place
        for name in through:
            places[call.names.index(name)] = -2 - returns.index("y")
        scalars = dict(zip(of.plan.problem.scalars, scalars_of(of.plan, by_name), strict=True))
        given = {f"d{name}": {"y": dy, "s": ds}[name] for name in returns}
        results = dict(zip(of.written, of.gradients, strict=True))
        saved = dict(zip(names, saved, strict=True))
        work = (results, of.rstd_offset, scalars, places)
        return nodes.add_backward(which, of.plan, given, statistics, saved, bits, *work)

    scalars = dict(zip(recipe.plan.problem.scalars, scalars_of(recipe.plan, by_name | {"eps": eps}), strict=True))
    return nodes.forward_pass(
        recipe.plan,
        dict(zip(call.names, tensors, strict=True)),
        dict(zip(returns, recipe.results, strict=True)),
        recipe.statistics,
        recipe.rstd_offset,
        scalars,
        names,
        backward,
    )


def _wanted(names: tuple[str, ...], bits: int) -> tuple[str, ...]:
    return tuple(name for place, name in enumerate(names) if bits >> place & 1)


def _places(names: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
    return [wanted.index(name) if name in wanted else -1 for name in names]
