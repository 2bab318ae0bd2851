"""`kernel_mapping`, which offers cunorm's norms to Hugging Face's package `kernels`, which replaces layers by name.

`kernels.kernelize` gives a marked module the forward of a layer. A layer is a class with that method alone and without
state of its own; `self` is the module. Layers come from this module, and nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import private
from ..norm.functional import norm
from .forms import ACTIVATIONS, gated_norm


def kernel_mapping() -> dict[str, dict[str, dict[Any, Any]]]:
    """Return cunorm's RMSNorms for `use_kernel_mapping` and `register_kernel_mapping` of `kernels`.

    It has three names, on CUDA devices, for training and inference, with and without torch.compile. `RMSNorm` reads a
    module's `weight` and `variance_epsilon`. `RMSNormZeroCentered`, which multiplies by 1 + weight, reads `weight` and
    `eps`. `RMSNormGated` reads `weight`, `variance_epsilon` and `activation`, which is "silu" or "sigmoid"; with
    another one the model's own forward runs.

    Returns
    -------
    dict
        A new dictionary with every call. Registered beside other mappings, it replaces these names alone.

    Raises
    ------
    ImportError
        If the package `kernels` is not installed.

    Notes
    -----
    A result has the dtype that the model's own module gives it, and is rounded once. transformers marks its classes
    only if it supports the installed version of `kernels`: pip install 'transformers[kernels]'. Its own
    `model.set_use_kernels(True)` registers another mapping before it replaces anything: call `kernelize` of `kernels`.

    Examples
    --------
    >>> from cunorm.torch import kernel_mapping
    >>> from kernels import Mode, kernelize, use_kernel_mapping  # doctest: +SKIP
    >>> with use_kernel_mapping(kernel_mapping()):  # doctest: +SKIP
    ...     model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
    """
    try:
        from kernels import Mode
    except ImportError as error:
        raise ImportError(
            "kernel_mapping: Hugging Face's package kernels must be installed; it could not be imported "
            f"({error}). pip install 'transformers[kernels]', which takes the version that transformers knows."
        ) from error
    mode = Mode.TRAINING | Mode.TORCH_COMPILE  # a layer for this mode serves every mode
    return {layer.__name__: {"cuda": {mode: _Here(layer)}} for layer in (RMSNorm, RMSNormZeroCentered, RMSNormGated)}


@dataclass(frozen=True)
class _Here:
    """A layer of this module in the place of a repository, as `kernels` expects it."""

    layer: type[nn.Module]

    @property
    def layer_name(self) -> str:
        return self.layer.__name__

    def load(self) -> type[nn.Module]:
        return self.layer


class _Layer(nn.Module):
    can_torch_compile = has_backward = True


class RMSNorm(_Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, dtype = self.weight, hidden_states.dtype
        if weight.dtype is not dtype:
            dtype = _result_dtype(type(self), dtype, weight.dtype)
        return norm("rms_norm", hidden_states, weight.shape, weight, None, self.variance_epsilon, dtype, 0)


class RMSNormZeroCentered(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return norm("zero_centered_rms_norm", x, weight.shape, weight, None, self.eps, x.dtype, 0)


_GATED = {activation: gated_norm(activation) for activation in ACTIVATIONS}


class RMSNormGated(_Layer):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        gated = _GATED.get(self.activation)
        if gated is None:
            return type(self).forward(self, hidden_states, gate)  # kernelize has replaced it on the instance alone
        return gated(hidden_states, eps=self.variance_epsilon, gate=gate, weight=self.weight)


@private.constant
def _result_dtype(cls: type, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """Return the dtype of y, found by trying the class: some classes return the wider dtype, others that of x."""
    probe = cls.__new__(cls)
    nn.Module.__init__(probe)
    probe.weight, probe.variance_epsilon = nn.Parameter(torch.ones(8, dtype=weight, device="cpu")), 1.0
    try:
        return cls.forward(probe, torch.ones(1, 8, dtype=x, device="cpu")).dtype
    except Exception:  # the class needs other attributes
        return x
