"""The program of each rank in test_torch_distributed: python torch_distributed.py RANK WORLD_SIZE FILE DEVICE."""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import cunorm
from cunorm.torch import LayerNorm, RMSNorm, add_layer_norm
from cunorm.torch.norm import calls, dispatch, functional

OPS = ("layer_norm", "rms_norm")
ROWS, SEQUENCE, COLS = 6, 4, 32


def tensors(device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, SEQUENCE, COLS), (ROWS, SEQUENCE, COLS), (COLS,), (COLS,))
    return [torch.randn(*shape, generator=generator).to(device) for shape in shapes]


def operator(op, x, weight, bias):
    bias = bias if op == "layer_norm" else None
    call = calls.affine_call(op, weight, bias, x.dtype, (0, 0, 0))
    (y,), _ = dispatch.run(call, functional.given(x, weight, bias), (), 1e-5, False)
    return y


def rows_sharded(mesh, device):
    """y and dx stay where the rows are, without communication; dweight and dbias are sums still to be made."""
    x, dy, weight, bias = tensors(device)
    for op in OPS:
        for axis in (0, 1):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            expected = operator(op, *leaves)
            count = 3 if op == "layer_norm" else 2
            expected_gradients = torch.autograd.grad(expected, leaves[:count], dy)
            sharded = [distribute_tensor(x, mesh, [Shard(axis)])]
            sharded += [distribute_tensor(t, mesh, [Replicate()]) for t in (weight, bias)]
            for t in sharded:
                t.requires_grad_()
            y = operator(op, *sharded)
            assert y.placements == (Shard(axis),), y.placements
            assert y.to_local().shape[axis] == x.shape[axis] // mesh.size()
            assert_close(y.full_tensor(), expected)
            gradients = torch.autograd.grad(y, sharded[:count], distribute_tensor(dy, mesh, [Shard(axis)]))
            assert gradients[0].placements == (Shard(axis),)
            assert all(g.placements == (Partial(),) for g in gradients[1:]), gradients[1].placements
            for gradient, other in zip(gradients, expected_gradients, strict=True):
                assert_close(gradient.full_tensor(), other)


def columns_sharded(mesh, device):
    """The normalised axis is gathered first."""
    x, _, weight, bias = tensors(device)
    for op in OPS:
        y = operator(
            op,
            distribute_tensor(x, mesh, [Shard(2)]),
            *[distribute_tensor(t, mesh, [Replicate()]) for t in (weight, bias)],
        )
        assert_close(y.full_tensor(), operator(op, x, weight, bias))


def modules_with_sharded_rows(mesh, device):
    """In sequence parallelism a module is called as it is, with replicated DTensors as parameters."""
    x, dy, *_ = tensors(device)
    for cls in (LayerNorm, RMSNorm):
        module = cls(COLS, device=device)
        expected = module(x)
        gradients = torch.autograd.grad(expected, list(module.parameters()), dy)
        for name, parameter in list(module.named_parameters()):
            replicated = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
            module.register_parameter(name, replicated)
        y = module(distribute_tensor(x, mesh, [Shard(1)]))
        assert isinstance(y, DTensor)
        assert_close(y.full_tensor(), expected)
        y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            assert_close(parameter.grad.full_tensor(), gradient)


def fused_rows(mesh, device):
    """Fused operations do as plain norms; an operand for each sample is sharded as the samples, as is its gradient."""
    x, dy, weight, bias = tensors(device)
    residual, scale = dy.flip(0), x[:, :1] * 0.5
    modulate = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, bias: xhat * (1 + scale) + bias)

    def function(x, residual, weight, bias, scale):
        y, s = add_layer_norm(x, residual, weight, bias)
        return modulate(y, scale=scale, bias=bias), s

    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias, scale)]
    expected = function(*leaves)
    expected_gradients = torch.autograd.grad(expected, leaves, (dy, x))
    for axis in (0, 1, 2):  # columns, which are axis 2, are gathered first
        of_x, of_scale = Shard(axis), Shard(0) if axis == 0 else Replicate()
        placements = (of_x, of_x, Replicate(), Replicate(), of_scale)
        sharded = [
            distribute_tensor(t.detach(), mesh, [placement]).requires_grad_()
            for t, placement in zip(leaves, placements, strict=True)
        ]
        results = function(*sharded)
        whole = of_x if axis < 2 else Replicate()
        assert all(result.placements == (whole,) for result in results)
        for result, expected_result in zip(results, expected, strict=True):
            assert_close(result.full_tensor(), expected_result)
        gradients = torch.autograd.grad(results, sharded, [distribute_tensor(t, mesh, [whole]) for t in (dy, x)])
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient.full_tensor(), expected_gradient)
        if axis < 2:
            assert [gradient.placements for gradient in gradients[:3]] == [(of_x,), (of_x,), (Partial(),)]
            assert gradients[4].placements == ((Shard(0),) if axis == 0 else (Partial(),))


def fsdp(mesh, device):
    """A model under fully_shard is, after three steps, the same model trained without it."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        LayerNorm(COLS), torch.nn.Linear(COLS, COLS), RMSNorm(COLS), torch.nn.Linear(COLS, COLS), LayerNorm(COLS)
    ).to(device)
    sharded = copy.deepcopy(plain)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x, dy, *_ = tensors(device)
    local = x.chunk(mesh.size())[mesh.get_local_rank()], dy.chunk(mesh.size())[mesh.get_local_rank()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for _ in range(3):
        (plain(x) * dy).sum().div(mesh.size()).backward()
        (sharded(local[0]) * local[1]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-5)


def main(rank: int, world_size: int, file: str, device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world_size)
    mesh = init_device_mesh(device, (world_size,))
    for check in (rows_sharded, columns_sharded, modules_with_sharded_rows, fused_rows, fsdp):
        check(mesh, device)
        print(f"rank {rank}: {check.__name__} holds", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    # Leave at once: a thread of gloo may outlive torch and abort the process at its end.
    sys.stdout.flush()
    os._exit(0)
