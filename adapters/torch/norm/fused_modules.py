"""Modules of fused operations, with the parameters and the state_dict of the modules that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .fused_functional import add_layer_norm, add_rms_norm


class _Options:
    """What both modules have beyond those of torch."""

    zero_centered_gamma: bool
    s_dtype: torch.dtype | None

    def _set_options(self, zero_centered_gamma: bool, s_dtype: torch.dtype | None) -> None:
        name = type(self).__name__
        if zero_centered_gamma and self.weight is None:
            raise ValueError(f"{name}: zero_centered_gamma=True needs a weight; got elementwise_affine=False.")
        self.zero_centered_gamma = zero_centered_gamma
        self.s_dtype = s_dtype
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """weight = 1, or 0 if it is centred there; bias = 0."""
        super().reset_parameters()
        if getattr(self, "zero_centered_gamma", False):
            nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        shown = [super().extra_repr()]
        shown += ["zero_centered_gamma=True"] if self.zero_centered_gamma else []
        shown += [f"s_dtype={self.s_dtype}"] if self.s_dtype is not None else []
        return ", ".join(shown)


class AddLayerNorm(_Options, nn.LayerNorm):
    """s = x + residual, y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, over the last axes.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        As torch.nn.LayerNorm has them, and so is the state_dict.
    zero_centered_gamma : bool
        Multiply by 1 + weight; weight begins as 0.
    s_dtype : torch.dtype, optional
        Of s, such as float32 for a residual stream beside 16-bit layers. Default: that of x.

    Raises
    ------
    TypeError, ValueError
        An option of the wrong kind or value.

    Notes
    -----
    Input and output as `cunorm.torch.add_layer_norm` has them.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import AddLayerNorm
    >>> y, s = AddLayerNorm(3)(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.0, -1.0]]))
    >>> y.detach(), s
    (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[1., 2., 3.]]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        s_dtype: torch.dtype | None = None,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_options(zero_centered_gamma, s_dtype)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, s)"""
        options = {"zero_centered_gamma": self.zero_centered_gamma, "s_dtype": self.s_dtype}
        return add_layer_norm(input, residual, self.normalized_shape, self.weight, self.bias, self.eps, **options)


class AddRMSNorm(_Options, nn.RMSNorm):
    """s = x + residual, y = s / sqrt(mean(s²) + eps) * weight, over the last axes.

    Parameters and errors as in `AddLayerNorm`, without bias; `eps=None` as in `cunorm.torch.rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import AddRMSNorm
    >>> y, s = AddRMSNorm(2, eps=0.0)(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]))
    >>> y.detach(), s
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        s_dtype: torch.dtype | None = None,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_options(zero_centered_gamma, s_dtype)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, s)"""
        options = {"zero_centered_gamma": self.zero_centered_gamma, "s_dtype": self.s_dtype}
        return add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, **options)
