"""Plans: what is launched for a problem on a device. Nothing is launched, and no GPU is needed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from cases import DTYPES, SHAPES, TIER_COLUMNS
from problems import DEVICES, problem

from cunorm.device import CLUSTER_SIZES, H100, KNOWN
from cunorm.expression import trace
from cunorm.norm.plain_problems import float8_problem, whole
from cunorm.norm.plan import plan
from cunorm.norm.problem import forward_problem
from cunorm.norm.shared_memory import dynamic_shared, shared_memory
from cunorm.norm.spec import FewRowsSpec, NormSpec
from cunorm.norm.steps import Step
from cunorm.operation import Operation

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
            assert step.dynamic_shared == dynamic_shared(spec)
            if spec.kernel in ("forward", "backward"):
                assert spec.shape.capacity >= cols
                assert spec.shape.capacity < 2 * cols + 2 * 32 * spec.shape.pack * spec.shape.cluster
                fewer = replace(spec.shape, packs=spec.shape.packs - 1)
                assert fewer.capacity < cols + fewer.pack * fewer.cluster


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_longer_rows_take_higher_tiers(direction, dtype, name):
    tiers = [plan(problem(direction, 8, cols, dtype), DEVICES[name]).tier for cols in ALL_COLUMNS]
    assert tiers == sorted(tiers, key=TIERS.index)
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
    """Nor on strides: the same columns are added up in the same order. How many rows share a CTA does not matter."""

    def shapes(rows, cols, **changes):
        solution = plan(problem(direction, rows, cols, dtype, op=op, **changes), DEVICES[name])
        specs = [getattr(step.spec, "rows", step.spec) for step in solution.steps]
        return [
            (spec.kernel.replace("_spread", ""), spec.shape.order)
            for spec in specs
            if spec.kernel not in ("sum_partials", "column_gradients")
        ]

    for cols in ALL_COLUMNS:
        one = shapes(1, cols)
        for rows in (2, 8, 300, 5000, 10**7):
            assert shapes(rows, cols) == one
            assert shapes(rows, cols, aligned=False) == one
            assert shapes(rows, cols, strides={"x": cols + 1}) == one


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
    """Few rows to an SM may have kernels of their own."""
    for cols in ALL_COLUMNS:
        specs = [
            [step.spec for step in plan(problem(direction, rows, cols, dtype), DEVICES[name]).steps]
            for rows in (5 * 10**7, 10**8, 10**9)
        ]
        assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize(
    ("elements", "cols", "granularity", "by_two"),
    [
        (64, 2048, "row", True),
        (64, 2048, "tensor", True),
        (64, 12288, 128, True),
        (64, 12288, "tensor", False),
        (64, 4096, "row", False),
        (8, 2048, "row", True),
        (4, 2048, "row", False),
        (8, 3072, "row", False),
    ],
)
def test_layer_norm_to_8_bits_takes_rows_by_two_where_it_was_measured_to_win(elements, cols, granularity, by_two):
    x = "bfloat16"
    problem = float8_problem(
        "layer_norm", (elements << 20) // cols, cols, x, x, x, y8="float8_e4m3fn", granularity=granularity
    )
    assert (plan(problem, KNOWN[90]).steps[0].spec.kernel == "forward_pairs") == by_two


@pytest.mark.parametrize(
    ("norm", "weight", "elements", "cols", "waits"),
    [
        # (CTAs of a cluster, places, CTAs of an SM); one place: a thread keeps its row; 0: in registers, weight and
        # bias coming late
        ("layer_norm", "float32", 8, 8192, (2, 1, 4)),
        ("layer_norm", "float32", 8, 1152, (1, 3, 3)),
        ("layer_norm", "float32", 8, 4224, (1, 2, 3)),
        ("layer_norm", "float32", 2, 4224, (2, 1, 5)),  # few: a thread keeps its row
        ("layer_norm", "float32", 2, 2560, (1, 1, 6)),
        ("layer_norm", "float32", 8, 5120, (1, 1, 3)),  # fills all places
        ("layer_norm", "float32", 64, 5696, (2, 2, 5)),  # many
        ("layer_norm", "float32", 64, 5184, (1, 0, 6)),
        ("layer_norm", "float32", 64, 2048, (1, 2, 7)),
        ("layer_norm", "float32", 64, 4992, (1, 2, 3)),
        ("layer_norm", "float32", 64, 6720, (1, 1, 2)),
        ("layer_norm", "float32", 64, 14336, (2, 1, 2)),
        ("layer_norm", "bfloat16", 8, 8192, (2, 1, 5)),
        ("layer_norm", "bfloat16", 8, 20480, (4, 1, 4)),
        ("layer_norm", "bfloat16", 8, 5376, (1, 1, 4)),
        ("layer_norm", "bfloat16", 16, 4096, (1, 1, 5)),
        ("layer_norm", "bfloat16", 24, 4096, (1, 0, 8)),
        ("layer_norm", "bfloat16", 24, 2240, (1, 1, 8)),
        ("layer_norm", "bfloat16", 64, 2240, (1, 0, 16)),
        ("layer_norm", "bfloat16", 64, 32768, (8, 1, 6)),
        ("layer_norm", "bfloat16", 5, 10240, (1, 0, 4)),  # all rows at once
        ("rms_norm", "bfloat16", 8, 8192, (2, 1, 6)),
        ("rms_norm", "bfloat16", 8, 1600, (1, 2, 5)),
        ("rms_norm", "float32", 4, 4224, (1, 2, 5)),
        ("rms_norm", "bfloat16", 8, 2560, (1, 1, 7)),
        ("rms_norm", "bfloat16", 3, 2432, (1, 1, 7)),
        ("rms_norm", "float32", 24, 8192, (1, 0, 4)),
        ("rms_norm", "bfloat16", 3, 12288, (1, 2, 1)),  # hardly more than run at once
        ("rms_norm", "bfloat16", 16, 2560, (1, 0, 9)),
        ("layer_norm", "float32", 3, 13824, (1, 0, 3)),  # all rows at once
    ],
)
def test_forward_rows_wait_where_it_was_measured_to_win(norm, weight, elements, cols, waits):
    bias = {"bias": weight} if norm == "layer_norm" else {}
    rows = (elements << 20) // cols
    (step,) = plan(problem("forward", rows, cols, "bfloat16", norm, weight=weight, **bias), KNOWN[90]).steps
    assert (step.spec.cluster, step.spec.stages, step.spec.ctas_per_sm) == waits


@pytest.mark.parametrize(
    ("norm", "elements", "cols", "held"),
    [
        # (threads of a CTA, CTAs of a cluster, CTAs of an SM, places)
        ("layer_norm", 8, 5120, (320, 1, 2, 3)),
        ("layer_norm", 8, 8192, (256, 2, 2, 2)),
        ("layer_norm", 64, 8192, (256, 2, 2, 2)),
        ("layer_norm", 8, 6656, (416, 1, 1, 2)),  # no halves of whole warps
        ("layer_norm", 64, 9216, (384, 1, 1, 2)),
        ("layer_norm", 8, 10240, (224, 2, 1, 2)),
        ("layer_norm", 16, 10240, (224, 2, 2, 3)),
        ("layer_norm", 64, 12288, (256, 2, 1, 2)),
        ("rms_norm", 8, 8192, (256, 2, 2, 2)),
        ("rms_norm", 64, 8192, (512, 1, 1, 2)),
        ("rms_norm", 8, 12288, (512, 1, 1, 1)),
    ],
)
def test_backward_rows_are_held_by_two_ctas_where_it_was_measured_to_win(norm, elements, cols, held):
    wanted = ("x", "weight", "bias") if norm == "layer_norm" else ("x", "weight")
    rows = (elements << 20) // cols
    first, *_ = plan(problem("backward", rows, cols, "bfloat16", norm, wanted=wanted), KNOWN[90]).steps
    spec = first.spec
    assert (spec.shape.threads, spec.cluster, spec.ctas_per_sm, spec.stages) == held
    assert first.grid[0] % spec.cluster == 0


@pytest.mark.parametrize(
    ("norm", "cols", "held"),
    [
        # (threads and packs of a row, CTAs of a cluster, rows of a CTA, CTAs of an SM, places)
        ("layer_norm", 301, (16, 3, 1, 12, 2, 3)),
        ("layer_norm", 517, (32, 3, 1, 6, 2, 3)),
        ("layer_norm", 1001, (64, 2, 1, 3, 2, 3)),
        ("layer_norm", 1053, (96, 2, 1, 5, 1, 3)),
        ("rms_norm", 1053, (96, 2, 1, 5, 1, 3)),
        ("layer_norm", 2001, (128, 2, 1, 3, 1, 3)),
        ("rms_norm", 27001, (352, 5, 2, 1, 1, 2)),
        ("layer_norm", 50257, (416, 2, 8, 1, 1, 4)),
    ],
)
def test_backward_rows_that_end_within_a_pack_are_kept_by_as_few_threads_as_won(norm, cols, held):
    wanted = ("x", "weight", "bias") if norm == "layer_norm" else ("x", "weight")
    rows = (64 << 20) // cols
    spec = plan(problem("backward", rows, cols, "bfloat16", norm, wanted=wanted), KNOWN[90]).steps[0].spec
    shape = spec.shape
    assert (shape.threads, shape.packs, spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, spec.stages) == held
    assert spec.rows_stay


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("rows", "cluster"), [(1, 8), (16, 8), (17, 1)])
def test_few_forward_rows_of_8192_columns_have_a_cluster_each(norm, rows, cluster):
    (step,) = plan(problem("forward", rows, 8192, "bfloat16", norm), KNOWN[90]).steps
    assert step.spec.cluster == cluster


@pytest.mark.parametrize(("cols", "stay"), [(64, True), (128, True), (256, False)])
def test_many_narrow_forward_rows_ask_for_weight_and_bias_with_x(cols, stay):
    rows = (64 << 20) // cols
    x = "bfloat16"
    (step,) = plan(problem("forward", rows, cols, x, weight=x, bias=x), KNOWN[90]).steps
    assert (step.spec.stages, step.spec.columns_stay) == (0, stay)


@pytest.mark.parametrize("device", [KNOWN[90], H100], ids=lambda device: device.name)
@pytest.mark.parametrize("cols", [768, 1600, 3776, 4352, 7424, 8192, 10240, 12288])
@pytest.mark.parametrize("elements", [4, 8, 64])
def test_backward_rows_leave_as_many_partial_rows_at_odd_addresses(elements, cols, device):
    """Or dweight would be added up in another order."""
    rows = (elements << 20) // cols
    changes = {"wanted": ("x", "weight", "bias")}
    plans = [
        plan(problem("backward", rows, cols, "bfloat16", aligned=aligned, **changes), device)
        for aligned in (True, False)
    ]
    assert len({(one.groups, one.steps[0].spec.rows_per_cta) for one in plans}) == 1


@pytest.mark.parametrize(
    ("norm", "elements", "cols", "together"),
    [
        # (threads of a CTA, CTAs of an SM, whether the next row is asked for early)
        ("layer_norm", 8, 192, (192, 2, False)),
        ("layer_norm", 2, 192, (128, 2, False)),
        ("rms_norm", 64, 768, (128, 2, False)),
        ("rms_norm", 8, 256, (256, 2, False)),
        ("rms_norm", 64, 256, (256, 2, True)),
    ],
)
def test_backward_rows_of_a_warp_share_a_cta_as_was_measured_to_win(norm, elements, cols, together):
    wanted = ("x", "weight", "bias") if norm == "layer_norm" else ("x", "weight")
    rows = (elements << 20) // cols
    spec = plan(problem("backward", rows, cols, "bfloat16", norm, wanted=wanted), KNOWN[90]).steps[0].spec
    assert (spec.threads, spec.ctas_per_sm, spec.ask_early) == together


@pytest.mark.parametrize(
    ("norm", "weight", "elements", "cols", "together"),
    [
        # (CTAs of a cluster, rows of a CTA, CTAs of an SM, places, whether the next row is asked for early)
        ("layer_norm", "bfloat16", 64, 768, (1, 7, 1, 2, False)),
        ("rms_norm", "bfloat16", 64, 768, (1, 3, 2, 2, False)),
        ("layer_norm", "float32", 64, 1600, (1, 3, 1, 2, False)),
        ("layer_norm", "float32", 8, 1600, (1, 2, 2, 2, False)),
        ("rms_norm", "float32", 64, 1728, (2, 1, 5, 2, False)),
        ("layer_norm", "float32", 64, 3776, (2, 1, 3, 2, False)),
        ("layer_norm", "float32", 8, 4288, (1, 2, 1, 2, False)),
        ("layer_norm", "bfloat16", 8, 704, (1, 4, 2, 2, False)),
        ("layer_norm", "bfloat16", 4, 704, (1, 6, 2, 2, False)),
        ("layer_norm", "bfloat16", 64, 4992, (1, 1, 1, 2, False)),
        ("rms_norm", "bfloat16", 64, 4992, (1, 1, 1, 2, False)),
        ("layer_norm", "bfloat16", 64, 7424, (1, 1, 1, 2, True)),
        ("layer_norm", "float32", 64, 7424, (1, 1, 1, 3, False)),
        ("rms_norm", "float32", 64, 7424, (1, 1, 1, 2, False)),
        ("layer_norm", "float32", 64, 8192, (4, 1, 3, 2, False)),
        ("layer_norm", "bfloat16", 64, 10240, (2, 1, 1, 2, False)),
    ],
)
def test_backward_rows_of_an_h100_are_so_many_at_once_as_are_few_bytes(norm, weight, elements, cols, together):
    problem = whole(norm, "backward", (elements << 20) // cols, cols, "bfloat16", weight)
    spec = plan(problem, H100).steps[0].spec
    assert (spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, spec.stages, spec.ask_early) == together
    assert spec.rows_stay


@pytest.mark.parametrize(
    ("cols", "weight", "elements", "of_an_h100", "of_an_h200"),
    [
        (1088, "float32", 64, 0, 2),
        (1088, "float32", 16, 3, 3),
        (2112, "float32", 64, 2, 2),
        (5056, "float32", 64, 0, 2),
        (7936, "float32", 64, 0, 1),
        (14336, "float32", 64, 1, 1),
        (16384, "bfloat16", 64, 0, 1),
        (16384, "bfloat16", 16, 1, 1),
        (32768, "bfloat16", 64, 1, 1),
    ],
)
def test_many_forward_rows_wait_in_registers_of_an_h100(cols, weight, elements, of_an_h100, of_an_h200):
    problem = whole("layer_norm", "forward", (elements << 20) // cols, cols, "bfloat16", weight)
    places = [plan(problem, device).steps[0].spec.stages for device in (H100, KNOWN[90])]
    assert places == [of_an_h100, of_an_h200]


@pytest.mark.parametrize(
    ("norm", "weight", "elements", "cols", "held"),
    [
        # (CTAs of a cluster, threads of a CTA, CTAs of an SM, places)
        ("layer_norm", "bfloat16", 64, 32768, (8, 64, 4, 1)),
        ("layer_norm", "float32", 64, 24576, (8, 64, 5, 1)),
        ("layer_norm", "bfloat16", 64, 33024, (8, 64, 5, 2)),
        ("layer_norm", "float32", 64, 33024, (8, 64, 4, 2)),
        ("rms_norm", "bfloat16", 64, 65536, (16, 64, 5, 2)),
        ("layer_norm", "float32", 64, 65536, (16, 64, 4, 3)),
        ("layer_norm", "bfloat16", 64, 262144, (16, 256, 2, 2)),
        ("layer_norm", "bfloat16", 8, 65536, (8, 128, 4, 2)),
    ],
)
def test_long_forward_rows_of_an_h100_ask_for_few_bytes_at_once(norm, weight, elements, cols, held):
    """By as many threads as an H200's have, so that a row has the same bits."""
    problem = whole(norm, "forward", (elements << 20) // cols, cols, "bfloat16", weight)
    spec, of_an_h200 = (plan(problem, device).steps[0].spec for device in (H100, KNOWN[90]))
    assert (spec.cluster, spec.shape.threads, spec.ctas_per_sm, spec.stages) == held
    assert spec.shape.order == of_an_h200.shape.order


@pytest.mark.parametrize(
    ("bandwidth", "arch", "slow"), [(3352, 90, True), (4916, 90, False), (0, 90, False), (2039, 80, False)]
)
def test_memory_is_slow_where_an_sm_has_what_an_h100_has(bandwidth, arch, slow):
    assert replace(KNOWN[arch], bandwidth=bandwidth).memory_is_slow == slow


@pytest.mark.parametrize(("rows", "row_groups"), [(1, 1), (2, 1), (3, 8), (64, 32)])
def test_a_thread_adds_up_one_row_and_two_alone(rows, row_groups):
    (step,) = plan(problem("backward", rows, 1024, "bfloat16"), KNOWN[90]).steps
    assert step.spec.columns.rows_per_cta == row_groups


@pytest.mark.parametrize("cols", [5120, 16384])
@pytest.mark.parametrize(("kind", "in_a_ring"), [("full", True), ("per_row", False)])
def test_rows_wait_in_a_ring_beside_what_is_as_large_as_they_are(cols, kind, in_a_ring):
    """A number for each row had that plan too, and took 1.26 times as long as without."""
    operation = Operation("layer_norm", trace(lambda xhat, weight, bias, beside: (xhat * weight + bias) * beside))
    dtypes = dict.fromkeys(("x", "y", *operation.operands), "bfloat16")
    problem = forward_problem(operation, 2**26 // cols, cols, dtypes, kinds={"beside": kind})
    assert (plan(problem, KNOWN[90]).steps[0].spec.stages > 1) == in_a_ring


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_is_bounded(dtype, arch):
    """4 x SMs x cols (whole lines of 32) x 8 bytes, whatever the rows; nothing where there is nothing to add up."""
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


@pytest.mark.parametrize("sm_margin", [0, 1, 20, 131])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_margin_leaves_multiprocessors_free(direction, sm_margin):
    """No more CTAs than the others hold at once (2048 threads each), or one cluster."""
    device = KNOWN[90]
    for cols in ALL_COLUMNS:
        solution = plan(problem(direction, 10**6, cols, "bfloat16", sm_margin=sm_margin), device)
        step = next(step for step in solution.steps if step.spec.kernel != "column_gradients")
        ctas = step.grid[0] * step.grid[1]
        fitting = (device.sms - sm_margin) * (2048 // step.spec.threads)
        assert sm_margin == 0 or ctas <= max(fitting, step.spec.cluster), (cols, solution.describe())


def test_few_rows_with_a_margin_have_no_kernel_that_takes_all_multiprocessors():
    def kernels(sm_margin: int) -> list[str]:
        solution = plan(problem("backward", 64, 1024, "bfloat16", sm_margin=sm_margin), KNOWN[90])
        return [step.spec.kernel for step in solution.steps]

    assert kernels(0) == ["backward_few"]
    assert kernels(20) == ["backward", "sum_partials"]


def test_few_rows_whose_gradient_may_lie_where_dy_does_are_two_launches():
    """Their columns are read before dx is written, and dweight has the bits that it has elsewhere."""
    apart = plan(problem("backward", 64, 1024, "bfloat16"), KNOWN[90])
    over = plan(problem("backward", 64, 1024, "bfloat16", overwrites=True), KNOWN[90])
    assert [step.spec for step in over.steps] == [apart.steps[0].spec.columns, apart.steps[0].spec.rows]
    assert (apart.may_overwrite, over.may_overwrite) == (False, True)
    assert sum(step.grid[0] for step in over.steps) == apart.steps[0].grid[0]


def few_rows(arch: int, **changes: Any) -> list[tuple[int, int, Step]]:
    """(rows, cols, the launch) of each backward pass that is one for few rows."""
    found = []
    for dtype, cols, rows in itertools.product(DTYPES, ALL_COLUMNS, (1, 7, 100, 500, 2000)):
        step = plan(problem("backward", rows, cols, dtype, **changes), KNOWN[arch]).steps[0]
        if isinstance(step.spec, FewRowsSpec):
            found.append((rows, cols, step))
    assert {rows for rows, *_ in found} == {1, 7, 100, 500, 2000}
    return found


def test_columns_of_few_rows_are_added_up_in_the_same_order_wherever_they_lie():
    for (*_, one), (*_, odd) in zip(few_rows(90), few_rows(90, aligned=False), strict=True):
        assert not odd.spec.rows.aligned
        assert odd.spec.columns.shape == one.spec.columns.shape
        assert odd.spec.columns.rows_per_cta == one.spec.columns.rows_per_cta


@pytest.mark.parametrize("arch", KNOWN)
def test_few_rows_have_threads_for_every_column_and_every_row(arch):
    for rows, cols, step in few_rows(arch):
        columns, of_rows = step.spec.columns, step.spec.rows
        assert columns.shape.pack * columns.shape.threads * step.spec.column_ctas >= cols
        assert columns.threads == of_rows.threads == step.spec.threads <= 1024
        ctas = step.grid[0] - step.spec.column_ctas
        assert ctas % step.spec.cluster == 0
        assert rows <= ctas // step.spec.cluster * of_rows.rows_per_cta < rows + of_rows.rows_per_cta


ALIGNMENT = [
    # (cols, x_stride, y_stride, pointers aligned, vectors expected) of float16: packs of 8 columns
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
    """x read, y written, weight and bias read, each once."""
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
    """x and dy read, dx written, weight read, dweight and dbias written, each once; what nobody needs is not read."""
    assert problem("backward", 8, 100, "float16", weight="float32", wanted=wanted).bytes_moved == expected
