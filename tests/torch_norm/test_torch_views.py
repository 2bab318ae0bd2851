"""Views in PyTorch: kernels read and write them through autograd, out and dx_out, and copies are logged."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from arrays import inputs
from cpu_device import missing
from functions import OPS, backward, forward
from view_cases import BROADCAST, HEADS, TOKENS, VIEWS

torch = pytest.importorskip("torch")

import cunorm  # noqa: E402
import cunorm.torch  # noqa: E402

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing())
TORCH_VIEWS = {name: view for name, view in VIEWS.items() if not name.endswith("backwards") and name not in BROADCAST}


def tensors(name: str, *arrays: Any) -> list[Any]:
    """Return views of that name, of tensors with the values of the arrays."""
    return [TORCH_VIEWS[name](None, torch.tensor(a.reshape(TOKENS, 3 * HEADS, -1))) for a in arrays]


@needs_machine
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_autograd_reads_views(stand_in, lines, name, op):
    """x and dy are read where they lie, and y and dx are contiguous."""
    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy = tensors(name, wide.x, wide.dy)
    weight = x.new_tensor(wide.weight[: x.shape[-1]]).requires_grad_()
    lines()
    results = []
    for x_, dy_ in ((x, dy), (x.contiguous(), dy.contiguous())):
        leaf = x_.detach().requires_grad_()
        assert leaf.stride() == x_.stride()
        y = getattr(cunorm.torch, op)(leaf, x.shape[-1:], weight, eps=1e-5)
        dx, dweight = y.grad_fn.apply(dy_)[-2:]
        assert y.is_contiguous()
        assert dx.is_contiguous()
        results.append((y.detach(), dx, dweight))
    assert all((a == b).all() for a, b in zip(*results, strict=True))
    assert lines() == []
    assert stand_in.plans


@needs_machine
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_out_and_dx_out_of_torch(stand_in, lines, name, op):
    """The kernels write out and dx_out, and autograd is told that they changed."""
    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy, out = tensors(name, wide.x, wide.dy, wide.x)
    flat_x, flat_dy = x.contiguous(), dy.contiguous()
    lines()
    y, mean, rstd = forward(op, flat_x)
    dx, *_ = gradients = backward(op, flat_dy, flat_x, mean, rstd, dx_out=flat_x.clone())
    version, before = out._version, len(stand_in.allocated)
    result = forward(op, x, out=out)
    assert result[0] is out
    assert len(stand_in.allocated) == before + 1, "mean and rstd"
    assert out._version == version + 1
    assert (out == y).all()
    result = backward(op, dy, x, mean, rstd, dx_out=out)
    assert result[0] is out
    assert all((a == b).all() for a, b in zip(result, gradients, strict=True) if a is not None)
    backward(op, dy, x, mean, rstd, dx_out=dy)
    assert (dy == dx).all()
    assert getattr(cunorm, op)(x, out=x) is x
    assert (x == y).all()
    assert lines() == []
    empty = x[:0]
    assert cunorm.layer_norm(empty, out=empty) is empty


@needs_machine
def test_an_out_that_no_kernel_writes_is_told(stand_in, lines):
    wide = inputs(numpy, 12, 96, "float32")
    x = torch.tensor(wide.x)
    out = torch.empty(96, 12).t()
    lines()
    y, mean, rstd = cunorm.layer_norm_forward(x)
    dx, *_ = cunorm.layer_norm_backward(x, x, mean, rstd, dx_out=torch.empty(12, 96))
    for _ in range(2):
        assert cunorm.layer_norm(x, out=out) is out
        assert (out == y).all()
        assert cunorm.layer_norm_backward(x, x, mean, rstd, dx_out=out)[0] is out
        assert (out == dx).all()
    layout = "of shape (12, 96) and strides (1, 12) is copied in each call"
    assert lines() == [f"layer_norm: out {layout}", f"backward of layer_norm: dx_out {layout}"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [64, 128, 4096])
def test_torch_takes_no_more_memory_for_views(op, cols):
    """A module with autograd gives the same bits for views, in as much memory."""
    tokens = 2**24 // (9 * cols)
    qkv, dqkv = (torch.randn(tokens, 3 * HEADS, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, dy = qkv[:, :HEADS], dqkv[:, HEADS : 2 * HEADS]
    module = {"layer_norm": cunorm.torch.LayerNorm, "rms_norm": cunorm.torch.RMSNorm}[op](cols, device="cuda")

    def taken(call: Callable[[], Any]) -> tuple[Any, int]:
        gc.collect()  # or an earlier test's tensor could be freed meanwhile, and count
        torch.cuda.empty_cache()  # or a kept block that is a little larger than is asked for would count as a whole
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return result, torch.cuda.max_memory_allocated() - before

    results, memory = [], []
    for x_, dy_ in ((x.clone(memory_format=torch.contiguous_format), dy.contiguous()), (x, dy)):
        leaf = x_.detach().requires_grad_()
        parameters = (leaf, *module.parameters())
        for _ in range(3):  # the first calls make allocations that are kept, and describe the call to C++
            torch.autograd.grad(module(leaf), parameters, dy_)
        y, forward_bytes = taken(lambda leaf=leaf: module(leaf))
        gradients, backward_bytes = taken(
            lambda y=y, parameters=parameters, dy_=dy_: torch.autograd.grad(y, parameters, dy_)
        )
        assert y.is_contiguous()
        assert gradients[0].is_contiguous()
        results.append((y, *gradients))
        memory.append((forward_bytes, backward_bytes))
    assert memory[0] == memory[1]
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_torch_writes_views(op):
    """A GPU writes out and dx_out that are views, and nothing beside them."""
    qkv, dqkv = (torch.randn(64, 3 * HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, out, dy = qkv[:, :HEADS], qkv[:, HEADS : 2 * HEADS], dqkv[:, :HEADS]
    rest = qkv[:, 2 * HEADS :].clone()
    y, mean, rstd = forward(op, x.contiguous())
    gradients = backward(op, dy.contiguous(), x.contiguous(), mean, rstd)
    assert forward(op, x, out=out)[0] is out
    assert torch.equal(out, y)
    result = backward(op, dy, x, mean, rstd, dx_out=out)
    assert result[0] is out
    assert all(torch.equal(a, b) for a, b in zip(result, gradients, strict=True) if a is not None)
    assert backward(op, dy, x, mean, rstd, dx_out=dy)[0] is dy
    assert torch.equal(dy, gradients[0])
    assert torch.equal(qkv[:, 2 * HEADS :], rest)
