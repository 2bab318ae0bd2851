"""Kernels compile without a GPU and spill no register: every kind for sm_90, and one of each tier elsewhere."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import combinations, product

import matrix
import pytest
from nvrtc import needs_nvrtc
from problems import refused

from cunorm.commands.compilation import compile_all, compiler, fault
from cunorm.kernel.compile import Resources
from cunorm.kernel.device import KNOWN, Device, known
from cunorm.linear import float8_plan
from cunorm.plan.choose import tier_of
from cunorm.plan.plain_problems import whole
from cunorm.plan.plan import plan
from cunorm.plan.problem import ITEMSIZE, Problem
from cunorm.plan.resources import launch_shared, shared_memory
from cunorm.plan.shapes import Tier, cluster_backward
from cunorm.plan.spec import KernelSpec

MAIN = 90  # kernels with all options are compiled for this architecture
PARTS = 8  # the longest lists are divided into so many, for pytest-xdist
GENERATIONS = ((75,), (80, 86, 89), (100, 120))  # the other architectures; those of one generation share the work


def covering(
    problems: Iterable[Problem], devices: Iterable[Device], factors: Callable[[Problem], dict[str, Hashable]]
) -> list[KernelSpec]:
    """Return kernels that show every value of every factor with each kernel, tier, and CTA or cluster.

    `python tests/kernels/matrix.py` compiles all combinations. The first kernel that has a value is taken, and problems
    begin with those of a tier's longest row, which needs the most registers.
    """
    shown: set[tuple] = set()
    kernels = []
    for device, problem in product(devices, problems):
        tier = tier_of(problem, device)
        for step in plan(problem, device).steps:
            spec = step.spec
            kind = (spec.kernel, problem.direction, tier and tier[0], spec.cluster > 1)
            values = {(kind, *factor) for factor in factors(problem).items()}
            if not values <= shown:
                shown |= values
                kernels.append(spec)
    return list(dict.fromkeys(kernels))


def factors_of_a_norm(problem: Problem) -> dict[str, Hashable]:
    """Return the factors of a norm: dtypes, the norm with the dtype of x, absent arrays, alignment, zero-centring."""
    dtypes = {operand.name: operand.dtype for operand in problem.operands}
    return {
        **dtypes,
        "norm": (problem.operation.norm, problem.row_dtype),
        "absent": tuple(name for name in ("weight", "bias") if name not in dtypes),
        "wanted": problem.wanted,
        "aligned": problem.aligned,
        "zero-centred": problem.is_zero_centred,
    }


def factors_of_a_fusion(problem: Problem) -> dict[str, Hashable]:
    """Return the factors of a fused operation: itself, the dtype, and what shares a scale of FP8 output."""
    scales = problem.by_name["y8_scale"].kind if "y8_scale" in problem.by_name else None
    return {"operation": problem.operation, "dtype": problem.row_dtype, "scales": scales}


@functools.cache
def problems_of(arch: int) -> list[Problem]:
    return matrix.covering(KNOWN[arch])


@functools.cache
def kernels_of_norms() -> list[KernelSpec]:
    return covering(problems_of(MAIN), known(MAIN), factors_of_a_norm)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("part", range(PARTS))
def test_no_kernel_spills(part):
    assert_none_spills(kernels_of_norms()[part::PARTS], MAIN)


# One architecture shows what a kernel's options do to its registers. For each other architecture ptxas is another
# compiler, and one kernel of each tier and size of x shows what it makes of the tier.
@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", [arch for generation in GENERATIONS for arch in generation])
def test_no_kernel_spills_on_other_architectures(arch):
    assert_none_spills(shared_out(next(generation for generation in GENERATIONS if arch in generation))[arch], arch)


def shared_out(generation: tuple[int, ...]) -> dict[int, list[KernelSpec]]:
    """Share out one kernel of each tier and size of x among the architectures of a generation that have it."""
    archs_of = defaultdict(list)
    for arch in generation:
        for spec in matrix.once_each(problems_of(arch), KNOWN[arch]):
            archs_of[spec].append(arch)
    shares = defaultdict(list)
    for number, (spec, archs) in enumerate(archs_of.items()):
        shares[archs[number % len(archs)]].append(spec)
    return shares


def test_every_architecture_is_compiled():
    assert {MAIN}.union(*GENERATIONS) == set(KNOWN)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", KNOWN)
def test_no_cast_spills(arch):
    """Every third kernel that casts to FP8 is compiled for one architecture, and every twentieth for the others."""
    specs = float8_plan.kernels_of(matrix.casts(KNOWN[arch]))[:: 3 if arch == MAIN else 20]
    for spec in specs:
        assert (spec.threads % 32, spec.dynamic_shared + spec.shared_memory <= KNOWN[arch].shared) == (0, True)
    assert_none_spills(specs, arch)


@functools.cache
def kernels_of_named_fusions(arch: int) -> list[KernelSpec]:
    problems = [problem for problem in matrix.named_fusions() if not refused(problem, KNOWN[arch])]
    return covering(problems, [KNOWN[arch]], factors_of_a_fusion)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_of_a_named_fusion_spills(arch, part):
    assert_none_spills(kernels_of_named_fusions(arch)[part::PARTS], arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_that_takes_numbers_of_rows_spills(arch):
    assert_none_spills(covering(matrix.numbers_of_rows(), [KNOWN[arch]], factors_of_a_fusion), arch)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_kernel_of_a_fusion_in_8_bits_spills(arch):
    assert_none_spills(covering(matrix.fused_float8(), [KNOWN[arch]], factors_of_a_fusion), arch)


def assert_none_spills(specs: list[KernelSpec], arch: int) -> None:
    assert specs
    with compiler(keep=False) as compile_one:
        compiled = compile_all([(spec, arch) for spec in specs], compile_one)
        faults = [f"{kernel.spec} {kernel.fault}" for kernel in compiled if kernel.fault]
    assert not faults, f"{len(faults)} of {len(specs)} kernels on sm_{arch}:\n" + "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("direction", matrix.TABLES)
def test_the_set_reaches_every_tier(direction, arch):
    """The set follows the tiers of the plan, also new ones, and has clusters where the architecture has them."""
    device, problems = KNOWN[arch], problems_of(arch)
    chosen = {tier_of(problem, device) for problem in problems if problem.direction == direction}
    assert {choice and choice[0] for choice in chosen} == reachable(direction, device)
    for dtype in ITEMSIZE:
        for tier, lengths in matrix.lengths_of_tiers(direction, dtype, device).items():
            assert any(length % 2 for length in lengths) or (tier and tier.rule is cluster_backward)
            if tier:
                longest = tier.most * 16 // ITEMSIZE[dtype]
                choice = tier_of(whole("layer_norm", direction, matrix.ROWS, longest, dtype), device)
                assert longest in lengths or choice is None or choice[0] != tier


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 100, matrix.ROWS])
@pytest.mark.parametrize("arch", KNOWN)
def test_a_cta_is_whole_warps_and_has_the_shared_memory_it_needs(arch, rows):
    device = KNOWN[arch]
    for problem in problems_of(arch):
        for step in plan(replace(problem, rows=rows), device).steps:
            assert step.spec.threads % 32 == 0
            assert step.spec.threads <= 1024
            assert step.dynamic_shared == launch_shared(step.spec, device)
            assert shared_memory(step.spec) + step.dynamic_shared <= device.shared


def reachable(direction: str, device: Device) -> set[Tier | None]:
    """Return the tiers that the longest rows of each tier, one column more, and powers of two take, with many dtypes.

    Shared memory and architecture rule other tiers out.
    """
    dtypes = [*product(("float32", "float64"), ITEMSIZE, (None, "float16")), ("bfloat16", "bfloat16", None)]
    problems = []
    for op, (x, weight, y) in product(matrix.OPS, dtypes):
        lengths = {tier.most * 16 // ITEMSIZE[x] for tier in matrix.TABLES[direction]} | {2**n for n in range(21)}
        for cols, more in product(lengths, (0, 1)):
            problems.append(whole(op, direction, matrix.ROWS, cols + more, x, weight, y))
    return {choice and choice[0] for choice in (tier_of(problem, device) for problem in problems)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", KNOWN)
def test_once_each_reaches_every_kernel_of_every_tier(arch):
    device, problems = KNOWN[arch], problems_of(arch)
    few, all_of_them = matrix.once_each(problems, device), matrix.kernels_of(problems, device)
    assert len(few) < len(all_of_them) / 10
    expected = {"forward", "forward_spread", "forward_streamed"} | ({"forward_pairs"} if arch == 90 else set())
    assert {spec.kernel for spec in all_of_them if spec.kernel.startswith("forward")} == expected

    def kinds(specs):
        return {(spec.kernel, spec.cluster > 1, ITEMSIZE[getattr(spec, "row_dtype", spec.compute)]) for spec in specs}

    assert kinds(few) == kinds(all_of_them)


@pytest.mark.parametrize("direction", matrix.TABLES)
def test_the_set_holds_every_pair_of_values(direction):
    """Each pair of values of two factors occurs in each tier. What cannot be together is taken out later."""
    sizes = [len(values) for values in matrix.FACTORS[direction].values()]
    assert max(sizes) <= matrix.LEVELS
    rows = matrix.orthogonal_array()
    assert {len(row) for row in rows} == {len(sizes)}
    for a, b in combinations(range(len(sizes)), 2):
        pairs = {(row[a] % sizes[a], row[b] % sizes[b]) for row in rows}
        assert len(pairs) == sizes[a] * sizes[b]


@pytest.mark.slow
def test_the_set_holds_the_problems_that_are_common():
    problems = set(problems_of(90))
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
