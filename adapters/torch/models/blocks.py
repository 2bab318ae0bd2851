"""Known blocks of transformers, diffusers, timm and torch: what is joined with their norms, and their classes then."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..private import modules_of
from .joins import apart, gated_sum_then_modulation, norm_then_modulation, norm_then_sum, sum_then_norm
from .rewrite import GATED, MODULATED, SUM_AFTER, SUM_FIRST, Joins, Settled, rewritten

_LLAMA = {"post_attention_layernorm": SUM_FIRST}
_SANDWICH = {"post_attention_layernorm": SUM_AFTER, "post_feedforward_layernorm": SUM_AFTER}
_BERT = {"LayerNorm": SUM_FIRST}
_WHISPER = {"encoder_attn_layer_norm": SUM_FIRST, "final_layer_norm": SUM_FIRST}

_CONDITIONED = {"norm": MODULATED}
_OF_TWO_STREAMS = {"norm2": GATED, "norm2_context": GATED}

# Whose forward methods were read. pyproject.toml tests with these.
JOINED_VERSIONS = {"diffusers": "0.42.1", "timm": "1.0", "torch": "2.13.0", "transformers": "5.17.0"}

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
    ("diffusers", "AdaLayerNorm"): _CONDITIONED,
    ("diffusers", "AdaLayerNormContinuous"): _CONDITIONED,
    ("diffusers", "AdaLayerNormZero"): _CONDITIONED,
    ("diffusers", "AdaLayerNormZeroSingle"): _CONDITIONED,
    ("diffusers", "FluxTransformerBlock"): _OF_TWO_STREAMS,
    ("timm", "Block"): {"norm2": SUM_FIRST},
}
# The same of blocks whose forward does several things, by an attribute that __init__ sets: DiT's and PixArt's, SD3's.
KINDS_OF_BLOCKS: dict[tuple[str, str], dict[tuple[str, Any], Joins]] = {
    ("diffusers", "BasicTransformerBlock"): {
        ("norm_type", "ada_norm_zero"): {"norm3": GATED},
        ("norm_type", "ada_norm_single"): {"norm1": MODULATED, "norm2": MODULATED},
    },
    ("diffusers", "JointTransformerBlock"): {
        ("use_dual_attention", False): _OF_TWO_STREAMS,
        ("use_dual_attention", True): _OF_TWO_STREAMS,
    },
}


class Known(NamedTuple):
    """A class of these, and the attributes that say what its forward does."""

    cls: type
    settled: Settled = ()

    @property
    def joins(self) -> Joins:
        key = _key(self.cls)
        return KINDS_OF_BLOCKS[key][self.settled[0]] if self.settled else BLOCKS[key]


def known(block: nn.Module) -> Known | None:
    """The class that a module is of, perhaps by way of a class of its own."""
    for cls in type(block).__mro__:
        if issubclass(cls, Block):
            continue
        if _key(cls) in BLOCKS:
            return Known(cls)
        for name, value in KINDS_OF_BLOCKS.get(_key(cls), ()):
            if block.__dict__.get(name) == value:
                return Known(cls, ((name, value),))
    return None


def _key(cls: type) -> tuple[str, str]:
    return cls.__module__.partition(".")[0], cls.__name__


class Block:
    """Mixed into the class of a block whose forward is rewritten."""

    _known: Known
    _modules: dict[str, Any]
    _ran: Counter[tuple[str, str]]  # by name of a norm, and why it was called by itself, "" where it was not
    _joined_from = 0  # elements; with fewer nothing else is asked, and what is counted is this:
    _few: dict[str, int]

    def _sum_norm(self, name: str, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(one + other), one + other)"""
        if _together(self, name, one, other):
            return sum_then_norm(self._modules[name], one, other)
        total = one + other
        return self._modules[name](total), total

    def _norm_sum(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """norm(x) + residual"""
        norm = self._modules[name]
        return norm_then_sum(norm, x, residual) if _together(self, name, x, residual) else residual + norm(x)

    def _norm_modulate(self, name: str, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """norm(x) * (1 + scale) + shift"""
        norm = self._modules[name]
        if _together(self, name, x, x, (scale, shift)):
            return norm_then_modulation(norm, x, scale, shift)
        return norm(x) * (1 + scale) + shift

    def _gate_sum_norm_modulate(
        self, name: str, x: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(norm(s) * (1 + scale) + shift, s) of s = residual + gate * x"""
        norm = self._modules[name]
        if _together(self, name, x, residual, (gate, scale, shift)):
            return gated_sum_then_modulation(norm, x, gate, residual, scale, shift)
        total = residual + gate * x
        return norm(total) * (1 + scale) + shift, total

    def __reduce_ex__(self, protocol):
        """Pickled as an instance of the original class that is joined again when it is loaded."""
        return _unpickled, tuple(self._known), self.__getstate__()


def _together(block: Block, name: str, x: Tensor, residual: Tensor, vectors: Sequence[Tensor] = ()) -> bool:
    if is_compiling():  # a compiler joins them in its own way
        return False
    if x.numel() < block._joined_from:
        block._few[name] += 1
        return False
    reason = apart(modules_of(block)[name], x, residual, vectors)
    block._ran[name, reason] += 1
    return not reason


@functools.cache
def joined_class(known: Known) -> type | None:
    """A class with its forward rewritten; None if that is not the forward that is known."""
    original = known.cls
    forward = rewritten(original.forward, known.joins, known.settled)
    if forward is None:
        return None
    attributes = {"_known": known, "forward": forward, "__module__": original.__module__}
    return type(original.__name__, (Block, original), attributes)


def _unpickled(original: type, settled: Settled) -> nn.Module:
    cls = joined_class(Known(original, settled)) or original
    return cls.__new__(cls)
