"""LayerNorm and a Linear in FP8 by others, where they are installed: contenders of `python -m bench.linear_fp8`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

Pass = Callable[[int], Any]  # of the set of buffers with this number


def transformer_engine(layer: Any) -> dict[str, Pass]:
    """Its current scaling, its default where history need not be kept; in the forward pass with weights kept."""
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
    """Scales of rows, compiled with torch's norm: for inference, with weights kept, and for training."""
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    outs, cols = layer.modules[0].weight.shape

    def pair() -> Any:
        modules = torch.nn.LayerNorm(cols), torch.nn.Linear(cols, outs)
        return torch.nn.Sequential(*modules).to(device="cuda", dtype=torch.bfloat16)

    def kept() -> Any:
        found = pair()
        quantize_(found, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
        return torch.compile(found)

    def trained() -> Any:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        return torch.compile(convert_to_float8_training(pair(), config=config))

    inference, training = [kept() for _ in layer.xs], [trained() for _ in layer.xs]

    def forward(index: int) -> Any:
        with torch.no_grad():
            return inference[index](layer.xs[index])

    def both(index: int) -> Any:
        x, module = layer.xs[index], training[index]
        return torch.autograd.grad(module(x), (x, *module.parameters()), layer.dys[index])

    return {"forward": forward, "forward and backward": both}


def peers(layer: Any) -> tuple[dict[str, Pass], dict[str, str]]:
    """(passes by contender, why somebody is missing)"""
    found: dict[str, Pass] = {}
    missing = {}
    for name, load in {"TransformerEngine": transformer_engine, "torchao": torchao}.items():
        try:
            found |= {f"{kind}, {name}": one for kind, one in load(layer).items()}
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return found, missing
