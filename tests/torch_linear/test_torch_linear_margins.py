"""`sm_margin` of LayerNormLinear and its function: each launch of the norm has that of its pass."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_launches import Launches, on_the_stand_in  # noqa: E402
from torch_tensors import random, same  # noqa: E402

from cunorm.torch import LayerNormLinear, autocast, layer_norm_linear  # noqa: E402
from cunorm.torch.linear import float8_arithmetic, recipes, step, wide  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

COLS, OUTS, ROWS = 64, 32, 8
EACH = {"forward": 1, "backward": 2, "inference": 3}
MARGINS = [(0, (0, 0, 0)), (1, (1, 1, 1)), (EACH, (1, 2, 3)), ({"backward": 2}, (0, 2, 0))]


@pytest.fixture
def on_a_gpu(monkeypatch) -> Launches:
    """Let tensors on the CPU say that they are on a GPU, which has four multiprocessors."""
    launches = on_the_stand_in(monkeypatch, float8_arithmetic)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recipes, "why_not", lambda index: "")
    monkeypatch.setattr(float8_arithmetic, "_by_torch", float8_arithmetic._emulated)
    return launches


def margins(launches: Launches) -> set[int]:
    """Return the margins of the norm's kernels that were launched since the last call; sums over rows have none."""
    problems = [plan.problem for plan in launches.plans]
    launches.plans.clear()
    of_norm = [problem for problem in problems if getattr(problem, "norm", None)]
    return {problem.sm_margin for problem in of_norm if {"x", "rstd"} & set(problem.pointers)}


def module(**options: Any) -> Any:
    torch.manual_seed(0)
    return LayerNormLinear(COLS, OUTS, device="cpu", bias=False, params_dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("in_float8", [False, True])
@pytest.mark.parametrize(("sm_margin", "expected"), MARGINS, ids=str)
def test_each_pass_has_its_own(on_a_gpu, sm_margin, expected, in_float8):
    layer = module(sm_margin=sm_margin)
    x, dy = random(ROWS, COLS, dtype=torch.bfloat16), random(ROWS, OUTS, dtype=torch.bfloat16)
    forward, backward, inference = expected
    for _ in range(2):  # the second call is recognised as one like the first
        leaf = x.clone().requires_grad_()
        with autocast(enabled=in_float8):
            y = layer(leaf)
            assert margins(on_a_gpu) == {forward}
            y.backward(dy)
            assert margins(on_a_gpu) == {backward}
            with torch.no_grad():
                layer(x)
            assert margins(on_a_gpu) == {inference}


@pytest.mark.parametrize(("sm_margin", "expected"), MARGINS, ids=str)
def test_the_function(on_a_gpu, sm_margin, expected):
    x, weight, gamma = random(ROWS, COLS), random(OUTS, COLS, seed=1), random(COLS, seed=2)
    results = []
    for options, of_passes in (({}, (0, 0)), ({"sm_margin": sm_margin}, expected)):
        leaf = x.clone().requires_grad_()
        y = layer_norm_linear(leaf, weight, None, gamma, **options)
        assert margins(on_a_gpu) == {of_passes[0]}
        y.backward(torch.ones_like(y))
        assert margins(on_a_gpu) == {of_passes[1]}
        results.append((y.detach(), leaf.grad))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("sm_margin", [-1, 1.5, "1", True, {"forwards": 1}, {"forward": -1}], ids=str)
def test_what_is_refused(sm_margin):
    with pytest.raises((TypeError, ValueError), match=r"LayerNormLinear: sm_margin"):
        module(sm_margin=sm_margin)
    with pytest.raises((TypeError, ValueError), match=r"layer_norm_linear: sm_margin"):
        layer_norm_linear(random(ROWS, COLS), random(OUTS, COLS), sm_margin=sm_margin)


def test_operators_are_told(monkeypatch):
    """A trace makes one operator of each pass, and each hands over the margin of its pass."""
    seen: list[tuple] = []
    normalise, norm_gradients = step.normalise, step.norm_gradients

    def told(*arguments):
        seen.append(("normalise", arguments[5]))
        return normalise(*arguments)

    def told_gradients(*arguments):
        seen.append(("gradients", arguments[3].backward_sm_margin))
        return norm_gradients(*arguments)

    monkeypatch.setattr(wide, "normalise", told)
    monkeypatch.setattr(step, "normalise", told)
    monkeypatch.setattr(step, "norm_gradients", told_gradients)
    x = random(ROWS, COLS, dtype=torch.bfloat16).requires_grad_()
    torch.compile(module(sm_margin=EACH), fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert seen == [("normalise", 1), ("normalise", 2), ("gradients", 2)]
