"""Which kernel runs the rows of a `Problem` on a `Device`: what a table says, else the cost rule.

Pure functions; no GPU library is imported.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernel.device import Device
from .few_rows import adds_columns_beside_rows, few_rows_backward, rows_are_few
from .forward_twice import forward_twice
from .problem import ITEMSIZE, Problem
from .registers import sixteen_bits
from .shapes import kernel_spec
from .spec import WARP, FewRowsSpec, NormSpec, RowShape
from .steps import STREAMED_THREADS
from .tables import measured
from .tiers import held_by


def choose(problem: Problem, device: Device) -> NormSpec | FewRowsSpec | None:
    """The kernel of the rows of a problem; None for rows of a backward pass that are streamed."""
    if problem.direction == "forward":
        if problem.operation.second:
            return forward_twice(problem, device)
        return held_by(problem, device) or _forward_streamed(problem, device)
    # For sums of dy alone neither x nor the whole of a row is needed.
    written = [operand for operand in problem.operands if operand.written]
    needs_rows = len(problem.sums) < len(written) or "rstd" in problem.pointers
    spec = held_by(problem, device) if needs_rows else None
    if spec is None or problem.groups:
        return spec
    if adds_columns_beside_rows(problem, device):
        return few_rows_backward(problem, device, spec.shape)
    return measured(problem, spec, device) or spec


def _forward_streamed(problem: Problem, device: Device) -> NormSpec:
    """The kernel of rows that nothing holds, which reads them twice."""
    shape = RowShape(16 // ITEMSIZE[problem.row_dtype], STREAMED_THREADS, 1)
    spec = kernel_spec(problem, "forward_streamed", shape)
    # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
    arrays = {operand.dtype for operand in problem.operands if operand.kind in ("full", "column", "group")}
    two = arrays == {problem.row_dtype} != {"float64"} and len(spec.matrices) == 1 and spec.aligned
    return replace(spec, ctas_per_sm=2 if two else 1)


def one_kernel_differentiates_twice(problem: Problem, device: Device) -> bool:
    """Whether the backward pass of an operation with a second norm is one kernel: of rows of 16 bits that are not few.

    A CTA holds such rows in the shape that either norm's own backward pass gives them, so they have its bits. By more
    than twelve warps it spilled 20 to 28 bytes; on sm_100 8 to 164, and 4 to 72 without ds, by 512 threads.
    """
    spec = held_by(problem, device) if device.arch == 90 and "ds" in problem.by_name else None
    if spec is None or rows_are_few(problem, device):
        return False
    shape = spec.shape
    held = shape.cluster == 1 and shape.threads >= WARP and shape.threads * shape.packs <= 768
    return held and sixteen_bits(spec)
