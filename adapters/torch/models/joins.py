"""A norm and the sum beside it in one kernel, with what the module and the summands are.

As `add_layer_norm` and its like, with what depends on dtypes alone worked out once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook as _any_global_hook

from ...named_fusions import KINDS
from ...operation import FUSIONS
from ..norm import checks
from ..norm.functional import FLOATING, autocasts, default_dtype
from ..norm.fused_dispatch import run
from ..norm.fused_launching import Call, call_of
from ..norm.modules import LayerNorm, RMSNorm
from .replace import _OfTransformers


@functools.cache
def _function(cls: type) -> str | None:
    """The function that the forward of a class calls, of cunorm's norms and those that `replace_norms` made."""
    if cls is LayerNorm:
        return "layer_norm"
    if cls is RMSNorm or (issubclass(cls, _OfTransformers) and cls.forward is _OfTransformers.forward):
        return "rms_norm"
    return None


def apart(norm: Any, one: Tensor, other: Tensor) -> str:
    """Why a norm is to be called by itself; "" if it need not."""
    if _function(type(norm)) is None or "forward" in norm.__dict__:
        return "the norm is none of cunorm's"
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return "the norm has hooks"
    if _any_global_hook():
        return "every module has hooks"
    if issubclass(type(norm), _OfTransformers):
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
    tensors, names, eps = _given(norm, one, other)
    y, s = run(_sum_first(_form_of(norm), names, one.dtype, other.dtype, _autocasts()), tensors, (), eps, False)[0]
    return y, s


def norm_then_sum(norm: Any, x: Tensor, residual: Tensor) -> Tensor:
    """residual + norm(x), rounded once"""
    tensors, names, eps = _given(norm, x, residual)
    return run(_sum_after(_form_of(norm), names, x.dtype, residual.dtype, _autocasts()), tensors, (), eps, False)[0][0]


_autocasts = functools.partial(torch.is_autocast_enabled, "cuda")


def _given(norm: Any, x: Tensor, residual: Tensor) -> tuple[tuple[Tensor, ...], tuple[str, ...], float]:
    """(tensors, their names after x, eps)"""
    weight = norm.weight
    if isinstance(norm, _OfTransformers):
        return (x, residual, weight), ("residual", "weight"), getattr(norm, norm._eps_name)
    eps = norm.eps
    if eps is None:
        eps = checks.eps("rms_norm", eps, x)
    if weight is None:
        return (x, residual), ("residual",), eps
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    if bias is None:
        return (x, residual, weight), ("residual", "weight"), eps
    return (x, residual, weight, bias), ("residual", "weight", "bias"), eps


class _Form(NamedTuple):
    """What two norms have in common that compute the same of x of the same dtype."""

    cls: Any
    zero_centered_gamma: bool
    weight: torch.dtype | None  # counts in transformers' norms alone


def _form_of(norm: Any) -> _Form:
    if issubclass(type(norm), _OfTransformers):
        return _Form(type(norm), norm._form.operation != "rms_norm", norm.weight.dtype)
    return _Form(type(norm), norm.zero_centered_gamma, None)


# What autocast does is a part of the key alone.


@functools.cache
def _sum_first(form: _Form, names: tuple[str, ...], x: torch.dtype, residual: torch.dtype, autocast: bool) -> Call:
    s_dtype = torch.promote_types(x, residual)
    return _call(f"add_{_function(form.cls)}", form, names, _dtype_of(form, s_dtype), s_dtype)


@functools.cache
def _sum_after(form: _Form, names: tuple[str, ...], x: torch.dtype, residual: torch.dtype, autocast: bool) -> Call:
    dtype = torch.promote_types(_dtype_of(form, x), residual)
    return _call(f"{_function(form.cls)}_add", form, names, dtype, None)


def _call(function: str, form: _Form, names: tuple[str, ...], dtype: torch.dtype, s_dtype: torch.dtype | None) -> Call:
    operation = FUSIONS[function](zero_centered_gamma=form.zero_centered_gamma)
    s_name = None if s_dtype is None else checks.dtype_name(s_dtype)
    return call_of(function, operation, names, (), KINDS, checks.dtype_name(dtype), s_name)


def _dtype_of(form: _Form, x: torch.dtype) -> torch.dtype:
    """What the norm returns for an x of such a dtype."""
    if form.weight is not None:
        return form.cls._form.dtypes[x, form.weight]
    return default_dtype(_function(form.cls) or "", x)
