"""Run one process of `python -m cunorm demo --ranks N`: python -m cunorm.torch.linear.ranks_demo FOLDER RANKS RANK."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from . import symmetric
from .module import LayerNormLinear

EPS = 1e-5
STEPS = 5  # how many steps are timed


def main(folder: Path, ranks: int, rank: int) -> None:
    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
        device_id=device if on_gpus else None,
    )
    group = dist.group.WORLD
    x = torch.from_numpy(numpy.load(folder / "x.npy"))
    rows, cols = len(x) // ranks, x.shape[1]
    features = -(-3 * cols // ranks) * ranks
    x = x[: ranks * rows].to(device)
    reason = symmetric.why_not(group, device)
    if rank == 0:
        print(f"path:  {ranks} processes, {'a GPU each (NCCL)' if on_gpus else 'on the CPU (gloo)'}")
        way = f"torch.distributed alone ({reason})" if reason else "symmetric memory under the products (ub_*)"
        print(f"exchange: {way}\n\nLayerNormLinear({cols}, {features}) over {rows} of {len(x)} rows a rank")
    torch.manual_seed(0)
    overlaps = dict.fromkeys(("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad"), True)
    options = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": group, **overlaps}
    weight, bias, dy = (
        torch.randn(*shape, device=device) for shape in ((features, cols), (features,), (len(x), features))
    )
    weight, bias, dy = (t.to(x.dtype) for t in (weight / cols**0.5, bias, dy))
    module = LayerNormLinear(cols, features, EPS, params_dtype=x.dtype, device=device, **options)
    outs = slice(rank * module.out_features, (rank + 1) * module.out_features)
    with torch.no_grad():
        module.weight.copy_(weight[outs])
        module.bias.copy_(bias[outs])
    own = slice(rank * rows, (rank + 1) * rows)
    results, seconds = _run(module, x[own], dy[:, outs])
    expected = _expected(x, weight, bias, dy, own, outs)
    _show({name: _error(results[name], expected[name]) for name in results}, seconds, device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at once, because a thread of gloo may outlive torch


def _run(module: LayerNormLinear, x: Tensor, dy: Tensor) -> tuple[dict[str, Tensor], float]:
    """Return the results of a step, and the seconds that it takes."""
    parameters = dict(module.named_parameters())
    x = x.clone().requires_grad_()
    times = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        y = module(x)
        gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    names = ("dx", *("d" + name for name in parameters))
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}, sorted(times[1:])[STEPS // 2]


def _expected(x, weight, bias, dy, own: slice, outs: slice) -> dict[str, Tensor]:
    """Compute everything on this rank alone, in float64, and return what this rank should have."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    ln_weight, ln_bias = x.new_ones(x.shape[1]).requires_grad_(), x.new_zeros(x.shape[1]).requires_grad_()
    parts = [F.layer_norm(x[: own.start], x.shape[1:], eps=EPS), F.layer_norm(x[own.stop :], x.shape[1:], eps=EPS)]
    z = torch.cat([parts[0], F.layer_norm(x[own], x.shape[1:], ln_weight, ln_bias, EPS), parts[1]])
    y = F.linear(z, weight, bias)
    leaves = (x, weight, bias, ln_weight, ln_bias)
    dx, dweight, dbias, dln_weight, dln_bias = torch.autograd.grad(y, leaves, dy.double())
    return {
        "y": y[:, outs].detach(),
        "dx": dx[own],
        "dweight": dweight[outs],
        "dbias": dbias[outs],
        "dlayer_norm_weight": dln_weight,
        "dlayer_norm_bias": dln_bias,
    }


def _error(results: Tensor, expected: Tensor) -> float:
    """Return the relative error, of finite numbers alone."""
    finite = expected.isfinite()
    difference = (results.double() - expected)[finite].norm()
    return float(difference / expected[finite].norm().clamp_min(1e-300))


def _show(errors: dict[str, float], seconds: float, device: torch.device) -> None:
    """Print the largest errors and the longest time of all ranks."""
    values = torch.tensor([*errors.values(), seconds], dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        *largest, seconds = values.tolist()
        print(f"forward and backward: {seconds * 1e6:.1f} us\n\n{'':<20}{'error to float64, relative':>28}")
        for name, error in zip(errors, largest, strict=True):
            print(f"{name:<20}{error:>28.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
