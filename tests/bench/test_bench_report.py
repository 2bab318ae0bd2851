"""The report writes docs/speed.md and the pictures from results."""

from __future__ import annotations

import pytest
from bench_lines import BACKWARD, WIDE, file_of, lines_of, results_of

from bench import report
from bench.__main__ import main
from bench.results import OURS, ROOF, Results, load
from bench.suites import LARGE, Case


@pytest.mark.parametrize(
    ("commits", "refused"),
    [
        ({"small": "a", "few": "a"}, False),
        ({"small": "a", "few": "b"}, True),
        ({"small": "a", "few": None}, True),
        ({"small": "a", "error": "b"}, False),  # errors have a picture of their own
    ],
)
def test_results_of_different_commits_are_refused(tmp_path, capsys, commits, refused):
    for name, commit in commits.items():
        file_of(tmp_path, f"{name}.jsonl", commit, *lines_of(WIDE, roof=95.0, cunorm=100.0, torch=120.0))
    paths = sorted(tmp_path.iterdir())
    assert report.show(paths) == (2 if refused else 0)
    assert ("REFUSED" in capsys.readouterr().err) is refused
    page = tmp_path / "speed.md"
    page.write_text(f"{report.BEGIN}\nold\n{report.END}\n")
    if refused:
        assert report.report(check=False, results=load(paths), page=page, plots=tmp_path) == 2
        assert "old" in page.read_text()
    assert list(load(paths, commit="a").by_commit()) == ["a"]


@pytest.mark.slow
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
    assert plots.whole_grid(cells) == (rows, cols)
    assert {(row, col) for row in rows for col in cols} <= cells


@pytest.mark.slow
def test_the_page_and_pictures_are_what_results_give(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib: pip install -e '.[test]'")
    page, plots = tmp_path / "speed.md", tmp_path / "plots"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    forward = Case("rms_norm", "forward", LARGE // 4096, 4096, "bfloat16")
    times = {ROOF: 100.0, OURS: 120.0, "torch": 110.0, "XLA": None}
    results = results_of(lines_of(BACKWARD, **times) + lines_of(forward, **times), "widths")

    def run(results: Results, check: bool) -> int:
        return report.report(check=check, results=results, page=page, plots=plots)

    assert run(results, check=True) == 1
    assert "old" in page.read_text()
    assert run(results, check=False) == 0
    assert run(results, check=True) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "torch | 0.92 |" in text  # a loss, in sight
    assert "**no**" in text
    assert "0 hold and 3 fail" in text
    shown = ["speed-backward-bf16.svg", "speed-forward-bf16.svg"]
    pictures = ["peers-dark.svg", "peers-light.svg", *shown]  # README shows the first two
    assert sorted(path.name for path in plots.iterdir()) == pictures
    assert all(f"(plots/{name})" in text for name in shown)
    slower = results_of(lines_of(BACKWARD, **times | {OURS: 130.0}) + lines_of(forward, **times), "widths")
    assert run(slower, check=True) == 1
    assert "speed-backward-bf16.svg" in capsys.readouterr().out


def test_a_refused_result_of_ours_stands_on_the_page():
    lines = lines_of(BACKWARD, **{ROOF: 100.0, OURS: None, "torch": 110.0})
    text = report.section(results_of(lines))
    assert "| 4096 |  | wrong |  |  |" in text
    assert f"| {BACKWARD} | widths | wrong | 110.00 torch | 0.00 |" in text


def test_a_page_without_markers_is_left_alone():
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
