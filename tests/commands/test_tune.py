"""`python -m cunorm tune`: what it keeps and refuses. After it nothing is slower, and no bit is another."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_cupy
import numpy
import pytest
from command_line import assert_fails_in_one_line, command
from cpu_device import Machine, missing
from cpu_functions import SMALL
from problems import problem

from cunorm.__main__ import main
from cunorm.commands import info, search_linear, tune
from cunorm.commands import search as searching
from cunorm.commands.compilation import Compiled
from cunorm.commands.search_linear import Way
from cunorm.commands.timing import Times
from cunorm.kernel.device import H100
from cunorm.linear import plan as linear_plan
from cunorm.linear.problem import LinearProblem
from cunorm.plan import backward as backward_rule
from cunorm.plan import tables
from cunorm.plan.candidates import candidates
from cunorm.plan.choose import choose
from cunorm.plan.launches import launches
from cunorm.plan.plain_problems import float8_problem
from cunorm.plan.plan import plan
from cunorm.plan.problem import RowStrides
from cunorm.plan.spec import NormSpec, SumSpec
from cunorm.plan.steps import Plan
from cunorm.plan.tables import OVERLAPPED

READ = {"CUNORM_TUNE": "1"}
SHAPE = ("--cols", "4096", "--rows", "16384", "--dtype", "bfloat16")
PRODUCT = ("--op", "layer_norm_linear", "--cols", "896", "--out-features", "2688", "--rows", "8", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "it needs --cols, --rows, --dtype; or --model"),
        (SHAPE[:4], "it needs --dtype; or --model"),
        ((*SHAPE[:-1], "int8"), "must be one of float16, bfloat16, float32, float64; got 'int8'"),
        ((*SHAPE, "--seconds", "0"), "--seconds must be more than 0; got 0.0"),
        ((*SHAPE, "--seconds", "soon"), "invalid float value: 'soon'"),
        ((*SHAPE, "--model", "a:b"), "leave --cols, --rows, --dtype out"),
        (("--model", "package"), "--model must be PACKAGE:FUNCTION; got 'package'"),
        (("--cols", "0"), "must be 1 or more; got 0"),
        ((*SHAPE, "--out-features", "8"), "--out-features goes with --op layer_norm_linear or rms_norm_linear"),
        ((*SHAPE, "--op", "rms_norm_linear"), "it needs --out-features; or --model"),
        ((*PRODUCT, "--direction", "forward"), "leave --direction out"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(tmp_path, arguments, words):
    assert_fails_in_one_line(command(tmp_path, "tune", *arguments, environment=READ), 2, words)


@pytest.mark.parametrize(("value", "words"), [("0", "=0 leaves the tables"), ("off", " must be 0 or 1; got 'off'")])
def test_tables_that_nobody_would_read_are_refused(tmp_path, value, words):
    result = command(tmp_path, "tune", *SHAPE, environment={"CUNORM_TUNE": value})
    assert_fails_in_one_line(result, 2, f"CUNORM_TUNE{words}")


@pytest.mark.slow
@pytest.mark.parametrize("cupy", [None, "absent"])
def test_without_a_gpu_it_says_what_to_do(tmp_path, cupy):
    result = command(tmp_path, "tune", *SHAPE, cupy=cupy, environment=READ)
    assert_fails_in_one_line(result, 1, "tune: needs a GPU and NVRTC (", "pip install")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Iterator[Path]:
    """An empty cache, whose tables are read."""

    def forget() -> None:
        tables.reads_the_users.cache_clear()
        tables.forget()
        plan.cache_clear()

    monkeypatch.setenv("CUNORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUNORM_TUNE", "1")
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


@pytest.fixture
def folder(cache, monkeypatch) -> Path:
    """The folder of tables in the cache. The command plans for an H100, and the test replaces its search."""
    for name, part in {"why_no_gpu": lambda: None, "why_no_compiler": lambda: None, "_gpu": lambda: H100}.items():
        monkeypatch.setattr(tune, name, part)
    return cache / "tables"


Outcome = Callable[[], None]


def searches(monkeypatch: Any, *outcomes: Outcome | None) -> list[NormSpec]:
    """Replace the search: each finds the first candidate to be the best, or calls its outcome, which may raise.

    The list that is returned receives the candidates that were found.
    """
    best: list[NormSpec] = []
    planned = iter(outcomes)

    def search(problem, today, others, gpu, step):
        step()
        outcome = next(planned, None)
        if outcome is not None:
            outcome()
        best.append(others[0])
        times = Times(2.0, 2.0, 2.0), Times(1.0, 1.0, 1.0)
        return searching.Found(times[0], ((1.0, others[0]),), others[0], times[1], len(others), (), 0)

    monkeypatch.setattr(tune, "search", search)
    return best


def raises(error: BaseException) -> Outcome:
    def outcome() -> None:
        raise error

    return outcome


def tuned(folder: Path) -> int:
    """Return how many numbers of rows the table has."""
    (path,) = folder.glob("*.json")
    return sum(
        len(numbers) for shapes in json.loads(path.read_text())["measured"].values() for numbers in shapes.values()
    )


def test_the_next_plans_of_the_process_are_by_what_was_found(folder, monkeypatch, capsys):
    best = searches(monkeypatch)
    assert main(["tune", *SHAPE, "--op", "rms_norm"]) == 0
    assert tuned(folder) == len(best) == 2
    for direction, spec in zip(("forward", "backward"), best, strict=True):
        task = problem(direction, 16384, 4096, "bfloat16", "rms_norm")
        assert choose(task, H100) == spec
        assert tables.Launch.of(plan(task, H100).steps[0].spec) == tables.Launch.of(spec)
    output = capsys.readouterr().out
    assert re.search(r"2 of 2 launches are faster than before, by 100.0% on average; \S+\.json$", output.strip())


def test_what_has_one_launch_is_left_out_and_equal_problems_are_searched_once(folder, monkeypatch, capsys):
    best = searches(monkeypatch)
    assert main(["tune", "--cols", "1024", "--rows", "64", "64", "--dtype", "bfloat16", "float64"]) == 0
    assert len(best) == 2  # both norms forward; backward of few rows, and float64, have only one launch
    assert "16 problems, of which 2 have launches to choose from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "tune: interrupted after 1 of 4; what was measured is kept."),
        (tune._TimeIsUpError(), 0, "tune: the time is up after 1 of 4; what was measured is kept."),
        (RuntimeError("CUDA is lost."), 1, "tune: CUDA is lost; what was measured before, 1 of 4, is kept."),
    ],
)
def test_what_was_measured_before_an_end_is_kept(folder, monkeypatch, capsys, error, status, words):
    searches(monkeypatch, None, raises(error))
    assert main(["tune", *SHAPE]) == status
    output = capsys.readouterr()
    assert words in output.out + output.err
    assert "Traceback" not in output.err
    assert tuned(folder) == 1


def test_what_does_not_fit_into_the_gpus_memory_is_left_out_alone(folder, monkeypatch, capsys):
    searches(monkeypatch, raises(MemoryError("12 GB")))
    assert main(["tune", *SHAPE]) == 0
    assert "left out, the GPU's memory does not suffice" in capsys.readouterr().out
    assert tuned(folder) == 3


def test_seconds_end_it(folder, monkeypatch, capsys):
    searches(monkeypatch)
    assert main(["tune", *SHAPE, "--seconds", "1e-9"]) == 0
    assert "the time is up after 0 of 4" in capsys.readouterr().out
    assert not list(folder.glob("*.json"))


def test_a_damaged_table_is_replaced(folder, monkeypatch):
    searches(monkeypatch)
    folder.mkdir(parents=True)
    path = tune._path(H100)
    path.write_text("{")
    assert main(["tune", *SHAPE]) == 0
    assert tables.read(path) is not None


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_measured(folder, monkeypatch, capsys):
    best = searches(monkeypatch)
    folder.parent.mkdir()
    folder.write_text("a file")
    assert main(["tune", *SHAPE]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot be written" in error
    assert "CUNORM_CACHE_DIR may name another folder" in error
    assert not best


def test_info_says_which_tables_serve_the_gpu(folder, monkeypatch):
    searches(monkeypatch)
    monkeypatch.setattr(info, "why_no_gpu", lambda: None)
    monkeypatch.setattr(info, "_gpus", lambda: [{}, {}])
    monkeypatch.setattr(info, "device", SimpleNamespace(current=lambda _: H100))
    shipped = str(tables.SHIPPED / "h100.json")
    assert info.report()["tables"] == [f"H100: {shipped}, the cost rule"]
    assert main(["tune", *SHAPE]) == 0
    assert info.report()["tables"] == [f"H100: {tune._path(H100)}, {shipped}, the cost rule"]
    monkeypatch.setenv("CUNORM_TUNE", "0")
    tables.reads_the_users.cache_clear()
    tables.forget()
    assert info.report()["tables"] == [f"H100: {shipped}, the cost rule (CUNORM_TUNE=0: those of `tune` are not read)"]


MODEL = """
from cunorm.plan.launches import launches
from cunorm.plan.plain_problems import float8_problem
from cunorm.plan.plan import plan
from cunorm.plan.problem import RowStrides
from cunorm.plan.plain_problems import whole
from cunorm.kernel.device import H100

class Trainer:
    @staticmethod
    def step():
        for rows in (16384, 16384, 64):
            for direction in ("forward", "backward"):
                plan(whole("rms_norm", direction, rows, 4096, "bfloat16"), H100)

step = Trainer.step
def nothing(): pass
def fails(): raise ValueError("no data")
"""


@pytest.fixture
def model(monkeypatch, tmp_path) -> Iterator[None]:
    (tmp_path / "model_to_tune.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("model_to_tune", None)


@pytest.mark.parametrize("name", ["step", "Trainer.step"])
def test_the_calls_of_a_model_are_tuned(folder, model, monkeypatch, capsys, name):
    best = searches(monkeypatch)
    assert main(["tune", "--model", f"model_to_tune:{name}"]) == 0
    assert len(best) == tuned(folder) == 3
    assert "4 problems, of which 3 have launches to choose from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent_package:step", "cannot be had: ModuleNotFoundError"),
        ("model_to_tune:absent", "cannot be had: AttributeError"),
        ("model_to_tune:nothing", "made no call of cunorm that runs on a GPU"),
        ("model_to_tune:fails", "failed: ValueError: no data"),
    ],
)
def test_a_model_that_cannot_be_run_is_said_in_a_line(folder, model, capsys, name, words):
    assert main(["tune", "--model", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def product_of(rows: int) -> LinearProblem:
    """Return a product that no shipped table knows."""
    return LinearProblem("rms_norm", rows, 896, 2688, "float16", x_stride=896, weight_stride=896)


def test_a_product_is_one_launch_where_that_was_faster(folder, monkeypatch, capsys):
    """One launch was faster only for 8 rows. Many rows are left out, because cuBLASLt is missing."""
    times = Times(2.0, 2.0, 2.0), Times(1.0, 1.0, 1.0)

    def search(problem, gpu, step):
        step()
        faster = problem.rows == 8
        return search_linear.FoundLinear(times[0], times[faster], search_linear.Way(4) if faster else None, 3, 0, "")

    monkeypatch.setattr(tune, "search_linear", search)
    assert linear_plan.chosen(product_of(8), H100).steps[0].spec.division.cluster == 1, "by the rule"
    assert main(["tune", *PRODUCT, "--rows", "8", "32", "512"]) == 0
    (path,) = folder.glob("*.json")
    assert tables.read(path).products == {896: {2688: {8: 4}}}
    assert linear_plan.chosen(product_of(1), H100).steps[0].spec.division.cluster == 4
    assert len(linear_plan.chosen(product_of(9), H100).steps) == 2, "by the rule"
    output = capsys.readouterr().out
    assert "layer_norm_linear bfloat16 512 x 896 -> 2688: left out, in one launch it is for up to 32 rows" in output
    assert "layer_norm_linear bfloat16 8 x 896 -> 2688: 2000000.00 us, now 1000000.00 us" in output
    assert "1 of 2 launches are faster than before" in output


def test_an_algorithm_of_cublas_is_kept_where_it_was_faster(folder, monkeypatch):
    """For 32 rows the table also says that it is split; for 512 rows there is no other way."""
    times = Times(2.0, 2.0, 2.0), Times(1.0, 1.0, 1.0)
    way = search_linear.Way(0, (66, 7, 1))
    monkeypatch.setattr(tune, "why_not", lambda *_: "")
    monkeypatch.setattr(tune, "search_linear", lambda *_: search_linear.FoundLinear(*times, way, 3, 0, "13.1"))
    assert main(["tune", *PRODUCT, "--rows", "32", "512"]) == 0
    (path,) = folder.glob("*.json")
    assert tables.read(path).products == {896: {2688: {32: 0}}}
    assert tables.read(path).algorithms == {"13.1": {896: {2688: {32: (66, 7, 1), 512: (66, 7, 1)}}}}
    assert tables.algorithm(H100, "13.1", 896, 2688, 512) == (66, 7, 1)
    assert tables.algorithm(H100, "13.1", 896, 2688, 513) == ()
    assert tables.algorithm(H100, "13.2", 896, 2688, 512) == ()


ONE, OTHER = (66, 7, 1), (66, 8, 1)


@pytest.mark.parametrize(
    ("seconds", "spread", "wrong", "better"),
    [
        ({1: 0.9, 2: 0.8, 4: 1.2}, 0.001, (), Way(2)),
        ({1: 0.9, 2: 0.8, 4: 1.2}, 0.001, (2,), Way(1)),  # the fastest is wrong
        ({1: 0.9, 2: 0.8, OTHER: 0.7}, 0.001, (), Way(0, OTHER)),
        ({1: 0.9, OTHER: 0.7}, 0.001, (OTHER,), Way(1)),
        ({1: 0.99, 2: 1.0, 4: 1.2}, 0.02, (), None),  # ahead by less than the spread
        ({1: 1.1, 2: 1.2, 4: 1.3}, 0.0, (), None),
        ({1: 0.9, OVERLAPPED: 0.8}, 0.001, (), Way(OVERLAPPED)),
    ],
)
def test_a_way_is_better_if_it_is_right_and_ahead_by_more_than_the_spread(monkeypatch, seconds, spread, wrong, better):
    problem = product_of(8)

    class Arrays:
        def __init__(self, _):
            pass

        def today(self, index):
            return 0

        def products(self):
            return {algorithm: algorithm for algorithm in (ONE, OTHER)}

        def cublas(self):
            return "13.1"

        def split(self, product, index):
            return product

        def planned(self, plan, index):
            return plan.steps[0].spec.division.cluster if len(plan.steps) == 1 else OVERLAPPED

        def numbers(self, way):
            return numpy.array([1.0, 2.1 if way in wrong else 2.0])

        def timer(self, call):
            turns = iter(range(10**6))
            return lambda: seconds.get(call(0), 1.0) + spread * (next(turns) % 5 - 2)

    monkeypatch.setattr(search_linear, "Arrays", Arrays)
    monkeypatch.setattr(search_linear, "sound", lambda kernels, *_: [*kernels])
    result = search_linear.search_linear(problem, H100)
    assert (result.better, result.tried) == (better, 6 - len(wrong))
    assert (result.best == result.today) == (better is None)


class Buffers:
    """A stand-in for the search's buffers: today's plan takes 1.0 s, others what the test says, all with a spread."""

    def __init__(self, seconds: dict[NormSpec, float], spread: float, wrong: set[NormSpec]):
        self.seconds, self.spread, self.wrong = seconds, spread, wrong

    def of(self, solution: Plan) -> NormSpec | None:
        key = tables.Launch.of(solution.steps[0].spec)
        return next((spec for spec in self.seconds if tables.Launch.of(spec) == key), None)

    def timer(self, solution: Plan) -> Callable[[], float]:
        spec, turns = self.of(solution), iter(range(10**6))
        seconds = 1.0 if spec is None else self.seconds[spec]
        return lambda: seconds + self.spread * (next(turns) % 5 - 2)

    def results(self, solution: Plan) -> dict[str, Any]:
        return {}

    def fault(self, solution: Plan, expected: object) -> str:
        return "y has other bits" if self.of(solution) in self.wrong else ""


@pytest.mark.parametrize(
    ("seconds", "spread", "wrong", "best"),
    [
        ((0.9, 0.8, 1.2), 0.001, (), 1),
        ((0.9, 0.8, 1.2), 0.001, (1,), 0),  # the fastest writes other bits
        ((0.99, 1.0, 1.2), 0.02, (), None),  # ahead by less than the spread
        ((1.0, 1.1, 1.2), 0.0, (), None),
    ],
)
def test_a_launch_is_better_if_it_is_ahead_by_more_than_the_spread_and_has_todays_bits(
    monkeypatch, seconds, spread, wrong, best
):
    task = problem("forward", 16384, 4096, "bfloat16")
    others = candidates(task, choose(task, H100), H100, 3)
    buffers = Buffers(dict(zip(others, seconds, strict=True)), spread, {others[place] for place in wrong})
    monkeypatch.setattr(searching, "Buffers", lambda _: buffers)
    monkeypatch.setattr(searching, "_without_spills", lambda plans, *_: list(plans))
    result = searching.search(task, plan(task, H100), others, H100)
    assert result.better == (None if best is None else others[best])
    assert [spec for spec, _ in result.faults] == [others[place] for place in wrong]


@pytest.mark.parametrize(
    ("direction", "spills", "kept"),
    [
        ("forward", lambda spec: False, 3),
        ("forward", lambda spec: spec.ctas_per_sm > 1, 0),
        ("backward", lambda spec: isinstance(spec, NormSpec) and not spec.aligned, 0),  # at odd addresses
        ("backward", lambda spec: isinstance(spec, SumSpec), 0),
    ],
)
def test_candidates_that_spill_are_left_out(monkeypatch, direction, spills, kept):
    def compile_all(work, _):
        return (Compiled(spec, arch, None, "spills" if spills(spec) else "") for spec, arch in work)

    monkeypatch.setattr(searching, "compile_all", compile_all)
    monkeypatch.setattr(searching, "compiler", lambda keep: nullcontext())
    task = problem(direction, 16384, 4096, "bfloat16")
    plans = {launches(task, spec, H100): spec for spec in candidates(task, choose(task, H100), H100, 3)}
    assert len(searching._without_spills(plans, task, H100, lambda: None)) == kept


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_sums_over_rows_may_differ_by_roundings_and_by_no_row(name):
    """Other partial sums may round otherwise, but a row that is missing is a fault."""
    task = problem("backward", 4096, 1024, name)
    operand = task.by_name["dweight"]
    terms = numpy.random.default_rng(0).standard_normal((4096, 1024))
    results = {
        "today": {"dweight": searching.bytes_of(terms.sum(0), operand)},
        "rounded": {"dweight": searching.bytes_of(terms.sum(0) * (1 + 2.0**-9), operand)},
        "missing": {"dweight": searching.bytes_of(terms[40:].sum(0), operand)},
        "unwritten": {"dweight": numpy.full_like(searching.bytes_of(terms.sum(0), operand), 255)},
    }
    buffers = SimpleNamespace(problem=task, results=results.__getitem__)
    faults = {name: searching.Buffers.fault(buffers, name, results["today"]) for name in results}
    assert [name for name, fault in faults.items() if fault] == ["missing", "unwritten"]


class Memory(cpu_cupy.Array):
    """An array with the methods of GPU memory that the search calls."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], memset=lambda value, _: self.fill(value))

    def set(self, content: numpy.ndarray) -> None:
        self[...] = content


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(problem("forward", 6, 200, "bfloat16", strides={"x": RowStrides(208, 1000, 2)}), id="views"),
        pytest.param(problem("backward", 40, 200, "float32", weight="bfloat16"), id="backward"),
        pytest.param(
            float8_problem("rms_norm", 5, 200, "bfloat16", "bfloat16", y8="float8_e4m3fn", granularity="row"), id="FP8"
        ),
    ],
)
@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "one kernel writes something else"])
def test_a_search_on_the_stand_in(monkeypatch, task, broken):
    """The search's arrays, calls and checks are real. Its clock says that candidates take half the time."""
    runs = cpu_cupy.Runs(Machine())
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(id=0, synchronize=lambda: None),
        get_current_stream=lambda: SimpleNamespace(ptr=0),
    )
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(
        cuda=cuda,
        empty=lambda size, dtype: Memory((size,), dtype),
        asnumpy=numpy.array,
        get_default_memory_pool=lambda: pool,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(searching, "launch", runs)
    monkeypatch.setattr(searching, "_without_spills", lambda plans, *_: list(plans))
    monkeypatch.setattr(searching.timing, "buffers_needed", lambda _: 2)
    with mock.patch.object(backward_rule, "MOST_ROWS", 0):
        today = choose(task, SMALL)
        others = candidates(task, today, SMALL, 10**9)[::40][:3]
    solution = launches(task, today, SMALL)

    def timer(calls: list[Callable[[], None]], rounds: int) -> Callable[[], float]:
        for call in calls:
            call()
        seconds = 1.0 if runs.plans[-1] is solution else 0.5
        return lambda: seconds

    monkeypatch.setattr(searching.timing, "cupy_timer", timer)
    if broken:
        run = runs.run

        def wrong(plan: Plan, *arguments: Any) -> None:
            run(plan, *arguments)
            if plan is not solution:
                pointer = arguments[2][
                    task.pointers.index(next(operand.name for operand in task.operands if operand.written))
                ]
                ctypes.c_char.from_address(pointer).value = b"?"

        monkeypatch.setattr(runs, "run", wrong)
    result = searching.search(task, solution, others, SMALL)
    assert result.tried == len(others) == 3
    assert [why for _, why in result.faults] == (3 * [f"{task.wanted[0]} has other bits"] if broken else [])
    assert result.better in (others if not broken else [None])


@pytest.mark.gpu
def test_on_a_gpu_results_keep_their_bits_and_no_launch_is_slower(cache, monkeypatch):
    """A second search of the same shapes compares the times."""
    import cupy
    from arrays import inputs, same_bits
    from functions import backward, forward

    from cunorm.call import cupy as backend
    from cunorm.call.recipe import Recipes

    def results() -> list[Any]:
        monkeypatch.setattr(backend, "_recipes", Recipes())
        arrays: list[Any] = []
        for rows in (64, 4096):
            x, dy, weight, bias = inputs(cupy, rows, 4096, "bfloat16")
            y, mean, rstd = forward("rms_norm", x, weight, bias)
            arrays += [y, rstd, backward("rms_norm", dy, x, mean, rstd, weight)[0]]
        return arrays

    before = results()
    arguments = ["--op", "rms_norm", "--cols", "4096", "--rows", "64", "4096", "--dtype", "bfloat16"]
    assert main(["tune", *arguments]) == 0
    assert tuned(cache / "tables") == 3  # backward of few rows has only one launch
    assert all(same_bits(array, later_array) for array, later_array in zip(before, results(), strict=True))
    gpu = tune._gpu()
    for direction, rows in (("forward", 64), ("forward", 4096), ("backward", 4096)):
        task = problem(direction, rows, 4096, "bfloat16", "rms_norm")
        best = choose(task, gpu)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "reads_the_users", lambda: False)
            tables.forget()
            shipped = choose(task, gpu)
        tables.forget()
        if best != shipped:
            again = searching.search(task, searching.launches(task, shipped, gpu), [best], gpu)
            assert again.faults == ()
            assert again.fastest[0][0] <= again.today.p80


@pytest.mark.gpu
def test_on_a_gpu_a_product_is_searched(cache, capsys):
    from cunorm.kernel import device

    gpu = device.current(0)
    if reason := linear_plan.why_not(product_of(8), gpu):
        pytest.skip(reason)
    assert main(["tune", *PRODUCT]) == 0
    (path,) = (cache / "tables").glob("*.json")
    assert tables.read(path) is not None
    (tried,) = re.findall(r"\((\d+) launches tried, 0 spill\)", capsys.readouterr().out)
    assert int(tried) >= len(linear_plan.ways(product_of(8), gpu))
