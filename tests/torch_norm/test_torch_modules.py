"""The modules behave as torch.nn's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's own samples need expecttest")

from torch import nn  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

import cunorm.torch  # noqa: E402
from cunorm.torch import LayerNorm, RMSNorm  # noqa: E402

PAIRS = [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pairs = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=["LayerNorm", "RMSNorm"])


def of_function(name: str) -> Any:
    """Return torch's samples of a function: imported here, as that takes four seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == f"nn.functional.{name}")
    return info


def of_module(cls: type) -> Any:
    """Return torch's samples of a module."""
    from torch.testing._internal.common_modules import module_db

    (info,) = (module for module in module_db if module.module_cls is cls)
    return info


def assert_same_results(ours, torchs, x, dtype):
    """Hold results to a few roundings of the largest numbers that enter: dx is a difference of terms of |dy| * rstd."""
    rstd = 1e-5**-0.5 if x.shape[-1:] == (1,) else 1.0  # a row of one number has no variance
    largest = max([rstd, *(float(t.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in torchs if t.numel())])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, torchs, rtol=2 * eps, atol=64 * eps * largest, equal_nan=True)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_samples_of_torchs_functions(device, dtype, name):
    info = of_function(name)
    samples = [*info.sample_inputs(device, dtype, requires_grad=True), *info.reference_inputs(device, dtype)]
    assert len(samples) >= 10
    for sample in samples:
        outputs = []
        for function in (getattr(cunorm.torch, name), info.op):
            y = function(sample.input, *sample.args, **sample.kwargs)
            wanted = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor) and t.requires_grad]
            dy = random(*y.shape, device=device, dtype=dtype)
            outputs.append([y, *torch.autograd.grad(y, wanted, dy)] if wanted else [y])
        assert_same_results(*outputs, sample.input, dtype)


@pytest.mark.parametrize("name", ["rms_norm"])
def test_the_errors_of_torchs_functions(name):
    info = of_function(name)
    for bad in info.error_inputs("cpu"):
        sample = bad.sample_input
        with pytest.raises(bad.error_type):
            getattr(cunorm.torch, name)(sample.input, *sample.args, **sample.kwargs)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pairs
def test_the_samples_of_torchs_modules(device, dtype, ours, torchs):
    info = of_module(torchs)
    samples = info.module_inputs_func(info, device, dtype, True, training=True)
    assert len(samples) >= 5
    for sample in samples:
        create, call = sample.constructor_input, sample.forward_input
        modules = [cls(*create.args, **create.kwargs).to(device, dtype) for cls in (ours, torchs)]
        modules[0].load_state_dict(modules[1].state_dict())
        results = []
        for module in modules:
            y = module(*call.args, **call.kwargs)
            wanted = [*call.args, *module.parameters()]
            dy = random(*y.shape, device=device, dtype=dtype)
            results.append([y, *torch.autograd.grad(y, wanted, dy)])
        assert_same_results(*results, call.args[0], dtype)


@pairs
def test_state_dict_goes_both_ways(ours, torchs):
    a, b = ours(8, dtype=torch.bfloat16), torchs(8, dtype=torch.bfloat16)
    assert list(a.state_dict()) == list(b.state_dict())
    nn.init.normal_(a.weight)
    b.load_state_dict(a.state_dict(), strict=True)
    a.load_state_dict(b.state_dict(), strict=True)
    assert isinstance(a, torchs)
    assert repr(a) == repr(b)
    assert torch.equal(a.weight, b.weight)


@pairs
def test_copies(ours, torchs):
    module = ours(8, zero_centered_gamma=True, sequence_parallel=True, sm_margin={"backward": 3})
    x = random(3, 8, dtype=torch.float32)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is ours
        assert (twin.zero_centered_gamma, twin.sm_margin) == (True, {"backward": 3})
        assert all(p.sequence_parallel is True for p in twin.parameters())
        assert torch.equal(twin(x), module(x))


@pairs
def test_meta_device(ours, torchs):
    module = ours(8, device="meta", zero_centered_gamma=True, sequence_parallel=False)
    assert module(torch.ones(3, 8, device="meta")).shape == (3, 8)
    module.to_empty(device="cpu")
    assert all(p.sequence_parallel is False for p in module.parameters())
    module.reset_parameters()
    assert module.weight.tolist() == [0.0] * 8
    assert all(p.sequence_parallel is False for p in module.parameters())
    assert torch.equal(module(random(3, 8).float()), torchs(8)(random(3, 8).float()))


@pairs
def test_resetting_leaves_parameters_on_the_meta_device(ours, torchs):
    """The modules do as torch.nn's modules, and unlike TransformerEngine's."""
    for module in (ours(8, device="meta"), torchs(8, device="meta")):
        module.reset_parameters()
        assert all(parameter.is_meta for parameter in module.parameters())


CONSTRUCTORS = {
    "LayerNorm": lambda **options: LayerNorm(8, **options),
    "RMSNorm": lambda **options: RMSNorm(8, **options),
    "AddLayerNorm": lambda **options: cunorm.torch.AddLayerNorm(8, **options),
    "AddRMSNorm": lambda **options: cunorm.torch.AddRMSNorm(8, **options),
    "RMSNormGated": lambda **options: cunorm.torch.RMSNormGated(8, **options),
    "AdaLayerNorm": lambda **options: cunorm.torch.AdaLayerNorm(8, 16, **options),
    "LayerNormLinear": lambda **options: cunorm.torch.LayerNormLinear(8, 4, **options),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_torchs_default_device_is_that_of_parameters(name):
    make = CONSTRUCTORS[name]
    modules = {}
    with torch.device("meta"):
        modules["meta, within"] = make()
        modules["cpu, given within"] = make(device="cpu")
    torch.set_default_device("meta")
    try:
        modules["meta, set"] = make()
    finally:
        torch.set_default_device(None)
    with torch.device("cpu"):
        modules["cpu, within"] = make()
    modules["meta, given"] = make(device="meta")
    for device, module in modules.items():
        assert {p.device.type for p in module.parameters()} == {device.split(",")[0]}, device
    # Without a device, LayerNormLinear is on the GPU as TransformerEngine's is, and the others are as torch.nn's are.
    other = "cuda" if name == "LayerNormLinear" and torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in make().parameters()} == {other}


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pairs
def test_the_dtype_of_autocast_where_it_is_asked_for(device, dtype, ours, torchs):
    """TransformerEngine's modules do so too, but here x is not rounded before it is normalised, and float64 stays."""
    plain, autocast = (ours(8, device=device, dtype=dtype, autocast_output=value) for value in (False, True))
    x = random(3, 8, device=device, dtype=dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y, expected, of_torch = autocast(x), plain(x), torchs(8, device=device, dtype=dtype)(x)
    assert expected.dtype is of_torch.dtype
    assert y.dtype is (torch.float64 if dtype is torch.float64 else torch.bfloat16)
    torch.testing.assert_close(y, plain(x).to(y.dtype))
    gradients = torch.autograd.grad(y.sum(), [x, *autocast.parameters()])
    assert [gradient.dtype for gradient in gradients] == [dtype] * len(gradients)
    assert autocast(x).dtype is dtype  # outside autocast
    assert "autocast_output=True" in repr(autocast)
    assert copy.deepcopy(autocast).autocast_output


@pytest.mark.parametrize("value", [None, True, False])
@pairs
def test_sequence_parallel_marks_the_parameters(ours, torchs, value):
    for parameter in ours(8, sequence_parallel=value).half().parameters():
        assert getattr(parameter, "sequence_parallel", None) is value


@pairs
def test_spellings_of_transformer_engine(ours, torchs):
    with pytest.warns(DeprecationWarning, match="hidden_size is deprecated"):
        module = ours(hidden_size=8, params_dtype=torch.float16)
    assert module.normalized_shape == (8,)
    assert module.weight.dtype is torch.float16


@on_devices
@pairs
def test_zero_centered_gamma(device, ours, torchs):
    """1 + weight is computed in the compute dtype: in bfloat16, the dtype of weight, 2^-9 would be lost."""
    module = ours(64, device=device, dtype=torch.bfloat16, zero_centered_gamma=True)
    x = random(4, 64, device=device, dtype=torch.float32)
    plain = torchs(64, device=device)(x)
    torch.testing.assert_close(module(x), plain)
    nn.init.constant_(module.weight, 2.0**-9)
    torch.testing.assert_close(module(x), plain * (1 + 2.0**-9), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pairs
@pytest.mark.parametrize("margin", [0, 5, {"forward": 1, "backward": 2, "inference": 3}])
def test_sm_margin_reaches_the_plan(ours, torchs, margin, monkeypatch):
    from cunorm.torch.norm import launching, nodes

    monkeypatch.setattr(nodes, "module", lambda: None)  # launches of C++ could not be observed
    margins = []
    run = launching.launch.run
    monkeypatch.setattr(
        launching.launch, "run", lambda plan, *a: margins.append(plan.problem.sm_margin) or run(plan, *a)
    )
    module = ours(64, device="cuda", sm_margin=margin)
    x = torch.ones(3, 64, device="cuda", requires_grad=True)
    module(x).sum().backward()
    with torch.no_grad():
        module(x)
    assert margins == ([margin] * 3 if isinstance(margin, int) else [1, 2, 3])
