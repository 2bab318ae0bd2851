"""Dropout of tensors: what NumPy's family drops, whatever looks at the call; seeds of modules."""

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
    return [random(*of, device=device, seed=i).requires_grad_() for i, of in enumerate(shapes)]


def seed_of(device, number=7):
    return torch.tensor([number], device=device)


def call(norm, tensors, seed, p=P):
    x, residual, *parameters = tensors
    return FUNCTIONS[norm](x, residual, *parameters, eps=1e-3, dropout_p=p, seed=seed)


def masked(norm, tensors, seed, p=P):
    """Return the results of a mask and the function without dropout."""
    x, residual, *parameters = tensors
    mask = uniform(numpy.int64(int(seed)), tuple(x.shape), numpy) >= p
    factor = torch.tensor(mask / (1 - p), dtype=x.dtype, device=x.device)
    return FUNCTIONS[norm](x * factor, residual, *parameters, eps=1e-3)


def gradients(results, tensors, **options):
    cotangents = [random(*one.shape, device=one.device, seed=7 + i) for i, one in enumerate(results)]
    return torch.autograd.grad(results, tensors, cotangents, **options)


def check(norm, tensors, function=call):
    seed = seed_of(tensors[0].device)
    found, expected = function(norm, tensors, seed), masked(norm, tensors, seed)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, tensors), gradients(expected, tensors))


@on_devices
@both_norms
def test_values_and_gradients_are_those_of_a_mask(device, norm):
    check(norm, given(norm, device, 2, 3, 40))
    x, residual = (one.detach() for one in given(norm, device, 2, 3, 40)[:2])
    (_, s), saved = getattr(cunorm, f"add_{norm}").forward(x, residual, dropout_p=P, seed=seed_of(device))
    torch.testing.assert_close(s, call(norm, (x, residual), seed_of(device))[1])
    found = getattr(cunorm, f"add_{norm}").backward(saved, x, s)
    mask = uniform(numpy.int64(7), tuple(x.shape), numpy) < P
    assert ((found["x"] == 0).cpu().numpy() == mask).all()


@needs_machine
@both_norms
def test_launches_on_the_stand_in(stand_in, norm):
    check(norm, given(norm, "cpu", 5, 129))
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward"] * 2 + ["backward"] * 2
    reads = [one.name for one in stand_in.plans[2].problem.operands if not one.written]
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
            pair.append(torch.autograd.grad(sum(one.square().sum() for one in first), tensors[0]))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@on_devices
@both_norms
def test_derivatives_and_transformations(device, norm):
    tensors = [one.detach().double().requires_grad_() for one in given(norm, device, 3, 5)]
    seed = seed_of(device)
    torch.autograd.gradcheck(lambda *tensors: call(norm, tensors, seed), tensors)
    torch.autograd.gradgradcheck(lambda *tensors: call(norm, tensors, seed), tensors)
    x, *others = (one.detach() for one in tensors)
    _, pull = torch.func.vjp(lambda x: call(norm, (x, *others), seed), x)
    torch.testing.assert_close(*(pull((x, x)), gradients_of(norm, x, others, seed)))
    batch = torch.stack([x, 2 * x])
    for one, expected in zip(torch.vmap(lambda x: call(norm, (x, *others), seed)[1])(batch), batch, strict=True):
        torch.testing.assert_close(one, call(norm, (expected, *others), seed)[1])
    seeds = torch.tensor([[1], [2]], device=device)
    for one, of in zip(torch.vmap(lambda seed: call(norm, (x, *others), seed)[1])(seeds), seeds, strict=True):
        torch.testing.assert_close(one, call(norm, (x, *others), of)[1])


def gradients_of(norm, x, others, seed):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(norm, (leaf, *others), seed), [leaf], (x, x))


@on_devices
def test_compiled_the_seed_is_an_argument(device):
    tensors = given("rms_norm", device, 2, 3, 40)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for number in (1, 2):
        found = compiled("rms_norm", tensors, seed_of(device, number))
        torch.testing.assert_close(found, call("rms_norm", tensors, seed_of(device, number)))
        torch.testing.assert_close(
            gradients(found, tensors), gradients(masked("rms_norm", tensors, seed_of(device, number)), tensors)
        )


MODULES = {"layer_norm": AddLayerNorm, "rms_norm": AddRMSNorm}


@on_devices
@both_norms
def test_modules_draw_their_seed_from_torchs_generator(device, norm):
    module = MODULES[norm](40, device=device, dropout_p=P)
    x, residual = (one.detach() for one in given(norm, device, 2, 3, 40)[:2])
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
    of_expected = gradients(expected, [*tensors, module.weight])
    torch.manual_seed(1)
    found = checkpoint(module, *tensors, use_reentrant=use_reentrant)
    torch.testing.assert_close(found, expected)
    cotangents = [random(*one.shape, device=device, seed=7 + i) for i, one in enumerate(found)]
    torch.autograd.backward(found, cotangents)
    torch.testing.assert_close([*(one.grad for one in tensors), module.weight.grad], list(of_expected))


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
