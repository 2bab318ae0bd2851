"""GPU time of norms and of the sums before them in compiled code: `python -m bench.compiled_norms [--out FILE]`.

A step is three blocks, r = r + x; x = up(down(norm(r))), in bfloat16: inductor cannot join a norm with the Linears. The
profiler times the kernels of both passes, without the products. `COMPILED_FROM` in models/accelerate.py follows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cunorm.torch
from bench.results import lines_to
from cunorm.torch.norm import compiled

BLOCKS, NARROW = 3, 64
WARM, STEPS = 5, 5
SHAPES = ((4096, 768), (16384, 768), (4096, 2048), (8192, 4096), (16384, 4096))
PRODUCTS = ("nvjet", "gemm", "cutlass", "Memcpy")  # parts of names of kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
        for rows, cols in SHAPES:
            for op in ("layer_norm", "rms_norm"):
                write("kernels", op=op, rows=rows, cols=cols, dtype="bfloat16", us=measured(op, rows, cols))


class Block(nn.Module):
    """r = r + x; x = up(down(norm(r)))"""

    def __init__(self, cols: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.down, self.up = nn.Linear(cols, NARROW, bias=False), nn.Linear(NARROW, cols, bias=False)

    def sum_and_norm(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = r + x
        return self.norm(r), r

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, r = self.sum_and_norm(x, r)
        return self.up(self.down(y)), r


class Decomposed(Block):
    """A block whose norm has torch's operators in the forward pass and our kernel in the backward pass."""

    def sum_and_norm(self, x, r):
        norm, r = self.norm, r + x
        op, bias = ("layer_norm", norm.bias) if isinstance(norm, nn.LayerNorm) else ("rms_norm", None)
        return compiled.norm(norm(r), op, r, norm.normalized_shape, norm.weight, bias, norm.eps, 0), r


class Joined(Block):
    def sum_and_norm(self, x, r):
        norm = self.norm
        add = cunorm.torch.add_layer_norm if isinstance(norm, nn.LayerNorm) else cunorm.torch.add_rms_norm
        return add(x, r, *norm.parameters(), eps=norm.eps)


class Net(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        r = x
        for block in self:
            x, r = block(x, r)
        return x


CONTENDERS: dict[str, type[Block]] = {
    "torch": Block,
    "our kernels": Block,
    "our backward pass": Decomposed,
    "joined": Joined,
}


def measured(op: str, rows: int, cols: int) -> dict[str, float]:
    """Return the microseconds of kernels in a step, by contender."""
    kind, eps = (nn.LayerNorm, 1e-5) if op == "layer_norm" else (nn.RMSNorm, 1e-6)
    x, dy = torch.randn(2, rows, cols, device="cuda", dtype=torch.bfloat16).unbind()
    x.requires_grad_()
    times = {}
    for who, block in CONTENDERS.items():
        net = Net(block(cols, kind(cols, eps)) for _ in range(BLOCKS)).to("cuda", torch.bfloat16)
        if who == "our kernels":
            cunorm.torch.replace_norms(net)
        run, leaves = torch.compile(net), (x, *net.parameters())
        times[who] = kernel_time(lambda run=run, leaves=leaves: torch.autograd.grad(run(x), leaves, dy))
        torch._dynamo.reset()
    return times


def kernel_time(call: Callable[[], Any]) -> float:
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
    kernels = [kernel for kernel in taken.key_averages() if not any(part in kernel.key for part in PRODUCTS)]
    return round(sum(kernel.self_device_time_total for kernel in kernels) / STEPS, 1)


if __name__ == "__main__":
    main()
