"""What calls with equal arguments have in common, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

LIMIT = 4096  # recipes that are kept at most

Recipe = TypeVar("Recipe")


class Recipes(Generic[Recipe]):
    """Recipes by keys: layouts and options, all that a recipe is made of.

    `kept(key)` is the recipe that is kept, or None; a key that has no hash raises TypeError or ValueError.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Recipe] = {}
        self.kept = self._kept.get

    def of(self, key: Hashable, make: Callable[..., Recipe], *arguments: object) -> Recipe:
        """The recipe that is kept, or `make(*arguments)`: always where the key has no hash, as with a list in it."""
        try:
            recipe = self._kept.get(key)
        except (TypeError, ValueError):
            return make(*arguments)
        if recipe is None:
            if len(self._kept) >= LIMIT:
                self._kept.clear()
            recipe = self._kept[key] = make(*arguments)
        return recipe
