"""`accelerate`: puts into a model that exists what makes it faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import NamedTuple

import torch
from torch import nn

from ...private import check_version
from ..norm import nodes
from ..norm.modules import LayerNorm, RMSNorm
from .blocks import JOINED_VERSIONS, Block, joined_class, known
from .classes import Swaps, check_classes, check_module, forward_replaced, on_the_cpu, remedies
from .replace import Replacement, SwappedNorm, replace_norms
from .rewrite import SUM_AFTER, SUM_FIRST

# Elements of x below which a step waits for the host. On an H200, LayerNorm, forward and backward: by Python's nodes
# the host pays 40 us more for ours than for torch's; the kernels take 18 us less at 3 M elements, 50 to 70 at 4 to 8 M,
# 100 at 16 M. By nodes in C++ it pays the same, and a step of fewer elements gains nothing (docs/tuning.md).
HOST_BOUND_BELOW = 8 << 20
# Elements from which a join was measured to gain: 0.80 to 0.85 forward and 0.66 to 0.71 backward of the two calls. At
# 8 M elements a step of Llama gained nothing, at 3 M one of GPT-2 lost 350 us of the host for each (docs/tuning.md).
JOINED_FROM = 64 << 20
# A norm with its modulation is four operators, with a gated sum six. With fewer elements the host pays more for ours by
# Python's nodes: a step of DiT, 5 M elements, 38.3 ms with torch's norms and 40.7 joined. By nodes in C++ it pays less:
# 0.97 and 0.98 of torch's step on two machines (docs/tuning.md).
MODULATED_FROM = HOST_BOUND_BELOW
FEW = "too few elements to gain by it"
# Elements from which compiled code has our kernel for the backward pass of a norm, and torch's operators for its
# forward pass. Kernels of a norm between two Linears, both passes, on an H200: LayerNorm 0.76 of inductor's time at 8
# M elements of x and 0.95 at 64 M, RMSNorm 0.85 and 1.01 (compiled_norms.jsonl at 70aca0a). With fewer a
# compiled step waits for the host too, but for one in a CUDA graph: kernels of 3 M elements take 0.77 and 0.86.
COMPILED_FROM = HOST_BOUND_BELOW


class Ran(NamedTuple):
    """How often a norm and what stands beside it ran, outside of compiled code."""

    together: int
    apart: dict[str, int]  # by why


@dataclass
class Acceleration:
    """What `accelerate` did.

    Attributes
    ----------
    norms : Replacement
        What `replace_norms` did: `swapped` and `left`.
    joined : dict of str to str
        Name of a norm in the model: the sum or the modulation that it is computed with, in one kernel.
    left : dict of str to str
        Name of a known block of which nothing was joined: why.
    without_nodes : str
        Why autograd's nodes are Python's; "" where they are C++'s, or there is no GPU.
    """

    norms: Replacement
    joined: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    without_nodes: str = ""
    _already: bool = field(default=False, repr=False)  # an earlier call has set all there is to set
    _unknown: set[str] = field(default_factory=set, repr=False)  # packages of blocks whose forward is another
    _blocks: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    _norms: list[nn.Module] = field(default_factory=list, repr=False)
    _swaps: Swaps = field(default_factory=Swaps, repr=False)

    def ran(self) -> dict[str, Ran]:
        """By name of a norm that is joined: how often it ran with what stands beside it, and without it and why.

        What torch.compile compiled is not counted.
        """
        counts = {name: (0, {}) for name in self.joined}
        for prefix, block in self._blocks.items():
            few = {(norm, FEW): count for norm, count in block.__dict__["_few"].items() if count}
            for (norm, reason), count in (block.__dict__["_ran"] | few).items():
                name = _join(prefix, norm)
                together, apart = counts[name]
                counts[name] = (together + count, apart) if not reason else (together, apart | {reason: count})
        return {name: Ran(*count) for name, count in counts.items()}

    def undo(self) -> None:
        """Gives every module its class back; what was trained meanwhile stays.

        RuntimeError, and nothing is undone, if a class was changed since, as by fully_shard.
        """
        self.norms._swaps.check()
        self._swaps.undo("_ran", "_few", "_joined_from")
        self._blocks.clear()
        for norm in self._norms:
            for name in ("_own_below", "_compiled_from"):
                norm.__dict__.pop(name, None)
        self._norms.clear()
        self.norms.undo()

    def __str__(self) -> str:
        ran = self.ran()
        left = self.norms.left | self.left
        lines = on_the_cpu(self.norms._model)
        if self._already:
            lines.append("already accelerated")
        lines.append(f"norms replaced {len(self.norms.swapped)}, joined {len(self.joined)}, left {len(left)}")
        lines += [f"  {name}: {before}" for name, before in self.norms.swapped.items() if name not in self.joined]
        for name, what in self.joined.items():
            together, apart = ran[name]
            lines.append(f"  {name}: with {what}; ran {together}")
            lines += [f"    apart {count}: {reason}" for reason, count in apart.items()]
        lines += [f"  {name}: left, {reason}" for name, reason in left.items()]
        lines += [f"  {line}" for line in remedies(left)]
        lines += [f"  {line}" for package in sorted(self._unknown) if (line := _of_another_version(package))]
        lines.append(f"  below {HOST_BOUND_BELOW} elements: norms of torch.nn by torch's own kernels")
        compiled = (
            f"norms of {COMPILED_FROM} elements, of torch.nn in a CUDA graph any, with our backward pass; no joins"
        )
        lines.append(f"  under torch.compile: {compiled}")
        if self.without_nodes:
            lines.append(f"  autograd's nodes are Python's, which costs the host time: {self.without_nodes}")
        return "\n".join(lines)


def _of_another_version(package: str) -> str:
    """What a report says of blocks whose forward is not known; "" if their package has the version that is."""
    known_version = JOINED_VERSIONS[package]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
    if version.startswith(known_version):
        return ""
    return (
        f"joins are known of {package} {known_version}, and this is {version}: blocks whose forward has changed have "
        "their norms replaced, and none joined"
    )


def accelerate(model: nn.Module, norms: Sequence[type[nn.Module]] = ()) -> Acceleration:
    """Replaces, in place, the norms of a model, and joins them with the sums and modulations beside them.

    The norms are those of `replace_norms`. In known blocks a residual that is added before a norm, or after it, is
    added in the kernel of the norm: the decoder layers of Hugging Face's Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 and
    OLMo 2, the layers of its GPT-2, BERT, ViT and Whisper, timm's ViT, and torch.nn.TransformerEncoderLayer and
    TransformerDecoderLayer. In diffusers' AdaLayerNorm and its like and in the blocks of DiT, PixArt, SD3 and Flux a
    norm is modulated in its kernel, but for PixArt's with the gated residual before it.

    Parameters
    ----------
    model : Module
        On any device, in any dtype, in DistributedDataParallel or compiled too. Its parameters, hooks and state_dict
        stay as they are. Before fully_shard, not after it: blocks that it has wrapped are left.
    norms : sequence of classes, optional
        As in `replace_norms`.

    Returns
    -------
    Acceleration
        Printed, it says what was replaced, what was left and why, and what ran; its `undo()` takes it back. Called
        again, `accelerate` finds nothing that is left to do.

    Notes
    -----
    A known block is one of the class of that name whose forward method is, by its source, the one that is known: that
    of another version is left. Joined with the sum before it, a norm computes to the bit what it computes without; with
    the sum after it, or with a modulation, it rounds less often. A norm that gets a hook is called by itself again, and
    the hook sees what it saw. The last sum of a layer is not joined with the first norm of the next.

    Where x has fewer than 8 M elements a step waits for the host, which torch's operators, in C++, keep less busy: a
    torch.nn.LayerNorm or RMSNorm runs torch's own kernel there. Those of transformers are several operators each and
    always run ours. Sums are joined from 64 M elements on, modulations from 8 M.

    On a machine with a GPU the first call compiles the nodes of autograd's graph by the C++ compiler that there is, in
    some 20 s, and keeps them beside the kernels; every norm uses them then. Without a compiler they are Python's: the
    same bits, and more time of the host.

    Under torch.compile and export the model's own operators are what is traced, as if nothing had been done: a compiler
    joins them itself with what stands beside them. But the backward pass of a norm is our kernel from 8 M elements on,
    that of a norm of torch.nn at every size with mode="reduce-overhead", whose CUDA graphs do not wait for the host;
    not in an export. `replace_norms` alone keeps the kernels of both passes there.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import accelerate
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    >>> accelerated = accelerate(layer)
    >>> y = layer(torch.ones(2, 3, 8))
    >>> print(accelerated)
    this model is on the CPU: torch's operators run
    norms replaced 2, joined 2, left 0
      norm1: with the sum before it; ran 0
      norm2: with the sum before it; ran 0
        apart 1: too few elements to gain by it
      below 8388608 elements: norms of torch.nn by torch's own kernels
      under torch.compile: norms of 8388608 elements, of torch.nn in a CUDA graph any, with our backward pass; no joins
    >>> accelerated.undo()
    """
    check_module("accelerate", model)
    check_classes("accelerate", norms)
    for package in ("transformers", "diffusers"):
        check_version(package)
    was_set = any("_compiled_from" in vars(module) for module in model.modules())
    report = Acceleration(replace_norms(model, norms))
    if torch.cuda.is_available():
        report.without_nodes = nodes.build()
    try:
        _join_blocks(model, report)
    except BaseException:
        report.undo()
        raise
    report._already = was_set and not report.norms.swapped and not report.joined
    return report


def _join_blocks(model: nn.Module, report: Acceleration) -> None:
    for name in report.norms.swapped:
        norm = model.get_submodule(name)
        if isinstance(norm, LayerNorm | RMSNorm | SwappedNorm):
            norm.__dict__["_own_below"] = HOST_BOUND_BELOW
        norm.__dict__["_compiled_from"] = COMPILED_FROM
        report._norms.append(norm)
    modulated_from = MODULATED_FROM if nodes.module() is None else 0
    for prefix, block in model.named_modules():
        found = known(block)
        if found is None or isinstance(block, Block):
            continue
        joined, reason = joined_class(found), _obstacle(block, found.cls)
        if reason or joined is None:
            report.left[prefix] = reason or f"the forward of {found.cls.__name__} is not the one that is known"
            if not reason:
                report._unknown.add(found.cls.__module__.partition(".")[0])
            continue
        report._swaps.swap(block, joined)
        of_sums = {SUM_FIRST, SUM_AFTER}.issuperset(found.joins.values())
        block.__dict__["_joined_from"] = JOINED_FROM if of_sums else modulated_from
        block.__dict__["_few"] = dict.fromkeys(found.joins, 0)
        block.__dict__["_ran"] = Counter()
        report._blocks[prefix] = block
        for name, what in found.joins.items():
            if isinstance(getattr(block, name, None), nn.Module):
                report.joined[_join(prefix, name)] = what


def _obstacle(block: nn.Module, cls: type) -> str:
    """Why the sums of a block cannot be joined, "" if they can."""
    if type(block) is not cls:
        return f"{type(block).__name__} is a class made of {cls.__name__}; accelerate first what is then wrapped"
    return forward_replaced(block)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
