"""Accelerated models with hooks, checkpoints, copies, wrappers, frozen parameters and other dtypes."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch_models import build, loss_and_gradients, loss_of  # noqa: E402

from cunorm.torch import accelerate  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Let small models run the norms that large ones run."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", 1)


def test_hooks_see_what_they_saw():
    model, inputs = build("llama")
    seen: list[list] = [[], []]
    norm, layer = model.model.layers[0].post_attention_layernorm, model.model.layers[1]
    for place in (0, 1):
        if place:
            accelerate(model)
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3"])
def test_hidden_states_are_those_of_the_original(name):
    model, inputs = build(name)
    del inputs["labels"]
    expected = model(**inputs, output_hidden_states=True).hidden_states
    accelerate(model)
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == 3
    torch.testing.assert_close(states, expected)


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
    results = loss_and_gradients(model.train(), inputs)
    assert expected.keys() - results.keys() <= {"model.embed_tokens.weight"}
    torch.testing.assert_close(results, {key: expected[key] for key in results})


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
    accelerate(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_of(twin, inputs)[1], expected)
        assert [*map(type, twin.modules())] == [*map(type, model.modules())]


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


@pytest.mark.slow
def test_without_memory_and_moved():
    with torch.device("meta"):
        model, _ = build("llama", device="meta")
    accelerate(model)
    other, inputs = build("llama")
    model = model.to_empty(device="cpu")
    model.load_state_dict(other.state_dict())
    model.model.rotary_emb = other.model.rotary_emb
    torch.testing.assert_close(loss_of(model, inputs)[1], loss_of(other, inputs)[1])
    accelerate(other)
    torch.testing.assert_close(loss_of(other.double(), inputs)[1], loss_of(model.double(), inputs)[1])


@pytest.fixture
def group(tmp_path):
    """Let this process be the only one of a group."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.slow
def test_in_distributed_data_parallel(group):
    model, inputs = build("llama")
    expected = loss_and_gradients(model, inputs)
    wrapped = nn.parallel.DistributedDataParallel(model)
    report = accelerate(wrapped)
    assert next(iter(report.norms.swapped)) == "module.model.layers.0.input_layernorm"
    results = loss_and_gradients(wrapped, inputs)
    torch.testing.assert_close(list(results.values()), list(expected.values()))
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
    report.undo()  # fully_shard has wrapped the layers, not their norms
    shard(model.model.norm, mesh=mesh)
    left = accelerate(model).norms.left
    assert left["model.norm"] == "FSDPLlamaRMSNorm is a class made of LlamaRMSNorm, not LlamaRMSNorm itself"


@pytest.mark.slow
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
    assert not accelerate(compiled).norms.swapped  # the norms in the wrapper are replaced already


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_what_was_compiled_and_has_run(whole):
    """What has been compiled is compiled anew for the classes that it has afterwards."""
    model, inputs = build("gpt2")
    expected = loss_of(model, inputs)[1]
    torch._dynamo.reset()
    for part in (model,) if whole else model.transformer.h:
        part.compile(backend="eager")
    loss_of(model, inputs)
    report = accelerate(model)
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
    report.undo()
    torch.testing.assert_close(loss_of(model, inputs)[1], expected)
