"""The bars of the bench, and how cases count."""

from __future__ import annotations

import pytest
from bench_lines import BACKWARD, WIDE, lines_of, results_of

from bench import report
from bench.bars import bars
from bench.results import OURS, ROOF, Results, class_of, distinct, group
from bench.suites import LARGE, Case

BF16 = "bfloat16"
LONG_ROW = 12288


@pytest.mark.parametrize(
    ("suite", "case", "roof", "peer", "ours", "holds"),
    [
        ("widths", WIDE, 96.0, None, 100.7, True),
        ("widths", WIDE, 96.0, None, 100.9, False),  # 100 + 0.8
        ("widths", BACKWARD, 95.0, None, 102.4, True),
        ("widths", BACKWARD, 95.0, None, 102.6, False),  # 100 + 2.5
        ("widths", BACKWARD, 95.0, None, None, False),  # refused
        ("long", Case("rms_norm", "forward", 5462, LONG_ROW, BF16), 94.0, None, 100.1, False),
        ("long", Case("rms_norm", "backward", 5462, LONG_ROW, BF16), 90.0, None, 99.9, True),
        ("long", Case("rms_norm", "backward", 256, 262144, BF16), 85.0, None, 99.9, True),
        ("long", Case("rms_norm", "backward", 256, 262144, BF16), 85.0, None, 100.1, False),
        ("few", Case("rms_norm", "forward", 8, 512, BF16), 1.0, 2.0, 2.09, True),  # 0.1 us is more than 2%
        ("few", Case("rms_norm", "forward", 8, 512, BF16), 1.0, 2.0, 2.11, False),
        ("few", Case("rms_norm", "forward", 2048, 16384, BF16), 1.0, 100.0, 101.9, True),
        ("map", Case("rms_norm", "forward", 2048, 16384, BF16), 1.0, 100.0, 102.1, False),
        ("few", Case("rms_norm", "forward", 2048, 16384, BF16), 1.0, 100.0, 102.1, False),
        ("heads", Case("rms_norm", "backward", 131072, 64, BF16, heads=16), 85.0, None, 100.1, False),
        ("odd", Case("rms_norm", "forward", 67000, 1001, BF16), 80.0, None, 99.9, True),
        ("roof", Case("rms_norm", "forward", 16384, 4096, "float16"), 96.0, None, 101.0, False),
        ("roof", Case("rms_norm", "forward", 2097152, 32, "float16"), 96.0, None, 901.0, None),  # no bar so narrow
    ],
)
def test_a_bar_holds_or_does_not(suite, case, roof, peer, ours, holds):
    peers = {} if peer is None else {"torch": peer, "Liger": peer + 50}
    results = results_of(lines_of(case, **{ROOF: roof, OURS: ours, **peers}), suite)
    judging = [bar for bar in bars(results) if bar.cases]
    if peer is not None:  # the bar of all cases with peers has the case too
        assert len(judging) == 2
        assert "torch" in judging[0].worst[0][1]
    assert [bar.holds for bar in judging[:1]] == ([] if holds is None else [holds])
    assert all(f"{case.rows} x {case.cols}" in bar.worst[0][1] for bar in judging)


def test_one_slow_case_fails_a_bar_and_the_worst_five_are_named():
    cases = [Case("rms_norm", "forward", LARGE // cols, cols, BF16) for cols in (256, 512, 768, 1024, 1280, 4096)]
    lines = [line for case in cases for line in lines_of(case, **{ROOF: 96.0, OURS: 100.0 + 4 * (case.cols == 1024)})]
    bar = bars(results_of(lines, "widths"))[0]
    assert (bar.holds, bar.cases, bar.held, len(bar.worst)) == (False, 6, 5, 5)
    ratio, where = bar.worst[0]
    assert "65536 x 1024" in where
    assert ratio == pytest.approx(104 / 100.8)


def test_a_bar_counts_a_case_once_by_its_worst_measurement():
    runs = [group(lines_of(WIDE, **{ROOF: 96.0, OURS: ours}), "widths") for ours in (100.0, 102.0, 99.0)]
    bar = bars(Results({}, [entry for run in runs for entry in run]))[0]
    assert (bar.cases, bar.held, bar.worst[0][0]) == (1, 0, pytest.approx(102 / 100.8))


@pytest.mark.parametrize(("behind", "of", "holds"), [(2, 100, True), (3, 100, False), (0, 1, True)])
def test_behind_in_two_per_cent_of_cases_is_allowed(behind, of, holds):
    cases = [Case("rms_norm", "forward", 8192, 8 * (i + 1), BF16) for i in range(of)]
    lines = [
        line for i, case in enumerate(cases) for line in lines_of(case, cunorm=100.0, torch=90 if i < behind else 110)
    ]
    (bar,) = [bar for bar in bars(results_of(lines, "anchors")) if bar.cases]
    assert bar.holds is holds


def test_a_case_counts_once_and_by_its_worst_measurement():
    other = Case("layer_norm", "forward", 8, 4096, BF16)
    small = group(lines_of(other, cunorm=2.0, torch=1.5) + lines_of(WIDE, cunorm=100.0, torch=99.0), "small")
    anchors = group(lines_of(other, cunorm=2.0, torch=2.5) + lines_of(WIDE, cunorm=100.0), "anchors")
    results = Results({}, [*small, *anchors])
    assert {entry.case: entry.speedup for entry in distinct(results.measured)} == {other: 0.75, WIDE: 0.99}
    text = report.losses(results)
    assert "Of 2 distinct cases with a peer" in text
    assert "in 1:" in text
    assert "| few rows | 1 | 1 | 0.75, 0.75 |" in text
    assert "| widths | 1 | 0 | 0.99, 0.99 |" in text
    assert f"| {other} | few rows | 2.00 | 1.50 torch | 0.75 |" in text


@pytest.mark.parametrize(
    ("rows", "cols", "heads", "expected"),
    [
        (2048, 512, 0, "few rows"),
        (8192, 768, 0, "widths"),
        (5462, 12288, 0, "long rows"),
        (256, 262144, 0, "long rows"),
        (67000, 1001, 0, "odd widths"),
        (131072, 128, 16, "heads"),
    ],
)
def test_the_class_of_a_case(rows, cols, heads, expected):
    assert class_of(Case("rms_norm", "forward", rows, cols, BF16, heads=heads)) == expected
