"""The bench, without a GPU: what is measured, what counts as right, what a bar says, what README is made of."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy
import pytest

from bench import providers, report, suites, timing
from bench.__main__ import main
from bench.bars import bars
from bench.results import OURS, ROOF, Results, group
from bench.suites import LARGE, Case, parse_sizes


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
    assert all(case.rows * case.cols >= LARGE for case in roof)
    triton = {case.cols for case in suites.suite("triton") if case.direction == "backward"}
    assert (min(triton), max(triton), len(triton)) == (1024, 15872, 30)
    assert {(case.rows, case.cols) for case in suites.suite("small")} == {
        (rows, cols) for rows in (1, 32, 512) for cols in (1024, 4096, 16384)
    }
    anchors = {(case.op, case.direction, case.rows, case.cols, case.dtype) for case in suites.suite("anchors")}
    assert ("layer_norm", "backward", 4096, 12288, "float16") in anchors
    assert ("layer_norm", "forward", 64, 262144, "bfloat16") in anchors
    assert ("rms_norm", "backward", 16384, 65536, "bfloat16") in anchors


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
    head = {"op": case.op, "direction": case.direction, "dtype": case.dtype, "rows": case.rows, "cols": case.cols}
    lines = []
    for name, time in microseconds.items():
        line = head | {"provider": name}
        if time is None:
            lines.append(line | {"status": "wrong", "reason": "dx is off"})
        else:
            speed = case.bytes_moved / time * 1e-3
            times = {"microseconds": time, "gigabytes_per_second": speed, "host_microseconds": 5.0}
            lines.append(line | {"status": "ok"} | times)
    return lines


def _results(lines: list[dict], suite: str = "roof") -> Results:
    environment = {"gpu": "made up", "date": "2026-01-01", "providers": {OURS: "0"}, "missing": {"apex": "not there"}}
    return Results({suite: environment}, group(lines, suite))


BACKWARD = Case("layer_norm", "backward", LARGE // 4096, 4096, "bfloat16")


@pytest.mark.parametrize(
    ("ours", "peer", "roof_bar", "peer_bar"),
    [(100.0, 131.0, True, True), (100.0, 129.0, True, False), (112.0, 150.0, False, True), (None, 150.0, False, False)],
)
def test_a_bar_holds_or_does_not(ours, peer, roof_bar, peer_bar):
    lines = _lines(BACKWARD, **{ROOF: 100.0, OURS: ours, "torch": peer, "Liger": peer + 50})
    by_name = {bar.what: bar for bar in bars(_results(lines))}
    of_roof = by_name["backward, >= 64 M elements, 512 to 65536 columns: of the roof"]
    peers = by_name["LayerNorm backward, the same: times the best peer"]
    assert (of_roof.holds, peers.holds) == (roof_bar, peer_bar)
    assert f"{LARGE // 4096} x 4096" in of_roof.where
    assert "torch" in peers.where
    assert by_name["1, 32 and 512 rows: times the best peer"].holds is None


def test_one_slow_case_fails_a_bar_and_is_named():
    cases = [Case("rms_norm", "forward", LARGE // cols, cols, "float32") for cols in (256, 1024, 131072)]
    lines = [line for case in cases for line in _lines(case, **{ROOF: 100.0, OURS: 101.0 + 4 * (case.cols == 1024)})]
    bar = bars(_results(lines))[0]
    assert (bar.holds, bar.cases, bar.held) == (False, 3, 2)
    assert bar.where.endswith("65536 x 1024")
    assert bar.worst == pytest.approx(100 / 105)


def test_ties_and_losses_of_small_problems():
    case = Case("layer_norm", "forward", 32, 4096, "bfloat16")
    for peer, holds in ((2.0, True), (1.99, False)):
        results = _results(_lines(case, **{ROOF: 1.0, OURS: 2.0, "Liger": peer}), "small")
        by_name = {bar.what: bar for bar in bars(results)}
        assert by_name["1, 32 and 512 rows: times the best peer"].holds is holds


@pytest.mark.slow
def test_readme_and_pictures_are_what_results_give(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install -e '.[test]'")
    readme, plots = tmp_path / "README.md", tmp_path / "plots"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    forward = Case("rms_norm", "forward", LARGE // 4096, 4096, "bfloat16")
    times = {ROOF: 100.0, OURS: 120.0, "torch": 110.0, "XLA": None}
    results = _results(_lines(BACKWARD, **times) + _lines(forward, **times))

    def run(results: Results, check: bool) -> int:
        return report.report(check=check, results=results, readme=readme, plots=plots)

    assert run(results, check=True) == 1
    assert "old" in readme.read_text()
    assert run(results, check=False) == 0
    assert run(results, check=True) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "**no**" in capsys.readouterr().out
    assert "torch | 0.92 |" in text  # a loss, in sight
    assert sorted(path.name for path in plots.iterdir()) == [
        "peers.svg",
        "speed-backward-bf16.svg",
        "speed-forward-bf16.svg",
    ]
    slower = _results(_lines(BACKWARD, **times | {OURS: 130.0}) + _lines(forward, **times))
    assert run(slower, check=True) == 1
    assert "speed-backward-bf16.svg" in capsys.readouterr().out


def test_a_refused_result_of_ours_stands_in_readme():
    lines = _lines(BACKWARD, **{ROOF: 100.0, OURS: None, "torch": 110.0})
    assert f"| {BACKWARD.rows} x 4096 |  |  |  | wrong | " in report.section(_results(lines, "anchors"))


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
