"""LayerNorm and RMSNorm on NVIDIA GPUs at the speed of memory, for arrays of CuPy, NumPy and JAX and torch tensors."""

from .api import layer_norm, layer_norm_backward, layer_norm_forward, rms_norm, rms_norm_backward, rms_norm_forward
from .compile import CompileError
from .linear.api import layer_norm_linear, layer_norm_linear_backward, layer_norm_linear_forward

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_linear",
    "layer_norm_linear_backward",
    "layer_norm_linear_forward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
]
