"""Models that `accelerate` changed compute the same, `undo` restores them, and nothing is changed by half."""

from __future__ import annotations

import copy
import doctest
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_models import build, loss_and_gradients, loss_of  # noqa: E402
from torch_tensors import assert_no_farther, on_devices, random  # noqa: E402

from cunorm.torch import accelerate, replace_norms  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402
from cunorm.torch.models import replace  # noqa: E402
from cunorm.torch.norm import modules  # noqa: E402

# How many norms each model has.
MODELS = {
    "gpt2": 5,
    "bert": 6,
    "vit": 5,
    "llama": 5,
    "mistral": 5,
    "qwen2": 5,
    "qwen3": 9,
    "gemma": 5,
    "gemma2": 9,
    "gemma3": 13,
    "olmo2": 9,
    "whisper": 12,
    "t5": 12,
    "mamba2": 5,
}
# Attributes that `accelerate` sets on norms, or that count their calls.
SET = {"_own_below", "_compiled_from", "_by_cunorm", "_by_torch"}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Let small models run the norms that large ones run."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 1)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in MODELS] + [(name, torch.bfloat16) for name in ("gpt2", "llama", "gemma3")],
    ids=str,
)
def test_logits_and_gradients_of_a_model(device, name, dtype):
    """The model is about as near to the same model in float64 as the untouched one, and is undone to the same bits."""
    model, inputs = build(name, device=device, dtype=dtype)
    reference = loss_and_gradients(copy.deepcopy(model).double(), inputs)
    before = loss_and_gradients(model, inputs)
    keys, parameters, classes = list(model.state_dict()), list(model.parameters()), [*map(type, model.modules())]
    report = accelerate(model)
    assert (len(report.norms.swapped), report.norms.left) == (MODELS[name], {})
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    after = loss_and_gradients(model, inputs)
    assert all(ran == (1, 0) for ran in report.ran().values())  # each ran once, by cunorm
    assert_no_farther(after, before, reference, dtype)
    report.undo()
    assert [*map(type, model.modules())] == classes
    assert not any(SET & set(vars(module)) for module in model.modules())
    assert equal(loss_and_gradients(model, inputs), before) or device == "cuda"


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_torch(cls, norm_first):
    layer = cls(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    inputs = [
        random(2, 5, 32, dtype=torch.float32, seed=seed) for seed in range(1 + (cls is nn.TransformerDecoderLayer))
    ]
    expected = layer(*inputs)
    report = accelerate(layer)
    torch.testing.assert_close(layer(*inputs), expected)
    assert set(report.ran().values()) == {(1, 0)}


def test_the_report():
    model, inputs = build("gpt2")
    report = accelerate(model)
    loss_of(model, inputs)
    lines = str(report).splitlines()
    assert lines[:2] == ["this model is on the CPU: torch's operators run", "norms replaced 5, left 0"]
    assert str(accelerate(model)).splitlines()[1:3] == ["already accelerated", "norms replaced 0, left 0"]
    assert "already accelerated" not in str(report)
    assert "  transformer.h.0.ln_1: LayerNorm; calls: 1 by cunorm, 0 by torch" in lines
    model, _ = build("llama")
    assert "  model.norm: LlamaRMSNorm" in str(accelerate(model)).splitlines()  # has nothing to choose


def test_the_example(monkeypatch):
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 8 << 20)
    assert doctest.testmod(accelerate_module).failed == 0


def test_norms_of_torch_with_few_elements(monkeypatch):
    """torch's norms of few elements run torch's own operators, but those of transformers always run ours."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 64)
    ours = []
    monkeypatch.setattr(modules, "norm", lambda *given: ours.append("torch's") or given[1])
    monkeypatch.setattr(replace, "norm", lambda *given: ours.append("transformers'") or given[1])
    model, _ = build("llama")
    model = nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32), model.model.norm)
    report = accelerate(model)
    for rows, expected in ((1, []), (2, ["torch's", "torch's"])):
        model[:2](torch.ones(rows, 32))
        assert ours == expected
    model[2](torch.ones(1, 64))
    assert ours[2:] == ["transformers'"]
    assert report.ran() == {"0": (1, 1), "1": (1, 1)}
    copy.deepcopy(model)[0](torch.ones(2, 32))
    assert report.ran()["0"] == (1, 1)  # a copy counts for itself
    report.undo()
    assert report.ran() == {"0": (0, 0), "1": (0, 0)}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "whisper"])
def test_with_few_elements_a_step_has_the_operators_and_the_bits_of_the_original(monkeypatch, name):
    """Norms that are left to torch run the same operators in the same order, in both passes."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 8 << 20)
    model, inputs = build(name)
    results, called = [], []
    for place in (0, 1):
        if place:
            report = accelerate(model)
        with Operators() as operators:
            results.append(loss_and_gradients(model, inputs))
        called.append(operators.called)
    assert called[1] == called[0]
    assert equal(*results)
    assert list(report.ran().values()) == [(0, 1)] * MODELS[name]


def test_what_of_ours_runs_with_few_elements(monkeypatch):
    """Only the number of elements is asked for, because a step of a small model waits for the host."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 1 << 20)
    model, _ = build("bert")
    block = model.bert.encoder.layer[0].output
    accelerate(block)
    calls: list[str] = []

    def note(frame, event, _):
        if event == "call" and "cunorm" in frame.f_globals["__name__"]:
            calls.append(frame.f_code.co_name)

    block(torch.ones(1, 2, 128), torch.ones(1, 2, 64))
    sys.setprofile(note)
    try:
        block(torch.ones(1, 2, 128), torch.ones(1, 2, 64))
    finally:
        sys.setprofile(None)
    assert calls == ["forward", "is_left_to_torch", "parameter_of", "parameter_of"]


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.LayerNorm(8, 0.1, False),
                                  nn.RMSNorm(8), nn.RMSNorm(8, 0.1, False)], ids=str)  # fmt: skip
def test_a_norm_of_few_elements_has_the_bits_of_torchs(monkeypatch, norm):
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 64)
    for number, parameter in enumerate(norm.parameters()):
        parameter.data = random(8, dtype=torch.float32, seed=number)
    x = random(3, 8, dtype=torch.float32)
    expected = norm(x)
    ours = copy.deepcopy(norm)
    accelerate(ours)
    monkeypatch.setattr(modules, "norm", None)  # a call of it would fail
    assert torch.equal(ours(x), expected)


def test_twice_is_once():
    model, inputs = build("llama")
    first = accelerate(model)
    expected = loss_of(model, inputs)[1]
    second = accelerate(model)
    assert not second.norms.swapped
    second.undo()
    assert torch.equal(loss_of(model, inputs)[1], expected)
    first.undo()
    first.undo()
    assert len(accelerate(model).norms.swapped) == 5


def test_after_replace_norms_its_norms_stay_as_they_are(monkeypatch):
    """They are ours at any size, as the call of `replace_norms` asked for."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 8 << 20)
    model, inputs = build("gpt2")
    replaced = replace_norms(model)
    before = [(type(module), set(vars(module))) for module in model.modules()]
    report = accelerate(model)
    assert (report.norms.swapped, report.ran()) == ({}, {})
    loss_of(model, inputs)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    report.undo()
    replaced.undo()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_part_that_is_accelerated_already(first):
    """The rest is replaced, and each report takes back its own changes, in any order."""
    model, inputs = build("llama")
    expected = loss_of(model, inputs)[1]
    reports = {"part": accelerate(model.model.layers[0]), "whole": accelerate(model)}
    assert [len(report.norms.swapped) for report in reports.values()] == [2, 3]
    for report in (reports.pop(first), *reports.values()):
        torch.testing.assert_close(loss_of(model, inputs)[1], expected)
        report.undo()
    assert torch.equal(loss_of(model, inputs)[1], expected)


def test_what_fails_in_building_nodes_changes_no_model(monkeypatch):
    """Building takes many seconds, in which somebody may interrupt it."""
    model, _ = build("llama")
    classes = [*map(type, model.modules())]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerate_module.nodes, "build", lambda: next(iter(())))
    with pytest.raises(StopIteration):
        accelerate(model)
    assert [*map(type, model.modules())] == classes
    assert not any(SET & set(vars(module)) for module in model.modules())


def test_undone_in_another_order_nothing_is_done():
    model, _ = build("llama")
    report = accelerate(model)
    norm = model.model.norm
    ours = type(norm)
    norm.__class__ = type("WrappedNorm", (ours,), {})  # as fully_shard does
    classes = [*map(type, model.modules())]
    with pytest.raises(RuntimeError, match="Undo first what was done to it since"):
        report.undo()
    assert [*map(type, model.modules())] == classes
    norm.__class__ = ours
    report.undo()
    assert not any(SET & set(vars(module)) for module in model.modules())
