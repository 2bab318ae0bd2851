"""LayerNorm and RMSNorm on NVIDIA GPUs at the speed of memory, for arrays of CuPy, NumPy and JAX and torch tensors."""

from pathlib import Path
from typing import NoReturn

from .functions import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_fp8,
    layer_norm_fp8_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_fp8,
    rms_norm_fp8_forward,
)
from .fusion import fuse
from .kernel.compile import CompileError
from .linear.api import layer_norm_linear, layer_norm_linear_backward, layer_norm_linear_forward
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
    """Raise AttributeError, which says of a class where it is."""
    places = [f"cunorm.{package}.{name}" for package, names in _CLASSES.items() if name in names.split()]
    instead = f": take {' or '.join(places)}" if places else ""
    raise AttributeError(f"module 'cunorm' has no attribute {name!r}{instead}")


__all__ = [
    "CompileError",
    "add_layer_norm",
    "add_rms_norm",
    "fuse",
    "gate_add_layer_norm_modulate",
    "gate_add_rms_norm_modulate",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_fp8",
    "layer_norm_fp8_forward",
    "layer_norm_linear",
    "layer_norm_linear_backward",
    "layer_norm_linear_forward",
    "layer_norm_modulate",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_fp8",
    "rms_norm_fp8_forward",
    "rms_norm_gated",
    "rms_norm_modulate",
]
