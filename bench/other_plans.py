"""Other kernels for the rows of a plan, for a search: so many threads and packs of a row, CTAs of a cluster and of an
SM, places for rows, and how rows wait. Pure functions; no GPU library is imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from unittest import mock

from cunorm.kernel.device import CLUSTER_SIZES, Device
from cunorm.plan import backward_plan
from cunorm.plan import plan as norm_plan
from cunorm.plan.choose import choose
from cunorm.plan.problem import Problem
from cunorm.plan.registers import registers_of
from cunorm.plan.shapes import ceil_div, in_clusters, shape_of
from cunorm.plan.shared_memory import dynamic_shared, shared_memory
from cunorm.plan.short_forward import short_forward
from cunorm.plan.spec import WARP, NormSpec, RowShape
from cunorm.plan.steps import Plan

MOST_PACKS = 8
MOST_CTAS = 10  # of an SM
MOST_THREADS = {"forward": 1024, "backward": 512}  # of a CTA
LEAST_REGISTERS = {"forward": 32, "backward": 64}  # of a thread
FEW_ROWS = 8  # to an SM: of so many a row may have more threads than those that decide its bits
# Bytes that an SM reads for a turn of rows that are not so few: on an H100 the fastest of 222 cases read 12 to 72 KB
# forward and 16 to 50 backward.
TURN_BYTES = {"forward": range(12 << 10, 80 << 10), "backward": range(12 << 10, 64 << 10)}
# What makes two kernels of a row different, for the distance between them.
CHOICES = ("kernel", "held", "order", "cluster", "rows_per_cta", "ctas_per_sm", "stages", "rows_stay", "ask_early")
CHOICES += ("columns_stay", "streamed_x")


def other_kernels(problem: Problem, device: Device, most: int, *, same_bits: bool = False) -> list[NormSpec]:
    """Up to so many, those with the fewest differences from the plan's own first, beyond that drawn by a fixed seed.

    `same_bits`: those alone that add a row up in the order in which the plan's kernel does.
    """
    choice = choose(problem, device)
    if choice is None:
        return []
    (tier, own), found = choice, {}
    few, direction = problem.rows <= FEW_ROWS * device.sms, problem.direction
    for shape in _spread_over_clusters(own.shape, device) if same_bits else _shapes(problem, own.shape, device):
        of_shape = (one for one in _kernels(problem, own, shape) if few or _turn_bytes(one) in TURN_BYTES[direction])
        if tier.by is short_forward and few:
            of_shape = chain(of_shape, _spread(own, shape))
        for one in of_shape:
            ctas = one.ctas_per_sm
            needed = shared_memory(one) + dynamic_shared(one) + 1024
            if ctas * needed <= device.shared + 1024 and one != own:
                found[one] = sum(_choices(one)[name] != _choices(own)[name] for name in CHOICES)
    kernels = list(found)
    random.Random(0).shuffle(kernels)
    return sorted(kernels, key=found.__getitem__)[:most]


def plan_by(problem: Problem, spec: NormSpec, device: Device) -> Plan:
    """The plan of the problem if this were the kernel of its rows, and they were not few."""
    choice = choose(problem, device)
    if choice is None:
        raise ValueError(f"bench: rows of {problem.cols} columns are streamed: no kernel holds them.")
    with (
        mock.patch.object(norm_plan, "choose", return_value=(choice[0], spec)),
        mock.patch.object(backward_plan, "choose", return_value=(choice[0], spec)),
        mock.patch.object(backward_plan, "by_turns", lambda _, spec, __: spec),
        mock.patch.object(backward_plan, "adds_columns_beside_rows", return_value=False),
    ):
        return norm_plan.plan.__wrapped__(problem, device)


def _turn_bytes(spec: NormSpec) -> int:
    """Of the rows that an SM has at once, in every matrix that is read."""
    shape = spec.shape
    of_rows = shape.threads * shape.packs * shape.pack * spec.rows_per_cta * spec.ctas_per_sm
    return of_rows * sum(one.itemsize for one in spec.matrices)


def _choices(spec: NormSpec) -> dict[str, object]:
    return {name: spec.shape.order if name == "order" else getattr(spec, name) for name in CHOICES}


def _spread_over_clusters(own: RowShape, device: Device) -> list[RowShape]:
    """The same threads of a row in one CTA and in clusters of each size, of whole warps there."""
    threads = own.threads * own.cluster
    sizes = filter(device.runs_clusters, (1, *CLUSTER_SIZES))
    return [in_clusters(own, n) for n in sizes if n == 1 or threads % (n * WARP) == 0]


def _shapes(problem: Problem, own: RowShape, device: Device) -> list[RowShape]:
    packs = ceil_div(problem.cols, own.pack)
    others = (
        shape_of(own.pack, ceil_div(packs, size), held, size)
        for size, held in product(filter(device.runs_clusters, (1, *CLUSTER_SIZES)), range(1, MOST_PACKS + 1))
    )
    return list(dict.fromkeys((*_spread_over_clusters(own, device), *others)))


def _kernels(problem: Problem, own: NormSpec, shape: RowShape) -> Iterator[NormSpec]:
    direction = problem.direction
    forward = direction == "forward"
    rows_of_cta = [1] if shape.cluster > 1 or forward else [1, 2, 3]
    if shape.cluster == 1 and shape.threads <= WARP:  # whole warps
        rows_of_cta = [warps * WARP // shape.threads for warps in (1, 2, 4, 6, 8)]
    ways = _forward_ways(own, shape) if forward else _backward_ways(own)
    for rows, ctas, changes in product(rows_of_cta, range(1, MOST_CTAS + 1), ways):
        threads = rows * shape.threads
        registers = registers_of(threads * ctas) if threads * ctas <= 2048 else 0
        if threads <= MOST_THREADS[direction] and registers >= LEAST_REGISTERS[direction]:
            of_rows = {"shape": shape, "rows_per_cta": rows, "ctas_per_sm": ctas}
            yield replace(own, kernel=direction, held=1, **of_rows, **changes)


def _spread(own: NormSpec, shape: RowShape) -> Iterator[NormSpec]:
    """A row's threads so many times that each holds a few of its packs."""
    least = 1 if shape.threads >= WARP else 2  # threads to spare are not for the packs of a row undivided
    packs_held = sorted({ceil_div(shape.packs, parts) for parts in range(least, shape.packs + 1)})
    for held, ctas in product(packs_held, range(1, MOST_CTAS + 1)):
        of_rows = {"shape": shape, "rows_per_cta": 1, "ctas_per_sm": ctas, "held": held}
        ways = {"stages": 0, "rows_stay": False, "ask_early": False, "columns_stay": True}
        one = replace(own, kernel="forward_spread", **of_rows, **ways)
        if one.threads <= MOST_THREADS["forward"] and one.threads * ctas <= 2048:
            yield one


def _forward_ways(own: NormSpec, shape: RowShape) -> list[dict[str, object]]:
    """How rows wait: in registers, in a ring, or in one place from which a thread takes them into registers."""
    both = (False, True)
    early = both if shape.cluster > 1 or shape.threads > WARP else (True,)  # late a warp would have nothing under way
    registers = [
        {"stages": 0, "rows_stay": False, "ask_early": False, "columns_stay": stay, "streamed_x": x}
        for stay, x in product(both, both)
    ]
    rings = [
        {"stages": stages, "rows_stay": False, "ask_early": asked, "columns_stay": stay}
        for stages, asked, stay in product((2, 3), early, both)
    ]
    kept = [{"stages": 1, "rows_stay": True, "ask_early": True, "columns_stay": True}] if own.aligned else []
    return registers + rings + kept


def _backward_ways(own: NormSpec) -> list[dict[str, object]]:
    """By places for each row; one that is kept frees its place, where packs are aligned."""
    kept = (1, 2, 3) if own.aligned else (2, 3, 4)
    return [
        {"stages": stages, "rows_stay": stay, "ask_early": early}
        for stay, early in product((False, True), repeat=2)
        for stages in (kept if stay else (2, 3, 4))
    ]
