"""`replace_norms`: puts cunorm's kernels under the norms of a model that exists.

A module stays the object that it is, with its parameters, hooks and attributes; only its class changes.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...operation import name_of
from ..norm.functional import norm
from ..norm.modules import LayerNorm, RMSNorm
from .classes import Swaps

PROBE_COLUMNS = 64
PROBE_EPS = 0.25
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Replacement:
    """What `replace_norms` did.

    Attributes
    ----------
    swapped : dict of str to str
        Name of the module in the model: its class before.
    left : dict of str to str
        Name of a norm that was not swapped: why.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _swaps: Swaps = field(default_factory=Swaps, repr=False)

    def undo(self) -> None:
        """Gives every swapped module its class back; what was trained meanwhile stays.

        RuntimeError, and nothing is undone, if a class was changed since.
        """
        self._swaps.undo()

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        lines += [f"  {name}: {before}" for name, before in self.swapped.items()]
        lines += [f"  {name}: left, {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def replace_norms(model: nn.Module) -> Replacement:
    """Swaps, in place, every torch.nn.LayerNorm and RMSNorm, and the RMSNorms of Hugging Face transformers.

    Parameters
    ----------
    model : Module
        Its parameters, hooks, dtypes, devices and state_dict stay as they are; compiled graphs of it are made anew.

    Returns
    -------
    Replacement
        Printed, it says what was swapped and what was left and why; its `undo()` takes the swap back.

    Notes
    -----
    A norm of transformers is recognised by what it computes: x / sqrt(mean(x²) + eps) times weight or 1 + weight, tried
    on a few numbers, and its result keeps the dtype that the original gives it. Where the original rounds to 16 bits
    before it multiplies by weight and once more after, as Llama's, the replacement rounds once.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import replace_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8))
    >>> replaced = replace_norms(model)
    >>> print(replaced)
    swapped 1, left 1
      1: LayerNorm
      2: left, BatchNorm1d is neither a LayerNorm nor an RMSNorm
    >>> replaced.undo()
    """
    report = Replacement()
    for name, module in model.named_modules():
        original = type(module)
        if original in (LayerNorm, RMSNorm) or issubclass(original, _OfTransformers):
            continue
        if original is not nn.LayerNorm and original is not nn.RMSNorm and not _may_be_rms_norm(module):
            if "norm" in original.__name__.lower() and not list(module.children()):
                report.left[name] = f"{original.__name__} is neither a LayerNorm nor an RMSNorm"
            continue
        if "forward" in module.__dict__:
            report.left[name] = f"the forward of this {original.__name__} was replaced on the instance"
            continue
        if original is nn.LayerNorm:
            replacement = LayerNorm
        elif original is nn.RMSNorm:
            replacement = RMSNorm
        else:
            replacement = _replacement(original, _eps_name(module))
        if replacement is None:
            report.left[name] = f"{original.__name__} does not compute x / sqrt(mean(x²) + eps) * weight"
            continue
        report._swaps.swap(module, replacement)
        report.swapped[name] = original.__name__
    return report


# The RMSNorms of transformers: not one class but one for each model.


class Form(NamedTuple):
    """What such a class computes."""

    operation: str  # a name of cunorm.operation.NAMED
    dtypes: dict[tuple[torch.dtype, torch.dtype], torch.dtype]  # of y, by those of x and weight


class _OfTransformers:
    """Mixed into a class of transformers: its attributes and isinstance stay, forward goes to the kernels."""

    _form: Form
    _eps_name: str
    _original: type
    _own_below = _apart_below = 0  # as in cunorm's modules, but that few elements too go to the kernels

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._own_below and torch.compiler.is_compiling():
            return self._original.forward(self, hidden_states)
        weight, eps, form = self.weight, getattr(self, self._eps_name), self._form
        dtype = form.dtypes.get((hidden_states.dtype, weight.dtype))
        return norm(form.operation, hidden_states, weight.shape, weight, None, eps, dtype, 0)

    def __reduce_ex__(self, protocol):
        """Pickled as an instance of the original class that is swapped when it is loaded."""
        return _unpickled, (self._original, self._eps_name), self.__getstate__()


def _unpickled(original: type, eps_name: str) -> nn.Module:
    replacement = _replacement(original, eps_name) or original
    return replacement.__new__(replacement)


def _may_be_rms_norm(module: nn.Module) -> bool:
    """A class of transformers, or of code loaded by it, that has the parts of an RMSNorm."""
    package = type(module).__module__.partition(".")[0]
    parameters = dict(module.named_parameters(recurse=False))
    return (
        package in ("transformers", "transformers_modules")
        and list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and not list(module.buffers(recurse=False))
        and _eps_name(module) is not None
    )


def _eps_name(module: nn.Module) -> str | None:
    names = ("variance_epsilon", "eps", "epsilon")
    return next((name for name in names if isinstance(module.__dict__.get(name), float)), None)


@functools.cache
def _replacement(original: type, eps_name: str) -> type | None:
    form = form_of(original, eps_name)
    if form is None:
        return None
    attributes = {"_form": form, "_eps_name": eps_name, "_original": original, "__module__": original.__module__}
    return type(original.__name__, (_OfTransformers, original), attributes)


@functools.cache
def form_of(original: type, eps_name: str) -> Form | None:
    """Tried on an instance made by hand; None of a class that computes something else."""
    probe = original.__new__(original)
    nn.Module.__init__(probe)
    x, weight = torch.randn(2, PROBE_COLUMNS, generator=torch.Generator().manual_seed(0))
    setattr(probe, eps_name, PROBE_EPS)

    def result(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Tensor:
        probe.weight = nn.Parameter(weight.to(weight_dtype), requires_grad=False)
        return original.forward(probe, x.to(x_dtype)[None])[0]

    try:
        with torch.no_grad():
            y = result(torch.float32, torch.float32)
            dtypes = {pair: result(*pair).dtype for pair in itertools.product(DTYPES, DTYPES)}
    except Exception:  # it wants more than this: it is something else
        return None
    xhat = x / (x.square().mean() + PROBE_EPS).sqrt()
    for zero_centered_gamma in (False, True):
        if torch.allclose(y, xhat * (weight + zero_centered_gamma), rtol=1e-4, atol=1e-5):
            return Form(name_of("rms_norm", zero_centered_gamma), dtypes)
    return None
