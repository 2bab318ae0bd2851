"""LayerNorm and RMSNorm on NVIDIA GPUs at the speed of memory, for arrays of CuPy, NumPy and JAX and torch tensors."""

from pathlib import Path
from typing import NoReturn

from .adding import (
    add_layer_norm,
    add_layer_norm_backward,
    add_layer_norm_forward,
    add_rms_norm,
    add_rms_norm_backward,
    add_rms_norm_forward,
)
from .adding_float8 import (
    add_layer_norm_fp8,
    add_layer_norm_fp8_forward,
    add_rms_norm_fp8,
    add_rms_norm_fp8_forward,
)
from .float8 import layer_norm_fp8, layer_norm_fp8_forward, rms_norm_fp8, rms_norm_fp8_forward
from .functions import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from .fusion import fuse
from .gate_modulating import (
    gate_add_layer_norm_modulate,
    gate_add_layer_norm_modulate_backward,
    gate_add_layer_norm_modulate_forward,
    gate_add_rms_norm_modulate,
    gate_add_rms_norm_modulate_backward,
    gate_add_rms_norm_modulate_forward,
)
from .gating import rms_norm_gated, rms_norm_gated_backward, rms_norm_gated_forward
from .kernel.compile import CompileError
from .linear.api import layer_norm_linear, layer_norm_linear_backward, layer_norm_linear_forward
from .modulating import (
    layer_norm_modulate,
    layer_norm_modulate_backward,
    layer_norm_modulate_forward,
    rms_norm_modulate,
    rms_norm_modulate_backward,
    rms_norm_modulate_forward,
)
from .norm_add import (
    layer_norm_add,
    layer_norm_add_backward,
    layer_norm_add_forward,
    rms_norm_add,
    rms_norm_add_backward,
    rms_norm_add_forward,
)
from .sandwich import rms_norm_add_rms_norm, rms_norm_add_rms_norm_backward, rms_norm_add_rms_norm_forward

__version__ = "0.1.0"

# Installed, the kernels and the adapters stand inside this package; in a checkout both stand beside it.
_package = Path(__file__).resolve().parent
if not (_package / "kernels_cu").is_dir():
    __path__.append(str(_package.parent / "adapters"))

# The classes of cunorm, which belong to a framework, by where they are.
_CLASSES = {
    "torch": "AdaLayerNorm AddLayerNorm AddRMSNorm LayerNorm LayerNormLinear RMSNorm RMSNormGated",
    "flax.nnx": "AdaLayerNorm AddLayerNorm AddRMSNorm LayerNorm LayerNormDense RMSNorm",
    "flax.linen": "AdaLayerNorm AddLayerNorm AddRMSNorm LayerNorm LayerNormDense RMSNorm",
}


def __getattr__(name: str) -> NoReturn:
    """AttributeError, which says of a class where it is."""
    places = [f"cunorm.{package}.{name}" for package, names in _CLASSES.items() if name in names.split()]
    instead = f": take {' or '.join(places)}" if places else ""
    raise AttributeError(f"module 'cunorm' has no attribute {name!r}{instead}")


__all__ = [
    "CompileError",
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_layer_norm_forward",
    "add_layer_norm_fp8",
    "add_layer_norm_fp8_forward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "add_rms_norm_forward",
    "add_rms_norm_fp8",
    "add_rms_norm_fp8_forward",
    "fuse",
    "gate_add_layer_norm_modulate",
    "gate_add_layer_norm_modulate_backward",
    "gate_add_layer_norm_modulate_forward",
    "gate_add_rms_norm_modulate",
    "gate_add_rms_norm_modulate_backward",
    "gate_add_rms_norm_modulate_forward",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_add_backward",
    "layer_norm_add_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_fp8",
    "layer_norm_fp8_forward",
    "layer_norm_linear",
    "layer_norm_linear_backward",
    "layer_norm_linear_forward",
    "layer_norm_modulate",
    "layer_norm_modulate_backward",
    "layer_norm_modulate_forward",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_backward",
    "rms_norm_add_forward",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_backward",
    "rms_norm_add_rms_norm_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_fp8",
    "rms_norm_fp8_forward",
    "rms_norm_gated",
    "rms_norm_gated_backward",
    "rms_norm_gated_forward",
    "rms_norm_modulate",
    "rms_norm_modulate_backward",
    "rms_norm_modulate_forward",
]
