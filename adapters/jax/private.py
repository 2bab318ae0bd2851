"""The names of JAX that it does not promise to keep. Each is looked up here, once, when cunorm.jax is imported.

Without those that a primitive is made of, calls are computed by jax.numpy with JAX's derivatives, and no kernel runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..private import ABSENT, check_version, look_up

check_version("jax")
NO_KERNELS = "no kernel of cunorm runs: calls of cunorm.jax are computed by jax.numpy"


class _NoPrimitive:
    """Takes what is said of a primitive, and is never bound."""

    def __init__(self, name: str):
        self.name = name

    def def_impl(self, *_: Any) -> None: ...

    def def_abstract_eval(self, *_: Any) -> None: ...


# What each name that a primitive needs is without it.
_NEEDED: dict[str, Any] = {
    "jax.extend.core:Primitive": _NoPrimitive,
    "jax.extend.core:jaxpr_as_fun": ABSENT,
    "jax.core:ShapedArray": object,
    "jax.interpreters.ad:Zero": object,
    "jax.interpreters.ad:instantiate_zeros": ABSENT,
    "jax.interpreters.ad:is_undefined_primal": ABSENT,
    "jax.interpreters.ad:primitive_jvps": {},
    "jax.interpreters.ad:primitive_transposes": {},
    "jax.interpreters.batching:primitive_batchers": {},
    "jax.interpreters.mlir:lower_fun": lambda *_, **__: None,
    "jax.interpreters.mlir:register_lowering": lambda *_, **__: None,
}
_found = {path: look_up(path, NO_KERNELS, instead) for path, instead in _NEEDED.items()}

has_primitives = all(_found[path] is not instead for path, instead in _NEEDED.items())
if not has_primitives:
    _found = _NEEDED  # the rest is of no use
core, ad, batching, mlir = (
    SimpleNamespace(
        **{path.partition(":")[2]: found for path, found in _found.items() if path.startswith(f"{module}:")}
    )
    for module in ("jax.extend.core", "jax.interpreters.ad", "jax.interpreters.batching", "jax.interpreters.mlir")
)
Primitive, jaxpr_as_fun = core.Primitive, core.jaxpr_as_fun
ShapedArray: Any = _found["jax.core:ShapedArray"]

# Launches from a callback, where XLA does not launch PTX itself.
buffer_callback = look_up(
    "jax.experimental.buffer_callback:buffer_callback",
    "kernels cannot be launched from a callback, which is what remains where XLA does not launch PTX",
)
PTX_TARGET = "__gpu$xla.gpu.ptx"  # XLA's own call of PTX, which is tried before it is used

# How XLA is told to keep split rows where they are; False where it cannot be told.
custom_partitioning = look_up(
    "jax.experimental.custom_partitioning:custom_partitioning",
    "rows that are split over automatic axes of a mesh are gathered before a norm",
    False,
)
