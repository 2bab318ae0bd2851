"""Calls and nodes in C++: what they compute and leave to Python, on the stand-in for a GPU and on a GPU."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_repeats  # noqa: E402
from fusion_cases import CASES, EPS, make  # noqa: E402
from torch_fused import leaves  # noqa: E402
from torch_nodes import Driver, by_python, gradients, playing_a_gpu, same_bits  # noqa: E402
from torch_tensors import random  # noqa: E402

from cunorm.torch import add_layer_norm, add_rms_norm, layer_norm, rms_norm  # noqa: E402
from cunorm.torch.norm import functional, nodes  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture
def driver(monkeypatch, stand_in) -> Iterator[Driver]:
    with playing_a_gpu(monkeypatch, stand_in) as found:
        yield found


def directions(plans: Any) -> list[str]:
    return [plan.problem.direction for plan in plans]


NORMS = {
    "weight and bias": (layer_norm, "bfloat16", "bfloat16", True, True),
    "float32 weights": (layer_norm, "float16", "float32", True, True),
    "neither": (layer_norm, "float32", None, True, True),
    "rms_norm": (rms_norm, "bfloat16", "bfloat16", True, True),
    "float64": (rms_norm, "float64", "float64", True, True),
    "x alone": (layer_norm, "float32", "float32", True, False),
    "weights alone": (layer_norm, "float32", "float32", False, True),
}


def a_norm(name: str, rows: int = 5, cols: int = 136) -> tuple[Any, list[Any], Any]:
    """(the call, what wants gradients, dy)"""
    function, dtype, weights, x_wants, weights_want = NORMS[name]
    x, dy = (random(rows, cols, dtype=getattr(torch, dtype), seed=seed) for seed in range(2))
    vectors = 0 if weights is None else 2 if function is layer_norm else 1
    tensors = [random(cols, dtype=getattr(torch, weights), seed=2 + i) for i in range(vectors)]
    wanting = [x.requires_grad_()] if x_wants else []
    wanting += [one.requires_grad_() for one in tensors] if weights_want else []
    return lambda: function(x, (cols,), *tensors), wanting, dy


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_bits_of_python(driver, stand_in, name):
    call, wanting, dy = a_norm(name)
    expected = by_python(call, wanting, [dy])
    assert driver.plans == []
    for turn in range(3):
        y = call()
        assert "CppNode" in y.grad_fn.name()
        same_bits([y, *gradients(y, wanting, [dy])], expected)
        # Python computes the first gradients, and describes how.
        assert directions(driver.plans) == ["forward", *["forward", "backward"] * turn]
    with torch.no_grad():
        same_bits([call()], expected[:1])
    assert directions(driver.plans)[-2:] == ["backward", "forward"]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("add_layer_norm", (13, 40), "float16"),
        ("add_rms_norm", (3, 1000), "bfloat16"),
        ("stream", (3, 1000), "bfloat16"),
        ("modulate", (2, 3, 128), "float32"),
        ("both", (4, 40), "float32"),
        ("names of the library", (400, 40), "float32"),
    ],
)
def test_a_fused_operation_has_the_bits_of_python(driver, stand_in, name, shape, dtype):
    case = CASES[name]
    made = make(case, shape, dtype, {"dy": case.op.dtype or dtype, "ds": case.op.s_dtype or dtype})
    x, operands, given = leaves(made, "cpu")
    wanting = [x, *(one for one in operands.values() if isinstance(one, torch.Tensor))]

    def call() -> tuple[Any, ...]:
        found = case.op(x, eps=EPS, **operands)
        return found if isinstance(found, tuple) else (found,)

    expected = by_python(call, wanting, given)
    call()
    for _ in range(3):
        results = call()
        same_bits([*results, *gradients(results, wanting, given)], expected)
    assert directions(driver.plans) == ["forward", "forward", "backward", "forward", "backward"]


def test_what_is_added_has_the_gradient_itself(driver):
    from cunorm.torch import layer_norm_add

    x, residual, dy = (random(4, 64, dtype=torch.float32, seed=seed) for seed in range(3))
    for one in (x, residual):
        one.requires_grad_()
    found = []
    for _ in range(3):
        y = layer_norm_add(x, residual, 64)
        found.append(gradients(y, [x, residual], [dy]))
        same_bits(found[-1], found[0])
    assert directions(driver.plans) == ["forward", "forward", "backward"]


def described(call: Any, wanting: list[Any], dy: Any) -> None:
    for _ in range(3):
        torch.autograd.grad(call(), wanting, dy)


LEFT = {
    "of other strides": lambda dy: dy.t().contiguous().t(),
    "at an odd address": lambda dy: torch.cat([dy.flatten()[:1], dy.flatten()])[1:].view_as(dy),
    "one number": lambda dy: dy[:1, :1].expand_as(dy),
}


@pytest.mark.parametrize("name", LEFT)
def test_gradients_of_other_layouts(driver, name):
    call, wanting, dy = a_norm("float32 weights")
    described(call, wanting, dy)
    other = LEFT[name](dy)
    count = len(driver.plans)
    found = gradients(call(), wanting, [other])
    assert directions(driver.plans[count:]) == ["forward"]
    same_bits(found, gradients(call(), wanting, [other.contiguous().clone()]))


def test_x_at_an_odd_address(driver):
    x, weight = random(4 * 64 + 1, dtype=torch.float32), random(64, dtype=torch.float32)
    aligned = x[:-1].view(4, 64)
    rms_norm(aligned, (64,), weight)
    odd = x[1:].view(4, 64)
    y = rms_norm(odd, (64,), weight)
    assert len(driver.plans) == 1
    same_bits([y], [rms_norm(odd.clone(), (64,), weight)])


def test_some_gradients_alone(driver):
    call, wanting, dy = a_norm("weight and bias")
    described(call, wanting, dy)
    every = gradients(call(), wanting, [dy])
    for _ in range(2):
        same_bits(gradients(call(), wanting[1:2], [dy]), every[1:2])
    written = [one.name for one in driver.plans[-1].problem.operands if one.written]
    assert written == ["dweight"]


def test_second_derivatives(driver):
    call, wanting, dy = a_norm("float64")
    described(call, wanting, dy)
    x, weight = wanting

    def second(call: Any) -> list[Any]:
        (dx,) = torch.autograd.grad(call(), [x], dy, create_graph=True)
        return [*torch.autograd.grad(dx.square().sum(), [x, weight])]

    for one, other in zip(
        second(call), second(lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_what_saved_tensors_hooks_change(driver):
    """What comes back lies otherwise than what was saved."""
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    expected = gradients(call(), wanting, [dy])
    count = len(driver.plans)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one.t().contiguous().t()):
        y = call()
    same_bits(gradients(y, wanting, [dy]), expected)
    assert directions(driver.plans[count:]) == ["forward"]


def test_what_was_saved_must_not_change(driver):
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    y = call()
    with torch.no_grad():
        wanting[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, wanting, dy)


def test_a_second_backward_pass_wants_the_graph(driver):
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    y = call()
    first = gradients(y, wanting, [dy])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, wanting, dy)
    y = call()
    same_bits([*torch.autograd.grad(y, wanting, dy, retain_graph=True)], first)
    same_bits(gradients(y, wanting, [dy]), first)


def test_a_launch_that_fails(driver):
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    y = call()
    driver.fails = 719
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUDA error 719"):
        torch.autograd.grad(y, wanting, dy)
    with pytest.raises(RuntimeError, match="719"):
        call()


def test_an_error_of_python_in_the_backward_pass(driver, monkeypatch):
    call, wanting, dy = a_norm("x alone")
    call()
    y = call()
    monkeypatch.setattr(functional, "launched_gradients", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y, wanting, dy)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_repeated_calls_have_the_bits_of_first_ones(driver, op):
    cases = {name: (*case, name == "frozen weight") for name, case in torch_repeats.calls().items()}
    torch_repeats.first_then_repeated(cases, lambda *case: torch_repeats.results(op, *case))


def test_tensors_are_not_kept(driver):
    tensors = [random(4, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2)]
    for call in (lambda x, _: rms_norm(x, (64,)), lambda x, residual: add_rms_norm(x, residual, (64,))[0]):
        x, residual = (one.detach().clone().requires_grad_() for one in tensors)
        kept = [weakref.ref(x), weakref.ref(residual)]
        for _ in range(3):
            call(x, residual).sum().backward()
        del x, residual
        gc.collect()
        assert [one() for one in kept] == [None, None]


def test_threads(driver):
    call, wanting, dy = a_norm("weight and bias")
    described(call, wanting, dy)
    expected = gradients(call(), wanting, [dy])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(gradients(call(), wanting, [dy]))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4
    for one in found:
        same_bits(one, expected)


def test_tensor_hooks_see_gradients(driver):
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    y, seen = call(), []
    y.register_hook(lambda dy: seen.append(dy) or 2 * dy)
    doubled = gradients(y, wanting, [dy])
    same_bits(doubled, gradients(call(), wanting, [2 * dy]))
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1024), (2, 5, 768), (300, 1000), (4, 16384), (3, 50257)])
@pytest.mark.parametrize("op", [layer_norm, rms_norm, add_layer_norm, add_rms_norm])
def test_a_gpu_has_the_bits_of_python(op, shape):
    """In the default stream, in another one, and in a CUDA graph."""
    assert nodes.build() == ""
    nodes.module.cache_clear()
    cols = shape[-1]
    rows, x, residual = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    vectors = torch.randn(2 if "layer" in op.__name__ else 1, cols, device="cuda", dtype=torch.bfloat16).unbind()
    summands = [x, residual] if "add" in op.__name__ else [x]
    wanting = [one.requires_grad_() for one in (*summands, *(one.clone() for one in vectors))]
    given = [rows, rows.flip(0)][: len(summands)]

    def call() -> Any:
        return op(*wanting[: len(summands)], (cols,), *wanting[len(summands) :])

    def both() -> list[Any]:
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        assert "CppNode" in results[0].grad_fn.name()
        return [*results, *torch.autograd.grad(results, wanting, given)]

    expected = by_python(call, wanting, given)
    call()  # a fused operation's first call is described, by Python
    for _ in range(3):
        same_bits(both(), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same_bits(both(), expected)
        # Of those used before on the default stream autograd would wait for that one.
        wanting = [one.detach().clone().requires_grad_() for one in wanting]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = both()
        graph.replay()
        same_bits(captured, expected)
    torch.cuda.synchronize()


def test_without_a_compiler_python_computes(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler could not be run" in nodes.build()
    monkeypatch.setenv("CXX", "false")
    assert nodes.build() == "false failed: 1"
    assert nodes.load() is None
