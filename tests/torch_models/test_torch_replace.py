"""Models whose norms `replace_norms` replaced compute the same, and `undo` restores them."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
from torch import nn  # noqa: E402
from torch_models import build, loss_and_gradients, loss_of  # noqa: E402
from torch_tensors import assert_no_farther, on_devices, random  # noqa: E402

from cunorm.torch import LayerNorm, RMSNorm, accelerate, replace_norms  # noqa: E402


def small_model():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8, eps=0.1),
        nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8, elementwise_affine=False)),
        nn.BatchNorm1d(8),
        nn.GroupNorm(2, 8),
    )


def test_what_is_swapped_and_what_is_left():
    model = small_model()
    report = replace_norms(model)
    assert report.swapped == {"1": "LayerNorm", "2.0": "RMSNorm", "2.1": "LayerNorm"}
    assert list(report.left) == ["3", "4"]
    assert "BatchNorm1d of torch.nn.modules.batchnorm is neither a LayerNorm nor an RMSNorm" in report.left["3"]
    assert (type(model[1]), type(model[2][0])) == (LayerNorm, RMSNorm)
    assert "swapped 3, left 2" in str(report)
    again = replace_norms(model)
    assert not again.swapped
    report.undo()
    assert (type(model[1]), type(model[2][0])) == (nn.LayerNorm, nn.RMSNorm)


def test_everything_about_a_module_stays():
    model = small_model().to(torch.bfloat16)
    before, parameters, state = model[1], list(model.parameters()), model.state_dict()
    calls = []
    before.register_forward_hook(lambda *_: calls.append("forward"))
    before.register_forward_pre_hook(lambda *_: calls.append("pre"))
    before.note = "kept"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_norms(model)
    assert model[1] is before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    assert (model[1].note, model[1].eps, model[1].weight.dtype) == ("kept", 0.1, torch.bfloat16)
    model[1](random(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert calls == ["pre", "forward"]
    optimizer.step()
    assert not torch.equal(model[1].bias, torch.zeros(8, dtype=torch.bfloat16))


def test_a_module_with_its_own_forward_is_left():
    model = small_model()
    model[1].forward = lambda x: x
    report = replace_norms(model)
    assert "replaced on the instance" in report.left["1"]
    assert type(model[1]) is nn.LayerNorm


def test_the_root_itself():
    model = nn.LayerNorm(8)
    assert replace_norms(model).swapped == {"": "LayerNorm"}
    assert type(model) is LayerNorm


def test_what_is_wrapped_or_compiled_says_so():
    """Such norms are not replaced, and the model computes what it did."""
    parametrized = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Softplus())
    model = nn.Sequential(parametrized, torch.jit.script(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))))
    x = random(3, 8, dtype=torch.float32)
    expected = model(x)
    report = replace_norms(model)
    assert report.left == {
        "0": "ParametrizedLayerNorm is a class made of LayerNorm, not LayerNorm itself",
        "1.0": "torch.jit has compiled this LayerNorm: replace first what is then compiled",
    }
    assert not report.swapped
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("function", [accelerate, replace_norms])
def test_what_is_no_model(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}: model must be a torch.nn.Module; got list\.$"):
        function([nn.LayerNorm(8)])


NAMES = ("gpt2", "bert", "vit", "llama", "qwen3", "gemma", "t5", "mamba2")


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_of_a_model(device, name, dtype):
    """The model is about as near to the same model in float64 as the untouched one."""
    model, inputs = build(name, device=device, dtype=dtype)
    exact = copy.deepcopy(model).double()
    reference = loss_and_gradients(exact, inputs)
    before = loss_and_gradients(model, inputs)
    report = replace_norms(model)
    assert len(report.swapped) >= 4
    assert not report.left
    after = loss_and_gradients(model, inputs)
    assert_no_farther(after, before, reference, dtype)
    report.undo()
    again = loss_and_gradients(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), again.values(), strict=True)) or device == "cuda"


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_copies_of_a_replaced_model(name):
    model, inputs = build(name)
    _, before = loss_of(model, inputs)
    report = replace_norms(model)
    module = model.get_submodule(next(iter(report.swapped)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_of(twin, inputs)[1], before)
        copied = twin.get_submodule(next(iter(report.swapped)))
        assert type(copied) is type(module)
        assert isinstance(copied, type(module)._original)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "t5"])
def test_the_dtype_that_the_original_returns(name):
    model, _ = build(name)
    original = copy.deepcopy(model)
    (first, *_) = replace_norms(model).swapped
    ours, theirs = model.get_submodule(first), original.get_submodule(first)
    for x_dtype in (torch.float16, torch.bfloat16, torch.float32):
        for weight_dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = random(3, ours.weight.numel(), dtype=x_dtype)
            a, b = (module.to(weight_dtype)(x) for module in (ours, theirs))
            assert a.dtype == b.dtype
            coarsest = max((x_dtype, weight_dtype), key=lambda d: torch.finfo(d).eps)
            torch.testing.assert_close(
                a.double(), b.double(), rtol=2 * torch.finfo(coarsest).eps, atol=2 * torch.finfo(coarsest).eps
            )


# Each model, or variant of a model, has (prefix of the class, options, whether its norm is left).
GATED = {
    "mamba2": ("Mamba", {}, False),
    "qwen3_next": ("Qwen3Next", {}, False),
    "kimi_linear": ("KimiLinear", {}, False),  # gated by sigmoid
    "zamba2": ("Zamba2", {"group_size": 16}, True),  # in groups of columns
    "zamba2, one group": ("Zamba2", {"group_size": 64}, False),
    "falcon_h1": ("FalconH1", {"norm_before_gate": True}, False),
    "falcon_h1, gate first": ("FalconH1", {"norm_before_gate": False}, False),
    "falcon_h1, groups": ("FalconH1", {"n_groups": 4}, True),
}


def gated_norm(name: str) -> nn.Module:
    model, (prefix, options, _) = name.partition(",")[0], GATED[name]
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    norm = getattr(modeling, f"{prefix}RMSNormGated")(64, **options)
    norm.weight = nn.Parameter(random(64, dtype=torch.float32, seed=9))
    return norm


@on_devices
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("name", [name for name, (*_, left) in GATED.items() if not left])
def test_a_gated_norm_of_transformers(device, name, dtypes):
    """Values, gradients and dtypes are those of the original, and its gate may be absent where the original's may."""
    x_dtype, weight_dtype = (getattr(torch, dtype) for dtype in dtypes)
    norm = gated_norm(name).to(device, weight_dtype)
    x, gate = (random(5, 64, dtype=x_dtype, device=device, seed=seed).requires_grad_() for seed in range(2))
    exact, ours = copy.deepcopy(norm).double(), pickle.loads(pickle.dumps(norm))
    assert list(replace_norms(ours).swapped) == [""]
    results = []
    for which in (exact, norm, copy.deepcopy(ours)):
        given = (x.double(), gate.double()) if which is exact else (x, gate)
        y = which(*given)
        results.append([y, *torch.autograd.grad(y.sum(), [which.weight, x, gate])])
    assert [tensor.dtype for tensor in results[2]] == [tensor.dtype for tensor in results[1]]
    for reference, result in zip(results[0], results[2], strict=True):
        room = 1e-5 if result.dtype is torch.float32 and x_dtype is torch.float32 else 1e-2
        torch.testing.assert_close(result.to(reference.dtype), reference, rtol=room, atol=room)
    if name == "mamba2":
        assert torch.equal(ours(x), norm(x))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, gate), ours(x, gate))


@pytest.mark.slow
@pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())
@pytest.mark.parametrize("name", ["mamba2", "kimi_linear", "zamba2, one group", "falcon_h1"])
def test_what_a_gated_norm_launches(stand_in, lines, name):
    """Each pass is one plan, and x and a gate that is a part of a product are read where they lie."""
    norm = gated_norm(name).to(torch.bfloat16)
    x = random(5, 64, dtype=torch.bfloat16).requires_grad_()
    product, dy = random(5, 3 * 64, dtype=torch.bfloat16, seed=1).requires_grad_(), random(5, 64, dtype=x.dtype, seed=2)
    results = []
    for which in (copy.deepcopy(norm).double(), norm):
        if which is norm:
            replace_norms(norm)
        given = x, product.chunk(3, -1)[1]
        y = which(*(tensor.double() if which is not norm else tensor for tensor in given))
        results.append([y, *torch.autograd.grad(y, [which.weight, x, product], dy.to(y.dtype))])
    for exact, result in zip(*results, strict=True):
        torch.testing.assert_close(result.double(), exact.double(), rtol=2e-2, atol=2e-2)
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward", "backward"]
    assert not [line for line in lines() if "copied" in line]


@pytest.mark.parametrize("name", [name for name, (*_, left) in GATED.items() if left])
def test_a_norm_of_groups_of_columns_is_left(name):
    norm = gated_norm(name)
    report = replace_norms(nn.Sequential(norm))
    assert report.left["0"].startswith(f"{type(norm).__name__} of {type(norm).__module__} computes something else")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_a_replaced_model_compiles_whole(name):
    model, inputs = build(name, device="cuda", dtype=torch.float32)
    replace_norms(model)
    expected = loss_and_gradients(model, inputs)
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    loss, _ = loss_of(compiled, inputs)
    loss.backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-2, atol=1e-4)
