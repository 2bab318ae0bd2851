"""Tables of launches: which table is asked, which entry serves, and which files are ignored with a line in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from problems import problem

from cunorm.kernel.device import H100, KNOWN, Device
from cunorm.plan import tables
from cunorm.plan.candidates import candidates
from cunorm.plan.choose import choose
from cunorm.plan.launches import launches
from cunorm.plan.plain_problems import float8_problem
from cunorm.plan.plan import plan
from cunorm.plan.problem import Problem
from cunorm.plan.resources import is_legal
from cunorm.plan.spec import NormSpec
from cunorm.plan.tables import REACH, Launch, Table


def forget() -> None:
    tables.reads_the_users.cache_clear()
    tables.forget()
    plan.cache_clear()


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The folder of a user's tables, which are read."""
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUNORM_TUNE", "1")
    forget()
    yield tmp_path / "tables"
    monkeypatch.undo()
    forget()


def rows_of(task: Problem, device: Device = H100) -> NormSpec:
    spec = choose(task, device)
    assert isinstance(spec, NormSpec)
    return spec


def layout(task: Problem) -> str:
    return tables.layout_of(rows_of(task)) or pytest.fail("no table knows it")


def tuned(folder: Path, task: Problem, other: NormSpec, device: Device = H100) -> Path:
    """Write the launch `other` for a problem into the user's table."""
    path = folder / "h100.json"
    table = tables.read(path) if path.exists() else Table(device.arch, device.bandwidth / device.sms, {})
    assert table is not None
    spec = rows_of(task)
    tables.write(path, table.with_point(layout(task), spec, tables.rows_of_sm(task, device), Launch.of(other)))
    forget()
    return path


def launch_of(table: Table, task: Problem, rows_of_sm: float) -> Launch | None:
    choices = table.choices(layout(task), rows_of(task))
    return next((launch for most, launch in choices if rows_of_sm <= most), None)


PROBLEMS = [
    pytest.param(problem("forward", 16384, 4096, "bfloat16"), id="LayerNorm"),
    pytest.param(problem("forward", 100, 1024, "float32", "rms_norm"), id="few rows"),
    pytest.param(problem("forward", 4096, 65536, "bfloat16", weight="float32"), id="clusters"),
    pytest.param(problem("backward", 16384, 4096, "bfloat16"), id="backward"),
    pytest.param(problem("backward", 2048, 65536, "bfloat16", "rms_norm"), id="backward in clusters"),
    pytest.param(
        float8_problem("rms_norm", 8192, 4096, "bfloat16", "bfloat16", y8="float8_e4m3fn", granularity="row"), id="FP8"
    ),
]


@pytest.mark.parametrize("task", PROBLEMS)
def test_the_users_table_is_asked_before_the_shipped_one(folder, task):
    before = plan(task, H100)
    other = candidates(task, rows_of(task), H100, 1)[0]
    tuned(folder, task, other)
    assert plan(task, H100).steps == launches(task, other, H100).steps != before.steps
    assert rows_of(task).shape.order == other.shape.order


def test_an_entry_may_serve_rows_up_to_a_length_alone():
    launches_by_length = {n: Launch("backward", ctas_per_sm=n, stages=2) for n in (1, 2, 3)}
    entries = {"256x2 to 400": 1, "256x2 to 450": 2, "256x2": 3}
    choices = {shape: ((inf, launches_by_length[n]),) for shape, n in entries.items()}
    specs = {
        cols: rows_of(problem("backward", 8192, cols, "bfloat16", "rms_norm")) for cols in (3192, 3200, 3208, 3608)
    }
    name = layout(problem("backward", 8192, 3200, "bfloat16", "rms_norm"))
    table = Table(90, 25.0, {name: choices})
    served = {cols: table.choices(name, spec)[0][1].ctas_per_sm for cols, spec in specs.items()}
    assert served == {3192: 1, 3200: 1, 3208: 2, 3608: 3}
    measured_here = table.with_point(name, specs[3192], 60.0, Launch("backward", stages=4))
    assert [shape for shape, choices in measured_here.layouts[name].items() if len(choices) > 1] == ["256x2 to 400"]
    assert measured_here.has_point(name, specs[3200], 60.0)
    assert not measured_here.has_point(name, specs[3208], 60.0)


@pytest.mark.parametrize("task", PROBLEMS)
def test_the_users_table_answers_near_what_was_measured_and_nowhere_else(folder, task):
    def rows_times(factor: float) -> Problem:
        return replace(task, rows=round(task.rows * factor))

    others = [rows_times(factor) for factor in (0.5, 0.78, 1.3, 2)]
    others += [
        problem(task.direction, task.rows, cols, dtype) for cols, dtype in ((264, "bfloat16"), (4096, "float64"))
    ]
    before = [plan(other, H100).steps for other in others]
    tuned(folder, task, candidates(task, rows_of(task), H100, 1)[0])
    assert [plan(other, H100).steps for other in others] == before
    near = {tables.rows_of_sm(rows_times(factor), H100) for factor in (0.81, 1.24)}
    table = tables.tables_of(H100)[0][1]
    assert all(launch_of(table, task, rows) is not None for rows in near)


FULL, NOT_FULL = (problem("forward", 16384, cols, "bfloat16", "rms_norm") for cols in (4096, 3904))
ZERO_CENTRED = problem("forward", 16384, 4096, "bfloat16", "rms_norm", zero_centered_gamma=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "other"),
    [(FULL, NOT_FULL), (NOT_FULL, FULL), (FULL, ZERO_CENTRED), (ZERO_CENTRED, FULL), (NOT_FULL, ZERO_CENTRED)],
    ids=["full", "not full", "usual weight", "zero-centred", "neither"],
)
def test_rows_that_follow_an_entry_for_want_of_their_own_keep_what_it_was(folder, task, other):
    """Measurements of full rows, rows that are not full, and rows with a zero-centred weight do not mix."""
    assert tables.shape_key(rows_of(task)) == tables.shape_key(rows_of(other))
    before = plan(other, H100).steps
    for rows in (16384, 17000):
        tuned(folder, replace(task, rows=rows), candidates(task, rows_of(task), H100, 1)[0])
    assert plan(other, H100).steps == before
    shipped = tables.tables_of(H100)[-1][1]
    merged = shipped.with_point(layout(task), rows_of(task), 50.0, Launch("forward", stages=7))
    assert merged.choices(layout(other), rows_of(other)) == (
        shipped.choices(layout(other), rows_of(other)) or ((inf, None),)
    )


def test_neighbours_share_what_lies_between_them():
    """The border between two measured points is their geometric mean, and both points stay as they were measured."""
    spec = rows_of(problem("forward", 16384, 4096, "bfloat16"))
    key = tables.shape_key(spec, full=True)
    won = {100: Launch("forward"), 110: Launch("forward", cluster=2)}
    for order in ((100, 110), (110, 100)):
        table = Table(90, 25, {})
        for rows in order:
            table = table.with_point("layout", spec, rows, won[rows])
        choices = table.layouts["layout"][key]
        assert [launch for _, launch in choices] == [None, won[100], won[110], None]
        assert [most for most, _ in choices] == pytest.approx([100 / REACH, (100 * 110) ** 0.5, 110 * REACH, inf])
    nothing_won = table.with_point("layout", spec, 105, None)
    assert nothing_won.layouts == table.layouts
    assert nothing_won.has_point("layout", spec, 105)
    assert not nothing_won.has_point("layout", spec, 106)


@pytest.mark.parametrize("device", [KNOWN[75], KNOWN[80], H100], ids=lambda device: device.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [40, 1001, 4096, 65536])
def test_candidates_are_legal_distinct_and_keep_the_order_of_sums(device, direction, cols):
    for rows in (7, 4000, 100_000):
        task = problem(direction, rows, cols, "bfloat16")
        spec = choose(task, device)
        others = candidates(task, spec, device, 10**9)
        assert len({launches(task, other, device).steps for other in others}) == len(others)
        for other in others:
            assert is_legal(other, device)
            assert other != spec
            assert other.shape.order == spec.shape.order
            assert Launch.of(other).applied(spec) == other, "a table can say it"
        assert candidates(task, spec, device, 5) == others[:5]


@pytest.mark.parametrize("cols", [4096, 24576, 65536])
def test_a_candidate_leaves_as_many_partial_sums_wherever_the_arrays_lie(monkeypatch, cols):
    """So dweight has the same bits at odd addresses, though less fits into shared memory there."""
    task = problem("backward", 1000, cols, "float32", "rms_norm")
    for other in candidates(task, rows_of(task), H100, 10**9):
        launch = Launch.of(other)
        kernels = lambda spec, device, launch=launch: (((inf, tables.run_by(launch, spec, device)),),)  # noqa: E731
        monkeypatch.setattr(tables, "_measured_kernels", kernels)
        at_odd_addresses = replace(task, aligned=False)
        groups = [launches(placed, choose(placed, H100), H100).groups for placed in (task, at_odd_addresses)]
        assert groups[0] == groups[1], other


def test_there_are_candidates_where_rows_are_held():
    for task in (parameter.values[0] for parameter in PROBLEMS):
        others = candidates(task, rows_of(task), H100, 10**9)
        assert len(others) > 10
        assert len({other.shape.threads for other in others}) > 1


HEAD = {"version": tables.VERSION, "arch": H100.arch, "bandwidth": H100.bandwidth / H100.sms}
LAUNCH = {"kernel": "forward", "ctas_per_sm": 2}
KEYS = {"layer_norm, forward, x16 2w16": {"128x4 full": [[None, 0]], "128x4": [[None, 0]]}}


def content(**changes: object) -> str:
    return json.dumps({**HEAD, "launches": [LAUNCH], "layouts": KEYS} | changes)


BAD_FILES = [
    pytest.param("", id="empty"),
    pytest.param(content()[:-20], id="cut short"),
    pytest.param("[]", id="a list"),
    pytest.param("[" * 100_000, id="deep"),
    pytest.param(b"\xff\xfe\x00", id="no text"),
    pytest.param(content(version=tables.VERSION + 1), id="another version"),
    pytest.param(json.dumps({"arch": 90}), id="without a version"),
    pytest.param(content(bandwidth=0), id="no bandwidth"),
    pytest.param(content(bandwidth="much"), id="bandwidth in words"),
    pytest.param(content(layouts=[]), id="layouts in a list"),
    pytest.param(content(layouts={"a": {"b": [[1]]}}), id="a choice of one number"),
    pytest.param(content(layouts={"a": {"b": [[None, 7]]}}), id="a launch that is not there"),
    pytest.param(content(layouts={"a": {"256x2 to many": [[None, 0]]}}), id="an entry to no number of vectors"),
    pytest.param(content(measured=[1]), id="points in a list"),
    pytest.param(content(products=[1]), id="products in a list"),
    pytest.param(content(products={"4096": {"many": {"8": 2}}}), id="a product of no number of outs"),
    *(
        pytest.param(content(launches=[LAUNCH | wrong]), id=str(wrong))
        for wrong in (
            {"kernel": "forward_streamed"},
            {"kernel": 1},
            {"cluster": 3},
            {"cluster": True},
            {"rows_per_cta": 0},
            {"ctas_per_sm": -1},
            {"stages": -1},
            {"vectors_per_thread": 0},
            {"weights_in_registers": 1},
            {"colour": "blue"},
        )
    ),
]


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_ignored_with_a_line_in_the_log(folder, caplog, text):
    task = problem("forward", 16384, 4096, "bfloat16")
    before = plan(task, H100).steps
    folder.mkdir()
    (folder / "bad.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    forget()
    with caplog.at_level(logging.WARNING, "cunorm"):
        for device in (H100, KNOWN[90], H100):
            plan(task, device)
    assert plan(task, H100).steps == before
    (record,) = caplog.records
    assert "bad.json is no table of launches" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_the_files_of_that_test_are_bad_for_what_is_wrong_with_them(folder):
    folder.mkdir()
    (folder / "good.json").write_text(content())
    assert tables.read(folder / "good.json") is not None


@pytest.mark.parametrize("place", ["a file", "unreadable", "absent", "no home"])
def test_a_folder_that_cannot_be_read_is_as_an_empty_one(folder, monkeypatch, place):
    task = problem("forward", 16384, 4096, "bfloat16")
    before = plan(task, H100).steps
    if place == "a file":
        folder.write_text("")
    elif place == "unreadable":
        folder.mkdir(0)
    elif place == "no home":
        monkeypatch.setattr(tables, "cache_directory", lambda: (_ for _ in ()).throw(FileNotFoundError("no home")))
    forget()
    assert plan(task, H100).steps == before


ILLEGAL = [
    pytest.param(launch, id=str(launch))
    for launch in (
        {"kernel": "backward", "stages": 2},
        {"kernel": "forward", "ctas_per_sm": 64},
        {"kernel": "forward", "cluster": 8},  # 16 threads in each CTA
        {"kernel": "forward", "rows_per_cta": 2},  # several warps hold a row here
        {"kernel": "forward", "stages": 1},
        {"kernel": "forward", "stages": 40, "prefetch": True},
        {"kernel": "forward_spread", "vectors_per_thread": 3},
        {"kernel": "forward_spread", "stages": 2},
        {"kernel": "forward_pairs", "rows_per_cta": 1},
    )
]


@pytest.mark.parametrize("launch", ILLEGAL)
def test_a_launch_that_is_not_legal_for_a_row_is_ignored(folder, launch):
    task = problem("forward", 16384, 4096, "bfloat16")
    before = plan(task, H100).steps
    folder.mkdir()
    (folder / "h100.json").write_text(content(launches=[launch]))
    forget()
    assert len(tables.tables_of(H100)) == 2
    assert plan(task, H100).steps == before


@pytest.mark.slow
def test_the_environment_leaves_the_users_tables_unread(folder, monkeypatch):
    task = problem("forward", 16384, 4096, "bfloat16")
    before = plan(task, H100).steps
    tuned(folder, task, candidates(task, rows_of(task), H100, 1)[0])
    assert plan(task, H100).steps != before
    monkeypatch.setenv("CUNORM_TUNE", "0")
    forget()
    assert plan(task, H100).steps == before
    monkeypatch.setenv("CUNORM_TUNE", "off")
    forget()
    with pytest.raises(ValueError, match="CUNORM_TUNE must be 0 or 1; got 'off'"):
        plan(task, H100)


def test_a_table_serves_its_class_alone(folder):
    task = problem("forward", 16384, 4096, "bfloat16")
    of_others = [KNOWN[90], KNOWN[80], replace(H100, sms=114, bandwidth=2039)]
    before = [plan(task, device).steps for device in of_others]
    tuned(folder, task, candidates(task, rows_of(task), H100, 1)[0])
    assert [plan(task, device).steps for device in of_others] == before
    assert plan(task, replace(H100, bandwidth=3352)).steps == plan(task, H100).steps


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(tables.SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_a_table_that_was_written_is_read_as_it_was(path, tmp_path):
    table = tables.read(path) or pytest.fail("cannot be read")
    spec = rows_of(problem("forward", 16384, 4096, "bfloat16"))
    point = table.with_point("a layout", spec, 12.5, Launch("forward", stages=2))
    product = table.with_product(768, 2304, 8, 1).with_product(768, 2304, 64, tables.OVERLAPPED)
    algorithm = table.with_algorithm("13.1", 768, 2304, 512, (66, 7)).with_algorithm("13.1", 768, 2304, 64, ())
    for changed in (table, point, product, algorithm):
        tables.write(tmp_path / "again.json", changed)
        assert tables.read(tmp_path / "again.json") == changed
    tables.write(tmp_path / "again.json", table)
    assert (tmp_path / "again.json").read_text() == path.read_text()
