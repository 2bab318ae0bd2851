"""LayerNormLinear keeps the FP8 bytes of weight while weight is unchanged, and never in copies or checkpoints."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_linear_float8 import RECIPES, by_recipe, inputs, make, step  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

from cunorm.torch import autocast  # noqa: E402
from cunorm.torch.linear import float8  # noqa: E402
from cunorm.torch.linear.float8 import quantised  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def made(monkeypatch) -> list[int]:
    """Return a list that grows each time that weight is converted to 8 bits."""
    calls = []

    def counted(*arguments):
        calls.append(1)
        return quantised(*arguments)

    monkeypatch.setattr(float8, "quantised", counted)
    return calls


def check_cache(device: str, calls: list[int] | None = None, split: Any = None) -> None:
    module = make(device, parameters_split=split).eval()
    part = getattr(module, "weight" if split is None else "b_weight")
    x, _ = inputs(device)

    def fresh() -> Any:
        return copy.deepcopy(module)(x)

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


@contextlib.contextmanager
def conversion_by_swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def other(weight: Any) -> Any:
    return random(*weight.shape, device=weight.device, dtype=weight.dtype, seed=5)


def in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.weight.mul_(2)


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.weight.copy_(other(module.weight))


def other_data(module: Any) -> None:
    module.weight.data = other(module.weight)


def other_data_at_the_same_address(module: Any) -> None:
    """The memory that the test has given weight is written anew, and given to weight as a new storage."""
    memory = module.memory
    memory[:] = other(module.weight).numpy()
    module.weight.data = torch.from_numpy(memory)


def offloaded_and_back(module: Any) -> None:
    saved = (module.weight * 2).detach().cpu()
    module.weight.data = torch.empty(0, device=module.weight.device)
    module.weight.data = saved.to(module.weight.device)


def set_(module: Any) -> None:
    with torch.no_grad():
        module.weight.set_(other(module.weight))


def swapped(module: Any) -> None:
    torch.utils.swap_tensors(module.weight, nn.Parameter(other(module.weight)))


def converted_by_swapping(module: Any) -> None:
    with conversion_by_swapping():
        module.double().float()


def assigned(module: Any) -> None:
    state = {name: value * 2 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def another_parameter_over_the_same_memory(module: Any) -> None:
    """The new parameter has the address, storage and version of the old one, but other numbers."""
    version, data = module.weight._version, module.weight.data
    del module.weight
    module.weight = nn.Parameter(data, requires_grad=False)
    with torch.no_grad():
        while module.weight._version < version:
            module.weight.mul_(1.5)


def from_a_vector(module: Any) -> None:
    nn.utils.vector_to_parameters(other(module.weight).flatten(), [module.weight])


CHANGES = [
    in_inference_mode,
    in_place,
    other_data,
    other_data_at_the_same_address,
    offloaded_and_back,
    set_,
    swapped,
    converted_by_swapping,
    assigned,
    another_parameter_over_the_same_memory,
    from_a_vector,
]


@on_devices
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_gives_a_frozen_weight_other_numbers_is_seen(device, change):
    """The call after the change is that of a module which has kept nothing."""
    module, x = make(device).requires_grad_(False), inputs(device)[0].detach()
    if change is other_data_at_the_same_address:
        if device != "cpu":
            pytest.skip("its memory is NumPy's")
        module.memory = module.weight.numpy().copy()
        module.weight.data = torch.from_numpy(module.memory)
    with autocast():
        before = [module(x), module(x)][1]
        change(module)
        after, expected = module(x), copy.deepcopy(module)(x)
    assert same(after, expected)
    assert not same(after, before) or change is converted_by_swapping


OPTIMIZERS = {kind: {"fused": kind == "fused", "foreach": kind == "foreach"} for kind in ("loop", "foreach", "fused")}


@on_devices
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_what_an_optimizer_does_to_weight_is_seen(device, options, training):
    """A fused optimizer changes no version, and calls without gradients stand between the steps, in either mode."""
    module, (x, dy) = make(device).train(training), inputs(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    with autocast():
        for _ in range(2):
            y = module(x)
            with torch.no_grad():
                assert same(module(x), y)
            y.backward(dy)
            with torch.no_grad():
                module(x)
            optimizer.step()
            with torch.no_grad():
                assert same(module(x), copy.deepcopy(module)(x))


@on_devices
def test_training_elsewhere_is_seen(device):
    """In training mode nothing is kept of a weight that some other call may train."""
    module, (x, dy) = make(device), inputs(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad(), autocast():
            assert same(module(x), copy.deepcopy(module)(x))
        module(x).backward(dy)
        optimizer.step()


@on_devices
@by_recipe
def test_first_microbatch(device, recipe, monkeypatch):
    """is_first_microbatch=None converts weight and keeps nothing, True keeps its bytes, and False uses them."""
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
        for results in (first, *later):
            assert same(results.outputs[0], uncached.outputs[0])
            assert all(same(g, uncached.gradients[name]) for name, g in results.gradients.items())
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
        results = step(module, x, dy, False)
    assert all(same(g, expected.gradients[name]) for name, g in results.gradients.items())


def test_nothing_is_kept_in_copies_or_checkpoints():
    module, x = make().eval(), inputs()[0].detach()
    names = list(module.state_dict())
    with autocast(), torch.no_grad():
        y = module(x)
        assert module._fp8_weights._cached is not None
        assert list(module.state_dict()) == names
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other._fp8_weights._cached is None
            assert same(other(x), y)


def test_transformer_engines_state_is_not_read():
    """That state is a pickle, which could run anything."""
    source, module = make(), make()

    class Never:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    state = source.state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(pickle.dumps(Never())), dtype=torch.uint8)
    assert not any(module.load_state_dict(state))
