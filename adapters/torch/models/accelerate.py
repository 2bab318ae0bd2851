"""`accelerate`: puts into a model that exists what makes it faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ...private import check_version
from ..norm import nodes
from ..norm.modules import LayerNorm, RMSNorm
from .classes import check_classes, check_module, on_the_cpu, remedies
from .replace import Replacement, SwappedNorm, replace_norms

# Elements of x below which a step waits for the host. On an H200, LayerNorm, forward and backward: by Python's nodes
# the host pays 40 us more for ours than for torch's; the kernels take 18 us less at 3 M elements, 50 to 70 at 4 to 8 M,
# 100 at 16 M. By nodes in C++ it pays the same, and a step of fewer elements gains nothing (docs/tuning.md).
HOST_BOUND_BELOW = 8 << 20
# Elements from which compiled code has our kernel for the backward pass of a norm, and torch's operators for its
# forward pass. Kernels of a norm between two Linears, both passes, on an H200: LayerNorm 0.76 of inductor's time at 8
# M elements of x and 0.95 at 64 M, RMSNorm 0.85 and 1.01 (compiled_norms.jsonl at 70aca0a). With fewer a
# compiled step waits for the host too, but for one in a CUDA graph: kernels of 3 M elements take 0.77 and 0.86.
COMPILED_FROM = HOST_BOUND_BELOW


class Ran(NamedTuple):
    """How often a norm was called, outside of compiled code, by whose kernel."""

    by_cunorm: int
    by_torch: int  # x had too few elements to gain


@dataclass
class Acceleration:
    """What `accelerate` did.

    Attributes
    ----------
    norms : Replacement
        What `replace_norms` did: `swapped` and `left`.
    without_nodes : str
        Why autograd's nodes are Python's; "" where they are C++'s, or there is no GPU.
    """

    norms: Replacement
    without_nodes: str = ""
    _already: bool = field(default=False, repr=False)  # an earlier call has set all there is to set
    _choosing: dict[str, nn.Module] = field(default_factory=dict, repr=False)  # norms that run ours or torch's, by name

    def ran(self) -> dict[str, Ran]:
        """By name of a norm that runs our kernel or torch's, as x is large or small: how often it ran each.

        What torch.compile compiled is not counted.
        """
        counts = {name: vars(norm) for name, norm in self._choosing.items()}
        return {name: Ran(count.get("_by_cunorm", 0), count.get("_by_torch", 0)) for name, count in counts.items()}

    def undo(self) -> None:
        """Gives every module its class back; what was trained meanwhile stays.

        RuntimeError, and nothing is undone, if a class was changed since, as by fully_shard.
        """
        self.norms._swaps.undo("_own_below", "_compiled_from", "_by_cunorm", "_by_torch")

    def __str__(self) -> str:
        swapped, left, ran = self.norms.swapped, self.norms.left, self.ran()
        lines = on_the_cpu(self.norms._model)
        if self._already:
            lines.append("already accelerated")
        lines.append(f"norms replaced {len(swapped)}, left {len(left)}")
        for name, before in swapped.items():
            calls = f"; calls: {ran[name].by_cunorm} by cunorm, {ran[name].by_torch} by torch" if name in ran else ""
            lines.append(f"  {name}: {before}{calls}")
        lines += [f"  {name}: left, {reason}" for name, reason in left.items()]
        lines += [f"  {line}" for line in remedies(left)]
        lines.append(f"  below {HOST_BOUND_BELOW} elements: norms of torch.nn by torch's own kernels")
        compiled = f"norms of {COMPILED_FROM} elements, of torch.nn in a CUDA graph any, with our backward pass"
        lines.append(f"  under torch.compile: {compiled}")
        if self.without_nodes:
            lines.append(f"  autograd's nodes are Python's, which costs the host time: {self.without_nodes}")
        return "\n".join(lines)


def accelerate(model: nn.Module, norms: Sequence[type[nn.Module]] = ()) -> Acceleration:
    """Replaces, in place, the norms of a model, and lets each call run our kernel or torch's, whichever is faster.

    Parameters
    ----------
    model : Module
        On any device, in any dtype, in DistributedDataParallel or compiled too. Its parameters, hooks and state_dict
        stay as they are. Before fully_shard, not after it: norms that it has wrapped are left.
    norms : sequence of classes, optional
        As in `replace_norms`.

    Returns
    -------
    Acceleration
        Printed, it says what was replaced, what was left and why, and what ran; its `undo()` takes it back. Called
        again, `accelerate` finds nothing that is left to do.

    Notes
    -----
    The norms are those of `replace_norms`. Where x has fewer than 8 M elements a step waits for the host, which torch's
    operators, in C++, keep less busy: a torch.nn.LayerNorm or RMSNorm runs torch's own kernel there. Those of
    transformers are several operators each and always run ours.

    On a machine with a GPU the first call waits, some 20 s, until the nodes of autograd's graph are compiled by the C++
    compiler that there is; they are kept beside the kernels, and every norm uses them then. Without a compiler they are
    Python's: the same bits, and more time of the host.

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
    norms replaced 2, left 0
      norm1: LayerNorm; calls: 0 by cunorm, 1 by torch
      norm2: LayerNorm; calls: 0 by cunorm, 1 by torch
      below 8388608 elements: norms of torch.nn by torch's own kernels
      under torch.compile: norms of 8388608 elements, of torch.nn in a CUDA graph any, with our backward pass
    >>> accelerated.undo()
    """
    check_module("accelerate", model)
    check_classes("accelerate", norms)
    for package in ("transformers", "diffusers"):
        check_version(package)
    without_nodes = nodes.build() if torch.cuda.is_available() else ""
    was_set = any("_compiled_from" in vars(module) for module in model.modules())
    report = Acceleration(replace_norms(model, norms), without_nodes)
    for name in report.norms.swapped:
        norm = model.get_submodule(name)
        vars(norm)["_compiled_from"] = COMPILED_FROM
        if isinstance(norm, LayerNorm | RMSNorm) or (isinstance(norm, SwappedNorm) and norm._form.of_torch):
            vars(norm)["_own_below"] = HOST_BOUND_BELOW
            report._choosing[name] = norm
    report._already = was_set and not report.norms.swapped
    return report
