"""What a class of transformers or diffusers computes that has the parts of an RMSNorm, found by trying it."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...expression import sigmoid, silu
from ...fusion import Fused, fuse
from ...operation import name_of

PROBE_COLUMNS = 64
PROBE_EPS = 0.25
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PACKAGES = ("transformers", "transformers_modules", "diffusers")  # the second is code that the first has loaded
ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}
Pair = tuple[torch.dtype, torch.dtype]  # of x and weight


class Form(NamedTuple):
    """x / sqrt(mean(x²) + eps) * weight, or 1 + weight"""

    operation: str  # a name of cunorm.operation.NAMED
    dtypes: dict[Pair, torch.dtype]  # of y


class GatedForm(NamedTuple):
    """The same times an activation of a gate, or of x times it."""

    operations: dict[Pair, Fused]  # of hidden_states, gate and weight


def may_be_rms_norm(module: nn.Module) -> bool:
    """A class of these packages that has the parts of an RMSNorm."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        type(module).__module__.partition(".")[0] in PACKAGES
        and list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and not list(module.buffers(recurse=False))
        and eps_name(module) is not None
    )


def eps_name(module: nn.Module) -> str | None:
    names = ("variance_epsilon", "eps", "epsilon")
    return next((name for name in names if isinstance(module.__dict__.get(name), float)), None)


@functools.cache
def form_of(original: type, eps_name: str, activation: str | None = None) -> Form | GatedForm | None:
    """Tried on an instance made by hand; None of a class that computes something else."""
    of_call = len(inspect.signature(original.forward).parameters) - 1  # without self
    if of_call not in (1, 2):
        return None
    probe = original.__new__(original)
    nn.Module.__init__(probe)
    probe.bias = None
    x, gate, weight = torch.randn(3, PROBE_COLUMNS, generator=torch.Generator().manual_seed(0))
    setattr(probe, eps_name, PROBE_EPS)
    if activation is not None:
        probe.activation = activation

    def result(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> Tensor:
        probe.weight = nn.Parameter(weight.to(weight_dtype), requires_grad=False)
        return original.forward(probe, *(one.to(x_dtype)[None] for one in (x, gate)[:of_call]))[0]

    try:
        with torch.no_grad():
            y = result(torch.float32, torch.float32)
            dtypes = {pair: result(*pair).dtype for pair in itertools.product(DTYPES, DTYPES)}
    except Exception:  # it wants more than this: it is something else
        return None

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean() + PROBE_EPS).sqrt()

    def is_this(expected: Tensor) -> bool:
        return torch.allclose(y, expected, rtol=1e-4, atol=1e-5)

    if of_call == 1:
        found = (plus for plus in (False, True) if is_this(normed(x) * (weight + plus)))
        return next((Form(name_of("rms_norm", plus), dtypes) for plus in found), None)
    for name, gated in (("silu", nn.functional.silu(gate)), ("sigmoid", gate.sigmoid())):
        for gate_first, expected in ((False, normed(x) * weight * gated), (True, normed(x * gated) * weight)):
            if is_this(expected):
                return GatedForm({pair: gated_norm(name, gate_first, pair[0], dtype) for pair, dtype in dtypes.items()})
    return None


@functools.cache
def gated_norm(
    activation: str, gate_first: bool = False, x: torch.dtype = torch.float32, dtype: torch.dtype | None = None
) -> Fused:
    """Of hidden_states, gate and weight; y has `dtype`, or that of x. What a gate before it leaves is not rounded."""
    function = ACTIVATIONS[activation]
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if not gate_first:
        return fuse("rms_norm", epilogue=lambda xhat, gate, weight: xhat * weight * function(gate), dtype=name)
    return fuse(
        "rms_norm",
        prologue=lambda x, gate: x * function(gate),
        epilogue=lambda xhat, weight: xhat * weight,
        dtype=name,
        s_dtype="float64" if x is torch.float64 else "float32",
    )
