"""The functions on arrays of other libraries: gpu.py on CuPy's views of them, taken through DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

KDL_CPU, KDL_CUDA, KDL_CUDA_MANAGED = 1, 2, 13  # device types of the DLPack specification


def forward(
    function: str, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, *, out: Any, **options: Any
):
    """As gpu.forward."""
    gpu = _gpu(function, x)
    x, weight, bias, out = (
        _view(function, name, array) for name, array in (("x", x), ("weight", weight), ("bias", bias), ("out", out))
    )
    return gpu.forward(function, x, normalized_shape, weight, bias, eps, out=out, **options)


def backward(function: str, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, **options: Any):
    """As gpu.backward."""
    gpu = _gpu(function, x)
    x, dy, mean, rstd, weight = (
        _view(function, name, array)
        for name, array in (("x", x), ("dy", dy), ("mean", mean), ("rstd", rstd), ("weight", weight))
    )
    return gpu.backward(function, dy, x, mean, rstd, weight, **options)


def linear_forward(function: str, op: str, x: Any, *arguments: Any, **options: Any):
    """As gpu.linear_forward."""
    gpu = _gpu(function, x)
    names = ("x", "weight", "bias", "ln_weight", "ln_bias")
    return gpu.linear_forward(function, op, *_views(function, names, (x, *arguments)), **options)


def linear_backward(function: str, op: str, dy: Any, x: Any, *arguments: Any, **options: Any):
    """As gpu.linear_backward."""
    gpu = _gpu(function, x)
    names = ("dy", "x", "mean", "rstd", "weight", "ln_weight", "ln_bias")
    return gpu.linear_backward(function, op, *_views(function, names, (dy, x, *arguments)), **options)


def _views(function: str, names: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
    """The arguments, those that are named as CuPy's views."""
    views = [_view(function, name, array) for name, array in zip(names, arguments, strict=False)]
    return [*views, *arguments[len(names) :]]


def _gpu(function: str, x: Any) -> ModuleType:
    if int(x.__dlpack_device__()[0]) not in (KDL_CUDA, KDL_CUDA_MANAGED):
        raise TypeError(
            f"{function}: x must be on a CUDA device to come by DLPack; got a {type(x).__name__} elsewhere. "
            "On the host pass numpy.from_dlpack(x)."
        )
    try:
        from . import gpu
    except (ImportError, OSError) as error:  # CuPy raises OSError where it cannot create its cache directory
        raise ImportError(
            f"{function}: arrays on a GPU need CuPy; it could not be imported ({error}). "
            "pip install 'cunorm[cuda13]', or cunorm[cuda12] for a CUDA 12 driver."
        ) from error
    return gpu


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
