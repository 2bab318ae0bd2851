"""accelerate: models with random weights compute the same, undo gives back what was, and bad input is left alone."""

from __future__ import annotations

import copy
import doctest
import importlib.util
import pickle
import sys
import textwrap
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_models import build, loss_of  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

from cunorm.torch import accelerate, fuse_norm_linear, replace_norms  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402
from cunorm.torch.models import blocks, replace, rewrite  # noqa: E402
from cunorm.torch.models.rewrite import SUM_AFTER, SUM_FIRST, rewritten  # noqa: E402
from cunorm.torch.norm import modules  # noqa: E402

# Name: how many norms are joined with a sum, of how many.
MODELS = {
    "gpt2": (2, 5),
    "bert": (4, 6),
    "vit": (2, 5),
    "llama": (2, 5),
    "mistral": (2, 5),
    "qwen2": (2, 5),
    "qwen3": (2, 9),
    "gemma": (2, 5),
    "gemma2": (4, 9),
    "gemma3": (4, 13),
    "olmo2": (4, 9),
    "whisper": (6, 12),
    "t5": (0, 12),
    "mamba2": (0, 5),
}
# Attributes of blocks and norms that `accelerate` sets.
SET = {"_ran", "_few", "_joined_from", "_own_below", "_compiled_from"}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Small models are joined as large ones are."""
    for name in ("HOST_BOUND_BELOW", "JOINED_FROM"):
        monkeypatch.setattr(accelerate_module, name, 1)


def loss_and_gradients(model: nn.Module, inputs: dict) -> dict[str, Any]:
    model.zero_grad()
    loss, logits = loss_of(model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def norm_of(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values.double()))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


@on_devices
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in MODELS] + [(name, torch.bfloat16) for name in ("gpt2", "llama", "gemma3")],
    ids=str,
)
def test_logits_and_gradients_of_a_model(device, name, dtype):
    """No farther from the same model in float64 than the untouched one, give or take; undone to the same bits."""
    model, inputs = build(name, device=device, dtype=dtype)
    reference = loss_and_gradients(copy.deepcopy(model).double(), inputs)
    before = loss_and_gradients(model, inputs)
    keys, parameters, classes = list(model.state_dict()), list(model.parameters()), [*map(type, model.modules())]
    report = accelerate(model)
    assert (len(report.joined), len(report.norms.swapped)) == MODELS[name]
    assert not report.left
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    after = loss_and_gradients(model, inputs)
    assert all(ran == (1, {}) for ran in report.ran().values())  # each ran once, with its sum
    largest = max(norm_of(value) for key, value in reference.items() if key != "logits")
    for key, expected in reference.items():
        distance = [norm_of(result[key].double() - expected) for result in (before, after)]
        # As test_torch_replace.py has it.
        room = torch.finfo(dtype).eps * (8 * norm_of(expected) + 0.1 * largest)
        assert distance[1] <= 2 * distance[0] + room, f"{key}: {distance}, of {norm_of(expected)}"
    report.undo()
    assert [*map(type, model.modules())] == classes
    assert not any(SET & set(vars(module)) for module in model.modules())
    assert equal(loss_and_gradients(model, inputs), before) or device == "cuda"


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_torch(cls, norm_first):
    layer = cls(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    inputs = [
        random(2, 5, 32, dtype=torch.float32, seed=seed) for seed in range(1 + (cls is nn.TransformerDecoderLayer))
    ]
    expected = layer(*inputs)
    report = accelerate(layer)
    torch.testing.assert_close(layer(*inputs), expected)
    joined = list(report.joined)[1 if norm_first else 0 :]  # what the first norm reads is no sum of this layer
    assert [name for name, (together, _) in report.ran().items() if together] == joined


def test_the_report():
    model, inputs = build("gpt2")
    report = accelerate(model)
    loss_of(model, inputs)
    lines = str(report).splitlines()
    assert lines[0] == "norms replaced 5, joined 2, left 0"
    assert "  transformer.h.0.ln_1: LayerNorm" in lines
    assert "  transformer.h.1.ln_2: with the sum before it; ran 1" in lines


def test_the_example(monkeypatch):
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 8 << 20)
    monkeypatch.setattr(accelerate_module, "JOINED_FROM", 64 << 20)
    assert doctest.testmod(accelerate_module).failed == 0


def test_norms_of_torch_with_few_elements(monkeypatch):
    """A few elements go to torch's own operators, apart, more to ours; those of transformers to ours, apart."""
    for name in ("HOST_BOUND_BELOW", "JOINED_FROM"):
        monkeypatch.setattr(accelerate_module, name, 64)
    ours, norm = [], replace.norm
    monkeypatch.setattr(modules, "norm", lambda *given: ours.append("torch's") or given[1])
    monkeypatch.setattr(replace, "norm", lambda *given: ours.append("transformers'") or given[1])
    model, _ = build("llama")
    model = nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32), model.model.norm)
    accelerate(model)
    for rows, expected in ((1, []), (2, ["torch's", "torch's"])):
        model[:2](torch.ones(rows, 32))
        assert ours == expected
    model[2](torch.ones(1, 64))
    assert ours[2:] == ["transformers'"]
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    report = accelerate(layer)
    layer(torch.ones(1, 1, 32))
    assert report.ran()["norm1"] == (0, {accelerate_module.FEW: 1})
    layer(torch.ones(1, 2, 32))
    assert report.ran()["norm1"] == (1, {accelerate_module.FEW: 1})
    model, inputs = build("llama")
    inputs = {name: one[:, :1] for name, one in inputs.items()}
    report = accelerate(model)
    monkeypatch.setattr(replace, "norm", norm)
    loss_of(model, inputs)  # 4 rows of 64
    assert all(ran == (1, {}) for ran in report.ran().values())
    monkeypatch.setattr(accelerate_module, "JOINED_FROM", 256)
    report.undo()
    report = accelerate(model)
    loss_of(model, inputs)
    loss_of(model, {name: one[:1] for name, one in inputs.items()})
    assert all(ran == (1, {accelerate_module.FEW: 1}) for ran in report.ran().values())


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "whisper"])
def test_apart_a_step_has_the_operators_and_the_bits_of_the_original(monkeypatch, name):
    """In both passes, in the same order: what is left to torch costs no operator and no node more."""
    for bound in ("HOST_BOUND_BELOW", "JOINED_FROM"):
        monkeypatch.setattr(accelerate_module, bound, 8 << 20)
    model, inputs = build(name)
    results, called = [], []
    for place in (0, 1):
        if place:
            report = accelerate(model)
        with Operators() as operators:
            results.append(loss_and_gradients(model, inputs))
        called.append(operators.called)
    assert called[1] == called[0]
    assert equal(*results)
    assert all(ran == (0, {accelerate_module.FEW: 1}) for ran in report.ran().values())


def test_what_of_ours_runs_where_a_join_stays_apart(monkeypatch):
    """A step of a small model waits for the host: nothing is asked but how many elements there are."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 1 << 20)
    monkeypatch.setattr(accelerate_module, "JOINED_FROM", 1 << 20)
    model, _ = build("bert")
    block = model.bert.encoder.layer[0].output
    accelerate(block)
    calls: list[str] = []

    def note(frame, event, _):
        if event == "call" and "cunorm" in frame.f_globals["__name__"]:
            calls.append(frame.f_code.co_name)

    block(torch.ones(1, 2, 128), torch.ones(1, 2, 64))
    sys.setprofile(note)
    try:
        block(torch.ones(1, 2, 128), torch.ones(1, 2, 64))
    finally:
        sys.setprofile(None)
    assert calls == ["_sum_norm", "_together", "forward", "parameter_of", "parameter_of"]


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.LayerNorm(8, 0.1, False),
                                  nn.RMSNorm(8), nn.RMSNorm(8, 0.1, False)], ids=str)  # fmt: skip
def test_a_norm_of_few_elements_has_the_bits_of_torchs(monkeypatch, norm):
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 64)
    for number, parameter in enumerate(norm.parameters()):
        parameter.data = random(8, dtype=torch.float32, seed=number)
    x = random(3, 8, dtype=torch.float32)
    expected = norm(x)
    ours = copy.deepcopy(norm)
    accelerate(ours)
    monkeypatch.setattr(modules, "norm", None)  # would fail
    assert torch.equal(ours(x), expected)


def test_twice_is_once():
    model, inputs = build("llama")
    first = accelerate(model)
    expected = loss_of(model, inputs)[1]
    second = accelerate(model)
    assert not second.joined
    assert not second.norms.swapped
    second.undo()
    assert torch.equal(loss_of(model, inputs)[1], expected)
    first.undo()
    first.undo()
    assert len(accelerate(model).joined) == 2


def test_what_is_patched_already(monkeypatch):
    """After replace_norms the sums are joined with its norms; after fuse_norm_linear the norms stay what they are."""
    model, inputs = build("llama")
    expected = loss_of(model, inputs)[1]
    replaced = replace_norms(model)
    report = accelerate(model)
    assert (len(report.norms.swapped), len(report.joined)) == (0, 2)
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
    report.undo()
    monkeypatch.setattr(accelerate_module, "JOINED_FROM", 64 << 20)
    report = accelerate(model)
    loss_of(model, inputs)
    assert all(ran == (0, {accelerate_module.FEW: 1}) for ran in report.ran().values())
    report.undo()
    replaced.undo()
    monkeypatch.setattr(accelerate_module, "JOINED_FROM", 1)
    fused = fuse_norm_linear(model)
    report = accelerate(model)
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
    assert set(report.ran()["model.layers.0.post_attention_layernorm"].apart) == {"the norm is none of cunorm's"}
    report.undo()
    fused.undo()


@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_part_that_is_patched_already(first):
    """What is left is joined, and each report takes back its own, in any order."""
    model, inputs = build("llama")
    expected = loss_of(model, inputs)[1]
    reports = {"part": accelerate(model.model.layers[0]), "whole": accelerate(model)}
    assert [list(one.joined) for one in reports.values()] == [
        ["post_attention_layernorm"],
        ["model.layers.1.post_attention_layernorm"],
    ]
    for report in (reports.pop(first), *reports.values()):
        torch.testing.assert_close(loss_of(model, inputs)[1], expected)
        report.undo()
    assert torch.equal(loss_of(model, inputs)[1], expected)


def test_what_fails_halfway_is_not_done_at_all(monkeypatch):
    model, _ = build("llama")
    classes, joined = [*map(type, model.modules())], iter([blocks.joined_class])
    monkeypatch.setattr(accelerate_module, "joined_class", lambda found: next(joined)(found))
    with pytest.raises(StopIteration):
        accelerate(model)
    assert [*map(type, model.modules())] == classes
    assert not any(SET & set(vars(module)) for module in model.modules())


def test_undone_in_another_order_nothing_is_done():
    model, _ = build("llama")
    report = accelerate(model)
    fused = fuse_norm_linear(model)
    classes = [*map(type, model.modules())]
    with pytest.raises(RuntimeError, match="Undo first what was done to it since"):
        report.undo()
    assert [*map(type, model.modules())] == classes
    fused.undo()
    report.undo()
    assert type(model.model.layers[0]).__mro__[1] is not blocks.Block


# What looks on.


def test_hooks_see_what_they_saw():
    model, inputs = build("llama")
    seen: list[list] = [[], []]
    norm, layer = model.model.layers[0].post_attention_layernorm, model.model.layers[1]
    for place in (0, 1):
        if place:
            report = accelerate(model)
        handles = [
            norm.register_forward_hook(lambda _, x, y, place=place: seen[place].append((x[0], y))),
            layer.register_forward_hook(lambda _, x, y, place=place: seen[place].append((x[0], y))),
            norm.register_full_backward_hook(lambda _, dx, dy, place=place: seen[place].append((dx[0], dy[0]))),
        ]
        loss_and_gradients(model, inputs)
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(seen[1], seen[0])
    assert len(seen[0]) == 3
    assert report.ran()["model.layers.0.post_attention_layernorm"] == (0, {"the norm has hooks": 1})
    assert "    apart 1: the norm has hooks" in str(report).splitlines()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3"])
def test_hidden_states_are_those_of_the_original(name):
    model, inputs = build(name)
    del inputs["labels"]
    expected = model(**inputs, output_hidden_states=True).hidden_states
    accelerate(model)
    found = model(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == 3
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_gradient_checkpointing(name, use_reentrant):
    model, inputs = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    accelerate(model)
    expected = loss_and_gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = loss_and_gradients(model.train(), inputs)
    assert expected.keys() - found.keys() <= {"model.embed_tokens.weight"}
    torch.testing.assert_close(found, {key: expected[key] for key in found})


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_generation_token_for_token(name):
    model, inputs = build(name)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(inputs["input_ids"], **options)
    accelerate(model)
    assert torch.equal(model.generate(inputs["input_ids"], **options), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_copies(name):
    model, inputs = build(name)
    expected = loss_of(model, inputs)[1]
    report = accelerate(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_of(twin, inputs)[1], expected)
        assert [*map(type, twin.modules())] == [*map(type, model.modules())]
    assert {together for together, _ in report.ran().values()} == {0}  # a copy counts for itself


# What it may be given.


def test_frozen_and_tied_parameters():
    model, inputs = build("llama")
    layers = model.model.layers
    layers[1].post_attention_layernorm.weight = layers[0].post_attention_layernorm.weight
    layers[0].input_layernorm.weight.requires_grad_(False)
    layers[0].mlp.requires_grad_(False)
    before = loss_and_gradients(model, inputs)
    accelerate(model)
    torch.testing.assert_close(loss_and_gradients(model, inputs), before)


def test_no_gradient_at_all():
    model, inputs = build("gemma3")
    before = loss_of(model, inputs)[1]
    accelerate(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(loss_of(model, inputs)[1], before)


def test_without_memory_and_moved():
    with torch.device("meta"):
        model, _ = build("llama", device="meta")
    report = accelerate(model)
    assert len(report.joined) == 2
    other, inputs = build("llama")
    model = model.to_empty(device="cpu")
    model.load_state_dict(other.state_dict())
    model.model.rotary_emb = other.model.rotary_emb
    torch.testing.assert_close(loss_of(model, inputs)[1], loss_of(other, inputs)[1])
    accelerate(other)
    torch.testing.assert_close(loss_of(other.double(), inputs)[1], loss_of(model.double(), inputs)[1])


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("one", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
@pytest.mark.parametrize(("name", "method"), [("bert", "_sum_norm"), ("llama", "_sum_norm"), ("gemma3", "_norm_sum")])
def test_dtypes_of_a_join(name, method, one, other, weight):
    """Summands of several dtypes, as autocast makes them: the dtypes of the two operators."""
    model, _ = build(name, dtype=weight)
    replace_norms(model)
    accelerate(model)
    block = next(module for module in model.modules() if isinstance(module, blocks.Block))
    (norm, *_) = block._known.joins
    a, b = random(3, 64, dtype=one), random(3, 64, dtype=other, seed=1)
    found = getattr(block, method)(norm, a, b)
    module = block.get_submodule(norm)
    expected = (module(a + b), a + b) if method == "_sum_norm" else module(a) + b
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not any(reason for _, reason in block._ran)


def test_summands_that_broadcast_are_added_by_themselves():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = accelerate(layer)
    y, total = layer._sum_norm("norm1", torch.ones(2, 3, 8), torch.ones(8))
    assert y.shape == total.shape == (2, 3, 8)
    ((reason, count),) = report.ran()["norm1"].apart.items()
    assert (reason.startswith("the summands have several shapes"), count) == (True, 1)


@pytest.fixture
def group(tmp_path):
    """One process that is all of its group."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_in_distributed_data_parallel(group):
    model, inputs = build("llama")
    expected = loss_and_gradients(model, inputs)
    wrapped = nn.parallel.DistributedDataParallel(model)
    report = accelerate(wrapped)
    assert next(iter(report.joined)) == "module.model.layers.0.post_attention_layernorm"
    found = loss_and_gradients(wrapped, inputs)
    torch.testing.assert_close(list(found.values()), list(expected.values()))
    report.undo()


def test_with_fully_shard(group):
    model, inputs = build("llama")
    expected = loss_of(model, inputs)[1]
    shard = distributed.fsdp.fully_shard
    mesh = distributed.init_device_mesh("cpu", (1,))
    report = accelerate(model)
    for layer in model.model.layers:
        shard(layer, mesh=mesh)
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
    assert report.ran()["model.layers.0.post_attention_layernorm"] == (1, {})
    assert not accelerate(model).joined
    with pytest.raises(RuntimeError, match="got FSDPLlamaDecoderLayer"):
        report.undo()
    other, inputs = build("llama")
    for layer in other.model.layers:
        shard(layer, mesh=mesh)
    left = accelerate(other).left
    assert left["model.layers.0"] == (
        "FSDPLlamaDecoderLayer is a class made of LlamaDecoderLayer; accelerate first what is then wrapped"
    )


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_under_torch_compile_the_original_is_traced(name):
    graphs: list[list[list[str]]] = [[], []]
    model, inputs = build(name)
    del inputs["labels"]
    expected = model(**inputs).logits
    for place in (0, 1):
        if place:
            accelerate(model)
        torch._dynamo.reset()

        def keep(graph, _, place=place):
            graphs[place].append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
            return make_boxed_func(graph.forward)

        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
        torch.testing.assert_close(compiled(**inputs).logits, expected)
    assert graphs[1] == graphs[0]
    report = accelerate(compiled)  # finds what is in the wrapper
    assert not report.joined


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_compiled_and_has_run(whole):
    """Compiled anew with the classes that it has then."""
    model, inputs = build("gpt2")
    expected = loss_of(model, inputs)[1]
    torch._dynamo.reset()
    for part in (model,) if whole else model.transformer.h:
        part.compile(backend="eager")
    loss_of(model, inputs)
    report = accelerate(model)
    assert len(report.joined) == 2
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
    report.undo()
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)


# What is read from the source.

FORWARDS = {
    "a sum and the norm of it": (
        """
        s = x + self.linear(x)
        r = s
        s = self.norm(s)
        return r + s * 2
        """,
        {"norm": SUM_FIRST},
    ),
    "one line each": (
        """
        x = x + self.linear(x)
        x = x + self.linear(self.norm(x))
        return x
        """,
        {"norm": SUM_FIRST},
    ),
    "the norm of a sum": ("return self.norm(self.linear(x) + x)", {"norm": SUM_FIRST}),
    "a norm and the sum after it": (
        """
        y = self.linear(x)
        y = self.norm(y)
        y = x + y
        return y
        """,
        {"norm": SUM_AFTER},
    ),
    "a branch between": (
        """
        s = x + self.linear(x)
        if again is not None:
            s = s + again
        r = s
        s = self.norm(s)
        return r + s * 2
        """,
        {"norm": SUM_FIRST},
    ),
    "within a branch": (
        """
        if again is None:
            y = self.norm(x + x)
        else:
            again = again + x
            y = self.norm(again)
        return y
        """,
        {"norm": SUM_FIRST},
    ),
    "the sum is changed before the norm": (
        """
        s = x + self.linear(x)
        s = s * 2
        return self.norm(s)
        """,
        None,
    ),
    "another name is normalised": (
        """
        s = x + self.linear(x)
        return self.norm(x) + s
        """,
        None,
    ),
    "the norm may not be called": (
        """
        s = x + self.linear(x)
        return self.norm(s) if again is not None else s
        """,
        None,
    ),
    "the norm is called twice": (
        """
        s = x + self.linear(x)
        return self.norm(s) + self.norm(s)
        """,
        None,
    ),
    "the sum is read after the norm": (
        """
        y = self.norm(x)
        z = x + y
        return y * z
        """,
        None,
    ),
    "a norm that doubles": (
        """
        y = self.norm(x)
        y = y + y
        return y
        """,
        None,
    ),
    "a difference": ("return self.norm(self.linear(x) - x)", None),
    "more arguments": ("return self.norm(self.linear(x) + x, *again or ())", None),
    "the branch tests the sum": (
        """
        s = x + self.linear(x)
        if s is not None:
            s = s * 2
        return self.norm(s)
        """,
        None,
    ),
}


@pytest.fixture
def module_of(tmp_path, request):
    """Source as the method `forward` of a module in a file."""
    names = []

    def make(body: str, head: str = "") -> Any:
        name = f"block_{len(names)}_{tmp_path.name}"
        names.append(name)
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"import torch\n\n\nclass Block(torch.nn.Module):\n    norms = 1\n\n{head}"
            + textwrap.indent(
                "def forward(self, x, again=None):\n" + textwrap.indent(textwrap.dedent(body).strip(), " " * 4), " " * 4
            )
            + "\n"
        )
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("case", FORWARDS)
def test_what_is_joined_in_a_source(module_of, case):
    """And a joined forward computes the same, whether again is given or not."""
    body, joins = FORWARDS[case]
    original = module_of(body).Block
    forward = rewritten(original.forward, joins or {"norm": SUM_FIRST})
    if joins is None:
        assert forward is None
        assert rewritten(original.forward, {"norm": SUM_AFTER}) is None
        return
    block = original()
    block.linear, block.norm = nn.Linear(8, 8), nn.LayerNorm(8, eps=0.1)
    x = random(3, 8, dtype=torch.float32)
    calls = [(x,), (x, x.cos())]
    expected = [block(*call) for call in calls]
    replace_norms(block)
    block.__class__ = type("Block", (blocks.Block, original), {"forward": forward})
    block._ran = blocks.Counter()
    torch.testing.assert_close([block(*call) for call in calls], expected)
    assert block._ran == {("norm", ""): 2}
    assert forward.__code__.co_filename == original.forward.__code__.co_filename


def test_a_forward_that_is_not_the_one_known(module_of, tmp_path):
    body, joins = FORWARDS["the norm of a sum"]
    module = module_of(body)
    original = module.Block.forward
    assert rewritten(original, joins)
    assert rewritten(original, {**joins, "norm2": SUM_FIRST}) is None
    assert rewritten(module_of(body, "    @torch.no_grad()\n").Block.forward, joins) is None
    assert rewritten(eval("lambda self, x: self.norm(x + x)"), joins) is None
    outside = 1
    assert rewritten(lambda self, x: self.norm(x + outside), joins) is None
    path = tmp_path / f"{module.__name__}.py"
    path.write_text(path.read_text().replace("self.linear(x) + x", "self.linear(x) + 2 * x"))
    rewrite.inspect.linecache.checkcache()
    assert rewritten(original, joins) is None  # the file has changed since it was imported


def test_a_block_whose_forward_was_replaced_is_left(monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    model, _ = build("llama")
    model.model.layers[1].forward = lambda x, **_: x
    with monkeypatch.context() as patch:
        patch.setattr(modeling.LlamaDecoderLayer, "forward", lambda self, x, **_: x)
        blocks.joined_class.cache_clear()
        report = accelerate(model)
    blocks.joined_class.cache_clear()
    assert report.left == {
        "model.layers.0": "the forward of LlamaDecoderLayer is not the one that is known",
        "model.layers.1": "the forward of this LlamaDecoderLayer was replaced on the instance",
    }
    report.undo()
