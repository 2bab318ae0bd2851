"""The product of y in 16, 32 or 64 bits: torch's own, or cuBLASLt's by the algorithm that a table names."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..private import nothing_listens

# The multiplications of a product that takes a GPU longer than Python takes to ask cuBLASLt for it.
LARGE = 2**33


def linear(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return z weightᵀ + bias, which autograd does not record."""
    if not has_algorithm(z, weight) or (bias is not None and not bias.is_contiguous()) or not nothing_listens():
        return F.linear(z, weight, bias)
    from ...linear.gemm import of_thread

    rows, (outs, cols), index = z.numel() // z.shape[-1], weight.shape, z.get_device()
    with torch.cuda.device(index):
        y = z.new_empty(*z.shape[:-1], outs)
        pointers = z.data_ptr(), weight.data_ptr(), y.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        together = pointers[0] | pointers[1] | pointers[2] | of_bias
        epilogue = "DEFAULT" if bias is None else "BIAS"
        alignment = min(256, together & -together)
        product = of_thread.prepared(_kind(rows, outs, cols, z.dtype, epilogue, alignment, index))
        if not product.is_there(of_bias):
            return F.linear(z, weight, bias)
        workspace = z.new_empty(product.workspace, dtype=torch.uint8)
        product.launch(*pointers, workspace.data_ptr(), torch.cuda.current_stream(index).cuda_stream)
    return y


def has_algorithm(z: Tensor, weight: Tensor) -> bool:
    """Return whether a product is large, and a table names an algorithm of cuBLASLt for it."""
    if z.numel() * len(weight) < LARGE or not z.is_cuda or not (z.is_contiguous() and weight.is_contiguous()):
        return False
    return _has_algorithm(z.numel() // z.shape[-1], *weight.shape, z.dtype, z.get_device())


@lru_cache(maxsize=1024)
def _has_algorithm(rows: int, outs: int, cols: int, dtype: torch.dtype, device_id: int) -> bool:
    if find_spec("nvmath") is None:  # else `bindings` would log that CuPy's products are others
        return False
    from ...linear import gemm

    return gemm.bindings() is not None and bool(gemm.measured(_kind(rows, outs, cols, dtype, "BIAS", 16, device_id)))


def _kind(rows: int, outs: int, cols: int, dtype: torch.dtype, epilogue: str, alignment: int, device_id: int) -> Any:
    from ...linear.gemm import Kind, Operand

    operands = Operand(False, cols), Operand(True, cols)
    return Kind(rows, outs, cols, str(dtype).removeprefix("torch."), False, *operands, epilogue, alignment, device_id)
