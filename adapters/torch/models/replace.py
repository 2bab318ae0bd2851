"""`replace_norms`: puts cunorm's kernels under the norms of a model that exists.

A module stays the object that it is, with its parameters, hooks and attributes; only its class changes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..norm import compiled
from ..norm.functional import norm
from ..norm.modules import LayerNorm, RMSNorm, parameter_of
from .classes import Swaps, check_module
from .forms import PACKAGES, Form, GatedForm, eps_name, form_of, may_be_rms_norm


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
    A norm of transformers, or of diffusers, is recognised by what it computes: x / sqrt(mean(x²) + eps) times weight or
    1 + weight, tried on a few numbers; or times weight and silu or sigmoid of a gate, or of x times them first, as
    Mamba 2's. Its result keeps the dtype that the original gives it. Where the original rounds to 16 bits
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
    check_module("replace_norms", model)
    report = Replacement()
    for name, module in model.named_modules():
        original = type(module)
        if original in (LayerNorm, RMSNorm) or issubclass(original, _Swapped):
            continue
        replacement = _of_torch(module)
        if replacement is None and not may_be_rms_norm(module):
            reason = _why_left(module)
            if reason:
                report.left[name] = reason
            continue
        if "forward" in module.__dict__:
            report.left[name] = f"the forward of this {original.__name__} was replaced on the instance"
            continue
        if replacement is None:
            replacement = _replacement(original, eps_name(module), module.__dict__.get("activation"))
        if replacement is None:
            report.left[name] = f"{original.__name__} does not compute x / sqrt(mean(x²) + eps) * weight, gated or not"
            continue
        report._swaps.swap(module, replacement)
        report.swapped[name] = original.__name__
    return report


def _of_torch(module: nn.Module) -> type | None:
    """Ours for a norm of torch, or for timm's LayerNorm, which calls torch's unless it was made for its fast norm."""
    original = type(module)
    of_timm = (original.__module__.partition(".")[0], original.__name__) == ("timm", "LayerNorm")
    if original is nn.LayerNorm or (of_timm and module.__dict__.get("_fast_norm") is False):
        return LayerNorm
    return RMSNorm if original is nn.RMSNorm else None


def _why_left(module: nn.Module) -> str:
    """Of a module that is no norm known here; "" if it is no norm at all."""
    original = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        scripted = "norm" in module.original_name.lower() and not list(module.children())
        return (
            f"torch.jit has compiled this {module.original_name}: replace first what is then compiled"
            if scripted
            else ""
        )
    for cls in original.__mro__[1:]:
        of_package = cls.__module__.partition(".")[0] in PACKAGES and "norm" in cls.__name__.lower()
        if cls is nn.LayerNorm or cls is nn.RMSNorm or (of_package and not list(module.children())):
            return f"{original.__name__} is a class made of {cls.__name__}, not {cls.__name__} itself"
    is_norm = "norm" in original.__name__.lower() and not list(module.children())
    return f"{original.__name__} is neither a LayerNorm nor an RMSNorm" if is_norm else ""


# The RMSNorms of transformers: not one class but one for each model.


class _Swapped:
    """Mixed into a class of transformers or diffusers: its attributes and isinstance stay."""

    _eps_name: str
    _original: type
    _key: tuple[str, str | None]  # of form_of
    _compiled_from = 0  # as in cunorm's modules

    def __reduce_ex__(self, protocol):
        """Pickled as an instance of the original class that is swapped when it is loaded."""
        return _unpickled, (self._original, *self._key), self.__getstate__()


class OfTransformers(_Swapped):
    """An RMSNorm, whose forward goes to the kernels."""

    _form: Form

    def forward(self, hidden_states: Tensor) -> Tensor:
        cls = type(self)
        weight, eps, form = parameter_of(self, "weight"), getattr(self, cls._eps_name), cls._form
        if is_compiling() and self._compiled_from:
            own = cls._original.forward(self, hidden_states)
            # With fewer, in a CUDA graph too: rows of a head, which inductor joins with their rotation, were not timed.
            if hidden_states.numel() < self._compiled_from:
                return own
            return compiled.norm(own, form.operation, hidden_states, weight.shape, weight, None, eps, 0)
        dtype = form.dtypes.get((hidden_states.dtype, weight.dtype))
        return norm(form.operation, hidden_states, weight.shape, weight, None, eps, dtype, 0)


class _GatedOfTransformers(_Swapped):
    _form: GatedForm

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = self.weight
        gated = self._form.operations.get((hidden_states.dtype, weight.dtype))
        if gate is None or gated is None or (is_compiling() and self._compiled_from):
            return self._original.forward(self, hidden_states, gate)
        return gated(hidden_states, eps=getattr(self, self._eps_name), gate=gate, weight=weight)


def _unpickled(original: type, eps_name: str, activation: str | None) -> nn.Module:
    replacement = _replacement(original, eps_name, activation) or original
    return replacement.__new__(replacement)


@functools.cache
def _replacement(original: type, eps_name: str, activation: str | None) -> type | None:
    form = form_of(original, eps_name, activation)
    if form is None:
        return None
    mixin = OfTransformers if isinstance(form, Form) else _GatedOfTransformers
    attributes = {"_form": form, "_eps_name": eps_name, "_original": original, "_key": (eps_name, activation)}
    return type(original.__name__, (mixin, original), {**attributes, "__module__": original.__module__})
