"""Which implementation handles an array, and what an implementation has to offer.

A family is one kind of array. Its functions for the norms, for the norm with a product and for fused operations are
modules of their own, which are imported when the first array of the kind comes: `import cunorm` imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from ..operation import Operation
from .store import Float8Store


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
        dx_out: Any,
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


class Fused(Protocol):
    """What a family offers for an operation with anything before and after the norm, over the last axis.

    Arrays come unchecked, but their names and the dtypes are right; `demanded` has the kinds of operands that must be
    of one.
    """

    def forward(
        self,
        function: str,
        operation: Operation,
        x: Any,
        operands: Mapping[str, Any],
        eps: float,
        *,
        demanded: tuple[tuple[str, str], ...],
        dtype: str | None,
        s_dtype: str | None,
        statistics: bool,
        sm_margin: int,
        float8: Float8Store | None = None,
        scale: Any = None,
    ) -> tuple[dict[str, Any], Any, Any]:
        """Return (what the operation returns, by name, mean, rstd), statistics None unless asked for.

        With `float8` there are y8 and y8_scale, and y if that is wide. Of one scale for all `scale` is it, None for one
        that no value exceeds.
        """
        ...

    def backward(
        self,
        function: str,
        operation: Operation,
        arrays: Mapping[str, Any],
        wanted: Sequence[str],
        *,
        demanded: tuple[tuple[str, str], ...],
        s_dtype: str | None,
        sm_margin: int,
    ) -> dict[str, Any]:
        """Return the gradients by name. Of `arrays` all are there but dy or ds, and s if it was not returned."""
        ...


@runtime_checkable
class FusedTwice(Protocol):
    """What a family of fused operations offers besides if kernels of it run an operation with a second norm."""

    def forward_twice(
        self,
        function: str,
        operation: Operation,
        x: Any,
        operands: Mapping[str, Any],
        eps: float,
        *,
        demanded: tuple[tuple[str, str], ...],
        dtype: str | None,
        s_dtype: str | None,
        statistics: bool,
        sm_margin: int,
    ) -> dict[str, Any] | None:
        """Return y, s and statistics by name, these if asked for; None where one kernel does not do it."""
        ...

    def backward_twice(
        self, function: str, operation: Operation, arrays: Mapping[str, Any], wanted: Sequence[str], *, sm_margin: int
    ) -> dict[str, Any] | None:
        """Return the gradients of x, of the residual and of the weights `wanted`, by name; None where one kernel does
        not do it, or an array is not as it must be. `arrays`: x, s, dy, ds if there is one, rstd, second_rstd and the
        weights.
        """
        ...


class Float8(Protocol):
    """What a family offers for the norms with y in 8 bits. Arguments come unchecked."""

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
        granularity: str | int,
        scale: Any,
        dtype: Any,
        sm_margin: int,
        output: bool,
    ) -> tuple[Any, Any, Any]:
        """Return (bytes, scale, y), y None unless asked for."""
        ...


class LinearFloat8(Protocol):
    """What a family offers for the norm with a product in 8 bits. eps is checked."""

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
    ) -> Any:
        """Return y."""
        ...


class Modules(NamedTuple):
    """Of a family; "" for what it does not offer yet."""

    norm: str
    linear: str
    fused: str = ""
    float8: str = ""
    linear_float8: str = ""


_JAX = Modules("cunorm.jax.norm.arrays", "cunorm.jax.linear.arrays", "cunorm.jax.norm.fused", "cunorm.jax.norm.float8")
# By the package of an array's class.
FAMILIES = {
    "numpy": Modules(
        "cunorm.numpy_arrays",
        "cunorm.linear.numpy_arrays",
        "cunorm.call.numpy",
        "cunorm.norm.float8_numpy",
        "cunorm.linear.float8_numpy",
    ),
    "cupy": Modules(
        "cunorm.cupy_arrays",
        "cunorm.linear.cupy_arrays",
        "cunorm.call.cupy",
        "cunorm.norm.float8_cupy",
        "cunorm.linear.float8_cupy",
    ),
    "torch": Modules(
        "cunorm.torch.norm.arrays",
        "cunorm.torch.linear.arrays",
        "cunorm.torch.norm.fused_arrays",
        "cunorm.torch.norm.float8",
    ),
    "jax": _JAX,
    "jaxlib": _JAX,
}
ANY_PRODUCER = Modules("cunorm.call.dlpack", "cunorm.linear.dlpack")

_norms: dict[type, Norm] = {}  # type of x -> the module that handles it
_linears: dict[type, Linear] = {}
_fused: dict[type, Fused] = {}
_float8: dict[type, Float8] = {}
_linear_float8: dict[type, LinearFloat8] = {}


def at_hand(*kinds: type) -> None:
    """Import what handles kinds of arrays, for calls that are traced, as torch.compile does: none imports anything."""
    for kind in kinds:
        modules = FAMILIES[kind.__module__.partition(".")[0]]
        _norms[kind] = cast(Norm, import_module(modules.norm))
        _linears[kind] = cast(Linear, import_module(modules.linear))
        _fused[kind] = cast(Fused, import_module(modules.fused))
        _float8[kind] = cast(Float8, import_module(modules.float8))


def norm_of(function: str, x: Any) -> Norm:
    """The module for the norms of arrays of the kind of x; the other arrays of the call are its business."""
    found = _norms.get(type(x))
    if found is None:
        found = _norms[type(x)] = cast(Norm, import_module(_modules(function, x).norm))
    return found


def linear_of(function: str, x: Any) -> Linear:
    """The same for the norm with a product."""
    found = _linears.get(type(x))
    if found is None:
        found = _linears[type(x)] = cast(Linear, import_module(_modules(function, x).linear))
    return found


def fused_of(function: str, x: Any, name: str = "x") -> Fused:
    """The same for fused operations; `name` is what a caller knows x by."""
    found = _fused.get(type(x))
    if found is None:
        module = _offered(function, _modules(function, x, name).fused, x, name)
        found = _fused[type(x)] = cast(Fused, import_module(module))
    return found


def float8_of(function: str, x: Any) -> Float8:
    """The same for the norms with y in 8 bits."""
    found = _float8.get(type(x))
    if found is None:
        module = _offered(function, _modules(function, x).float8, x, "x")
        found = _float8[type(x)] = cast(Float8, import_module(module))
    return found


def linear_float8_of(function: str, x: Any) -> LinearFloat8:
    """The same for the norm with a product in 8 bits."""
    found = _linear_float8.get(type(x))
    if found is None:
        module = _offered(function, _modules(function, x).linear_float8, x, "x")
        found = _linear_float8[type(x)] = cast(LinearFloat8, import_module(module))
    return found


def _offered(function: str, module: str, x: Any, name: str) -> str:
    if not module:
        raise NotImplementedError(
            f"{function}: {name} must be an array of a library that this function knows, as NumPy and CuPy; got "
            f"{type(x).__name__}. Others come in a later version: until then pass CuPy arrays (cupy.from_dlpack)."
        )
    return module


def _modules(function: str, x: Any, name: str = "x") -> Modules:
    """Kinds are told by the package of their class."""
    for base in type(x).__mro__:
        package = base.__module__.partition(".")[0]
        if package in FAMILIES:
            return FAMILIES[package]
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return ANY_PRODUCER
    raise TypeError(
        f"{function}: {name} must be a NumPy, CuPy or JAX array, a torch tensor, or have __dlpack__ on a CUDA device; "
        f"got {type(x).__name__}."
    )
