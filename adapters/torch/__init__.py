"""LayerNorm and RMSNorm for PyTorch: drop-in functions and modules with autograd, on cunorm's kernels."""

from .functional import layer_norm, rms_norm
from .modules import LayerNorm, RMSNorm
from .replace import Replacement, replace_norms

__all__ = ["LayerNorm", "RMSNorm", "Replacement", "layer_norm", "replace_norms", "rms_norm"]
