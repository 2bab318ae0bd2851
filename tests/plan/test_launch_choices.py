"""However the threads of a row are spread over warps and CTAs, and however rows wait: its results keep their bits."""

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
from cpu_device import Machine, missing
from cpu_functions import SMALL
from functions import OPS, backward, forward

from cunorm.kernel.device import Device
from cunorm.plan import few_rows
from cunorm.plan.candidates import candidates
from cunorm.plan.choose import choose
from cunorm.plan.launches import launches
from cunorm.plan.plan import plan
from cunorm.plan.problem import Problem
from cunorm.plan.steps import Plan
from cunorm.recipes import Recipes

ROWS = 5
DRAWS = 4  # of the launches that a row could have
STEP = 7919  # a prime, from one drawn launch to the next


def drawn(number: int) -> Callable[[Problem, Device], Plan]:
    """A plan by another launch of the problem's rows; few rows of a backward pass have others as if they were many."""

    def other(problem: Problem, device: Device) -> Plan:
        with mock.patch.object(few_rows, "MOST_ROWS", 0):
            others = candidates(problem, choose(problem, device), device, 10**9)
        return launches(problem, others[number * STEP % len(others)], device) if others else plan(problem, device)

    return other


def assert_same_bits(results: Iterator[tuple[Any, ...]]) -> None:
    for first, second in pairwise(results):
        for one, other, name in zip(first, second, ("y", "mean", "rstd", "dx"), strict=True):
            assert one is None or same_bits(one, other), name


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("cols", "dtype"), [(40, "float32"), (513, "bfloat16"), (2048, "bfloat16"), (9000, "float32")])
def test_on_the_stand_in(op, cols, dtype):
    x, dy, weight, bias = inputs(numpy, ROWS, cols, dtype)
    _, mean, rstd = cpu_functions.forward(Machine(), op, x, weight, bias)

    def results() -> Iterator[tuple[Any, ...]]:
        for patch in (
            contextlib.nullcontext(),
            *(mock.patch.object(cpu_functions, "plan", drawn(n)) for n in range(DRAWS)),
        ):
            with patch:
                dx, *_ = cpu_functions.backward(Machine(), op, dy, x, mean, rstd, weight, device=SMALL)
                yield *cpu_functions.forward(Machine(), op, x, weight, bias, device=SMALL), dx

    assert_same_bits(results())


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [64, 1000, 1600, 4096, 8192, 16384, 49152])
def test_on_a_gpu(op, cols, dtype):
    import cupy

    from cunorm import cupy_arrays, cupy_recipes

    x, dy, weight, bias = inputs(cupy, 700, cols, dtype)

    def results() -> Iterator[tuple[Any, ...]]:
        y, mean, rstd = forward(op, x, weight, bias)
        yield y, mean, rstd, backward(op, dy, x, mean, rstd, weight)[0]
        for number in range(DRAWS):
            with (
                mock.patch.object(cupy_recipes, "plan", drawn(number)),
                mock.patch.object(cupy_arrays, "_recipes", Recipes()),
            ):
                dx, *_ = backward(op, dy, x, mean, rstd, weight)
                yield *forward(op, x, weight, bias), dx

    assert_same_bits(results())
