"""A call with a new number of rows keeps all that does not depend on it: checks, operands, loaded kernels."""

from __future__ import annotations

import ctypes
import re
import struct
from types import SimpleNamespace
from typing import Any

import cpu_cupy
import numpy
import pytest
from problems import problem

import cunorm
from cunorm.call import cupy as backend
from cunorm.call import recipe
from cunorm.call.recipe import Recipes
from cunorm.kernel import compile, driver, launch, source
from cunorm.kernel.device import H100
from cunorm.plan.plan import plan
from cunorm.plan.steps import WORKSPACE

COLS = 64
ROWS = (2, 1, 300, 7, 63, COLS, 2049, 40_000)  # called in this order; some have kernels of their own


@pytest.fixture
def runs(monkeypatch) -> cpu_cupy.Runs:
    """The plans of calls, of which nothing is computed."""
    return cpu_cupy.play(monkeypatch, H100, SimpleNamespace(run=lambda *_, **__: None))


def array(*shape: int, dtype: str = "float32") -> Any:
    return cpu_cupy.Array(shape, numpy.dtype(dtype))


def of_norm(name: str, *leading: int) -> list[Any]:
    x, dy, weight = array(*leading, COLS), array(*leading, COLS), array(COLS)
    if name == "rms_norm":
        y, rstd = cunorm.rms_norm_forward(x, None, weight)
        return [y, rstd, *cunorm.rms_norm_backward(dy, x, rstd, weight)]
    y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, array(COLS))
    return [y, mean, rstd, *cunorm.layer_norm_backward(dy, x, mean, rstd, weight)]


def of_fused(*leading: int) -> list[Any]:
    x, residual, dy, ds = (array(*leading, COLS) for _ in range(4))
    (y, s), saved = cunorm.add_layer_norm.forward(x, residual, array(COLS), array(COLS))
    return [y, s, *saved.statistics.values(), *cunorm.add_layer_norm.backward(saved, dy, ds).values()]


def of_groups(*leading: int) -> list[Any]:
    """Call with a vector for each index of the first axis."""
    x, scale = array(2, *leading, COLS), array(2, *[1] * len(leading), COLS)
    return [cunorm.layer_norm_modulate(x, scale, scale)]


CALLS = {
    "layer_norm": lambda rows: of_norm("layer_norm", rows),
    "rms_norm": lambda rows: of_norm("rms_norm", rows),
    "layer_norm of three axes": lambda rows: of_norm("layer_norm", rows, 3),
    "layer_norm of views": lambda rows: [cunorm.layer_norm(array(rows, 2 * COLS)[:, :COLS])],
    "add_layer_norm": lambda rows: of_fused(rows),
    "add_layer_norm of three axes": lambda rows: of_fused(rows, 3),
    "layer_norm_modulate": lambda rows: of_groups(rows),
    "layer_norm_modulate of a token": lambda rows: [cunorm.layer_norm_modulate(*[array(rows, 1, COLS)] * 3)],
    "add_rms_norm.fp8": lambda rows: [*cunorm.add_rms_norm.fp8(array(rows, COLS), array(rows, COLS), array(COLS))],
}


def forget(monkeypatch) -> None:
    monkeypatch.setattr(backend, "_recipes", Recipes())


@pytest.mark.parametrize("name", CALLS)
def test_plans_and_results_are_those_of_a_first_call(monkeypatch, runs, name):
    def followed(rows: int) -> Any:
        runs.plans.clear()
        results = CALLS[name](rows)
        plans = [(ran.problem, ran.steps, ran.tier, ran.groups, ran.workspace) for ran in runs.plans]
        return [(array.shape, array.dtype) for array in results if array is not None], plans

    behind_each_other = [followed(rows) for rows in ROWS]
    for rows, plans_and_results in zip(ROWS, behind_each_other, strict=True):
        forget(monkeypatch)
        assert followed(rows) == plans_and_results


CLOSE = [name for name in CALLS if not re.search("views|modulate|fp8", name)]


@pytest.mark.parametrize("name", CLOSE)
def test_nothing_is_checked_and_declared_again(monkeypatch, runs, name):
    CALLS[name](5)
    for function in ("forward_problem", "backward_problem", "_kinds"):
        monkeypatch.setattr(recipe, function, lambda *_, **__: pytest.fail("made again"))
    for rows in (3000, 2, 40_000):
        CALLS[name](rows)


def test_what_was_refused_is_refused_still(runs):
    """With as many rows as columns, a vector could be taken for per-row scalars."""
    for rows in (COLS, 5):
        x, short = array(rows, COLS), array(5)
        cunorm.add_rms_norm(x, x, array(COLS))
        cunorm.rms_norm(x, None, array(COLS))
        for call in (lambda x, weight: cunorm.add_rms_norm(x, x, weight), lambda x, y: cunorm.rms_norm(x, None, y)):
            with pytest.raises(ValueError, match="weight"):
                call(x, short)
        _, rstd = cunorm.rms_norm_forward(x)
        with pytest.raises(ValueError, match="rstd"):
            cunorm.rms_norm_backward(x, x, array(rows + 1), None)
        with pytest.raises(ValueError, match="dy"):
            cunorm.rms_norm_backward(array(rows + 1, COLS), x, rstd, None)


NO_GPU = -1  # its kernels, which are loaded here, are launched nowhere else


def loaded_without_a_gpu(monkeypatch) -> list[Any]:
    """Return a list that will have the kernels which a launch loads."""
    cupy = pytest.importorskip("cupy")
    loads: list[Any] = []
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "_load", lambda spec, _: loads.append(spec) or SimpleNamespace(ptr=len(loads)))
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", lambda _: None)
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=None))
    launch._loaded.cache_clear()
    return loads


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_loaded_kernel_is_found_without_its_text(monkeypatch, direction, op):
    """Plans for other numbers of rows make neither the text nor the parameters of a kernel, and load nothing."""
    loads = loaded_without_a_gpu(monkeypatch)
    plans = {rows: plan(problem(direction, rows, 1024, "bfloat16", op), H100) for rows in range(20_000, 20_100)}
    launch.prepared(plans.pop(20_000), NO_GPU, 0)
    assert len(loads) == len({*loads})
    for module, name in ((source, "parameters"), (launch, "parameters"), (launch, "kernel"), (source, "source")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("made again"))
    for solution in plans.values():
        launch.prepared(solution, NO_GPU, 0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_launches_of_a_kernel_have_arguments_of_their_own(monkeypatch, direction):
    """Plans for other numbers of rows write to the same memory, which the driver copies at each launch."""
    loaded_without_a_gpu(monkeypatch)
    passed: list[tuple[tuple[int, int, int], list[int]]] = []  # the grid and the arguments, as bits

    def with_attributes(config: Any, kernel: Any, arguments: Any, _: None) -> int:
        grid = config._obj
        read((grid.grid_x, grid.grid_y, grid.grid_z), arguments.value)
        return 0

    def read(grid: tuple[int, int, int], start: int) -> None:
        of_step = next(steps)
        count = len(of_step.pointers) + len(of_step.scalars) + len(of_step.integers)
        addresses = (ctypes.c_uint64 * count).from_address(start)
        passed.append((grid, [ctypes.c_uint64.from_address(address).value for address in addresses]))

    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", lambda _, x, y, z, *rest: read((x, y, z), rest[-2]))
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=with_attributes))
    plans = [plan(problem(direction, rows, 1024, "bfloat16", "layer_norm"), H100) for rows in (200_000, 300_000)]
    assert plans[0].steps[0].spec == plans[1].steps[0].spec
    for solution in (*plans, *plans):
        steps, names = iter(solution.steps), (*solution.problem.pointers, WORKSPACE)
        at = {name: 1 << 40 | place for place, name in enumerate(names)}
        eps = 1e-5 * solution.problem.rows
        passed.clear()
        given = [*(at[name] for name in solution.problem.pointers), *[eps] * len(solution.problem.scalars)]
        launch.run(solution, NO_GPU, 0, given, at[WORKSPACE])
        eps_bits = struct.unpack("I4x", struct.pack("f4x", eps))[0]
        assert passed == [
            (
                step.grid,
                [
                    *(at[name] + offset for name, offset in step.pointers),
                    *[eps_bits] * len(step.scalars),
                    *step.integers,
                ],
            )
            for step in solution.steps
        ]
