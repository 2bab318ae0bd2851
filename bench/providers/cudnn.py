"""cuDNN's graph API (nvidia-cudnn-frontend), through the torch operators that the package registers.

They build a graph a shape and keep it. LayerNorm takes a float32 weight and bias, RMSNorm those of the dtype of x.
"""

from __future__ import annotations

from bench.providers.base import Provider
from bench.providers.pytorch import load_torch


class Cudnn(Provider):
    name = "cuDNN"

    def load(self) -> str:
        load_torch()
        import cudnn
        import cudnn.ops.norm.layernorm
        import cudnn.ops.norm.rmsnorm

        return f"{cudnn.__version__} (cuDNN {cudnn.backend_version()})"

    def prepare(self, case, b):
        import torch

        ops = torch.ops.cudnn
        matrix, row = (case.rows, case.cols, 1, 1), (1, case.cols, 1, 1)
        x = b.x.view(matrix)
        parameter = torch.float32 if case.op == "layer_norm" else b.x.dtype
        weight = b.weight.to(parameter).view(row)
        if case.direction == "forward":
            if case.op == "layer_norm":
                bias = b.bias.to(parameter).view(row)
                return lambda: ops.layernorm(x, weight, bias, case.eps)[0]
            return lambda: ops.rmsnorm(x, weight, case.eps)[0]
        dy = b.dy.view(matrix)
        mean, rstd = (t.view(case.rows, 1, 1, 1) for t in (b.mean, b.rstd))
        if case.op == "layer_norm":
            return lambda: ops.layernorm_bwd(dy, x, weight, mean, rstd)
        return lambda: ops.rmsnorm_bwd(dy, x, weight, rstd)[:2]
