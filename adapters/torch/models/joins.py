"""A norm and the sum beside it in one kernel, with what the module and the summands are.

As `add_layer_norm` and its like, with what depends on dtypes alone worked out once.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook as _any_global_hook

from ...named_fusions import KINDS
from ...operation import FUSIONS
from ..norm import checks, functional
from ..norm.functional import FLOATING, autocasts
from ..norm.fused_dispatch import run
from ..norm.fused_launching import Call, call_of
from ..norm.modules import LayerNorm, RMSNorm
from .replace import OfTransformers

FEW = "too few elements to gain by it"


@functools.cache
def _function(cls: type) -> str | None:
    """The function that the forward of a class calls, of cunorm's norms and those that `replace_norms` made."""
    if cls is LayerNorm:
        return "layer_norm"
    if cls is RMSNorm or (issubclass(cls, OfTransformers) and cls.forward is OfTransformers.forward):
        return "rms_norm"
    return None


def apart(norm: Any, one: Tensor, other: Tensor) -> str:
    """Why a norm is to be called by itself; "" if it need not."""
    if _function(type(norm)) is None or "forward" in norm.__dict__:
        return "the norm is none of cunorm's"
    if one.numel() < norm._apart_below:
        return FEW
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return "the norm has hooks"
    if _any_global_hook():
        return "every module has hooks"
    if issubclass(type(norm), OfTransformers):
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
    return ""


def sum_then_norm(norm: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(one + other), one + other)"""
    (y, s), _ = run(*_called("add_", norm, one, other), False)
    return y, s


def norm_then_sum(norm: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual + norm(x), rounded once"""
    (y,), _ = run(*_called("_add", norm, x, residual), False)
    return y


_calls: dict[Hashable, Call] = {}


def _called(join: str, norm: Any, x: Tensor, residual: Tensor) -> tuple[Call, tuple[Tensor, ...], tuple, float]:
    """(call, tensors, numbers, eps)"""
    cls, weight, bias = type(norm), norm.weight, None
    if issubclass(cls, OfTransformers):
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
        if issubclass(cls, OfTransformers):
            return cls._form.dtypes[x, weight]
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
