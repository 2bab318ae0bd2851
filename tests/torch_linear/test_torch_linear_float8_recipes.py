"""LayerNormLinear follows the recipe of its module or context, ours or TransformerEngine's, in both passes."""

from __future__ import annotations

import copy
import enum
import pickle
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_linear_float8 import RECIPES, inputs, make  # noqa: E402
from torch_tensors import on_devices, same  # noqa: E402

from cunorm.torch import (  # noqa: E402
    Float8CurrentScaling,
    MMParams,
    QParams,
    RowwiseScaling,
    autocast,
    fp8_autocast,
    is_fp8_available,
    set_recipe,
)
from cunorm.torch.linear import recipes as followed  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def fp8_of(module: Any, x: Any) -> str:
    """Return the name of the recipe that a call follows, judged by its bits."""
    y, own, module.fp8_recipe = module(x), module.fp8_recipe, None
    try:
        for name, recipe in RECIPES.items():
            with autocast(recipe=recipe):
                if same(y, module(x)):
                    return name
        return "none"
    finally:
        module.fp8_recipe = own


def test_contexts_nest_and_the_inner_wins():
    module, (x, _) = make().requires_grad_(False), inputs()
    x = x.detach()
    tensor = RECIPES["tensor, hybrid"]
    assert fp8_of(module, x) == "none"
    with autocast():
        assert fp8_of(module, x) == "row"
        with fp8_autocast(fp8_recipe=tensor):
            assert fp8_of(module, x) == "tensor, hybrid"
            with autocast(enabled=False):
                assert fp8_of(module, x) == "none"
            with pytest.raises(ZeroDivisionError), autocast(enabled=False, recipe="of no meaning then"):
                1 / 0  # noqa: B018
            assert fp8_of(module, x) == "tensor, hybrid"
        assert fp8_of(module, x) == "row"
        with pytest.raises(ValueError, match="recipe must be one that is known"), autocast(recipe=3):
            pass
        assert fp8_of(module, x) == "row"
    assert fp8_of(module, x) == "none"


def test_a_context_is_of_the_process():
    """A context holds for all threads, because autograd's threads are not the user's."""
    module, (x, _) = make().requires_grad_(False), inputs()
    results = []
    with autocast():
        thread = threading.Thread(target=lambda: results.append(module(x.detach())))
        thread.start()
        thread.join()
        assert same(results[0], module(x.detach()))


def test_recipes_of_modules():
    model = nn.ModuleDict({"a": make(), "b": make(), "c": nn.Linear(4, 4)})
    x = inputs()[0].detach()
    assert set_recipe(model, RECIPES["tensor, hybrid"], filter=lambda name, _: name == "b") is model
    assert not hasattr(model["c"], "fp8_recipe")
    assert model["a"].fp8_recipe is None
    with pytest.raises(ZeroDivisionError):  # which the filter raises for the second module
        set_recipe(model, RowwiseScaling(), filter=lambda name, _: name == "a" or 1 / 0)
    assert model["a"].fp8_recipe is None
    for some in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert fp8_of(copy.deepcopy(some["b"]), x) == "tensor, hybrid"
            with autocast():
                assert fp8_of(copy.deepcopy(some["a"]), x) == "row"
                assert fp8_of(copy.deepcopy(some["b"]), x) == "tensor, hybrid"
            with autocast(enabled=False):
                plain = some["b"](x)
    set_recipe(model, None)
    with torch.no_grad():
        assert same(model["b"](x), plain)


def look_alike(name: str, **fields: Any) -> Any:
    """Return a value of a dataclass of that name, as TransformerEngine's recipes are."""
    kind = type(name, (), {"__annotations__": dict.fromkeys(fields, Any), **fields})
    return dataclass(unsafe_hash=True)(kind)()


class Format(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)
    E5M2 = (57344, 57344)


class TheirQParams(NamedTuple):
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def current_scaling(**fields: Any) -> Any:
    common = {"use_power_2_scales": False, "fp8_format": Format.HYBRID, "fp8_dpa": False, "fp8_mha": False}
    common |= {"backward_override": None, "fp8_gemm_fprop": look_alike("MMParams", use_split_accumulator=False)}
    return look_alike("Float8CurrentScaling", **common | fields)


def test_recipes_of_transformer_engine():
    from cunorm.torch.linear.recipes import recognised

    assert recognised("f", None) == RowwiseScaling()
    assert recognised("f", current_scaling()) == Float8CurrentScaling()
    theirs = current_scaling(fp8_format=Format.E4M3)
    theirs.fp8_quant_bwd_grad = TheirQParams(True, 0.5)
    theirs.fp8_gemm_wgrad = look_alike("MMParams", use_split_accumulator=False)
    ours = Float8CurrentScaling("E4M3", fp8_quant_bwd_grad=QParams(True, 0.5), fp8_gemm_wgrad=MMParams(False))
    assert recognised("f", theirs) == ours
    assert len({ours, recognised("f", theirs), RowwiseScaling()}) == 2
    scheme = ours.scheme
    assert (scheme.power_2, scheme.least, scheme.fast) == ((False, False, True), (0, 0, 0.5), (True, False, True))


REFUSED = [
    *[
        (look_alike(name, margin=0), NotImplementedError, f"got {name}, which is not. Use RowwiseScaling")
        for name in ("DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Float8BlockScaling")
    ],
    (look_alike("SomeScaling"), ValueError, "got SomeScaling"),
    ("RowwiseScaling", ValueError, "got str"),
    (look_alike("RowwiseScaling", margin=1), ValueError, "RowwiseScaling.margin must be left out; got 1"),
    (current_scaling(amax_history_len=3), ValueError, "Float8CurrentScaling.amax_history_len must be left out"),
    (current_scaling(backward_override="high_precision"), ValueError, "backward_override must be left out"),
    (current_scaling(fp8_mha=True), ValueError, "fp8_mha must be left out; got True"),
    (current_scaling(fp8_format=Format.E5M2), ValueError, "must be 'HYBRID' or 'E4M3'; got 'E5M2'"),
    (
        current_scaling(fp8_quant_fwd_inp=look_alike("QParams", stochastic_rounding=True)),
        ValueError,
        "QParams.stochastic_rounding must be left out",
    ),
]


@pytest.mark.parametrize(("recipe", "error", "phrase"), REFUSED, ids=[phrase for _, _, phrase in REFUSED])
def test_recipes_that_are_refused(recipe, error, phrase):
    with pytest.raises(error) as caught, autocast(recipe=recipe):
        pass
    assert phrase in str(caught.value)
    assert str(caught.value).startswith("autocast: ") or "fp8_format" in str(caught.value)
    model = make()
    with pytest.raises(error):
        set_recipe(model, recipe)
    assert model.fp8_recipe is None
    with autocast(enabled=False, recipe=recipe):
        pass


def test_is_fp8_available(monkeypatch):
    available, reason = is_fp8_available(return_reason=True)
    assert available is is_fp8_available() is (not reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 77)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert is_fp8_available(return_reason=True) == (False, "FP8 needs compute capability 8.9 or more; this GPU has 8.0")
    followed.why_not.cache_clear()


# Backward passes follow their forward pass.


def check_recorded(device: str) -> None:
    """Outside of all contexts, or inside another, a backward pass has the bits that it has inside its own."""
    module = make(device)
    x, dy = inputs(device)

    def gradients(context):
        with autocast(recipe=RECIPES["row"]):
            y = module(x)
        with context:
            return torch.autograd.grad(y, [x, *module.parameters()], dy)

    expected = gradients(autocast(recipe=RECIPES["row"]))
    for other in (autocast(enabled=False), autocast(recipe=RECIPES["row, power of 2"])):
        assert all(same(a, b) for a, b in zip(gradients(other), expected, strict=True))


@on_devices
def test_a_backward_pass_follows_its_forward_pass(device):
    check_recorded(device)


@on_devices
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "another recipe", "switched off"])
def test_checkpoints_compute_again_by_the_recipe_of_before(device, use_reentrant, where):
    module = make(device)
    x, dy = inputs(device)
    contexts = {
        "outside": lambda: autocast(enabled=False),
        "another recipe": lambda: autocast(recipe=RECIPES["tensor, hybrid"]),
    }

    def gradients(call):
        module.zero_grad()
        x.grad = None
        with autocast():
            y = call(x)
        if where == "switched off":
            y.backward(dy)
        else:
            with contexts[where]():
                y.backward(dy)
        return [x.grad, *(p.grad for p in module.parameters())]

    direct = gradients(module)
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=use_reentrant))
    assert all(same(a, b) for a, b in zip(direct, again, strict=True))
