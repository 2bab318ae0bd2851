"""LayerNormLinear's calls and nodes in C++: what they compute and leave to Python, on a stand-in and on a GPU."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
import torch_repeats  # noqa: E402
from torch_nodes import Driver, by_python, gradients, playing_a_gpu, same_bits  # noqa: E402
from torch_tensors import random  # noqa: E402

from cunorm.torch import LayerNormLinear, layer_norm_linear  # noqa: E402
from cunorm.torch.linear import call as calls  # noqa: E402
from cunorm.torch.norm import nodes  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture
def driver(monkeypatch, stand_in) -> Iterator[Driver]:
    with playing_a_gpu(monkeypatch, stand_in) as driver:
        yield driver


@pytest.fixture
def by_python_alone(monkeypatch) -> list[str]:
    """Return a list that gets an entry for each backward pass that Python computes as a whole."""
    passes = []
    described = nodes.linear_call

    def counted(*given: Any) -> Any:
        *others, backward = given

        def pass_by_python(*given: Any) -> Any:
            passes.append("a pass")
            return backward(*given)

        return described(*others, pass_by_python)

    monkeypatch.setattr(nodes, "linear_call", counted)
    return passes


def a_call(
    *,
    dtype: str = "bfloat16",
    norms: str | None = "bfloat16",
    ln_bias: str | None = None,
    bias: bool = True,
    leading: tuple[int, ...] = (5,),
    frozen: tuple[str, ...] = (),
    transposed: bool = False,
    device: str = "cpu",
    cols: int = 136,
    **options: Any,
) -> tuple[Any, list[Any], Any]:
    """Return (the call, the tensors that want gradients, dy)."""
    outs, kind = 24, getattr(torch, dtype)
    of_rms = options.get("normalization") == "RMSNorm"
    tensors: dict[str, Any] = {
        "input": random(*leading, cols, dtype=kind, seed=0),
        "weight": random(cols, outs, dtype=kind, seed=1).t() if transposed else random(outs, cols, dtype=kind, seed=1),
        "bias": random(outs, dtype=kind, seed=2) if bias else None,
        "ln_weight": None if norms is None else random(cols, dtype=getattr(torch, norms), seed=3),
        "ln_bias": None if norms is None or of_rms else random(cols, dtype=getattr(torch, ln_bias or norms), seed=4),
    }
    tensors = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    wanting = [tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None and name not in frozen]
    dy = random(*leading, outs, dtype=kind, seed=5).to(device)
    return lambda: layer_norm_linear(**tensors, **options), wanting, dy


CALLS: dict[str, dict[str, Any]] = {
    "all five": {},
    "float32 norm": {"norms": "float32"},
    "float32 ln_bias": {"ln_bias": "float32"},
    "no bias": {"bias": False},
    "no norm weights": {"norms": None},
    "rms_norm": {"normalization": "RMSNorm", "bias": False, "zero_centered_gamma": True},
    "leading axes": {"leading": (2, 1, 3)},
    "z kept": {"keep_normalized": True},
    "norm frozen": {"frozen": ("input", "ln_weight", "ln_bias")},
    "Linear frozen": {"frozen": ("weight", "bias")},
    "bias alone": {"frozen": ("input", "weight", "ln_weight", "ln_bias")},
    "weight by columns": {"transposed": True},
    "float64": {"dtype": "float64", "norms": "float64"},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_bits_of_python(driver, by_python_alone, name):
    call, wanting, dy = a_call(**CALLS[name])
    expected = by_python(call, wanting, [dy])
    call()  # Python describes it
    for _ in range(3):
        y = call()
        assert "CppNode" in y.grad_fn.name()
        same_bits([y, *gradients(y, wanting, [dy])], expected)
    assert by_python_alone == []
    with torch.no_grad():
        same_bits([call()], expected[:1])


def test_z_is_computed_again_for_the_gradient_of_weight_alone(driver):
    passes_of = {"weight": ["forward"], "ln_weight": ["backward"], "bias": ["backward"]}
    for wanted, directions in passes_of.items():
        every = ("input", "weight", "bias", "ln_weight", "ln_bias")
        call, wanting, dy = a_call(frozen=tuple(name for name in every if name != wanted))
        for _ in range(3):
            torch.autograd.grad(call(), wanting, dy)
        y, count = call(), len(driver.plans)
        torch.autograd.grad(y, wanting, dy)
        assert [plan.problem.direction for plan in driver.plans[count:]] == directions


def test_dx_takes_the_memory_of_dz(driver, monkeypatch):
    call, wanting, dy = a_call(frozen=("weight", "bias", "ln_weight", "ln_bias"))
    for _ in range(3):
        torch.autograd.grad(call(), wanting, dy)
    seen: list[dict[str, int]] = []
    run = driver._runs.run
    monkeypatch.setattr(
        driver._runs,
        "run",
        lambda plan, index, stream, arguments, *rest: (
            seen.append(cpu_device.divided(plan, arguments)[0]),
            run(plan, index, stream, arguments, *rest),
        ),
    )
    torch.autograd.grad(call(), wanting, dy)
    assert seen[-1]["dx"] == seen[-1]["dy"]


LEFT = {
    "one number": lambda dy: dy[:1, :1].expand_as(dy),
    "of other strides": lambda dy: dy.t().contiguous().t(),
}


@pytest.mark.parametrize("name", LEFT)
def test_gradients_of_other_layouts_are_copied(driver, by_python_alone, name):
    call, wanting, dy = a_call()
    call()
    other = LEFT[name](dy)
    results = gradients(call(), wanting, [other])
    assert by_python_alone == []
    same_bits(results, gradients(call(), wanting, [other.contiguous().clone()]))


def test_an_odd_address_is_left_to_python(driver, by_python_alone):
    call, wanting, dy = a_call()
    call()
    odd = torch.cat([dy.flatten()[:1], dy.flatten()])[1:].view_as(dy)
    results = gradients(call(), wanting, [odd])
    assert by_python_alone == ["a pass"]
    same_bits(results, gradients(call(), wanting, [dy]))


def test_what_saved_tensors_hooks_change(driver, by_python_alone):
    """The tensors that come back have other strides than those that were saved."""
    call, wanting, dy = a_call()
    expected = by_python(call, wanting, [dy])[1:]
    call()

    def turned(saved: Any) -> Any:
        return saved.t().contiguous().t() if saved.dim() == 2 else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, turned):
        same_bits(gradients(call(), wanting, [dy]), expected)
    assert by_python_alone == ["a pass"]


def test_the_gradient_of_z(driver, by_python_alone):
    tensors = [random(6, 64, dtype=torch.float32), random(24, 64, dtype=torch.float32), None]
    norm = [random(64, dtype=torch.float32, seed=2), None]
    wanting = [leaf.requires_grad_() for leaf in (*tensors[:2], norm[0])]

    def call() -> Any:
        return calls.norm_linear(calls.Layer("layer_norm_linear", "rms_norm", 1e-5), (*tensors, *norm))[:2]

    given = [random(6, 24, dtype=torch.float32, seed=3), random(6, 64, dtype=torch.float32, seed=4)]
    expected = by_python(call, wanting, given)
    call()
    results = call()
    same_bits([*results, *gradients(results, wanting, given)], expected)
    assert by_python_alone == ["a pass"]


def test_second_derivatives(driver):
    call, (x, weight, *_), dy = a_call(dtype="float64", norms="float64")
    call()

    def second() -> Any:
        (dx,) = torch.autograd.grad(call(), [x], dy, create_graph=True)
        return [dx, *torch.autograd.grad(dx.square().sum(), [x, weight])]

    derivatives = second()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "known", lambda *_: None)
        same_bits(derivatives, second())


def test_the_backward_pass_has_the_dtypes_of_the_forward_pass(driver):
    call, wanting, dy = a_call(dtype="float32", norms="float32")
    expected = by_python(call, wanting, [dy])[1:]
    call()
    for _ in range(2):
        y = call()
        with torch.autocast("cpu", torch.bfloat16):
            same_bits(gradients(y, wanting, [dy]), expected)


@pytest.mark.slow
def test_tensors_are_not_kept(driver):
    call, wanting, dy = a_call()
    kept = [weakref.ref(leaf) for leaf in wanting]
    for _ in range(3):
        torch.autograd.grad(call(), wanting, dy)
    del call, wanting
    gc.collect()
    assert [reference() for reference in kept] == [None] * 5


def test_main_grad_is_left_to_python(driver):
    module = LayerNormLinear(64, 32, params_dtype=torch.float32, device="cpu", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight)
    x = random(4, 64, dtype=torch.float32)
    for turn in range(3):
        module(x).sum().backward()
        if turn == 0:
            once = module.weight.main_grad.clone()
    torch.testing.assert_close(module.weight.main_grad, 3 * once)
    assert driver.plans == []


@pytest.mark.slow
def test_repeated_calls_have_the_bits_of_first_ones(driver):
    torch_repeats.first_then_repeated(torch_repeats.linear_calls(), torch_repeats.linear_results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("rows", "cols"), [(64, 1024), (300, 1000), (4, 16384)])
def test_a_gpu_has_the_bits_of_python(rows, cols, name):
    """The bits are the same in the default stream and in a CUDA graph, where Python uses two streams."""
    assert nodes.build() == ""
    call, wanting, dy = a_call(**{"leading": (rows,)} | CALLS[name], cols=cols, device="cuda")
    expected = by_python(call, wanting, [dy])
    call()
    for _ in range(3):
        y = call()
        assert "CppNode" in y.grad_fn.name()
        same_bits([y, *gradients(y, wanting, [dy])], expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # For leaves that were used on the default stream, autograd would wait for that stream.
        call, wanting, dy = a_call(**{"leading": (rows,)} | CALLS[name], cols=cols, device="cuda")
        for _ in range(2):
            gradients(call(), wanting, [dy])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = call()
            captured = [y, *torch.autograd.grad(y, wanting, dy, allow_unused=True)]
        graph.replay()
        same_bits(captured, expected)
    torch.cuda.synchronize()
