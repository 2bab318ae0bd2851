"""cunorm.torch.decompositions and ONNX make programs that need none of our operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from functions import OPS

torch = pytest.importorskip("torch")

import torch_plain  # noqa: E402
from torch import _dynamo, nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_tensors import random  # noqa: E402

import cunorm.torch  # noqa: E402
from cunorm.operation import name_of  # noqa: E402
from cunorm.torch.linear import operators as linear_operators  # noqa: E402
from cunorm.torch.norm import operators  # noqa: E402
from cunorm.torch.norm.functional import norm  # noqa: E402

COLS, OUTS = 16, 12


class Called(nn.Module):
    """A module that calls a function of x and of tensors that it holds as buffers."""

    def __init__(self, function: Callable[..., Any], *tensors: Any):
        super().__init__()
        self.function = function
        self.count = len(tensors)
        for index, value in enumerate(tensors):
            self.register_buffer(f"tensor{index}", value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *[getattr(self, f"tensor{index}") for index in range(self.count)])


def of_norm(op: str, centred: bool, dtype: torch.dtype, wants_statistics: bool) -> nn.Module:
    def function(x, weight, bias):
        options = (name_of(op, centred), 1, 1e-3, dtype, wants_statistics, 0, 0)
        return torch_plain.norm(x.sin(), weight, bias if op == "layer_norm" else None, *options)

    return Called(function, *(random(COLS, dtype=torch.float32, seed=seed) for seed in (1, 2)))


def of_linear(op: str) -> nn.Module:
    def function(x, weight, bias, ln_weight, ln_bias):
        ln_bias = ln_bias if op == "layer_norm" else None
        return linear_operators.norm_linear(x.sin(), weight, bias, ln_weight, ln_bias, op, 1e-3, x.dtype, False, 0, 0)

    shapes = ((OUTS, COLS), (OUTS,), (COLS,), (COLS,))
    return Called(function, *(random(*shape, dtype=torch.float32, seed=seed) for seed, shape in enumerate(shapes)))


class Case(NamedTuple):
    what: str
    module: nn.Module


CASES = [
    Case(f"{op}, {what}", of_norm(op, *options))
    for op in OPS
    for what, options in {
        "plain": (False, torch.float32, False),
        "with statistics": (False, torch.float32, True),
        "centred": (True, torch.float32, True),
        "to bfloat16": (False, torch.bfloat16, True),
    }.items()
]
CASES += [Case(f"{op} with its product", of_linear(op)) for op in OPS]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)


def ours(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("cunorm.")]


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    x = random(5, COLS, dtype=torch.float32)
    return torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))


@cases
def test_run_decompositions_of_an_exported_program(case):
    """The exported program has our operator; the decomposed one has torch's, with the same results for any rows."""
    program = exported(case.module)
    assert len(ours(program.graph)) == 1
    decomposed = program.run_decompositions(cunorm.torch.decompositions())
    assert ours(decomposed.graph) == []
    for rows in (5, 9):
        x = random(rows, COLS, dtype=torch.float32, seed=rows)
        for a, b in zip(decomposed.module()(x), case.module(x), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("linear", [False, True])
def test_both_passes_under_aot_autograd(op, linear):
    """A compiler that is given the table sees no operator of ours, in the forward pass or the backward pass."""
    _dynamo.reset()
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    module = (of_linear(op) if linear else of_norm(op, True, torch.float64, True)).double()
    parameters = [buffer.requires_grad_() for buffer in module.buffers()]
    if op == "rms_norm":
        parameters.pop()
    x = random(5, COLS).requires_grad_()

    def gradients(function):
        y = function(x)[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]

    expected = gradients(module)
    for table, seen in (({}, 2), (cunorm.torch.decompositions(), 0)):
        _dynamo.reset()
        graphs.clear()
        backend = aot_autograd(fw_compiler=compiler, decompositions=table)
        torch.testing.assert_close(gradients(torch.compile(module, backend=backend, fullgraph=True)), expected)
        assert len(graphs) == 2
        assert sum(len(ours(graph)) for graph in graphs) == seen


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(5, COLS), (COLS,), (0, COLS), (2, 3, COLS)], ids=str)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
def test_the_backward_operator(op, shape, mask):
    """Results have the operator's shapes, dtypes and strides, and none of them is an input's memory."""
    dy = random(*shape, dtype=torch.float32)
    x, weight = random(*shape, seed=1).bfloat16(), random(COLS, seed=2).half()
    _, statistics = torch_plain.norm_forward(x, None, None, op, 1, 1e-3, x.dtype, True)
    mask = [*mask[:2], mask[2] and op == "layer_norm"]

    def function(dy, x, statistics, weight):
        gradients = torch_plain.norm_backward(dy, x, statistics, weight, name_of(op, True), 1e-3, mask)
        return [gradient for gradient in gradients if gradient is not None]

    tensors = (dy, x, statistics, weight)
    graph = make_fx(function, decomposition_table=cunorm.torch.decompositions())(*tensors)
    assert ours(graph.graph) == []
    memory = {t.data_ptr() for t in tensors if t.numel()}
    for results in (graph(*tensors), function(*tensors)):
        assert not memory & {result.data_ptr() for result in results if result.numel()}
    for a, b in zip(graph(*tensors), function(*tensors), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_the_table_is_the_callers_own():
    """Nothing is registered with torch, so only those who pass the table have our operators decomposed."""
    table = cunorm.torch.decompositions()
    assert {operator.namespace for operator in table} == {"cunorm"}
    assert set(table).isdisjoint(torch._decomp.decomposition_table)
    # torch decomposes operators that have no kernel of their own into the operators of the kernels.
    composite = {operators.fused_norm, linear_operators.norm_linear}
    assert set(table) & set(torch.export.default_decompositions()) <= composite
    table.clear()
    assert len(cunorm.torch.decompositions()) == 6


# ONNX.

# A decomposed program has torch's operators only, so it is enough that each option meets one of the norms.
FOR_ONNX = [
    case
    for case in CASES
    if "product" in case.what
    or case.what in ("layer_norm, with statistics", "layer_norm, centred", "rms_norm, plain", "rms_norm, to bfloat16")
]


def onnx_program(*arguments: Any) -> Any:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    return torch.onnx.export(*arguments, dynamo=True, verbose=False)


def nodes(program: Any) -> list[str]:
    """Return the operators of a program, which must all be ONNX's own."""
    assert all(node.domain == "" for node in program.model.graph)
    return [node.op_type for node in program.model.graph]


def results(program: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a program by onnx's own evaluator, which computes in NumPy."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(program.model_proto)
    return [torch.from_numpy(y) for y in evaluator.run(None, {evaluator.input_names[0]: x.numpy()})]


MODULES = {
    "LayerNorm": cunorm.torch.LayerNorm(COLS),
    "LayerNorm, centred": cunorm.torch.LayerNorm(COLS, zero_centered_gamma=True),
    "RMSNorm": cunorm.torch.RMSNorm(COLS),
    "LayerNormLinear": cunorm.torch.LayerNormLinear(COLS, OUTS, device="cpu"),
    "LayerNormLinear of an RMSNorm": cunorm.torch.LayerNormLinear(COLS, OUTS, normalization="RMSNorm", device="cpu"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_modules_become_onnx(name):
    """Modules need no help of the caller, and compute the same in ONNX."""
    x = random(5, COLS, dtype=torch.float32)
    program = onnx_program(MODULES[name], (x,))
    assert nodes(program)
    (y,) = results(program, x)
    torch.testing.assert_close(y, MODULES[name](x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("centred", [False, True])
def test_tensors_of_a_gpu_become_onnx(op, centred):
    """A trace for ONNX has torch's operator, where any other trace has ours."""
    with FakeTensorMode():
        x, weight = torch.ones(5, COLS, device="cuda"), torch.ones(COLS, device="cuda")
    module = Called(lambda x, weight: norm(name_of(op, centred), x, (COLS,), weight, None, 1e-5, None, 0))
    module.forward = module.function
    with torch.no_grad():
        assert len(ours(torch.export.export(module, (x, weight)).graph)) == 1
        program = onnx_program(module, (x, weight))
    assert ("LayerNormalization" in nodes(program)) == (op == "layer_norm")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_rms_norm_becomes_onnx_where_torch_has_a_kernel():
    """torch's norm is then aten._fused_rms_norm, of which torch 2.11 has no ONNX function."""
    with FakeTensorMode():
        x, weight = torch.ones(5, COLS, device="cuda"), torch.ones(COLS, device="cuda")
    module = Called(lambda x, weight: norm("rms_norm", x, (COLS,), weight, None, 1e-5, None, 0))
    module.forward = module.function
    with torch.library._scoped_library("aten", "IMPL") as library, torch.no_grad():
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
            library.impl("_fused_rms_norm", lambda *_: None, "CUDA")  # as a build for CUDA has one; it is never run
        assert "ReduceMean" in nodes(onnx_program(module, (x, weight)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_modules_on_a_gpu_become_onnx(name):
    module = copy.deepcopy(MODULES[name]).cuda()
    x = random(5, COLS, device="cuda", dtype=torch.float32)
    (y,) = results(onnx_program(module, (x,)), x.cpu())
    torch.testing.assert_close(y, module(x).detach().cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FOR_ONNX, ids=lambda case: case.what)
def test_an_exported_program_becomes_onnx_once_it_is_decomposed(case):
    program = onnx_program(exported(case.module).run_decompositions(cunorm.torch.decompositions()))
    assert nodes(program)
    x = random(5, COLS, dtype=torch.float32)
    expected = case.module(x)
    if expected[0].dtype is not torch.bfloat16:  # a dtype that NumPy lacks
        torch.testing.assert_close(results(program, x), list(expected), rtol=1e-5, atol=1e-5)
