"""Arrays of other libraries: CuPy's views of them, taken through DLPack, and the norms on those views."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from ..kernel.device import INSTALL
from ..operation import Operation
from .backend import Norm
from .store import Float8Store

KDL_CPU, KDL_CUDA, KDL_CUDA_MANAGED = 1, 2, 13  # device types of the DLPack specification

MODULE = "cunorm.call.cupy"


def norm(asked: Norm, x: Any, weight: Any, bias: Any, eps: float, out: Any, statistics: bool):
    """Run `Backend.norm`."""
    module = on_gpu(MODULE, asked[0], x)
    x, weight, bias, out = views(asked[0], ("x", "weight", "bias", "out"), (x, weight, bias, out))
    return module.norm(asked, x, weight, bias, eps, out, statistics)


def norm_float8(asked: Norm, x: Any, weight: Any, bias: Any, eps: float, store: Float8Store, scale: Any):
    """Run `Backend.norm_float8`."""
    module = on_gpu(MODULE, asked[0], x)
    return module.norm_float8(asked, *views(asked[0], ("x", "weight", "bias"), (x, weight, bias)), eps, store, scale)


def norm_backward(asked: Norm, *arrays_and_mask: Any):
    """Run `Backend.norm_backward`."""
    *arrays, output_mask = arrays_and_mask
    module = on_gpu(MODULE, asked[0], arrays[1])
    names = ("dy", "x", "mean", "rstd", "weight", "dx_out")
    return module.norm_backward(asked, *views(asked[0], names, arrays), output_mask)


def forward(function: str, operation: Operation, x: Any, operands: Mapping[str, Any], eps: float, **options: Any):
    """Run `Backend.forward`."""
    module = on_gpu(MODULE, function, x)
    given = _viewed(function, {"x": x, **operands})
    return module.forward(function, operation, given.pop("x"), given, eps, **options)


def backward(function: str, operation: Operation, arrays: Mapping[str, Any], wanted: Sequence[str], **options: Any):
    """Run `Backend.backward`."""
    module = on_gpu(MODULE, function, arrays["x"])
    return module.backward(function, operation, _viewed(function, arrays), wanted, **options)


def _viewed(function: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """CuPy's views of the arrays; numbers as they are."""
    names = [name for name, one in arrays.items() if not isinstance(one, numbers.Real)]
    return {**arrays, **dict(zip(names, views(function, names, [arrays[name] for name in names]), strict=True))}


def views(function: str, names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """CuPy's views of the arrays, x first: where several are wrong, it is x that the error names."""
    named = dict(zip(names, arrays, strict=True))
    x = _view(function, "x", named["x"])
    return [x if name == "x" else _view(function, name, array) for name, array in named.items()]


def on_gpu(module: str, function: str, x: Any) -> ModuleType:
    """The module that takes the views."""
    if int(x.__dlpack_device__()[0]) not in (KDL_CUDA, KDL_CUDA_MANAGED):
        raise TypeError(
            f"{function}: x must be on a CUDA device to come by DLPack; got a {type(x).__name__} elsewhere. "
            "On the host pass numpy.from_dlpack(x)."
        )
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # CuPy raises OSError where it cannot create its cache directory
        raise ImportError(
            f"{function}: arrays on a GPU need CuPy; it could not be imported ({error}). {INSTALL}."
        ) from error


def _view(function: str, name: str, array: Any) -> Any:
    """CuPy's view of an array, ordered after its producer on CuPy's current stream."""
    import cupy

    if array is None or isinstance(array, cupy.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{function}: {name} must be an array with __dlpack__, as x is; got {type(array).__name__}. Convert it."
        )
    if int(array.__dlpack_device__()[0]) == KDL_CPU:
        raise ValueError(f"{function}: {name} must be on the device of x; got an array on the host. Move one of them.")
    try:
        return cupy.from_dlpack(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"{function}: CuPy cannot use the GPU that {name} is on: {error}. Compare the driver, by nvidia-smi, with "
            "what `python -m cunorm info` says."
        ) from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{function}: {name} cannot be read through DLPack: {error}. Pass a CuPy array.") from error
