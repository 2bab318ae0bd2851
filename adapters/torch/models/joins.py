"""A norm and the sum beside it in one kernel, with what the module and the summands are.

As `add_layer_norm` and its like, with what depends on dtypes alone worked out once.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...named_fusions import KINDS
from ...operation import FUSIONS, name_of
from ..norm import checks, functional
from ..norm.functional import FLOATING, autocasts
from ..norm.fused_dispatch import run
from ..norm.fused_launching import Call, call_of
from ..norm.modules import LayerNorm, RMSNorm
from ..private import any_global_hook, hooks_of
from .replace import SwappedNorm


@functools.cache
def _function(cls: type) -> str | None:
    """The function that the forward of a class calls, of cunorm's norms and those that `replace_norms` made."""
    if cls is LayerNorm:
        return "layer_norm"
    if cls is RMSNorm:
        return "rms_norm"
    if issubclass(cls, SwappedNorm) and cls.forward is SwappedNorm.forward:
        form = cls._form
        is_rms_norm = form.operation in (name_of("rms_norm", plus) for plus in (False, True))
        # Where the original refuses some dtypes, or autocast changes its result, it is called by itself.
        return "rms_norm" if is_rms_norm and form.weight and len(form.dtypes) == 16 and not form.autocast else None
    return None


def apart(norm: Any, one: Tensor, other: Tensor, vectors: Sequence[Tensor] = ()) -> str:
    """Why a norm is to be called by itself; "" if it need not.

    `one` and `other` are summands; `vectors`, such as a scale and a shift, broadcast against them.
    """
    if _function(type(norm)) is None or "forward" in norm.__dict__:
        return "the norm is none of cunorm's"
    if any(hooks_of(norm)):
        return "the norm has hooks"
    if any_global_hook():
        return "every module has hooks"
    if issubclass(type(norm), SwappedNorm):
        weight = norm.weight
        shape = weight.shape if weight.dtype in FLOATING else None
    elif norm.sm_margin or norm.autocast_output:
        return "the norm has sm_margin or autocast_output"
    else:
        shape = norm.normalized_shape
    if one.shape != other.shape or one.shape[-1:] != shape:
        return "the summands have several shapes, or do not fit the norm"
    if one.dtype not in FLOATING or other.dtype not in FLOATING:
        return "the summands have a dtype that no kernel reads"
    if not one.is_cuda and autocasts(one.device.type):
        return "autocast is on for another device than a GPU"
    return _apart_from(norm, one.shape, vectors) if vectors else ""


def _apart_from(norm: Any, shape: torch.Size, vectors: Sequence[Tensor]) -> str:
    if norm.weight is not None or getattr(norm, "bias", None) is not None:
        return "the norm has a weight or a bias beside the modulation"
    for vector in vectors:
        if vector.dtype not in FLOATING:
            return "the modulation has a dtype that no kernel reads"
        if not _broadcasts(vector.shape, shape):
            return "the modulation is larger than what is modulated"
    return ""


@functools.lru_cache(maxsize=4096)
def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Kept, as it is asked of each vector at each call: 1 us each."""
    axes = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(length in (1, of_x) for length, of_x in axes)


def sum_then_norm(norm: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(one + other), one + other)"""
    (y, s), _ = run(*_called("add_", norm, one, other), False)
    return y, s


def norm_then_sum(norm: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual + norm(x), rounded once"""
    (y,), _ = run(*_called("_add", norm, x, residual), False)
    return y


def norm_then_modulation(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """norm(x) * (1 + scale) + shift, rounded once"""
    (y,), _ = run(*_modulated("", norm, x, scale, shift), False)
    return y


def gated_sum_then_modulation(
    norm: Any, x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """(norm(s) * (1 + scale) + shift, s) of s = residual + gate * x, each rounded once"""
    (y, s), _ = run(*_modulated("gate_add_", norm, x, residual, gate, scale, shift), False)
    return y, s


_calls: dict[Hashable, Call] = {}


def _modulated(join: str, norm: Any, *tensors: Tensor) -> tuple[Call, tuple[Tensor, ...], tuple, float]:
    """As `_called`; the last two tensors are scale and shift."""
    cls, eps = type(norm), norm.eps
    if eps is None:
        eps = checks.eps("rms_norm", eps, tensors[0])
    dtypes = tuple(tensor.dtype for tensor in tensors)
    key = (join, cls, dtypes, torch.is_autocast_enabled("cuda"))
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _modulated_call(join, cls, dtypes)
    return call, tensors, (), eps


def _modulated_call(join: str, cls: type, dtypes: tuple[torch.dtype, ...]) -> Call:
    """The dtypes of the operators: those of s, and of y by way of the norm of s."""
    name = _function(cls) or ""
    function = f"{join}{name}_modulate"
    *summed, scale, shift = dtypes
    s_dtype = functools.reduce(torch.promote_types, summed)
    normed = functional._default_dtype(name, torch.empty(0, dtype=s_dtype))
    dtype = functools.reduce(torch.promote_types, (normed, scale, shift))
    names = ("residual", "gate", "scale", "shift")[-len(dtypes) + 1 :]
    s_name = checks.dtype_name(s_dtype) if join else None
    return call_of(function, FUSIONS[function](), names, (), KINDS, checks.dtype_name(dtype), s_name)


def _called(join: str, norm: Any, x: Tensor, residual: Tensor) -> tuple[Call, tuple[Tensor, ...], tuple, float]:
    """(call, tensors, numbers, eps)"""
    cls, weight, bias = type(norm), norm.weight, None
    if issubclass(cls, SwappedNorm):
        eps, zero_centered_gamma = getattr(norm, norm._eps_name), norm._form.operation != "rms_norm"
    else:
        eps, zero_centered_gamma = norm.eps, norm.zero_centered_gamma
        if cls is LayerNorm:
            bias = norm.bias
        elif eps is None:
            eps = checks.eps("rms_norm", eps, x)
    tensors = (
        (x, residual) if weight is None else (x, residual, weight) if bias is None else (x, residual, weight, bias)
    )
    dtypes = x.dtype, residual.dtype, None if weight is None else weight.dtype
    key = (join, cls, zero_centered_gamma, len(tensors), dtypes, torch.is_autocast_enabled("cuda"))
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _call(
            join, cls, zero_centered_gamma, ("residual", "weight", "bias")[: len(tensors) - 1], *dtypes
        )
    return call, tensors, (), eps


def _call(
    join: str,
    cls: Any,
    zero_centered_gamma: bool,
    names: tuple[str, ...],
    x: torch.dtype,
    residual: torch.dtype,
    weight: torch.dtype | None,
) -> Call:
    """What `add_layer_norm`, `layer_norm_add` and their like make of such tensors."""
    name = _function(cls) or ""

    def of_norm(x: torch.dtype) -> torch.dtype:
        if issubclass(cls, SwappedNorm):
            return cls._dtypes[x, weight]
        return functional._default_dtype(name, torch.empty(0, dtype=x))

    if join == "add_":
        function, s_dtype = f"add_{name}", torch.promote_types(x, residual)
        dtype = of_norm(s_dtype)
    else:
        function, s_dtype = f"{name}_add", None
        dtype = torch.promote_types(of_norm(x), residual)
    operation = FUSIONS[function](zero_centered_gamma=zero_centered_gamma)
    s_name = None if s_dtype is None else checks.dtype_name(s_dtype)
    return call_of(function, operation, names, (), KINDS, checks.dtype_name(dtype), s_name)
