"""Dropout of tensors: every kind of call drops what NumPy's generator drops, and modules draw their seeds."""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

import cunorm  # noqa: E402
from cunorm.expression.philox import uniform  # noqa: E402
from cunorm.torch import AddLayerNorm, AddRMSNorm, add_layer_norm, add_rms_norm  # noqa: E402
from cunorm.torch.norm import dispatch  # noqa: E402

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())
P = 0.25
FUNCTIONS = {"layer_norm": add_layer_norm, "rms_norm": add_rms_norm}
both_norms = pytest.mark.parametrize("norm", FUNCTIONS)


def given(norm, device, *shape):
    count = 2 if norm == "layer_norm" else 1
    shapes = (shape, shape, *[shape[-1:]] * count)
    return [random(*size, device=device, seed=i).requires_grad_() for i, size in enumerate(shapes)]


def seed_of(device, number=7):
    return torch.tensor([number], device=device)


def call(norm, tensors, seed):
    x, residual, *parameters = tensors
    return FUNCTIONS[norm](x, residual, *parameters, eps=1e-3, dropout_p=P, seed=seed)


def masked(norm, tensors, seed):
    """Return the results of the function without dropout, on x times a mask."""
    x, residual, *parameters = tensors
    mask = uniform(numpy.int64(int(seed)), tuple(x.shape), numpy) >= P
    factor = torch.tensor(mask / (1 - P), dtype=x.dtype, device=x.device)
    return FUNCTIONS[norm](x * factor, residual, *parameters, eps=1e-3)


def cotangents_of(results):
    return [random(*result.shape, device=result.device, seed=7 + i) for i, result in enumerate(results)]


def gradients(results, tensors, **options):
    return torch.autograd.grad(results, tensors, cotangents_of(results), **options)


def check(norm, tensors):
    seed = seed_of(tensors[0].device)
    results, expected = call(norm, tensors, seed), masked(norm, tensors, seed)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients(results, tensors), gradients(expected, tensors))


@on_devices
@both_norms
def test_values_and_gradients_are_those_of_a_mask(device, norm):
    check(norm, given(norm, device, 2, 3, 40))
    x, residual = (tensor.detach() for tensor in given(norm, device, 2, 3, 40)[:2])
    (_, s), saved = getattr(cunorm, f"add_{norm}").forward(x, residual, dropout_p=P, seed=seed_of(device))
    torch.testing.assert_close(s, call(norm, (x, residual), seed_of(device))[1])
    dx = getattr(cunorm, f"add_{norm}").backward(saved, x, s)["x"]
    mask = uniform(numpy.int64(7), tuple(x.shape), numpy) < P
    assert ((dx == 0).cpu().numpy() == mask).all()


@needs_machine
@both_norms
def test_launches_on_the_stand_in(stand_in, norm):
    check(norm, given(norm, "cpu", 5, 129))
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward"] * 2 + ["backward"] * 2
    reads = [operand.name for operand in stand_in.plans[2].problem.operands if not operand.written]
    assert "x" not in reads
    assert "seed" in reads


@needs_machine
def test_a_seed_need_not_be_aligned(stand_in):
    tensors = given("rms_norm", "cpu", 4, 64)
    seeds = torch.arange(8)
    call("rms_norm", tensors, seeds[3:4])
    assert stand_in.plans[0].problem.aligned


@needs_machine
def test_second_derivatives_of_launches(stand_in, monkeypatch):
    monkeypatch.setattr(dispatch, "launchable", lambda _: not torch.is_grad_enabled())
    tensors = given("rms_norm", "cpu", 3, 33)
    seed = seed_of("cpu")
    for chosen in (tensors, tensors[2:]):
        pair = []
        for results in (call("rms_norm", tensors, seed), masked("rms_norm", tensors, seed)):
            first = gradients(results, chosen, create_graph=True)
            pair.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors[0]))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@on_devices
@both_norms
def test_derivatives_and_transformations(device, norm):
    tensors = [tensor.detach().double().requires_grad_() for tensor in given(norm, device, 3, 5)]
    seed = seed_of(device)
    torch.autograd.gradcheck(lambda *tensors: call(norm, tensors, seed), tensors)
    torch.autograd.gradgradcheck(lambda *tensors: call(norm, tensors, seed), tensors)
    x, *others = (tensor.detach() for tensor in tensors)
    _, pull = torch.func.vjp(lambda x: call(norm, (x, *others), seed), x)
    leaf = x.clone().requires_grad_()
    expected_dx = torch.autograd.grad(call(norm, (leaf, *others), seed), [leaf], (x, x))
    torch.testing.assert_close(pull((x, x)), expected_dx)

    def s(x, seed):
        return call(norm, (x, *others), seed)[1]

    batch, seeds = torch.stack([x, 2 * x]), torch.tensor([[1], [2]], device=device)
    torch.testing.assert_close(torch.vmap(s, (0, None))(batch, seed), torch.stack([s(row, seed) for row in batch]))
    torch.testing.assert_close(torch.vmap(s, (None, 0))(x, seeds), torch.stack([s(x, number) for number in seeds]))


@on_devices
def test_compiled_the_seed_is_an_argument(device):
    tensors = given("rms_norm", device, 2, 3, 40)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for number in (1, 2):
        seed = seed_of(device, number)
        results = compiled("rms_norm", tensors, seed)
        torch.testing.assert_close(results, call("rms_norm", tensors, seed))
        expected_gradients = gradients(masked("rms_norm", tensors, seed), tensors)
        torch.testing.assert_close(gradients(results, tensors), expected_gradients)


MODULES = {"layer_norm": AddLayerNorm, "rms_norm": AddRMSNorm}


@on_devices
@both_norms
def test_modules_draw_their_seed_from_torchs_generator(device, norm):
    module = MODULES[norm](40, device=device, dropout_p=P)
    x, residual = (tensor.detach() for tensor in given(norm, device, 2, 3, 40)[:2])
    torch.manual_seed(1)
    first, second = module(x, residual)[1], module(x, residual)[1]
    torch.manual_seed(1)
    again = module(x, residual)[1]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    dropped = (first == residual).float().mean()
    assert 0.1 < dropped < 0.4
    torch.testing.assert_close(module.eval()(x, residual)[1], x + residual)
    assert f"dropout_p={P}" in repr(module)
    assert "dropout" not in repr(MODULES[norm](40))
    assert list(module.state_dict()) == list(MODULES[norm](40).state_dict())


@on_devices
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_drop_the_same(device, use_reentrant):
    module = AddRMSNorm(40, eps=1e-3, device=device, dropout_p=P)
    tensors = given("rms_norm", device, 2, 3, 40)[:2]
    torch.manual_seed(1)
    expected = module(*tensors)
    expected_gradients = gradients(expected, [*tensors, module.weight])
    torch.manual_seed(1)
    results = checkpoint(module, *tensors, use_reentrant=use_reentrant)
    torch.testing.assert_close(results, expected)
    torch.autograd.backward(results, cotangents_of(results))
    torch.testing.assert_close(tuple(leaf.grad for leaf in (*tensors, module.weight)), expected_gradients)


@pytest.mark.gpu
def test_a_captured_step_replays_with_other_seeds():
    module = AddRMSNorm(1024, eps=1e-3, device="cuda", dropout_p=P)
    x, residual = (random(64, 1024, device="cuda", seed=i).requires_grad_() for i in range(2))

    def step():
        y, s = module(x, residual)
        return s, *torch.autograd.grad((y, s), (x, residual), (y.detach(), s.detach()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        s, dx, _ = step()
    masks = []
    for _ in range(3):
        graph.replay()
        dropped = s == residual
        assert 0.2 < dropped.float().mean() < 0.3
        assert (dx[dropped] == 0).all()
        assert (dx[~dropped] != 0).float().mean() > 0.99
        masks.append(dropped)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_errors():
    x = torch.ones(3, 4)
    seed = seed_of("cpu")
    for error, message, options in (
        (ValueError, "at least 0 and less than 1", {"dropout_p": 1.0, "seed": seed}),
        (ValueError, "needs a seed", {"dropout_p": 0.1}),
        (TypeError, "seed must be a torch.Tensor; got int", {"dropout_p": 0.1, "seed": 7}),
        (NotImplementedError, "got dtype float32", {"dropout_p": 0.1, "seed": x[0, :1]}),
        (RuntimeError, r"got int64 of shape \(2,\)", {"dropout_p": 0.1, "seed": torch.arange(2)}),
    ):
        with pytest.raises(error, match=message):
            add_rms_norm(x, x, **options)
    with pytest.raises(ValueError, match="dropout_p must be at least 0"):
        AddRMSNorm(4, dropout_p=1.5)
    with pytest.raises(TypeError, match="AddRMSNorm: dropout_p must be a real number; got str"):
        AddRMSNorm(4, dropout_p="0.5")
