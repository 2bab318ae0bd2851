"""The norms that Hugging Face's `kernels` puts into a model by `kernel_mapping` compute what the model's own do.

`kernels` accepts mappings for other devices than CUDA, so the layers for "cuda" are registered for "cpu" here too.
"""

from __future__ import annotations

import copy
import doctest
import sys

import pytest

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
transformers = pytest.importorskip("transformers")

from kernels import Mode, kernelize, use_kernel_mapping  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_models import build, loss_of  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # noqa: E402
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated  # noqa: E402

from cunorm.torch import accelerate, kernel_mapping  # noqa: E402
from cunorm.torch.models import mapping as mapping_module  # noqa: E402

MARKED = {
    LlamaRMSNorm: "RMSNorm",
    Olmo2RMSNorm: "RMSNorm",
    Qwen3RMSNorm: "RMSNorm",
    Qwen3_5RMSNorm: "RMSNormZeroCentered",
    Qwen3_5RMSNormGated: "RMSNormGated",
    KimiLinearRMSNormGated: "RMSNormGated",
}
MODES = [mode | compiled for mode in (Mode.TRAINING, Mode.INFERENCE) for compiled in (Mode(0), Mode.TORCH_COMPILE)]


@pytest.fixture(autouse=True)
def marks(monkeypatch):
    """Mark the classes of transformers, which marks them itself only for some versions of `kernels`."""
    for cls, name in MARKED.items():
        assert getattr(cls, "kernel_layer_name", name) == name
        monkeypatch.setattr(cls, "kernel_layer_name", name, raising=False)


def kernelized(model: nn.Module, mode: Mode = Mode.TRAINING | Mode.TORCH_COMPILE) -> nn.Module:
    both = {name: {**on, "cpu": on["cuda"]} for name, on in kernel_mapping().items()}
    with use_kernel_mapping(both, inherit_mapping=False):
        return kernelize(model, mode=mode)


def layers_of(model: nn.Module) -> list[type]:
    """Return the layers whose forward the modules have instead of their own."""
    layers = (mapping_module.RMSNorm, mapping_module.RMSNormZeroCentered, mapping_module.RMSNormGated)
    functions = [vars(module)["forward"].__func__ for module in model.modules() if "forward" in vars(module)]
    return [layer for function in functions for layer in layers if layer.forward is function]


def norm_of(cls: type, **attributes) -> nn.Module:
    norm = cls(64, eps=0.1)
    vars(norm).update(attributes)
    with torch.no_grad():
        norm.weight.copy_(random(64, dtype=torch.float32, seed=9))
    return norm


@on_devices
@pytest.mark.parametrize(("name", "mode"), [*(("llama", mode) for mode in MODES), ("qwen3", MODES[1])], ids=str)
def test_a_model(device, name, mode):
    """Logits and gradients are the same in every mode of `kernels`."""
    model, inputs = build(name, device=device)
    results = []
    for which in (copy.deepcopy(model), kernelized(model, mode)):
        loss, logits = loss_of(which, inputs)
        loss.backward()
        results.append([logits, *(p.grad for p in which.parameters())])
    assert layers_of(model) == [mapping_module.RMSNorm] * {"llama": 5, "qwen3": 9}[name]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@on_devices
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "bfloat16 times float32", "float32 times float16"])
@pytest.mark.parametrize("cls", [cls for cls in MARKED if cls is not Qwen3RMSNorm])  # Qwen3's norm is Llama's
def test_a_norm(device, cls, dtypes, compiled):
    """The result has the dtype of the model's own, and values and gradients are rounded once."""
    x_dtype, _, weight_dtype = dtypes.partition(" times ")
    norm = norm_of(cls).to(device, getattr(torch, weight_dtype or x_dtype))
    tensors = [random(5, 64, dtype=getattr(torch, x_dtype), device=device, seed=seed) for seed in range(2)]
    tensors = [tensor.requires_grad_() for tensor in tensors[: 1 + (MARKED[cls] == "RMSNormGated")]]
    exact = copy.deepcopy(norm).double()
    ours = kernelized(copy.deepcopy(norm))
    assert [layer.__name__ for layer in layers_of(ours)] == [MARKED[cls]]
    torch._dynamo.reset()
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    results = []
    for which, function in ((exact, exact), (norm, norm), (ours, call)):
        given = [tensor.double() if which is exact else tensor for tensor in tensors]
        y = function(*given)
        results.append([y, *torch.autograd.grad(y.sum(), [which.weight, *tensors])])
    assert [tensor.dtype for tensor in results[2]] == [tensor.dtype for tensor in results[1]]
    for reference, result in zip(results[0], results[2], strict=True):
        # The gradient of weight is summed over five rows before it is rounded.
        room = {"atol": 1e-5, "rtol": 1e-5} if result.dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(result.to(reference.dtype), reference, **room)


def test_an_activation_that_is_not_known_runs_as_the_model_has_it():
    norm = norm_of(Qwen3_5RMSNormGated, activation="tanh")
    x, gate = (random(5, 64, dtype=torch.float32, seed=seed) for seed in range(2))
    expected = norm(x, gate)
    assert torch.equal(kernelized(norm)(x, gate), expected)
    assert layers_of(norm) == [mapping_module.RMSNormGated]


def test_rows_of_any_number_are_compiled_twice_at_most():
    """The norm is compiled for the rows of the first call, and then for any number of rows."""
    torch._dynamo.reset()
    norm = kernelized(norm_of(LlamaRMSNorm).to(torch.bfloat16)).requires_grad_(False)  # so that it is one operator
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    for rows in (3, 5, 7, 9):
        compiled(random(rows, 64, dtype=torch.bfloat16))
    assert counter.frame_count == 2
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("rms_norm" in target or "cunorm" in target for target in targets) == 2


def test_what_is_registered_for_other_names_stays(monkeypatch):
    """The device type is "cuda", whose compute capability must be made up on a machine without a GPU."""
    monkeypatch.setattr(kernels.layer.repos, "_find_capability", lambda: 90)
    other = mapping_module._Here(nn.Module)
    registered = {name: {"cuda": {Mode.TRAINING: other, Mode.INFERENCE: other}} for name in ("RMSNorm", "SiLU")}
    with use_kernel_mapping(registered, inherit_mapping=False), use_kernel_mapping(kernel_mapping()):
        mapping = kernels.layer.globals._KERNEL_MAPPING.get()
        assert list(mapping["SiLU"]["cuda"].repos.values()) == [other, other]
        norm = kernelize(norm_of(LlamaRMSNorm), mode=Mode.TRAINING, device="cuda")
    assert layers_of(norm) == [mapping_module.RMSNorm]


def test_accelerate_leaves_what_was_kernelized():
    model = kernelized(build("llama")[0])
    report = accelerate(model)
    assert not report.norms.swapped
    assert report.norms.left["model.norm"] == "the forward of this LlamaRMSNorm was replaced on the instance"


def test_without_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match="Hugging Face's package kernels must be installed"):
        kernel_mapping()


def test_the_example():
    assert doctest.testmod(mapping_module).failed == 0
