"""The bench, without a GPU: what is measured, what counts as right, what a bar says, what README is made of."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy
import pytest
from nvrtc import needs_nvrtc

from bench import providers, report, suites, timing
from bench.__main__ import cases_of, main
from bench.bars import bars
from bench.results import OURS, ROOF, Results, case_of, class_of, distinct, group, head, lines_to, load
from bench.roof import Variant, compiled, variants
from bench.roof import distinct as distinct_roofs
from bench.roofs import candidates, fastest, key_of
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
    found = sorted({case.cols for case in cases})
    assert (len(found), found[0], found[-1]) == (columns, first, last)
    assert {(case.op, case.direction) for case in cases} == {(o, d) for o in suites.OPS for d in suites.DIRECTIONS}
    for case in cases:
        assert not sizes or any(abs(case.elements - size) < case.cols for size in sizes)
    # A third has a float32 weight, in each panel of a picture too.
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
        monkeypatch.setitem(sys.modules, library, None)  # importing it is an ImportError
    everybody = providers.all_providers()
    found, missing = providers.available(everybody)
    assert found == []
    assert list(missing) == [provider.name for provider in everybody]
    assert "torch" in missing["Liger"]
    assert "--triton-tutorial" in missing["Triton tutorial"]


def test_an_unknown_provider_is_refused(capsys):
    assert main(["run", "--providers", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err


def _lines(case: Case, **microseconds: float | None) -> list[dict]:
    lines = []
    for name, time in microseconds.items():
        line = head(case) | {"provider": name}
        if time is None:
            lines.append(line | {"status": "wrong", "reason": "dx is off"})
        else:
            speed = case.bytes_moved / time * 1e-3
            times = {"microseconds": time, "gigabytes_per_second": speed, "host_microseconds": 5.0}
            lines.append(line | {"status": "ok"} | times)
    return lines


def _results(lines: list[dict], suite: str = "roof") -> Results:
    environment = {"gpu": "made up", "date": "2026-01-01", "commit": "abc", "providers": {OURS: "0"}, "missing": {}}
    return Results({suite: environment}, group(lines, suite))


BACKWARD = Case("layer_norm", "backward", LARGE // 4096, 4096, "bfloat16")


BF16 = "bfloat16"
WIDE, LONG_ROW = Case("layer_norm", "forward", LARGE // 4096, 4096, BF16), 12288


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
    found = [bar for bar in bars(_results(_lines(case, **{ROOF: roof, OURS: ours, **peers}), suite)) if bar.cases]
    if peer is not None:  # the bar of all cases with peers has it too
        assert len(found) == 2
        assert "torch" in found[0].worst[0][1]
    assert [bar.holds for bar in found[:1]] == ([] if holds is None else [holds])
    assert all(f"{case.rows} x {case.cols}" in bar.worst[0][1] for bar in found)


def test_one_slow_case_fails_a_bar_and_the_worst_five_are_named():
    cases = [Case("rms_norm", "forward", LARGE // cols, cols, BF16) for cols in (256, 512, 768, 1024, 1280, 4096)]
    lines = [line for case in cases for line in _lines(case, **{ROOF: 96.0, OURS: 100.0 + 4 * (case.cols == 1024)})]
    bar = bars(_results(lines, "widths"))[0]
    assert (bar.holds, bar.cases, bar.held, len(bar.worst)) == (False, 6, 5, 5)
    ratio, where = bar.worst[0]
    assert "65536 x 1024" in where
    assert ratio == pytest.approx(104 / 100.8)


def test_a_bar_counts_a_case_once_by_its_worst_measurement():
    runs = [group(_lines(WIDE, **{ROOF: 96.0, OURS: ours}), "widths") for ours in (100.0, 102.0, 99.0)]
    bar = bars(Results({}, [entry for run in runs for entry in run]))[0]
    assert (bar.cases, bar.held, bar.worst[0][0]) == (1, 0, pytest.approx(102 / 100.8))


@pytest.mark.parametrize(("behind", "of", "holds"), [(2, 100, True), (3, 100, False), (0, 1, True)])
def test_behind_in_two_per_cent_of_cases_is_allowed(behind, of, holds):
    cases = [Case("rms_norm", "forward", 8192, 8 * (i + 1), BF16) for i in range(of)]
    lines = [
        line for i, case in enumerate(cases) for line in _lines(case, cunorm=100.0, torch=90 if i < behind else 110)
    ]
    (bar,) = [bar for bar in bars(_results(lines, "anchors")) if bar.cases]
    assert bar.holds is holds


def test_a_case_counts_once_and_by_its_worst_measurement():
    other = Case("layer_norm", "forward", 8, 4096, BF16)
    small = group(_lines(other, cunorm=2.0, torch=1.5) + _lines(WIDE, cunorm=100.0, torch=99.0), "small")
    anchors = group(_lines(other, cunorm=2.0, torch=2.5) + _lines(WIDE, cunorm=100.0), "anchors")
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


def _file(folder, name: str, commit: str | None, *lines: dict) -> None:
    import json

    environment = {"gpu": "made up", "date": "2026-01-01", "providers": {OURS: "0"}, "missing": {}}
    first = environment | ({} if commit is None else {"commit": commit})
    text = "".join(json.dumps(line) + "\n" for line in (first, *lines))
    (folder / name).write_text(text + '{"op": "layer_norm", "dire')  # cut short by the end of a run's time


@pytest.mark.parametrize(
    ("commits", "refused"),
    [
        ({"small": "a", "few": "a"}, False),
        ({"small": "a", "few": "b"}, True),
        ({"small": "a", "few": None}, True),
        ({"small": "a", "error": "b"}, False),  # a picture of its own
    ],
)
def test_results_of_different_commits_are_refused(tmp_path, capsys, commits, refused):
    for name, commit in commits.items():
        _file(tmp_path, f"{name}.jsonl", commit, *_lines(WIDE, roof=95.0, cunorm=100.0, torch=120.0))
    paths = sorted(tmp_path.iterdir())
    assert report.show(paths) == (2 if refused else 0)
    assert ("REFUSED" in capsys.readouterr().err) is refused
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\nold\n{report.END}\n")
    if refused:
        assert report.report(check=False, results=load(paths), readme=readme, plots=tmp_path) == 2
        assert "old" in readme.read_text()
    assert list(load(paths, commit="a").by_commit()) == ["a"]


@pytest.mark.parametrize(
    ("cells", "rows", "cols"),
    [
        ({(1, 8), (1, 16), (2, 8), (2, 16)}, [1, 2], [8, 16]),
        ({(1, 8), (1, 16), (2, 8), (2, 16), (4, 8)}, [1, 2], [8, 16]),
        ({(1, 8), (1, 16), (2, 8)}, [1, 2], [8]),
        (set(), [], []),
    ],
)
def test_the_map_has_no_holes(cells, rows, cols):
    plots = pytest.importorskip("bench.plots", reason="the pictures need matplotlib: pip install -e '.[test]'")
    found = plots.whole_grid(cells)
    assert found == (rows, cols)
    assert {(row, col) for row in found[0] for col in found[1]} <= cells


@pytest.mark.parametrize(
    ("size", "power"),
    [(1 << 10, 8), (1 << 14, 12), (3 << 18, 20), (1 << 20, 20), (1 << 27, 27), (100 << 20, 27), (1, 0)],
)
def test_sizes_share_a_roof(size, power):
    assert key_of(1, size) == (1, power)


def test_a_case_tries_the_winners_of_its_size_and_the_first_of_its_neighbours():
    a, b, c, d = (Variant(1, 128, ctas, 4) for ctas in (1, 2, 3, 4))
    known = {(1, 25): [a, b], (1, 26): [b, c], (1, 27): [d, a], (2, 26): [c]}
    assert candidates(known, (1, 26)) == [b, c, a, d]
    assert candidates(known, (1, 28)) == [d]
    assert fastest([(a, 3.0), (b, 1.0), (c, 2.0)], 2) == [b, c]


@pytest.mark.parametrize("reads", [1, 2])
def test_every_roof_fits_an_sm_and_is_tried_once(reads):
    found = variants(reads)
    assert len(found) == len(set(found)) > 100
    for one in found:
        assert one.under_way <= 128 << 10
        assert one.threads * one.ctas <= 2048
        # As many CTAs as it says, and no more where shared memory is what bounds them.
        assert one.ctas * (one.dynamic_shared + 1024) <= 228 << 10
        if one.dynamic_shared and not one.stages:
            assert (one.ctas + 1) * (one.dynamic_shared + 1024) > 228 << 10
    assert not [one for one in variants(reads, 80) if one.stages]
    few = distinct_roofs(found, 64, 132)
    assert len(few) < 40  # 1 KB: where all CTAs run at once neither their number nor persistence matters
    assert {one.grid(64, 132) for one in few} <= {1}
    assert len(distinct_roofs(found, 1 << 23, 132)) == len(found)


@needs_nvrtc
@pytest.mark.slow
def test_every_roof_compiles():
    texts = [one.text for reads in (1, 2) for one in variants(reads)]
    assert "@" not in "".join(texts)
    assert all(compiled(texts, 90).values())


@pytest.mark.gpu
def test_every_roof_copies_every_element():
    cupy = pytest.importorskip("cupy")
    from bench.roof import Kernels
    from bench.roofs import wrong

    kernels = Kernels()
    for words in (2, 1000, 1 << 20, (1 << 22) + 6):
        numbers = cupy.arange(1, words + 1, dtype=cupy.uint64)
        a, b = (numbers * cupy.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F))  # no two alike
        for reads, second in ((1, None), (2, b)):
            for one in kernels.variants[reads]:
                assert wrong(kernels, one, a, second, cupy.empty_like(a)) == 0, (one, words)


class Fake(providers.Provider):
    """A provider of one time, or of one fault."""

    def __init__(self, name: str, microseconds: float | None):
        self.name, self.microseconds = name, microseconds


@pytest.fixture
def fake_run(monkeypatch):
    """`fake_run(providers, cases, **options)`: the lines of a run without a GPU."""
    runner = pytest.importorskip("bench.runner", reason="bench.runner needs rich: pip install -e '.[test]'")
    pytest.importorskip("cupy", reason="bench.runner needs CuPy: pip install -e '.[cuda13]'")
    from rich.console import Console

    def prepare(case, provider, workload):
        if provider.microseconds is None:
            raise ZeroDivisionError("as asked")
        return {"status": "ok", "errors": {"y": 0.5}}, lambda: provider.microseconds * 1e-6

    def timer_that_fails():
        raise ZeroDivisionError("in a replay")

    monkeypatch.setattr(runner, "_prepare", prepare)
    monkeypatch.setattr(runner, "_free", lambda: None)
    monkeypatch.setattr(runner, "_check_device", lambda name, error: None)
    monkeypatch.setitem(sys.modules, "bench.workload", SimpleNamespace(Workload=lambda case: None))
    monkeypatch.setattr(timing, "SECONDS", 0.0)

    def run(found, cases, roofs=(), **options):
        one = runner.Runner([(provider, "0") for provider in found], None, Console(quiet=True), **options)
        monkeypatch.setattr(
            one,
            "_roofs",
            lambda case, workload: [
                runner.Contender(ROOF, {"status": "ok"}, timer_that_fails if t is None else lambda t=t: t * 1e-6, v)
                for v, t in roofs
            ],
        )
        one.run(cases)
        return one.lines

    return run


def test_a_fault_stops_nothing_and_the_fastest_roof_counts(fake_run):
    fast, slow = Variant(1, 128, 4, 4), Variant(1, 256, 4, 4)
    roofs = [(slow, 3.0), (fast, 2.0), (slow, None)]
    lines = fake_run([Fake(OURS, 5.0), Fake("torch", None), Fake("Liger", 6.0)], [WIDE, BACKWARD], roofs)
    assert [line["provider"] for line in lines] == [ROOF, OURS, "torch", "Liger"] * 2
    roof, ours, torch, liger = lines[:4]
    assert (roof["microseconds"], roof["kernel"]["threads"]) == (2.0, 128)
    assert (ours["microseconds"], liger["microseconds"]) == (5.0, 6.0)
    assert (torch["status"], torch["reason"]) == ("error", "ZeroDivisionError: as asked")


def test_what_the_time_does_not_allow_is_said_to_be_left_out(fake_run):
    assert fake_run([Fake(OURS, 5.0)], [WIDE, BACKWARD], deadline=0.0) == [
        {"left_out": 2, "because": "the run's time was over"}
    ]


def test_a_peer_has_no_more_than_its_seconds(fake_run):
    lines = fake_run([Fake(OURS, 5.0), Fake("torch", 6.0)], [WIDE, BACKWARD], peer_seconds=0.0)
    assert [line["status"] for line in lines] == ["ok", "ok", "ok", "unsupported"]
    assert "seconds of preparing are spent" in lines[-1]["reason"]


@pytest.mark.parametrize(
    ("broken", "added"), [("QuACK", ["--without", "Liger", "QuACK"]), (OURS, ["--without", "Liger"])]
)
def test_after_a_fault_of_the_gpu_a_new_process_goes_on_without_the_culprit(monkeypatch, broken, added):
    from bench import __main__ as command

    started = []
    monkeypatch.setattr(sys, "argv", ["bench", "run", "--suite", "few", "--resume", "--out", "few.jsonl"])
    monkeypatch.setattr(command.os, "execv", lambda program, arguments: started.append(arguments))
    command._go_on(SimpleNamespace(without=["Liger"], seconds=100.0), broken, 40.0)
    ((_, *arguments),) = started
    expected = ["run", "--suite", "few", "--out", "few.jsonl", "--resume", *added, "--seconds", "40.0"]
    assert arguments == ["-m", "bench", *expected]


def test_a_run_goes_on_where_its_file_ends(tmp_path):
    options = SimpleNamespace(suite="few", step=None, op=suites.OPS, direction=suites.DIRECTIONS, dtype=None)
    vars(options).update(sample=3, seconds=None, seed=0, resume=False, out=tmp_path / "few.jsonl")
    every = cases_of(options)
    _file(tmp_path, "few.jsonl", "a", *_lines(every[0], roof=1.0, cunorm=2.0), *_lines(every[1], roof=1.0, Liger=2.0))
    options.resume = True
    assert cases_of(options) == every[1:]


@pytest.mark.slow
def test_readme_and_pictures_are_what_results_give(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install -e '.[test]'")
    readme, plots = tmp_path / "README.md", tmp_path / "plots"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    forward = Case("rms_norm", "forward", LARGE // 4096, 4096, "bfloat16")
    times = {ROOF: 100.0, OURS: 120.0, "torch": 110.0, "XLA": None}
    results = _results(_lines(BACKWARD, **times) + _lines(forward, **times), "widths")

    def run(results: Results, check: bool) -> int:
        return report.report(check=check, results=results, readme=readme, plots=plots)

    assert run(results, check=True) == 1
    assert "old" in readme.read_text()
    assert run(results, check=False) == 0
    assert run(results, check=True) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "torch | 0.92 |" in text  # a loss, in sight
    assert "**no**" in text
    assert "0 hold and 3 fail" in text
    pictures = ["speed-backward-bf16.svg", "speed-forward-bf16.svg"]
    assert sorted(path.name for path in plots.iterdir()) == pictures
    assert all(f"(bench/plots/{name})" in text for name in pictures)
    slower = _results(_lines(BACKWARD, **times | {OURS: 130.0}) + _lines(forward, **times), "widths")
    assert run(slower, check=True) == 1
    assert "speed-backward-bf16.svg" in capsys.readouterr().out


def test_a_refused_result_of_ours_stands_in_readme():
    lines = _lines(BACKWARD, **{ROOF: 100.0, OURS: None, "torch": 110.0})
    text = report.section(_results(lines))
    assert "| 4096 |  | wrong |  |  |" in text
    assert f"| {BACKWARD} | widths | wrong | 110.00 torch | 0.00 |" in text


def test_readme_without_markers_is_left_alone():
    with pytest.raises(ValueError, match="bench:begin"):
        report.spliced("no markers", "section")


@pytest.mark.slow
def test_committed_report_is_up_to_date():
    matplotlib = pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install -e '.[test]'")
    pictures = list(report.PLOTS.glob("*.svg"))
    assert pictures
    version = matplotlib.__version__
    if any(f"Matplotlib v{version}," not in path.read_text() for path in pictures):
        pytest.skip(f"the pictures were not drawn by this version of matplotlib, {version}")
    assert main(["report", "--check"]) == 0


@pytest.fixture
def check(monkeypatch):
    """bench.check on NumPy arrays."""
    module = pytest.importorskip("bench.check", reason="bench.check needs CuPy: pip install -e '.[cuda13]'")
    monkeypatch.setattr(module, "cupy", numpy)
    return module


def _right(case: Case, mistake: str = "") -> tuple[SimpleNamespace, list[numpy.ndarray]]:
    """Buffers of a case and its results by float64, rounded once."""
    rng = numpy.random.default_rng(0)
    dtype = numpy.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    shape = (case.rows, case.cols)
    x, dy = ((rng.standard_normal(shape) + mean).astype(dtype) for mean in (0.25, 0.0))
    weight, bias = ((rng.standard_normal(case.cols) + 1).astype(dtype) for _ in range(2))
    bias = bias if case.op == "layer_norm" else None
    buffers = SimpleNamespace(x=x, dy=dy, weight=weight, bias=bias)
    x, dy, weight = (array.astype(float) for array in (x, dy, weight))
    centred = x - (x.mean(axis=1, keepdims=True) if case.op == "layer_norm" else 0)
    rstd = 1 / numpy.sqrt((centred**2).mean(axis=1, keepdims=True) + case.eps)
    xhat = centred * rstd
    if case.direction == "forward":
        y = xhat * weight + (0 if bias is None or mistake == "bias" else bias.astype(float))
        return buffers, [y.astype(dtype)]
    g = dy * weight
    dx = g if mistake == "projection" else g - xhat * (g * xhat).mean(axis=1, keepdims=True)
    if case.op == "layer_norm" and mistake != "mean":
        dx = dx - g.mean(axis=1, keepdims=True)
    terms = slice(1 if mistake == "row" else 0, None)
    sums = [(dy * xhat)[terms].sum(axis=0), dy.sum(axis=0)]
    return buffers, [a.astype(dtype) for a in (dx * rstd, *sums[: 2 if case.op == "layer_norm" else 1])]


CHECKED = [
    Case(op, direction, rows, 512, dtype)
    for op in suites.OPS
    for direction in suites.DIRECTIONS
    for rows, dtype in ((64, "bfloat16"), (16, "float16"), (300, "float32"))
]


CHECKED.append(Case("layer_norm", "backward", 1, 16384, "bfloat16"))  # xhat near zero in some column


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_a_right_result_passes_the_check(check, monkeypatch, case):
    monkeypatch.setattr(check, "CHUNK", 7 * case.cols)  # several chunks, the last one short
    buffers, results = _right(case)
    assert check.wrong(case, check.errors(case, buffers, tuple(results))) == ""


@pytest.mark.parametrize(
    ("mistake", "direction", "named"),
    [
        ("bias", "forward", "y"),
        ("mean", "backward", "dx"),
        ("projection", "backward", "dx"),
        ("row", "backward", "dweight"),
    ],
)
def test_a_wrong_result_is_found(check, mistake, direction, named):
    case = Case("layer_norm", direction, 64, 512, "bfloat16")
    buffers, results = _right(case, mistake)
    assert named + " is off" in check.wrong(case, check.errors(case, buffers, tuple(results)))


def test_a_float32_dweight_is_held_against_the_limits_of_the_case(check):
    """QuACK and cuDNN take a float32 weight, so their dweight is float32: it must be right for bfloat16, no more."""
    case = Case("layer_norm", "backward", 64, 512, "bfloat16")
    buffers, (dx, *sums) = _right(case)
    sums = [array.astype(numpy.float32) for array in sums]
    assert check.wrong(case, check.errors(case, buffers, (dx, *sums))) == ""


def test_nan_and_missing_rows_are_found(check):
    case = Case("rms_norm", "forward", 64, 512, "float32")
    buffers, (y,) = _right(case)
    broken = y.copy()
    broken[3, 4] = numpy.nan
    assert "y is off by inf" in check.wrong(case, check.errors(case, buffers, (broken,)))
    with pytest.raises(ValueError, match="must have shape"):
        check.errors(case, buffers, (y[1:],))


@pytest.mark.gpu
def test_run_measures_ours_and_torch(tmp_path):
    import json

    out = tmp_path / "out.jsonl"
    assert main(["run", "--cols", "256", "--rows", "64", "--providers", OURS, "torch", "--out", str(out)]) == 0
    environment, *lines = map(json.loads, out.read_text().splitlines())
    assert environment["providers"].keys() | environment["missing"].keys() == {OURS, "torch"}
    assert [line["status"] for line in lines] == ["ok"] * len(lines)
    names = [ROOF, *environment["providers"]]
    assert [line["provider"] for line in lines] == names * 4
    assert all(line["p20"] <= line["microseconds"] <= line["p80"] for line in lines)
    assert all(line["host_microseconds"] > 0 for line in lines)


def test_shares_of_products_in_8_bits():
    """A contender that failed has no share, and without a base nobody has."""
    from bench import linear_fp8

    times = {"roof": 20.0, "rows": 25.0, "columns": "out of memory"}
    assert linear_fp8.shares(times, "roof") == {"rows": 0.8}
    assert linear_fp8.shares({"rows": 25.0}, "roof") == {}
    assert linear_fp8.bytes_of_cast(8192, 4096) == 3 << 25
    assert linear_fp8.bytes_of_product(16, 32, 48) == 16 * 32 + 48 * 32 + 2 * 16 * 48


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


def test_a_run_that_fails_before_its_first_line_leaves_the_results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("measured\n")
    with pytest.raises(RuntimeError), lines_to(path):
        raise RuntimeError("no GPU")
    assert path.read_text() == "measured\n"
    with lines_to(path) as write:
        write("run", gpu="one")
        write("time", us=1.5)
    assert path.read_text() == '{"kind": "run", "gpu": "one"}\n{"kind": "time", "us": 1.5}\n'
