"""NVIDIA's apex, built from source: PyPI's package of that name is another one."""

from __future__ import annotations

from bench.providers.base import Provider, module_call
from bench.providers.pytorch import load_torch

# The numbers of columns that apex/contrib/csrc/layer_norm instantiates.
FAST_COLS = {
    *(768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288),
    *(12800, 14336, 15360, 16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
}


def _matching(module, case, b):
    return module_call(module.to(device=b.x.device, dtype=b.x.dtype), case, b)


class Apex(Provider):
    """apex.normalization: FusedLayerNorm and FusedRMSNorm.

    Backward is the extension's own function, because autograd through apex's torch.library operators also fills a zero
    gradient of mean and one of rstd in every call.
    """

    name = "apex"

    def load(self) -> str:
        load_torch()
        import fused_layer_norm_cuda
        from apex import normalization

        self.extension = fused_layer_norm_cuda
        self.modules = {"layer_norm": normalization.FusedLayerNorm, "rms_norm": normalization.FusedRMSNorm}
        return "from source"

    def prepare(self, case, b):
        shape, eps, extension = [case.cols], case.eps, self.extension
        if case.direction == "forward":
            return _matching(self.modules[case.op](case.cols, eps=eps), case, b)
        if case.op == "layer_norm":
            return lambda: extension.backward_affine(b.dy, b.mean, b.rstd, b.x, shape, b.weight, b.bias, eps, False)
        return lambda: extension.rms_backward_affine(b.dy, b.rstd, b.x, shape, b.weight, eps, False)


class ApexFast(Provider):
    """apex.contrib.layer_norm: FastLayerNorm, for some row lengths."""

    name = "apex fast"

    def load(self) -> str:
        load_torch()
        from apex.contrib.layer_norm import FastLayerNorm

        self.module = FastLayerNorm
        return "from source"

    def refuses(self, case) -> str:
        if case.op != "layer_norm":
            return "has no RMSNorm"
        return "" if case.cols in FAST_COLS else f"not built for {case.cols} columns"

    def prepare(self, case, b):
        return _matching(self.module(case.cols, eps=case.eps), case, b)
