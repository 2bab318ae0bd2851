"""LayerNormLinear under torch.compile, autocast, checkpoints and CUDA graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_linear_module import (  # noqa: E402
    COLS,
    expected,
    make,
    microbatches,
    splits,
    twin,
)
from torch_tensors import compiled_on_devices, on_devices, random  # noqa: E402


@pytest.mark.slow
@compiled_on_devices
@splits
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_compiled_whole(device, split, normalization, backend):
    _dynamo.reset()
    module = make(
        device, parameters_split=split, normalization=normalization, return_bias=True, return_layernorm_output=True
    )
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)

    def gradients(call, x):
        y, bias, z = call(x)
        return [y, *torch.autograd.grad((y + bias).square().sum() + z.sin().sum(), [x, *module.parameters()])]

    for rows in (6, 11):
        x = random(rows, COLS, device=device, dtype=torch.float32).requires_grad_()
        torch.testing.assert_close(gradients(compiled, x), gradients(module, x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


@on_devices
@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
def test_compiled_with_a_break_in_the_graph(device, options):
    _dynamo.reset()
    plain = make(device)
    module = twin(plain, **options)
    module.weight.main_grad = torch.zeros_like(module.weight)
    compiled = torch.compile(module, backend="aot_eager")
    x, dy = microbatches(device)[0]
    compiled(x).backward(dy)
    plain(x).backward(dy)
    module.backward_dw()
    torch.testing.assert_close(
        module.weight.main_grad if module.weight.grad is None else module.weight.grad, plain.weight.grad
    )


@on_devices
@splits
def test_autocast(device, split):
    """y and z have autocast's dtype, and gradients that of the parameters."""
    module = make(device, parameters_split=split, return_layernorm_output=True)
    x = random(6, COLS, device=device, dtype=torch.float32).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y, z = module(x)
    assert y.dtype is z.dtype is torch.bfloat16
    y_expected, z_expected = expected(module, x)
    torch.testing.assert_close(y.float(), y_expected, rtol=0.05, atol=0.1)
    torch.testing.assert_close(z.float(), z_expected, rtol=0.01, atol=0.02)
    y.sum().backward()
    assert x.grad.dtype is torch.float32
    assert all(p.grad.dtype is torch.float32 for p in module.parameters())


@on_devices
@splits
def test_checkpointing(device, split):
    module = make(device, parameters_split=split)
    x = random(6, COLS, device=device, dtype=torch.float32).requires_grad_()
    wanted = [x, *module.parameters()]
    direct = torch.autograd.grad(module(x).square().sum(), wanted)
    torch.testing.assert_close(
        torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), wanted), direct
    )


@pytest.mark.gpu
@splits
def test_graphed_callables(split):
    module = make("cuda", torch.bfloat16, parameters_split=split)
    other = twin(module, parameters_split=split)
    sample = random(8, COLS, device="cuda", dtype=torch.bfloat16).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(other, (sample,))
    for seed in range(3):
        x = random(8, COLS, device="cuda", dtype=torch.bfloat16, seed=seed).requires_grad_()
        a = torch.autograd.grad(graphed(x).square().sum(), [x, *other.parameters()])
        b = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_accumulation_in_a_captured_step():
    module = make("cuda", torch.bfloat16, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
    x, dy = microbatches("cuda", dtype=torch.bfloat16)[0]

    def step():
        module(x).backward(dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    added_by_a_step = module.weight.main_grad / 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    module.weight.main_grad.zero_()
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(module.weight.main_grad, 2 * added_by_a_step, rtol=1e-5, atol=1e-5)
