"""replace_norms replaces norms of other classes than torch.nn's that compute one of our norms, and leaves others."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

from cunorm.torch import accelerate, replace_norms  # noqa: E402
from cunorm.torch.models import accelerate as accelerate_module  # noqa: E402
from cunorm.torch.models import forms, replace  # noqa: E402

COLS = 32


class LayerNorm(nn.Module):
    """nanoGPT's norm, whose eps stands in its method."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    """Meta's norm."""

    def __init__(self, dim: int = COLS, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class OnePlusNorm(RMSNorm):
    def forward(self, x):
        return (self._norm(x.float()) * (1 + self.weight.float())).type_as(x)


class Fp32LayerNorm(nn.LayerNorm):
    """CLIP's norm."""

    def forward(self, x):
        weight, bias = (None if parameter is None else parameter.float() for parameter in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


class ByHandNorm(LayerNorm):
    """A norm whose eps has another name, and which computes in the dtype of x."""

    def __init__(self, ndim, bias):
        super().__init__(ndim, bias)
        self.small = 1e-3

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        y = self.weight * x / (x.square().mean(-1, keepdim=True) + self.small).sqrt()
        return y if self.bias is None else y + self.bias


class PlainNorm(nn.Module):
    """A norm without a weight."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class ColumnsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalized_shape = COLS

    def forward(self, x):
        return F.layer_norm(x, (self.normalized_shape,))


class Normalise(RMSNorm):
    """A norm whose name does not end in Norm."""


# Each case is (what makes the norm, whether norms=[...] must name it, operation, eps or its attribute).
TAKEN: dict[str, tuple[Callable[[], nn.Module], bool, str, Any]] = {
    "nanoGPT's": (lambda: LayerNorm(COLS, bias=True), False, "layer_norm", 1e-5),
    "nanoGPT's without bias": (lambda: LayerNorm(COLS, bias=False), False, "layer_norm", 1e-5),
    "Meta's": (RMSNorm, False, "rms_norm", "eps"),
    "1 + weight": (OnePlusNorm, False, "zero_centered_rms_norm", "eps"),
    "CLIP's": (lambda: Fp32LayerNorm(COLS), False, "layer_norm", "eps"),
    "CLIP's without weight": (lambda: Fp32LayerNorm(COLS, elementwise_affine=False), False, "layer_norm", "eps"),
    "by hand": (lambda: ByHandNorm(COLS, bias=True), False, "layer_norm", "small"),
    "without a weight, of a number of columns": (ColumnsNorm, False, "layer_norm", 1e-5),
    "without a weight": (PlainNorm, False, "rms_norm", 1e-6),
    "named": (Normalise, True, "rms_norm", "eps"),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a norm with parameters that are neither 0 nor 1."""
    norm = make()
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data = random(*parameter.shape, dtype=torch.float32, seed=seed + 9)
    return norm


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", TAKEN)
def test_a_class_of_ones_own_is_taken(device, case, dtype):
    """The norm and its copies keep their values, gradients and dtypes, and `undo` gives back the original."""
    make, named, operation, eps = TAKEN[case]
    norm = made(make).to(device, dtype)
    x = (random(4, 3, COLS, dtype=dtype, device=device) * 0.1).requires_grad_()
    dy = random(4, 3, COLS, dtype=dtype, device=device, seed=3)
    ours, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    report = replace_norms(ours, norms=[type(norm)] if named else [])
    assert report.swapped == {"": type(norm).__name__}
    assert (ours._form.operation, ours._form.eps) == (operation, eps)
    results = []
    for which in (exact, norm, ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        given = x.double() if which is exact else x
        y = which(given)
        gradients = torch.autograd.grad(y, [x, *which.parameters()], dy.to(y.dtype))
        results.append([y, *gradients])
    room = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for replaced in results[2:]:
        for reference, before, after in zip(results[0], results[1], replaced, strict=True):
            assert after.dtype == before.dtype
            scale = float(reference.detach().abs().max())
            torch.testing.assert_close(after.double(), reference.double(), rtol=0, atol=room * scale)
    report.undo()
    assert type(ours) is type(norm)
    assert torch.equal(ours(x), norm(x))


def of_name(cls: type, name: str) -> type:
    """Make `cls` look like a class of that name in code that transformers has loaded."""
    cls.__name__, cls.__module__ = name, "transformers_modules.remote"
    return cls


def remote(norm: Callable[..., Tensor], **attributes: Any) -> Callable[[], nn.Module]:
    """Return what makes a module with weight, eps and `attributes` whose forward is `norm`."""

    def make() -> nn.Module:
        module = of_name(type("", (RMSNorm,), {"forward": norm}), "RemoteNorm")()
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    return make


def over(*axes: int) -> Callable[[], nn.Module]:
    return remote(lambda self, x: x * torch.rsqrt(x.pow(2).mean(axes or None, keepdim=True) + self.eps) * self.weight)


def in_groups(self, x):
    y = x.unflatten(-1, (4, -1))
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def groups_of_64(self, x):
    return F.layer_norm(x.unflatten(-1, (-1, 64)), (64,)).flatten(-2)


def with_buffer() -> nn.Module:
    module = RMSNorm()
    module.register_buffer("calls", torch.zeros(()))
    return module


def of_other_parameters() -> nn.Module:
    module = RMSNorm()
    module.scale = nn.Parameter(torch.ones(1))
    return module


def by_dtype(self, x):
    eps = 1e-2 if x.dtype is torch.bfloat16 else self.eps
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).type_as(x) * self.weight


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "over axis 1": (over(1), "computes something else"),
    "over all axes but the first": (over(1, 2), "computes something else"),
    "over the last two axes": (over(-2, -1), "computes something else"),
    "over the axes after the second": (
        remote(lambda self, x: RMSNorm.forward(self, x) if x.dim() < 4 else F.instance_norm(x)),
        "computes something else",
    ),
    "over the whole tensor": (over(), "computes something else"),
    "over groups of columns": (remote(in_groups), "computes something else"),
    "over groups of 64 columns, without a weight": (
        lambda: of_name(type("", (nn.Module,), {"forward": groups_of_64}), "RemoteNorm")(),
        "computes something else",
    ),
    "a flag of the instance": (
        remote(
            lambda self, x: RMSNorm.forward(self, x) + x if self.residual else RMSNorm.forward(self, x), residual=True
        ),
        "computes something else",
    ),
    "a scale of the instance": (
        remote(lambda self, x: RMSNorm.forward(self, x) * self.scale, scale=2.0),
        "something else",
    ),
    "something else in training": (
        remote(lambda self, x: F.dropout(RMSNorm.forward(self, x), 0.5, self.training)),
        "computes something else",
    ),
    "something else in evaluation": (
        remote(lambda self, x: RMSNorm.forward(self, x) * (1 if self.training else 2)),
        "computes something else",
    ),
    "another eps for a dtype": (remote(by_dtype), "computes something else"),
    "a norm that is clamped": (
        remote(lambda self, x: F.normalize(x, dim=-1) * COLS**0.5 * self.weight),
        "computes something else",
    ),
    "without x": (
        remote(lambda self, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight),
        "computes something else",
    ),
    "in place": (
        remote(lambda self, x: F.layer_norm(x.sub_(x.mean(-1, keepdim=True)), (COLS,), self.weight)),
        "computes something else",
    ),
    "several results": (remote(lambda self, x: (RMSNorm.forward(self, x), x)), "computes something else"),
    "autocast's dtype": (
        remote(
            lambda self, x: (
                RMSNorm.forward(
                    self, x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else x
                )
                .type_as(x if not torch.is_autocast_enabled("cuda") else x.to(torch.get_autocast_dtype("cuda")))
                .to(torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype)
            )
        ),
        "has a result of autocast's dtype",
    ),
    "a buffer": (with_buffer, "has submodules or buffers"),
    "another parameter": (of_other_parameters, "has the parameters scale: only weight and bias are known"),
    "what raises": (remote(lambda self, x: self.kernel(x)), "raised AttributeError when a copy was tried on the CPU"),
    "more arguments": (remote(lambda self, x, a, b: x), "has a forward of 3 arguments"),
}


@pytest.mark.parametrize("case", LEFT)
@pytest.mark.parametrize("training", [True, False])
def test_what_computes_something_else_is_left(case, training):
    """The norm is unchanged, and the report names its class and the reason."""
    make, reason = LEFT[case]
    norm = made(make).train(training)
    before = dict(vars(norm))
    report = replace_norms(nn.Sequential(norm))
    assert not report.swapped
    assert re.fullmatch(rf"{type(norm).__name__} of {type(norm).__module__} .*{reason}.*", report.left["0"])
    assert vars(norm) == before


@pytest.mark.parametrize("function", [replace_norms, accelerate])
def test_a_name_that_does_not_end_in_norm_is_said_to_be_named(function):
    model = nn.Sequential(Normalise(), of_name(type("", (RMSNorm,), {}), "RMSNorm2")())
    type(model[1]).__module__ = __name__
    report = function(model)
    assert (
        f"RMSNorm2 of {__name__} was not tried, as its name does not end in Norm: name it by norms=[RMSNorm2]"
        in str(report)
    )
    report.undo()
    report = function(model, norms=[Normalise, type(model[1])])
    assert "left 0" in str(report)
    assert [type(norm).__name__ for norm in model] == ["Normalise", "RMSNorm2"]
    assert all(hasattr(norm, "_form") for norm in model)


@pytest.mark.parametrize("norms", [RMSNorm, [RMSNorm()], ["RMSNorm"], "RMSNorm", [dict], None], ids=str)
@pytest.mark.parametrize("function", [replace_norms, accelerate])
def test_norms_that_are_no_classes_of_modules(function, norms):
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}: norms must be a sequence of classes of modules, such as"
    ):
        function(nn.Sequential(nn.LayerNorm(8)), norms=norms)


def test_a_model_is_said_to_be_on_the_cpu_and_replaced_already():
    model = nn.Sequential(nn.LayerNorm(8), RMSNorm())
    report = replace_norms(model)
    assert str(report).startswith("this model is on the CPU: torch's operators run\nswapped 2, left 0\n")
    assert "already replaced: 2 norms are cunorm's" in str(replace_norms(model))
    assert "already" not in str(report)
    assert "on the CPU" not in str(replace_norms(nn.Sequential(nn.LayerNorm(8, device="meta"))))


def test_modules_with_the_same_attributes_are_tried_once(monkeypatch):
    tried = []
    original = forms.form_of
    monkeypatch.setattr(replace, "form_of", lambda module: tried.append(module) or original(module))
    model = nn.Sequential(RMSNorm(), RMSNorm(), RMSNorm(eps=1e-5), RMSNorm(16), RMSNorm())
    model[4].scales = {}  # has no hash
    assert len(replace_norms(model).swapped) == 5
    assert [id(module) for module in tried] == [id(model[place]) for place in (0, 2, 3, 4)]


def test_a_trial_leaves_no_trace():
    """A trial changes neither torch's random state nor autocast, calls no hooks and ignores the default device."""
    norm = RMSNorm()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    state, autocast = torch.get_rng_state(), torch.is_autocast_enabled("cuda")
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert replace_norms(norm).swapped
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_autocast_enabled("cuda") is autocast


def test_dtypes_that_the_original_refuses_go_to_the_original():
    norm = LayerNorm(COLS, bias=True)
    replace_norms(norm)
    x = random(3, COLS, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        norm(x)


@pytest.mark.parametrize("case", TAKEN)
def test_dtypes_under_autocast_are_those_of_a_gpu(case):
    """The dtypes that a trial on the CPU finds are those of fake tensors of a GPU."""
    make, *_ = TAKEN[case]
    norm = made(make)
    form = forms.form_of(norm)
    for (x_dtype, weight_dtype), dtype in (dict(form.dtypes) | dict(form.autocast)).items():
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(2, COLS, dtype=x_dtype, device="cuda")
            for name, parameter in norm._parameters.items():
                if parameter is not None:
                    norm._parameters[name] = torch.empty(COLS, dtype=weight_dtype, device="cuda")
            before = torch.is_autocast_enabled("cuda")
            torch.set_autocast_enabled("cuda", True)
            try:
                assert norm(x).dtype is dtype
            finally:
                torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("elements", [COLS, COLS + 1])
def test_what_calls_torchs_operator_does_so_below_a_size(monkeypatch, elements):
    """A norm that calls torch's operator is left to it below a size, and one of several operators never is."""
    monkeypatch.setattr(accelerate_module, "HOST_BOUND_BELOW", elements)
    ours = []
    monkeypatch.setattr(replace, "norm", lambda operation, x, *_: ours.append(operation) or x)
    model = nn.Sequential(LayerNorm(COLS, bias=False), RMSNorm())
    accelerate(model)
    model(random(1, COLS, dtype=torch.float32))
    assert ours == [["layer_norm", "rms_norm"], ["rms_norm"]][elements > COLS]


class OfTimm(nn.LayerNorm):
    """A short copy of timm's LayerNorm, because timm itself needs torchvision."""

    def __init__(self, fast: bool = False):
        super().__init__(COLS)
        self._fast_norm = fast

    def forward(self, x):
        if not (self._fast_norm and torch.is_autocast_enabled(x.device.type)):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (tensor.to(dtype) for tensor in (x, self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


OfTimm.__module__, OfTimm.__name__ = "timm.layers.norm", "LayerNorm"


def test_the_norm_of_timm():
    """timm's norm is torch's, unless it was made for timm's fast norm."""
    model = nn.Sequential(OfTimm(), OfTimm(fast=True))
    x = random(3, COLS, dtype=torch.float32)
    expected = model(x)
    report = accelerate(model).norms
    assert (report.swapped, type(model[0]).__module__) == ({"0": "LayerNorm"}, "cunorm.torch.norm.modules")
    assert report.left == {"1": "LayerNorm of timm.layers.norm has a result of autocast's dtype, where autocast is on"}
    torch.testing.assert_close(model(x), expected)


def hooked(model: nn.Module) -> None:
    """Replace the forward methods as Hugging Face's accelerate does it for device_map."""
    for module in model.modules():
        module._hf_hook, module._old_forward = object(), module.forward
        module.forward = functools.partial(type(module).forward, module)


def unhooked(model: nn.Module) -> None:
    for module in model.modules():
        module.forward = module._old_forward
        del module._hf_hook, module._old_forward


@pytest.mark.parametrize("function", [replace_norms, accelerate])
def test_hooks_of_device_map(function):
    """The report names the remedy once, and the remedy works."""
    model = nn.Sequential(nn.LayerNorm(COLS), RMSNorm())
    x = random(3, COLS, dtype=torch.float32)
    expected = model(x)
    hooked(model)
    report = function(model)
    assert str(report).count("call remove_hook_from_submodules(model) of Hugging Face's accelerate.hooks first") == 1
    left = report.left if function is replace_norms else report.norms.left
    assert left["1"] == "hooks of device_map have replaced the forward of this RMSNorm"
    unhooked(model)
    report = function(model)
    assert "left 0" in str(report)
    hooked(model)
    calls: list[str] = []
    for norm in model:
        norm.register_forward_hook(lambda *_: calls.append("called"))
    torch.testing.assert_close(model(x), expected)
    assert calls == ["called"] * 2
