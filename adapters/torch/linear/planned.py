"""Run `layer_norm_linear` of few rows without gradients by the plan that cunorm/linear/plan.py chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.checks import Layout
from ...kernel import launch
from ...linear import plan
from ...linear.problem import NAMES, problem_of
from ...operation import NAMED, NORMS
from ...plan.steps import OtherPlan
from ..norm import checks, dispatch, gpu, repeats
from ..norm.functional import given, nothing_else_listens
from .step import Inputs, Step

# What the addresses of a launch are picked from; z is not wanted, and neither are statistics unless they are asked for.
ORDER = (*NAMES, "y", "mean", "rstd", "z")
# Computes (y, statistics or None) of tensors like those that it was made for. It returns None if one of them does not
# begin at a multiple of 16 bytes.
Planned = Callable[[Inputs, bool], tuple[Tensor, Tensor | None] | None]


class _Recipe(NamedTuple):
    """How calls with the same layouts run."""

    solution: OtherPlan
    y: gpu.Memory
    statistics: gpu.Memory
    rstd_offset: int  # bytes from the first row statistic to the second, 0 if there is only one
    workspace: gpu.Memory
    places: tuple[int, ...]  # of the plan's pointers in ORDER
    eps: float

    def run(self, inputs: Inputs, wants_statistics: bool) -> tuple[Tensor, Tensor | None] | None:
        """Launch on torch's current stream, as `Planned` says."""
        index = inputs[0].get_device()
        if index != gpu.current_device():
            with torch.cuda.device(index):
                return self.run(inputs, wants_statistics)
        pointers, together = [], 0
        for tensor in inputs:
            pointer = 0 if tensor is None else tensor.data_ptr()
            together |= pointer
            pointers.append(pointer)
        if together & 15:
            return None
        y, statistics, mean, rstd = gpu.empty(*self.y), None, 0, 0
        if wants_statistics:
            statistics = gpu.empty(*self.statistics)
            mean = statistics.data_ptr()
            rstd = mean + self.rstd_offset
        pointers += (y.data_ptr(), mean, rstd, 0)
        workspace = gpu.empty(*self.workspace) if self.solution.workspace else None
        address = 0 if workspace is None else workspace.data_ptr()
        arguments = (*[pointers[place] for place in self.places], self.eps)
        launch.run(self.solution, index, gpu.stream(index), arguments, address)
        return y, statistics


def of_inputs(inputs: Inputs, step: Step) -> Planned | None:
    """Return what runs tensors like these; None if norm and product are split.

    x, weight and bias have the dtype of y, as calls under autocast do not come here.
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
    if problem is None or solution is None:
        return None
    leading, count = x.shape[:-1], len(NORMS[norm].statistics)
    return _Recipe(
        solution,
        gpu.contiguously((*leading, len(weight)), x.dtype),
        gpu.contiguously((count, *leading), torch.float32),
        (count - 1) * problem.rows * torch.float32.itemsize,
        gpu.contiguously((solution.workspace,), torch.uint8),
        tuple(map(ORDER.index, solution.problem.pointers)),
        step.eps,
    ).run


def run_again(inputs: Inputs, step: Step) -> tuple[Tensor, Tensor | None] | None:
    """Return (y, statistics) by the plan of tensors like these, which is remembered; None if they are split."""
    x, weight, bias, ln_weight, ln_bias = inputs
    key = ("norm_linear", step, x.shape, bias is None, ln_weight is None, ln_bias is None)
    tensors = tuple(tensor for tensor in inputs if tensor is not None)
    known = repeats.known_call(key, tensors)
    if known is None:
        alike = all(tensor.dtype is step.dtype for tensor in given(x, weight, bias))
        # A tuple, as None stands for nothing known.
        known = (of_inputs(inputs, step) if alike and dispatch.at_once(tensors) else None,)
        repeats.remember_call(key, tensors, known)
    (planned,) = known
    return None if planned is None or not nothing_else_listens() else planned(inputs, True)
