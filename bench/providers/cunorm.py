"""This project, by its public functions on CuPy arrays."""

from __future__ import annotations

from bench.providers.base import Provider


class Cunorm(Provider):
    name = "cunorm"
    library = "cupy"

    def load(self) -> str:
        import cupy

        import cunorm

        if cupy.cuda.runtime.getDeviceCount() == 0:
            raise ImportError("CuPy sees no GPU")
        self.cunorm = cunorm
        return f"{cunorm.__version__} (CuPy {cupy.__version__})"

    def prepare(self, case, b):
        module, cols = self.cunorm, case.cols
        if case.direction == "forward":
            if case.op == "layer_norm":
                return lambda: module.layer_norm(b.x, cols, b.weight, b.bias, case.eps)
            return lambda: module.rms_norm(b.x, cols, b.weight, case.eps)
        if case.op == "layer_norm":
            return lambda: module.layer_norm_backward(b.dy, b.x, b.mean, b.rstd, b.weight)
        return lambda: module.rms_norm_backward(b.dy, b.x, b.rstd, b.weight)
