"""The buffers of a case are made once by CuPy, and lent to every other library through DLPack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cupy
import numpy

from bench import check
from bench.suites import Case
from bench.timing import buffers_needed
from cunorm.call.numpy import numpy_dtype

USUAL_MEAN = 0.25


class Workload:
    """Sets of x, weight, bias (LayerNorm), and for backward dy, mean and rstd; every set holds the same values."""

    def __init__(self, case: Case):
        self.case = case
        mean = USUAL_MEAN if case.offset is None else case.offset
        # In a packed QKV, x is the first third of the heads.
        memory = (*case.leading[:-1], 3 * case.heads, case.cols) if case.heads else (case.rows, case.cols)
        first: dict[str, Any] = {
            "memory": _random(memory, case.dtype, mean),
            "weight": _random(case.cols, case.weight_dtype, 1.0),
            "bias": _random(case.cols, case.weight_dtype) if case.op == "layer_norm" else None,
        }
        if case.direction == "backward":
            first["dy"] = _random((*case.leading, case.cols), case.dtype)
            for name, array in zip(("mean", "rstd"), check.statistics(case, self._x(first["memory"])), strict=True):
                first[name] = array.reshape(case.leading)
        count = buffers_needed(case.bytes_moved) if case.offset is None else 1
        copies = [{n: None if a is None else a.copy() for n, a in first.items()} for _ in range(count - 1)]
        self.memory = [buffers.pop("memory") for buffers in (first, *copies)]
        self.sets = [
            SimpleNamespace(x=self._x(memory), **buffers)
            for memory, buffers in zip(self.memory, (first, *copies), strict=True)
        ]
        # The roof comes next, on a stream of its own, and may write to memory of the pool that kernels of this stream
        # still use.
        cupy.cuda.Device().synchronize()

    def _x(self, memory: cupy.ndarray) -> cupy.ndarray:
        return memory[:, : self.case.heads] if self.case.heads else memory

    def lend(self, library: str) -> list[SimpleNamespace]:
        """Return the sets as arrays of a library, in the same memory."""
        to = {"cupy": lambda array: array, "torch": _to_torch, "jax": _to_jax}[library]
        return [SimpleNamespace(**{n: None if a is None else to(a) for n, a in vars(s).items()}) for s in self.sets]

    def streamed(self) -> list[tuple[cupy.ndarray, cupy.ndarray | None, cupy.ndarray]]:
        """Return what the roof reads and writes: the same matrices, or as many contiguous bytes of a packed QKV."""
        rows, cols, forward = self.case.rows, self.case.cols, self.case.direction == "forward"
        xs = [memory.reshape(-1)[: rows * cols] for memory in self.memory]
        return [
            (x, None if forward else buffers.dy, cupy.empty_like(x)) for x, buffers in zip(xs, self.sets, strict=True)
        ]


def to_cupy(array: Any) -> cupy.ndarray | None:
    """Return a result of any library as a CuPy array."""
    if array is None or isinstance(array, cupy.ndarray):
        return array
    if type(array).__module__.startswith("torch"):
        import torch

        array = array.detach()
        if array.dtype == torch.bfloat16:
            return cupy.from_dlpack(array.view(torch.int16)).view(numpy_dtype("bench", "bfloat16"))
    return cupy.from_dlpack(array)


def _to_torch(array: cupy.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":  # passed as bits, because not all versions exchange bfloat16
        return torch.from_dlpack(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _to_jax(array: cupy.ndarray) -> Any:
    import jax

    return jax.dlpack.from_dlpack(array)


def _random(shape: int | tuple[int, ...], dtype: str, mean: float = 0.0) -> cupy.ndarray:
    values = cupy.random.standard_normal(shape, dtype=numpy.float32)
    # cuRAND may still be writing the values.
    cupy.cuda.Device().synchronize()
    values += numpy.float32(mean)
    return values.astype(numpy_dtype("bench", dtype))
