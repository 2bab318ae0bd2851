"""NVIDIA's apex, built from source (PyPI's package of that name is another one). Not tried yet: no machine had it."""

from __future__ import annotations

from bench.providers.base import Provider, module_call
from bench.providers.pytorch import load_torch


def _matching(module, case, b):
    return module_call(module.to(device=b.x.device, dtype=b.x.dtype), case, b)


class Apex(Provider):
    """apex.normalization: FusedLayerNorm and FusedRMSNorm."""

    name = "apex"

    def load(self) -> str:
        load_torch()
        from apex import normalization

        self.modules = {"layer_norm": normalization.FusedLayerNorm, "rms_norm": normalization.FusedRMSNorm}
        return "from source"

    def prepare(self, case, b):
        return _matching(self.modules[case.op](case.cols, eps=case.eps), case, b)


class ApexFast(Provider):
    """apex.contrib.layer_norm: FastLayerNorm, for some row lengths."""

    name = "apex fast"

    def load(self) -> str:
        load_torch()
        from apex.contrib.layer_norm import FastLayerNorm

        self.module = FastLayerNorm
        return "from source"

    def unsupported(self, case) -> str:
        return "" if case.op == "layer_norm" else "has no RMSNorm"

    def prepare(self, case, b):
        return _matching(self.module(case.cols, eps=case.eps), case, b)
