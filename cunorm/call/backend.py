"""What every kind of arrays offers, and which module offers it.

A backend is a module for one kind of arrays. It is imported when the first array of its kind comes, so `import cunorm`
imports none of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ..operation import Operation
from .broadcasting import Kinds
from .checks import NormTuple
from .store import Float8Store

Array = TypeVar("Array")  # the kind of x, which results have too
Arrays = Mapping[str, Any]  # by name


class CallOptions(NamedTuple):
    """What a call of an operation asks for besides its arrays and eps. The public function makes it."""

    function: str  # what errors call it
    operation: Operation
    demanded: Kinds = ()  # the kinds that operands must have, by their names
    dtype: str | None = None  # the dtype of y; None for that of x
    s_dtype: str | None = None  # likewise of s
    sm_margin: int = 0
    statistics: bool = False  # whether the statistics are returned too
    store: Float8Store | None = None  # how y is written, where not as it is
    ndim: int = 1  # normalised axes, the last ones; with more than one the kinds of all operands are demanded
    left_out: str | None = None  # the dtype of the gradients of operands that are left out; None for that of x


class Backend(Protocol):
    """The functions that a module for a kind of arrays offers. Only their names are checked.

    NormOptions come as a plain tuple, and None stands for an array that is not given. A backend of which one kernel may
    run an operation with a second norm also has `runs_both_norms(options, x)`, which says whether it does so here.
    """

    def norm(self, options: NormTuple, arrays: Sequence[Any], eps: float, out: Any) -> tuple[Any, ...]:
        """Return (y,), or with statistics (y, mean, rstd), of an RMSNorm (y, rstd); `arrays` are x, weight and bias."""
        ...

    def norm_float8(self, options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> tuple[Any, ...]:
        """Return (y8, y8_scale), and y if the store is wide; `arrays` are x, weight and bias.

        `scale` is the one scale of all y if the store has one, None for the scale that no value of y exceeds.
        """
        ...

    def norm_backward(self, options: NormTuple, arrays: Sequence[Any], dx_out: Any) -> tuple[Any, Any, Any]:
        """Return (dx, dweight, dbias), None where output_mask says so; `arrays` are dy, x, mean, rstd and weight."""
        ...

    def forward(self, options: CallOptions, arrays: Arrays, eps: float, scale: Any = None) -> dict[str, Any]:
        """Return what the operation returns, and the statistics if they are asked for, by name.

        `arrays` are x and the operands. With a store there are y8 and y8_scale, and y if the store is wide; `scale` is
        as of `norm_float8`, and None only for an affine operation.
        """
        ...

    def backward(self, options: CallOptions, arrays: Arrays, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the gradients `wanted`, names of operands or x, by name.

        `arrays` are dy, ds, x, s, the statistics and the operands; s may be absent, and one of dy and ds.
        """
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

known: dict[type, Any] = {}  # the backend of each type of arrays
_products: dict[type, Any] = {}


def at_hand(*kinds: type) -> None:
    """Import the modules for kinds of arrays before calls are traced, as a trace of torch.compile imports nothing."""
    for kind in kinds:
        modules = BACKENDS[kind.__module__.partition(".")[0]]
        known[kind] = import_module(modules[NORMS])
        _products[kind] = import_module(modules[PRODUCTS])


def backend_of(function: str, x: Any, name: str = "x") -> Backend:
    """Return the backend of arrays of the kind of x, which the caller knows as `name`.

    Whether the other arrays of the call are of that kind too is for the backend to check.
    """
    backend = known.get(type(x))
    if backend is None:
        backend = known[type(x)] = import_module(_modules(function, x, name)[NORMS])
    return cast(Backend, backend)


def products_of(function: str, x: Any) -> Any:
    """Return the module of linear/ for arrays of the kind of x."""
    module = _products.get(type(x))
    if module is None:
        module = _products[type(x)] = import_module(_modules(function, x, "x")[PRODUCTS])
    return module


def _modules(function: str, x: Any, name: str) -> tuple[str, str]:
    """Return the entry of BACKENDS for an array, by the package of its class."""
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
    """Return what tells 8.0 and True from the 8 and 1 that they are equal to."""
    return tuple(map(type, option)) if type(option) is tuple else type(option)
