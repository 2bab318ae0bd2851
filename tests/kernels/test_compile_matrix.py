"""Kernels compile without a GPU and keep their rows in registers: every kind for sm_90, one of each tier elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from nvrtc import needs_nvrtc
from problems import refused

from cunorm.commands import matrix
from cunorm.commands.compilation import compile_all, compiler, fault
from cunorm.kernel.compile import Resources
from cunorm.kernel.device import KNOWN, Device, known
from cunorm.linear import float8_plan
from cunorm.plan.choose import tier_of
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.problem import ITEMSIZE
from cunorm.plan.resources import launch_shared, shared_memory
from cunorm.plan.shapes import Tier, cluster_backward

WHOLE = 90  # the architecture of which every kind of kernel is compiled
SLICES = 24  # of them, for pytest-xdist

# What a kernel's options do to its registers one architecture shows; ptxas is another compiler for each architecture,
# and what it makes of a tier shows in one kernel of the tier. `python -m cunorm compile --all` compiles the rest.
COMPILED = [
    *(pytest.param(WHOLE, part, id=f"sm_{WHOLE}-{part}") for part in range(SLICES)),
    *(pytest.param(arch, None, id=f"sm_{arch}") for arch in KNOWN if arch != WHOLE),
]


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("arch", "part"), COMPILED)
def test_no_kernel_spills(arch, part):
    device = KNOWN[arch]
    problems = matrix.covering(device)
    if part is None:
        specs = matrix.once_each(problems, device)
    else:
        of_each = (matrix.kernels_of(problems, one) for one in known(arch))
        specs = list(dict.fromkeys(chain.from_iterable(of_each)))[part::SLICES]
    assert specs
    faults = faults_of(specs, arch)
    assert not faults, f"{len(faults)} of {len(specs)} kernels on sm_{arch}:\n" + "\n".join(faults)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", KNOWN)
def test_no_cast_spills(arch):
    """What makes operands in 8 bits: a third of it for one architecture, every twentieth for the others."""
    device = KNOWN[arch]
    specs = float8_plan.kernels_of(matrix.casts(device))[:: 3 if arch == WHOLE else 20]
    for spec in specs:
        assert (spec.threads % 32, spec.dynamic_shared + spec.shared_memory <= device.shared) == (0, True)
    assert not faults_of(specs, arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_of_a_named_fusion_spills(arch, part):
    problems = [problem for problem in matrix.named_fusions() if not refused(problem, KNOWN[arch])]
    assert not faults_of(matrix.kernels_of(problems, KNOWN[arch])[part::8], arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_that_takes_numbers_of_rows_spills(arch):
    assert not faults_of(matrix.kernels_of(matrix.numbers_of_rows(), KNOWN[arch]), arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_kernel_of_a_fusion_in_8_bits_spills(arch, part):
    specs = matrix.kernels_of(matrix.fused_float8(), KNOWN[arch])
    assert not faults_of(specs[part :: 4 if arch == WHOLE else 12], arch)


def faults_of(specs, arch):
    with compiler(keep=False) as compile_one:
        return [
            f"{one.spec} {one.fault}" for one in compile_all([(spec, arch) for spec in specs], compile_one) if one.fault
        ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("direction", matrix.TABLES)
def test_the_set_reaches_every_tier(direction, arch):
    """Also one that is added tomorrow; clusters only where there are any."""
    device, problems = KNOWN[arch], matrix.covering(KNOWN[arch])
    chosen = {tier_of(problem, device) for problem in problems if problem.direction == direction}
    assert {choice and choice[0] for choice in chosen} == reachable(direction, device)
    for dtype in ITEMSIZE:
        for tier, lengths in matrix.lengths_of_tiers(direction, dtype, device).items():
            assert any(length % 2 for length in lengths) or (tier and tier.rule is cluster_backward)
            if tier:
                longest = tier.most * 16 // ITEMSIZE[dtype]
                choice = tier_of(whole("layer_norm", direction, matrix.ROWS, longest, dtype), device)
                assert longest in lengths or choice is None or choice[0] != tier
    kernels = {spec.kernel for spec in matrix.kernels_of(problems, device)}
    expected = {"forward", "forward_spread", "forward_streamed"} | ({"forward_pairs"} if arch == 90 else set())
    assert {name for name in kernels if name.startswith("forward")} == expected


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 100, matrix.ROWS])
@pytest.mark.parametrize("arch", KNOWN)
def test_a_cta_is_whole_warps_and_has_the_shared_memory_it_needs(arch, rows):
    device = KNOWN[arch]
    for problem in matrix.covering(device):
        for step in plan(replace(problem, rows=rows), device).steps:
            assert step.spec.threads % 32 == 0
            assert step.spec.threads <= 1024
            assert step.dynamic_shared == launch_shared(step.spec, device)
            assert shared_memory(step.spec) + step.dynamic_shared <= device.shared


def reachable(direction: str, device: Device) -> set[Tier | None]:
    """What rows of many lengths find, whatever is beside x: shared memory and architecture rule tiers out."""
    lengths = {int(1.02**power) for power in range(1, 720)} | {tier.most * 4 for tier in matrix.TABLES[direction]}
    dtypes = [*product(("float32", "float64"), ITEMSIZE, (None, "float16")), ("bfloat16", "bfloat16", None)]
    problems = [
        whole(op, direction, matrix.ROWS, cols, *of_arrays)
        for op, of_arrays in product(matrix.OPS, dtypes)
        for cols in lengths
    ]
    return {choice and choice[0] for choice in (tier_of(problem, device) for problem in problems)}


@pytest.mark.parametrize("arch", KNOWN)
def test_once_each_reaches_every_kernel_of_every_tier(arch):
    device, problems = KNOWN[arch], matrix.covering(KNOWN[arch])
    few, all_of_them = matrix.once_each(problems, device), matrix.kernels_of(problems, device)
    assert len(few) < len(all_of_them) / 10

    def kinds(specs):
        return {(spec.kernel, spec.cluster > 1, ITEMSIZE[getattr(spec, "row_dtype", spec.compute)]) for spec in specs}

    assert kinds(few) == kinds(all_of_them)


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


@pytest.mark.slow
def test_the_set_holds_the_problems_that_are_common():
    problems = set(matrix.covering(KNOWN[90]))
    for direction in matrix.TABLES:
        for op in matrix.OPS:
            for dtype in ITEMSIZE:
                longest = max(matrix.lengths_of_tiers(direction, dtype, KNOWN[90])[None])
                assert whole(op, direction, matrix.ROWS, longest, dtype) in problems


FAULTS = [
    ({}, ""),
    ({"spill_stores": 4}, "spills 4 bytes of stores, 0 of loads"),
    ({"spill_loads": 8, "stack": 8}, "spills 0 bytes of stores, 8 of loads"),
    ({"stack": 16}, "uses 16 bytes of local memory"),
    ({"shared": 49153}, "uses 49153 bytes of shared memory of 49152"),
    ({"shared": 4}, "uses 4 bytes of shared memory; resources.py says 0"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words or "none" for _, words in FAULTS])
def test_a_fault_is_named(changes, words):
    spec = plan(whole("layer_norm", "forward", 16384, 32, "float32"), KNOWN[90]).steps[0].spec
    assert fault(spec, Resources(40, 0, 0, 0, 0)._replace(**changes)) == words
