"""Views in PyTorch: autograd, out and dx_out, memory.

Tensors on the CPU play those of a GPU: what is launched is run on the stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cpu_cupy
import numpy
import pytest
from arrays import inputs
from cpu_device import Machine, missing
from cpu_functions import SMALL
from functions import OPS, backward, forward
from view_cases import BROADCAST, HEADS, TOKENS, VIEWS

import cunorm


@pytest.fixture
def torch_on_the_stand_in(monkeypatch):
    """What runs plans, until the end of the test."""
    torch = pytest.importorskip("torch")
    import torch_stand_in

    from cunorm.torch.norm import dispatch, gpu, launching

    if missing():
        pytest.skip(missing())

    def empty(shape, stride, dtype):
        runs.allocated += 1
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor

    runs = cpu_cupy.Runs(Machine())
    runs.allocated = 0
    parts = {"current_device": lambda: -1, "stream": lambda _: 0, "empty": empty, "properties_of": lambda *_: SMALL}
    for name, part in parts.items():
        monkeypatch.setattr(gpu, name, part)
    monkeypatch.setattr(launching, "launch", runs)
    torch_stand_in.forget(monkeypatch)
    monkeypatch.setattr(dispatch, "at_once", lambda _: True)
    monkeypatch.setattr(dispatch, "launchable", lambda _: True)
    return runs


TORCH_VIEWS = {name: view for name, view in VIEWS.items() if not name.endswith("backwards") and name not in BROADCAST}


def tensors(name: str, *arrays: Any) -> list[Any]:
    """Such views of tensors with the values of arrays."""
    import torch

    return [TORCH_VIEWS[name](None, torch.tensor(a.reshape(TOKENS, 3 * HEADS, -1))) for a in arrays]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_autograd_reads_views(torch_on_the_stand_in, lines, name, op):
    """x, and the gradient that comes back; y and dx are contiguous."""
    from cunorm import torch as adapter

    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy = tensors(name, wide.x, wide.dy)
    weight = x.new_tensor(wide.weight[: x.shape[-1]]).requires_grad_()
    lines()
    results = []
    for x_, dy_ in ((x, dy), (x.contiguous(), dy.contiguous())):
        leaf = x_.detach().requires_grad_()
        assert leaf.stride() == x_.stride()
        y = getattr(adapter, op)(leaf, x.shape[-1:], weight, eps=1e-5)
        dx, dweight = y.grad_fn.apply(dy_)[-2:]
        assert y.is_contiguous()
        assert dx.is_contiguous()
        results.append((y.detach(), dx, dweight))
    assert all((one == other).all() for one, other in zip(*results, strict=True))
    assert lines() == []
    assert torch_on_the_stand_in.plans


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_out_and_dx_out_of_torch(torch_on_the_stand_in, lines, name, op):
    """Written by the kernels; autograd is told."""
    runs = torch_on_the_stand_in
    wide = inputs(numpy, TOKENS * 3 * HEADS, 72, "float32")
    x, dy, out = tensors(name, wide.x, wide.dy, wide.x)
    flat_x, flat_dy = x.contiguous(), dy.contiguous()
    lines()
    y, mean, rstd = forward(op, flat_x)
    dx, *_ = gradients = backward(op, flat_dy, flat_x, mean, rstd, dx_out=flat_x.clone())
    version, before = out._version, runs.allocated
    result = forward(op, x, out=out)
    assert result[0] is out
    assert runs.allocated == before + 1, "mean and rstd"
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


def test_an_out_that_no_kernel_writes_is_told(torch_on_the_stand_in, lines):
    import torch

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
    """Nor gives other bits: module, autograd and all."""
    import gc

    import torch

    from cunorm import torch as adapter

    tokens = 2**24 // (9 * cols)
    qkv, dqkv = (torch.randn(tokens, 3 * HEADS, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, dy = qkv[:, :HEADS], dqkv[:, HEADS : 2 * HEADS]
    module = {"layer_norm": adapter.LayerNorm, "rms_norm": adapter.RMSNorm}[op](cols, device="cuda")

    def taken(call: Callable[[], Any]) -> tuple[Any, int]:
        gc.collect()  # a tensor of an earlier test that is freed meanwhile would count
        torch.cuda.empty_cache()  # so would the whole of a kept block that is a little larger than what is asked for
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return result, torch.cuda.max_memory_allocated() - before

    results, memory = [], []
    for x_, dy_ in ((x.clone(memory_format=torch.contiguous_format), dy.contiguous()), (x, dy)):
        leaf = x_.detach().requires_grad_()
        parameters = (leaf, *module.parameters())
        torch.autograd.grad(module(leaf), parameters, dy_)  # what is allocated once
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
    """As test_out_and_dx_out_of_torch, on a GPU."""
    import torch

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
