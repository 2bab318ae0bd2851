"""This project, by its public functions on CuPy arrays."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from bench.providers.base import Provider
from bench.suites import Case

WORKERS = 16


class Cunorm(Provider):
    name = "cunorm"
    library = "cupy"
    views = True
    seconds = 0.15  # with the roof's, and without compiling

    def load(self) -> str:
        import cupy

        import cunorm

        if cupy.cuda.runtime.getDeviceCount() == 0:
            raise ImportError("CuPy sees no GPU")
        self.cunorm = cunorm
        return f"{cunorm.__version__} (CuPy {cupy.__version__})"

    def precompile(self, cases: Iterable[Case], deadline: float) -> int:
        """Compile the kernels of the cases into the kernel cache, many at once, and return how many there are.

        A kernel that is missing or rejected here is compiled or reported by the call.
        """
        from cunorm.kernel import compile, device
        from cunorm.plan.plain_problems import whole
        from cunorm.plan.plan import plan

        properties, specs = device.current(0), {}
        for case in cases:
            with suppress(Exception):
                problem = whole(case.op, case.direction, case.rows, case.cols, case.dtype, case.weight_dtype)
                specs |= {step.spec: None for step in plan(problem, properties).steps}

        def compile_kernel(spec) -> None:
            if time.perf_counter() < deadline:
                with suppress(Exception):
                    compile.machine_code(spec, properties.arch)

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(compile_kernel, specs))
        return len(specs)

    def prepare(self, case, b):
        module, cols = self.cunorm, case.cols
        if case.direction == "forward":
            if case.op == "layer_norm":
                return lambda: module.layer_norm(b.x, cols, b.weight, b.bias, case.eps)
            return lambda: module.rms_norm(b.x, cols, b.weight, case.eps)
        if case.op == "layer_norm":
            return lambda: module.layer_norm_backward(b.dy, b.x, b.mean, b.rstd, b.weight)
        return lambda: module.rms_norm_backward(b.dy, b.x, b.rstd, b.weight)
