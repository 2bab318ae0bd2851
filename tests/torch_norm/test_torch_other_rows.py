"""A call with a new number of rows reuses what does not depend on it. (For CuPy: tests/norms/test_other_rows.py.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_stand_in  # noqa: E402

import cunorm  # noqa: E402
from cunorm.call import recipe  # noqa: E402
from cunorm.kernel.device import H100  # noqa: E402
from cunorm.torch import add_rms_norm, layer_norm, layer_norm_modulate, rms_norm  # noqa: E402
from cunorm.torch.norm import dispatch, gpu, launching  # noqa: E402

COLS = 64
ROWS = (2, 1, 300, 7, 63, COLS, 2049, 40_000)


@pytest.fixture
def runs(monkeypatch) -> Any:
    """Keep the plans that are launched, without computing anything."""
    runs = torch_stand_in.play(monkeypatch)
    runs.machine = SimpleNamespace(run=lambda *_, **__: None)
    monkeypatch.setattr(gpu, "properties_of", lambda *_: H100)
    monkeypatch.setattr(dispatch, "launchable", lambda _: not torch.is_grad_enabled())
    torch_stand_in.forget(monkeypatch)
    return runs


def tensor(*shape: int) -> Any:
    return torch.zeros(shape, requires_grad=True)


CALLS = {
    "layer_norm": lambda rows: layer_norm(tensor(rows, COLS), (COLS,), tensor(COLS), tensor(COLS)),
    "rms_norm": lambda rows: rms_norm(tensor(rows, COLS), (COLS,), tensor(COLS)),
    "layer_norm of two axes": lambda rows: layer_norm(tensor(rows, 4, COLS), (4, COLS), tensor(4, COLS)),
    "rms_norm of three axes": lambda rows: rms_norm(tensor(rows, 3, COLS), (COLS,)),
    "layer_norm, bias in 16 bits": lambda rows: layer_norm(
        tensor(rows, COLS), (COLS,), tensor(COLS), tensor(COLS).detach().half().requires_grad_()
    ),
    "rms_norm of views": lambda rows: rms_norm(tensor(rows, 2 * COLS)[:, :COLS], (COLS,)),
    "add_rms_norm": lambda rows: add_rms_norm(tensor(rows, COLS), tensor(rows, COLS), tensor(COLS))[0],
    "layer_norm_modulate": lambda rows: layer_norm_modulate(
        tensor(2, rows, COLS), tensor(2, 1, COLS), tensor(2, 1, COLS)
    ),
    "layer_norm_modulate of a token": lambda rows: layer_norm_modulate(*(tensor(rows, 1, COLS) for _ in range(3))),
}


def both_passes(runs: Any, name: str, rows: int) -> Any:
    """Return what is launched for both passes, and the shapes that are allocated."""
    runs.plans.clear()
    runs.allocated.clear()
    y = CALLS[name](rows)
    y.backward(torch.zeros_like(y))
    plans = [(plan.problem, plan.steps, plan.tier, plan.groups, plan.workspace) for plan in runs.plans]
    assert [plan.problem.direction for plan in runs.plans] == ["forward", "backward"]
    return plans, list(runs.allocated)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_calls_that_follow_each_other_are_told_apart(monkeypatch, runs, times):
    """Each number of rows comes `times` times, in turns with calls of other layouts and dtypes."""
    turns = [(name, rows) for rows in ROWS for name in CALLS for _ in range(times)]
    followed = [both_passes(runs, *turn) for turn in turns]
    for turn, passes in zip(turns, followed, strict=True):
        torch_stand_in.forget(monkeypatch)
        assert both_passes(runs, *turn) == passes


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm of three axes", "add_rms_norm"])
def test_nothing_is_asked_again_of_other_rows(monkeypatch, runs, name):
    both_passes(runs, name, 5)
    for module, function in ((dispatch, "_described"), (launching, "layouts_of"), (launching, "_backward_recipe")):
        monkeypatch.setattr(module, function, lambda *_: pytest.fail("asked again"))
    for rows in (3000, 3000, 3000, 2, 40_000):
        both_passes(runs, name, rows)


@pytest.mark.parametrize(
    "x",
    [
        lambda: tensor(16, 12, COLS).transpose(0, 1),
        lambda: tensor(12, 16, 2 * COLS)[..., :COLS],
        lambda: tensor(COLS, COLS),
        lambda: tensor(1, COLS),
        lambda: tensor(0, COLS),
        lambda: tensor(12 * COLS + 1)[1:].view(12, COLS),
        lambda: tensor(COLS),
    ],
    ids=["transposed", "views", "as many rows as columns", "a row", "no rows", "misaligned", "a vector"],
)
def test_what_differs_in_more_than_its_rows_is_planned_alone(monkeypatch, runs, x):
    def passes() -> Any:
        runs.plans.clear()
        y = rms_norm(x(), (COLS,), tensor(COLS))
        y.backward(torch.zeros_like(y))
        return [(plan.problem, plan.steps) for plan in runs.plans]

    alone = passes()
    torch_stand_in.forget(monkeypatch)
    for shape in ((5, COLS), (5, 3, COLS)):
        rms_norm(tensor(*shape), (COLS,), tensor(COLS)).sum().backward()
    assert [passes(), passes(), passes()] == 3 * [alone]


@pytest.mark.parametrize("numbers", [ROWS, (COLS, *ROWS)], ids=["two rows first", "as many rows as columns first"])
@pytest.mark.parametrize("name", CALLS)
def test_plans_and_results_are_those_of_a_first_call(monkeypatch, runs, name, numbers):
    followed = [both_passes(runs, name, rows) for rows in numbers]
    for rows, passes in zip(numbers, followed, strict=True):
        torch_stand_in.forget(monkeypatch)
        assert both_passes(runs, name, rows) == passes


@pytest.mark.parametrize("name", [name for name in CALLS if "views" not in name and "modulate" not in name])
def test_nothing_is_checked_and_declared_again(monkeypatch, runs, name):
    both_passes(runs, name, 5)
    for function in ("forward_problem", "backward_problem", "_kinds"):
        monkeypatch.setattr(recipe, function, lambda *_, **__: pytest.fail("made again"))
    for rows in (3000, 2, 40_000):
        both_passes(runs, name, rows)


def test_a_recipe_follows_from_that_of_other_rows(monkeypatch, runs):
    """Calls that return statistics are not remembered, and ask for a recipe each time, as operators do."""
    cunorm.layer_norm_forward(tensor(5, COLS), None, tensor(COLS))
    monkeypatch.setattr(launching, "_forward_recipe", lambda *_: pytest.fail("made again"))
    for rows in (3000, 2, 40_000):
        y, mean, _ = cunorm.layer_norm_forward(tensor(rows, COLS), None, tensor(COLS))
        assert (y.shape, mean.shape, runs.plans[-1].problem.rows) == ((rows, COLS), (rows,), rows)


@pytest.mark.parametrize("weight", [[1.0] * COLS, "ones", 1.0])
def test_what_is_no_tensor_is_refused_after_other_rows_too(runs, weight):
    both_passes(runs, "rms_norm", 5)
    with pytest.raises(TypeError, match="weight"):
        rms_norm(tensor(6, COLS), (COLS,), weight)


def test_what_was_refused_is_refused_still(runs):
    """With as many rows as columns, a vector could be mistaken for per-row scalars."""
    for rows in (COLS, 5):
        both_passes(runs, "add_rms_norm", rows)
        both_passes(runs, "rms_norm", rows)
        x, short = tensor(rows, COLS), tensor(5)
        for call in (lambda: add_rms_norm(x, x, short), lambda: rms_norm(x, (COLS,), short)):  # noqa: B023
            with pytest.raises(RuntimeError, match="weight"):
                call()
