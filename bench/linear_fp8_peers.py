"""Contenders of `python -m bench.linear_fp8`: LayerNorm and a Linear in FP8 by others, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

Pass = Callable[[int], Any]  # takes the number of a set of buffers


def transformer_engine(layer: Any) -> dict[str, Pass]:
    """Load TransformerEngine's layer with current scaling, which needs no history, and with weights kept."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe, outs, cols = Float8CurrentScaling(), *layer.modules[0].weight.shape
    modules = [te.LayerNormLinear(cols, outs, params_dtype=torch.bfloat16, device="cuda") for _ in layer.xs]

    def run(index: int, keeps: bool, first: bool | None) -> Any:
        with nullcontext() if keeps else torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
            return modules[index](layer.xs[index], is_first_microbatch=first)

    def both(index: int) -> Any:
        x = layer.xs[index]
        return torch.autograd.grad(run(index, True, False), (x, *modules[index].parameters()), layer.dys[index])

    for index in range(len(modules)):
        run(index, True, True)
    return {"forward": lambda index: run(index, False, False), "forward and backward": both}


def torchao(layer: Any) -> dict[str, Pass]:
    """Load torchao's inference with scales of rows and weights kept, compiled together with torch's norm."""
    import torch

    outs, cols = layer.modules[0].weight.shape
    compiled = _torchao_of(cols, outs)

    def forward(index: int) -> Any:
        with torch.no_grad():
            return compiled(layer.xs[index])

    for x in layer.xs:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return {"forward": forward}


@cache
def _torchao_of(cols: int, outs: int) -> Any:
    """Compile one module for all numbers of rows and all sets of buffers, because compiling takes many seconds."""
    import torch
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    pair = torch.nn.Sequential(torch.nn.LayerNorm(cols), torch.nn.Linear(cols, outs))
    pair = pair.to(device="cuda", dtype=torch.bfloat16)
    quantize_(pair, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return torch.compile(pair)


def peers(layer: Any, both: bool = True) -> tuple[dict[str, Pass], dict[str, str]]:
    """Return (passes by contender, why a contender is missing), without `both` only the forward passes."""
    by_contender: dict[str, Pass] = {}
    missing = {}
    for name, load in {"TransformerEngine": transformer_engine, "torchao": torchao}.items():
        try:
            passes = load(layer)
            by_contender |= {f"{kind}, {name}": run for kind, run in passes.items() if both or kind == "forward"}
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return by_contender, missing
