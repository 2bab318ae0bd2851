"""Liger: Triton kernels (liger-kernel)."""

from __future__ import annotations

from importlib.metadata import version

from bench.providers.base import Provider
from bench.providers.pytorch import load_torch

MOST_COLS = 65536


class Liger(Provider):
    name = "Liger"
    seconds = 0.5

    def load(self) -> str:
        load_torch()
        from liger_kernel.ops import layer_norm, rms_norm

        self.layer_norm, self.rms_norm = layer_norm, rms_norm
        return version("liger-kernel")

    def refuses(self, case) -> str:
        return f"more than {MOST_COLS} columns" if case.cols > MOST_COLS else ""

    def prepare(self, case, b):
        ln, rms = self.layer_norm, self.rms_norm
        if case.direction == "forward":
            if case.op == "layer_norm":
                return lambda: ln.layer_norm_forward(b.x, b.weight, b.bias, case.eps)[0]
            return lambda: rms.rms_norm_forward(b.x, b.weight, case.eps, 0.0, "llama", None)[0]
        if case.op == "layer_norm":
            return lambda: ln.layer_norm_backward(b.dy, b.x, b.weight, b.bias, b.mean, b.rstd)
        _, _, rstd, block, warps, mode = rms.rms_norm_forward(b.x, b.weight, case.eps, 0.0, "llama", None)
        # As in a model, dx is written over dy. That is a copy here, and later calls read the dx of the call before.
        dy = b.dy.clone()
        return lambda: rms.rms_norm_backward(dy, b.x, b.weight, rstd, 0.0, mode, block, warps, True, None)
