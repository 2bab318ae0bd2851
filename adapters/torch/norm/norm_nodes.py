"""Operations as nodes.py describes passes: from the recipes that Python's own calls follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...call.recipe import scalars_of
from . import calls, launching, nodes
from .launching import Saved

Gradients = Callable[..., Sequence[Tensor | None]]
Plain = Callable[[Tensor], bool]  # whether nothing listens that a launch for this gradient would bypass


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
    """A pass of such tensors; None where Python alone serves them. `gradients(family, saved, eps, dy, ds, mask)` are
    those of the tensors. `saved`: the names of what is kept, by default of what a backward pass reads. `in_place`: dx
    may take the memory of dy.
    """
    if recipe.plan is None or recipe.copies or any(tensor.data_ptr() % 16 for tensor in tensors):
        return None
    family = recipe.family
    call = family.call
    returns = call.operation.returns
    names = call.saved(call.wanted(tuple(one.requires_grad for one in tensors))) if saved is None else saved
    by_name = dict(zip(call.numbers, numbers, strict=True))

    # What is described outlives the call, and must not keep tensors.
    def backward(which: Any, given: Sequence[Any], statistics: Tensor, kept: Sequence[Tensor], bits: int) -> Any:
        found = dict(zip(returns, given, strict=True))
        dy, ds = found.get("y"), found.get("s")
        mask = tuple(bool(bits >> place & 1) for place in range(len(call.names)))
        of = Saved(names, kept, numbers, statistics)
        if all(one is None or plain(one) for one in given) and add(which, dy, ds, of, bits, mask):
            return None
        return gradients(family, of, eps, dy, ds, mask)

    def add(which: Any, dy: Any, ds: Any, kept: Saved, bits: int, mask: tuple[bool, ...]) -> bool:
        wanted = call.wanted(mask)
        through = calls.given_through(family, wanted, dy)
        computed = tuple(name for name in wanted if name not in through)
        if not computed:
            return False
        of = launching.backward_recipe_of(family, kept, dy, ds, computed)
        if of.plan is None or of.copies or of.sums or of.zeros is not None:
            return False
        into_dy = in_place and launching.takes_dx(dy, of)
        results = {name: one for name, one in zip(of.written, of.gradients, strict=True) if not into_dy or name != "dx"}
        written = tuple(results)
        places = [-1] * len(call.names)
        for name, place in zip(computed, of.places, strict=True):
            into = of.written[place]
            places[call.names.index(name)] = written.index(into) if into in results else -2 - returns.index("y")
        for name in through:
            places[call.names.index(name)] = -2 - returns.index("y")
        scalars = dict(zip(of.plan.problem.scalars, scalars_of(of.plan, by_name), strict=True))
        given = {f"d{name}": {"y": dy, "s": ds}[name] for name in returns}
        tensors = dict(zip(names, kept.tensors, strict=True))
        work = (results, of.rstd_offset, scalars, places, into_dy)
        return nodes.add_backward(which, of.plan, given, kept.statistics, tensors, bits, *work)

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
