"""LayerNorm and RMSNorm for PyTorch: drop-in functions and modules with autograd, on cunorm's kernels."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..call.backend import at_hand
from ..named import prepare
from .decomposition import decompositions
from .linear.functional import layer_norm_linear
from .linear.module import LayerNormLinear
from .linear.recipes import (
    Float8CurrentScaling,
    MMParams,
    QParams,
    RowwiseScaling,
    autocast,
    fp8_autocast,
    is_fp8_available,
    set_recipe,
)
from .models.accelerate import Acceleration, accelerate
from .models.mapping import kernel_mapping
from .models.replace import Replacement, replace_norms
from .named import (
    add_layer_norm,
    add_rms_norm,
    gate_add_layer_norm_modulate,
    gate_add_rms_norm_modulate,
    layer_norm_add,
    layer_norm_modulate,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_gated,
    rms_norm_modulate,
)
from .norm.functional import layer_norm, rms_norm
from .norm.fused_modules import AdaLayerNorm, AddLayerNorm, AddRMSNorm, RMSNormGated
from .norm.modules import LayerNorm, RMSNorm

__all__ = [
    "Acceleration",
    "AdaLayerNorm",
    "AddLayerNorm",
    "AddRMSNorm",
    "Float8CurrentScaling",
    "LayerNorm",
    "LayerNormColwiseParallel",
    "LayerNormLinear",
    "MMParams",
    "QParams",
    "RMSNorm",
    "RMSNormGated",
    "Replacement",
    "RowwiseScaling",
    "accelerate",
    "add_layer_norm",
    "add_rms_norm",
    "autocast",
    "decompositions",
    "fp8_autocast",
    "gate_add_layer_norm_modulate",
    "gate_add_rms_norm_modulate",
    "is_fp8_available",
    "kernel_mapping",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_linear",
    "layer_norm_modulate",
    "replace_norms",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_gated",
    "rms_norm_modulate",
    "set_recipe",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch's DTensor, whose import takes longer than all others here."""
    if name == "LayerNormColwiseParallel":
        from .linear.colwise import LayerNormColwiseParallel

        return LayerNormColwiseParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


at_hand(Tensor, Parameter)
prepare()
