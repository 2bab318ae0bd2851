"""QuACK: CuTe DSL kernels (quack-kernels), launched by its heuristics and by its own search.

Its LayerNorm takes a float32 weight and bias, and its RMSNorm a view of heads with a weight for each.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from bench.providers.base import Provider
from bench.providers.pytorch import load_torch


class Quack(Provider):
    name = "QuACK"
    views = True
    seconds = 1.5

    def load(self) -> str:
        load_torch()
        self.quack = import_module("quack.rmsnorm")  # quack.rmsnorm as an attribute is a function
        return version("quack-kernels")

    def prepare(self, case, b):
        quack = self.quack
        if case.op == "layer_norm":
            weight, bias = b.weight.float(), b.bias.float()
            matrix = (case.rows, case.cols)  # reshaping a view of heads copies it
            if case.direction == "forward":
                return lambda: quack.layernorm_fwd(b.x.reshape(matrix), weight, bias, case.eps)
            dy, mean, rstd = b.dy.view(matrix), b.mean.view(-1), b.rstd.view(-1)
            return lambda: quack.layernorm_bwd(b.x.reshape(matrix), weight, dy, rstd, mean)
        weight = b.weight.expand(case.heads, -1).contiguous() if case.heads else b.weight
        if case.direction == "forward":
            return lambda: quack.rmsnorm_fwd(b.x, weight, eps=case.eps)[0]
        if not case.heads:
            return lambda: quack.rmsnorm_bwd(b.x, weight, b.dy, b.rstd)[:2]

        def backward():
            dx, dweight = quack.rmsnorm_bwd(b.x, weight, b.dy, b.rstd)[:2]
            return dx, dweight.sum(0)

        return backward


class QuackTuned(Quack):
    """QuACK's entry points that try every configuration at the first call of a shape."""

    name = "QuACK tuned"
    views = False
    seconds = 20.0

    def load(self) -> str:
        installed = super().load()
        for name in ("rmsnorm_fwd_tuned", "rmsnorm_bwd_tuned"):
            if not hasattr(self.quack, name):
                raise ImportError(f"quack-kernels {installed} has no {name}")
        return installed

    def prepare(self, case, b):
        import torch

        quack, layer_norm = self.quack, case.op == "layer_norm"
        weight = b.weight.float() if layer_norm else b.weight
        if case.direction == "forward":
            bias = b.bias.float() if layer_norm else None
            y = torch.empty_like(b.x)

            def forward():
                quack.rmsnorm_fwd_tuned(b.x, weight, y, bias, eps=case.eps, is_layernorm=layer_norm)
                return y

            return forward
        dx, groups = torch.empty_like(b.x), quack.get_sm_count(case.cols, b.x.device)
        partials = [torch.empty(groups, case.cols, device=b.x.device) for _ in range(1 + layer_norm)]

        def backward():
            quack.rmsnorm_bwd_tuned(
                b.x,
                weight,
                b.dy,
                b.rstd,
                dx,
                *partials,
                has_dw_partial=True,
                has_db_partial=layer_norm,
                mean=b.mean if layer_norm else None,
                is_layernorm=layer_norm,
            )
            return dx, *(partial_sums.sum(dim=0).to(weight.dtype) for partial_sums in partials)

        return backward
