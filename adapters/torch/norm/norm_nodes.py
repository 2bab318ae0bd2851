"""Describe operations to nodes.py, from the recipes that Python's own calls follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...call.recipe import scalars_of
from ...plan.steps import Plan
from . import calls, launching, nodes
from .launching import Saved

Gradients = Callable[..., Sequence[Tensor | None]]
Plain = Callable[[Tensor], bool]  # says whether a backward pass for this gradient can be launched directly


def describe(
    recipe: launching.Forward,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    eps: float,
    gradients: Gradients,
    plain: Plain,
    *,
    saved: tuple[str, ...] | None = None,
    in_place: bool = False,
) -> Any:
    """Return a pass for tensors like these; None if Python alone serves them.

    `gradients(family, saved, eps, dy, ds, mask)` returns the gradients of the tensors, as dispatch.gradients_of does.
    `saved` are the names of what is saved, by default of what a backward pass reads. With `in_place` dx may take the
    memory of dy.
    """
    if recipe.plan is None or recipe.copies or any(tensor.data_ptr() % 16 for tensor in tensors):
        return None
    family = recipe.family
    call = family.call
    returns = call.operation.returns
    names = call.saved(call.wanted(tuple(tensor.requires_grad for tensor in tensors))) if saved is None else saved
    by_name = dict(zip(call.numbers, numbers, strict=True))

    # The description outlives the call: these functions must not hold its tensors.
    def backward(
        norm_pass: Any, incoming: Sequence[Any], statistics: Tensor, tensors: Sequence[Tensor], bits: int
    ) -> Any:
        incoming_by_name = dict(zip(returns, incoming, strict=True))
        dy, ds = incoming_by_name.get("y"), incoming_by_name.get("s")
        mask = tuple(bool(bits >> place & 1) for place in range(len(call.names)))
        saved_tensors = Saved(names, tensors, numbers, statistics)
        are_plain = all(gradient is None or plain(gradient) for gradient in incoming)
        if are_plain and add(norm_pass, dy, ds, saved_tensors, bits, mask):
            return None
        return gradients(family, saved_tensors, eps, dy, ds, mask)

    def add(norm_pass: Any, dy: Any, ds: Any, saved_tensors: Saved, bits: int, mask: tuple[bool, ...]) -> bool:
        wanted = call.wanted(mask)
        through = calls.given_through(family, wanted, dy)
        computed = tuple(name for name in wanted if name not in through)
        if not computed:
            return False
        recipe = launching.backward_recipe_of(family, saved_tensors, dy, ds, computed)
        if recipe.plan is None or recipe.copies or recipe.sums or recipe.zeros is not None:
            return False
        into_dy = in_place and launching.takes_dx(dy, recipe)
        results = dict(zip(recipe.written, recipe.gradients, strict=True))
        if into_dy:
            del results["dx"]
        written = tuple(results)
        places = [-1] * len(call.names)
        for name, place in zip(computed, recipe.places, strict=True):
            into = recipe.written[place]
            places[call.names.index(name)] = written.index(into) if into in results else -2 - returns.index("y")
        for name in through:
            places[call.names.index(name)] = -2 - returns.index("y")
        incoming = {f"d{name}": {"y": dy, "s": ds}[name] for name in returns}
        tensors = dict(zip(names, saved_tensors.tensors, strict=True))
        work = nodes.Work(recipe.plan, results, recipe.rstd_offset, scalars(recipe.plan, by_name))
        return nodes.add_backward(norm_pass, work, incoming, saved_tensors.statistics, tensors, bits, places, into_dy)

    def scalars(plan: Plan, numbers_by_name: dict[str, float]) -> dict[str, float]:
        return dict(zip(plan.problem.scalars, scalars_of(plan, numbers_by_name), strict=True))

    results = dict(zip(returns, recipe.results, strict=True))
    work = nodes.Work(recipe.plan, results, recipe.rstd_offset, scalars(recipe.plan, by_name | {"eps": eps}))
    named_tensors = dict(zip(call.names, tensors, strict=True))
    return nodes.forward_pass(work, named_tensors, recipe.statistics, names, backward)
