"""torch's own operators, and what torch.compile makes of them."""

from __future__ import annotations

from bench.providers.base import Provider, autograd


def load_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")
    return torch.__version__


class Eager(Provider):
    name = "torch"

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
            mean, rstd = b.mean[:, None], b.rstd[:, None]
            wanted = [True, True, True]
            return lambda: aten.native_layer_norm_backward(b.dy, b.x, shape, mean, rstd, b.weight, b.bias, wanted)
        if hasattr(aten, "_fused_rms_norm_backward"):
            rstd = b.rstd[:, None]
            return lambda: aten._fused_rms_norm_backward(b.dy, b.x, shape, rstd, b.weight, [True, True])
        return autograd(lambda x, w: torch.nn.functional.rms_norm(x, shape, w, case.eps), case, b)


class Compiled(Provider):
    """Backward is the graph that torch.compile made for autograd, from what its forward pass saved."""

    name = "torch.compile"
    function = None

    def load(self) -> str:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # the backward pass runs more than once
        return load_torch()

    def prepare(self, case, b):
        import torch

        if self.function is None:  # one for all sets of buffers
            f, shape, eps = torch.nn.functional, (case.cols,), case.eps
            if case.op == "layer_norm":
                function = lambda x, w, bias: f.layer_norm(x, shape, w, bias, eps)  # noqa: E731
            else:
                function = lambda x, w: f.rms_norm(x, shape, w, eps)  # noqa: E731
            self.function = torch.compile(function, dynamic=False)
        function = self.function
        if case.direction == "backward":
            return autograd(function, case, b)
        arguments = [t for t in (b.x, b.weight, b.bias) if t is not None]

        def run():
            with torch.no_grad():
                return function(*arguments)

        return run

    def reset(self) -> None:
        import torch

        torch._dynamo.reset()
        self.function = None
