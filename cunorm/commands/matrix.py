"""The problems that together make the plan choose every kind of kernel that it has: what `compile --all` compiles.

They are made from the plan's own tables, so a new tier is covered without a change here. All combinations would be
millions; an orthogonal array holds every pair of values of any two factors for each tier in 49 rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

from .. import plan as plans
from ..device import Device
from ..plan import KernelSpec, Tier, plan
from ..problem import ITEMSIZE, Problem

TABLES = {"forward": plans.FORWARD, "backward": plans.BACKWARD}
OPS = ("layer_norm", "rms_norm")
LEVELS = 7  # a prime, and no factor has more values
ROWS = 16384  # kernels do not depend on it

DTYPES = tuple(ITEMSIZE)
PARAMETERS = (*DTYPES, None)
MASKS = tuple(mask for mask in product((True, False), repeat=3) if any(mask))


def specs(device: Device) -> list[KernelSpec]:
    """Every kernel of the covering set, once."""
    return kernels_of(covering(device), device)


def kernels_of(problems: list[Problem], device: Device) -> list[KernelSpec]:
    """Every kernel that the plans of these problems launch, once."""
    return list(dict.fromkeys(step.spec for problem in problems for step in plan(problem, device).steps))


def covering(device: Device) -> list[Problem]:
    """For every tier: whole problems of each dtype, and every pair of length, dtypes and flags."""
    problems = []
    for direction, table in TABLES.items():
        lengths = {dtype: lengths_of_tiers(table, ITEMSIZE[dtype], device) for dtype in DTYPES}
        for tier in lengths["float16"]:
            longest = {dtype: lengths[dtype][tier][-1] for dtype in DTYPES}
            problems += [
                Problem.whole(op, direction, ROWS, longest[dtype], dtype, dtype) for op in OPS for dtype in DTYPES
            ]
            for levels in orthogonal_array():
                problems.append(_mixed(direction, {dtype: lengths[dtype][tier] for dtype in DTYPES}, levels))
    return problems


def lengths_of_tiers(table: tuple[Tier, ...], itemsize: int, device: Device) -> dict[Tier | None, list[int]]:
    """Up to seven row lengths that each tier takes on a device: its shortest, its longest, odd ones and whole packs.

    None stands for rows that are streamed.
    """
    pack = 16 // itemsize
    steps = {2**power * quarters // 4 for power in range(18) for quarters in (4, 5, 6, 7)}
    packs = steps.union(*((tier.most, tier.most + 1) for tier in table))
    lengths = {length for n in packs for length in ((n - 1) * pack + 1, n * pack - 1, n * pack) if length > 0}
    taken = defaultdict(list)
    for length in sorted(lengths):
        choice = plans._choose(table, length, itemsize, device)
        taken[choice and choice[0]].append(length)
    return {tier: _spread(found) for tier, found in taken.items()}


def _spread(lengths: list[int]) -> list[int]:
    last = len(lengths) - 1
    return [lengths[index] for index in sorted({last * level // (LEVELS - 1) for level in range(LEVELS)})]


def orthogonal_array() -> list[tuple[int, ...]]:
    """49 rows of eight levels, 0 to 6: any two columns hold every pair of levels once (Bose, 1938)."""
    return [
        (j, *((i + factor * j) % LEVELS for factor in range(LEVELS))) for i, j in product(range(LEVELS), repeat=2)
    ]


def _mixed(direction: str, lengths: dict[str, list[int]], levels: tuple[int, ...]) -> Problem:
    def pick(factor: int, values):
        return values[levels[factor] % len(values)]

    x = pick(0, DTYPES)
    cols = pick(1, lengths[x])
    weight = pick(2, PARAMETERS)
    mask = pick(3, MASKS)
    bias = pick(4, PARAMETERS)
    rms = pick(5, (False, True))
    aligned, zero_centered = pick(6, (True, False)), pick(7, (False, True))
    forward = direction == "forward"
    whole = Problem.whole(OPS[rms], direction, ROWS, cols, x, x)
    return replace(
        whole,
        y=pick(4 if not forward else 3, DTYPES),
        weight=weight,
        bias=bias if forward and not rms else None,
        zero_centered_gamma=zero_centered and weight is not None,
        aligned=aligned,
        output_mask=whole.output_mask if forward else _mask(mask, rms),
    )


def _mask(mask: tuple[bool, bool, bool], rms: bool) -> tuple[bool, bool, bool]:
    """rms_norm has no dbias; where that alone was wanted, dx is."""
    dx, dweight, dbias = mask
    return (dx or not dweight, dweight, False) if rms else (dx, dweight, dbias)
