"""`replace_norms`, which puts cunorm's kernels under the norms of an existing model.

A module stays the same object, with its parameters, hooks and attributes; only its class changes.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...fusion import Fused
from ..norm import compiled
from ..norm.functional import norm
from ..norm.modules import LayerNorm, RMSNorm, is_left_to_torch
from ..private import parameter_of, parameters_of
from .classes import Swaps, check_arguments, forward_replaced, lines_of_left, on_the_cpu
from .forms import Form, GatedForm, Pair, form_of, gated_norm

PACKAGES = ("transformers", "transformers_modules", "diffusers")  # the second is remote code that transformers loads
OTHER_NORMS = ("Batch", "Group", "Instance")  # parts of the names of norms that are neither LayerNorm nor RMSNorm
OF_A_MODULE = frozenset(vars(nn.Module()))


@dataclass
class Replacement:
    """What `replace_norms` did.

    Attributes
    ----------
    swapped : dict of str to str
        Maps the name of a module in the model to the name of its class before.
    left : dict of str to str
        Maps the name of a norm that was not swapped to the reason.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _swaps: Swaps = field(default_factory=Swaps, repr=False)
    _model: nn.Module | None = field(default=None, repr=False)
    _before: int = field(default=0, repr=False)  # how many norms were cunorm's before

    def undo(self) -> None:
        """Give every swapped module its class back; parameters stay as they were trained meanwhile.

        If a class was changed since, RuntimeError is raised and nothing is undone.
        """
        self._swaps.undo()

    def __str__(self) -> str:
        lines = on_the_cpu(self._model)
        if self._before and not self.swapped:
            lines.append(f"already replaced: {self._before} norms are cunorm's")
        lines.append(f"swapped {len(self.swapped)}, left {len(self.left)}")
        lines += [f"  {name}: {before}" for name, before in self.swapped.items()]
        lines += lines_of_left(self.left)
        return "\n".join(lines)


def replace_norms(model: nn.Module, norms: Sequence[type[nn.Module]] = ()) -> Replacement:
    """Swap, in place, every LayerNorm and RMSNorm of a model: torch.nn's, those of libraries and one's own classes.

    Parameters
    ----------
    model : Module
        Its parameters, hooks, dtypes, devices and state_dict stay as they are; torch.compile compiles it again.
    norms : sequence of classes, optional
        The classes of one's own norms whose name does not end in "Norm". Those whose name does are tried anyway.

    Returns
    -------
    Replacement
        Printed, it says what was swapped and what was left and why; its `undo()` takes the swap back.

    Raises
    ------
    TypeError
        If model is no module, or norms is no sequence of classes of modules.

    Notes
    -----
    A norm that is not torch.nn's is recognised by what it computes: a copy of the module is tried on a few rows, with
    its present attributes, in training and in evaluation mode. It must compute (x - mean(x)) / sqrt(var(x) + eps) or
    x / sqrt(mean(x²) + eps) over the last axis, times `weight` or 1 + `weight`, the former plus `bias`; or the latter
    times silu or sigmoid of a gate; or, as in Mamba 2, the latter of x times silu or sigmoid of a gate. The result has
    the dtype that the original gives it; for dtypes that the original refuses the original is called. Where the
    original rounds to 16 bits before it multiplies by weight and again afterwards, as Llama's, the replacement rounds
    once. A later change of an attribute other than eps is not seen: call `undo` first.

    Examples
    --------
    >>> import torch
    >>> from cunorm.torch import replace_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8))
    >>> replaced = replace_norms(model)
    >>> print(replaced)
    this model is on the CPU: torch's operators run
    swapped 1, left 1
      1: LayerNorm
      2: left, BatchNorm1d of torch.nn.modules.batchnorm is neither a LayerNorm nor an RMSNorm
    >>> replaced.undo()
    """
    check_arguments("replace_norms", model, norms)
    report = Replacement(_model=model)
    forms: dict[Hashable, Form | GatedForm | str] = {}
    for name, module in model.named_modules():
        original = type(module)
        if original in (LayerNorm, RMSNorm) or issubclass(original, _Swapped):
            report._before += 1
            continue
        replacement = _replacement_of(module, norms, forms)
        if isinstance(replacement, type):
            report._swaps.swap(module, replacement)
            report.swapped[name] = original.__name__
        elif replacement:
            report.left[name] = replacement
    return report


def _replacement_of(
    module: nn.Module, norms: Sequence[type[nn.Module]], forms: dict[Hashable, Form | GatedForm | str]
) -> type | str:
    """Return the class that a module gets, or say why it is left; "" if it is no norm."""
    replacement = _of_torch(module)
    if replacement is None and not (type(module) in norms or _is_tried(module)):
        return _why_left(module)
    reason = forward_replaced(module)
    if reason or replacement is not None:
        return reason or replacement or ""
    form = _form_of(module, forms)
    return f"{_described(type(module))} {form}" if isinstance(form, str) else _swapped_class(type(module), form)


def _of_torch(module: nn.Module) -> type | None:
    """Return our class for a norm of torch, or for timm's LayerNorm if that calls torch's and not timm's fast norm."""
    original = type(module)
    is_timm = (original.__module__.partition(".")[0], original.__name__) == ("timm", "LayerNorm")
    if original is nn.LayerNorm or (is_timm and module.__dict__.get("_fast_norm") is False):
        return LayerNorm
    return RMSNorm if original is nn.RMSNorm else None


def _is_tried(module: nn.Module) -> bool:
    """Say whether a module is a norm by its name, and neither torch's nor of a class that torch has made of another."""
    name, package = type(module).__name__, type(module).__module__.partition(".")[0]
    if package == "torch" or any(True for _ in module.children()) or any(kind in name for kind in OTHER_NORMS):
        return False
    return name.endswith("Norm") or (package in PACKAGES and "norm" in name.lower())


def _form_of(module: nn.Module, forms: dict[Hashable, Form | GatedForm | str]) -> Form | GatedForm | str:
    """Return the form of a module, which is tried once for all modules of a class that have the same attributes."""
    attributes = tuple((name, type(value), value) for name, value in vars(module).items() if name not in OF_A_MODULE)
    shapes = tuple((name, getattr(parameter, "shape", None)) for name, parameter in parameters_of(module).items())
    key = (type(module), attributes, shapes, *dict(module.named_buffers(recurse=False)), *dict(module.named_children()))
    try:
        known = key in forms
    except TypeError:  # an attribute that has no hash
        return form_of(module)
    if not known:
        forms[key] = form_of(module)
    return forms[key]


def _why_left(module: nn.Module) -> str:
    """Say why a module that is not tried is left; "" if it is no norm."""
    original = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        name = module.original_name
        scripted = f"torch.jit has compiled this {name}: replace first what is then compiled"
        return scripted if "norm" in name.lower() and not list(module.children()) else ""
    for cls in original.__mro__[1:]:
        is_library_norm = cls.__module__.partition(".")[0] in PACKAGES and "norm" in cls.__name__.lower()
        if cls is nn.LayerNorm or cls is nn.RMSNorm or (is_library_norm and not list(module.children())):
            return f"{original.__name__} is a class made of {cls.__name__}, not {cls.__name__} itself"
    if "norm" not in original.__name__.lower() or list(module.children()):
        return ""
    if original.__module__.partition(".")[0] == "torch" or any(kind in original.__name__ for kind in OTHER_NORMS):
        return f"{_described(original)} is neither a LayerNorm nor an RMSNorm"
    return (
        f"{_described(original)} was not tried, as its name does not end in Norm: name it by "
        f"norms=[{original.__name__}] if it is a LayerNorm or an RMSNorm"
    )


def _described(cls: type) -> str:
    return f"{cls.__name__} of {cls.__module__}"


# The classes of norms that were recognised by what they compute.


class _Swapped:
    """A base added to the original class, whose attributes and isinstance stay."""

    _form: Form | GatedForm
    _original: type
    _compiled_from = 0  # as in cunorm's modules

    def __reduce_ex__(self, protocol):
        """Pickle the module as an instance of its original class, which is swapped when it is loaded."""
        return _unpickled, (self._original, self._form), self.__getstate__()


class SwappedNorm(_Swapped):
    """A norm whose forward goes to the kernels."""

    _form: Form
    _eps_name: str  # the name of eps among the attributes of the instance or of this class
    _dtypes: dict[Pair, torch.dtype]  # the dtypes of y
    _autocast: dict[Pair, torch.dtype]  # the dtypes of y under autocast
    _own_below = 0  # as in cunorm's modules

    def forward(self, hidden_states: Tensor) -> Tensor:
        cls = type(self)
        form, eps = cls._form, getattr(self, cls._eps_name)
        if form.of_torch and self._own_below and not is_compiling() and is_left_to_torch(self, hidden_states):
            return cls._original.forward(self, hidden_states)
        weight = parameter_of(self, "weight") if form.weight else None
        bias = parameter_of(self, "bias") if form.bias else None
        shape = hidden_states.shape[-1:] if weight is None else weight.shape
        if is_compiling() and self._compiled_from:
            own = cls._original.forward(self, hidden_states)
            # This holds in a CUDA graph too: a norm of the rows of a head, which inductor fuses with their rotary
            # embedding, was not measured there.
            if hidden_states.numel() < self._compiled_from:
                return own
            return compiled.norm(own, form.operation, hidden_states, shape, weight, bias, eps, 0)
        dtypes = cls._autocast if form.autocast and torch.is_autocast_enabled("cuda") else cls._dtypes
        parameter = bias if weight is None else weight
        dtype = dtypes.get((hidden_states.dtype, None if parameter is None else parameter.dtype))
        if dtype is None:
            return cls._original.forward(self, hidden_states)
        return norm(form.operation, hidden_states, shape, weight, bias, eps, dtype, 0)


class _SwappedGatedNorm(_Swapped):
    """A gated norm whose forward goes to the kernels."""

    _form: GatedForm
    _gated: dict[Pair, Fused]  # functions of hidden_states, gate and weight

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = self.weight
        gated = self._gated.get((hidden_states.dtype, weight.dtype))
        if gate is None or gated is None or (is_compiling() and self._compiled_from):
            return self._original.forward(self, hidden_states, gate)
        return gated(hidden_states, eps=getattr(self, self._form.eps), gate=gate, weight=weight)


def _unpickled(original: type, form: Form | GatedForm) -> nn.Module:
    """Return a swapped module without its state, which pickle adds."""
    cls = _swapped_class(original, form)
    return cls.__new__(cls)


@functools.cache
def _swapped_class(original: type, form: Form | GatedForm) -> type:
    """Return the class that modules of the class `original` get if they compute `form`."""
    attributes: dict[str, Any] = {"_form": form, "_original": original, "__module__": original.__module__}
    if isinstance(form, GatedForm):
        attributes["_gated"] = {
            pair: gated_norm(form.activation, form.gate_first, pair[0], dtype) for pair, dtype in form.dtypes
        }
        return type(original.__name__, (_SwappedGatedNorm, original), attributes)
    attributes |= {"_eps_name": form.eps} if isinstance(form.eps, str) else {"_eps_name": "_eps", "_eps": form.eps}
    attributes |= {"_dtypes": dict(form.dtypes), "_autocast": dict(form.dtypes) | dict(form.autocast)}
    return type(original.__name__, (SwappedNorm, original), attributes)
