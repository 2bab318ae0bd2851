"""LayerNormLinear over the ranks of a group against torch's own operators on all rows and the whole weight in float64.

Every rank computes the whole by itself, by autograd, and compares its own part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from cunorm.torch import LayerNormLinear

GROUPS: dict[int, Any] = {}  # of the first ranks, by how many


COLS, OUTS, EPS = 8, 24, 0.3
OVERLAPS = ("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_rs_dgrad")


class Case(NamedTuple):
    options: Mapping[str, Any] = MappingProxyType({})  # of the module
    sequence: bool = True
    shape: tuple[int, ...] = (12,)  # of all rows
    frozen: tuple[str, ...] = ()  # "weight", "bias", "norm", "x"
    alone: bool = False  # the first rank alone freezes them
    unused: str = ""  # "y" or "z": what the first rank makes no use of
    checkpoint: str = ""  # "reentrant" or "selective"
    compiled: bool = False
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None

    def frozen_by(self, first: bool) -> tuple[str, ...]:
        return self.frozen if first or not self.alone else ()


Z = {"return_layernorm_output": True}
ALL_Z = {**Z, "return_layernorm_output_gathered": True}
NOTHING = ("weight", "bias", "norm", "x")  # no gradient is wanted
SPLIT = {"parameters_split": {"query": 8, "key_value_": 16}}
CASES = {
    "as it is": Case(),
    "RMSNorm": Case({"normalization": "RMSNorm"}),
    "zero-centred, no bias": Case({"zero_centered_gamma": True, "bias": False}),
    "split": Case(SPLIT),
    "bias returned": Case({**SPLIT, "return_bias": True}),
    "z returned": Case(Z),
    "z of all rows returned": Case(ALL_Z),
    "z returned, not by the first": Case(Z, unused="z"),
    "z of all rows returned, not by the first": Case(ALL_Z, unused="z"),
    "z of all rows returned, y not by the first": Case(ALL_Z, unused="y"),
    "bias and z returned": Case({**ALL_Z, "return_bias": True, "bias": False}),
    "kept": Case({"keep_normalized": True}),
    "kept, z of all rows returned": Case({**ALL_Z, "keep_normalized": True}),
    "samples": Case(shape=(4, 3)),
    "samples, z of all rows": Case(ALL_Z, shape=(4, 1, 3)),
    "no rows": Case(ALL_Z, shape=(0,)),
    "no rows of samples": Case(shape=(4, 0)),
    "fused": Case({**SPLIT, "fuse_wgrad_accumulation": True}),
    "delayed": Case({**SPLIT, **ALL_Z, "delay_wgrad_compute": True}),
    "delayed and fused": Case({"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}),
    "delayed, kept": Case({"keep_normalized": True, "delay_wgrad_compute": True}),
    "frozen weight": Case(frozen=("weight",)),
    "frozen norm": Case(frozen=("norm",)),
    "weight alone": Case(frozen=("norm", "x")),
    "norm alone": Case(ALL_Z, frozen=("weight", "x")),
    "nothing wanted by the first": Case(ALL_Z, frozen=NOTHING, alone=True),
    "nothing wanted by the first, delayed and fused": Case(
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}, frozen=NOTHING, alone=True
    ),
    "nothing wanted by the first, rows everywhere": Case(frozen=NOTHING, alone=True, sequence=False),
    "nothing wanted by the first, checkpoint": Case(frozen=NOTHING, alone=True, checkpoint="selective"),
    "nothing wanted by the first, autocast": Case(
        frozen=NOTHING, alone=True, dtype=torch.float32, autocast=torch.bfloat16
    ),
    "checkpoint": Case(checkpoint="selective"),
    "reentrant checkpoint": Case(checkpoint="reentrant"),
    "compiled": Case(ALL_Z, compiled=True),
    "compiled, samples, kept": Case({**Z, **SPLIT, "keep_normalized": True}, shape=(4, 3), compiled=True),
    "autocast": Case(Z, dtype=torch.float32, autocast=torch.bfloat16),
    "bfloat16": Case(ALL_Z, dtype=torch.bfloat16),
    "rows everywhere": Case(sequence=False),
    "rows everywhere, z returned": Case({**ALL_Z, "keep_normalized": True}, sequence=False),
    "rows everywhere, delayed": Case({**Z, "delay_wgrad_compute": True}, sequence=False, shape=(4, 3)),
    "rows everywhere, compiled": Case({**Z, "keep_normalized": True}, sequence=False, compiled=True),
    "rows everywhere, no gradient of x": Case(frozen=("x", "norm"), sequence=False),
}
MANY = (  # on four ranks
    "as it is",
    "split",
    "z of all rows returned",
    "samples",
    "delayed",
    "rows everywhere",
    "nothing wanted by the first",
)


class Part(NamedTuple):
    """What one rank has, sees and gets; in the reference float64."""

    x: Tensor
    state: dict[str, Tensor]
    dy: Tensor
    dz: Tensor
    dbias: Tensor  # of a bias that is returned


class Whole:
    """All rows and the whole weight, and what follows for each rank."""

    def __init__(self, case: Case, ranks: int):
        self.case, self.ranks = case, ranks
        random = torch.Generator().manual_seed(0)
        options = case.options

        def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            values = shift + scale * torch.randn(*shape, generator=random, dtype=torch.float64)
            return values.to(case.dtype).double()

        self.x = normal(*case.shape, COLS, shift=0.5)
        self.ln_weight = normal(COLS, scale=0.5, shift=1.0)
        self.ln_bias = normal(COLS) if options.get("normalization") != "RMSNorm" else None
        self.weight = normal(OUTS, COLS, scale=COLS**-0.5)
        self.bias = normal(OUTS) if options.get("bias", True) else None
        self.dy = normal(*case.shape, OUTS)
        self.dbias = normal(OUTS)
        gathered = options.get("return_layernorm_output_gathered")
        # With the rows everywhere all ranks compute alike what follows z.
        of_rank = [self.x.shape if gathered or not case.sequence else self._rows(self.x, 0).shape] * ranks
        self.dz = [normal(*shape) for shape in of_rank] if case.sequence else [normal(*self.x.shape)] * ranks

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(self.ranks)[rank] if self.case.sequence and len(tensor) else tensor

    def _outs(self, rank: int) -> dict[str, slice]:
        """Where the parts of a rank's weight lie in the whole."""
        split = self.case.options.get("parameters_split") or {"": OUTS}
        found, start = {}, 0
        for name, size in split.items():
            own = size // self.ranks
            found[name.rstrip("_")] = slice(start + rank * own, start + (rank + 1) * own)
            start += size
        return found

    def _columns(self, rank: int) -> Tensor:
        return torch.cat([torch.arange(OUTS)[part] for part in self._outs(rank).values()])

    def part(self, rank: int) -> Part:
        state = {"layer_norm_weight": self.ln_weight}
        if self.ln_bias is not None:
            state["layer_norm_bias"] = self.ln_bias
        for name, outs in self._outs(rank).items():
            prefix = f"{name}_" if name else ""
            state[prefix + "weight"] = self.weight[outs]
            if self.bias is not None:
                state[prefix + "bias"] = self.bias[outs]
        columns = self._columns(rank)
        return Part(self._rows(self.x, rank), state, self.dy[..., columns], self.dz[rank], self.dbias[columns])

    def expected(self) -> tuple[list[tuple], list[dict[str, Tensor]]]:
        """For each rank its results (y, bias, z), and its gradients by name."""
        case, options, ranks = self.case, self.case.options, range(self.ranks)
        # Leaves of each rank's own for the norm, so that their gradients are of the rows of that rank.
        norms = [
            [None if t is None else t.clone().requires_grad_() for t in (self.ln_weight, self.ln_bias)] for _ in ranks
        ]
        x, weight = self.x.clone().requires_grad_(), self.weight.clone().requires_grad_()
        bias = None if self.bias is None else self.bias.clone().requires_grad_()

        def norm(x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
            gamma = gamma + 1 if options.get("zero_centered_gamma") else gamma
            if beta is None:
                return F.rms_norm(x, (COLS,), gamma, EPS)
            return F.layer_norm(x, (COLS,), gamma, beta, EPS)

        parts = [norm(self._rows(x, rank), *norms[rank]) for rank in ranks] if case.sequence else [norm(x, *norms[0])]
        z = torch.cat(parts)
        y = F.linear(z, weight, None if options.get("return_bias") else bias)
        gathered = options.get("return_layernorm_output_gathered") or not case.sequence
        returned = [z if gathered else parts[rank] for rank in ranks]
        loss = 0
        for rank in ranks:
            part, first = self.part(rank), rank == 0
            if not (case.unused == "y" and first):
                loss = loss + (y[..., self._columns(rank)] * part.dy).sum()
            if (
                options.get("return_layernorm_output")
                and (case.sequence or first)
                and not (case.unused == "z" and first)
            ):
                loss = loss + (returned[rank] * part.dz).sum()
        if bias is not None and options.get("return_bias"):
            loss = loss + (bias * self.dbias).sum()
        loss.backward()
        results, gradients = [], []
        for rank in ranks:
            columns = self._columns(rank)
            results.append((y[..., columns], None if bias is None else bias[columns], returned[rank]))
            norm_of = norms[rank if case.sequence else 0]
            found = {"x": self._rows(x.grad, rank), "layer_norm_weight": norm_of[0].grad}
            if norm_of[1] is not None:
                found["layer_norm_bias"] = norm_of[1].grad
            for name, outs in self._outs(rank).items():
                prefix = f"{name}_" if name else ""
                found[prefix + "weight"] = weight.grad[outs]
                if bias is not None:
                    found[prefix + "bias"] = bias.grad[outs]
            gradients.append(found)
        return results, gradients


def make(case: Case, group: Any, device: str, **others: Any) -> LayerNormLinear:
    torch.manual_seed(0)
    options = {
        "eps": EPS,
        "parallel_mode": "column",
        "tp_group": group,
        "sequence_parallel": case.sequence,
        **case.options,
        **others,
    }
    return LayerNormLinear(COLS, OUTS, device=device, params_dtype=case.dtype, **options)


class Found(NamedTuple):
    results: list[Tensor]  # y, bias, z, of those that are returned
    gradients: dict[str, Tensor | None]


def run(module: LayerNormLinear, case: Case, part: Part, first: bool, device: str) -> Found:
    """One forward and backward pass of this rank."""
    frozen = case.frozen_by(first)
    module.load_state_dict({name: value.to(case.dtype) for name, value in part.state.items()})
    for name, parameter in module.named_parameters():
        kind = "norm" if name.startswith("layer_norm") else "weight" if name.endswith("weight") else "bias"
        parameter.requires_grad_(kind not in frozen)
        if module.fuse_wgrad_accumulation:
            parameter.main_grad = torch.ones_like(parameter)
    x = part.x.to(device, case.dtype).requires_grad_("x" not in frozen)
    call = module
    if case.checkpoint:
        call = lambda x: checkpoint(module, x, use_reentrant=case.checkpoint == "reentrant")  # noqa: E731
    elif case.compiled:
        torch._dynamo.reset()
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, case.autocast) if case.autocast else contextlib.nullcontext():
        found = call(x)
    results = list(found) if isinstance(found, tuple) else [found]
    upstream = [part.dy]
    upstream += [part.dbias] if module.return_bias else []
    upstream += [part.dz] if module.return_layernorm_output else []
    unused = {"y": 0, "z": len(results) - 1}.get(case.unused) if first else None
    chosen = [(r, g) for index, (r, g) in enumerate(zip(results, upstream, strict=True)) if index != unused]
    torch.autograd.backward(*zip(*[(r, g.to(r).view_as(r)) for r, g in chosen if r.requires_grad], strict=True))
    module.backward_dw()
    gradients = {"x": x.grad}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if module.fuse_wgrad_accumulation and name.endswith("weight") and "norm" not in name:
            assert gradient is None
            added = parameter.main_grad - 1
            assert parameter.requires_grad or not added.any()
            gradient = added if parameter.requires_grad else None
        gradients[name] = gradient
    return Found(results, gradients)


def against_one_process(name: str, group: Any, device: str) -> None:
    case = CASES[name]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole = Whole(case, ranks)
    results, gradients = (found[rank] for found in whole.expected())
    found = run(make(case, group, device), case, whole.part(rank), rank == 0, device)
    close = {"rtol": 1e-10, "atol": 1e-10} if case.dtype is torch.float64 else {"rtol": 4e-2, "atol": 0.15}
    y, bias, z = results
    expected = [y]
    expected += [case_bias(bias)] if case.options.get("return_bias") else []
    expected += [z] if case.options.get("return_layernorm_output") else []
    for one, other in zip(found.results, expected, strict=True):
        assert one.dtype is (case.autocast or case.dtype)
        assert_close(one.cpu().double(), other, **close)
    for key, gradient in found.gradients.items():
        kind = "x" if key == "x" else "norm" if "norm" in key else "weight" if key.endswith("weight") else "bias"
        if kind in case.frozen_by(rank == 0):
            assert gradient is None, f"{key} is frozen"
            continue
        assert_close(gradient.cpu().double(), gradients[key], **close, msg=lambda text, key=key: f"{key}: {text}")


def case_bias(bias: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.float64) if bias is None else bias


def raises(error: type[Exception], phrase: str, call: Any) -> None:
    try:
        call()
    except error as caught:
        assert phrase in str(caught), str(caught)  # noqa: PT017
        assert str(caught).startswith("LayerNormLinear: ")  # noqa: PT017
        return
    raise AssertionError(f"{error.__name__} was not raised")
