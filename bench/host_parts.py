"""Where the host time of one norm of torch tensors goes, part by part: `python -m bench.host_parts [--rows 64]`.

Microseconds a call, each called in a row by itself; a line of JSON. torch's own operators stand beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cunorm.torch
from bench.results import lines_to
from cunorm import launch
from cunorm.named_fusions import KINDS
from cunorm.operation import FUSIONS
from cunorm.torch.norm import functional, fused_dispatch, fused_launching, gpu, launching

COLS, EPS = 1024, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("bench/results/torch/host_parts.jsonl"))
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
        for name, call in parts(arguments.rows).items():
            write("part", part=name, us=round(microseconds(call), 2))


def microseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        call()
        times.append(timeit.timeit(call, number=100) / 100 * 1e6)
    return statistics.median(times)


def parts(rows: int) -> dict[str, Callable[[], Any]]:
    x, dy, residual = torch.randn(3, rows, COLS, device="cuda", dtype=torch.bfloat16).unbind()
    weight, bias = torch.ones(2, COLS, device="cuda", dtype=torch.bfloat16).unbind()
    forward = ("layer_norm", x, (COLS,), weight, bias, EPS, x.dtype, 0)
    _, kept_statistics, family = launching.forward(*forward, True)
    statistics_: Any = kept_statistics
    everything = (True, True, True)
    backward = (family, dy, x, statistics_, weight)
    launching.backward(*backward, everything, 0)
    launching.backward(*backward, (True, False, False), 0)
    recipe: Any = next(iter(family.recipes.values()))  # of all gradients
    index, stream = x.get_device(), gpu.stream(x.get_device())
    pointers = tuple(one.data_ptr() for one in (dy, x, statistics_[0], statistics_[1], weight, residual, bias, bias))
    given = recipe.order(pointers)
    workspace = torch.empty(max(1, recipe.plan.workspace), dtype=torch.uint8, device="cuda").data_ptr()
    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "torch.native_layer_norm": lambda: torch.native_layer_norm(x, (COLS,), weight, bias, EPS),
        "launching.forward": lambda: launching.forward(*forward, False),
        "launching.forward with statistics": lambda: launching.forward(*forward, True),
        "launching.backward": lambda: launching.backward(*backward, everything, 0),
        "launching.backward, dx alone": lambda: launching.backward(*backward, (True, False, False), 0),
        "launch.run, backward": lambda: launch.run(recipe.plan, index, stream, given, workspace),
        "empty like x": lambda: gpu.empty(*recipe.first),
        "empty like weight": lambda: gpu.empty(*recipe.second),
        "stream": lambda: gpu.stream(index),
    }
    _, mean, rstd = torch.native_layer_norm(x, (COLS,), weight, bias, EPS)
    native = torch.ops.aten.native_layer_norm_backward
    calls["torch's native_layer_norm_backward"] = lambda: native(
        dy, x, [COLS], mean, rstd, weight, bias, list(everything)
    )
    for place, (_, start, _) in enumerate(launch.prepared(recipe.plan, index).launches):
        early = " (early)" if recipe.plan.steps[place].begins_early else ""
        calls[f"launch {place} of backward alone{early}"] = lambda start=start: start(stream)
    operation = FUSIONS["add_layer_norm"](zero_centered_gamma=False)
    call = fused_launching.call_of(
        "add_layer_norm", operation, ("residual", "weight", "bias"), (), KINDS, "bfloat16", "bfloat16"
    )
    tensors = (x, residual, weight, bias)
    calls["fused, without a gradient"] = lambda: fused_dispatch.run(call, tensors, (), EPS, True)
    leaves: list[Any] = [one.clone().requires_grad_() for one in tensors]
    of_norm = functional._call("layer_norm", leaves[0], (COLS,), *leaves[2:], EPS, x.dtype, 0)
    calls["_Norm, forward alone"] = lambda: functional._apply(leaves[0], *leaves[2:], of_norm)
    calls["_Fused, forward alone"] = lambda: fused_dispatch.run(call, leaves, (), EPS, False)
    calls["cunorm's function, forward alone"] = lambda: cunorm.torch.layer_norm(leaves[0], (COLS,), *leaves[2:])
    calls["torch's function, forward alone"] = lambda: torch.nn.functional.layer_norm(leaves[0], (COLS,), *leaves[2:])
    for name, function in (("cunorm's", cunorm.torch.layer_norm), ("torch's", torch.nn.functional.layer_norm)):
        for wanting, of in (("all", leaves), ("dx alone", [leaves[0], residual, weight, bias])):
            calls[f"{name} node, ten in a row, {wanting}"] = lambda function=function, of=of: chain(function, of, dy)
    return calls


def chain(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dy: torch.Tensor) -> None:
    y = leaves[0]
    for _ in range(10):
        y = function(y, (COLS,), *leaves[2:])
    y.backward(dy)


if __name__ == "__main__":
    main()
