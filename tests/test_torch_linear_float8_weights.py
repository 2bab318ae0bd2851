"""The bytes of weight that LayerNormLinear keeps in FP8: when they are found anew, and where nothing of them is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_linear_float8 import RECIPES, by_recipe, inputs, make, step  # noqa: E402
from torch_tensors import on_devices, same  # noqa: E402

from cunorm.torch import autocast  # noqa: E402
from cunorm.torch.linear import float8_weights  # noqa: E402
from cunorm.torch.linear.float8_weights import quantised  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def made(monkeypatch) -> list[int]:
    """Grows with every time that weight goes to 8 bits."""
    calls = []

    def counted(*arguments):
        calls.append(1)
        return quantised(*arguments)

    monkeypatch.setattr(float8_weights, "quantised", counted)
    return calls


def check_cache(device: str, calls: list[int] | None = None, split: Any = None) -> None:
    module = make(device, parameters_split=split)
    part = getattr(module, "weight" if split is None else "b_weight")
    x, _ = inputs(device)

    def fresh() -> Any:
        with torch.enable_grad():
            return module(x.detach().requires_grad_()).detach()

    def kept(count: int) -> None:
        before = 0 if calls is None else len(calls)
        y = module(x)
        assert calls is None or len(calls) == before + count
        assert same(y, fresh())

    with autocast(), torch.no_grad():
        kept(1)
        kept(0)
        part.mul_(2)
        kept(1)
        kept(0)
        part.data = part.data * 0.5
        kept(1)
        part.data.copy_(part.data * 3)
        module.drop_fp8_weights()
        kept(1)
        module.eval()
        kept(1)
        module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()})
        kept(1)
        setattr(module, "weight" if split is None else "b_weight", nn.Parameter(part.detach() * 2))
        kept(1)
        with autocast(recipe=RECIPES["tensor, hybrid"]):
            kept(1)
        kept(1)
        expected = fresh()
        with torch.inference_mode():
            assert same(module(x), expected)


@on_devices
@pytest.mark.parametrize("split", [None, {"a": 96, "b": 96}], ids=["whole", "split"])
def test_without_gradients_weight_is_converted_once(device, split, monkeypatch):
    check_cache(device, made(monkeypatch), split)


@on_devices
def test_a_frozen_weight_is_converted_once(device, monkeypatch):
    calls = made(monkeypatch)
    module = make(device)
    x, dy = inputs(device)
    module.weight.requires_grad_(False)
    with autocast():
        first = torch.autograd.grad(module(x), x, dy)[0]
        assert same(torch.autograd.grad(module(x), x, dy)[0], first)
        assert len(calls) == 1
        module.weight.mul_(2)
        assert not same(torch.autograd.grad(module(x), x, dy)[0], first)
        module.weight.requires_grad_(True)
        module(x)
    assert len(calls) == 3


@on_devices
@by_recipe
def test_first_microbatch(device, recipe, monkeypatch):
    """None finds the bytes and keeps none; True keeps them; False takes them, and is equal in every bit."""
    calls = made(monkeypatch)
    module = make(device)
    x, dy = inputs(device)
    with autocast(recipe=recipe):
        uncached = step(module, x, dy)
        step(module, x, dy)
        assert len(calls) == 2
        first = step(module, x, dy, True)
        later = [step(module, x, dy, False) for _ in range(3)]
        assert len(calls) == 3
        for found in (first, *later):
            assert same(found.outputs[0], uncached.outputs[0])
            assert all(same(g, uncached.gradients[name]) for name, g in found.gradients.items())
        with torch.no_grad():
            module.weight.mul_(2)
        assert same(step(module, x, dy, False).outputs[0], uncached.outputs[0])
        again = step(module, x, dy, True)
        assert len(calls) == 4
        assert same(again.outputs[0], step(module, x, dy).outputs[0])
        assert not same(again.outputs[0], uncached.outputs[0])
        module.drop_fp8_weights()
        assert same(step(module, x, dy, False).outputs[0], again.outputs[0])


@on_devices
def test_inference_tensors_are_kept_where_it_is_asked(device, monkeypatch):
    calls = made(monkeypatch)
    with torch.inference_mode():
        module = make(device)
        x = inputs(device)[0].detach()
        with autocast():
            expected = [module(x), module(x)][1]
            assert len(calls) == 2
            assert same(module(x, is_first_microbatch=True), expected)
            assert same(module(x, is_first_microbatch=False), expected)
            assert len(calls) == 3


def test_what_was_kept_in_inference_mode_is_no_use_to_training():
    module, (x, dy) = make(), inputs()
    with autocast():
        expected = step(module, x, dy)
        with torch.inference_mode():
            module(x, is_first_microbatch=True)
        found = step(module, x, dy, False)
    assert all(same(g, expected.gradients[name]) for name, g in found.gradients.items())


def test_nothing_is_kept_in_copies_or_checkpoints():
    module, x = make(), inputs()[0].detach()
    names = list(module.state_dict())
    with autocast(), torch.no_grad():
        y = module(x)
        assert module._fp8_weights._kept is not None
        assert list(module.state_dict()) == names
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other._fp8_weights._kept is None
            assert same(other(x), y)


def test_transformer_engines_state_is_not_read():
    """It may be a pickle that does anything."""
    source, module = make(), make()

    class Never:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    state = source.state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(pickle.dumps(Never())), dtype=torch.uint8)
    assert not any(module.load_state_dict(state))
