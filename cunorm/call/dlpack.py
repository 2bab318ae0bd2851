"""The backend of arrays of other libraries, which runs CuPy's on the views that CuPy takes through DLPack."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from ..kernel.device import INSTALL
from .backend import Arrays, CallOptions
from .checks import NormTuple

KDL_CPU, KDL_CUDA, KDL_CUDA_MANAGED = 1, 2, 13  # device types of the DLPack specification

MODULE = "cunorm.call.cupy"


def norm(options: NormTuple, arrays: Sequence[Any], eps: float, out: Any) -> Any:
    """Run `Backend.norm`."""
    module, (*arrays, out) = _viewed(options, ("x", "weight", "bias", "out"), (*arrays, out))
    return module.norm(options, arrays, eps, out)


def norm_float8(options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> Any:
    """Run `Backend.norm_float8`."""
    module, arrays = _viewed(options, ("x", "weight", "bias"), arrays)
    return module.norm_float8(options, arrays, eps, scale)


def norm_backward(options: NormTuple, arrays: Sequence[Any], dx_out: Any) -> Any:
    """Run `Backend.norm_backward`."""
    names = ("dy", "x", "mean", "rstd", "weight", "dx_out")
    module, (*arrays, dx_out) = _viewed(options, names, (*arrays, dx_out))
    return module.norm_backward(options, arrays, dx_out)


def forward(options: CallOptions, arrays: Arrays, eps: float, scale: Any = None) -> Any:
    """Run `Backend.forward`."""
    module = on_gpu(MODULE, options.function, arrays["x"])
    return module.forward(options, _with_numbers(options.function, arrays), eps, scale)


def backward(options: CallOptions, arrays: Arrays, wanted: Sequence[str]) -> Any:
    """Run `Backend.backward`."""
    module = on_gpu(MODULE, options.function, arrays["x"])
    return module.backward(options, _with_numbers(options.function, arrays), wanted)


def _viewed(options: NormTuple, names: Sequence[str], arrays: Sequence[Any]) -> tuple[ModuleType, list[Any]]:
    """Return the module that takes the views of these arrays, and the views in the same order."""
    function = options[0]
    given = dict(zip(names, arrays, strict=True))
    module = on_gpu(MODULE, function, given["x"])
    return module, list(views(function, given).values())


def _with_numbers(function: str, arrays: Arrays) -> dict[str, Any]:
    """Return CuPy's views of the arrays, and numbers as they are."""
    without = {name: array for name, array in arrays.items() if not isinstance(array, numbers.Real)}
    return {**arrays, **views(function, without)}


def views(function: str, arrays: Arrays) -> dict[str, Any]:
    """Return CuPy's views of the arrays. That of x comes first: where several are wrong, the error names x."""
    x = _view(function, "x", arrays["x"])
    return {name: x if name == "x" else _view(function, name, array) for name, array in arrays.items()}


def on_gpu(module: str, function: str, x: Any) -> ModuleType:
    """Return the module that takes CuPy's views, if x is on a GPU."""
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
    """Return CuPy's view of an array, ordered after its producer on CuPy's current stream."""
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
