"""The functions and modules of fused operations in torch."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from torch_tensors import on_devices, random, same  # noqa: E402

import cunorm  # noqa: E402
from cunorm.torch import (  # noqa: E402
    AdaLayerNorm,
    AddLayerNorm,
    AddRMSNorm,
    RMSNormGated,
    add_layer_norm,
    gate_add_rms_norm_modulate,
    layer_norm_modulate,
    rms_norm_gated,
)


@on_devices
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_functions_are_those_of_the_two_calls(device, norm, zero_centered_gamma):
    """On a GPU, y and s have the bits of the two calls."""
    x, residual = (random(5, 4, 8, device=device, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    weight, bias = (random(8, device=device, dtype=torch.float32, seed=seed) for seed in range(2))
    parameters = (weight, bias) if norm == "layer_norm" else (weight,)
    options = {"eps": 1e-5, "zero_centered_gamma": zero_centered_gamma}
    apart = getattr(cunorm.torch, norm)
    y, s = getattr(cunorm.torch, f"add_{norm}")(x, residual, *parameters, **options)
    assert same(s, x + residual)
    expected_y = apart(s, (8,), *parameters, **options)
    added = getattr(cunorm.torch, f"{norm}_add")(x, residual, *parameters, **options)
    expected_added = residual + apart(x, (8,), *parameters, **options, dtype=torch.float32)
    if device == "cuda":
        assert same(y, expected_y)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(added, expected_added.to(x.dtype))


MODULES = {"layer_norm": AddLayerNorm, "rms_norm": AddRMSNorm}


@on_devices
@pytest.mark.parametrize("norm", MODULES)
def test_modules_over_two_axes(device, norm):
    """A norm over two axes is that over one axis of as many elements, with gradients in the parameters' shape."""
    x, residual = (random(5, 4, 8, device=device, seed=seed).requires_grad_() for seed in range(2))
    module, flat = (MODULES[norm](shape, eps=1e-3, device=device) for shape in ((4, 8), 32))
    with torch.no_grad():
        module.weight.copy_(random(4, 8))
        flat.weight.copy_(module.weight.flatten())
    results, expected = module(x, residual), flat(x.flatten(1), residual.flatten(1))
    for result, expected_result in zip(results, expected, strict=True):
        assert result.shape == x.shape
        torch.testing.assert_close(result.flatten(1), expected_result)
    gradients = torch.autograd.grad(results[0].sin().sum(), (x, *module.parameters()))
    flat_gradients = torch.autograd.grad(expected[0].sin().sum(), (x, *flat.parameters()))
    for gradient, flat_gradient in zip(gradients, flat_gradients, strict=True):
        torch.testing.assert_close(gradient, flat_gradient.reshape(gradient.shape))
    with pytest.raises(RuntimeError, match="normalized_shape must be the last axes of input"):
        module(x.flatten(1), residual.flatten(1))


@on_devices
@pytest.mark.parametrize("norm", MODULES)
def test_modules(device, norm):
    torchs = {"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}[norm]
    original = torchs(8, eps=1e-3, device=device, dtype=torch.float64)
    with torch.no_grad():
        original.weight.copy_(random(8))
    module = MODULES[norm](8, eps=1e-3, device=device, dtype=torch.float64, s_dtype=torch.float32)
    module.load_state_dict(original.state_dict())
    x, residual = (random(5, 8, device=device, seed=seed) for seed in range(2))
    y, s = module(x, residual)
    assert (y.dtype, s.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(y, original((x + residual).float().double()), rtol=1e-5, atol=1e-5)
    assert repr(module) == repr(original).replace(torchs.__name__, f"Add{torchs.__name__}")[:-1] + (
        ", s_dtype=torch.float32)"
    )
    centred = MODULES[norm](8, eps=1e-3, device=device, zero_centered_gamma=True)
    assert not centred.weight.any()
    with torch.no_grad():
        centred.weight.fill_(3)
    centred.reset_parameters()
    assert not centred.weight.any()
    assert same(centred(x, residual)[0], MODULES[norm](8, eps=1e-3, device=device)(x, residual)[0])
    with pytest.raises(ValueError, match="needs a weight"):
        MODULES[norm](8, elementwise_affine=False, zero_centered_gamma=True)


def rms(x, eps=1e-3):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def in_groups(x):
    return rms(x.unflatten(-1, (4, 2))).flatten(-2)


def layer(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-3)


SAMPLE = (2, 1, 8)
# Each function has the shapes of the operands after x, its options, and its formula in torch.
NAMED = {
    "layer_norm_modulate": ((SAMPLE, SAMPLE), {}, lambda x, scale, shift: layer(x) * (1 + scale) + shift),
    "layer_norm_modulate, two axes": (
        ((2, 8), (2, 8)),
        {},
        lambda x, scale, shift: layer(x) * (1 + scale[:, None]) + shift[:, None],
    ),
    "rms_norm_modulate": ((SAMPLE, (8,)), {}, lambda x, scale, shift: rms(x) * (1 + scale) + shift),
    "rms_norm_modulate, two axes": (
        ((2, 8), (2, 8)),
        {},
        lambda x, scale, shift: rms(x) * (1 + scale[:, None]) + shift[:, None],
    ),
    "gate_add_layer_norm_modulate": (
        ((2, 3, 8), SAMPLE, SAMPLE, SAMPLE),
        {},
        lambda x, r, gate, scale, shift: (layer(r + gate * x) * (1 + scale) + shift, r + gate * x),
    ),
    "gate_add_rms_norm_modulate": (
        ((2, 3, 8), SAMPLE, SAMPLE, SAMPLE),
        {},
        lambda x, r, gate, scale, shift: (rms(r + gate * x) * (1 + scale) + shift, r + gate * x),
    ),
    "gate_add_rms_norm_modulate, two axes": (
        ((2, 3, 8), (2, 8), (2, 8), (2, 8)),
        {},
        lambda x, r, *vectors: gate_add_rms_norm_modulate(x, r, *(vector[:, None] for vector in vectors), eps=1e-3),
    ),
    "rms_norm_gated": (
        ((2, 3, 8), (8,)),
        {"group_size": 2},
        lambda x, z, weight: in_groups(x) * weight * torch.nn.functional.silu(z),
    ),
    "rms_norm_gated, gate first": (
        ((2, 3, 8), (8,)),
        {"norm_before_gate": False},
        lambda x, z, weight: rms(x * torch.nn.functional.silu(z)) * weight,
    ),
}


@on_devices
@pytest.mark.parametrize("name", NAMED)
def test_named_functions(device, name):
    """Both cunorm.torch's functions and cunorm's are right."""
    shapes, options, formula = NAMED[name]
    function = name.partition(",")[0]
    tensors = [random(*shape, device=device, seed=i).requires_grad_() for i, shape in enumerate(((2, 3, 8), *shapes))]
    expected = formula(*tensors)

    def gradients(results):
        results = results if isinstance(results, tuple) else (results,)
        cotangents = [random(2, 3, 8, device=device, seed=7 + i) for i in range(len(results))]
        return torch.autograd.grad(results, tensors, cotangents, retain_graph=True)

    for module in (cunorm.torch, cunorm):
        results = getattr(module, function)(*tensors, eps=1e-3, **options)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(gradients(results), gradients(expected))
    compiled = torch.compile(getattr(cunorm.torch, function), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors, eps=1e-3, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba2", "zamba2", "qwen3_next"])
def test_gated_norms_are_those_of_transformers(model):
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    name = {"mamba2": "MambaRMSNormGated", "zamba2": "Zamba2RMSNormGated", "qwen3_next": "Qwen3NextRMSNormGated"}[model]
    group_size = 4 if model == "zamba2" else None
    theirs = getattr(module, name)(16, *([group_size] if group_size else []), eps=1e-3)
    ours = RMSNormGated(16, 1e-3, group_size, norm_before_gate=model == "qwen3_next")
    with torch.no_grad():
        theirs.weight.copy_(random(16))
    ours.load_state_dict(theirs.state_dict())
    x, z = (random(2, 3, 16, dtype=torch.float32, seed=seed) for seed in range(2))
    torch.testing.assert_close(ours(x, z), theirs(x, z))


@pytest.mark.parametrize("chunk_dim", [0, 1])
def test_adaptive_layer_norm_is_that_of_diffusers(chunk_dim):
    """The module is held against its formula, as diffusers need not be installed."""
    module = AdaLayerNorm(8, 10 if chunk_dim == 0 else None, output_dim=32, chunk_dim=chunk_dim, dtype=torch.float64)
    names = {"linear.weight", "linear.bias"} | ({"emb.weight"} if chunk_dim == 0 else set())
    assert set(module.state_dict()) == names
    x = random(2, 5, 16)
    if chunk_dim == 0:
        y = module(x, timestep=torch.tensor(3))
        temb = module.emb.weight[3]
        scale, shift = module.linear(torch.nn.functional.silu(temb)).chunk(2)
    else:
        temb = random(2, 8)
        y = module(x, temb=temb)
        shift, scale = module.linear(torch.nn.functional.silu(temb))[:, None].chunk(2, dim=2)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (16,)) * (1 + scale) + shift)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_errors_of_gates():
    x, weight = random(3, 8), random(8)
    for error, message, call in (
        (ValueError, "group_size must divide", lambda: rms_norm_gated(x, x, weight, group_size=3)),
        (TypeError, "group_size must be an integer", lambda: rms_norm_gated(x, x, weight, group_size=2.0)),
        (RuntimeError, "z must have the shape of x", lambda: rms_norm_gated(x, x[0], weight, group_size=2)),
        (RuntimeError, "z must have the shape of x", lambda: rms_norm_gated(x, x[0], weight)),
        (TypeError, "z must be a torch.Tensor", lambda: rms_norm_gated(x, None, weight)),
        (TypeError, "x must be a torch.Tensor", lambda: rms_norm_gated(None, x, weight, group_size=2)),
        (TypeError, "x must be a torch.Tensor", lambda: layer_norm_modulate(None, weight, weight)),
        (RuntimeError, "last axis to normalise", lambda: layer_norm_modulate(x[0, 0], weight, weight)),
        (ValueError, "chunk_dim must be 0 or 1", lambda: AdaLayerNorm(8, chunk_dim=2)),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


@pytest.mark.gpu
def test_autocast_has_the_rule_of_the_norms():
    x, residual = (random(5, 64, device="cuda", dtype=torch.bfloat16, seed=seed) for seed in range(2))
    with torch.autocast("cuda", torch.bfloat16):
        y, s = add_layer_norm(x, residual)
        expected_y = cunorm.torch.layer_norm(s, 64)
    assert (y.dtype, s.dtype) == (torch.float32, torch.bfloat16)
    assert same(y, expected_y)
