"""LayerNorm and RMSNorm for PyTorch: drop-in functions and modules with autograd, on cunorm's kernels."""

from .functional import layer_norm, rms_norm
from .fuse import Fusion, fuse_norm_linear
from .linear import LayerNormLinear
from .linear_functional import layer_norm_linear
from .modules import LayerNorm, RMSNorm
from .replace import Replacement, replace_norms

__all__ = [
    "Fusion",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "Replacement",
    "fuse_norm_linear",
    "layer_norm",
    "layer_norm_linear",
    "replace_norms",
    "rms_norm",
]
