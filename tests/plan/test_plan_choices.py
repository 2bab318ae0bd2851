"""Which launch is chosen for rows of a length, number and dtype. These tests launch nothing and need no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import DEVICES, problem

from cunorm.kernel.device import H100, KNOWN
from cunorm.plan import tables
from cunorm.plan.plain_problems import float8_problem, whole
from cunorm.plan.plan import plan
from cunorm.plan.resources import is_legal
from cunorm.plan.spec import FewRowsSpec

H200 = KNOWN[90]
UNMEASURED = replace(H200, name="unmeasured", bandwidth=2000)  # of a class that has no table


# launch is (CTAs of a cluster, rows of a CTA, CTAs of an SM, stages).
@pytest.mark.parametrize(
    ("device", "norm", "direction", "weight", "rows", "cols", "launch"),
    [
        (H200, "layer_norm", "forward", "bfloat16", 1024, 8192, (2, 1, 5, 1)),
        (H200, "layer_norm", "forward", "float32", 6144, 4224, (1, 1, 3, 2)),
        (H200, "rms_norm", "forward", "bfloat16", 5243, 1600, (1, 4, 5, 2)),
        (H200, "layer_norm", "forward", "bfloat16", 16, 8192, (8, 1, 1, 0)),
        (H200, "rms_norm", "forward", "bfloat16", 32768, 600, (1, 8, 3, 0)),
        (H100, "rms_norm", "forward", "bfloat16", 32768, 600, (1, 8, 6, 2)),
        (H200, "layer_norm", "backward", "bfloat16", 819, 10240, (2, 1, 1, 2)),
        (H100, "layer_norm", "forward", "bfloat16", 1872, 4480, (2, 1, 8, 3)),
        (H100, "layer_norm", "forward", "bfloat16", 2048, 32768, (8, 1, 4, 1)),
        (H100, "rms_norm", "backward", "bfloat16", 87381, 768, (1, 3, 2, 2)),
        (H100, "layer_norm", "backward", "float32", 4096, 16384, (8, 1, 3, 2)),
        (UNMEASURED, "layer_norm", "forward", "bfloat16", 1024, 8192, (1, 1, 2, 2)),
        (UNMEASURED, "layer_norm", "forward", "bfloat16", 64, 8192, (4, 1, 2, 0)),
        (UNMEASURED, "rms_norm", "forward", "bfloat16", 128, 16384, (2, 1, 2, 0)),
        (UNMEASURED, "rms_norm", "backward", "bfloat16", 87381, 768, (1, 4, 2, 2)),
    ],
)
def test_rows_are_run_as_was_measured_to_win_on_the_class_of_gpus(device, norm, direction, weight, rows, cols, launch):
    spec = plan(whole(norm, direction, rows, cols, "bfloat16", weight), device).steps[0].spec
    assert (spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, spec.stages) == launch


@pytest.mark.parametrize(
    ("name", "norm", "cols", "weight", "stages"),
    [
        ("A100", "layer_norm", 8192, "float32", 1),
        ("H200", "layer_norm", 8192, "float32", 1),
        ("H200", "layer_norm", 8192, "bfloat16", 2),  # no CTA more would fit
        ("H200", "rms_norm", 8192, "bfloat16", 2),
        ("B200", "layer_norm", 8192, "float32", 2),
    ],
)
def test_the_rule_gives_up_a_stage_for_more_ctas(name, norm, cols, weight, stages):
    device = replace(DEVICES[name], bandwidth=0)  # no table serves it
    spec = plan(whole(norm, "forward", 2048, cols, "bfloat16", weight), device).steps[0].spec
    assert spec.stages == stages


@pytest.mark.parametrize(
    ("norm", "cols", "weight", "waits_in_a_ring"),
    [
        ("rms_norm", 300, "bfloat16", False),
        ("rms_norm", 3420, "float32", False),
        ("rms_norm", 3424, "bfloat16", True),  # at aligned addresses
        ("layer_norm", 300, "bfloat16", False),
        ("layer_norm", 300, "float32", True),
        ("layer_norm", 1001, "bfloat16", True),  # four vectors a thread
        ("layer_norm", 3420, "bfloat16", True),  # of more threads than a warp
    ],
)
def test_rows_at_odd_addresses_wait_in_a_ring_only_where_it_wins(norm, cols, weight, waits_in_a_ring):
    spec = plan(whole(norm, "forward", 2**24 // cols, cols, "bfloat16", weight), H200).steps[0].spec
    assert bool(spec.stages) == waits_in_a_ring
    assert spec.weights_in_registers


@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_order_in_which_a_row_is_added_up_is_the_same_by_every_table(norm, direction, weight, monkeypatch):
    """The launches of all tables are legal too."""
    used = 0
    for cols in (64, 768, 1024, 3072, 4096, 5120, 8192, 12288, 16384, 28672, 40960, 65536, 131072):
        for rows in (1, 60, 300, 2000, 2**23 // cols, 2**26 // cols):
            problem = whole(norm, direction, rows, cols, "bfloat16", weight)
            (of_an_h200, *_), (of_an_h100, *_), (by_rule, *_) = (
                plan(problem, device).steps for device in (H200, H100, UNMEASURED)
            )
            specs = [getattr(step.spec, "rows", step.spec) for step in (of_an_h200, of_an_h100, by_rule)]
            assert len({spec.shape.order for spec in specs}) == 1
            for step, device in zip((of_an_h200, of_an_h100, by_rule), (H200, H100, UNMEASURED), strict=True):
                assert isinstance(step.spec, FewRowsSpec) or is_legal(step.spec, device)
            used += len(set(specs)) > 1
    assert used > 10, "no table was used"


@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_the_cost_rule_spreads_few_rows_over_sms_as_the_tables_do(norm, weight):
    """Rows that are too few for the SMs are run the same in nine of ten cases, if every thread has whole vectors."""
    alike = []
    for cols in (2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 20480, 24576, 28672):
        for rows in (1, 8, 32, 50, 64, 90, 128):
            problem = whole(norm, "forward", rows, cols, "bfloat16", weight)
            of_table, by_rule = (plan(problem, device).steps[0].spec for device in (H200, UNMEASURED))
            alike.append((of_table.kernel, of_table.shape) == (by_rule.kernel, by_rule.shape))
    assert sum(alike) >= 0.9 * len(alike)


@pytest.mark.parametrize("granularity", ["row", 128, "tensor"])
def test_a_margin_takes_no_launch_with_a_cta_for_each_pair_of_rows(granularity):
    arguments = ("layer_norm", 32768, 2048, "bfloat16", "bfloat16", "bfloat16")
    for margin, kernel in ((0, "forward_pairs"), (4, "forward")):
        of_fp8 = float8_problem(*arguments, y8="float8_e4m3fn", granularity=granularity, sm_margin=margin)
        assert plan(of_fp8, H200).steps[0].spec.kernel == kernel


@pytest.mark.parametrize(
    ("bandwidth", "sms", "served"),
    [(4900, 132, True), (4500, 132, True), (3350, 132, True), (600, 16, True), (4100, 132, False), (0, 132, False)],
)
def test_a_table_serves_the_gpus_of_its_class(bandwidth, sms, served):
    """A class has one architecture and, within 10%, one bandwidth per SM. So a slice of a GPU is in its GPU's class."""
    assert (tables.tables_of(replace(H200, bandwidth=bandwidth, sms=sms)) != ()) == served


@pytest.mark.parametrize(
    ("norm", "cols", "held"),
    [
        # held is (threads and vectors of a row, CTAs of a cluster, rows of a CTA, CTAs of an SM, stages).
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
    assert (shape.threads, shape.vectors, spec.cluster, spec.rows_per_cta, spec.ctas_per_sm, spec.stages) == held
    assert spec.rows_in_registers


@pytest.mark.parametrize(
    ("norm", "elements", "cols", "together"),
    [
        # together is (threads of a CTA, CTAs of an SM, whether the next row is prefetched).
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
    assert (spec.threads, spec.ctas_per_sm, spec.prefetch) == together


@pytest.mark.parametrize(("rows", "row_groups"), [(1, 1), (2, 1), (3, 8), (64, 32)])
def test_a_thread_adds_up_one_row_and_two_alone(rows, row_groups):
    (step,) = plan(problem("backward", rows, 1024, "bfloat16"), KNOWN[90]).steps
    assert step.spec.columns.rows_per_cta == row_groups
