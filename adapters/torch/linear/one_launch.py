"""`layer_norm_linear` of few rows without gradients in one launch, where that was measured to win."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...call.checks import Layout
from ...kernel import launch
from ...linear import one_launch
from ...linear.one_launch import NAMES, OneLaunchPlan
from ...operation import NAMED
from ..norm import checks, gpu
from .step import Inputs, Step

OneLaunch = Callable[[Inputs], Tensor | None]


def of_inputs(inputs: Inputs, step: Step) -> OneLaunch | None:
    """Return what computes y of tensors like these, or None for those at other addresses; None: split.

    x, weight, bias and y have one dtype: calls under autocast are not described.
    """
    x, weight = inputs[0], inputs[1]
    if step.sm_margin or x.numel() > one_launch.ROWS[-1] * x.shape[-1]:
        return None
    norm = NAMED[step.operation].norm
    layouts: dict[str, Layout] = {
        name: checks.layout_in_memory(norm, name, tensor)
        for name, tensor in zip(NAMES, inputs, strict=True)
        if tensor is not None
    }
    problem = one_launch.problem_of(norm, layouts, step.operation != norm, True)
    plan = None if problem is None else one_launch.chosen(problem, gpu.properties_of(norm, x))
    if plan is None:
        return None
    of_y = gpu.contiguously((*x.shape[:-1], len(weight)), x.dtype)
    places = tuple(NAMES.index(name) if name in NAMES else -1 for name in plan.problem.pointers)
    return partial(run, plan, of_y, places, step.eps)


def run(plan: OneLaunchPlan, of_y: gpu.Memory, places: tuple[int, ...], eps: float, inputs: Inputs) -> Tensor | None:
    """Launch on torch's current stream; None where a tensor does not begin at a multiple of 16 bytes."""
    index = inputs[0].get_device()
    if index != gpu.current_device():
        with torch.cuda.device(index):
            return run(plan, of_y, places, eps, inputs)
    given, together = [], 0
    for tensor in inputs:
        pointer = 0 if tensor is None else tensor.data_ptr()
        together |= pointer
        given.append(pointer)
    if together & 15:
        return None
    y = gpu.empty(*of_y)
    pointers = [given[place] if place >= 0 else 0 for place in places]
    pointers[plan.problem.pointers.index("y")] = y.data_ptr()
    launch.run(plan, index, gpu.stream(index), (*pointers, eps))
    return y
