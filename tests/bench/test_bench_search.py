"""Other kernels for the rows of a plan are right too: a search on a GPU would be ended by one that is not."""

from __future__ import annotations

from unittest import mock

import cpu_functions
import numpy
import pytest
from arrays import inputs
from cpu_device import Machine, missing
from cpu_functions import SMALL
from problems import problem
from test_launch_choices import drawn

from bench.other_plans import other_kernels, plan_by
from cunorm.kernel.device import KNOWN
from cunorm.plan.choose import tier_of
from cunorm.plan.plan import plan

ROWS = 5
EXAMPLES = 3


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [64, 1000, 4096, 16384])
def test_the_plans_own_kernel_gives_its_plan(direction, cols):
    many = problem(direction, 100_000, cols, "bfloat16")
    (_, own) = tier_of(many, KNOWN[90]) or pytest.fail("streamed")
    assert plan_by(many, own, KNOWN[90]).steps == plan(many, KNOWN[90]).steps


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_nearest_come_first_and_are_distinct(direction):
    many = problem(direction, 16384, 4096, "bfloat16")
    (_, own) = tier_of(many, KNOWN[90]) or pytest.fail("streamed")
    found = other_kernels(many, KNOWN[90], 300)
    assert len(set(found)) == 300
    assert own not in found
    assert found == other_kernels(many, KNOWN[90], 10**9)[:300]
    alike = other_kernels(many, KNOWN[90], 300, same_bits=True)
    assert {one.shape.order for one in alike} == {own.shape.order}
    assert len({one.shape.threads for one in alike}) > 1


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("cols", [40, 513, 2048, 9000])
def test_other_kernels_are_right(op, cols):
    """A few of them, of rows in parts of warps, warps, CTAs and clusters."""
    x, dy, weight, bias = inputs(numpy, ROWS, cols, "bfloat16")
    for number in range(EXAMPLES):
        other = drawn(number, same_bits=False)
        with mock.patch.object(cpu_functions, "plan", other), mock.patch.object(cpu_functions, "plan_of_many", other):
            cpu_functions.check(Machine("memory"), op, x, dy, weight, bias, device=SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "cols"), [(64, 1024), (3000, 4096)])
def test_a_search_on_a_gpu(direction, rows, cols):
    from bench.search import search
    from bench.suites import Case

    found = search(Case("layer_norm", direction, rows, cols, "bfloat16"), 12, False)
    assert found["tried"] + found["spilled"] == 12
    assert found["wrong"] == []
    assert 0 < found["fastest"][0]["us"] < 3 * found["today_us"]
