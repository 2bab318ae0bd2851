"""TransformerEngine's LayerNorm and RMSNorm modules. Not tried yet: no machine had it."""

from __future__ import annotations

from bench.providers.base import Provider, module_call
from bench.providers.pytorch import load_torch


class TransformerEngine(Provider):
    name = "TransformerEngine"

    def load(self) -> str:
        load_torch()
        import transformer_engine
        import transformer_engine.pytorch as te

        self.modules = {"layer_norm": te.LayerNorm, "rms_norm": te.RMSNorm}
        return transformer_engine.__version__

    def prepare(self, case, b):
        return module_call(self.modules[case.op](case.cols, eps=case.eps, device="cuda", dtype=b.x.dtype), case, b)
