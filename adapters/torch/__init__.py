"""LayerNorm and RMSNorm for PyTorch: drop-in functions and modules with autograd, on cunorm's kernels."""

from .decomposition import decompositions
from .linear.functional import layer_norm_linear
from .linear.module import LayerNormLinear
from .models.fuse import Fusion, fuse_norm_linear
from .models.replace import Replacement, replace_norms
from .norm.functional import layer_norm, rms_norm
from .norm.modules import LayerNorm, RMSNorm

__all__ = [
    "Fusion",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "Replacement",
    "decompositions",
    "fuse_norm_linear",
    "layer_norm",
    "layer_norm_linear",
    "replace_norms",
    "rms_norm",
]
