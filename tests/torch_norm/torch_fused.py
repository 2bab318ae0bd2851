"""Cases of fused operations as torch takes them."""

from __future__ import annotations

from typing import Any

import torch
from fusion_cases import CASES, make
from torch_tensors import tensor


def leaves(made: Any, device: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """Return x, the operands and the gradients of the results as tensors; x and the operands want gradients."""

    def moved(operand):
        return tensor(operand).to(device, copy=True) if hasattr(operand, "dtype") else operand

    x, operands = moved(made.x), {name: moved(operand) for name, operand in made.operands.items()}
    for operand in (x, *operands.values()):
        if isinstance(operand, torch.Tensor):
            operand.requires_grad_()
    return x, operands, [moved(operand) for operand in made.gradients]


def example(name: str, shape=(3, 2, 8), device: str = "cpu"):
    """Return (a function of tensors alone, the tensors)."""
    case = CASES[name]
    x, operands, _ = leaves(make(case, shape, "float64"), device)
    numbers = {name: operand for name, operand in operands.items() if not isinstance(operand, torch.Tensor)}
    names = [name for name in operands if name not in numbers]

    def function(x, *tensors):
        return case.op(x, eps=0.1, **dict(zip(names, tensors, strict=True)), **numbers)

    return function, [x, *(operands[name] for name in names)]
