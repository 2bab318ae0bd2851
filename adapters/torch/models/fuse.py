"""`fuse_norm_linear`: joins the norms of a model that exists with the Linears that read them.

The norm computes the product of all its readers at once, leaves each its part, and returns the normalised tensor z. A
reader that is then called with that very z returns its part, and with anything else computes as ever: whatever else
reads z, and whoever else calls the readers, gets what it got before. What is left for a reader goes when z goes, also
if it is never called. Modules, parameters and hooks stay the same objects; only classes change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ...operation import name_of
from ..linear.functional import in_one_step, norm_linear
from ..linear.parameters import joined, lay_side_by_side
from ..norm.functional import FLOATING, autocast_dtype
from ..norm.modules import LayerNorm, RMSNorm
from ..private import has_one_projection
from .classes import Swaps, check_module
from .forms import Form, eps_name, form_of, may_be_rms_norm
from .replace import OfTransformers

# Class of a block: its norms and what reads each, and nothing else does. Spelled as transformers does and did.
BLOCKS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "TransformerEncoderLayer": (("norm1", ("self_attn",)), ("norm2", ("linear1",))),
    "GPT2Block": (
        ("ln_1", ("attn.c_attn",)),
        ("ln_cross_attn", ("crossattention.q_attn",)),
        ("ln_2", ("mlp.c_fc",)),
    ),
    "ViTLayer": (
        ("layernorm_before", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
        ("layernorm_before", ("attention.attention.query", "attention.attention.key", "attention.attention.value")),
        ("layernorm_after", ("mlp.fc1",)),
        ("layernorm_after", ("intermediate.dense",)),
    ),
    "LlamaDecoderLayer": (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ),
}


@dataclass
class Fusion:
    """What `fuse_norm_linear` did.

    Attributes
    ----------
    fused : dict of str to tuple of str
        Name of the norm in the model: names of the modules whose product it now computes.
    left : dict of str to str
        Name of a norm of a known block that was left alone: why.
    """

    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _swaps: Swaps = field(default_factory=Swaps, repr=False)

    def undo(self) -> None:
        """Gives every module its class back; what was trained meanwhile stays.

        RuntimeError, and nothing is undone, if a class was changed since.
        """
        self._swaps.undo("_link", "_ready")

    def __str__(self) -> str:
        lines = [f"fused {len(self.fused)}, left {len(self.left)}"]
        lines += [f"  {name}: with {', '.join(readers)}" for name, readers in self.fused.items()]
        lines += [f"  {name}: left, {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def fuse_norm_linear(model: nn.Module) -> Fusion:
    """Joins, in place, each norm of a known block with the Linears that read it, into one `layer_norm_linear`.

    Known blocks are torch.nn.TransformerEncoderLayer with norm_first, and those of Hugging Face's GPT-2, ViT and Llama.

    Parameters
    ----------
    model : Module
        Its parameters, hooks and state_dict stay as they are. Call this once the model is on its device and in its
        dtype: weights that are read together are then laid side by side in memory; moved again they are copied together
        at every call.

    Returns
    -------
    Fusion
        Printed, it says what was fused, what was left and why; its `undo()` takes it back.

    Notes
    -----
    As in `layer_norm_linear` the normalised tensor is not kept for the backward pass. An RMSNorm of Llama rounds once,
    where the original rounds before it multiplies by weight and once more after.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import fuse_norm_linear
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    >>> fusion = fuse_norm_linear(layer)
    >>> print(fusion)
    fused 2, left 0
      norm1: with self_attn
      norm2: with linear1
    >>> fusion.undo()
    """
    check_module("fuse_norm_linear", model)
    report = Fusion()
    for prefix, block in model.named_modules():
        for norm_name, reader_names in _pairs(block):
            names = [".".join(filter(None, (prefix, name))) for name in (norm_name, *reader_names)]
            norm = block.get_submodule(norm_name)
            readers = [block.get_submodule(name) for name in reader_names]
            if isinstance(norm, _Norm):
                continue
            reason = _obstacle(block, norm, readers)
            if reason:
                report.left[names[0]] = reason
                continue
            if len(readers) > 1:
                for parameters in zip(*map(_parameters, readers), strict=True):
                    if parameters[0] is not None:
                        lay_side_by_side(parameters)
            norm._link = Link(*_kind_of(norm), readers)
            report._swaps.swap(norm, _class_with(_Norm, type(norm)))
            for reader in readers:
                report._swaps.swap(reader, _class_with(_reader(reader), type(reader)))
            report.fused[names[0]] = tuple(names[1:])
    return report


def _pairs(block: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The norms of a known block, each with what reads it."""
    package = type(block).__module__.partition(".")[0]
    if package not in ("torch", "transformers") or type(block).__name__ not in BLOCKS:
        return
    for norm, readers in BLOCKS[type(block).__name__]:
        if all(_has(block, name) for name in (norm, *readers)):
            yield norm, readers


def _has(block: nn.Module, name: str) -> bool:
    try:
        block.get_submodule(name)
    except AttributeError:
        return False
    return True


def _obstacle(block: nn.Module, norm: nn.Module, readers: list[nn.Module]) -> str:
    """Why they cannot be joined, "" if they can."""
    if type(block) is nn.TransformerEncoderLayer and not block.norm_first:
        return "the norms of a TransformerEncoderLayer without norm_first are not followed by a Linear"
    if _kind_of(norm) is None:
        return f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm"
    for module in (norm, *readers):
        if "forward" in module.__dict__:
            return f"the forward of this {type(module).__name__} was replaced on the instance"
    for reader in readers:
        if _reader(reader) is None:
            return f"{type(reader).__name__} is no Linear that is known"
    weights, biases = zip(*map(_parameters, readers), strict=True)
    if len({bias is None for bias in biases}) > 1:
        return "some of its Linears have a bias, others have not"
    parameters = [parameter for parameter in (*weights, *biases) if parameter is not None]
    if any(hasattr(parameter, "device_mesh") for parameter in (*parameters, *norm.parameters())):
        return "its parameters are DTensors: join the modules before they are split over a mesh"
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) > 1:
        return "its Linears have several dtypes or devices"
    if len(getattr(norm, "normalized_shape", (0,))) != 1:
        return "it normalises several axes"
    return ""


# The norm.


class Link(NamedTuple):
    """What a norm knows of its product."""

    operation: str  # a name of cunorm.operation.NAMED
    eps_name: str
    readers: list[nn.Module]  # in a list: they are no submodules of the norm


def _kind_of(norm: nn.Module) -> tuple[str, str] | None:
    """(operation, name of its eps)"""
    original = type(norm)
    if original in (nn.LayerNorm, LayerNorm):
        return name_of("layer_norm", getattr(norm, "zero_centered_gamma", False)), "eps"
    if original in (nn.RMSNorm, RMSNorm):
        return name_of("rms_norm", getattr(norm, "zero_centered_gamma", False)), "eps"
    if isinstance(norm, OfTransformers):
        return norm._form.operation, norm._eps_name
    if may_be_rms_norm(norm):
        form = form_of(original, eps_name(norm))
        if isinstance(form, Form):
            return form.operation, eps_name(norm)
    return None


class _Norm:
    """Mixed into the class of a norm."""

    _link: Link

    def forward(self, x: Tensor) -> Tensor:
        operation, eps_name, readers = self._link
        weights, biases = zip(*map(_parameters, readers), strict=True)
        dtype = autocast_dtype(x) or x.dtype
        if x.dtype not in FLOATING or (dtype is x.dtype and weights[0].dtype is not dtype):
            return super().forward(x)  # refused by the Linears, or computed in a mixture that is theirs to know
        if not in_one_step(x, *weights, *biases, self.weight):
            return super().forward(x)  # autograd would keep z for the product, which would keep itself alive by it
        eps = getattr(self, eps_name)
        y, z = norm_linear(
            "fuse_norm_linear",
            x,
            joined(weights),
            None if biases[0] is None else joined(biases),
            self.weight,
            getattr(self, "bias", None),
            torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps,
            operation,
            False,
        )
        weak = weakref.ref(z, functools.partial(_forget, readers))
        for reader, part in zip(readers, y.split([len(weight) for weight in weights], -1), strict=True):
            reader._ready = weak, part
        return z


def _forget(readers: list[nn.Module], z: weakref.ref) -> None:
    """z is gone: its products are of no use to readers that were not called."""
    for reader in readers:
        if reader._ready is not None and reader._ready[0] is z:
            reader._ready = None


# What reads it.


class _Reader:
    _ready: tuple[weakref.ref, Tensor] | None = None  # (z, the product that the norm left)

    def _take(self, z: Any) -> Tensor | None:
        """The product that the norm left, if it is that of z."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0]() is z else None


class _Linear(_Reader):
    """Mixed into the class of a Linear."""

    def forward(self, input: Tensor) -> Tensor:
        y = self._take(input)
        return super().forward(input) if y is None else y


class _Attention(_Reader):
    """Mixed into torch.nn.MultiheadAttention, whose in_proj is the Linear."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        projected = self._take(query)
        if projected is None or key is not query or value is not query or need_weights:
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *options)
        batched = projected.dim() == 3
        if not batched:
            projected = projected[None]
        elif not self.batch_first:
            projected = projected.transpose(0, 1)
        heads = (self.num_heads, self.head_dim)
        query, key, value = (part.unflatten(-1, heads).transpose(1, 2) for part in projected.chunk(3, -1))
        causal = is_causal and key_padding_mask is None
        mask = None if causal else _merged(attn_mask, key_padding_mask, query)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return (y[0] if not batched else y if self.batch_first else y.transpose(0, 1)), None


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """(batch or 1, heads or 1, length or 1, length), added to the scores; of bool, True is not attended to."""
    batch, heads, _, _ = query.shape
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask[None, None])
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(batch, 1, 1, -1))
    masks = [
        torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
        if mask.dtype is torch.bool
        else mask
        for mask in masks
    ]
    return sum(masks[1:], masks[0]) if masks else None


def _reader(module: nn.Module) -> type | None:
    """What is mixed into the class of a module that reads a norm; None for one that is not known."""
    if type(module) is nn.Linear or _is_conv1d(module):
        return _Linear
    if type(module) is nn.MultiheadAttention:
        plain = has_one_projection(module) and module.bias_k is None and not module.add_zero_attn
        return _Attention if plain else None
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """The Linear of GPT-2, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _parameters(reader: nn.Module) -> tuple[Tensor, Tensor | None]:
    """weight (out, in) and bias."""
    if isinstance(reader, nn.MultiheadAttention):
        return reader.in_proj_weight, reader.in_proj_bias
    return (reader.weight if isinstance(reader, nn.Linear) else reader.weight.t()), reader.bias


@functools.cache
def _class_with(mixin: type, original: type) -> type:
    def reduce(self, protocol):
        """Pickled as an instance of the original class that is fused when it is loaded."""
        return _unpickled, (mixin, original), {**self.__getstate__(), "_ready": None}

    attributes = {"__reduce_ex__": reduce, "__module__": original.__module__}
    return type(original.__name__, (mixin, original), attributes)


def _unpickled(mixin: type, original: type) -> nn.Module:
    cls = _class_with(mixin, original)
    return cls.__new__(cls)
