"""LayerNormLinear over the ranks of a group is compared with torch's own operators on all rows and the whole weight.

Every rank computes the whole by itself in float64, by autograd, and compares its own part.
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

GROUPS: dict[int, Any] = {}  # groups of the first ranks, by the number of ranks
COLS, OUTS, EPS = 8, 24, 0.3
OVERLAPS = ("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_rs_dgrad")


class Case(NamedTuple):
    options: Mapping[str, Any] = MappingProxyType({})  # the module's options
    sequence: bool = True
    shape: tuple[int, ...] = (12,)  # the shape of x on all ranks together, without its columns
    frozen: tuple[str, ...] = ()  # "weight", "bias", "norm", "x"
    alone: bool = False  # only the first rank freezes them
    unused: str = ""  # the result, "y" or "z", that the first rank does not use
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
    """The rows of x, the parameters and the gradients of results that one rank is given, in float64."""

    x: Tensor
    state: dict[str, Tensor]
    dy: Tensor
    dz: Tensor
    dbias: Tensor  # the gradient of a bias that is returned


class Whole:
    """All rows and the whole weight, the part of each rank, and its expected results and gradients."""

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
        # Where every rank has all rows, all ranks must have the same gradient of z.
        of_rank = [self.x.shape if gathered or not case.sequence else self._rows(self.x, 0).shape] * ranks
        self.dz = [normal(*shape) for shape in of_rank] if case.sequence else [normal(*self.x.shape)] * ranks

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(self.ranks)[rank] if self.case.sequence and len(tensor) else tensor

    def _outs(self, rank: int) -> dict[str, slice]:
        """Return the rows of the whole weight that a rank has, by the names of the weight's parts."""
        split = self.case.options.get("parameters_split") or {"": OUTS}
        outs, start = {}, 0
        for name, size in split.items():
            own = size // self.ranks
            outs[name.rstrip("_")] = slice(start + rank * own, start + (rank + 1) * own)
            start += size
        return outs

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
        """Return the results (y, bias, z) of each rank, and the gradients of each rank by name."""
        case, options, ranks = self.case, self.case.options, range(self.ranks)
        # Each rank has its own leaves of the norm, so that their gradients are sums over the rows of that rank.
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
            ln_weight, ln_bias = norms[rank if case.sequence else 0]
            own = {"x": self._rows(x.grad, rank), "layer_norm_weight": ln_weight.grad}
            if ln_bias is not None:
                own["layer_norm_bias"] = ln_bias.grad
            for name, outs in self._outs(rank).items():
                prefix = f"{name}_" if name else ""
                own[prefix + "weight"] = weight.grad[outs]
                if bias is not None:
                    own[prefix + "bias"] = bias.grad[outs]
            gradients.append(own)
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


class Passes(NamedTuple):
    results: list[Tensor]  # those of y, bias and z that are returned
    gradients: dict[str, Tensor | None]


def run(module: LayerNormLinear, case: Case, part: Part, first: bool, device: str) -> Passes:
    """Run one forward and backward pass of this rank."""
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
        results = call(x)
    results = list(results) if isinstance(results, tuple) else [results]
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
    return Passes(results, gradients)


def against_one_process(name: str, group: Any, device: str) -> None:
    case = CASES[name]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole = Whole(case, ranks)
    (y, bias, z), expected_gradients = (of_ranks[rank] for of_ranks in whole.expected())
    passes = run(make(case, group, device), case, whole.part(rank), rank == 0, device)
    close = {"rtol": 1e-10, "atol": 1e-10} if case.dtype is torch.float64 else {"rtol": 4e-2, "atol": 0.15}
    expected = [y]
    if case.options.get("return_bias"):
        expected.append(torch.empty(0, dtype=torch.float64) if bias is None else bias)
    if case.options.get("return_layernorm_output"):
        expected.append(z)
    for result, expected_result in zip(passes.results, expected, strict=True):
        assert result.dtype is (case.autocast or case.dtype)
        assert_close(result.cpu().double(), expected_result, **close)
    for key, gradient in passes.gradients.items():
        kind = "x" if key == "x" else "norm" if "norm" in key else "weight" if key.endswith("weight") else "bias"
        if kind in case.frozen_by(rank == 0):
            assert gradient is None, f"{key} is frozen"
            continue
        expected_gradient = expected_gradients[key]
        assert_close(gradient.cpu().double(), expected_gradient, **close, msg=lambda text, key=key: f"{key}: {text}")


def raises(error: type[Exception], phrase: str, call: Any) -> None:
    try:
        call()
    except error as caught:
        assert phrase in str(caught), str(caught)  # noqa: PT017
        assert str(caught).startswith("LayerNormLinear: ")  # noqa: PT017
        return
    raise AssertionError(f"{error.__name__} was not raised")
