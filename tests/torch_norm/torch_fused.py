"""Cases of fused operations as torch takes them."""

from __future__ import annotations

from typing import Any

import torch
from fusion_cases import CASES, make
from torch_tensors import tensor


def leaves(made: Any, device: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """x, the operands and gradients of the results as tensors; what is a tensor of the first two wants a gradient."""

    def moved(one):
        return tensor(one).to(device, copy=True) if hasattr(one, "dtype") else one

    x, operands = moved(made.x), {name: moved(one) for name, one in made.operands.items()}
    for one in (x, *operands.values()):
        if isinstance(one, torch.Tensor):
            one.requires_grad_()
    return x, operands, [moved(one) for one in made.gradients]


def example(name: str, shape=(3, 2, 8), device: str = "cpu"):
    """(a function of tensors alone, the tensors)"""
    case = CASES[name]
    x, operands, _ = leaves(make(case, shape, "float64"), device)
    numbers = {name: one for name, one in operands.items() if not isinstance(one, torch.Tensor)}
    names = [name for name in operands if name not in numbers]

    def function(x, *tensors):
        return case.op(x, eps=0.1, **dict(zip(names, tensors, strict=True)), **numbers)

    return function, [x, *(operands[name] for name in names)]
