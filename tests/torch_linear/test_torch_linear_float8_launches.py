"""Launches of LayerNormLinear in FP8 for tensors of a GPU run on the stand-in, and its products are emulated."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_launches import Launches, on_the_stand_in  # noqa: E402
from torch_linear_float8 import make, relative, step  # noqa: E402
from torch_tensors import random, same  # noqa: E402

from cunorm.torch import RowwiseScaling, autocast  # noqa: E402
from cunorm.torch.linear import float8 as in_float8  # noqa: E402
from cunorm.torch.linear import float8_arithmetic, recipes  # noqa: E402
from cunorm.torch.linear import step as steps  # noqa: E402
from cunorm.torch.norm import gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

COLS, OUTS = 64, 96
FEW, MANY = 20, 40
CAST_ROWS = {"CastRows": 1, "ReduceColumns": 1}  # the second adds up partial sums and maxima of the columns
WEIGHT = Counter(CAST_ROWS | {"CastColumns": 1})
FORWARD = Counter({"NormSpec": 1})
# The kernels cast dy by rows and by columns and z by columns, and compute the gradients of the norm.
BACKWARD = Counter(CAST_ROWS | {"CastColumns": 2, "FewRowsSpec": 1})


@pytest.fixture(autouse=True)
def few_rows(monkeypatch) -> None:
    monkeypatch.setattr(in_float8, "FEW_ROWS", FEW)


@pytest.fixture
def on_a_gpu(monkeypatch) -> Launches:
    """Let tensors on the CPU say that they are on a GPU."""
    launches = on_the_stand_in(monkeypatch, float8_arithmetic)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recipes, "why_not", lambda index: "")
    monkeypatch.setattr(float8_arithmetic, "_by_torch", float8_arithmetic._emulated)
    return launches


def inputs(*shape: int, dtype: Any = torch.bfloat16) -> tuple[Any, Any]:
    return random(*shape, COLS, dtype=dtype).requires_grad_(), random(*shape, OUTS, dtype=dtype, seed=1)


def launched(launches: Launches) -> Counter:
    """Return how many kernels of each kind were launched since the last call."""
    kinds = Counter(type(step.spec).__name__ for plan in launches.plans for step in plan.steps)
    launches.plans.clear()
    return kinds


@pytest.mark.slow
def test_as_many_kernels_as_need_be(on_a_gpu):
    module, (x, dy) = make(dtype=torch.bfloat16, cols=COLS, outs=OUTS), inputs(MANY)
    with autocast():
        step(module, x, dy)
        assert launched(on_a_gpu) == WEIGHT + FORWARD + BACKWARD
        step(module, x, dy, True)
        assert launched(on_a_gpu) == WEIGHT + FORWARD + BACKWARD
        step(module, x, dy, False)
        assert launched(on_a_gpu) == FORWARD + BACKWARD
        step(module, *inputs(FEW), False)
        few = launched(on_a_gpu)
        with autocast(recipe=RowwiseScaling(high_precision_wgrad=True)):
            step(module, x, dy, False)
        assert launched(on_a_gpu) == few == FORWARD + FORWARD + Counter(CAST_ROWS | {"FewRowsSpec": 1})
        with torch.no_grad():
            module(x, is_first_microbatch=False)
            assert launched(on_a_gpu) == FORWARD
            module.eval()
            module(x)
            assert launched(on_a_gpu) == FORWARD + Counter(CastRows=1)
            module(x)
            assert launched(on_a_gpu) == FORWARD


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"normalization": "RMSNorm", "return_layernorm_output": True}], ids=str)
def test_a_launch_does_as_the_emulation(request, options):
    """Calls of other numbers of rows, dtypes and strides follow one another, as what is kept goes by layouts."""
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        module = make(dtype=dtype, cols=COLS, outs=OUTS, **options)
        x, dy = inputs(MANY, dtype=dtype)
        wide = random(MANY, 2 * COLS, dtype=dtype)[:, :COLS].requires_grad_()
        cases += [(module, x, dy), (module, *inputs(2, 20, dtype=dtype)), (module, wide, dy), (module, x, dy)]
    with autocast():
        expected = [step(*case) for case in cases]
        request.getfixturevalue("on_a_gpu")
        launches = [step(*case) for case in cases]
    for results, emulated in zip(launches, expected, strict=True):
        for output, emulated_output in zip(results.outputs, emulated.outputs, strict=True):
            assert (output.shape, output.dtype) == (emulated_output.shape, emulated_output.dtype)
            # Statistics may differ by a rounding, and so may bytes beside a boundary.
            assert relative(output, emulated_output) < 8e-3
        for name, gradient in results.gradients.items():
            assert relative(gradient, emulated.gradients[name]) < 8e-3, name


def test_what_is_kept_does_not_go_stale(on_a_gpu):
    """After a change of recipe, weight, its dtype or the norm's parameters, a module has the bits of a new one."""
    module, (x, _) = make(dtype=torch.bfloat16, cols=COLS, outs=OUTS).eval(), inputs(40)

    def as_if_new(recipe: Any = None) -> None:
        with autocast(recipe=recipe), torch.no_grad():
            first, again = module(x), module(x)
            fresh = make(dtype=module.weight.dtype, cols=COLS, outs=OUTS)
            fresh.load_state_dict(module.state_dict())
            expected = fresh(x)
        assert same(first, expected)
        assert same(again, expected)

    as_if_new()
    as_if_new(RowwiseScaling(power_2_scale=True))
    as_if_new()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
            as_if_new()
    module.weight = torch.nn.Parameter(module.weight.detach() * 0.5)
    as_if_new()
    before = on_a_gpu.plans[-1]
    module.float()
    x = x.detach().float()
    as_if_new()
    module.bfloat16()
    x = x.bfloat16()
    as_if_new()
    assert on_a_gpu.plans[-1] is before


def test_the_current_stream_is_asked_for_at_every_launch(on_a_gpu, monkeypatch):
    module, (x, dy) = make(dtype=torch.bfloat16, cols=COLS, outs=OUTS), inputs(40)
    with autocast():
        for stream in (3, 5):
            monkeypatch.setattr(gpu, "stream", lambda index, stream=stream: stream)
            on_a_gpu.streams.clear()
            step(module, x, dy)
            assert set(on_a_gpu.streams) == {stream}


@pytest.mark.parametrize("beside", [False, True])
def test_how_long_the_bytes_of_dy_are_held(monkeypatch, beside):
    """They are held until both halves of the backward pass are done if these run side by side, else while read."""
    module, (x, dy) = make(dtype=torch.bfloat16, cols=COLS, outs=OUTS), inputs(40)
    end_dz, there = in_float8._Products.end_dz, []

    def watched(rounded: Any) -> None:
        rows = weakref.ref(rounded.rows)
        end_dz(rounded)
        there.append(rows() is not None)

    monkeypatch.setattr(in_float8._Products, "end_dz", watched)
    monkeypatch.setattr(steps, "runs_side_by_side", lambda x, extra_bytes: beside and extra_bytes == dy.numel())
    monkeypatch.setattr(steps, "side_by_side", lambda x, first, second: (first(), second()))
    with autocast():
        step(module, x, dy)
    assert there == [beside]
