"""Plans say what is launched for a problem on a device. These tests launch nothing and need no GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from cases import DTYPES, SHAPES, TIER_COLUMNS
from problems import DEVICES, problem

from cunorm.expression import trace
from cunorm.kernel import source
from cunorm.kernel.device import CLUSTER_SIZES, H100, KNOWN, early_launches, known
from cunorm.operation import Operation, gated
from cunorm.plan.plan import plan
from cunorm.plan.problem import Groups, backward_problem, forward_problem
from cunorm.plan.resources import ctas_that_fit, dynamic_shared, launch_shared, shared_memory
from cunorm.plan.spec import FewRowsSpec, NormSpec, SumSpec
from cunorm.plan.steps import Step

DIRECTIONS = ("forward", "backward")
ALL_COLUMNS = sorted({*(columns.cols for columns in SHAPES), *TIER_COLUMNS, 15, 16, 1024, 2048, 3_000_000})
GRADIENTS = [
    tuple(itertools.compress(("x", "weight", "bias"), mask))
    for mask in itertools.product([True, False], repeat=3)
    if any(mask)
]
TIERS = ("warp", "cta", "cluster", "streamed")


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rows", [1, 3, 4096, 70000, 2**40])
def test_launches_are_within_the_limits_of_cuda(direction, rows, dtype, name):
    for cols in ALL_COLUMNS:
        solution = plan(problem(direction, rows, cols, dtype), DEVICES[name])
        assert solution.steps
        for step in solution.steps:
            spec, (x, y, z) = step.spec, step.grid
            assert 1 <= x < 2**31
            assert 1 <= y < 2**16
            assert z == 1
            assert x % spec.cluster == 0
            assert spec.cluster in (1, *CLUSTER_SIZES)
            assert spec.threads % 32 == 0
            assert spec.threads <= 1024
            assert shared_memory(spec) <= 48 * 1024
            assert shared_memory(spec) + step.dynamic_shared <= DEVICES[name].shared
            assert step.dynamic_shared == launch_shared(spec, DEVICES[name])
            if spec.kernel in ("forward", "backward"):
                assert spec.shape.capacity >= cols
                assert spec.shape.capacity < 2 * cols + 2 * 32 * spec.shape.vector_cols * spec.shape.cluster
                fewer = replace(spec.shape, vectors=spec.shape.vectors - 1)
                assert fewer.capacity < cols + fewer.vector_cols * fewer.cluster


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("vectors", ["a b", "a b c", "a b c d e"])
def test_few_rows_of_more_gradients_fit_into_shared_memory(vectors, name):
    """Shared memory holds the sums of the columns beside what the warps of a row exchange."""
    epilogue = {
        "a b": lambda xhat, a, b: xhat * a + b,
        "a b c": lambda xhat, a, b, c: xhat * a * b + c,
        "a b c d e": lambda xhat, a, b, c, d, e: xhat * a * b + c * d + e,
    }[vectors]
    operation = Operation("layer_norm", trace(epilogue))
    for rows, cols, dtype in itertools.product((1, 16, 60, 300), (1024, 8191, 16384), ("float16", "float32")):
        dtypes = dict.fromkeys(("x", "dy", *vectors.split()), dtype)
        wanted = ("x", *vectors.split())
        for step in plan(backward_problem(operation, rows, cols, dtypes, wanted), DEVICES[name]).steps:
            assert shared_memory(step.spec) <= 48 * 1024


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_longer_rows_take_higher_tiers(direction, dtype, name):
    """CTAs and clusters count as one tier: a cluster may hold a few rows that are shorter than those of a CTA."""
    tiers = [plan(problem(direction, 8, cols, dtype), DEVICES[name]).tier for cols in ALL_COLUMNS]
    assert tiers == sorted(tiers, key={"warp": 0, "cta": 1, "cluster": 1, "streamed": 2}.__getitem__)
    assert ("cluster" in tiers) == (DEVICES[name].arch >= 90)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_tables_of_cases_reach_every_tier(direction, dtype):
    """A change of the plan must not leave a tier without tests."""
    for table in (TIER_COLUMNS, [columns.cols for columns in SHAPES]):
        cases = itertools.product((8, 300), table)
        assert {plan(problem(direction, rows, cols, dtype), KNOWN[90]).tier for rows, cols in cases} == set(TIERS)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_who_holds_which_columns_depends_on_neither_rows_nor_addresses(direction, dtype, name, op):
    """It does not depend on strides either. So the same columns are added up in the same order."""

    def shapes(rows, cols, **changes):
        solution = plan(problem(direction, rows, cols, dtype, op=op, **changes), DEVICES[name])
        specs = [getattr(step.spec, "rows", step.spec) for step in solution.steps]
        return [
            (spec.kernel.replace("_spread", ""), spec.shape.order)
            for spec in specs
            if spec.kernel not in ("sum_partials", "column_gradients")
        ]

    for cols in ALL_COLUMNS:
        of_one_row = shapes(1, cols)
        for rows in (2, 8, 300, 5000, 10**7):
            assert shapes(rows, cols) == of_one_row
            assert shapes(rows, cols, aligned=False) == of_one_row
            assert shapes(rows, cols, strides={"x": cols + 1}) == of_one_row


@pytest.mark.parametrize("missing", CLUSTER_SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_clusters_that_a_gpu_cannot_run_are_not_planned(direction, missing):
    clusters = tuple(
        0 if size >= missing else count for size, count in zip(CLUSTER_SIZES, (66, 30, 15, 7), strict=True)
    )
    device = replace(KNOWN[90], clusters=clusters)
    for cols in (1024, 16384, 32768, 65536, 131072, 262144, 524288):
        steps = plan(problem(direction, 4096, cols, "float16"), device).steps
        assert all(step.spec.cluster < missing for step in steps)
        assert all(min(step.grid) > 0 for step in steps)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_rows_compile_no_more_kernels(direction, dtype, name):
    """The numbers of rows here are large, because a few rows for each SM may have kernels of their own."""
    for cols in ALL_COLUMNS:
        specs = [
            [step.spec for step in plan(problem(direction, rows, cols, dtype), DEVICES[name]).steps]
            for rows in (5 * 10**7, 10**8, 10**9)
        ]
        assert specs[0] == specs[1] == specs[2]


def test_sums_of_streamed_rows_that_read_nothing_of_groups_are_those_of_all_rows():
    operation = Operation("layer_norm", trace(lambda xhat, scale, bias: xhat * (1 + scale) + bias))
    dtypes, kinds = dict.fromkeys(("x", "dy", "scale", "bias"), "float16"), {"scale": "group"}
    wanted = ("x", "bias")
    task = backward_problem(operation, 4096, 2**20, dtypes, wanted, kinds=kinds, groups=Groups(1024, 4))
    columns, rows = plan(task, KNOWN[80]).steps
    assert columns.spec.kernel == "column_gradients"
    assert columns.spec.final
    assert columns.grid[2] == 1
    assert rows.spec.kernel == "backward_streamed"


@pytest.mark.parametrize("device", [H100, KNOWN[90], KNOWN[120]], ids=lambda device: device.name)
def test_long_rows_of_two_matrices_with_a_scale_for_each_have_a_plan(device):
    """Rows that need the largest cluster cannot have one of twice the size."""
    dtypes = dict.fromkeys(("x", "z", "weight"), "float16") | {"y8": "float8_e4m3fn"}
    kinds = {"z": "full", "y8_scale": "per_row"}
    for cols in range(2**18, 2**19 + 2**16, 2**14):
        assert plan(forward_problem(gated(), 100, cols, dtypes, kinds=kinds), device).steps


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_problem_of_other_rows_is_what_is_made_anew(direction):
    """Properties that the first problem has computed and kept do not leak into the other."""
    first, anew = (problem(direction, rows, 1000, "float16") for rows in (3, 5000))
    names = [name for name in dir(first) if not name.startswith("_") and name != "with_rows"]
    before = {name: getattr(first, name) for name in names}
    derived = first.with_rows(5000)
    assert derived == anew
    assert hash(derived) == hash(anew)
    assert {name: getattr(derived, name) for name in names} == {name: getattr(anew, name) for name in names}
    assert {name: getattr(first, name) for name in names} == before


# Numbers up to a million at equal factors, and those around powers of two, where rules end.
NUMBERS_OF_ROWS = sorted(
    {round(10 ** (i / 20)) for i in range(121)} | {2**i + more for i in range(20) for more in (0, 1)}
)
MOST_KERNELS = 12


@pytest.mark.parametrize("device", known(90), ids=lambda device: device.name)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_layout_compiles_few_kernels_whatever_the_rows(direction, dtype, op, device):
    kernels = {}
    for cols in (64, 512, 640, 1152, 2880, 4096, 5120, 8192, 16384, 65536):
        plans = (plan(problem(direction, rows, cols, dtype, op), device) for rows in NUMBERS_OF_ROWS)
        kernels[cols] = len({step.spec for solution in plans for step in solution.steps})
    assert max(kernels.values()) <= MOST_KERNELS, kernels


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 500, 10**6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backward_pass_that_leaves_partial_rows_begins_early(dtype, rows, name):
    """Its kernel first waits for the kernel before, and no SM has room for more of its CTAs than planned."""
    device = DEVICES[name]
    for cols in (128, 1600, 5000, 16384, 70000, 600000):
        solution = plan(problem("backward", rows, cols, dtype), device)
        first, last = solution.steps[0], solution.steps[-1]
        begins = device.arch >= 90 and solution.groups > 0
        entry = source.source(first.spec).partition(f"{source.entry_name(first.spec)}(")[2]
        assert entry.partition("{")[2].strip().startswith("wait_for_kernel_before();") == (solution.groups > 0)
        assert first.begins_early == begins
        assert not solution.groups or last.spec.lets_next_begin == (first.spec.cluster <= 2)
        if begins and dynamic_shared(first.spec):
            assert ctas_that_fit(shared_memory(first.spec) + first.dynamic_shared, device) == first.spec.ctas_per_sm


@pytest.fixture
def early_launch(monkeypatch):
    """A function that sets CUNORM_EARLY_LAUNCH and forgets what was kept of an earlier value."""

    def forget():
        early_launches.cache_clear()
        plan.cache_clear()

    def say(value: str) -> None:
        monkeypatch.setenv("CUNORM_EARLY_LAUNCH", value)
        forget()

    yield say
    monkeypatch.undo()
    forget()


def test_the_environment_switches_early_launches_off(early_launch):
    """Kernels and grids stay, and so do bits. No launch asks for more shared memory than its kernel needs."""
    problems = [problem("backward", rows, cols, "bfloat16") for rows in (64, 10**5) for cols in (128, 5000, 70000)]
    usual = [plan(task, KNOWN[90]).steps for task in problems]
    early_launch("0")
    off = [plan(task, KNOWN[90]).steps for task in problems]
    assert any(step.begins_early for steps in usual for step in steps)
    assert not any(device.overlaps_launches for device in DEVICES.values())
    assert not any(step.begins_early for steps in off for step in steps)
    for before, after in zip(usual, off, strict=True):
        assert [(step.spec, step.grid) for step in before] == [(step.spec, step.grid) for step in after]
        assert [step.dynamic_shared for step in after] == [dynamic_shared(step.spec) for step in after]


def test_the_environment_says_0_or_1_of_early_launches(early_launch):
    early_launch("off")
    with pytest.raises(ValueError, match="CUNORM_EARLY_LAUNCH must be 0 or 1; got 'off'"):
        plan(problem("backward", 10**5, 1024, "bfloat16"), KNOWN[90])


@pytest.mark.parametrize("device", [KNOWN[90], H100], ids=lambda device: device.name)
@pytest.mark.parametrize("cols", [768, 1600, 3776, 4352, 7424, 8192, 10240, 12288, 24576, 57344, 131072])
@pytest.mark.parametrize("elements", [4, 8, 64])
def test_backward_rows_leave_as_many_partial_rows_at_odd_addresses(elements, cols, device):
    """With another number of partial rows, dweight would be added up in another order."""
    rows = (elements << 20) // cols
    changes = {"wanted": ("x", "weight", "bias")}
    plans = [
        plan(problem("backward", rows, cols, "bfloat16", aligned=aligned, **changes), device)
        for aligned in (True, False)
    ]
    assert len({(solution.groups, solution.steps[0].spec.rows_per_cta) for solution in plans}) == 1


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_is_bounded(dtype, arch):
    """It has at most 4 x SMs x cols (rounded up to 32) x 8 bytes, and none where nothing is added up."""
    device = KNOWN[arch]
    for cols, rows, wanted in itertools.product(ALL_COLUMNS, (1, 300, 70000, 10**8), GRADIENTS):
        solution = plan(problem("backward", rows, cols, dtype, wanted=wanted), device)
        assert solution.workspace <= 4 * device.sms * -(-cols // 32) * 32 * 8
        adds_up = wanted != ("x",) and not any(
            isinstance(step.spec, FewRowsSpec) or (isinstance(step.spec, NormSpec) and step.spec.final)
            for step in solution.steps
        )
        assert (solution.workspace > 0) == adds_up
        assert plan(problem("forward", rows, cols, dtype), device).workspace == 0


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_launch_takes_the_multiprocessors_that_a_margin_leaves_free(direction, name):
    """A launch has no more CTAs than the other multiprocessors hold at once.

    A multiprocessor holds as many CTAs as the plan counts with, or 512 threads of smaller ones. The kernels that add up
    rows and partial rows obey this too, however long a row is.
    """
    device = DEVICES[name]
    wanted = [{"wanted": names} for names in (("x", "weight", "bias"), ("bias",), ("x",))]
    changes = wanted if direction == "backward" else [{}]
    kernels = set()
    for cols, rows, dtype, asked in itertools.product(
        (*ALL_COLUMNS, 10_048), (1, 30, 5000, 10**6), ("bfloat16", "float64"), changes
    ):
        for margin in (1, device.sms // 2, device.sms - 1):
            solution = plan(problem(direction, rows, cols, dtype, sm_margin=margin, **asked), device)
            for step in solution.steps:
                counted = 1 if isinstance(step.spec, SumSpec) else step.spec.ctas_per_sm
                at_once = max(counted, 512 // step.spec.threads)
                allowed = device.resident_clusters(step.spec.cluster, at_once, margin) * step.spec.cluster
                assert math.prod(step.grid) <= allowed, (rows, solution.describe())
                if step.spec.kernel in ("sum_partials", "column_gradients"):
                    kernels.add((step.spec.kernel, step.spec.several_blocks))
    assert len(kernels) == (4 if direction == "backward" else 0), "both kernels take one block and several"


def test_few_rows_with_a_margin_have_no_kernel_that_takes_all_multiprocessors():
    def kernels(sm_margin: int) -> list[str]:
        solution = plan(problem("backward", 64, 1024, "bfloat16", sm_margin=sm_margin), KNOWN[90])
        return [step.spec.kernel for step in solution.steps]

    assert kernels(0) == ["backward_few"]
    assert kernels(20) == ["backward", "sum_partials"]


def test_few_rows_whose_gradient_may_lie_where_dy_does_are_two_launches():
    """The columns are read before dx is written, and dweight has the same bits as in one launch."""
    apart = plan(problem("backward", 64, 1024, "bfloat16"), KNOWN[90])
    over = plan(problem("backward", 64, 1024, "bfloat16", overwrites=True), KNOWN[90])
    assert [step.spec for step in over.steps] == [apart.steps[0].spec.columns, apart.steps[0].spec.rows]
    assert (apart.may_overwrite, over.may_overwrite) == (False, True)
    assert sum(step.grid[0] for step in over.steps) == apart.steps[0].grid[0]


def few_rows(arch: int, **changes: Any) -> list[tuple[int, int, Step]]:
    """Return (rows, cols, step) of each backward pass that takes the kernel for few rows."""
    launches = []
    for dtype, cols, rows in itertools.product(DTYPES, ALL_COLUMNS, (1, 7, 100, 500, 2000)):
        step = plan(problem("backward", rows, cols, dtype, **changes), KNOWN[arch]).steps[0]
        if isinstance(step.spec, FewRowsSpec):
            launches.append((rows, cols, step))
    assert {rows for rows, *_ in launches} == {1, 7, 100, 500, 2000}
    return launches


@pytest.mark.slow
def test_columns_of_few_rows_are_added_up_in_the_same_order_wherever_they_lie():
    for (*_, even), (*_, odd) in zip(few_rows(90), few_rows(90, aligned=False), strict=True):
        assert not odd.spec.rows.aligned
        assert odd.spec.columns.shape == even.spec.columns.shape
        assert odd.spec.columns.rows_per_cta == even.spec.columns.rows_per_cta


@pytest.mark.slow
@pytest.mark.parametrize("arch", KNOWN)
def test_few_rows_have_threads_for_every_column_and_every_row(arch):
    for rows, cols, step in few_rows(arch):
        columns, of_rows = step.spec.columns, step.spec.rows
        assert columns.shape.vector_cols * columns.shape.threads * step.spec.column_ctas >= cols
        assert columns.threads == of_rows.threads == step.spec.threads <= 1024
        ctas = step.grid[0] - step.spec.column_ctas
        assert ctas % step.spec.cluster == 0
        assert rows <= ctas // step.spec.cluster * of_rows.rows_per_cta < rows + of_rows.rows_per_cta


ALIGNMENT = [
    # (cols, x_stride, y_stride, pointers aligned, vectors expected) in float16, whose vectors have 8 columns
    (1024, 1024, 1024, True, True),
    (1024, 1024, 1024, False, False),
    (1024, 1032, 1024, True, True),
    (1024, 1025, 1024, True, False),
    (1024, 1024, 1028, True, False),
    (1023, 1024, 1024, True, True),
    (1023, 1023, 1023, True, False),
]


@pytest.mark.parametrize(("cols", "x_stride", "y_stride", "aligned", "expected"), ALIGNMENT)
def test_vectors_are_used_where_every_row_is_aligned(cols, x_stride, y_stride, aligned, expected):
    changes = {"strides": {"x": x_stride, "y": y_stride}, "aligned": aligned}
    (step,) = plan(problem("forward", 10, cols, "float16", **changes), KNOWN[90]).steps
    assert step.spec.aligned == expected


def test_dx_is_contiguous_whatever_the_strides_of_x():
    changes = {"strides": {"x": 1024, "dy": 1024}}
    steps = plan(problem("backward", 10, 1023, "float16", **changes), KNOWN[90]).steps
    assert [step.spec.rows.aligned for step in steps] == [False]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cols", TIER_COLUMNS)
def test_a_plan_can_be_read(direction, cols):
    solution = plan(problem(direction, 4096, cols, "bfloat16"), KNOWN[90])
    text = solution.describe()
    for word in ("layer_norm", direction, "4096 rows", f"{cols} cols", "H200", solution.tier, "bytes moved", "grid"):
        assert word in text
    assert all(step.spec.kernel in text for step in solution.steps)


BYTES = [
    ({}, 2 * 8 * 100 * 2 + 2 * 100 * 2),
    ({"weight": "float32", "bias": None, "y": "float32"}, 8 * 100 * (2 + 4) + 100 * 4),
    ({"weight": None, "bias": None}, 2 * 8 * 100 * 2),
]


@pytest.mark.parametrize(("changes", "expected"), BYTES)
def test_bytes_moved_forward(changes, expected):
    """x, weight and bias are read once, and y is written once."""
    assert problem("forward", 8, 100, "float16", **changes).bytes_moved == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (("x", "weight", "bias"), 3 * 1600 + 400 + 2 * 400),
        (("x",), 3 * 1600 + 400),
        (("weight",), 2 * 1600 + 400),
        (("bias",), 1600 + 400),
    ],
)
def test_bytes_moved_backward(wanted, expected):
    """What is needed is read once: x, dy and weight. What is wanted is written once: dx, dweight and dbias."""
    assert problem("backward", 8, 100, "float16", weight="float32", wanted=wanted).bytes_moved == expected
