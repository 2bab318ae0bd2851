"""Checks of `LayerNormColwiseParallel` for parallel_linear.py: each rank is compared with the whole, in float64."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.testing import assert_close

from cunorm.torch import LayerNorm, LayerNormColwiseParallel, LayerNormLinear, RMSNorm

COLS, OUTS, EPS = 8, 24, 0.3
SPLIT = {"parameters_split": {"query": 8, "key_value_": 16}}
BATCH = 3
OPTIONS = ({}, {"normalization": "RMSNorm", "bias": False}, SPLIT, {"keep_normalized": True}, {"ub_overlap_ag": True})


def whole(device: str, **options: Any) -> tuple[LayerNormLinear, Tensor, Tensor]:
    """Return a module, x and dy that are the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    module = LayerNormLinear(COLS, OUTS, EPS, device=device, params_dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    x, dy = (torch.randn(BATCH, 4, size, generator=random, dtype=torch.float64).to(device) for size in (COLS, OUTS))
    return module, x, dy


def outs_of(module: LayerNormLinear, rank: int, ranks: int) -> list[int]:
    """Return the output features of a rank, which has its share of each part of the weight."""
    outs, start = [], 0
    for part in module._parts:
        own = part.rows // ranks
        outs += range(start + rank * own, start + (rank + 1) * own)
        start += part.rows
    return outs


def values_and_gradients(group: Any, device: str) -> None:
    mesh = DeviceMesh.from_group(group, device)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for options in OPTIONS:
        for layout in (Shard(0), Shard(1), Replicate()):
            module, x, dy = whole(device, **options)
            if layout == Shard(0):
                x, dy = x.transpose(0, 1), dy.transpose(0, 1)
            sharded = parallelize_module(copy.deepcopy(module), mesh, LayerNormColwiseParallel(input_layouts=layout))
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(dy)
            own = distribute_tensor(x, mesh, [layout]).to_local().clone().requires_grad_()
            columns = outs_of(module, rank, ranks)
            own_y = sharded(own)
            assert_close(own_y, y[..., columns])
            own_y.backward(dy[..., columns])
            assert_close(own.grad, distribute_tensor(leaf.grad, mesh, [layout]).to_local())
            for (name, shard), parameter in zip(sharded.named_parameters(), module.parameters(), strict=True):
                norm = name.startswith("layer_norm")
                assert shard.placements == ((Replicate(),) if norm else (Shard(0),)), name
                assert shard.grad.placements == shard.placements, name
                assert_close(shard.grad.full_tensor(), parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def layouts(group: Any, device: str) -> None:
    """DTensors go in and out, y may have other layouts, and bias and z may be returned too."""
    mesh = DeviceMesh.from_group(group, device)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    module, x, _ = whole(device, return_layernorm_output=True, return_bias=True)
    y, bias, z = module(x)
    style = LayerNormColwiseParallel(use_local_output=False)
    results = parallelize_module(copy.deepcopy(module), mesh, style)(distribute_tensor(x, mesh, [Replicate()]))
    assert [result.placements for result in results] == [(Shard(2),), (Shard(0),), (Shard(1),)]
    for result, expected in zip(results, (y, bias, z), strict=True):
        assert_close(result.full_tensor(), expected)
    for wanted in (Replicate(), Shard(1)):
        plain, x, _ = whole(device)
        sharded = parallelize_module(copy.deepcopy(plain), mesh, LayerNormColwiseParallel(output_layouts=wanted))
        own = x.chunk(ranks, 1)[rank]
        expected = plain(x) if wanted == Replicate() else plain(x).chunk(ranks, 1)[rank]
        assert_close(sharded(own), expected)


def training(group: Any, device: str) -> None:
    """An optimizer's step with clipped gradients is right, and modules that begin without memory load a state dict."""
    mesh = DeviceMesh.from_group(group, device)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    module, x, dy = whole(device)
    sharded = parallelize_module(copy.deepcopy(module), mesh, LayerNormColwiseParallel())
    for model, given, upstream in (
        (module, x, dy),
        (copy.deepcopy(sharded), x.chunk(ranks, 1)[rank], dy.chunk(ranks, 2)[rank]),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(given).backward(upstream)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if model is module:
            expected = norm
            continue
        assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        for shard, parameter in zip(model.parameters(), module.parameters(), strict=True):
            assert shard.grad.placements == shard.placements  # so that optimizers need no communication
            assert_close(shard.full_tensor(), parameter)
    empty = parallelize_module(
        LayerNormLinear(COLS, OUTS, EPS, device="meta", params_dtype=torch.float64), mesh, LayerNormColwiseParallel()
    )
    empty.to_empty(device=device)
    empty.load_state_dict(sharded.state_dict())
    own = x.chunk(ranks, 1)[rank]
    assert_close(empty(own), sharded(own))


def beside_torchs(group: Any, device: str) -> None:
    """Our norms under SequenceParallel may stand before a Linear under ColwiseParallel."""
    mesh = DeviceMesh.from_group(group, device)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _, x, dy = whole(device)
    for norm in (LayerNorm, RMSNorm):
        model = torch.nn.Sequential(norm(COLS), torch.nn.Linear(COLS, OUTS)).to(device, torch.float64)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
        sharded = parallelize_module(copy.deepcopy(model), mesh, plan)
        leaf, own = x.clone().requires_grad_(), x.chunk(ranks, 1)[rank].clone().requires_grad_()
        y, own_y = model(leaf), sharded(own)
        assert_close(own_y, y.chunk(ranks, 2)[rank])
        y.backward(dy)
        own_y.backward(dy.chunk(ranks, 2)[rank])
        assert_close(own.grad, leaf.grad.chunk(ranks, 1)[rank])
        for shard, parameter in zip(sharded.parameters(), model.parameters(), strict=True):
            assert_close(shard.grad.full_tensor(), parameter.grad)


def refused_styles(group: Any, device: str) -> None:
    mesh = DeviceMesh.from_group(group, device)
    style = LayerNormColwiseParallel()
    cases = [
        (ValueError, "input_layouts must be", lambda: LayerNormColwiseParallel(input_layouts=Shard(2))),
        (TypeError, "output_layouts must be a Placement", lambda: LayerNormColwiseParallel(output_layouts=1)),
        (TypeError, "it is for LayerNormLinear; got Linear", lambda: style._apply(torch.nn.Linear(2, 2), mesh)),
        (
            ValueError,
            "fuse_wgrad_accumulation=True",
            lambda: style._apply(whole(device, fuse_wgrad_accumulation=True)[0], mesh),
        ),
        (
            ValueError,
            "delay_wgrad_compute=True",
            lambda: style._apply(whole(device, delay_wgrad_compute=True)[0], mesh),
        ),
        (
            ValueError,
            "rows of a_weight must be a multiple of the number of ranks, 2; got 3",
            lambda: style._apply(whole(device, parameters_split={"a": 3, "b": 21})[0], mesh),
        ),
        (
            ValueError,
            "x must have shape (batch, sequence",
            lambda: style._apply(whole(device)[0], mesh)(torch.ones(2, COLS)),
        ),
    ]
    for error, phrase, call in cases:
        try:
            call()
        except error as caught:
            assert phrase in str(caught), str(caught)  # noqa: PT017
            continue
        raise AssertionError(f"{phrase!r} was not raised")


def fsdp_and_checkpoints(group: Any, device: str) -> None:
    """On two by two ranks, with FSDP2 over the other axis, three steps are those of one process.

    A distributed checkpoint then restores the parameters.
    """
    from torch.distributed import checkpoint

    mesh = init_device_mesh(device, (2, dist.get_world_size(group) // 2), mesh_dim_names=("data", "model"))
    module, x, dy = whole(device, **SPLIT)
    sharded = parallelize_module(copy.deepcopy(module), mesh["model"], LayerNormColwiseParallel())
    fully_shard(sharded, mesh=mesh["data"])
    random = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 4, COLS, generator=random, dtype=torch.float64).to(device) for _ in range(3)]
    dy = dy[:2]
    data, model = mesh.get_local_rank("data"), mesh.get_local_rank("model")
    ranks = mesh["model"].size()
    columns = outs_of(module, model, ranks)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (module, sharded)]
    for x in batches:
        module(x).mul(dy).sum().div(2).backward()  # FSDP takes the mean over the data axis
        own = x[data : data + 1].chunk(ranks, 1)[model]
        sharded(own).backward(dy[data : data + 1][..., columns])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, shard), parameter in zip(sharded.named_parameters(), module.parameters(), strict=True):
        assert_close(shard.full_tensor(), parameter, msg=lambda text, name=name: f"{name}: {text}")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=folder[0])
    loaded = parallelize_module(whole(device, **SPLIT)[0], mesh["model"], LayerNormColwiseParallel())
    fully_shard(loaded, mesh=mesh["data"])
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    for restored, saved in zip(loaded.parameters(), sharded.parameters(), strict=True):
        assert_close(restored.full_tensor(), saved.full_tensor())


CHECKS = {check.__name__: check for check in (values_and_gradients, layouts, training, beside_torchs, refused_styles)}
ON_FOUR = {"fsdp_and_checkpoints": fsdp_and_checkpoints}
