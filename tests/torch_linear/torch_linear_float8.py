"""Recipes, modules, inputs and steps for the tests of LayerNormLinear in FP8."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch_tensors import random

from cunorm.torch import Float8CurrentScaling, LayerNormLinear, RowwiseScaling

RECIPES = {
    "row": RowwiseScaling(),
    "row, power of 2": RowwiseScaling(power_2_scale=True),
    "row, wide wgrad": RowwiseScaling(high_precision_wgrad=True),
    "tensor, hybrid": Float8CurrentScaling(),
    "tensor, e4m3": Float8CurrentScaling("E4M3", use_power_2_scales=True),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
ROWS, COLS, OUTS = 200, 256, 192
ERROR = {"e4m3": 0.045, "e5m2": 0.07}  # in the Frobenius norm, of a product of two rounded matrices


def make(device: str = "cpu", dtype: Any = torch.float32, cols: int = COLS, outs: int = OUTS, **options: Any):
    """Return a module whose parameters all differ from what they begin as."""
    torch.manual_seed(0)
    module = LayerNormLinear(cols, outs, device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    return module


def inputs(device: str = "cpu", dtype: Any = torch.float32, rows: int = ROWS) -> tuple[Any, Any]:
    """Return x, which wants a gradient, and dy with rows and columns of unequal magnitude."""
    x = random(rows, COLS, device=device, dtype=dtype).requires_grad_()
    dy = random(rows, OUTS) * random(rows, 1, seed=3).exp() * (random(1, OUTS, seed=4) / 2).exp()
    return x, dy.to(device, dtype)


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class Results(NamedTuple):
    outputs: list[Any]
    gradients: dict[str, Any]


def step(module: Any, x: Any, dy: Any, first: bool | None = None) -> Results:
    """Return the results of a call and all gradients, for main_grad what was added to it."""
    for name, parameter in module.named_parameters():
        parameter.grad = None
        if module.fuse_wgrad_accumulation and name.endswith("weight") and "norm" not in name:
            parameter.main_grad = torch.full_like(parameter, 2.0, dtype=torch.float32)
    x = x.detach().requires_grad_()
    results = module(x, is_first_microbatch=first)
    outputs = list(results) if isinstance(results, tuple) else [results]
    others = [random(*o.shape, device=o.device, dtype=o.dtype, seed=9) for o in outputs[1:]]
    torch.autograd.backward(
        [o for o in outputs if o.requires_grad], [dy, *others][: sum(o.requires_grad for o in outputs)]
    )
    module.backward_dw()
    gradients = {name: p.grad if p.grad is not None else p.main_grad - 2 for name, p in module.named_parameters()}
    return Results([o.detach() for o in outputs], {"x": x.grad, **gradients})
