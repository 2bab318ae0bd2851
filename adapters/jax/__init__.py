"""LayerNorm and RMSNorm for JAX: functions that live inside jit, grad, vmap and shard_map, on cunorm's kernels."""

from .linear.functional import layer_norm_linear
from .named import (
    add_layer_norm,
    add_rms_norm,
    gate_add_layer_norm_modulate,
    gate_add_rms_norm_modulate,
    layer_norm_add,
    layer_norm_fp8,
    layer_norm_fp8_forward,
    layer_norm_modulate,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_fp8,
    rms_norm_fp8_forward,
    rms_norm_gated,
    rms_norm_modulate,
)
from .norm.functional import layer_norm, rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gate_add_layer_norm_modulate",
    "gate_add_rms_norm_modulate",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_fp8",
    "layer_norm_fp8_forward",
    "layer_norm_linear",
    "layer_norm_modulate",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_fp8",
    "rms_norm_fp8_forward",
    "rms_norm_gated",
    "rms_norm_modulate",
]
