"""`accelerate`, which makes an existing model faster by replacing its norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ...private import check_version
from ..norm import nodes
from ..norm.modules import LayerNorm, RMSNorm
from .classes import check_arguments, lines_of_left, on_the_cpu
from .replace import Replacement, SwappedNorm, replace_norms

# With fewer elements of x a step waits for the host. Measured on an H200 with LayerNorm, forward and backward: by
# Python's nodes our host time is 40 us longer than torch's, while our kernels take 18 us less at 3 M elements, 50 to 70
# at 4 to 8 M and 100 at 16 M. By nodes in C++ the host times are equal, and a step of fewer elements gains nothing.
HOST_BOUND_BELOW = 8 << 20
# From this many elements on compiled code uses our kernel for the backward pass of a norm, and torch's operators for
# its forward pass. Kernels of a norm between two Linears, both passes, on an H200: LayerNorm takes 0.76 of inductor's
# time at 8 M elements of x and 0.95 at 64 M, RMSNorm 0.85 and 1.01 (compiled_norms.jsonl at 70aca0a). With fewer a
# compiled step waits for the host too, unless it is in a CUDA graph, where kernels of 3 M elements take 0.77 and 0.86.
COMPILED_FROM = HOST_BOUND_BELOW


class Ran(NamedTuple):
    """How often a norm ran each kernel, outside of compiled code."""

    by_cunorm: int
    by_torch: int  # x had too few elements to gain


@dataclass
class Acceleration:
    """What `accelerate` did.

    Attributes
    ----------
    norms : Replacement
        What `replace_norms` did, with `swapped` and `left`.
    without_nodes : str
        Why autograd's nodes are Python's; "" if they are C++'s, or there is no GPU.
    """

    norms: Replacement
    without_nodes: str = ""
    _already: bool = field(default=False, repr=False)  # an earlier call has replaced all norms
    _choosing: dict[str, nn.Module] = field(default_factory=dict, repr=False)  # norms that choose a kernel, by name

    def ran(self) -> dict[str, Ran]:
        """Return, for each norm that runs our kernel for a large x and torch's for a small one, how often it ran each.

        Calls in code compiled by torch.compile are not counted.
        """
        counts = {name: vars(norm) for name, norm in self._choosing.items()}
        return {name: Ran(count.get("_by_cunorm", 0), count.get("_by_torch", 0)) for name, count in counts.items()}

    def undo(self) -> None:
        """Give every module its class back; parameters stay as they were trained meanwhile.

        If a class was changed since, as by fully_shard, RuntimeError is raised and nothing is undone.
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
        lines += lines_of_left(left)
        lines.append(f"  below {HOST_BOUND_BELOW} elements: norms of torch.nn by torch's own kernels")
        compiled = f"norms of {COMPILED_FROM} elements, of torch.nn in a CUDA graph any, with our backward pass"
        lines.append(f"  under torch.compile: {compiled}")
        if self.without_nodes:
            lines.append(f"  autograd's nodes are Python's, which costs the host time: {self.without_nodes}")
        return "\n".join(lines)


def accelerate(model: nn.Module, norms: Sequence[type[nn.Module]] = ()) -> Acceleration:
    """Replace, in place, the norms of a model, and let each call run our kernel or torch's, whichever is faster.

    Parameters
    ----------
    model : Module
        It may be on any device, in any dtype, in DistributedDataParallel, and compiled. Its parameters, hooks and
        state_dict stay as they are. Call `accelerate` before fully_shard: norms that fully_shard has wrapped are left.
    norms : sequence of classes, optional
        See `replace_norms`.

    Returns
    -------
    Acceleration
        Printed, it says what was replaced, what was left and why, and what ran; its `undo()` takes it back. A second
        call of `accelerate` changes nothing.

    Notes
    -----
    The norms are those of `replace_norms`. If x has fewer than 8 M elements a step waits for the host, which torch's
    operators, in C++, keep less busy: a torch.nn.LayerNorm or RMSNorm runs torch's own kernel then. The norms of
    transformers are several operators each and always run ours.

    On a machine with a GPU the first call waits some 20 s until the installed C++ compiler has compiled the nodes of
    autograd's graph; they are kept beside the kernels, and every norm uses them afterwards. Without a compiler they are
    Python's, with the same bits and more time of the host.

    Under torch.compile and export the model's own operators are traced, as if nothing had been done, because a compiler
    fuses them with the operators around them. Under torch.compile the backward pass of a norm is our kernel all the
    same from 8 M elements on; with mode="reduce-overhead", whose CUDA graphs do not wait for the host, that of a norm
    of torch.nn is at every size. `replace_norms` alone keeps the kernels of both passes there.

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
    check_arguments("accelerate", model, norms)
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
