"""`decompositions`: cunorm's operators in torch's own, for a compiler or an exporter that must not see ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .linear import operators as linear_operators
from .norm import operators


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a table that has, for each operator of cunorm, a function that computes it by torch's own operators.

    Nothing is registered: calls and modules run cunorm's kernels on CUDA tensors, under torch.compile and in an
    exported program too. A program is without cunorm's operators only if this table is handed to what makes it:
    `ExportedProgram.run_decompositions`, `torch._dynamo.backends.common.aot_autograd(decompositions=...)` or
    `make_fx(decomposition_table=...)`. Such a program needs no cunorm to run, and does not use cunorm's kernels.

    Returns
    -------
    dict of operator to callable
        The keys are the `.default` of torch.ops.cunorm.fused_norm, norm_linear, and the `_forward` and `_backward` of
        each. Every call returns a new dictionary, which may be joined with others.

    Notes
    -----
    The arithmetic is that of the kernels: in float32 (float64 for float64 x), with one rounding at the end. `sm_margin`
    has no effect. `torch.onnx.export(module, ..., dynamo=True)` needs no table: while it traces, calls and modules use
    torch's own operators. A program that was exported before must first be decomposed, as below.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import LayerNorm, decompositions
    >>> program = torch.export.export(LayerNorm(8), (torch.ones(2, 8),))
    >>> program = program.run_decompositions(decompositions())  # for torch.onnx.export(program, dynamo=True), say
    >>> any("cunorm" in str(node.target) for node in program.graph.nodes)
    False
    """
    return {
        operators.fused_norm: operators.forward_by_formulas,
        operators.fused_norm_forward: operators.forward_by_formulas,
        operators.fused_norm_backward: operators.backward_by_formulas,
        linear_operators.norm_linear: linear_operators.forward_in_steps,
        linear_operators.norm_linear_forward: linear_operators.forward_in_steps,
        linear_operators.norm_linear_backward: linear_operators.backward_in_steps,
    }
