"""LayerNormLinear in FP8: every keyword by every recipe, results in 8 bits, refusals, training and CUDA graphs.

On the CPU, products are emulated with the same bytes. Every case runs on a GPU too.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch_linear_float8 import COLS, ERROR, OUTS, RECIPES, ROWS, by_recipe, inputs, make, relative, step  # noqa: E402
from torch_tensors import on_devices, random, same  # noqa: E402

from bench.fp8_training import Size, last, train  # noqa: E402
from cunorm.torch import RowwiseScaling, autocast  # noqa: E402
from cunorm.torch.linear import recipes as followed  # noqa: E402
from cunorm.torch.linear.float8 import Float8  # noqa: E402
from cunorm.torch.linear.float8_arithmetic import cast_rows  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


# The module: every keyword by every recipe.

KEYWORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "RMSNorm": {"normalization": "RMSNorm"},
    "zero-centred": {"zero_centered_gamma": True},
    "zero-centred RMSNorm": {"zero_centered_gamma": True, "normalization": "RMSNorm"},
    "no bias": {"bias": False},
    "bias returned": {"return_bias": True},
    "z returned": {"return_layernorm_output": True},
    "z and bias returned": {"return_layernorm_output": True, "return_bias": True},
    "split": {"parameters_split": {"q": 96, "k_": 64, "v": 32}},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "main_grad of a split": {"fuse_wgrad_accumulation": True, "parameters_split": {"a": 90, "b": 102}},
    "delayed": {"delay_wgrad_compute": True},
    "delayed main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "z kept": {"keep_normalized": True},
}


@on_devices
@by_recipe
@pytest.mark.parametrize("options", KEYWORDS.values(), ids=list(KEYWORDS))
def test_every_keyword_by_every_recipe(device, options, recipe):
    """Results are near those of the same module in float64 without FP8."""
    module = make(device, **options)
    wide = copy.deepcopy(module).double()
    x, dy = inputs(device)
    expected = step(wide, x.double(), dy.double())
    with autocast(recipe=recipe):
        results = step(module, x, dy)
    assert len(results.outputs) == len(expected.outputs)
    assert relative(results.outputs[0], expected.outputs[0]) <= ERROR["e4m3"]
    for output, expected_output in zip(results.outputs[1:], expected.outputs[1:], strict=True):
        torch.testing.assert_close(output.double(), expected_output, rtol=1e-4, atol=1e-4)
    assert results.gradients.keys() == expected.gradients.keys()
    bound = ERROR[recipe.scheme.gradient]
    for name, expected_gradient in expected.gradients.items():
        gradient = results.gradients[name]
        if name.endswith("bias") and "norm" not in name:
            torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-2)
        else:
            assert relative(gradient, expected_gradient) <= bound, (name, relative(gradient, expected_gradient))


@on_devices
@by_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 13, 200])
def test_dtypes_and_numbers_of_rows(device, rows, dtype, recipe):
    module = make(device, dtype, return_layernorm_output=True)
    x, dy = inputs(device, dtype, rows)
    dy = dy / 64
    with autocast(recipe=recipe):
        results = step(module, x, dy)
    assert [o.dtype for o in results.outputs] == [dtype] * 2
    assert all(g.dtype is dtype for g in results.gradients.values())
    expected = step(copy.deepcopy(module).double(), x.double(), dy.double())
    if not rows:
        assert not any(g.any() for g in results.gradients.values())
        return
    assert relative(results.outputs[0], expected.outputs[0]) <= ERROR["e4m3"]
    assert relative(results.gradients["weight"], expected.gradients["weight"]) <= ERROR["e5m2"]
    assert relative(results.gradients["x"], expected.gradients["x"]) <= ERROR["e5m2"] + 0.01


@on_devices
def test_torch_autocast(device):
    """y and z have autocast's dtype, but weight is rounded to 8 bits from its own."""
    module = make(device, return_layernorm_output=True, return_bias=True)
    x, dy = inputs(device)
    with autocast(), torch.autocast(device, torch.bfloat16):
        y, bias, z = module(x)
    assert y.dtype is bias.dtype is z.dtype is torch.bfloat16
    y.backward(dy.bfloat16())
    assert x.grad.dtype is torch.float32
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in module.parameters())
    with autocast():
        exact = module(x)[0]
    torch.testing.assert_close(y.float(), exact, rtol=2.0**-8, atol=1e-6 if device == "cpu" else 2.0**-8)


@on_devices
@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["layer_norm_weight", "layer_norm_bias"], ["weight", "bias"]])
@by_recipe
def test_frozen_parameters(device, recipe, frozen):
    module = make(device)
    x, dy = inputs(device)
    with autocast(recipe=recipe):
        expected = step(module, x, dy).gradients
        for name in frozen:
            getattr(module, name).requires_grad_(False)
        module.zero_grad()
        x.grad = None
        module(x).backward(dy)
    gradients = {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    assert [name for name, g in gradients.items() if g is None] == [n for n in expected if n in frozen]
    for name, gradient in gradients.items():
        if gradient is not None and name == "bias":  # a kernel that needs no maxima may add up in another order
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-4)
        elif gradient is not None:
            assert same(gradient, expected[name])


@on_devices
def test_a_row_does_not_depend_on_others(device):
    """A row's bytes and scales are its own, but a product of another number of rows may add up in another order."""
    module = make(device)
    x, dy = inputs(device)
    with autocast():
        y = module(x)
        y.backward(dy)
        whole = x.grad
        part = x[100:150].detach().requires_grad_()
        y_part = module(part)
        y_part.backward(dy[100:150])
    # With fast accumulation, a GPU's tensor cores keep about 13 bits of a sum.
    tolerance = 1e-5 if device == "cpu" else 2.0**-10
    torch.testing.assert_close(y_part, y[100:150], rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(part.grad, whole[100:150], rtol=10 * tolerance, atol=4 * tolerance)


@on_devices
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_seen(device, bad):
    """A gradient scaler sees it in dx of that row and in dweight."""
    check_overflow(device, bad)


def check_overflow(device: str, bad: float) -> None:
    module = make(device)
    x, dy = inputs(device)
    dy[7, 3] = bad
    with autocast():
        module(x).backward(dy)
    assert x.grad[7].isnan().all()
    assert x.grad[[6, 8]].isfinite().all()
    assert not module.weight.grad[3].isfinite().any()
    assert module.weight.grad[4].isfinite().all()


# Results in 8 bits, and what is refused.


@on_devices
@by_recipe
def test_y_in_8_bits(device, recipe):
    module = make(device, return_bias=True)
    x = inputs(device)[0].detach().view(2, 100, COLS)
    with autocast(recipe=recipe), torch.no_grad():
        (y8, scale), bias = module(x, fp8_output=True)
        y, _ = module(x)
        expected, expected_scale, _, _ = cast_rows(y.view(ROWS, OUTS))
    assert (y8.shape, scale.shape) == ((2, 100, OUTS), (2, 100))
    assert same(y8, expected.view(2, 100, OUTS))
    assert same(scale, expected_scale.view(2, 100))
    assert same(bias, module.bias)


class Bad(NamedTuple):
    what: str
    module: dict[str, Any]
    call: dict[str, Any]
    error: type[Exception]
    phrase: str


BAD = [
    Bad("in_features", {"cols": 40}, {}, ValueError, "in FP8 in_features must be a multiple of 16; got 40"),
    Bad("out_features", {"outs": 24}, {}, ValueError, "in FP8 out_features must be a multiple of 16; got 24"),
    Bad("fp8_grad", {}, {"fp8_grad": True}, ValueError, "fp8_grad must be False"),
    Bad("fp8_output", {}, {"fp8_output": True}, ValueError, "fp8_output=True needs a call without gradients"),
    Bad("float64", {"dtype": torch.float64}, {}, TypeError, "in FP8 input must have dtype"),
]


@on_devices
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_what_is_refused(device, bad):
    module = make(device, **bad.module)
    x = random(3, bad.module.get("cols", COLS), device=device, dtype=module.weight.dtype)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(bad.error) as caught, autocast():
        module(x, **{"is_first_microbatch": True, **bad.call})
    assert bad.phrase in str(caught.value)
    assert module._fp8_weights._cached is None
    assert module._fp8_outside is False
    assert all(same(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    module(x)


def test_a_gpu_without_it_is_never_served_in_silence(monkeypatch):
    """Calls on a GPU go through this check, which refuses them if the GPU has no FP8."""
    monkeypatch.setattr(followed, "why_not", lambda index: "this GPU has 8.0")

    class OnGpu(NamedTuple):
        dtype: Any = torch.float32
        shape: tuple = (64, 64)
        is_cuda: bool = True

        def get_device(self):
            return 0

    with pytest.raises(RuntimeError, match=r"FP8 must be available; this GPU has 8\.0"):
        Float8(RowwiseScaling().scheme).check("LayerNormLinear", (OnGpu(), OnGpu()), False)


def test_functorch_and_subclasses_are_refused():
    module, x = make(), inputs()[0].detach()
    with autocast(), pytest.raises(RuntimeError, match="FP8 is for plain tensors"):
        torch.func.grad(lambda x: module(x).sum())(x)


def test_no_second_derivative():
    module, (x, dy) = make(), inputs()
    with autocast():
        y = module(x)
    with pytest.raises(RuntimeError, match="in FP8 there are first derivatives alone"):
        torch.autograd.grad(y, x, dy, create_graph=True)


# Training.


@pytest.mark.slow
def test_training():
    """A small GPT has, after 100 steps, a loss within 0.5% of that in float32, and its first gradients are near too."""
    size = Size(layers=2, width=64, heads=2, context=32, batch=8)
    plain = train(None, 100, size, "cpu", False)
    assert plain.losses[0] > 5
    assert last(plain) < 3.2
    for name in ("row", "tensor, hybrid"):
        run = train(RECIPES[name], 100, size, "cpu", False, compared=(1,))
        assert run.losses != plain.losses
        assert abs(last(run) / last(plain) - 1) < 0.005
        assert run.cosines[1] >= 0.998


# Only on a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [RECIPES["row"], RECIPES["tensor, hybrid"]], ids=["row", "tensor"])
@pytest.mark.parametrize("rows", [16, 128, 1000])
@pytest.mark.parametrize("first", [None, False])
def test_a_captured_step(recipe, rows, first):
    module = make("cuda", torch.bfloat16)
    x, dy = inputs("cuda", torch.bfloat16, rows)

    def whole():
        module.zero_grad(set_to_none=False)
        x.grad.zero_()
        with autocast(recipe=recipe):
            y = module(x, is_first_microbatch=first)
        y.backward(dy)
        return y

    x.grad = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = whole().detach().clone()
        gradients = [x.grad.clone(), *(p.grad.clone() for p in module.parameters())]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = whole()
    graph.replay()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close([x.grad, *(p.grad for p in module.parameters())], gradients)


@pytest.mark.gpu
@by_recipe
def test_the_host_waits_for_nothing(recipe):
    module = make("cuda", torch.bfloat16)
    x, dy = inputs("cuda", torch.bfloat16)

    def whole():
        with autocast(recipe=recipe):
            module(x).backward(dy)

    whole()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@by_recipe
@pytest.mark.parametrize("options", [{}, {"normalization": "RMSNorm", "zero_centered_gamma": True}], ids=str)
def test_a_gpu_does_as_the_emulation(options, recipe):
    """The GPU's statistics may be one rounding apart from the emulation's."""
    module = make("cuda", torch.bfloat16, return_layernorm_output=True, **options)
    x, dy = inputs("cuda", torch.bfloat16)
    host = copy.deepcopy(module).cpu()
    with autocast(recipe=recipe):
        results, expected = step(module, x, dy), step(host, x.cpu(), dy.cpu())
    assert relative(results.outputs[0].cpu(), expected.outputs[0]) < 5e-3
    for name, gradient in expected.gradients.items():
        assert relative(results.gradients[name].cpu(), gradient) < 5e-3


@by_recipe
def test_a_dispatch_mode_for_the_backward_pass_sees_it(recipe):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    module, (x, dy) = make(), inputs()
    wanted = [x, *module.parameters()]
    with autocast(recipe=recipe):
        expected = torch.autograd.grad(module(x), wanted, dy)
        y = module(x)
    with Mode():
        gradients = torch.autograd.grad(y, wanted, dy)
    assert seen.count("cunorm.norm_linear_backward.default") == 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
