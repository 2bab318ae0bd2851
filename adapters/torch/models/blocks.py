"""Known blocks of transformers and torch: which of their sums are joined with a norm, and their classes then."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from .joins import apart, norm_then_sum, sum_then_norm
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
    _modules: dict[str, Any]
    _ran: Counter[tuple[str, str]]  # by name of a norm, and why it was called by itself, "" where it was not

    def _sum_norm(self, name: str, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(one + other), one + other)"""
        norm = self._modules[name]
        if self._together(name, norm, one, other):
            return sum_then_norm(norm, one, other)
        total = one + other
        return norm(total), total

    def _norm_sum(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """norm(x) + residual"""
        norm = self._modules[name]
        return norm_then_sum(norm, x, residual) if self._together(name, norm, x, residual) else residual + norm(x)

    def _together(self, name: str, norm: Any, x: Tensor, residual: Tensor) -> bool:
        if torch.compiler.is_compiling():  # a compiler joins them in its own way
            return False
        reason = apart(norm, x, residual)
        self._ran[name, reason] += 1
        return not reason

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
