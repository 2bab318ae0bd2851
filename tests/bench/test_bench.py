"""The suites, providers and sizes of the bench, without a GPU."""

from __future__ import annotations

import sys

import pytest

from bench import providers, suites, timing
from bench.__main__ import main
from bench.results import case_of, head
from bench.suites import LARGE, MEGA, Case, drawn, parse_sizes


def test_sizes_are_lists_and_doublings():
    assert parse_sizes(["32:256"]) == [32, 64, 128, 256]
    assert parse_sizes(["3:13", "12"]) == [3, 6, 12]
    assert parse_sizes([]) == []


@pytest.mark.parametrize("text", ["0", "a", "8:4", "1:2:3", "", "-4"])
def test_a_bad_size_says_what_to_write(text):
    with pytest.raises(ValueError, match=r"0 < a <= b; got .*Write 4096"):
        parse_sizes([text])


def test_bytes_of_an_operation():
    matrix, row = 16 * 1024, 1024
    assert Case("layer_norm", "forward", 16, 1024, "bfloat16").bytes_moved == 2 * (2 * matrix + 2 * row)
    assert Case("rms_norm", "forward", 16, 1024, "float32").bytes_moved == 4 * (2 * matrix + row)
    # x, dy, dx; weight, dweight, dbias
    assert Case("layer_norm", "backward", 16, 1024, "float16").bytes_moved == 2 * (3 * matrix + 3 * row)
    assert Case("rms_norm", "backward", 16, 1024, "float16").bytes_moved == 2 * (3 * matrix + 2 * row)


def test_suites_hold_what_the_bars_ask_for():
    roof = suites.suite("roof")
    assert len(roof) == len(set(roof)) == 2 * 2 * 3 * 14
    assert all(case.elements >= LARGE for case in roof)
    triton = {case.cols for case in suites.suite("triton") if case.direction == "backward"}
    assert (min(triton), max(triton), len(triton)) == (1024, 15872, 30)
    assert {(case.rows, case.cols) for case in suites.suite("small")} == {
        (rows, cols) for rows in (1, 32, 512) for cols in (1024, 4096, 16384)
    }
    anchors = {(case.op, case.direction, case.rows, case.cols, case.dtype) for case in suites.suite("anchors")}
    assert ("layer_norm", "backward", 4096, 12288, "float16") in anchors
    assert ("layer_norm", "forward", 64, 262144, "bfloat16") in anchors
    assert ("rms_norm", "backward", 16384, 65536, "bfloat16") in anchors


@pytest.mark.parametrize(
    ("name", "columns", "first", "last", "sizes"),
    [
        ("widths", 125, 256, 8192, (MEGA, 8 * MEGA, LARGE)),
        ("long", 22, 12288, 262144, (LARGE,)),
        ("odd", 53, 1001, 50257, (LARGE,)),
        ("heads", 4, 64, 256, ()),
        ("few", 6, 512, 16384, ()),
    ],
)
def test_suites_of_both_norms_and_directions(name, columns, first, last, sizes):
    cases = suites.suite(name)
    assert len(cases) == len(set(cases))
    widths = sorted({case.cols for case in cases})
    assert (len(widths), widths[0], widths[-1]) == (columns, first, last)
    assert {(case.op, case.direction) for case in cases} == {(o, d) for o in suites.OPS for d in suites.DIRECTIONS}
    for case in cases:
        assert not sizes or any(abs(case.elements - size) < case.cols for size in sizes)
    # About a third of the cases has a float32 weight, in each panel of a picture too.
    for op in suites.OPS:
        of_op = [bool(case.weight) for case in cases if case.op == op and case.direction == "backward"]
        assert 0.2 < sum(of_op) / len(of_op) < 0.51


def test_a_step_makes_the_long_rows_finer():
    assert {case.cols for case in suites.suite("long", 4096)} == {*range(12288, 262145, 4096)}


def test_drawing_keeps_both_norms_and_directions_together_and_repeats_itself():
    cases = suites.suite("few")
    some = drawn(cases, 5, seed=1)
    assert some == drawn(cases, 5, seed=1) != drawn(cases, 5, seed=2)
    assert len(some) == 4 * len({case.shape for case in some}) == 20
    assert some == drawn(cases, None, seed=1)[:20]  # more time measures more of the same order
    assert sorted(map(str, drawn(cases, None, seed=3))) == sorted(map(str, cases))


@pytest.mark.parametrize(
    "case",
    [
        Case("layer_norm", "forward", 3, 5, "float32"),
        Case("layer_norm", "forward", 3, 5, "float32", 10.0),
        Case("rms_norm", "backward", 32, 64, "bfloat16", weight="float32", heads=16),
    ],
    ids=str,
)
def test_a_line_names_its_case(case):
    assert case_of(head(case)) == case


def test_rotating_buffers_pass_through_more_than_the_cache():
    for size in (1 << 20, 1 << 24, 1 << 30):
        assert timing.buffers_needed(size) * size >= 4 * timing.L2_BYTES
        assert timing.is_cold(size)
    assert not timing.is_cold(4096)


def test_every_provider_is_measured_or_says_why_not(monkeypatch):
    for library in ("torch", "jax", "cupy"):
        monkeypatch.setitem(sys.modules, library, None)  # importing it raises ImportError
    everybody = providers.all_providers()
    available, missing = providers.available(everybody)
    assert available == []
    assert list(missing) == [provider.name for provider in everybody]
    assert "torch" in missing["Liger"]
    assert "--triton-tutorial" in missing["Triton tutorial"]


def test_an_unknown_provider_is_refused(capsys):
    assert main(["run", "--providers", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err


def test_shares_of_products_in_8_bits():
    """A contender that failed has no share, and without a base nobody has."""
    from bench import linear_fp8_times

    times = {"roof": 20.0, "rows": 25.0, "columns": "out of memory"}
    assert linear_fp8_times.shares(times, "roof") == {"rows": 0.8}
    assert linear_fp8_times.shares({"rows": 25.0}, "roof") == {}
    assert linear_fp8_times.bytes_of_cast(8192, 4096) == 3 << 25
    assert linear_fp8_times.bytes_of_product(16, 32, 48) == 16 * 32 + 48 * 32 + 2 * 16 * 48


def test_products_in_8_bits_are_of_the_shapes_of_the_linear():
    pytest.importorskip("torch")
    from bench import linear, linear_fp8

    assert linear_fp8.SHAPES == linear.SHAPES


def test_the_slower_rank_counts():
    from bench import linear_parallel

    times = linear_parallel.slower([{"norm": 16.0, "product": 500.0}, {"norm": 17.0, "product": 490.0}])
    assert times == {"norm": 17.0, "product": 500.0}
    assert linear_parallel.limit({**times, "gather": 91.0}, "norm", "product", "gather") == 542.0
    assert linear_parallel.limit({**times, "gather": 600.0}, "norm", "product", "gather") == 647.0
