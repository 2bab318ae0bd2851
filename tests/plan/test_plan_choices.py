"""Which plan rows of a length, number and dtype have, where it was measured to win. Nothing is launched, and no GPU is
needed.
"""

from __future__ import annotations

import pytest
from problems import problem

from cunorm.expression import trace
from cunorm.kernel.device import H100, KNOWN
from cunorm.operation import Operation
from cunorm.plan.plain_problems import float8_problem, whole
from cunorm.plan.plan import plan
from cunorm.plan.problem import forward_problem


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


@pytest.mark.parametrize(
    ("norm", "rows", "cols", "held"),
    [
        # (kernel, CTAs of a cluster, threads of a CTA, CTAs of an SM)
        ("layer_norm", 16, 8192, ("forward_spread", 8, 64, 1)),
        ("layer_norm", 17, 8192, ("forward", 4, 64, 1)),
        ("rms_norm", 34, 8192, ("forward", 1, 256, 3)),
        ("layer_norm", 1, 6144, ("forward", 4, 64, 1)),
        ("rms_norm", 33, 6144, ("forward", 4, 64, 1)),
        ("layer_norm", 1, 5632, ("forward_spread", 4, 64, 1)),
        ("rms_norm", 1, 5632, ("forward", 1, 256, 3)),
        ("layer_norm", 66, 7168, ("forward_spread", 2, 96, 1)),
        ("layer_norm", 1, 4480, ("forward", 1, 192, 4)),
        ("layer_norm", 16, 4096, ("forward_spread", 4, 128, 1)),
        ("layer_norm", 1, 4088, ("forward", 1, 128, 5)),
        ("rms_norm", 1, 4096, ("forward", 1, 128, 6)),
        ("rms_norm", 64, 10240, ("forward", 4, 64, 2)),
        ("layer_norm", 128, 12288, ("forward", 2, 256, 2)),
        ("layer_norm", 8, 16384, ("forward_spread", 8, 128, 1)),
        ("layer_norm", 64, 16384, ("forward", 4, 128, 2)),
    ],
)
def test_few_forward_rows_are_held_by_clusters_where_it_was_measured_to_win(norm, rows, cols, held):
    (step,) = plan(problem("forward", rows, cols, "bfloat16", norm), KNOWN[90]).steps
    spec = step.spec
    assert (spec.kernel, spec.cluster, spec.threads, spec.ctas_per_sm) == held


@pytest.mark.parametrize(("cols", "stay"), [(64, True), (128, True), (256, False)])
def test_many_narrow_forward_rows_ask_for_weight_and_bias_with_x(cols, stay):
    rows = (64 << 20) // cols
    x = "bfloat16"
    (step,) = plan(problem("forward", rows, cols, x, weight=x, bias=x), KNOWN[90]).steps
    assert (step.spec.stages, step.spec.columns_stay) == (0, stay)


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
        # (CTAs of a cluster, rows of a CTA, CTAs of an SM, places, whether a thread keeps its row, and asks for
        # the next one early)
        ("layer_norm", "bfloat16", 64, 768, (1, 7, 1, 2, True, False)),
        ("rms_norm", "bfloat16", 64, 768, (1, 3, 2, 2, True, False)),
        ("layer_norm", "float32", 64, 1600, (1, 3, 1, 2, True, False)),
        ("layer_norm", "float32", 8, 1600, (1, 2, 2, 2, True, False)),
        ("rms_norm", "float32", 64, 1728, (2, 1, 5, 2, True, False)),
        ("layer_norm", "float32", 64, 3776, (2, 1, 3, 2, True, False)),
        ("layer_norm", "float32", 8, 4288, (1, 2, 1, 2, True, False)),
        ("layer_norm", "bfloat16", 8, 704, (1, 4, 2, 2, True, False)),
        ("layer_norm", "bfloat16", 4, 704, (1, 6, 2, 2, True, False)),
        ("layer_norm", "bfloat16", 64, 4992, (1, 1, 1, 2, True, False)),
        ("rms_norm", "bfloat16", 64, 4992, (1, 1, 1, 2, True, False)),
        ("layer_norm", "bfloat16", 64, 7424, (1, 1, 1, 2, True, True)),
        ("layer_norm", "float32", 64, 7424, (1, 1, 1, 3, True, False)),
        ("rms_norm", "float32", 64, 7424, (1, 1, 1, 2, True, False)),
        ("layer_norm", "float32", 64, 8192, (4, 1, 3, 2, True, False)),
        ("layer_norm", "bfloat16", 64, 10240, (2, 1, 1, 2, True, False)),
        ("layer_norm", "bfloat16", 8, 4096, (1, 2, 1, 2, True, False)),
        ("layer_norm", "float32", 8, 4608, (1, 2, 1, 2, True, False)),
        ("layer_norm", "float32", 64, 16384, (8, 1, 3, 2, True, False)),
        ("rms_norm", "bfloat16", 64, 24576, (4, 1, 1, 2, True, False)),
        ("layer_norm", "bfloat16", 64, 36864, (16, 1, 3, 2, True, False)),
        ("layer_norm", "bfloat16", 8, 57344, (8, 1, 1, 3, False, False)),
        ("rms_norm", "float32", 64, 73728, (16, 1, 2, 2, True, False)),
        ("rms_norm", "bfloat16", 64, 131072, (16, 1, 1, 2, True, False)),
    ],
)
def test_backward_rows_of_an_h100_are_so_many_at_once_as_are_few_bytes(norm, weight, elements, cols, together):
    problem = whole(norm, "backward", (elements << 20) // cols, cols, "bfloat16", weight)
    spec, of_an_h200 = (plan(problem, device).steps[0].spec for device in (H100, KNOWN[90]))
    waits = spec.stages, spec.rows_stay, spec.ask_early
    assert (spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, *waits) == together
    assert spec.shape.order == of_an_h200.shape.order  # so that dx has the same bits


@pytest.mark.parametrize(
    ("norm", "dtype", "cols", "together"),
    [
        ("layer_norm", "float32", 1024, (2, 1, 5, False)),
        ("rms_norm", "float32", 2048, (1, 1, 1, False)),
        ("layer_norm", "float32", 3072, (1, 1, 1, False)),
        ("layer_norm", "float32", 16384, (16, 1, 3, False)),
        ("rms_norm", "bfloat16", 1024, (1, 3, 2, True)),
        ("rms_norm", "float16", 256, (1, 12, 2, True)),
        ("rms_norm", "bfloat16", 4096, (1, 2, 1, True)),
    ],
)
def test_so_are_many_of_float32_and_of_rms_norms_powers_of_two(norm, dtype, cols, together):
    spec = plan(whole(norm, "backward", (64 << 20) // cols, cols, dtype, dtype), H100).steps[0].spec
    assert (spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, spec.ask_early) == together


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
    ("weight", "elements", "cols", "held"),
    [
        # (CTAs of a cluster, CTAs of an SM, places, whether a thread keeps its row)
        ("bfloat16", 8, 4480, (2, 8, 3, False)),
        ("float32", 8, 4480, (2, 6, 3, False)),
        ("float32", 8, 4864, (1, 4, 3, False)),
        ("bfloat16", 8, 7040, (2, 5, 3, False)),
        ("float32", 8, 8192, (2, 4, 1, True)),
        ("bfloat16", 4, 4480, (1, 8, 0, False)),
        ("float32", 4, 4480, (2, 5, 1, True)),
        ("bfloat16", 16, 7040, (2, 5, 1, True)),
    ],
)
def test_forward_rows_of_some_turns_wait_in_three_places_on_an_h100(weight, elements, cols, held):
    problem = whole("layer_norm", "forward", (elements << 20) // cols, cols, "bfloat16", weight)
    spec = plan(problem, H100).steps[0].spec
    assert (spec.cluster, spec.ctas_per_sm, spec.stages, spec.rows_stay) == held


@pytest.mark.parametrize(
    ("norm", "weight", "elements", "cols", "held"),
    [
        # (CTAs of a cluster, threads of a CTA, CTAs of an SM, places, whether the next row is asked for early)
        ("layer_norm", "bfloat16", 64, 32768, (8, 64, 4, 1, True)),
        ("layer_norm", "float32", 64, 24576, (8, 64, 5, 1, True)),
        ("layer_norm", "bfloat16", 64, 33024, (8, 64, 5, 2, False)),
        ("layer_norm", "float32", 64, 33024, (8, 64, 4, 2, True)),
        ("rms_norm", "bfloat16", 64, 65536, (16, 64, 5, 2, False)),
        ("rms_norm", "float32", 64, 49152, (8, 96, 3, 2, False)),
        ("layer_norm", "float32", 64, 49152, (16, 64, 6, 2, True)),
        ("layer_norm", "float32", 64, 65536, (16, 64, 4, 3, False)),
        ("layer_norm", "bfloat16", 64, 262144, (16, 256, 2, 2, False)),
        ("layer_norm", "bfloat16", 8, 65536, (8, 128, 4, 2, False)),
    ],
)
def test_long_forward_rows_of_an_h100_ask_for_few_bytes_at_once(norm, weight, elements, cols, held):
    """By as many threads as an H200's have, so that a row has the same bits."""
    problem = whole(norm, "forward", (elements << 20) // cols, cols, "bfloat16", weight)
    spec, of_an_h200 = (plan(problem, device).steps[0].spec for device in (H100, KNOWN[90]))
    assert (spec.cluster, spec.shape.threads, spec.ctas_per_sm, spec.stages, spec.ask_early) == held
    assert spec.shape.order == of_an_h200.shape.order


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
