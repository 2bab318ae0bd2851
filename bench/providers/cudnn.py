"""cuDNN's graph API (nvidia-cudnn-frontend): every plan that it offers is tried, and the fastest is kept.

Forward is its inference phase, which stores no statistics. LayerNorm takes a float32 weight and bias.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from bench.providers.base import Provider
from bench.providers.pytorch import load_torch

TRIES = 10  # launches of a plan


class Cudnn(Provider):
    name = "cuDNN"
    seconds = 2.0

    def load(self) -> str:
        load_torch()
        import cudnn

        self.cudnn, self.handle = cudnn, cudnn.create_handle()
        self.built: tuple[Any, dict[str, Any], int] | None = None
        return f"{cudnn.__version__} (cuDNN {cudnn.backend_version()})"

    def reset(self) -> None:
        self.built = None

    def prepare(self, case, b):
        import torch

        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        arrays, outputs = _arrays(case, b), _outputs(case, b)
        if self.built is None:  # one graph for all sets of buffers
            self.built = self._graph(case, arrays, outputs)
        graph, tensors, index = self.built
        pack = {tensors[name]: array for name, array in (arrays | outputs).items()}
        space = torch.empty(_workspace(graph, index), device="cuda", dtype=torch.uint8)

        def run():
            graph.execute_plan_at_index(pack, space, index, self.handle)
            return tuple(outputs.values())

        return run

    def _graph(self, case, arrays, outputs) -> tuple[Any, dict[str, Any], int]:
        cudnn = self.cudnn
        graph = cudnn.pygraph(
            handle=self.handle,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        tensors = {name: graph.tensor_like(array) for name, array in arrays.items()}
        results = _operation(cudnn, graph, case, tensors)
        for (name, array), tensor in zip(outputs.items(), results, strict=False):
            tensor.set_output(True).set_data_type(array.dtype)
            tensors[name] = tensor
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        with contextlib.suppress(Exception):  # plans that cannot be built are left out below
            graph.build_plans(cudnn.build_plan_policy.ALL)
        return graph, tensors, self._fastest(graph, tensors, arrays | outputs)

    def _fastest(self, graph, tensors, buffers) -> int:
        """Return the index of the plan that takes the least time."""
        import torch

        pack = {tensors[name]: array for name, array in buffers.items()}
        times = {}
        for index in range(graph.get_execution_plan_count()):
            with contextlib.suppress(Exception):
                space = torch.empty(_workspace(graph, index), device="cuda", dtype=torch.uint8)
                graph.execute_plan_at_index(pack, space, index, self.handle)
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(TRIES):
                    graph.execute_plan_at_index(pack, space, index, self.handle)
                torch.cuda.synchronize()
                times[index] = time.perf_counter() - start
        if not times:
            raise RuntimeError("cuDNN has no plan that runs")
        return min(times, key=lambda index: times[index])


def _workspace(graph: Any, index: int) -> int:
    return max(1, graph.get_workspace_size_plan_at_index(index))


def _arrays(case, b) -> dict[str, Any]:
    """Return the arrays that the operation reads, with cuDNN's four axes."""
    import torch

    matrix, row, rows = (case.rows, case.cols, 1, 1), (1, case.cols, 1, 1), (case.rows, 1, 1, 1)
    parameter = torch.float32 if case.op == "layer_norm" else b.x.dtype
    arrays = {"x": b.x.view(matrix), "weight": b.weight.to(parameter).view(row)}
    if case.direction == "forward":
        if b.bias is not None:
            arrays["bias"] = b.bias.to(parameter).view(row)
        return arrays | {"eps": torch.full((1, 1, 1, 1), case.eps, dtype=torch.float32, device="cpu")}
    arrays |= {"dy": b.dy.view(matrix), "rstd": b.rstd.view(rows)}
    return arrays | ({"mean": b.mean.view(rows)} if case.op == "layer_norm" else {})


def _outputs(case, b) -> dict[str, Any]:
    import torch

    matrix, row = (case.rows, case.cols, 1, 1), (1, case.cols, 1, 1)
    new = {"y" if case.direction == "forward" else "dx": torch.empty_like(b.x).view(matrix)}
    if case.direction == "backward":
        parameter = torch.float32 if case.op == "layer_norm" else b.x.dtype
        for name in ("dweight", "dbias") if case.op == "layer_norm" else ("dweight",):
            new[name] = torch.empty(row, device="cuda", dtype=parameter)
    return new


def _operation(cudnn, graph, case, t) -> tuple[Any, ...]:
    inference = cudnn.norm_forward_phase.INFERENCE
    if case.direction == "forward":
        if case.op == "layer_norm":
            return graph.layernorm(
                name="norm",
                norm_forward_phase=inference,
                input=t["x"],
                scale=t["weight"],
                bias=t["bias"],
                epsilon=t["eps"],
            )[:1]
        return graph.rmsnorm(
            name="norm", norm_forward_phase=inference, input=t["x"], scale=t["weight"], epsilon=t["eps"]
        )[:1]
    if case.op == "layer_norm":
        return tuple(
            graph.layernorm_backward(
                name="norm",
                grad=t["dy"],
                input=t["x"],
                scale=t["weight"],
                mean=t["mean"],
                inv_variance=t["rstd"],
            )
        )
    return tuple(
        graph.rmsnorm_backward(
            name="norm", grad=t["dy"], input=t["x"], scale=t["weight"], inv_variance=t["rstd"], has_dbias=False
        )
    )[:2]
