"""The launches from which a search chooses are right, and so is what it writes."""

from __future__ import annotations

from unittest import mock

import cpu_functions
import numpy
import pytest
from arrays import inputs
from cpu_device import Machine, missing
from cpu_functions import SMALL
from test_launch_choices import drawn

ROWS = 5
EXAMPLES = 1  # for each norm; test_launch_choices.py compares the bits of more, without a sanitizer


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("cols", [40, 513, 2048, 9000])
def test_candidates_are_right(op, cols):
    """A few candidates are right for rows in parts of warps, warps, CTAs and clusters, other ones for each norm."""
    x, dy, weight, bias = inputs(numpy, ROWS, cols, "bfloat16")
    first = EXAMPLES * (op == "rms_norm")
    for number in range(first, first + EXAMPLES):
        other = drawn(number)
        with mock.patch.object(cpu_functions, "plan", other), mock.patch.object(cpu_functions, "plan_of_many", other):
            cpu_functions.check(Machine("memory"), op, x, dy, weight, bias, device=SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("direction", "rows", "cols"),
    [("forward", 64, 1024), ("forward", 3000, 4096), ("backward", 3000, 4096), ("backward", 30000, 1024)],
)
def test_a_search_on_a_gpu(direction, rows, cols, tmp_path):
    from bench import search
    from bench.suites import Case

    case, table = Case("layer_norm", direction, rows, cols, "bfloat16"), tmp_path / "table.json"
    assert not search.is_measured(case, table)
    searched = search.search_case(case, 12, table)
    assert searched["tried"] + searched["spilled"] == 12
    assert searched["wrong"] == []
    assert 0 < searched["fastest"][0]["us"] < 3 * searched["today_us"]
    assert search.is_measured(case, table)


@pytest.mark.gpu
def test_few_rows_of_a_backward_pass_have_one_launch():
    from bench.search import search_case
    from bench.suites import Case

    assert search_case(Case("layer_norm", "backward", 64, 1024, "bfloat16"), 12)["left_out"]
