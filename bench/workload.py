"""A problem with real data in as many sets of buffers as keep L2 cold, and the calls that work on them."""

from __future__ import annotations

from collections.abc import Callable

import cupy
import numpy

from bench.roof import stream
from bench.timing import buffers_needed
from cunorm import launch
from cunorm.host import numpy_dtype
from cunorm.plan import Plan
from cunorm.problem import Problem


class Workload:
    """Buffers of a problem: x, dy (or y), dx as matrices, parameters as vectors."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.sets = [self._buffers() for _ in range(buffers_needed(problem.bytes_moved))]

    def _buffers(self) -> dict[str, cupy.ndarray]:
        task = self.problem
        parameter = task.weight or task.x
        buffers = {"x": _random((task.rows, task.cols), task.x), "weight": _random(task.cols, parameter)}
        buffers |= {"mean": cupy.zeros(task.rows, task.statistics), "rstd": cupy.ones(task.rows, task.statistics)}
        if task.direction == "forward":
            return buffers | {"bias": _random(task.cols, parameter), "y": cupy.empty_like(buffers["x"])}
        buffers |= {"dy": _random((task.rows, task.cols), task.y), "dx": cupy.empty_like(buffers["x"])}
        return buffers | {name: cupy.empty_like(buffers["weight"]) for name in ("dweight", "dbias")}

    def calls(self, plan: Plan) -> list[Callable[[], None]]:
        """One call of the plan for each set of buffers."""
        device_id = cupy.cuda.Device().id

        def stream() -> int:
            return cupy.cuda.get_current_stream().ptr

        result = []
        for buffers in self.sets:
            pointers = {name: buffer.data.ptr for name, buffer in buffers.items()}
            if self.problem.direction == "forward":
                result.append(lambda p=pointers: launch.run_forward(plan, device_id, stream(), eps=1e-5, **p))
            else:
                workspace = cupy.empty(max(1, plan.workspace), "uint8")
                pointers["workspace"] = workspace.data.ptr
                result.append(lambda p=pointers, w=workspace: launch.run_backward(plan, device_id, stream(), **p))
        return result

    def roof(self) -> list[Callable[[], None]]:
        """The streaming kernel over the same matrices."""
        if self.problem.direction == "forward":
            return [stream(b["x"], None, b["y"]) for b in self.sets]
        return [stream(b["x"], b["dy"], b["dx"]) for b in self.sets]


def _random(shape: int | tuple[int, ...], dtype: str) -> cupy.ndarray:
    values = cupy.random.standard_normal(shape, dtype=numpy.float32)
    # cuRAND fills them on a stream of its own choice: without this some were read before they were there.
    cupy.cuda.Device().synchronize()
    return values.astype(numpy_dtype("bench", dtype))
