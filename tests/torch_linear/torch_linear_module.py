"""LayerNormLinear modules for the tests, and their results by torch's own operators."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402, N812
from torch_tensors import random  # noqa: E402

from cunorm.torch import LayerNormLinear  # noqa: E402

COLS, OUTS = 16, 24
keeping = pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
splits = pytest.mark.parametrize(
    "split", [None, ("q_", "k", "v"), {"query": 8, "key_value_": 16}], ids=["whole", "equal", "sizes"]
)


def make(device: str = "cpu", dtype: Any = torch.float32, **options: Any) -> LayerNormLinear:
    """Return a module whose parameters all differ from what they begin as."""
    torch.manual_seed(0)
    module = LayerNormLinear(COLS, OUTS, options.pop("eps", 0.3), device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    return module


def twin(module: LayerNormLinear, **options: Any) -> LayerNormLinear:
    """Return another module with the same parameters."""
    other = make(module.layer_norm_weight.device.type, module.layer_norm_weight.dtype, **options)
    other.load_state_dict(module.state_dict())
    return other


def whole(module: LayerNormLinear) -> tuple[Any, Any, Any, Any]:
    """Return weight, bias, ln_weight and ln_bias of a module, with the parts of weight and bias put together."""
    biases = [
        parameter for name, parameter in module.named_parameters() if name.endswith("bias") and "norm" not in name
    ]
    weights = [p for name, p in module.named_parameters() if name.endswith("weight") and "norm" not in name]
    return torch.cat(weights), torch.cat(biases) if biases else None, module.layer_norm_weight, module.layer_norm_bias


def expected(module: LayerNormLinear, x: Any, apply_bias: bool = True) -> tuple[Any, Any]:
    """Return (y, z) by torch's own operators."""
    weight, bias, ln_weight, ln_bias = whole(module)
    gamma = ln_weight + 1 if module.zero_centered_gamma else ln_weight
    if module.normalization == "LayerNorm":
        z = F.layer_norm(x, (COLS,), gamma, ln_bias, module.eps)
    else:
        z = F.rms_norm(x, (COLS,), gamma, module.eps)
    return F.linear(z, weight, bias if apply_bias else None), z


def microbatches(device, count=2, dtype=torch.float32):
    return [
        (random(6, COLS, device=device, dtype=dtype, seed=i), random(6, OUTS, device=device, dtype=dtype, seed=i + 9))
        for i in range(count)
    ]
