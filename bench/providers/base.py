"""The interface of a provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.suites import Case


class Provider:
    """A library's LayerNorm and RMSNorm.

    Attributes
    ----------
    name : str
        Its name in tables and JSON.
    library : str
        The library whose arrays it takes: "cupy", "torch" or "jax".
    views : bool
        Whether it takes x of (tokens, heads, cols), a view of a packed QKV.
    seconds : float
        What a case costs about, with compiling and tuning, by which a run of so many seconds draws its cases.
    """

    name: str
    library = "torch"
    views = False
    seconds = 0.3

    def load(self) -> str:
        """Import the library and return its version, or raise ImportError."""
        raise NotImplementedError

    def unsupported(self, case: Case) -> str:
        """Return why it cannot do the case, or nothing if it can."""
        return "takes matrices alone" if case.heads and not self.views else self.refuses(case)

    def refuses(self, case: Case) -> str:
        """Return why this provider cannot do the case, apart from views."""
        return ""

    def prepare(self, case: Case, buffers: Any) -> Callable[[], Any]:
        """Return a call on one set of buffers that returns y, or those of (dx, dweight, dbias) that the operation has.

        Forward is what the library runs for inference, and backward what it runs for the gradients by mean and rstd.
        Conversions that it needs, such as a float32 weight, are made here, outside of what is timed.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was compiled for one case."""


def autograd(forward: Callable[..., Any], b: Any) -> Callable[[], Any]:
    """Return the backward pass that torch's autograd records for forward(x, weight[, bias])."""
    import torch

    inputs = [t.detach().requires_grad_() for t in (b.x, b.weight, b.bias) if t is not None]
    y = forward(*inputs)
    return lambda: torch.autograd.grad(y, inputs, b.dy, retain_graph=True)


def module_call(module: Any, case: Case, b: Any) -> Callable[[], Any]:
    """Return forward or backward of a torch module, whose `weight` (and `bias`) become the case's."""
    import torch

    with torch.no_grad():
        module.weight.copy_(b.weight)
        if b.bias is not None:
            module.bias.copy_(b.bias)
    if case.direction == "forward":

        def run():
            with torch.no_grad():
                return module(b.x)

        return run
    x = b.x.detach().requires_grad_()
    inputs = [x, module.weight] if b.bias is None else [x, module.weight, module.bias]
    y = module(x)
    return lambda: torch.autograd.grad(y, inputs, b.dy, retain_graph=True)
