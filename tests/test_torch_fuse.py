"""fuse_norm_linear: blocks of torch and transformers compute the same, keep their names, and undo gives them back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo, nn  # noqa: E402
from torch_models import build, loss_and_gradients, loss_of  # noqa: E402
from torch_tensors import assert_no_farther, norm_of, on_devices, random  # noqa: E402

from cunorm.torch import fuse_norm_linear, replace_norms  # noqa: E402
from cunorm.torch.linear import functional as linear_functional  # noqa: E402
from cunorm.torch.norm import launching, nodes  # noqa: E402

NAMES = ("gpt2", "vit", "llama")
READERS = {
    "gpt2": [("attn.c_attn",), ("mlp.c_fc",)],
    "vit": [("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("mlp.fc1",)],
    "llama": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")],
}


@pytest.fixture
def products(monkeypatch):
    """The weights of every joined product that is run."""
    weights = []
    original = linear_functional.F.linear

    def linear(z, weight, bias=None):
        weights.append(tuple(weight.shape))
        return original(z, weight, bias)

    class Module:
        def __getattr__(self, name):
            return linear if name == "linear" else getattr(torch.nn.functional, name)

    monkeypatch.setattr(linear_functional, "F", Module())
    monkeypatch.setattr(nodes, "module", lambda: None)  # C++ would run them
    monkeypatch.setattr(launching, "_calls", {})
    return weights


@on_devices
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replaced", [False, True], ids=["", "after replace_norms"])
def test_logits_and_gradients_of_a_model(device, name, dtype, replaced, products):
    """Against the same model in float64: no farther from it than the untouched one, give or take."""
    model, inputs = build(name, device=device, dtype=dtype)
    reference = loss_and_gradients(copy.deepcopy(model).double(), inputs)
    before = loss_and_gradients(model, inputs)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    if replaced:
        replace_norms(model)
    report = fuse_norm_linear(model)
    assert len(report.fused) == 4
    assert not report.left
    for norm, readers in report.fused.items():
        block = norm.rpartition(".")[0]
        assert tuple(reader.removeprefix(block + ".") for reader in readers) in READERS[name]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    products.clear()
    after = loss_and_gradients(model, inputs)
    assert len(products) == 4  # one of each norm
    assert_no_farther(after, before, reference, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_undo(name):
    model, inputs = build(name)
    before = loss_and_gradients(model, inputs)
    classes = [type(module) for module in model.modules()]
    report = fuse_norm_linear(model)
    assert [type(module) for module in model.modules()] != classes
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    after = loss_and_gradients(model, inputs)
    torch.testing.assert_close(after, before)
    assert len(fuse_norm_linear(model).fused) == 4


def test_twice_is_once():
    model, _ = build("vit")
    fuse_norm_linear(model)
    again = fuse_norm_linear(model)
    assert not again.fused
    assert not again.left


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_original_loads(name):
    source, inputs = build(name)
    state = {key: value + 0.01 for key, value in source.state_dict().items() if value.is_floating_point()}
    source.load_state_dict(state, strict=False)
    target, _ = build(name)
    fuse_norm_linear(target)
    assert not target.load_state_dict(source.state_dict(), strict=True).missing_keys
    torch.testing.assert_close(loss_of(target, inputs)[1], loss_of(source, inputs)[1])


@pytest.mark.parametrize("name", NAMES)
def test_copies(name):
    model, inputs = build(name)
    before = loss_of(model, inputs)[1]
    fuse_norm_linear(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_of(twin, inputs)[1], before)
        with torch.no_grad():  # the copy's norms read the copy's weights
            for parameter in twin.parameters():
                parameter.mul_(2)
        assert not torch.equal(loss_of(twin, inputs)[1], before)
        torch.testing.assert_close(loss_of(model, inputs)[1], before)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_moved_to_another_dtype(name):
    """The weights are no longer side by side."""
    model, inputs = build(name)
    fuse_norm_linear(model)
    expected = loss_and_gradients(model, inputs)
    torch.testing.assert_close(
        loss_and_gradients(model.double(), inputs), expected, check_dtype=False, atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    model, inputs = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        before = loss_and_gradients(model, inputs)
        fuse_norm_linear(model)
        after = loss_and_gradients(model, inputs)
    for key, expected in before.items():
        assert norm_of(after[key] - expected) < 0.05 * norm_of(expected) + 1e-3


@on_devices
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.slow
def test_compiled_whole(device, name):
    _dynamo.reset()
    model, inputs = build(name, device=device)
    fuse_norm_linear(model)
    expected = loss_and_gradients(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss_of(compiled, inputs)[0].backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-2, atol=1e-4)


# torch.nn.TransformerEncoderLayer.


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    options = {"norm_first": True, "batch_first": True, "dropout": 0.0, "dtype": torch.float64, **options}
    made = nn.TransformerEncoderLayer(16, 2, 32, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def masks(batch_first: bool) -> list[dict[str, Any]]:
    length, batch = 5, 3
    causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    padded = torch.zeros(batch, length, dtype=torch.bool)
    padded[0, -2:] = True
    scores = random(batch * 2, length, length)
    added = torch.zeros(batch, length, dtype=torch.float64).masked_fill(padded, float("-inf"))
    return [
        {},
        {"src_mask": causal},
        {"src_mask": causal, "is_causal": True},
        {"src_mask": causal.isinf()},
        {"src_mask": scores},
        {"src_key_padding_mask": padded},
        {"src_mask": causal, "src_key_padding_mask": added},
        {"src_mask": causal.isinf(), "src_key_padding_mask": padded},
    ]


@pytest.mark.parametrize(("batch_first", "bias"), [(True, True), (False, True), (True, False)])
def test_transformer_encoder_layer(batch_first, bias, products):
    model = layer(batch_first=batch_first, bias=bias)
    x = random(*((3, 5) if batch_first else (5, 3)), 16).requires_grad_()

    def results() -> list[Any]:
        found = []
        for options in masks(batch_first):
            y = model(x, **options)
            found += [y, *torch.autograd.grad(y.pow(3).sum(), [x, *model.parameters()])]
        return found

    expected = results()
    report = fuse_norm_linear(model)
    assert report.fused == {"norm1": ("self_attn",), "norm2": ("linear1",)}
    products.clear()
    torch.testing.assert_close(results(), expected)
    assert products == [(48, 16), (32, 16)] * len(masks(batch_first))
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(model(x), expected[0])  # torch's own fast path
        unbatched = model(x[0] if batch_first else x[:, 0])
    torch.testing.assert_close(unbatched, expected[0][0] if batch_first else expected[0][:, 0])


def test_dropout_of_the_attention():
    model = layer(dropout=0.5)
    fuse_norm_linear(model)
    x = random(3, 5, 16)
    torch.manual_seed(0)

    def attention():
        z = model.norm1(x)
        return model.self_attn(z, z, z, need_weights=False)[0]

    first, second = attention(), attention()
    assert not torch.equal(first, second)
    model.eval()
    first, second = attention(), attention()
    assert torch.equal(first, second)


def test_without_norm_first_it_is_left():
    model = nn.Sequential(layer(norm_first=False))
    report = fuse_norm_linear(model)
    assert list(report.left) == ["0.norm1", "0.norm2"]
    assert "without norm_first" in str(report)


# Whatever else happens to z, or to a Linear, is as it was.


def test_z_read_elsewhere_is_the_normalised_tensor():
    model = layer()
    expected = model.norm2(x := random(3, 5, 16).requires_grad_())
    fuse_norm_linear(model)
    z = model.norm2(x)
    torch.testing.assert_close(z, expected)
    y = model.linear1(z)
    torch.testing.assert_close(y, nn.functional.linear(expected, model.linear1.weight, model.linear1.bias))
    gradients = [torch.autograd.grad((y.sin().sum() + z.square().sum()), x)[0] for y, z in [(y, z)]]
    plain = nn.functional.linear(expected, model.linear1.weight, model.linear1.bias)
    torch.testing.assert_close(gradients[0], torch.autograd.grad(plain.sin().sum() + expected.square().sum(), x)[0])


def test_a_linear_called_with_something_else_computes_it():
    model = layer()
    x, other = random(3, 5, 16), random(3, 5, 16, seed=1)
    expected = model.linear1(other)
    fuse_norm_linear(model)
    z = model.norm2(x)
    torch.testing.assert_close(model.linear1(other), expected)
    assert model.linear1._ready is None
    torch.testing.assert_close(model.linear1(z), nn.functional.linear(z, model.linear1.weight, model.linear1.bias))


class Reader(nn.Module):
    """Calls one of two readers of a norm and leaves the other."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(z)


def left_alive(norm: nn.Module, run: Any) -> list[str]:
    """Runs, and tells which of the tensors that the norm made are still there."""
    made = {}

    def watch(module, inputs, z):
        made["z"] = weakref.ref(z)
        made["y"] = [weakref.ref(reader._ready[1]) for reader in norm._link.readers]

    hook = norm.register_forward_hook(watch)
    run()
    hook.remove()
    gc.collect()
    return [name for name, refs in (("z", [made["z"]]), ("y", made["y"])) if any(ref() is not None for ref in refs)]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("dropped", [True, False], ids=["norm alone", "block"])
def test_nothing_of_z_and_y_outlives_the_forward_pass(grad, skipped, dropped):
    """A reader that is never called holds neither."""
    model, _ = build("llama")
    block = model.model.layers[0]
    fuse_norm_linear(model)
    norm, mlp = block.post_attention_layernorm, block.mlp
    if skipped:
        block.mlp = Reader(mlp)

    def run():
        with torch.set_grad_enabled(grad):
            z = norm(random(2, 3, 64, dtype=torch.float32))
            if not dropped:
                block.mlp(z)

    assert left_alive(norm, run) == []
    assert all(reader._ready is None for reader in norm._link.readers)


@pytest.mark.parametrize("skipped", [(), ("up_proj",), ("gate_proj", "up_proj")], ids=str)
def test_compiled_too(skipped):
    """Behind a compiled graph nothing is left in a reader either, whether it was called or not."""
    _dynamo.reset()
    model, _ = build("llama")
    block = model.model.layers[0]
    fuse_norm_linear(model)

    def run(x):
        z = block.post_attention_layernorm(x)
        return sum((getattr(block.mlp, name)(z) for name in ("gate_proj", "up_proj") if name not in skipped), z.sum())

    x = random(2, 3, 64, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    gc.collect()
    assert all(reader._ready is None for reader in block.post_attention_layernorm._link.readers)


def test_copied_and_pickled_between_a_norm_and_its_readers():
    model = layer(dtype=torch.float32)
    fuse_norm_linear(model)
    z = model.norm2(random(3, 5, 16, dtype=torch.float32))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.linear1._ready is None
        assert torch.equal(twin.linear1(z), nn.functional.linear(z, model.linear1.weight, model.linear1.bias))


def test_transformed_it_computes_as_ever():
    """Where autograd would keep z for the product nothing is handed over."""
    model = layer()
    x = random(3, 16)

    def loss(x):
        return model.linear1(model.norm2(x)).sin().sum()

    expected = torch.func.grad(loss)(x)
    fuse_norm_linear(model)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    assert model.linear1._ready is None


def test_attention_weights_are_torchs():
    model = layer()
    z = random(3, 5, 16)
    expected = model.self_attn(z, z, z)
    fuse_norm_linear(model)
    torch.testing.assert_close(model.self_attn(z, z, z), expected)
    ours = model.norm1(z)
    torch.testing.assert_close(
        model.self_attn(ours, ours, ours)[1], copy.deepcopy(model).self_attn(ours, ours, ours)[1]
    )


def test_hooks_run():
    model, inputs = build("llama")
    calls = []
    block = model.model.layers[0]
    for name in ("input_layernorm", "self_attn.q_proj", "mlp.up_proj"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    fuse_norm_linear(model)
    loss_of(model, inputs)
    assert calls == ["input_layernorm", "self_attn.q_proj", "mlp.up_proj"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: setattr(block.mlp.gate_proj, "forward", lambda x: x), "was replaced on the instance"),
        (lambda block: setattr(block.mlp, "gate_proj", nn.Sequential(block.mlp.gate_proj)), "no Linear that is known"),
        (
            lambda block: block.mlp.gate_proj.register_parameter("bias", nn.Parameter(torch.zeros(128))),
            "some of its Linears have a bias",
        ),
        (lambda block: block.mlp.gate_proj.double(), "several dtypes or devices"),
        (lambda block: setattr(block, "post_attention_layernorm", nn.Identity()), "neither a LayerNorm nor an RMSNorm"),
    ],
)
def test_what_is_left_and_why(change, reason):
    model, _ = build("llama")
    change(model.model.layers[0])
    report = fuse_norm_linear(model)
    assert list(report.left) == ["model.layers.0.post_attention_layernorm"]
    assert reason in report.left["model.layers.0.post_attention_layernorm"]
    assert len(report.fused) == 3
    assert "fused 3, left 1" in str(report)


def test_unknown_blocks_are_not_touched():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    assert str(fuse_norm_linear(model)) == "fused 0, left 0"
