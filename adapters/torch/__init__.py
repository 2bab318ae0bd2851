"""LayerNorm and RMSNorm for PyTorch: drop-in functions and modules with autograd, on cunorm's kernels."""

from .decomposition import decompositions
from .linear.float8_context import autocast, fp8_autocast, is_fp8_available, set_recipe
from .linear.functional import layer_norm_linear
from .linear.module import LayerNormLinear
from .linear.recipes import Float8CurrentScaling, MMParams, QParams, RowwiseScaling
from .models.fuse import Fusion, fuse_norm_linear
from .models.replace import Replacement, replace_norms
from .norm.functional import layer_norm, rms_norm
from .norm.modules import LayerNorm, RMSNorm

__all__ = [
    "Float8CurrentScaling",
    "Fusion",
    "LayerNorm",
    "LayerNormLinear",
    "MMParams",
    "QParams",
    "RMSNorm",
    "Replacement",
    "RowwiseScaling",
    "autocast",
    "decompositions",
    "fp8_autocast",
    "fuse_norm_linear",
    "is_fp8_available",
    "layer_norm",
    "layer_norm_linear",
    "replace_norms",
    "rms_norm",
    "set_recipe",
]
