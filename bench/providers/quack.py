"""QuACK: CuTe DSL kernels (quack-kernels). Its LayerNorm takes a float32 weight and bias."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from bench.providers.base import Provider
from bench.providers.pytorch import load_torch


class Quack(Provider):
    name = "QuACK"

    def load(self) -> str:
        load_torch()
        self.quack = import_module("quack.rmsnorm")  # quack.rmsnorm as an attribute is a function
        return version("quack-kernels")

    def prepare(self, case, b):
        quack = self.quack
        if case.op == "layer_norm":
            weight, bias = b.weight.float(), b.bias.float()
            if case.direction == "forward":
                return lambda: quack.layernorm_fwd(b.x, weight, bias, case.eps)
            return lambda: quack.layernorm_bwd(b.x, weight, b.dy, b.rstd, b.mean)
        if case.direction == "forward":
            return lambda: quack.rmsnorm_fwd(b.x, b.weight, eps=case.eps)[0]
        return lambda: quack.rmsnorm_bwd(b.x, b.weight, b.dy, b.rstd)[:2]
