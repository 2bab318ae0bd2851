"""What a mistake that is put into the kernels is told by."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    reason: str
    old: str
    new: str
    case: str
    # (build, what is said). Of a mistake that leaves its array `memory` alone: others may end or pass.
    caught: tuple[tuple[str, str], ...]
