"""Run `layer_norm_linear` of few rows without gradients by the plan that cunorm/linear/plan.py chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...call.checks import Layout
from ...kernel import launch
from ...linear import plan
from ...linear.problem import NAMES, problem_of
from ...operation import NAMED
from ...plan.steps import OtherPlan
from ..norm import checks, gpu
from .step import Inputs, Step


def of_inputs(inputs: Inputs, step: Step) -> Callable[[Inputs], Tensor | None] | None:
    """Return a function that computes y of tensors like these, as `run` does; None if norm and product are split.

    x, weight, bias and y have one dtype, as calls under autocast do not come here.
    """
    x, weight = inputs[0], inputs[1]
    if step.sm_margin or x.numel() > plan.ROWS[-1] * x.shape[-1]:
        return None
    norm = NAMED[step.operation].norm
    layouts: dict[str, Layout] = {
        name: checks.layout_in_memory(norm, name, tensor)
        for name, tensor in zip(NAMES, inputs, strict=True)
        if tensor is not None
    }
    problem = problem_of(norm, layouts, step.operation != norm, True)
    solution = None if problem is None else plan.chosen(problem, gpu.properties_of(norm, x))
    if solution is None:
        return None
    y_memory = gpu.contiguously((*x.shape[:-1], len(weight)), x.dtype)
    # Neither z nor statistics are wanted: they have the address after that of y, which is 0.
    order = (*NAMES, "y")
    places = tuple(order.index(name) if name in order else len(order) for name in solution.problem.pointers)
    workspace = gpu.contiguously((solution.workspace,), torch.uint8)
    return partial(run, solution, y_memory, workspace, places, step.eps)


def run(
    solution: OtherPlan,
    y_memory: gpu.Memory,
    workspace_memory: gpu.Memory,
    places: tuple[int, ...],
    eps: float,
    inputs: Inputs,
) -> Tensor | None:
    """Launch on torch's current stream and return y; None if a tensor does not begin at a multiple of 16 bytes."""
    index = inputs[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return run(solution, y_memory, workspace_memory, places, eps, inputs)
    pointers, together = [], 0
    for tensor in inputs:
        pointer = 0 if tensor is None else tensor.data_ptr()
        together |= pointer
        pointers.append(pointer)
    if together & 15:
        return None
    y = gpu.empty(*y_memory)
    pointers += (y.data_ptr(), 0)
    workspace = gpu.empty(*workspace_memory) if solution.workspace else None
    address = 0 if workspace is None else workspace.data_ptr()
    launch.run(solution, index, gpu.stream(index), (*[pointers[place] for place in places], eps), address)
    return y
