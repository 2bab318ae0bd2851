"""cunorm.torch.layer_norm_linear: higher derivatives, functorch, autocast, checkpoints, and cunorm's own functions."""

from __future__ import annotations

import linear_reference
import pytest
from functions import OPS
from linear_reference import NORMALIZATION

torch = pytest.importorskip("torch")

import torch_plain  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_linear_calls import five, keeping, tensors  # noqa: E402
from torch_tensors import on_devices, random, same, tensor  # noqa: E402

import cunorm  # noqa: E402
from cunorm.operation import name_of  # noqa: E402
from cunorm.torch import layer_norm_linear  # noqa: E402
from cunorm.torch.linear.call import Layer, norm_linear  # noqa: E402


@pytest.mark.slow
@on_devices
@keeping
@pytest.mark.parametrize("op", OPS)
def test_first_and_second_derivatives(device, keep, op):
    inputs = five(device, rows=(3,))
    if op == "rms_norm":
        inputs = inputs[:4]

    def function(*inputs):
        inputs = (*inputs, None)[:5]
        return norm_linear(Layer("test", name_of(op, True), 0.3, keep), inputs)[:2]

    assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(function, inputs, nondet_tol=1e-12, fast_mode=True)


@on_devices
def test_functorch(device):
    """grad, vmap over samples and over weights, and jvp give what they give for torch's operators."""
    x, weight, bias, ln_weight, ln_bias = (t.detach() for t in five(device, rows=(4,)))

    def ours(x, weight):
        return layer_norm_linear(x, weight, bias, ln_weight, ln_bias, 0.3).square().sum()

    def torchs(x, weight):
        return F.linear(F.layer_norm(x, (16,), ln_weight, ln_bias, 0.3), weight, bias).square().sum()

    weights = torch.stack((weight, 2 * weight))
    for transform in (
        lambda f: torch.func.grad(f, (0, 1))(x, weight),
        lambda f: torch.func.vmap(torch.func.grad(f, 1), (0, None))(x, weight),
        lambda f: torch.func.vmap(f, (None, 0))(x, weights),
        lambda f: torch.func.jvp(f, (x, weight), (x.cos(), weight.sin())),
    ):
        torch.testing.assert_close(transform(ours), transform(torchs))


@on_devices
@keeping
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(device, keep, x_dtype):
    """y has autocast's dtype and each gradient that of its tensor, and x is not rounded before the norm."""
    call = linear_reference.inputs("layer_norm", 24, 64, 48, "float32")
    inputs = [t.detach() for t in tensors(call, device)]
    inputs[0] = inputs[0].to(x_dtype)
    inputs = [t.requires_grad_() for t in inputs]
    with torch.autocast(device, torch.bfloat16):
        y = layer_norm_linear(*inputs, call.eps, keep_normalized=keep)
    assert y.dtype is torch.bfloat16
    gradients = torch.autograd.grad(y, inputs, tensor(call.dy).to(device, torch.bfloat16))
    assert [g.dtype for g in gradients] == [t.dtype for t in inputs]
    wide = [t.detach().double() for t in inputs]
    wide[1:3] = [t.bfloat16().double() for t in wide[1:3]]
    wide = [t.requires_grad_() for t in wide]
    expected = layer_norm_linear(*wide, call.eps)
    exact = torch.autograd.grad(expected, wide, tensor(call.dy).to(device, torch.bfloat16).double())
    for a, b in zip((y, *gradients), (expected, *exact), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 4e-3


@on_devices
def test_autocast_in_the_backward_pass_alone(device):
    inputs = five(device, torch.float32)
    y = layer_norm_linear(*inputs, 0.3)
    expected = torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    torch.testing.assert_close(gradients, expected)


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    inputs = five(device)
    expected = torch.autograd.grad(layer_norm_linear(*inputs).square().sum(), inputs)
    y = checkpoint(layer_norm_linear, *inputs, use_reentrant=reentrant)
    y.square().sum().backward()
    torch.testing.assert_close([t.grad for t in inputs], list(expected))


@on_devices
def test_a_gradient_that_is_yet_to_be_negated(device):
    """The gradient's memory holds its negative, as for the imaginary part of a conjugate."""
    inputs = [t.detach().requires_grad_() for t in five(device, rows=(6,))]
    y = layer_norm_linear(*inputs)
    dy = random(*y.shape, device=device)
    expected = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, torch._neg_view(dy.neg())), expected)


class Counted(TorchDispatchMode):
    """Count the calls that normalise."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "norm" in name and "backward" not in name:
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wants_gradients", [True, False])
def test_cunorms_own_forward_function_normalises_once(device, op, wants_gradients):
    """y, the statistics and the gradients of y are right, and x is normalised once."""
    inputs = [t.detach().requires_grad_(wants_gradients) for t in five(device)]
    if op == "rms_norm":
        inputs[4] = None
    with Counted() as counted:
        y, mean, rstd = cunorm.layer_norm_linear_forward(*inputs, 0.3, normalization=NORMALIZATION[op])
    assert len(counted.calls) == 1, counted.calls
    x, weight, bias, ln_weight, ln_bias = inputs
    z, statistics = torch_plain.norm(x, ln_weight, ln_bias, op, 1, 0.3, x.dtype, True)
    expected = F.linear(z, weight, bias)
    torch.testing.assert_close(y, expected)
    assert not rstd.requires_grad
    torch.testing.assert_close(rstd, statistics[-1])
    if op == "layer_norm":
        torch.testing.assert_close(mean, statistics[0])
    else:
        assert mean is None
    if wants_gradients:
        there = [t for t in inputs if t is not None]
        torch.testing.assert_close(
            torch.autograd.grad(y.sin().sum(), there), torch.autograd.grad(expected.sin().sum(), there)
        )


@on_devices
def test_cunorms_own_backward_function_under_autocast(device):
    """The gradients have the bits and dtypes that they have without autocast."""
    x, weight, _, ln_weight, ln_bias = (t.detach() for t in five(device, torch.float32))
    _, mean, rstd = cunorm.layer_norm_linear_forward(x, weight, None, ln_weight, ln_bias)
    dy = random(6, 12, device=device, dtype=torch.float32)

    def gradients():
        return cunorm.layer_norm_linear_backward(dy, x, mean, rstd, weight, ln_weight, ln_bias, eps=1e-5)

    expected = gradients()
    with torch.autocast(device, torch.bfloat16):
        assert all(same(a, b) for a, b in zip(gradients(), expected, strict=True))
