"""The named functions over fused operations, with the arguments and the errors of torch's functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...named_fusions import KINDS, dropout
from ...norm.fused import Kinds
from ...operation import FUSIONS, SEED
from .. import private
from . import checks, functional
from .dispatch import run
from .launching import Call, call_of


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x), y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias.

    Over the last axes of x = input.

    Parameters
    ----------
    input : Tensor, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64. Read where it lies as `layer_norm` reads its input.
    residual : Tensor, shape of input
        Any of the four dtypes, as of weight and bias.
    normalized_shape : int or sequence of int
    weight, bias : Tensor, shape normalized_shape, optional
    eps : float
        Added to the variance, inside the root.
    zero_centered_gamma : bool
        Multiply by 1 + weight instead of weight.
    dtype : torch.dtype, optional
        Of y. Default: that of input; under autocast as in `layer_norm`.
    s_dtype : torch.dtype, optional
        Of s, such as float32 for a residual stream beside 16-bit layers. Default: that of input.
    dropout_p : float
        Of x so much is replaced by 0, and the rest multiplied by 1 / (1 - dropout_p): at least 0 and less than 1,
        rounded to a multiple of 2^-16.
    seed : Tensor of one int64
        On the device of input; needed where dropout_p is not 0. What is dropped follows from the seed, the row and the
        column alone: ``torch.randint(2**63 - 1, (1,), device=input.device)`` is another one in each replay of a CUDA
        graph.
    sm_margin : int or dict
        So many multiprocessors are left to others, as in `layer_norm`.

    Returns
    -------
    y, s : Tensor, shape of input
        The same bits as of the sum and `layer_norm` of it, one after the other. Both are differentiable.

    Raises
    ------
    RuntimeError, NotImplementedError, TypeError, ValueError
        As `layer_norm`. ValueError for a dropout_p that is not one, or without a seed.

    Notes
    -----
    s is rounded before its statistics are taken. For the backward pass s, mean, rstd, weight and seed are kept, input
    and residual are not, nor is what was dropped: it is drawn again. Without dropout the gradients of input and
    residual are one tensor, written once, unless their dtypes differ.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import add_layer_norm
    >>> add_layer_norm(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.0, -1.0]]), 3)
    (tensor([[-1.2247,  0.0000,  1.2247]]), tensor([[1., 2., 3.]]))
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    return _named(
        "add_layer_norm",
        input,
        normalized_shape,
        operands,
        eps,
        dtype,
        s_dtype,
        drops=_dropout("add_layer_norm", dropout_p, seed),
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    s_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> tuple[Tensor, Tensor]:
    """s = residual + dropout(x), y = s / sqrt(mean(s²) + eps) * weight, over the last axes of x = input.

    Parameters, results and errors as in `add_layer_norm`; `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import add_rms_norm
    >>> add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), 2, eps=0.0)
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    operands = {"residual": residual, "weight": weight}
    return _named(
        "add_rms_norm",
        input,
        normalized_shape,
        operands,
        eps,
        dtype,
        s_dtype,
        drops=_dropout("add_rms_norm", dropout_p, seed),
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )


def layer_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = residual + (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axes of x = input.

    Parameters and errors as in `add_layer_norm`. y is rounded once, after the addition.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import layer_norm_add
    >>> layer_norm_add(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 1.0, 1.0]]), 3)
    tensor([[-0.2247,  1.0000,  2.2247]])
    """
    operands = {"residual": residual, "weight": weight, "bias": bias}
    (y,) = _named(
        "layer_norm_add",
        input,
        normalized_shape,
        operands,
        eps,
        dtype,
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )
    return y


def rms_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype | None = None,
    sm_margin: int | Mapping[str, int] = 0,
) -> Tensor:
    """y = residual + x / sqrt(mean(x²) + eps) * weight, over the last axes of x = input.

    Parameters and errors as in `add_layer_norm`; y as in `layer_norm_add`, `eps=None` as in `rms_norm`.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import rms_norm_add
    >>> rms_norm_add(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]), 2, eps=0.0)
    tensor([[1.8485, 2.1314]])
    """
    operands = {"residual": residual, "weight": weight}
    (y,) = _named(
        "rms_norm_add",
        input,
        normalized_shape,
        operands,
        eps,
        dtype,
        zero_centered_gamma=zero_centered_gamma,
        sm_margin=sm_margin,
    )
    return y


def _named(
    function: str,
    x: Tensor,
    normalized_shape: Any,
    operands: dict[str, Any],
    eps: Any,
    dtype: torch.dtype | None,
    s_dtype: torch.dtype | None = None,
    *,
    kinds: Kinds = KINDS,
    drops: dict[str, Any] | None = None,
    sm_margin: int | Mapping[str, int] = 0,
    **flags: bool,
) -> tuple[Tensor, ...]:
    """The results of a named function, in order. Operands that may be left out are None then; `drops` are those of
    dropout. normalized_shape is None for the last axis, whatever it is.
    """
    if not isinstance(x, Tensor):
        options = {"kinds": kinds, "drops": drops, "sm_margin": sm_margin, **flags}
        node = functional.symbolic(_named, function, x, normalized_shape, operands, eps, dtype, s_dtype, **options)
        if node is not None:
            return node
    numbers: Sequence[float] = ()
    if drops:
        seed, *numbers = drops.values()
        operands = operands | {SEED: seed}
        flags["dropout"] = True
    tensors = given_of(function, x, operands)
    norm = "layer_norm" if "layer_norm" in function else "rms_norm"
    if flags.get("zero_centered_gamma"):
        checks.zero_centered(norm, operands["weight"])
    if type(eps) is not float:
        eps = checks.eps(norm, eps, x)
    for one in (dtype, s_dtype):
        if one is not None:
            checks.output_dtype(function, one)
    if dtype is None and x.is_cuda:
        dtype = functional._default_dtype(norm, x)
    margins = (sm_margin,) * 3 if type(sm_margin) is int and sm_margin >= 0 else checks.sm_margins(function, sm_margin)
    call = _call(function, tuple(flags.items()), tuple(tensors)[1:], kinds, _name(dtype), _name(s_dtype), margins)
    given = tuple(tensors.values())
    ndim = 1
    if normalized_shape is not None:
        ndim = checks.trailing_axes(function, x, checks.shape(function, normalized_shape))
    if ndim > 1:
        given = tuple(
            tensor if name == SEED else _rows(tensor, ndim) for name, tensor in zip(tensors, given, strict=True)
        )
    if torch.compiler.is_compiling():  # the operators raise as torch does
        results, _ = run(call, given, numbers, eps, False)
    else:
        results, _ = checks.raising_as_torch(run, call, given, numbers, eps, False)
    return tuple(one.reshape(x.shape) for one in results) if ndim > 1 else tuple(results)


def _dropout(function: str, dropout_p: float, seed: Tensor | None) -> dict[str, Any]:
    return dropout(function, dropout_p, seed) if dropout_p or type(dropout_p) is not float else {}


def given_of(function: str, x: Any, operands: dict[str, Any]) -> dict[str, Tensor]:
    """x and the operands that there are: tensors."""
    tensors = {"x": x} | {name: one for name, one in operands.items() if one is not None or name not in OPTIONAL}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            name = "input" if name == "x" else name
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
    return tensors


OPTIONAL = ("weight", "bias", "second_weight")


@private.constant
def _call(
    function: str,
    flags: tuple[tuple[str, bool], ...],
    names: tuple[str, ...],
    kinds: Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int],
) -> Call:
    key = (function, flags, names, kinds, dtype, s_dtype, sm_margins)
    found = _calls.get(key)
    if found is None:
        operation = FUSIONS[function](**{name: bool(flag) for name, flag in flags})
        of_dropout = ("dropped", "factor") if SEED in names else ()
        found = _calls[key] = call_of(function, operation, names, of_dropout, kinds, dtype, s_dtype, sm_margins)
    return found


_calls: dict[tuple, Call] = {}


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else checks.dtype_name(dtype)


def _rows(tensor: Tensor, ndim: int) -> Tensor:
    """The last axes as one."""
    return tensor.reshape(*tensor.shape[:-ndim], math.prod(tensor.shape[-ndim:]))
