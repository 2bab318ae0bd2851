"""One module runs the calls of a kind of arrays, and offers what stands here.

A backend is a module for one kind of arrays, which is imported when the first array of the kind comes: `import cunorm`
imports none of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

from ..operation import Operation
from .broadcasting import Kinds
from .store import Float8Store

# What a call of a plain norm asks for besides arrays: (the function that was called, normalized_shape,
# zero_centered_gamma, dtype, sm_margin), as the caller gave them. A plain tuple: it is made in every call.
Norm = tuple[str, Any, bool, Any, int]


class Backend(Protocol):
    """The functions that a kind of arrays offers. Only names are checked; `function` names the call in errors."""

    def norm(
        self, asked: Norm, x: Any, weight: Any, bias: Any, eps: float, out: Any, statistics: bool
    ) -> tuple[Any, ...]:
        """Return (y,), or with `statistics` (y, mean, rstd), of an RMSNorm (y, rstd)."""
        ...

    def norm_float8(
        self, asked: Norm, x: Any, weight: Any, bias: Any, eps: float, store: Float8Store, scale: Any
    ) -> tuple[Any, ...]:
        """Return (y8, y8_scale), and y if it is wide."""
        ...

    def norm_backward(
        self, asked: Norm, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, dx_out: Any, output_mask: Any
    ) -> tuple[Any, Any, Any]:
        """Return (dx, dweight, dbias), None where output_mask says so."""
        ...

    def forward(
        self,
        function: str,
        operation: Operation,
        x: Any,
        operands: Mapping[str, Any],
        eps: float,
        *,
        demanded: Kinds,
        dtype: str | None,
        s_dtype: str | None,
        statistics: bool,
        sm_margin: int,
        float8: Float8Store | None = None,
        scale: Any = None,
    ) -> tuple[dict[str, Any], Any, Any]:
        """Return (what the operation returns, by name, mean, rstd) of the last axis, statistics None unless asked for.

        `demanded` has the kinds of operands that must be of one. With `float8` there are y8 and y8_scale, and y if that
        is wide. Of one scale for all `scale` is it, None for one that no value of an affine operation exceeds.
        """
        ...

    def backward(
        self,
        function: str,
        operation: Operation,
        arrays: Mapping[str, Any],
        wanted: Sequence[str],
        *,
        demanded: Kinds,
        s_dtype: str | None,
        sm_margin: int,
    ) -> dict[str, Any]:
        """Return the gradients by name. Of `arrays` all are there but dy or ds, and s if it was not returned; None or
        absent stands for no array.
        """
        ...


@runtime_checkable
class NormAddNorm(Protocol):
    """The functions that a backend offers if one kernel of it runs an operation with a second norm."""

    def forward_norm_add_norm(
        self,
        function: str,
        operation: Operation,
        x: Any,
        operands: Mapping[str, Any],
        eps: float,
        *,
        demanded: Kinds,
        dtype: str | None,
        s_dtype: str | None,
        statistics: bool,
        sm_margin: int,
    ) -> dict[str, Any] | None:
        """Return y, s and statistics by name, these if asked for; None where one kernel does not do it."""
        ...


# The backend of arrays whose class is in a package, and the module of linear/ for them.
BACKENDS = {
    "numpy": ("cunorm.call.numpy", "cunorm.linear.numpy_arrays"),
    "cupy": ("cunorm.call.cupy", "cunorm.linear.cupy_arrays"),
    "torch": ("cunorm.torch.norm.arrays", "cunorm.torch.linear.arrays"),
    "jax": ("cunorm.jax.norm.arrays", "cunorm.jax.linear.arrays"),
    "jaxlib": ("cunorm.jax.norm.arrays", "cunorm.jax.linear.arrays"),
}
ANY_PRODUCER = ("cunorm.call.dlpack", "cunorm.linear.dlpack")
NORMS, PRODUCTS = range(2)

known: dict[type, Any] = {}  # type of x -> its backend
_products: dict[type, Any] = {}


def at_hand(*kinds: type) -> None:
    """Import what handles kinds of arrays, for calls that are traced, as torch.compile does: none imports anything."""
    for kind in kinds:
        modules = BACKENDS[kind.__module__.partition(".")[0]]
        known[kind] = import_module(modules[NORMS])
        _products[kind] = import_module(modules[PRODUCTS])


def backend_of(function: str, x: Any, name: str = "x") -> Backend:
    """The backend of arrays of the kind of x, which the caller knows as `name`; the other arrays of the call are the
    backend's business.
    """
    found = known.get(type(x))
    if found is None:
        found = known[type(x)] = import_module(_modules(function, x, name)[NORMS])
    return cast(Backend, found)


def products_of(function: str, x: Any) -> Any:
    """The module of linear/ for arrays of the kind of x."""
    found = _products.get(type(x))
    if found is None:
        found = _products[type(x)] = import_module(_modules(function, x, "x")[PRODUCTS])
    return found


def _modules(function: str, x: Any, name: str) -> tuple[str, str]:
    """Kinds are told by the package of their class."""
    for base in type(x).__mro__:
        package = base.__module__.partition(".")[0]
        if package in BACKENDS:
            return BACKENDS[package]
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return ANY_PRODUCER
    raise TypeError(
        f"{function}: {name} must be a NumPy, CuPy or JAX array, a torch tensor, or have __dlpack__ on a CUDA device; "
        f"got {type(x).__name__}."
    )


def kind_of(option: Any) -> Hashable:
    """Tells 8.0 and True, which are equal to what is allowed, from what is."""
    return tuple(map(type, option)) if type(option) is tuple else type(option)
