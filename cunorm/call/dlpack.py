"""Arrays of other libraries: CuPy's views of them, taken through DLPack, and the norms on those views."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from ..kernel.device import INSTALL

KDL_CPU, KDL_CUDA, KDL_CUDA_MANAGED = 1, 2, 13  # device types of the DLPack specification

MODULE = "cunorm.cupy_arrays"


def forward(
    function: str, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, *, out: Any, **options: Any
):
    """As cupy_arrays.forward."""
    module = on_gpu(MODULE, function, x)
    x, weight, bias, out = views(function, ("x", "weight", "bias", "out"), (x, weight, bias, out))
    return module.forward(function, x, normalized_shape, weight, bias, eps, out=out, **options)


def backward(function: str, *arrays: Any, dx_out: Any, **options: Any):
    """As cupy_arrays.backward."""
    module = on_gpu(MODULE, function, arrays[1])
    names = ("dy", "x", "mean", "rstd", "weight", "dx_out")
    *inputs, dx_out = views(function, names, (*arrays, dx_out))
    return module.backward(function, *inputs, dx_out=dx_out, **options)


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
        raise TypeError(f"{function}: {name} must be an array with __dlpack__, as x is; got {type(array).__name__}.")
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
        raise TypeError(f"{function}: {name} cannot be read through DLPack: {error}") from error
