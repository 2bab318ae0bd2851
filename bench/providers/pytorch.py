"""torch's own operators, in eager mode and compiled."""

from __future__ import annotations

from bench.providers.base import Provider, autograd


def load_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")
    return torch.__version__


class Eager(Provider):
    name = "torch"
    views = True

    def load(self) -> str:
        return load_torch()

    def prepare(self, case, b):
        import torch

        shape = [case.cols]
        if case.direction == "forward":
            if case.op == "layer_norm":
                return lambda: torch.nn.functional.layer_norm(b.x, shape, b.weight, b.bias, case.eps)
            return lambda: torch.nn.functional.rms_norm(b.x, shape, b.weight, case.eps)
        aten = torch.ops.aten
        if case.op == "layer_norm":
            mean, rstd = b.mean[..., None], b.rstd[..., None]
            wanted = [True, True, True]
            return lambda: aten.native_layer_norm_backward(b.dy, b.x, shape, mean, rstd, b.weight, b.bias, wanted)
        if hasattr(aten, "_fused_rms_norm_backward"):
            rstd = b.rstd[..., None]
            return lambda: aten._fused_rms_norm_backward(b.dy, b.x, shape, rstd, b.weight, [True, True])
        return autograd(lambda x, w: torch.nn.functional.rms_norm(x, shape, w, case.eps), b)


class Compiled(Provider):
    """torch.compile; its backward pass is the graph for autograd, on what its forward pass saved."""

    name = "torch.compile"
    views = True
    seconds = 2.0
    mode: str | None = None
    function = None

    def load(self) -> str:
        version = load_torch()
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # the backward pass runs more than once
        return version

    def prepare(self, case, b):
        import torch

        if self.function is None:  # one function serves all sets of buffers
            f, shape, eps, dtype = torch.nn.functional, (case.cols,), case.eps, b.x.dtype
            # A wider weight would make y wider.
            if case.op == "layer_norm":
                function = lambda x, w, bias: f.layer_norm(x, shape, w, bias, eps).to(dtype)  # noqa: E731
            else:
                function = lambda x, w: f.rms_norm(x, shape, w, eps).to(dtype)  # noqa: E731
            self.function = torch.compile(function, dynamic=False, mode=self.mode)
        function = self.function
        if case.direction == "backward":
            return autograd(function, b)
        arguments = [t for t in (b.x, b.weight, b.bias) if t is not None]

        def run():
            with torch.no_grad():
                return function(*arguments)

        return run

    def reset(self) -> None:
        import torch

        if self.function is not None:
            torch._dynamo.reset()
            self.function = None


class Autotuned(Compiled):
    """torch.compile that tries every launch configuration at the first call; the bench makes the CUDA graphs."""

    name = "torch.compile max-autotune"
    seconds = 5.0
    mode = "max-autotune-no-cudagraphs"
