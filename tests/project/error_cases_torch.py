"""The table of error_cases.py for calls of cunorm.torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from error_cases import Rows, of_cuda, without
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import cunorm
import cunorm.torch as ours
from cunorm.torch.linear import exchange, float8_arithmetic, parallel, recipes, symmetric
from cunorm.torch.linear import parameters as linear_checks
from cunorm.torch.models.classes import Swaps
from cunorm.torch.norm import checks, gpu

X, ROW, ONE = torch.ones(4, 8), torch.ones(8), torch.ones(())
META = torch.ones(8, device="meta")
SPARSE = torch.ones(4, 8).to_sparse()
WEIGHT = torch.ones(6, 8)
STRIDED = torch.ones(4, 8, dtype=torch.int32)


def wanting(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def linear(**changed: Any) -> Any:
    return ours.layer_norm_linear(**{"input": X, "weight": WEIGHT} | changed)


def module(**changed: Any) -> ours.LayerNormLinear:
    return ours.LayerNormLinear(**{"in_features": 16, "out_features": 16, "device": "cpu"} | changed)


def in_fp8(call: Callable[[], Any]) -> Any:
    with ours.autocast():
        return call()


def of_two_ranks(call: Callable[[], Any]) -> Any:
    """Call in a group of two ranks, where the other rank is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return call()
    finally:
        dist.destroy_process_group()


def column(**changed: Any) -> ours.LayerNormLinear:
    return module(**{"parallel_mode": "column", "tp_group": dist.group.WORLD} | changed)


def split(given: Any, **changed: Any) -> Any:
    """Split a module by LayerNormColwiseParallel."""
    return parallelize_module(given, init_device_mesh("cpu", (2,)), ours.LayerNormColwiseParallel(**changed))


def compared(ranks: list[list[int]], exact: bool = False) -> Any:
    """Compare ranks as one of them does. `ranks` has [rows, columns, dtype, gradients wanted] of each."""

    def gathered(into: torch.Tensor, _: torch.Tensor, **__: Any) -> None:
        into.copy_(torch.tensor(ranks).view(-1))

    size = mock.patch.object(exchange.dist, "get_world_size", return_value=2)
    with mock.patch.object(exchange, "_all_gather", gathered), size:
        rows, cols, _, wanted = ranks[0]
        return exchange.compare(None, rows, cols, torch.float32, torch.device("cpu"), wanted, exact)


def on_a_gpu(error: Exception) -> Any:
    with mock.patch.object(gpu.device, "current", side_effect=error):
        return gpu.properties_of("layer_norm", SimpleNamespace(get_device=lambda: 0, device="cuda:0"))


def with_dtensor() -> Any:
    x = DTensor.from_local(X, init_device_mesh("cpu", (2,)), [Replicate()])
    return ours.add_rms_norm(x, X)


def changed_since() -> Any:
    norm, swaps = torch.nn.LayerNorm(8), Swaps()
    swaps.swap(norm, ours.LayerNorm)
    norm.__class__ = torch.nn.LayerNorm
    swaps.undo()


def second_derivative() -> Any:
    x = wanting(16, 16)
    y = in_fp8(lambda: module()(x))
    return torch.autograd.grad(y.sum(), x, create_graph=True)


def capturing() -> Any:
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        symmetric._refuse_capture(torch.device("cuda"))


def without_fp8() -> Any:
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    with mock.patch.object(recipes, "why_not", return_value="this GPU has no FP8 products"):
        recipes.check_available("layer_norm_linear", tensor)


def core_call(function: str, *arguments: Any, **options: Any) -> Any:
    return getattr(cunorm, function)(*arguments, **options)


class DelayedScaling:
    """A recipe with a name of TransformerEngine's."""


class Float8CurrentScaling:
    """A recipe with a name of TransformerEngine's, and a field that cunorm does not know."""

    def __init__(self):
        self.tomorrow = 1


ROWS: Rows = {
    # The norms.
    "torch: a list": lambda: ours.layer_norm([[1.0]], 8),
    "torch: normalized_shape of text": lambda: ours.layer_norm(X, "8"),
    "torch: eps of text": lambda: ours.add_rms_norm(X, X, eps="1"),
    "torch: sm_margin by another name": lambda: ours.layer_norm(X, 8, sm_margin={"sideways": 1}),
    "torch: normalized_shape of another length": lambda: checks.trailing_axes("layer_norm", X, (7,)),
    "torch: zero_centered_gamma without a weight": lambda: ours.layer_norm(X, 8, zero_centered_gamma=True),
    "torch: a dtype of integers": lambda: checks.output_dtype("layer_norm", torch.int32),
    "torch: integers": lambda: checks.floating("layer_norm", input=STRIDED),
    "torch: a sparse tensor": lambda: checks.layout("layer_norm", "input", SPARSE),
    "torch: weight on another device": lambda: checks.forward("layer_norm", X, 1, META, None, torch.float32),
    "torch: a module without parameters": lambda: ours.LayerNorm(8, elementwise_affine=False, zero_centered_gamma=True),
    "torch: no length": lambda: ours.LayerNorm(),
    "torch: two lengths": lambda: ours.LayerNorm(8, hidden_size=8),
    "torch: two dtypes": lambda: ours.LayerNorm(8, dtype=torch.float32, params_dtype=torch.float32),
    "torch: no CuPy": lambda: on_a_gpu(ImportError("no module named cupy")),
    "torch: CuPy without a driver": lambda: on_a_gpu(of_cuda(importlib.import_module("cupy"))),
    # Tensors in the functions of cunorm.
    "torch: a list beside a tensor": lambda: core_call("layer_norm", X, None, [1.0]),
    "torch: a sparse x": lambda: core_call("layer_norm", SPARSE),
    "torch: out where a gradient is wanted": lambda: core_call("layer_norm", wanting(4, 8), out=torch.empty(4, 8)),
    "torch: FP8 where a gradient is wanted": lambda: core_call("layer_norm_fp8", wanting(4, 8)),
    # Fused operations.
    "torch: x of a fused operation is a list": lambda: ours.add_rms_norm([1.0], X),
    "torch: a residual that is a list": lambda: core_call("add_rms_norm", X, [1.0]),
    "torch: a sparse residual": lambda: core_call("add_rms_norm", X, SPARSE),
    "torch: FP8 of a fused operation where a gradient is wanted": lambda: ours.add_rms_norm.fp8(wanting(4, 8), X),
    "torch: a fused module without parameters": lambda: ours.AddRMSNorm(
        8, elementwise_affine=False, zero_centered_gamma=True
    ),
    "torch: chunk_dim of 2": lambda: ours.AdaLayerNorm(8, 8, chunk_dim=2),
    "torch: names too few": lambda: torch.ops.cunorm.fused_norm(
        X, [X], "rms_norm", "", "xhat", [], [], ["y"], 1e-5, X.dtype, X.dtype, False, 0, 0
    ),
    "torch: a tensor beside a DTensor": lambda: of_two_ranks(with_dtensor),
    # Models.
    "torch: a model that is none": lambda: ours.accelerate(X),
    "torch: norms of no class": lambda: ours.accelerate(torch.nn.LayerNorm(8), norms=["LayerNorm"]),
    "torch: a class that was changed since": changed_since,
    "torch: no package kernels": lambda: without("kernels", ours.kernel_mapping),
    # LayerNormLinear.
    "torch: FP8 output where a gradient is wanted": lambda: in_fp8(lambda: module()(wanting(16, 16), fp8_output=True)),
    "torch: weight that is a list": lambda: linear(weight=[1.0]),
    "torch: weight of one axis": lambda: linear(weight=ROW),
    "torch: input of another length": lambda: linear(input=X[:, 1:]),
    "torch: bias of another length": lambda: linear(bias=ROW),
    "torch: weight of a product on another device": lambda: linear(weight=WEIGHT.to("meta")),
    "torch: ln_weight is missing": lambda: linear(zero_centered_gamma=True),
    "torch: integers with a product": lambda: linear(input=STRIDED, weight=WEIGHT.int()),
    "torch: weight of another dtype": lambda: linear(weight=WEIGHT.double()),
    "torch: second derivatives in FP8": second_derivative,
    "torch: functorch in FP8": lambda: in_fp8(lambda: torch.func.grad(lambda x: module()(x).sum())(torch.ones(16, 16))),
    "torch: float64 in FP8": lambda: in_fp8(lambda: module().double()(torch.ones(16, 16).double())),
    "torch: odd sizes in FP8": lambda: in_fp8(lambda: module(in_features=8)(X)),
    "torch: FP8 that this GPU has not": without_fp8,
    "torch: float64 cast to 8 bits": lambda: float8_arithmetic._name(X.double()),
    "torch: a size of text": lambda: module(in_features="16"),
    "torch: a size of 0": lambda: module(in_features=0),
    "torch: split along rows": lambda: module(parallel_mode="row"),
    "torch: split in another way": lambda: module(parallel_mode="diagonal"),
    "torch: an unknown reduction": lambda: module(symmetric_ar_type="ring"),
    "torch: two overlaps": lambda: linear_checks.check_overlaps(None, True, True),
    "torch: features that do not divide": lambda: linear_checks.local_features(15, "column", 2),
    "torch: fp8_grad": lambda: module()(torch.ones(16, 16), fp8_grad=True),
    "torch: FP8 output without a recipe": lambda: module()(torch.ones(16, 16), fp8_output=True),
    "torch: inp that is a list": lambda: module()([1.0]),
    "torch: inp of another dtype": lambda: module()(torch.ones(16, 16).half()),
    "torch: no parts": lambda: module(parameters_split=()),
    "torch: parts of a number": lambda: module(parameters_split=1),
    "torch: a part twice": lambda: module(parameters_split=("q", "q")),
    "torch: a part without a name": lambda: module(parameters_split={1: 16}),
    "torch: a part of half a row": lambda: module(parameters_split={"q": 16.0}),
    "torch: parts too few": lambda: module(parameters_split={"q": 8}),
    "torch: no main_grad": lambda: module(fuse_wgrad_accumulation=True)(torch.ones(16, 16)),
    "torch: backward_dw without a backward pass": lambda: module(delay_wgrad_compute=True).backward_dw(),
    "torch: a recipe that is refused": lambda: recipes.recognised("autocast", DelayedScaling()),
    "torch: no recipe": lambda: recipes.recognised("autocast", "fp8"),
    "torch: a recipe of tomorrow": lambda: recipes.recognised("autocast", Float8CurrentScaling()),
    "torch: an unknown FP8 format": lambda: ours.Float8CurrentScaling(fp8_format="E3M4"),
    # Over ranks.
    "torch: no process group": lambda: module(parallel_mode="column", tp_group=object()),
    "torch: a group without this rank": lambda: of_two_ranks(
        lambda: parallel.size_of(dist.GroupMember.NON_GROUP_MEMBER)
    ),
    "torch: another tp_size": lambda: of_two_ranks(lambda: column(tp_size=3)),
    "torch: a group of another size": lambda: of_two_ranks(
        lambda: module(parallel_mode="column", tp_size=4).set_tensor_parallel_group(dist.group.WORLD)
    ),
    "torch: no group is set": lambda: module(parallel_mode="column", tp_size=2)(torch.ones(16, 16)),
    "torch: no axis of rows": lambda: of_two_ranks(lambda: column(sequence_parallel=True)(torch.ones(16))),
    "torch: parts that do not divide": lambda: of_two_ranks(lambda: column(parameters_split={"q": 7, "k": 9})),
    "torch: other rows on another rank": lambda: compared([[4, 8, 0, 1], [5, 8, 0, 1]]),
    "torch: gradients on one rank alone": lambda: compared([[4, 8, 0, 1], [4, 8, 0, 0]]),
    "torch: other gradients on another rank": lambda: compared([[4, 8, 0, 1], [4, 8, 0, 9]], exact=True),
    "torch: a captured first call": capturing,
    "torch: another layout of input": lambda: ours.LayerNormColwiseParallel(input_layouts=1),
    "torch: another layout of output": lambda: ours.LayerNormColwiseParallel(output_layouts=1),
    "torch: a Linear is split": lambda: of_two_ranks(lambda: split(torch.nn.Linear(16, 16))),
    "torch: a module with an option is split": lambda: of_two_ranks(lambda: split(module(delay_wgrad_compute=True))),
    "torch: a part is split": lambda: of_two_ranks(lambda: split(column())),
    "torch: rows that do not divide": lambda: of_two_ranks(lambda: split(module(out_features=15))),
    "torch: a batch without a sequence": lambda: of_two_ranks(lambda: split(module())(torch.ones(16, 16))),
}
