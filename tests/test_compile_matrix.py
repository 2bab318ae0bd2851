"""Every kind of kernel compiles for every architecture without a GPU and keeps its rows in registers."""

from __future__ import annotations

from itertools import combinations

import pytest
from nvrtc import needs_nvrtc

from cunorm.commands import matrix
from cunorm.commands.compilation import compile_all, fault, offline
from cunorm.device import KNOWN
from cunorm.kernels import Resources
from cunorm.plan import KernelSpec, RowShape
from cunorm.problem import ITEMSIZE

SLICES = 8  # for pytest-xdist


@needs_nvrtc
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("arch", KNOWN)
def test_no_kernel_spills(arch, part):
    specs = matrix.kernels_of(matrix.covering(KNOWN[arch]), KNOWN[arch])[part::SLICES]
    assert specs
    with offline() as compile_one:
        faults = [
            f"{one.spec} {one.fault}" for one in compile_all([(spec, arch) for spec in specs], compile_one) if one.fault
        ]
    assert not faults, f"{len(faults)} of {len(specs)} kernels on sm_{arch}:\n" + "\n".join(faults)


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("direction", matrix.TABLES)
def test_the_set_reaches_every_tier(direction, arch):
    """Also one that is added tomorrow; clusters only where there are any."""
    device, problems = KNOWN[arch], matrix.covering(KNOWN[arch])
    chosen = {choose(problem, device) for problem in problems if problem.direction == direction}
    tiers = {choice and choice[0] for choice in chosen}
    assert tiers == {tier for tier in matrix.TABLES[direction] if fits(tier, device)} | {None}
    for tier in tiers - {None}:
        specs = [choice[1] for choice in chosen if choice and choice[0] == tier]
        assert {spec.x for spec in specs} >= (set(ITEMSIZE) if tier.packs != (4,) or tier.cluster == 1 else {"float32"})
        assert max(-(-spec.cols // spec.shape.pack) for spec in specs) == tier.most
        assert any(spec.cols % 2 for spec in specs)
        assert {spec.aligned for spec in specs} == {True, False}
    kernels = {spec.kernel for spec in matrix.kernels_of(problems, device)}
    assert {name for name in kernels if name.startswith("forward")} == {"forward", "forward_streamed"}


def fits(tier: Tier, device: Device) -> bool:
    """Clusters only where there are any, and two places of the shortest rows of a tier."""
    if tier.cluster > 1:
        return bool(device.clusters)
    shorter = max((other.most for other in TABLES["backward"] if other.most < tier.most), default=0)
    return not tier.stages or 2 * 2 * 16 * (shorter + 1) < device.shared


@pytest.mark.parametrize("direction", matrix.TABLES)
def test_the_set_holds_every_pair_of_values(direction):
    """Of two factors, in each tier; what cannot be together is taken out afterwards."""
    sizes = [len(values) for values in matrix.FACTORS[direction].values()]
    assert max(sizes) <= matrix.LEVELS
    rows = matrix.orthogonal_array()
    assert {len(row) for row in rows} == {len(sizes)}
    for a, b in combinations(range(len(sizes)), 2):
        pairs = {(row[a] % sizes[a], row[b] % sizes[b]) for row in rows}
        assert len(pairs) == sizes[a] * sizes[b]


def test_the_set_holds_the_problems_that_are_common():
    problems = set(matrix.covering(KNOWN[90]))
    for direction in matrix.TABLES:
        for op in matrix.OPS:
            for dtype in ITEMSIZE:
                longest = max(matrix.lengths_of_tiers(direction, dtype, KNOWN[90])[None])
                assert matrix.whole(op, direction, longest, dtype) in problems


FAULTS = [
    ({}, ""),
    ({"spill_stores": 4}, "spills 4 bytes of stores, 0 of loads"),
    ({"spill_loads": 8, "stack": 8}, "spills 0 bytes of stores, 8 of loads"),
    ({"stack": 16}, "uses 16 bytes of local memory"),
    ({"shared": 49153}, "uses 49153 bytes of shared memory of 49152"),
    ({"shared": 4}, "uses 4 bytes of shared memory; plan.py says 0"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words or "none" for _, words in FAULTS])
def test_a_fault_is_named(changes, words):
    spec = KernelSpec("forward", False, 32, *["float32"] * 4, False, True, RowShape(4, 8, 1))
    assert fault(spec, Resources(40, 0, 0, 0, 0)._replace(**changes)) == words
