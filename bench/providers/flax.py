"""Flax's own LayerNorm and RMSNorm (linen), compiled by XLA.

Backward is the transpose of its forward pass with what that saved, as torch's autograd runs it. XLA's best backward
pass of mean and rstd alone is the provider XLA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.providers.base import Provider
from bench.providers.xla import load_jax


class Flax(Provider):
    name = "Flax"
    library = "jax"
    seconds = 2.0

    def load(self) -> str:
        load_jax()
        import flax

        self.functions: dict[Any, Any] = {}
        return flax.__version__

    def prepare(self, case, b):
        import jax

        forward = _forward(case.op, case.eps, b.x.dtype)
        arrays = [array for array in (b.x, b.weight, b.bias) if array is not None]
        # All sets of a case have one function object, because XLA's loop takes that of the first.
        if case.direction == "forward":
            return partial(self.functions.setdefault(("forward", case.op, str(b.x.dtype)), forward), *arrays)
        _, transpose = jax.jit(lambda *inputs: jax.vjp(forward, *inputs))(*arrays)
        return partial(self.functions.setdefault("backward", lambda transpose, dy: transpose(dy)), transpose, b.dy)


def _forward(op: str, eps: float, dtype: Any) -> Any:
    from flax import linen

    module = (linen.LayerNorm if op == "layer_norm" else linen.RMSNorm)(epsilon=eps, dtype=dtype)
    if op == "layer_norm":
        return lambda x, weight, bias: module.apply({"params": {"scale": weight, "bias": bias}}, x)
    return lambda x, weight: module.apply({"params": {"scale": weight}}, x)
