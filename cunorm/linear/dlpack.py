"""`layer_norm_linear` on arrays of other libraries: on CuPy's views of them, taken through DLPack."""

from __future__ import annotations

from typing import Any

from ..call.dlpack import on_gpu, views

MODULE = "cunorm.linear.cupy_arrays"


def forward(function: str, op: str, *arguments: Any, **options: Any):
    """Run linear.cupy_arrays.forward on CuPy's views of the arrays."""
    *arrays, eps = arguments
    module = on_gpu(MODULE, function, arrays[0])
    names = ("x", "weight", "bias", "ln_weight", "ln_bias")
    return module.forward(function, op, *views(function, names, arrays), eps, **options)


def backward(function: str, op: str, *arguments: Any, **options: Any):
    """Run linear.cupy_arrays.backward on CuPy's views of the arrays."""
    *arrays, eps = arguments
    module = on_gpu(MODULE, function, arrays[1])
    names = ("dy", "x", "mean", "rstd", "weight", "ln_weight", "ln_bias")
    return module.backward(function, op, *views(function, names, arrays), eps, **options)
