"""Which implementation handles an array, and what an implementation has to offer.

A family is one kind of array. Its functions for the norms and those for the norm with a product are two modules, which
are imported when the first array of the kind comes: `import cunorm` imports none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast


class Norm(Protocol):
    """What a family offers for the norms. Arguments come unchecked; `function` names the call in errors."""

    def forward(
        self,
        function: str,
        x: Any,
        normalized_shape: int | Sequence[int] | None,
        weight: Any,
        bias: Any,
        eps: float,
        *,
        zero_centered_gamma: bool,
        out: Any,
        dtype: Any,
        sm_margin: int,
        statistics: bool,
    ) -> tuple[Any, Any, Any]:
        """Return (y, mean, rstd), statistics None unless asked for."""
        ...

    def backward(
        self,
        function: str,
        dy: Any,
        x: Any,
        mean: Any,
        rstd: Any,
        weight: Any,
        *,
        zero_centered_gamma: bool,
        output_mask: tuple[bool, ...],
        sm_margin: int,
    ) -> tuple[Any, Any, Any]:
        """Return (dx, dweight, dbias), None where output_mask says so."""
        ...


class Linear(Protocol):
    """What a family offers for the norm with the product that reads it. eps is checked."""

    def forward(
        self,
        function: str,
        op: str,
        x: Any,
        weight: Any,
        bias: Any,
        ln_weight: Any,
        ln_bias: Any,
        eps: float,
        *,
        zero_centered_gamma: bool,
        statistics: bool,
    ) -> tuple[Any, Any, Any]:
        """Return (y, mean, rstd), statistics None unless asked for."""
        ...

    def backward(
        self,
        function: str,
        op: str,
        dy: Any,
        x: Any,
        mean: Any,
        rstd: Any,
        weight: Any,
        ln_weight: Any,
        ln_bias: Any,
        eps: float,
        *,
        zero_centered_gamma: bool,
        output_mask: tuple[bool, ...],
    ) -> tuple[Any, ...]:
        """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
        ...


# Package of an array's class: its modules for the norms, and for the norm with a product.
FAMILIES = {
    "numpy": ("cunorm.numpy_arrays", "cunorm.linear.numpy_arrays"),
    "cupy": ("cunorm.cupy_arrays", "cunorm.linear.cupy_arrays"),
    "torch": ("cunorm.torch.norm.arrays", "cunorm.torch.linear.arrays"),
    "jax": ("cunorm.jax.norm.arrays", "cunorm.jax.linear.arrays"),
    "jaxlib": ("cunorm.jax.norm.arrays", "cunorm.jax.linear.arrays"),
}
ANY_PRODUCER = ("cunorm.dlpack", "cunorm.linear.dlpack")

_norms: dict[type, Norm] = {}  # type of x -> the module that handles it
_linears: dict[type, Linear] = {}


def norm_of(function: str, x: Any) -> Norm:
    """The module for the norms of arrays of the kind of x; the other arrays of the call are its business."""
    found = _norms.get(type(x))
    if found is None:
        found = _norms[type(x)] = cast(Norm, import_module(_modules(function, x)[0]))
    return found


def linear_of(function: str, x: Any) -> Linear:
    """The same for the norm with a product."""
    found = _linears.get(type(x))
    if found is None:
        found = _linears[type(x)] = cast(Linear, import_module(_modules(function, x)[1]))
    return found


def _modules(function: str, x: Any) -> tuple[str, str]:
    """Kinds are told by the package of their class."""
    for base in type(x).__mro__:
        package = base.__module__.partition(".")[0]
        if package in FAMILIES:
            return FAMILIES[package]
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return ANY_PRODUCER
    raise TypeError(
        f"{function}: x must be a NumPy, CuPy or JAX array, a torch tensor, or have __dlpack__ on a CUDA device; "
        f"got {type(x).__name__}."
    )
