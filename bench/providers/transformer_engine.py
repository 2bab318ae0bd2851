"""TransformerEngine's LayerNorm and RMSNorm."""

from __future__ import annotations

from bench.providers.base import Provider, module_call
from bench.providers.pytorch import load_torch

SM_MARGIN = 0  # multiprocessors that a kernel leaves free


class TransformerEngine(Provider):
    """Forward is by its modules, and backward by the extension, as a module's backward pass frees what was saved."""

    name = "TransformerEngine"

    def load(self) -> str:
        load_torch()
        import transformer_engine
        import transformer_engine.pytorch as te
        import transformer_engine_torch

        self.extension = transformer_engine_torch
        self.modules = {"layer_norm": te.LayerNorm, "rms_norm": te.RMSNorm}
        return transformer_engine.__version__

    def prepare(self, case, b):
        extension = self.extension
        if case.direction == "forward":
            module = self.modules[case.op](case.cols, eps=case.eps, device="cuda", dtype=b.x.dtype)
            return module_call(module, case, b)
        if case.op == "layer_norm":
            return lambda: extension.layernorm_bwd(b.dy, b.x, b.mean, b.rstd, b.weight, SM_MARGIN, False)
        return lambda: extension.rmsnorm_bwd(b.dy, b.x, b.rstd, b.weight, SM_MARGIN, False)
