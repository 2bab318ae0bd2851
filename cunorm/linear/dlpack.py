"""`layer_norm_linear` on arrays of other libraries: on CuPy's views of them, taken through DLPack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..call.dlpack import on_gpu, views
from .checks import LinearOptions

MODULE = "cunorm.linear.cupy_arrays"


def forward(options: LinearOptions, arrays: Mapping[str, Any]) -> Any:
    """Run linear.cupy_arrays.forward on CuPy's views of the arrays."""
    module = on_gpu(MODULE, options.function, arrays["x"])
    return module.forward(options, views(options.function, arrays))


def backward(options: LinearOptions, arrays: Mapping[str, Any], output_mask: Any) -> Any:
    """Run linear.cupy_arrays.backward on CuPy's views of the arrays."""
    module = on_gpu(MODULE, options.function, arrays["x"])
    return module.backward(options, views(options.function, arrays), output_mask)
