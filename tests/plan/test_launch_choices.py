"""A row has the same bits by every legal launch, however its threads are spread and however rows wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import cpu_functions
import numpy
import pytest
from arrays import inputs, same_bits
from cpu_device import Machine, missing, poisoned
from cpu_functions import SMALL
from functions import OPS, backward, forward
from matrix import KINDS_OF_FUSIONS

from cunorm.call.recipe import Recipes
from cunorm.commands.search import bytes_of
from cunorm.kernel.device import Device
from cunorm.operation import FUSIONS
from cunorm.plan import backward as backward_rule
from cunorm.plan.candidates import candidates
from cunorm.plan.choose import choose
from cunorm.plan.launches import launches
from cunorm.plan.plain_problems import float8_problem, whole
from cunorm.plan.plan import plan
from cunorm.plan.problem import Groups, Problem, forward_problem
from cunorm.plan.steps import Plan

ROWS = 5
DRAWS = 4  # launches that are tried, out of all that a row could have
STEP = 7919  # a prime: the distance from one drawn launch to the next


def drawn(number: int) -> Callable[[Problem, Device], Plan]:
    """Return a function like `plan` that takes another launch than the best.

    With MOST_ROWS at 0, the few rows of a backward pass get the launches of many.
    """

    def other(problem: Problem, device: Device) -> Plan:
        with mock.patch.object(backward_rule, "MOST_ROWS", 0):
            others = candidates(problem, choose(problem, device), device, 10**9)
        return launches(problem, others[number * STEP % len(others)], device) if others else plan(problem, device)

    return other


def assert_same_bits(results: Iterator[tuple[Any, ...]]) -> None:
    for first, second in pairwise(results):
        for array, other_array, name in zip(first, second, ("y", "mean", "rstd", "dx"), strict=True):
            assert array is None or same_bits(array, other_array), name


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("cols", "dtype"), [(40, "float32"), (513, "bfloat16"), (2048, "bfloat16"), (9000, "float32")])
def test_on_the_stand_in(op, cols, dtype):
    """Each norm tries a share of the drawn launches."""
    x, dy, weight, bias = inputs(numpy, ROWS, cols, dtype)
    _, mean, rstd = cpu_functions.forward(Machine(), op, x, weight, bias)

    def results() -> Iterator[tuple[Any, ...]]:
        for patch in (
            contextlib.nullcontext(),
            *(mock.patch.object(cpu_functions, "plan", drawn(n)) for n in range(OPS.index(op), DRAWS, len(OPS))),
        ):
            with patch:
                dx, *_ = cpu_functions.backward(Machine(), op, dy, x, mean, rstd, weight, device=SMALL)
                yield *cpu_functions.forward(Machine(), op, x, weight, bias, device=SMALL), dx

    assert_same_bits(results())


def of_function(name: str, rows: int, cols: int, groups: Groups | None = None, **more: str) -> Problem:
    """Return the problem of the forward pass of a named fused operation."""
    operation = FUSIONS[name]()
    kinds = {operand: KINDS_OF_FUSIONS.get(operand, "column") for operand in operation.operands}
    dtypes = dict.fromkeys(("x", "y", "s", *operation.operands), "bfloat16")
    dtypes = {operand: dtype for operand, dtype in dtypes.items() if operand != "s" or operation.prologue} | more
    kinds |= {"y8_scale": "per_row"} if more else {}
    return forward_problem(operation, rows, cols, dtypes, kinds=kinds, groups=groups)


def written(solution: Plan) -> dict[str, bytes]:
    """Run a plan on the stand-in, and return the bytes that it writes by name, without sums over rows."""
    problem = solution.problem
    arrays = {}
    for operand in problem.operands:
        count = operand.size(problem.rows, problem.cols)
        arrays[operand.name] = array = poisoned(count * operand.itemsize)
        if not operand.written:
            array[:] = bytes_of(abs(numpy.random.default_rng(count).standard_normal(count)) + 0.5, operand)
    Machine().run(solution, dict.fromkeys(problem.scalars, 0.5), **arrays)
    kept = (operand.name for operand in problem.operands if operand.written and operand.name not in problem.sums)
    return {name: arrays[name].tobytes() for name in kept}


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(of_function("add_rms_norm", 5, 1000), id="sum"),
        pytest.param(of_function("add_layer_norm", 3, 34000), id="sum, clusters"),
        pytest.param(of_function("rms_norm_gated", 5, 2048), id="gate"),
        pytest.param(of_function("layer_norm_modulate", 12, 2048, Groups(2, 3)), id="groups"),
        pytest.param(of_function("layer_norm_modulate", 6, 34000, Groups(1, 3)), id="groups, clusters"),
        pytest.param(of_function("rms_norm_modulate", 12, 64, Groups(2, 3)), id="groups in a warp"),
        pytest.param(of_function("add_rms_norm", 5, 2048, y8="float8_e4m3fn"), id="sum to FP8"),
        *(
            pytest.param(
                float8_problem("layer_norm", 5, cols, *["bfloat16"] * 3, y8="float8_e4m3fn", granularity=granularity),
                id=f"FP8 by {granularity}, {cols}",
            )
            for cols, granularity in ((2048, "row"), (34000, "row"), (4096, 128), (200, "tensor"))
        ),
        pytest.param(whole("layer_norm", "backward", 3, 34000, "bfloat16", "float32"), id="backward, clusters"),
    ],
)
def test_other_operations_on_the_stand_in(problem):
    """The few rows here get the launches of many, because those of few rows are others."""
    expected = written(plan(problem, SMALL))
    for number in range(DRAWS // 2):
        other = drawn(number)(problem, SMALL)
        for name, content in written(other).items():
            assert content == expected[name], (name, other.steps[0].spec)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [64, 1000, 1600, 4096, 8192, 16384, 49152])
def test_on_a_gpu(op, cols, dtype):
    import cupy

    from cunorm.call import cupy as backend
    from cunorm.call import recipe

    x, dy, weight, bias = inputs(cupy, 700, cols, dtype)

    def results() -> Iterator[tuple[Any, ...]]:
        y, mean, rstd = forward(op, x, weight, bias)
        yield y, mean, rstd, backward(op, dy, x, mean, rstd, weight)[0]
        for number in range(DRAWS):
            with (
                mock.patch.object(recipe, "plan", drawn(number)),
                mock.patch.object(backend, "_recipes", Recipes()),
            ):
                dx, *_ = backward(op, dy, x, mean, rstd, weight)
                yield *forward(op, x, weight, bias), dx

    assert_same_bits(results())
