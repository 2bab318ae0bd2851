"""Fused operations of tensors under derivatives, functorch, compile and export, and expressions that are refused."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from fusion_cases import CASES, make  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_fused import example, leaves  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

import cunorm  # noqa: E402
from cunorm.expression import silu  # noqa: E402
from cunorm.torch import AddRMSNorm, add_rms_norm, decompositions  # noqa: E402
from cunorm.torch.norm import operators  # noqa: E402

FUSED = {name: CASES[name] for name in ("add_layer_norm", "gate", "both", "modulated")}


def by_operator(name: str):
    """Return the function of `example` by the operator, and the options of the operator."""
    op = FUSED[name].op
    _, operands, _ = leaves(make(FUSED[name], (3, 2, 8), "float64"), "cpu")
    numbers = {name: operand for name, operand in operands.items() if not isinstance(operand, torch.Tensor)}
    names = [name for name in operands if name not in numbers]
    operation = op.operation
    options = [operation.norm, operation.prologue.text if operation.prologue else "", operation.epilogue.text]
    options += [
        [*names, *numbers],
        [*numbers.values()],
        [*operation.returns],
        0.1,
        torch.float64,
        torch.float64,
        True,
        0,
        0,
    ]

    def function(x, *tensors):
        y, s, _ = operators.fused_norm(x, list(tensors), *options)
        results = tuple({"y": y, "s": s}[name] for name in operation.returns)
        return results if len(results) > 1 else results[0]

    return function, options


@on_devices
@pytest.mark.parametrize("name", FUSED)
def test_first_and_second_derivatives(device, name):
    function, tensors = example(name, device=device)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", FUSED)
def test_derivatives_of_the_operator(device, name):
    _, tensors = example(name, device=device)
    function, _ = by_operator(name)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", FUSED)
def test_opcheck(device, name):
    _, tensors = example(name, device=device)
    _, options = by_operator(name)
    x, *operands = tensors
    torch.library.opcheck(operators.fused_norm, (x, operands, *options))
    x, *operands = [tensor.detach() for tensor in tensors]
    y, s, statistics = operators.fused_norm_forward(x, operands, *options)
    torch.library.opcheck(operators.fused_norm_forward, (x, operands, *options))
    s = s if "s" in options[5] else None
    dtypes = ["float64"] * len(tensors)
    # The gradients of x and of residual may be the same tensor, so only that of x is wanted.
    wanted = [name != "residual" for name in ("x", *options[3][: len(operands)])]
    given = (y.cos(), None if s is None else s.cos(), x, operands, s, statistics, *options[:7], torch.float64, dtypes)
    torch.library.opcheck(operators.fused_norm_backward, (*given, wanted, 0))


def test_results_are_not_the_memory_of_inputs():
    """Here s is equal to x, and the gradient of z to dy, but neither shares its memory."""
    op = cunorm.fuse("rms_norm", prologue=lambda x, r: x + 0 * r, epilogue=lambda xhat, z: xhat + z, returns=("y", "s"))
    x, r, z = (random(3, 8, seed=seed).requires_grad_() for seed in range(3))
    (y, s), saved = op.forward(x, r=r, z=z)
    dy, ds = random(3, 8, seed=4), random(3, 8, seed=5)
    results = [*op.backward(saved, dy, ds).values(), y, s]
    assert not {tensor.data_ptr() for tensor in (x, r, z, dy, ds)} & {result.data_ptr() for result in results}
    options = ("x + 0 * r", "xhat + z", ["r", "z"], [], ["y", "s"], 1e-5, x.dtype, x.dtype, True, 0, 0)
    torch.library.opcheck(operators.fused_norm, (x, [r, z], "rms_norm", *options))


@pytest.mark.parametrize("name", FUSED)
def test_functorch(name):
    function, tensors = example(name)
    tensors = [tensor.detach() for tensor in tensors]
    operator, _ = by_operator(name)

    def loss(function):
        def scalar(*tensors):
            results = function(*tensors)
            return sum(result.pow(3).sum() for result in (results if isinstance(results, tuple) else (results,)))

        return scalar

    results = []
    for called in (function, operator):
        each = tuple(range(len(tensors)))
        batched = torch.func.vmap(torch.func.grad(loss(called), each), (0, *[None] * (len(tensors) - 1)))
        stacked = torch.stack([tensors[0], tensors[0] + 1])
        results.append([torch.func.grad(loss(called), each)(*tensors), batched(stacked, *tensors[1:])])
    torch.testing.assert_close(*results)
    _, tangent = torch.func.jvp(loss(function), tuple(tensors), tuple(map(torch.ones_like, tensors)))
    slopes = sum(gradient.sum() for gradient in results[0][0])
    torch.testing.assert_close(tangent, slopes)


@pytest.mark.parametrize("name", FUSED)
def test_batched_cotangents_of_an_eager_graph(name):
    _, tensors = example(name)
    function, _ = by_operator(name)
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    cotangents = [random(4, *result.shape, seed=seed) for seed, result in enumerate(results)]
    batched = torch.autograd.grad(results, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    singly = [
        torch.autograd.grad(results, tensors, list(sample), retain_graph=True)
        for sample in zip(*cotangents, strict=True)
    ]
    torch.testing.assert_close(batched, tuple(torch.stack(gradients) for gradients in zip(*singly, strict=True)))


class Block(torch.nn.Module):
    """A pre-norm block's two norms."""

    def __init__(self, cols: int, device: str, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(cols, device=device, dtype=dtype))
        self.gated = cunorm.fuse("layer_norm", epilogue=lambda xhat, z, weight: xhat * weight * silu(z))

    def forward(self, x, residual):
        y, s = add_rms_norm(x, residual, self.weight, 1e-5)
        return self.gated(torch.tanh(y), z=s, weight=self.weight) + s


def gradients_of(function, *tensors, parameters=()):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), [*leaves, *parameters])]


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_without_recompiling_for_other_rows(device, backend):
    torch._dynamo.reset()
    block = Block(64, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    for rows in (50, 7, 333):
        tensors = [random(rows, 64, device=device, dtype=torch.float32, seed=seed) for seed in range(2)]
        gradients, expected = (gradients_of(f, *tensors, parameters=[block.weight]) for f in (compiled, block))
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


@pytest.mark.slow
@on_devices
def test_compiled_with_vectors_for_samples(device):
    """One compiled graph serves any number of samples and any length of them."""
    torch._dynamo.reset()
    op = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift)

    def function(x, scale, shift):
        return op(x, scale=scale[:, None], shift=shift[:, None])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    for samples, rows in ((3, 7), (4, 9), (5, 3)):
        tensors = [random(*shape, 64, device=device) for shape in ((samples, rows), (samples,), (samples,))]
        torch.testing.assert_close(gradients_of(compiled, *tensors), gradients_of(function, *tensors))
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("strict", [True, False])
def test_exported_and_loaded(device, strict, tmp_path):
    block = Block(64, device)
    tensors = [random(6, 64, device=device, dtype=torch.float32, seed=seed) for seed in range(2)]
    rows = torch.export.Dim("rows")
    with torch.no_grad():
        program = torch.export.export(block, tuple(tensors), dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2")
    assert sum("cunorm.fused_norm.default" in str(node.target) for node in loaded.graph.nodes) == 2
    tensors = [random(9, 64, device=device, dtype=torch.float32, seed=seed) for seed in range(2)]
    torch.testing.assert_close(loaded.module()(*tensors), block(*tensors))
    decomposed = loaded.run_decompositions(decompositions())
    assert not any("cunorm" in str(node.target) for node in decomposed.graph.nodes)
    torch.testing.assert_close(decomposed.module()(*tensors), block(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fake_tensors_need_no_gpu(dtype):
    with FakeTensorMode():
        x, residual = (torch.empty(4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight, short = (torch.empty(cols, device="cuda") for cols in (64, 60))
        y, s = add_rms_norm(x, residual, weight, dtype=dtype, s_dtype=torch.float32)
        assert (y.dtype, s.dtype, s.shape, s.device.type) == (dtype or x.dtype, torch.float32, (4, 64), "cuda")
        with pytest.raises(RuntimeError, match="weight must have the shape of the last axis of x"):
            add_rms_norm(x, residual, short, dtype=dtype)


@on_devices
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(device, use_reentrant):
    block = Block(64, device)
    tensors = [random(6, 64, device=device, dtype=torch.float32, seed=seed) for seed in range(2)]

    def again(*tensors):
        return torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=use_reentrant)

    leaves = [*(tensor.requires_grad_() for tensor in tensors), block.weight]
    results = []
    for function in (again, block):
        y = function(*leaves[:2])
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_a_module_becomes_onnx():
    pytest.importorskip("onnxscript")
    tensors = tuple(random(2, 8, dtype=torch.float32, seed=seed) for seed in range(2))
    program = torch.onnx.export(AddRMSNorm(8).eval(), tensors, dynamo=True, verbose=False)
    assert {node.domain for node in program.model.graph} == {""}


# Expressions that somebody else wrote.

TEXTS = [
    ("x + residual; asm(1)", "xhat", "expression is wrong at position 12"),
    ("x + residual", "xhat * __expf(weight)", "there is no function '__expf'"),
    ("x + residual", "xhat * weight } extern int i {", "no such symbol"),
    ("x + residual", "xhat * mean", "there is no name 'mean'"),
    ("x + residual", "", "a number, a name or"),
]


@on_devices
@pytest.mark.parametrize(("prologue", "epilogue", "message"), TEXTS, ids=[message for *_, message in TEXTS])
def test_a_text_that_is_not_of_the_grammar_is_refused(device, prologue, epilogue, message):
    x, residual, weight = (random(*shape, device=device) for shape in ((3, 8), (3, 8), (8,)))
    options = (prologue, epilogue, ["residual", "weight"], [], ["y", "s"], 1e-5, x.dtype, x.dtype, True, 0, 0)
    for call in (operators.fused_norm, operators.fused_norm_forward):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(x, [residual, weight], "rms_norm", *options)


@pytest.mark.parametrize("change", ["norm", "name", "returns", "count"])
def test_other_arguments_from_elsewhere_are_refused(change):
    x, weight = random(3, 8), random(8)
    norm, epilogue, names, returns = "rms_norm", "xhat * weight", ["weight"], ["y"]
    norm = "batch_norm" if change == "norm" else norm
    if change == "name":
        epilogue, names = "xhat * mean", ["mean"]
    returns = ["y", "s"] if change == "returns" else returns
    names = [*names, "bias"] if change == "count" else names
    with pytest.raises((ValueError, RuntimeError)):
        operators.fused_norm_forward(
            x, [weight], norm, "", epilogue, names, [], returns, 1e-5, x.dtype, x.dtype, True, 0, 0
        )
