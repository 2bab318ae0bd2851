"""A mistake that is put into the kernels, and what must find it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    reason: str
    old: str
    new: str
    case: str
    # (build, what its error says). A mistake that leaves its array is for `memory` only: others may crash or pass.
    caught: tuple[tuple[str, str], ...]
