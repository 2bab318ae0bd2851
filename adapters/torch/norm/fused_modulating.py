"""Named functions whose operands come of a condition: gates and modulations, as those of fused_functional.py."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...modulating import of_samples
from ...named_fusions import KINDS
from . import functional
from .fused_functional import _named, given_of


def layer_norm_modulate(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * (1 + scale) + shift, over the last axis of x = input.

    Parameters
    ----------
    input : Tensor, shape (..., columns)
        float16, bfloat16, float32 or float64.
    scale, shift : Tensor, shape (batch, columns) or (batch, 1, ..., columns)
        A vector for each sample, of any of the four dtypes. Also any other shape that broadcasts against input.
    eps : float
        Added to the variance, inside the root.
    dtype : torch.dtype, optional
        Of y. Default: that of input; under autocast as in `layer_norm`.

    Returns
    -------
    y : Tensor, shape of input

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError
        As `layer_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm_modulate
    >>> layer_norm_modulate(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 1, 3), torch.zeros(1, 1, 3))
    tensor([[[-2.4495,  0.0000,  2.4495]]])
    """
    scale, shift = _of_samples(input, scale, shift)
    (y,) = _named(
        "layer_norm_modulate",
        input,
        None,
        {"scale": scale, "shift": shift},
        eps,
        dtype,
        sm_margin=sm_margin,
    )
    return y


def rms_norm_modulate(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * (1 + scale) + shift, over the last axis of x = input.

    Parameters, results and errors as in `layer_norm_modulate`; `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm_modulate
    >>> rms_norm_modulate(torch.tensor([[3.0, 4.0]]), torch.ones(2), torch.zeros(2), 0.0)
    tensor([[1.6971, 2.2627]])
    """
    scale, shift = _of_samples(input, scale, shift)
    (y,) = _named("rms_norm_modulate", input, None, {"scale": scale, "shift": shift}, eps, dtype, sm_margin=sm_margin)
    return y


def gate_add_layer_norm_modulate(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + gate * x, y = (s - mean(s)) / sqrt(var(s) + eps) * (1 + scale) + shift, over the last axis.

    Parameters, results and errors as in `layer_norm_modulate` and `add_layer_norm`; gate is as scale and shift.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import gate_add_layer_norm_modulate
    >>> x, zeros = torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(3)
    >>> gate_add_layer_norm_modulate(x, x, torch.ones(3), zeros, zeros)
    (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[2., 4., 6.]]))
    """
    gate, scale, shift = _of_samples(input, gate, scale, shift)
    operands = {"residual": residual, "gate": gate, "scale": scale, "shift": shift}
    return _named("gate_add_layer_norm_modulate", input, None, operands, eps, dtype, s_dtype, sm_margin=sm_margin)


def gate_add_rms_norm_modulate(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + gate * x, y = s / sqrt(mean(s²) + eps) * (1 + scale) + shift, over the last axis.

    Parameters, results and errors as in `gate_add_layer_norm_modulate`; `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import gate_add_rms_norm_modulate
    >>> x, zeros = torch.tensor([[1.5, 2.0]]), torch.zeros(2)
    >>> gate_add_rms_norm_modulate(x, x, torch.ones(2), zeros, zeros, 0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    gate, scale, shift = _of_samples(input, gate, scale, shift)
    operands = {"residual": residual, "gate": gate, "scale": scale, "shift": shift}
    return _named("gate_add_rms_norm_modulate", input, None, operands, eps, dtype, s_dtype, sm_margin=sm_margin)


def rms_norm_gated(
    input: Tensor,
    z: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight * silu(z), or, unless norm_before_gate, the same norm of s = x * silu(z).

    Parameters
    ----------
    input : Tensor, shape (..., columns)
        float16, bfloat16, float32 or float64.
    z : Tensor, shape of input
        The gate, in any of the four dtypes, as weight. silu(z) = z / (1 + exp(-z)).
    weight : Tensor, shape (columns,), optional
    eps : float
        Added to the mean of squares, inside the root.
    norm_before_gate : bool
        Which of the two. s is rounded to the dtype of input before its statistics are taken.
    group_size : int, optional
        So many neighbouring columns are normalised together, instead of all.
    dtype : torch.dtype, optional
        Of y. Default: that of input; under autocast as in `rms_norm`.

    Returns
    -------
    y : Tensor, shape of input

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError
        As `layer_norm`.
    ValueError
        A group_size that does not divide the columns.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm_gated
    >>> rms_norm_gated(torch.tensor([[3.0, 4.0, 1.0, 1.0]]), torch.full((1, 4), 100.0), eps=0.0, group_size=2)
    tensor([[ 84.8528, 113.1371, 100.0000, 100.0000]])
    """
    function, operands = "rms_norm_gated", {"z": z, "weight": weight}
    flags = {"norm_before_gate": bool(norm_before_gate)}
    if group_size is None:
        (y,) = _named(function, input, None, operands, eps, dtype, sm_margin=sm_margin, **flags)
        return y
    if not isinstance(input, Tensor):
        options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "dtype": dtype}
        node = functional.symbolic(rms_norm_gated, input, z, weight, eps, **options, sm_margin=sm_margin)
        if node is not None:
            return node
    given_of(function, input, operands)
    columns = input.shape[-1]
    if isinstance(group_size, bool) or not isinstance(group_size, numbers.Integral):
        raise TypeError(f"{function}: group_size must be an integer; got {type(group_size).__name__}.")
    if group_size <= 0 or columns % group_size:
        raise ValueError(f"{function}: group_size must divide the columns of input, {columns}; got {group_size}.")
    for name, one, shape in (("z", z, input.shape), ("weight", weight, input.shape[-1:])):
        if isinstance(one, Tensor) and (one.dim() != len(shape) or one.shape != shape):
            raise RuntimeError(f"{function}: {name} must have shape {tuple(shape)}; got {tuple(one.shape)}.")
    groups = (columns // group_size, group_size)
    # An axis for the groups; a weight is then one for each of them.
    given = {name: one.unflatten(-1, groups) if isinstance(one, Tensor) else one for name, one in operands.items()}
    kinds = tuple(kind for kind in KINDS if kind[0] != "weight")
    (y,) = _named(
        function, input.unflatten(-1, groups), group_size, given, eps, dtype, kinds=kinds, sm_margin=sm_margin, **flags
    )
    return y.flatten(-2)


def _of_samples(x: Tensor, *vectors: Tensor) -> Any:
    node = None if isinstance(x, Tensor) else functional.symbolic(of_samples, x, *vectors)
    return of_samples(x, *vectors) if node is None else node
