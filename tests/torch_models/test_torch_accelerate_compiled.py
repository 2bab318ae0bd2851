"""Under torch.compile, accelerated models have torch's forward passes and our backward passes."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._inductor.compile_fx import compile_fx  # noqa: E402
from torch_models import build, loss_of  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

from cunorm.torch import accelerate  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402
from cunorm.torch.norm import compiled  # noqa: E402


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(accelerate_module, "COMPILED_FROM", 1)
    torch._dynamo.reset()


class Model(nn.Module):
    """Two norms, each of a sum that is read again afterwards."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.first, self.second = nn.LayerNorm(64, elementwise_affine=affine), nn.RMSNorm(64, 1e-6, affine)
        for number, parameter in enumerate((*self.first.parameters(), *self.second.parameters())):
            parameter.data = random(64, dtype=torch.float32, seed=number)

    def forward(self, x):
        x = x + self.linear(x)
        return self.second(self.first(x) + x) * x


def traced(model: nn.Module, *arguments: torch.Tensor) -> tuple[list[torch.fx.GraphModule], torch.Tensor]:
    """Return the graphs of the passes that AOT autograd makes, forward first, and the result."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    y = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*arguments)
    if y.requires_grad:
        y.sum().backward()
    return graphs, y


def operators_of(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@on_devices
def test_the_compiler_sees_torchs_operators_forward_and_our_kernel_backward(device):
    model = Model().to(device)
    report = accelerate(model)
    (forward, backward), _ = traced(model, random(5, 64, dtype=torch.float32, device=device).requires_grad_())
    assert not any("cunorm" in name for name in operators_of(forward))
    assert [name for name in operators_of(backward) if "cunorm" in name] == ["cunorm.fused_norm_backward.default"] * 2
    # Only the backward pass needs mean and rstd in one tensor, and y does not wait for it.
    (joined,) = (node for node in forward.graph.nodes if "aten.cat" in str(node.target))
    assert [user.op for user in joined.users] == ["output"]
    assert "norms of 1 elements, of torch.nn in a CUDA graph any, with our backward pass" in str(report)


def test_without_a_gradient_nothing_of_ours_is_seen():
    model = Model()
    accelerate(model)
    with torch.no_grad():
        (graph,), _ = traced(model, random(5, 64, dtype=torch.float32))
    assert not any("cunorm" in name or "aten.cat" in name for name in operators_of(graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graphed", "devices", "count"),
    [(True, ("cpu",), 2), (True, ("cuda",), 0), (False, ("cpu",), 0)],
    ids=["a CUDA graph", "none of this device", "none"],
)
def test_few_elements_in_a_cuda_graph(monkeypatch, graphed, devices, count):
    """Backward passes are ours in a CUDA graph, as inductor's options say while AOT autograd traces."""
    monkeypatch.setattr(accelerate_module, "COMPILED_FROM", 8 << 20)
    monkeypatch.setattr(compiled, "GRAPHED", devices)
    model, graphs = Model(), []

    def keep(graph, *_, **__):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def inductor(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=keep, config_patches={"triton.cudagraphs": graphed})

    x = random(5, 64, dtype=torch.float32).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), x)
    accelerate(model)
    y = torch.compile(model, fullgraph=True, backend=inductor)(x)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), expected, rtol=1e-4, atol=1e-4)
    forward, backward = map(operators_of, graphs)
    assert not any("cunorm" in name for name in forward)
    assert sum("cunorm.fused_norm_backward" in name for name in backward) == count


@on_devices
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients(device, dtype, affine):
    """Values and gradients are near those of the model in float64."""
    model = Model(affine).to(device, dtype)
    x = random(5, 64, dtype=dtype, device=device).requires_grad_()
    results = []
    for which in (copy.deepcopy(model).double(), model):
        if which is model:
            accelerate(model)
            which = torch.compile(model, fullgraph=True, backend="aot_eager")
        given = x.double() if not results else x
        y = which(given)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *which.parameters()])])
        assert y.dtype is given.dtype
    room = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for exact, result in zip(*results, strict=True):
        error = torch.linalg.vector_norm(result.double() - exact.double())
        assert error <= room * torch.linalg.vector_norm(exact.double())


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_a_model(device, name):
    """A model of transformers is compiled into one graph with the same logits and gradients."""
    model, inputs = build(name, device=device)
    results = []
    for which in (model, None):
        if which is None:
            accelerate(model)
            which = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        loss, logits = loss_of(which, inputs)
        loss.backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(5, 7, 9, 11), (200, 3, 100)])
def test_rows_of_any_number_are_compiled_twice_at_most(rows):
    model = Model()
    accelerate(model)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    for count in rows:
        run(random(count, 64, dtype=torch.float32)).sum().backward()
    assert counter.frame_count == 2


@pytest.mark.slow
def test_too_few_elements_export_and_undo(monkeypatch):
    """With too few elements, in an export and after undo the model runs its own operators."""
    model, x = Model(), random(5, 64, dtype=torch.float32)
    report = accelerate(model)
    program = torch.export.export(model, (x,))
    assert not any("cunorm" in name for name in operators_of(program.graph_module))
    report.undo()
    assert not any("_compiled_from" in vars(module) for module in model.modules())
    monkeypatch.setattr(accelerate_module, "COMPILED_FROM", 64 * 6)
    accelerate(model)
    (_, backward), _ = traced(model, x.requires_grad_())
    assert not any("cunorm" in name for name in operators_of(backward))
    torch._dynamo.reset()
    (_, backward), _ = traced(model, random(6, 64, dtype=torch.float32).requires_grad_())
    assert sum("cunorm" in name for name in operators_of(backward)) == 2
