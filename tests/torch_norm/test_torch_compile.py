"""Calls under torch.compile, export, CUDA graphs and symbolic traces."""

from __future__ import annotations

import pytest
from functions import OPS

torch = pytest.importorskip("torch")

import torch_plain  # noqa: E402
from torch import _dynamo  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

import cunorm.torch  # noqa: E402
from cunorm.torch import LayerNorm, RMSNorm, layer_norm  # noqa: E402
from cunorm.torch.norm import formulas, operators  # noqa: E402

COLS = 64
MODULES = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


@pytest.fixture(autouse=True)
def _forget_graphs():
    _dynamo.reset()


def fake(*shape, dtype=torch.bfloat16):
    """Return a CUDA tensor without memory, which any machine can make inside a FakeTensorMode."""
    return torch.empty(*shape, device="cuda", dtype=dtype)


def gradients(function, x, parameters):
    y = function(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("op", OPS)
def test_compiled_module_without_recompiling_for_other_rows(device, op):
    module = MODULES[op](COLS, device=device)
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    for rows in (50, 7, 333, 1000):
        x = random(rows, COLS, device=device, dtype=torch.float32).requires_grad_()
        torch.testing.assert_close(
            gradients(compiled, x, module.parameters()),
            gradients(module, x, module.parameters()),
            rtol=1e-4,
            atol=1e-4,
        )
        frames = frames or counter.frame_count  # a first call may take two attempts
    assert counter.frame_count == frames


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_rows_become_dynamic_by_themselves(op):
    """The second number of rows makes the graph dynamic; no further one compiles."""
    module = MODULES[op](COLS, device="cuda")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for rows in (50, 7, 333, 1000, 5):
        compiled(random(rows, COLS, device="cuda", dtype=torch.float32))
    assert counter.frame_count == 2


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.slow
def test_the_operator_between_others_under_inductor(device, op):
    """The kernels are one call in the middle of what inductor fuses, and gradients go through it."""
    x = random(50, COLS, device=device, dtype=torch.float32).requires_grad_()
    weight = random(COLS, device=device, dtype=torch.float32).requires_grad_()

    def function(x):
        options = (op, 1, 1e-5, x.dtype, True, 0, 0)
        return torch.tanh(torch_plain.norm(torch.sin(x), weight, None, *options)[0]) * 2

    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, x, [weight]), gradients(function, x, [weight]), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_a_graph_holds_the_operator(op, grad):
    """The graph's operator returns statistics only where a gradient is wanted."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    module = MODULES[op](COLS, device="cuda")
    with torch.set_grad_enabled(grad):
        torch.compile(module, fullgraph=True, backend=backend)(torch.ones(4, COLS, device="cuda"))
    (node,) = (node for node in graphs[0].graph.nodes if "norm" in str(node.target))
    assert node.target is operators.fused_norm
    assert node.args[11] is grad


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fake_tensors_need_no_gpu(op, dtype):
    from cunorm.torch.norm.functional import norm

    with FakeTensorMode():
        # No autograd: its engine asks a torch without CUDA for a stream.
        x, weight = fake(3, 5, COLS), fake(COLS, dtype=torch.float32)
        y = norm(op, x, (COLS,), weight, None, 1e-5, dtype, 0)
        assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype or x.dtype, "cuda")
        y, statistics = torch_plain.norm_forward(x, weight, None, op, 1, 1e-5, x.dtype, True)
        assert statistics.shape == (2 if op == "layer_norm" else 1, 3, 5)
        mask = [True, True, False]
        dx, dweight, _ = torch_plain.norm_backward(y, x, statistics, weight, op, 1e-5, mask)
        assert (dx.shape, dx.dtype, dweight.shape, dweight.dtype) == (x.shape, x.dtype, weight.shape, weight.dtype)
        with pytest.raises(RuntimeError, match=r"weight must have shape \(64,\)"):
            norm(op, x, (COLS,), fake(COLS - 1), None, 1e-5, dtype, 0)
        with pytest.raises(NotImplementedError, match="x must have dtype"):
            norm(op, fake(3, COLS, dtype=torch.int32), (COLS,), None, None, 1e-5, torch.float32, 0)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strict", [True, False])
def test_export(device, op, strict):
    module = MODULES[op](COLS, device=device)
    x = random(6, COLS, device=device, dtype=torch.float32)
    rows = torch.export.Dim("rows")
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},), strict=strict)
        exported = program.module()
        for count in (6, 9):
            x = random(count, COLS, device=device, dtype=torch.float32)
            torch.testing.assert_close(exported(x), module(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("cunorm.fused_norm.default" in target for target in targets) == (device == "cuda")


@on_devices
def test_make_fx_sees_both_passes(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = random(5, COLS, device=device)

    def function(x):
        x = x.detach().requires_grad_()
        options = ("layer_norm", 1, 1e-5, x.dtype, True, 0, 0)
        call = torch_plain.norm(x, None, None, *options)[0] if device == "cpu" else layer_norm(x, (COLS,))
        return torch.autograd.grad(call.square().sum(), x)[0]

    graph = make_fx(function)(x)
    other = random(5, COLS, device=device, seed=4)
    torch.testing.assert_close(graph(other), function(other))
    targets = [node.target for node in graph.graph.nodes]
    assert operators.fused_norm_forward in targets
    assert operators.fused_norm_backward in targets


def test_the_operator_without_statistics_can_be_differentiated():
    """A graph that was exported for inference may be trained after all."""
    x = random(3, 8).requires_grad_()
    for op in OPS:
        y = torch_plain.norm(x, None, None, op, 1, 0.1, x.dtype, False)[0]
        statistics = torch_plain.statistics_of(op, x, 1, 0.1)
        expected = formulas.affine(op, x, statistics, None, None)
        torch.testing.assert_close(
            torch.autograd.grad(y.pow(3).sum(), x), torch.autograd.grad(expected.pow(3).sum(), x)
        )


# CUDA graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [64, 1000, 65536])
def test_graphed_callables(op, cols):
    module = MODULES[op](cols, device="cuda")
    sample = random(8, cols, device="cuda", dtype=torch.float32).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(MODULES[op](cols, device="cuda"), (sample,))
    graphed.load_state_dict(module.state_dict())
    for seed in range(3):
        x = random(8, cols, device="cuda", dtype=torch.float32, seed=seed).requires_grad_()
        for a, b in zip(
            gradients(graphed, x, graphed.parameters()), gradients(module, x, module.parameters()), strict=True
        ):
            assert same(a.detach(), b.detach())


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_captured_training_step_replays(op):
    module = MODULES[op](512, device="cuda", dtype=torch.bfloat16)
    x = random(64, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def step():
        for tensor in (x, *module.parameters()):
            tensor.grad = None
        module(x).square().sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = [x.grad, *(p.grad for p in module.parameters())]
    for seed in range(3):
        with torch.no_grad():
            x.copy_(random(64, 512, device="cuda", seed=seed))
        graph.replay()
        replayed = [g.clone() for g in captured]
        step()
        assert all(same(a, b.grad) for a, b in zip(replayed, (x, *module.parameters()), strict=True))
        x.grad = None


@pytest.mark.gpu
def test_reduce_overhead_mode():
    module = LayerNorm(256, device="cuda")
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        x = random(32, 256, device="cuda", dtype=torch.float32, seed=seed).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        a = [t.clone() for t in gradients(compiled, x, module.parameters())]
        torch.testing.assert_close(a, gradients(module, x, module.parameters()), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_the_current_stream_of_torch():
    """A side stream writes x after a delay; both passes on that stream see what it wrote."""
    import cupy
    from busy import spin

    x = torch.zeros(64, 1000, device="cuda")
    source = random(64, 1000, device="cuda", dtype=torch.float32)
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    expected = layer_norm(source, (1000,), weight)
    expected_gradient = torch.autograd.grad(expected.square().sum(), weight)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with cupy.cuda.ExternalStream(stream.cuda_stream):
            spin(50)
        x.copy_(source)
        y = layer_norm(x, (1000,), weight)
        gradient = torch.autograd.grad(y.square().sum(), weight)[0]
    stream.synchronize()
    assert same(y.detach(), expected.detach())
    assert same(gradient, expected_gradient)


# torch.fx.symbolic_trace, for which torch.nn's norms are leaves.


class Calls(torch.nn.Module):
    """A call of functions and modules on (x, y)."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.members = torch.nn.ModuleList(modules)

    def forward(self, x, y):
        return self.function(x, y, *self.members)


SYMBOLIC = {
    "LayerNorm": Calls(lambda x, y, norm: norm(x) + y, LayerNorm(COLS)),
    "LayerNorm with options": Calls(
        lambda x, y, norm: norm(x) + y, LayerNorm(COLS, zero_centered_gamma=True, autocast_output=True)
    ),
    "RMSNorm": Calls(lambda x, y, norm: norm(x) + y, RMSNorm(COLS)),
    "LayerNormLinear": Calls(lambda x, y, norm: norm(x) @ y.mT, cunorm.torch.LayerNormLinear(COLS, COLS, device="cpu")),
    "AddLayerNorm": Calls(lambda x, y, norm: norm(x, y), cunorm.torch.AddLayerNorm(COLS)),
    "AddRMSNorm": Calls(lambda x, y, norm: norm(x, y), cunorm.torch.AddRMSNorm(COLS)),
    "RMSNormGated": Calls(lambda x, y, norm: norm(x, y), cunorm.torch.RMSNormGated(COLS)),
    "RMSNormGated in groups": Calls(lambda x, y, norm: norm(x, y), cunorm.torch.RMSNormGated(COLS, group_size=16)),
    "AdaLayerNorm": Calls(
        lambda x, y, norm: norm(x, temb=y.mean(1)), cunorm.torch.AdaLayerNorm(COLS, None, 2 * COLS, chunk_dim=1)
    ),
    "layer_norm": Calls(lambda x, y: layer_norm(x, (COLS,), y[0, 0])),
    "rms_norm": Calls(lambda x, y: cunorm.torch.rms_norm(x, (COLS,), y[0, 0])),
    "layer_norm_linear": Calls(lambda x, y: cunorm.torch.layer_norm_linear(x, y[0])),
    "layer_norm_modulate": Calls(lambda x, y: cunorm.torch.layer_norm_modulate(x, y[:, 0], y[:, 1])),
    "rms_norm_modulate": Calls(lambda x, y: cunorm.torch.rms_norm_modulate(x, y[:, 0], y[:, 1])),
    "gate_add_layer_norm_modulate": Calls(
        lambda x, y: cunorm.torch.gate_add_layer_norm_modulate(x, y, y[:, 0], y[:, 1], y[:, 2])
    ),
    "layer_norm_add": Calls(lambda x, y: cunorm.torch.layer_norm_add(x, y)),
    "rms_norm_add_rms_norm": Calls(lambda x, y: cunorm.torch.rms_norm_add_rms_norm(x, y)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_trace(name):
    x, y = (random(2, 3, COLS, dtype=torch.float32, seed=seed) for seed in (0, 1))
    traced = torch.fx.symbolic_trace(SYMBOLIC[name])
    torch.testing.assert_close(traced(x, y), SYMBOLIC[name](x, y))
    leaves = [node for node in traced.graph.nodes if node.op == "call_module"]
    ours = [node for node in traced.graph.nodes if getattr(node.target, "__module__", "").startswith("cunorm.")]
    assert ours or leaves


class OwnNorm(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("change", [cunorm.torch.replace_norms, cunorm.torch.accelerate])
def test_symbolic_trace_of_a_changed_model(change):
    model = torch.nn.Sequential(torch.nn.LayerNorm(COLS), OwnNorm(), torch.nn.RMSNorm(COLS))
    x = random(2, 3, COLS, dtype=torch.float32)
    expected = model(x)
    change(model)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected)
