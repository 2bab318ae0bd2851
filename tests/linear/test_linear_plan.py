"""How a norm with its product runs: what is split, what a table decides, and calls of CuPy arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cpu_cupy
import numpy
import pytest
from cpu_device import divided, missing
from linear_cpu import EPS, HopperMachine, arrays, case, check_product, gpu, know, run

from cunorm.call.checks import Layout
from cunorm.kernel.device import H100, KNOWN
from cunorm.linear import plan
from cunorm.linear.checks import LinearOptions
from cunorm.linear.problem import NAMES, LinearProblem
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan as norm_plan
from cunorm.plan.tables import OVERLAPPED, SPLIT

H200 = KNOWN[90]
PROBLEM = LinearProblem("layer_norm", 16, 4096, 12288, "bfloat16", bias=True, x_stride=4096, weight_stride=4096)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"rows": 33}, ""),
        ({"rows": 193}, "for up to 32 rows, not 193; overlapped it is for up to 192 rows, not 193"),
        ({"dtype": "float32"}, "not float32"),
        ({"cols": 4092}, "multiples of 8"),
        ({"outs": 12}, "multiples of 8"),
        ({"x_stride": 4100}, "a multiple of 16 bytes"),
        ({"aligned": False}, "a multiple of 16 bytes"),
        ({"ln_weight": "float64"}, ""),
        ({"rows": 0}, "rows, not 0"),
        ({"outs": 132 * 256 + 8}, ""),
        ({"outs": 132 * 256 + 8, "rows": 33}, "for up to 33792 outs of 33 rows, not 33800"),
    ],
)
def test_what_is_split(changes, reason):
    problem = replace(PROBLEM, **changes)
    why = plan.why_not(problem, H100)
    assert reason in why if reason else not why
    assert "sm_80" in plan.why_not(PROBLEM, KNOWN[80])


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, {2, 4, 8, OVERLAPPED}),
        ({"ln_weight": "float64"}, {OVERLAPPED}),
        ({"rows": 33}, {OVERLAPPED}),
        ({"rows": 193}, set()),
        ({"outs": 132 * 256 + 8}, {2, 4, 8}),
        ({"cols": 40000, "x_stride": 40000, "weight_stride": 40000}, {OVERLAPPED}),  # a row is too long for one CTA
        ({"cols": 8, "x_stride": 8, "weight_stride": 8}, {OVERLAPPED}),  # of one thread
    ],
)
def test_ways(changes, ways):
    assert set(plan.ways(replace(PROBLEM, **changes), H100)) == ways


def test_the_table_decides(monkeypatch):
    assert plan.describe(PROBLEM, KNOWN[80]).startswith("split")
    know(monkeypatch, H100.sms, {4096: {12288: {16: 2, 64: OVERLAPPED}, 14336: {16: 0}}})
    chosen = plan.chosen(PROBLEM, H100)
    assert chosen is not None
    assert chosen.steps[0].grid == (132, 1, 1)
    assert plan.describe(PROBLEM, H100).startswith("one launch: one_launch of layer_norm, 4096 cols")
    several = plan.chosen(replace(PROBLEM, rows=33), H100)
    assert several is not None
    assert [step.begins_early for step in several.steps] == [False, True]
    assert several.workspace == 33 * 4096 * 2
    assert plan.describe(replace(PROBLEM, rows=33), H100).startswith("overlapped: forward layer_norm, 4096 cols")
    assert plan.chosen(replace(PROBLEM, outs=13824), H100) is None, "nearer to one that is split"
    assert plan.chosen(replace(PROBLEM, dtype="float32"), H100) is None
    of_another_class = plan.chosen(PROBLEM, H200)
    assert of_another_class is not None
    assert len(of_another_class.steps) == 2, "its rule decides"
    plan.chosen.cache_clear()


@pytest.mark.parametrize(
    ("rows", "cols", "outs", "on_h100", "on_h200"),
    [
        (1, 768, 768, 1, 1),
        (8, 1792, 1024, 1, 1),
        (8, 1800, 1024, 2, 2),  # x is divided
        (8, 8192, 2048, 4, 4),  # and further beside few outs
        (8, 8192, 6144, 2, 2),
        (8, 1152, 132 * 40, 1, OVERLAPPED),
        (16, 2048, 1024, 2, 2),
        (16, 4096, 132 * 40, 4, SPLIT),
        (16, 4096, 132 * 200, 2, 2),
        (16, 2040, 6144, OVERLAPPED, OVERLAPPED),  # rows are short
        (32, 2048, 2048, SPLIT, SPLIT),  # few outs for each CTA
        (32, 1024, 1024, OVERLAPPED, OVERLAPPED),
        (64, 3072, 132 * 24, OVERLAPPED, OVERLAPPED),
        (64, 4096, 132 * 24, OVERLAPPED, SPLIT),
        (64, 4096, 132 * 48, OVERLAPPED, OVERLAPPED),
        (65, 4096, 132 * 24, SPLIT, SPLIT),
        (128, 4096, 132 * 32, OVERLAPPED, SPLIT),
        (128, 4096, 132 * 56, OVERLAPPED, OVERLAPPED),
        (129, 4096, 132 * 40, SPLIT, SPLIT),
        (192, 4096, 132 * 48, OVERLAPPED, SPLIT),
        (192, 4096, 132 * 96, OVERLAPPED, OVERLAPPED),
        (64, 4096, 132 * 200, SPLIT, OVERLAPPED),  # many
        (193, 4096, 132 * 48, SPLIT, SPLIT),
    ],
)
def test_the_rule_decides_where_nothing_was_measured(monkeypatch, rows, cols, outs, on_h100, on_h200):
    know(monkeypatch, H100.sms, {})
    problem = replace(PROBLEM, rows=rows, cols=cols, outs=outs, x_stride=cols, weight_stride=cols)
    for device, way in ((H100, on_h100), (H200, on_h200)):
        solution = plan.chosen(problem, device)
        if solution is None:
            assert way == SPLIT
        elif len(solution.steps) == 2:
            assert way == OVERLAPPED
        else:
            assert way == solution.steps[0].spec.division.cluster
    plan.chosen.cache_clear()


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize(("shape", "way"), [((3,), 1), ((1, 2), 1), ((1, 2), OVERLAPPED)])
def test_cupy_arrays(monkeypatch, shape, way):
    """CuPy arrays run as the table says. y and statistics get their shapes from x."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from cunorm.linear import planned_cupy

    run_case = case(math.prod(shape), 768, 136, max(way, 0), 4, x_stride=776)
    given = arrays(run_case)
    made: dict[int, numpy.ndarray] = {}

    def new(shape: tuple[int, ...], dtype: Any) -> Any:
        return keep(cpu_cupy.Array(shape, dtype))

    def keep(array: Any) -> Any:
        made[array.data.ptr] = array
        return array

    class Runs:
        @staticmethod
        def run(plan, device_id, stream, arguments, workspace):
            assert plan.workspace == (made[workspace].nbytes if workspace else 0)
            pointers, scalars = divided(plan, arguments)
            HopperMachine().run(plan, scalars, **{name: made.get(pointer) for name, pointer in pointers.items()})

    cupy = SimpleNamespace(ndarray=new, cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))
    gpus = SimpleNamespace(current=lambda _: gpu(run_case.sms))
    for name, part in {"cupy": cupy, "launch": Runs, "device": gpus}.items():
        monkeypatch.setattr(planned_cupy, name, part)
    know(monkeypatch, run_case.sms, {768: {136: {8: way}}})
    of_call = [keep(cpu_cupy.asarray(operand)) for operand in given]
    of_call[0] = of_call[0][:, :768].reshape(*shape, 768) if len(shape) == 1 else of_call[0][None, :, :768]
    named = zip(NAMES, of_call, strict=True)
    layouts = tuple((name, layout(operand)) for name, operand in named)
    forget()
    try:
        options = LinearOptions("test", "layer_norm", EPS, zero_centered_gamma=False, statistics=True)
        results = planned_cupy.forward(options, dict(zip(NAMES, of_call, strict=True)), layouts)
    finally:
        forget()
    assert results is not None
    y, mean, rstd = results
    expected = run(HopperMachine(), run_case, given)
    shapes = ((*shape, 136), shape, shape)
    for actual, expected_array, result_shape in zip(
        (y, mean, rstd), (expected.y, expected.mean, expected.rstd), shapes, strict=True
    ):
        assert actual.shape == result_shape
        assert (actual.reshape(expected_array.shape) == expected_array).all()


def forget() -> None:
    from cunorm.linear import planned_cupy

    plan.chosen.cache_clear()
    planned_cupy._chosen.cache_clear()


def layout(array: Any) -> Layout:
    return Layout(array.shape, tuple(stride // array.itemsize for stride in array.strides), array.dtype.name, "0")


ON_A_GPU = {
    "one row, the mean far away": LinearProblem("layer_norm", 1, 4096, 12288, "bfloat16", bias=True),
    "few rows": LinearProblem("layer_norm", 13, 1032, 1000, "float16", "float16", "float16", True),
    "rows of a bucket": LinearProblem("rms_norm", 32, 2880, 5120, "bfloat16", "float32"),
    "one row more": LinearProblem("layer_norm", 33, 4096, 4096, "bfloat16", "bfloat16", "bfloat16", True),
    "two warpgroups": LinearProblem("layer_norm", 100, 776, 2312, "float16", "float16", "float16", True),
    "three warpgroups": LinearProblem("layer_norm", 192, 8192, 1024, "bfloat16", bias=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("problem", ON_A_GPU.values(), ids=ON_A_GPU)
def test_every_way_has_the_same_bits_in_every_run(problem):
    """Memory is poisoned before each run, and now and then a second stream has an SM."""
    import cupy
    from busy import spin

    from cunorm.kernel import device, launch

    device = device.current(0)
    problem = replace(problem, x_stride=problem.cols, weight_stride=problem.cols)
    if reason := plan.why_not(problem, device):
        pytest.skip(reason)
    given = arrays(case(problem.rows, problem.cols, problem.outs, 0, 132)._replace(problem=problem, offset=1e4))
    on_gpu = {name: cupy.asarray(array.view("uint8")) for name, array in given._asdict().items() if array is not None}

    def run(solution: Any, names: dict[str, str], **written: Any) -> None:
        named = {names.get(name, name): array for name, array in on_gpu.items()} | written
        pointers = [named[name].data.ptr if name in named else 0 for name in solution.problem.pointers]
        launch.run(solution, 0, cupy.cuda.get_current_stream().ptr, (*pointers, EPS), named["workspace"].data.ptr)

    def bytes_of(rows: int, cols: int) -> Any:
        return cupy.empty((rows, 2 * cols), "uint8")

    z, other = bytes_of(problem.rows, problem.cols), cupy.cuda.Stream(non_blocking=True)
    of_norm = plain(
        problem.norm, "forward", problem.rows, problem.cols, problem.dtype, problem.ln_weight, problem.ln_bias
    )
    names = {"weight": "", "bias": "", "ln_weight": "weight", "ln_bias": "bias"}
    run(norm_plan(of_norm, device), names, y=z, workspace=cupy.empty(1, "uint8"))
    for way, solution in plan.ways(problem, device).items():
        y, workspace = bytes_of(problem.rows, problem.outs), cupy.empty(max(1, solution.workspace), "uint8")
        first = None
        for turn in range(300):
            y.fill(0xFF)
            workspace.fill(0xFF)
            if turn % 30 == 0:
                with other:
                    spin(5)
            run(solution, {}, y=y, workspace=workspace)
            first = y.copy() if first is None else first
            assert bool((y == first).all()), (way, turn)
            if way == OVERLAPPED:
                assert bool((workspace == z.ravel()).all()), (way, turn)
        check_product(problem, given, *(cupy.asnumpy(array).view(given.x.dtype) for array in (z, y)))
