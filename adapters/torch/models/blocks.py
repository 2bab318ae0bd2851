"""Known blocks of transformers and torch: which of their sums are joined with a norm, and what a join computes."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _any_global_hook

from ..norm.functional import FLOATING, autocasts, default_dtype
from ..norm.fused_functional import add_layer_norm, add_rms_norm, layer_norm_add, rms_norm_add
from ..norm.modules import LayerNorm, RMSNorm, _Options
from .replace import _OfTransformers
from .rewrite import SUM_AFTER, SUM_FIRST, Joins, rewritten

_LLAMA = {"post_attention_layernorm": SUM_FIRST}
_SANDWICH = {"post_attention_layernorm": SUM_AFTER, "post_feedforward_layernorm": SUM_AFTER}
_BERT = {"LayerNorm": SUM_FIRST}
_WHISPER = {"encoder_attn_layer_norm": SUM_FIRST, "final_layer_norm": SUM_FIRST}

# Package and class of a block: what of its forward is joined.
BLOCKS: dict[tuple[str, str], Joins] = {
    ("torch", "TransformerEncoderLayer"): {"norm1": SUM_FIRST, "norm2": SUM_FIRST},
    ("torch", "TransformerDecoderLayer"): {"norm1": SUM_FIRST, "norm2": SUM_FIRST, "norm3": SUM_FIRST},
    ("transformers", "LlamaDecoderLayer"): _LLAMA,
    ("transformers", "MistralDecoderLayer"): _LLAMA,
    ("transformers", "Qwen2DecoderLayer"): _LLAMA,
    ("transformers", "Qwen3DecoderLayer"): _LLAMA,
    ("transformers", "GemmaDecoderLayer"): _LLAMA,
    ("transformers", "Gemma2DecoderLayer"): _SANDWICH,
    ("transformers", "Gemma3DecoderLayer"): _SANDWICH,
    ("transformers", "Olmo2DecoderLayer"): _SANDWICH,
    ("transformers", "GPT2Block"): {"ln_2": SUM_FIRST},
    ("transformers", "BertSelfOutput"): _BERT,
    ("transformers", "BertOutput"): _BERT,
    ("transformers", "ViTLayer"): {"layernorm_after": SUM_FIRST},
    ("transformers", "WhisperEncoderLayer"): {"final_layer_norm": SUM_FIRST},
    ("transformers", "WhisperDecoderLayer"): _WHISPER,
}


def known(block: nn.Module) -> type | None:
    """The class of BLOCKS that a module is of, perhaps by way of a class of its own."""
    for cls in type(block).__mro__:
        if (cls.__module__.partition(".")[0], cls.__name__) in BLOCKS and not issubclass(cls, Block):
            return cls
    return None


def joins_of(cls: type) -> Joins:
    return BLOCKS[cls.__module__.partition(".")[0], cls.__name__]


class Block:
    """Mixed into the class of a block whose forward is rewritten."""

    _original: type
    _ran: Counter[tuple[str, str]]  # by name of a norm, and why it was called by itself, "" where it was not

    def _sum_norm(self, name: str, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(one + other), one + other)"""
        norm = self._modules[name]
        if torch.compiler.is_compiling():  # whose compiler joins them in its own way
            total = one + other
            return norm(total), total
        reason = _apart(norm, one, other)
        self._ran[name, reason] += 1
        if reason:
            total = one + other
            return norm(total), total
        return _sum_then_norm(norm, one, other)

    def _norm_sum(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """norm(x) + residual"""
        norm = self._modules[name]
        if torch.compiler.is_compiling():
            return residual + norm(x)
        reason = _apart(norm, x, residual)
        self._ran[name, reason] += 1
        return residual + norm(x) if reason else _norm_then_sum(norm, x, residual)

    def __reduce_ex__(self, protocol):
        """Pickled as an instance of the original class that is joined again when it is loaded."""
        return _unpickled, (self._original,), self.__getstate__()


@functools.cache
def joined_class(original: type) -> type | None:
    """A class of BLOCKS with its forward rewritten; None if that is not the forward that is known."""
    forward = rewritten(original.forward, joins_of(original))
    if forward is None:
        return None
    attributes = {"_original": original, "forward": forward, "__module__": original.__module__}
    return type(original.__name__, (Block, original), attributes)


def _unpickled(original: type) -> nn.Module:
    cls = joined_class(original) or original
    return cls.__new__(cls)


# What is computed.


@functools.cache
def _function(cls: type) -> str | None:
    """The function that the forward of a class calls, of cunorm's norms and those that `replace_norms` made."""
    if cls is LayerNorm:
        return "layer_norm"
    if cls is RMSNorm or (issubclass(cls, _OfTransformers) and cls.forward is _OfTransformers.forward):
        return "rms_norm"
    return None


def _apart(norm: nn.Module, one: Tensor, other: Tensor) -> str:
    """Why a norm is to be called by itself; "" if it need not."""
    if _function(type(norm)) is None or "forward" in norm.__dict__:
        return "the norm is none of cunorm's"
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return "the norm has hooks"
    if _any_global_hook():
        return "every module has hooks"
    if isinstance(norm, _Options) and (norm.sm_margin or norm.autocast_output):
        return "the norm has sm_margin or autocast_output"
    if one.shape != other.shape or one.dtype not in FLOATING or other.dtype not in FLOATING:
        return "the summands have several shapes, or other numbers than the kernels read"
    if not one.is_cuda and autocasts(one.device.type):
        return "autocast is on for another device than a GPU"
    return ""


def _sum_then_norm(norm: nn.Module, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    s_dtype = torch.promote_types(one.dtype, other.dtype)
    function, arguments, zero_centered_gamma = _called(norm)
    options = {"zero_centered_gamma": zero_centered_gamma, "dtype": _dtype_of(norm, s_dtype), "s_dtype": s_dtype}
    return (add_layer_norm if function == "layer_norm" else add_rms_norm)(one, other, *arguments, **options)


def _norm_then_sum(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    dtype = torch.promote_types(_dtype_of(norm, x.dtype), residual.dtype)
    function, arguments, zero_centered_gamma = _called(norm)
    options = {"zero_centered_gamma": zero_centered_gamma, "dtype": dtype}
    return (layer_norm_add if function == "layer_norm" else rms_norm_add)(x, residual, *arguments, **options)


def _called(norm: Any) -> tuple[str | None, tuple, bool]:
    """(function, its arguments after input, zero_centered_gamma)"""
    if isinstance(norm, _OfTransformers):
        arguments = norm.weight.shape, norm.weight, getattr(norm, norm._eps_name)
        return "rms_norm", arguments, norm._form.operation != "rms_norm"
    if isinstance(norm, LayerNorm):
        arguments = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return "layer_norm", arguments, norm.zero_centered_gamma
    return "rms_norm", (norm.normalized_shape, norm.weight, norm.eps), norm.zero_centered_gamma


def _dtype_of(norm: Any, x: torch.dtype) -> torch.dtype:
    """What the norm returns for an x of such a dtype."""
    if isinstance(norm, _OfTransformers):
        return norm._form.dtypes[x, norm.weight.dtype]
    return default_dtype(_function(type(norm)), x)
