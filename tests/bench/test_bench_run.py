"""A run of the bench survives faults, keeps to its time and goes on where its file ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from bench_lines import BACKWARD, WIDE, file_of, lines_of

from bench import providers, suites
from bench.__main__ import cases_of, main
from bench.results import OURS, ROOF, lines_to
from bench.roof import Variant
from cunorm.commands import timing


class Fake(providers.Provider):
    """A provider that always takes the same time, or that always fails."""

    def __init__(self, name: str, microseconds: float | None):
        self.name, self.microseconds = name, microseconds


@pytest.fixture
def fake_run(monkeypatch):
    """Return `fake_run(providers, cases, **options)`, which returns the lines of a run without a GPU."""
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

    def run(fakes, cases, roofs=(), **options):
        bench_run = runner.Runner([(fake, "0") for fake in fakes], None, Console(quiet=True), **options)
        monkeypatch.setattr(
            bench_run,
            "_roofs",
            lambda case, workload: [
                runner.Contender(ROOF, {"status": "ok"}, timer_that_fails if t is None else lambda t=t: t * 1e-6, v)
                for v, t in roofs
            ],
        )
        bench_run.run(cases)
        return bench_run.lines

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
    file_of(
        tmp_path, "few.jsonl", "a", *lines_of(every[0], roof=1.0, cunorm=2.0), *lines_of(every[1], roof=1.0, Liger=2.0)
    )
    options.resume = True
    assert cases_of(options) == every[1:]


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
