"""Gradients of LayerNormLinear's weight may be added up in the product, or computed later."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_linear_module import (  # noqa: E402
    keeping,
    make,
    microbatches,
    splits,
    twin,
)
from torch_tensors import on_devices, same  # noqa: E402

from cunorm.torch import LayerNormLinear  # noqa: E402


def gradients_of(module: LayerNormLinear) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@on_devices
@splits
@keeping
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [None, True, False], ids=lambda value: f"first={value}")
def test_fuse_wgrad_accumulation(device, split, keep, delay, dtype, first):
    """main_grad is float32: is_first_microbatch=None and False add to it, and True overwrites it."""
    options = {"parameters_split": split, "keep_normalized": keep}
    plain = make(device, dtype, **options)
    fused = twin(plain, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, **options)
    names = [name for name, _ in fused.named_parameters() if name.endswith("weight") and "norm" not in name]
    for name in names:
        getattr(fused, name).main_grad = torch.full_like(getattr(fused, name), 3.0, dtype=torch.float32)
    for x, dy in microbatches(device, dtype=dtype):
        x = x.requires_grad_()
        plain(x).backward(dy)
        fused(x.detach().requires_grad_(), is_first_microbatch=first).backward(dy)
        if delay:
            fused.backward_dw()
    x, dy = microbatches(device, dtype=dtype)[-1]
    last = twin(plain, **options)
    last(x).backward(dy)
    for name, parameter in fused.named_parameters():
        if name in names:
            assert parameter.grad is None
            total = (last if first else plain).get_parameter(name).grad.float() + (0.0 if first else 3.0)
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(parameter.main_grad, total, rtol=tolerance, atol=20 * tolerance)
        else:
            assert same(parameter.grad, plain.get_parameter(name).grad)


def test_main_grad_of_megatrons_hooks():
    module = make(fuse_wgrad_accumulation=True)
    weight = module.weight
    weight.main_grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = True
    weight.overwrite_main_grad = True
    x, dy = microbatches("cpu")[0]
    module(x).backward(dy)
    assert weight.grad_added_to_main_grad is True
    assert not weight.grad.any()
    plain = twin(module)
    plain(x).backward(dy)
    torch.testing.assert_close(weight.main_grad, plain.weight.grad)


def test_a_frozen_weight_is_not_accumulated():
    module = make(fuse_wgrad_accumulation=True)
    module.weight.requires_grad_(False)
    x, dy = microbatches("cpu")[0]
    module(x.requires_grad_()).backward(dy)
    assert module.weight.grad is None
    assert x.grad is not None


@on_devices
@splits
@keeping
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_delay_wgrad_compute(device, split, keep, return_bias, autocast):
    """backward_dw() computes the gradients of the oldest pass, with the bits they have without delay."""
    options = {"parameters_split": split, "keep_normalized": keep, "return_bias": return_bias}
    plain = make(device, **options)
    delayed = twin(plain, delay_wgrad_compute=True, **options)
    assert delayed.need_backward_dw()
    assert not plain.need_backward_dw()
    calls = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append("hook"))

    def backward(module, x, dy):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = module(x)
        outputs, gradients = ([y[0], y[1]], [dy, dy[0]]) if return_bias else ([y], [dy])
        gradients = [g.to(o.dtype) for g, o in zip(gradients, outputs, strict=True)]
        torch.autograd.backward(outputs, gradients)

    late = [name for name, _ in delayed.named_parameters() if "norm" not in name]
    if return_bias:
        late = [name for name in late if name.endswith("weight")]
    for x, dy in microbatches(device):
        backward(delayed, x, dy)
    assert all(delayed.get_parameter(name).grad is None for name in late)
    for x, dy in microbatches(device):
        backward(plain, x, dy)
        with torch.autocast(device, torch.bfloat16):  # has no effect on the gradients that were left
            delayed.backward_dw()
        differing = [n for n in late if not same(delayed.get_parameter(n).grad, plain.get_parameter(n).grad)]
        assert not differing
    assert all(same(a, b) for a, b in zip(gradients_of(delayed).values(), gradients_of(plain).values(), strict=True))
    assert calls == ["hook", "hook"]
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) needs a backward pass"):
        delayed.backward_dw()
    assert all(same(a, b) for a, b in zip(gradients_of(delayed).values(), gradients_of(plain).values(), strict=True))
    plain.backward_dw()  # nothing to do, nothing said, as in TransformerEngine
