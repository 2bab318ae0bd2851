"""What a provider is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.suites import Case


class Provider:
    """A library's LayerNorm and RMSNorm.

    Attributes
    ----------
    name : str
        As in tables and JSON.
    library : str
        Whose arrays it takes: "cupy", "torch" or "jax".
    views : bool
        Whether it takes x of (tokens, heads, cols), a view of a packed QKV.
    seconds : float
        About what a case costs, compiling and tuning included: a run of so many seconds draws its cases by it.
    """

    name: str
    library = "torch"
    views = False
    seconds = 0.3

    def load(self) -> str:
        """Import it and return its version; ImportError where it cannot be."""
        raise NotImplementedError

    def unsupported(self, case: Case) -> str:
        """Why it cannot do the case; empty if it can."""
        return "takes matrices alone" if case.heads and not self.views else self.refuses(case)

    def refuses(self, case: Case) -> str:
        """As `unsupported`, for one provider."""
        return ""

    def prepare(self, case: Case, buffers: Any) -> Callable[[], Any]:
        """A call on one set of buffers that returns y, or (dx, dweight, dbias) with as many as the operation has.

        Forward is what the library runs for inference, backward what it runs for the gradients given mean and rstd.
        Conversions it needs (a float32 weight, say) are made here, outside of what is timed.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was compiled for one case."""


def autograd(forward: Callable[..., Any], case: Case, b: Any) -> Callable[[], Any]:
    """The backward pass that torch's autograd recorded for forward(x, weight[, bias])."""
    import torch

    inputs = [t.detach().requires_grad_() for t in (b.x, b.weight, b.bias) if t is not None]
    y = forward(*inputs)
    return lambda: torch.autograd.grad(y, inputs, b.dy, retain_graph=True)


def module_call(module: Any, case: Case, b: Any) -> Callable[[], Any]:
    """Forward or backward of a torch module with parameters `weight` (and `bias`), which become the case's."""
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
