"""Modules of fused operations, with the parameters and the state_dict of the modules that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...named import check_dropout_p
from ..named import add_layer_norm, add_rms_norm, layer_norm_modulate, rms_norm_gated
from . import checks
from .modules import Options


class _AddNorm(Options):
    """What AddLayerNorm and AddRMSNorm have beyond torch's modules."""

    _shown = ("zero_centered_gamma", "s_dtype", "dropout_p")

    def _added(
        self, add_norm: Callable[..., tuple[Tensor, Tensor]], x: Tensor, residual: Tensor, *parameters: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (y, s) by `add_norm`, with the normalised axes flattened; eps is the last of the `parameters`."""
        options: dict[str, Any] = {"zero_centered_gamma": self.zero_centered_gamma, "s_dtype": self.s_dtype}
        options["sm_margin"], shape = self.sm_margin, self.normalized_shape
        if self.dropout_p and self.training:
            # It is drawn by torch's generator of the device: torch.manual_seed repeats it, a checkpoint draws the same
            # one again, and each replay of a CUDA graph draws another one.
            seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)
            options |= {"dropout_p": self.dropout_p, "seed": seed}
        if isinstance(x, Tensor):
            checks.trailing_axes(type(self).__name__, x, shape)
        if len(shape) == 1:
            return add_norm(x, residual, *parameters, **options)
        axes = -len(shape)
        parameters = tuple(value.flatten() if isinstance(value, Tensor) else value for value in parameters)
        y, s = add_norm(x.flatten(axes), residual.flatten(axes), *parameters, **options)
        return y.unflatten(-1, shape), s.unflatten(-1, shape)


class AddLayerNorm(_AddNorm, nn.LayerNorm):
    """s = residual + dropout(x), y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, over the last axes.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        These are those of torch.nn.LayerNorm, and so is the state_dict.
    zero_centered_gamma : bool
        Multiply by 1 + weight; weight begins as 0.
    s_dtype : torch.dtype, optional
        The dtype of s, such as float32 for a residual stream between 16-bit layers. The default is that of x.
    dropout_p : float
        See `cunorm.torch.add_layer_norm`. It applies in training mode alone; each call draws a seed by torch's
        generator.
    sm_margin : int or dict
        See `cunorm.torch.layer_norm`.

    Raises
    ------
    TypeError, ValueError
        If an option is of the wrong kind or value.

    Notes
    -----
    Input and output are those of `cunorm.torch.add_layer_norm`.

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
        dropout_p: float = 0.0,
        sm_margin: int | Mapping[str, int] = 0,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.s_dtype, self.dropout_p = s_dtype, check_dropout_p(type(self).__name__, dropout_p)
        self._set_options(zero_centered_gamma, sm_margin)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y, s)."""
        return self._added(add_layer_norm, input, residual, self.weight, self.bias, self.eps)


class AddRMSNorm(_AddNorm, nn.RMSNorm):
    """s = residual + dropout(x), y = s / sqrt(mean(s²) + eps) * weight, over the last axes.

    Parameters and errors are those of `AddLayerNorm`, without bias; `eps=None` means what it means in
    `cunorm.torch.rms_norm`.

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
        dropout_p: float = 0.0,
        sm_margin: int | Mapping[str, int] = 0,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.s_dtype, self.dropout_p = s_dtype, check_dropout_p(type(self).__name__, dropout_p)
        self._set_options(zero_centered_gamma, sm_margin)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y, s)."""
        return self._added(add_rms_norm, x, residual, self.weight, self.eps)


class RMSNormGated(nn.Module):
    """y = x / sqrt(mean(x²) + eps) * weight * silu(z), or without norm_before_gate the same norm of x * silu(z).

    Parameters
    ----------
    hidden_size, eps, group_size, norm_before_gate, device, dtype
        These are those of mamba_ssm's gated RMSNorm. Its state_dict, `weight` alone, is also that of the gated norms of
        Hugging Face transformers; those of Mamba2 and Zamba2 have norm_before_gate=False, that of Qwen3-Next has True.

    Notes
    -----
    Input and output are those of `cunorm.torch.rms_norm_gated`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import RMSNormGated
    >>> norm = RMSNormGated(4, eps=0.0, group_size=2)
    >>> norm(torch.tensor([[3.0, 4.0, 1.0, 1.0]]), torch.full((1, 4), 100.0)).detach()
    tensor([[ 84.8528, 113.1371, 100.0000, 100.0000]])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight = 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return y."""
        options = {"norm_before_gate": self.norm_before_gate, "group_size": self.group_size}
        return rms_norm_gated(x, z, self.weight, self.eps, **options)

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[0]}, eps={self.eps}, group_size={self.group_size}, "
            f"norm_before_gate={self.norm_before_gate}"
        )


class AdaLayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * (1 + scale) + shift, with (scale, shift) = linear(silu(condition)).

    Parameters
    ----------
    embedding_dim, num_embeddings, output_dim, norm_eps, chunk_dim
        These are those of diffusers' AdaLayerNorm, and so is the state_dict: `linear`, and `emb` if num_embeddings is
        given. The norm itself has no parameters, as with norm_elementwise_affine=False, which is diffusers' default.
    device, dtype
        Where the parameters are, and their dtype.

    Raises
    ------
    ValueError
        If chunk_dim is neither 0 nor 1.

    Notes
    -----
    y is rounded once. Input and output are those of `cunorm.torch.layer_norm_modulate`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import AdaLayerNorm
    >>> norm = AdaLayerNorm(8, output_dim=32, chunk_dim=1)
    >>> norm(torch.ones(2, 5, 16), temb=torch.ones(2, 8)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int | None = None,
        output_dim: int | None = None,
        norm_eps: float = 1e-5,
        chunk_dim: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if chunk_dim not in (0, 1):
            raise ValueError(f"AdaLayerNorm: chunk_dim must be 0 or 1; got {chunk_dim!r}.")
        self.chunk_dim, self.norm_eps = chunk_dim, norm_eps
        options = {"device": device, "dtype": dtype}
        self.emb = None if num_embeddings is None else nn.Embedding(num_embeddings, embedding_dim, **options)
        self.linear = nn.Linear(embedding_dim, 2 * embedding_dim if output_dim is None else output_dim, **options)

    def forward(self, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None) -> Tensor:
        """Return y; with chunk_dim=1 x is (batch, tokens, columns) and temb (batch, embedding_dim)."""
        if self.emb is not None:
            temb = self.emb(timestep)
        temb = self.linear(nn.functional.silu(temb))
        # diffusers orders shift and scale differently in the two cases; chunk_dim=1 is that of CogVideoX.
        if self.chunk_dim == 1:
            shift, scale = temb[:, None].chunk(2, dim=-1)
        else:
            first = (None,) * (x.dim() - temb.dim())  # aligns temb with the last axes of x, as diffusers does
            scale, shift = (half[first] for half in temb.chunk(2, dim=0))
        return layer_norm_modulate(x, scale, shift, eps=self.norm_eps)

    def extra_repr(self) -> str:
        return f"eps={self.norm_eps}, chunk_dim={self.chunk_dim}"
