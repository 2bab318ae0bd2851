"""cunorm.torch.layer_norm_linear is compiled, exported and captured in a CUDA graph."""

from __future__ import annotations

import pytest
from functions import OPS
from linear_reference import NORMALIZATION

torch = pytest.importorskip("torch")

from torch import _dynamo  # noqa: E402
from torch_linear_calls import five, keeping  # noqa: E402
from torch_tensors import compiled_on_devices, on_devices, random  # noqa: E402

from cunorm.torch import layer_norm_linear  # noqa: E402
from cunorm.torch.linear import operators as linear_operators  # noqa: E402


@compiled_on_devices
@keeping
@pytest.mark.parametrize("op", OPS)
def test_compiled_whole(device, keep, op, backend):
    _dynamo.reset()
    inputs = five(device, torch.float32)
    ln_bias = inputs[4] if op == "layer_norm" else None
    wanted = inputs if op == "layer_norm" else inputs[:4]

    def function(x, weight, bias, ln_weight, ln_bias):
        options = {"normalization": NORMALIZATION[op], "keep_normalized": keep}
        return torch.tanh(layer_norm_linear(torch.sin(x), weight, bias, ln_weight, ln_bias, 0.3, **options))

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for rows in (6, 9):
        inputs[0] = random(rows, 16, device=device, dtype=torch.float32).requires_grad_()
        wanted[0] = inputs[0]
        results = []
        for f in (function, compiled):
            y = f(*inputs[:4], ln_bias)
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@on_devices
def test_a_graph_holds_one_operator(device):
    _dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compile(layer_norm_linear, fullgraph=True, backend=backend)(*five(device, torch.float32))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets.count("cunorm.norm_linear.default") == 1
    assert not any("linear" in target and "cunorm" not in target for target in targets)


@on_devices
def test_a_compiled_graph_keeps_x_and_not_z(device):
    """Each pass is one operator: with several, the compiler would keep z instead of computing it again."""
    _dynamo.reset()
    from functorch.compile import aot_function, make_boxed_func

    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    inputs = five(device, torch.float32)

    def function(*inputs):
        return linear_operators.norm_linear(*inputs, "layer_norm", 0.3, torch.float32, False, 0, 0)[0]

    aot_function(function, fw_compiler=keep, bw_compiler=keep)(*inputs).sum().backward()
    forward, backward = graphs
    names = [str(node.target) for node in forward.graph.nodes if node.op == "call_function"]
    assert names.count("cunorm.norm_linear_forward.default") == 1
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    shapes = [tuple(node.meta["val"].shape) for node in output.args[0] if node is not None]
    assert shapes.count((6, 16)) == 1  # it is x
    assert "cunorm.norm_linear_backward.default" in [str(node.target) for node in backward.graph.nodes]


@pytest.mark.slow
@on_devices
def test_opcheck(device):
    x, weight, bias, ln_weight, ln_bias = five(device, torch.float32)
    options = ("layer_norm", 0.3, torch.float32, False, 0, 0)
    torch.library.opcheck(linear_operators.norm_linear, (x, weight, bias, ln_weight, ln_bias, *options))
    given = [t.detach() for t in (x, weight, bias, ln_weight, ln_bias)]
    torch.library.opcheck(linear_operators.norm_linear_forward, (*given, *options))
    transposed = weight.detach().t().contiguous().t()
    with torch.no_grad():
        y, z, statistics, *_ = linear_operators.norm_linear_forward(x, transposed, bias, None, ln_bias, *options)
        for dz, kept, mask in ((None, z, [True] * 5), (z, None, [True, False, True, False, True])):
            saved = (statistics, x.detach(), transposed, None, ln_bias.detach(), kept, None)
            arguments = (y, dz, *saved, mask, *options)
            torch.library.opcheck(linear_operators.norm_linear_backward, arguments)


@on_devices
def test_export(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parameters_ = torch.nn.ParameterList(five(device, torch.float32)[1:])

        def forward(self, x):
            return layer_norm_linear(x, *self.parameters_, 0.3)

    model, x = Model(), random(6, 16, device=device, dtype=torch.float32)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        for rows in (6, 9):
            x = random(rows, 16, device=device, dtype=torch.float32)
            torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.gpu
@keeping
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_captured_training_step_replays(keep, side_by_side, monkeypatch):
    from cunorm.torch.linear import step as module

    monkeypatch.setattr(module, "MOST_EXTRA_BYTES", module.MOST_EXTRA_BYTES if side_by_side else -1)
    inputs = [t.detach().cuda().bfloat16().requires_grad_() for t in five("cpu", rows=(64,))]

    def step():
        for t in inputs:
            t.grad = None
        layer_norm_linear(*inputs, keep_normalized=keep).square().sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = [t.grad for t in inputs]
    for seed in range(3):
        with torch.no_grad():
            inputs[0].copy_(random(64, 16, device="cuda", seed=seed))
        graph.replay()
        replayed = [g.clone() for g in captured]
        step()
        torch.testing.assert_close(replayed, [t.grad for t in inputs])
