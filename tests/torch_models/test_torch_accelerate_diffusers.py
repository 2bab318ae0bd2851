"""accelerate on models of diffusers, with random weights."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_diffusers import build, output_of  # noqa: E402
from torch_tensors import assert_no_farther, on_devices  # noqa: E402

from cunorm.torch import accelerate  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402

# How many norms each model has.
MODELS = {"dit": 5, "pixart": 5, "sd3": 16, "sd3.5": 18, "flux": 23}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Let small models run the norms that large ones run."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 1)


def results_of(model: nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """Return the output and gradients, with torch's plain attention.

    With the attention that torch 2.11 chooses on an H200, the untouched Flux in bfloat16, whose heads have 16 columns
    here, has gradients of 1e18 and NaN, which differ from call to call.
    """
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        y = output_of(model, inputs)
        y.square().mean().backward()
    return {"output": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.float32) for name in MODELS] + [("flux", torch.bfloat16)], ids=str
)
def test_a_model_of_diffusers(device, name, dtype):
    """The model is about as near to the same model in float64 as the untouched one, and is undone to the same bits."""
    model, inputs = build(name, device, dtype)
    reference = results_of(copy.deepcopy(model).double(), inputs)
    before, classes = results_of(model, inputs), [*map(type, model.modules())]
    report = accelerate(model)
    assert (len(report.norms.swapped), report.norms.left) == (MODELS[name], {})
    after = results_of(model, inputs)
    assert {ran.by_torch for ran in report.ran().values()} == {0}
    assert_no_farther(after, before, reference, dtype)
    report.undo()
    assert [*map(type, model.modules())] == classes
    if device == "cpu":
        again = results_of(model, inputs)
        assert all(torch.equal(again[key], value) for key, value in before.items())
