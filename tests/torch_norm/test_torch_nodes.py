"""Calls and nodes in C++: what they compute and leave to Python, on the stand-in for a GPU and on a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_repeats  # noqa: E402
from fusion_cases import CASES, EPS, make  # noqa: E402
from problems import problem  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402
from torch_fused import leaves  # noqa: E402
from torch_nodes import Driver, by_python, gradients, playing_a_gpu, same_bits  # noqa: E402
from torch_tensors import random  # noqa: E402

from cunorm.kernel import launch  # noqa: E402
from cunorm.kernel.device import KNOWN  # noqa: E402
from cunorm.plan.plan import plan  # noqa: E402
from cunorm.torch import (  # noqa: E402
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_linear,
    named,
    private,
    rms_norm,
)
from cunorm.torch.norm import calls, dispatch, launching, nodes, repeats  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.fixture
def driver(monkeypatch, stand_in) -> Iterator[Driver]:
    with playing_a_gpu(monkeypatch, stand_in) as driver:
        yield driver


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
    """Return (the call, the tensors that want gradients, dy)."""
    function, dtype, weights, x_wants, weights_want = NORMS[name]
    x, dy = (random(rows, cols, dtype=getattr(torch, dtype), seed=seed) for seed in range(2))
    vectors = 0 if weights is None else 2 if function is layer_norm else 1
    tensors = [random(cols, dtype=getattr(torch, weights), seed=2 + i) for i in range(vectors)]
    wanting = [x.requires_grad_()] if x_wants else []
    wanting += [tensor.requires_grad_() for tensor in tensors] if weights_want else []
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
        assert directions(driver.plans) == ["forward", "backward"] * (turn + 1)
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
    wanting = [x, *(operand for operand in operands.values() if isinstance(operand, torch.Tensor))]

    def call() -> tuple[Any, ...]:
        results = case.op(x, eps=EPS, **operands)
        return results if isinstance(results, tuple) else (results,)

    expected = by_python(call, wanting, given)
    for turn in range(3):
        results = call()
        assert "CppNode" in results[0].grad_fn.name()
        same_bits([*results, *gradients(results, wanting, given)], expected)
        assert directions(driver.plans) == ["forward", "backward"] * (turn + 1)


def test_what_is_added_has_the_gradient_itself(driver):
    from cunorm.torch import layer_norm_add

    x, residual, dy = (random(4, 64, dtype=torch.float32, seed=seed) for seed in range(3))
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    first = gradients(layer_norm_add(x, residual), leaves, [dy])
    for _ in range(2):
        same_bits(gradients(layer_norm_add(x, residual), leaves, [dy]), first)
    assert directions(driver.plans) == ["forward", "backward"] * 3


def described(call: Any, wanting: list[Any], dy: Any) -> None:
    """Run both passes until C++ has their descriptions."""
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
    results = gradients(call(), wanting, [other])
    assert directions(driver.plans[count:]) == ["forward"]
    same_bits(results, gradients(call(), wanting, [other.contiguous().clone()]))


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
    written = [operand.name for operand in driver.plans[-1].problem.operands if operand.written]
    assert written == ["dweight"]


def test_second_derivatives(driver):
    call, wanting, dy = a_norm("float64")
    described(call, wanting, dy)
    x, weight = wanting

    def second(call: Any) -> list[Any]:
        (dx,) = torch.autograd.grad(call(), [x], dy, create_graph=True)
        return [*torch.autograd.grad(dx.square().sum(), [x, weight])]

    torch.testing.assert_close(second(call), second(lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], weight)))


def test_what_saved_tensors_hooks_change(driver):
    """The tensor that comes back has other strides than the one that was saved."""
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    expected = gradients(call(), wanting, [dy])
    count = len(driver.plans)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved.t().contiguous().t()):
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
    monkeypatch.setattr(launching, "backward_recipe_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y, wanting, dy)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_repeated_calls_have_the_bits_of_first_ones(driver, op):
    cases = {name: (*case, name == "frozen weight") for name, case in torch_repeats.calls().items()}
    torch_repeats.first_then_repeated(cases, lambda *case: torch_repeats.results(op, *case))


@pytest.mark.slow
def test_tensors_are_not_kept(driver):
    tensors = [random(4, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2)]
    for call in (lambda x, _: rms_norm(x, (64,)), lambda x, residual: add_rms_norm(x, residual)[0]):
        x, residual = (tensor.detach().clone().requires_grad_() for tensor in tensors)
        kept = [weakref.ref(x), weakref.ref(residual)]
        for _ in range(3):
            call(x, residual).sum().backward()
        del x, residual
        gc.collect()
        assert [reference() for reference in kept] == [None, None]


def test_threads(driver):
    call, wanting, dy = a_norm("weight and bias")
    described(call, wanting, dy)
    expected = gradients(call(), wanting, [dy])
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(gradients(call(), wanting, [dy]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        same_bits(result, expected)


def test_tensor_hooks_see_gradients(driver):
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    y, seen = call(), []
    y.register_hook(lambda dy: seen.append(dy) or 2 * dy)
    doubled = gradients(y, wanting, [dy])
    same_bits(doubled, gradients(call(), wanting, [2 * dy]))
    assert len(seen) == 1


def views(count: int, dtype: str = "float32") -> list[Any]:
    """Return `count` tensors of one shape, each with another stride from row to row."""
    return [random(5, 136 + 8 * more, dtype=getattr(torch, dtype))[:, :136] for more in range(count)]


FUNCTIONS = {
    "layer_norm": lambda x, weight: layer_norm(x, (136,), weight),
    "add_rms_norm": lambda x, weight: add_rms_norm(x, x.clone(), weight)[0],
    "layer_norm_linear": lambda x, weight: layer_norm_linear(x, weight.expand(24, 136).contiguous()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts_that_take_turns_are_described_once(driver, monkeypatch, name):
    """All nine layouts stay described, not only the last few."""
    described, forward_pass = [], nodes.forward_pass
    monkeypatch.setattr(nodes, "forward_pass", lambda *a: described.append(a) or forward_pass(*a))
    function, xs, weight = FUNCTIONS[name], views(9), random(136, dtype=torch.float32).requires_grad_()
    dy = random(*function(xs[0], weight).shape, dtype=torch.float32)
    for turn in range(3):
        for x in xs:
            y = function(x, weight)
            assert turn == 0 or "CppNode" in y.grad_fn.name()
            torch.autograd.grad(y, [weight], dy)
        assert len(described) == len(xs)
        if turn == 1:
            driver.plans.clear()
    assert len(driver.plans) == 2 * len(xs)  # both passes


def test_gradients_that_take_turns_are_described_once(driver, monkeypatch):
    call, wanting, _ = a_norm("float32 weights", cols=136)
    described, add_backward = [], nodes.add_backward
    monkeypatch.setattr(nodes, "add_backward", lambda *a: described.append(a) or add_backward(*a))
    for _ in range(3):
        for dy in views(9, "float16"):
            torch.autograd.grad(call(), wanting, dy)
        assert len(described) == 9


@pytest.mark.slow
@pytest.mark.parametrize("op", [rms_norm, add_rms_norm])
def test_shapes_that_come_and_go(driver, monkeypatch, op):
    """What serves a shape is freed with it, and a shape that comes again has a node."""
    monkeypatch.setattr(repeats, "RECIPES", 4)
    alive, make_pass = [], nodes.module().make_pass
    monkeypatch.setattr(nodes, "module", lambda: SimpleNamespace(**vars(driver.compiled) | {"make_pass": made}))

    def made(*given: Any) -> Any:
        alive.append(weakref.ref(given[-1]))  # the function that computes gradients by Python
        return make_pass(*given)

    def run(rows: int) -> None:
        tensors = [
            random(rows, 64, dtype=torch.float32).requires_grad_() for _ in range(2 if op is add_rms_norm else 1)
        ]
        for _ in range(2):  # the first call of other rows than earlier ones runs by Python
            results = op(*tensors) if op is add_rms_norm else op(*tensors, (64,))
        y = results if op is rms_norm else results[0]
        assert "CppNode" in y.grad_fn.name()
        y.sum().backward()

    for rows in range(2, 40):
        run(rows)
        run(1)
    gc.collect()
    assert len(alive) > 38
    assert sum(reference() is not None for reference in alive) <= 8


@pytest.mark.slow
def test_a_node_keeps_what_it_needs(driver):
    """The call may be forgotten before its backward pass, whether that is the first one or a later one."""
    call, wanting, dy = a_norm("weight and bias")
    expected = by_python(call, wanting, [dy])[1:]
    for _ in range(2):
        y = call()
        repeats._calls.clear()
        gc.collect()
        same_bits(gradients(y, wanting, [dy]), expected)


@pytest.mark.slow
def test_100_000_lengths_take_no_more_memory_than_4096(monkeypatch):
    """Only the descriptions are made: their plans would take minutes."""
    assert nodes.build() == ""
    monkeypatch.setattr(nodes, "module", nodes.load)
    monkeypatch.setattr(launch, "address", lambda *_: 1)
    monkeypatch.setattr(launch, "context", lambda _: 77)
    step = plan(problem("forward", 8, 64, "float32"), KNOWN[90])
    kept: dict[Any, Any] = {}
    page, used = os.sysconf("SC_PAGE_SIZE"), []
    numbers = dict.fromkeys(step.problem.scalars, 1e-5)
    memory, whole = torch.zeros(100_000, 64), []

    def backward(*_: Any) -> Any:
        raise NotImplementedError

    for rows in range(1, 100_001):
        x = memory[:rows]
        like = ((rows, 64), (64, 1), torch.float32)
        tensors = {"x": x, "weight": memory[0], "bias": memory[1]}
        work = nodes.Work(step, {"y": like}, 0, numbers)
        which = nodes.forward_pass(work, tensors, like, ("x",), backward)
        repeats.remember(kept, x.shape, (x,), nodes.call_of(which))
        if not whole:
            whole.append(which)
        if rows % 10 == 0:
            strided = memory.as_strided((1, 64), (64 + rows, 1))
            work = nodes.Work(step, {"dx": like}, 0, numbers)
            nodes.add_backward(whole[0], work, {"dy": strided}, x, {"x": x}, 1, (0,))
        if rows in (20_000, 100_000):
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * page)
    assert len(kept) == 2 * repeats.RECIPES
    assert used[1] - used[0] < 8 << 20


WAITING = """
#include <unistd.h>
extern "C" {
volatile int waits = 0, others_ran = 0;
int launch(const void*, void*, void**, void**) {
  waits = 1;
  for (int i = 0; i < 3000 && !others_ran; ++i) usleep(1000);
  return others_ran ? 0 : 1;
}
}
"""


@pytest.mark.parametrize("grad", [True, False])
def test_others_run_while_a_launch_waits(driver, tmp_path, grad):
    """A launch waits for a place in the GPU's queue, which holds about a thousand."""
    call, wanting, dy = a_norm("x alone")
    described(call, wanting, dy)
    (tmp_path / "waiting.cpp").write_text(WAITING)
    library = str(tmp_path / "waiting.so")
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "waiting.cpp"), "-o", library], check=True)
    waiting = ctypes.CDLL(library)
    address = ctypes.cast(waiting.launch, ctypes.c_void_p).value
    driver.compiled.set_driver(address, *driver.addresses[1:])
    results: list[Any] = []
    with torch.set_grad_enabled(grad):
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        while not ctypes.c_int.in_dll(waiting, "waits").value:
            time.sleep(0.001)
        ctypes.c_int.in_dll(waiting, "others_ran").value = 1
        thread.join()
    assert len(results) == 1


class Calls(TorchDispatchMode):
    """Record the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dispatch_mode_for_the_backward_pass_sees_it(driver, monkeypatch, name):
    monkeypatch.setattr(dispatch, "launchable", lambda dy: not torch.is_grad_enabled() and private.nothing_listens())
    x, weight = random(5, 136, dtype=torch.float32).requires_grad_(), random(136, dtype=torch.float32).requires_grad_()
    for _ in range(3):
        y = FUNCTIONS[name](x, weight)
        dy = torch.ones_like(y)
        expected = gradients(FUNCTIONS[name](x, weight), [x, weight], [dy])
        count = len(driver.plans)
        with Calls() as calls:
            results = torch.autograd.grad(y, [x, weight], dy)
        assert any("norm_backward" in operator for operator in calls.seen)
        assert len(driver.plans) == count
        torch.testing.assert_close([*results], expected)


@pytest.mark.parametrize("again", ["by Python", "in C++"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_checkpoint_may_compute_again_the_other_way(driver, monkeypatch, name, again):
    """torch.utils.checkpoint compares the saved tensors in order, so both ways must save the same."""
    x, weight = random(5, 136, dtype=torch.float32).requires_grad_(), random(136, dtype=torch.float32).requires_grad_()
    compiled = nodes.module()

    def way(which: str) -> None:
        monkeypatch.setattr(nodes, "module", lambda: compiled if which == "in C++" else None)
        for kept in (repeats._calls, repeats._forms, named._call_of.results, calls._affine_call.results, calls._made):
            kept.clear()
        FUNCTIONS[name](x, weight)  # describes the call

    def call(x: Any, weight: Any) -> Any:
        y = FUNCTIONS[name](x, weight)
        ways.append("in C++" if "CppNode" in y.grad_fn.name() else "by Python")
        return y

    ways: list[str] = []
    first = "in C++" if again == "by Python" else "by Python"
    dy = torch.ones_like(FUNCTIONS[name](x, weight))
    expected = gradients(FUNCTIONS[name](x, weight), [x, weight], [dy])
    for early_stop in (True, False):
        way(first)
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(call, x, weight, use_reentrant=False)
        way(again)
        same_bits(gradients(y, [x, weight], [dy]), expected)
    assert ways == [first, first, again]  # a recomputation that stops early does not return


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1024), (2, 5, 768), (300, 1000), (4, 16384), (3, 50257)])
@pytest.mark.parametrize("op", [layer_norm, rms_norm, add_layer_norm, add_rms_norm])
def test_a_gpu_has_the_bits_of_python(op, shape):
    """The bits are the same in the default stream, in another one and in a CUDA graph."""
    assert nodes.build() == ""
    cols = shape[-1]
    dy, x, residual = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    vectors = torch.randn(2 if "layer" in op.__name__ else 1, cols, device="cuda", dtype=torch.bfloat16).unbind()
    summands = [x, residual] if "add" in op.__name__ else [x]
    wanting = [leaf.requires_grad_() for leaf in (*summands, *(vector.clone() for vector in vectors))]
    given = [dy, dy.flip(0)][: len(summands)]

    def call() -> Any:
        shape = [] if "add" in op.__name__ else [(cols,)]
        return op(*wanting[: len(summands)], *shape, *wanting[len(summands) :])

    def both() -> list[Any]:
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        assert "CppNode" in results[0].grad_fn.name()
        return [*results, *torch.autograd.grad(results, wanting, given)]

    expected = by_python(call, wanting, given)
    call()  # runs by Python if another test has had other rows of this layout
    for _ in range(3):
        same_bits(both(), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same_bits(both(), expected)
        # For leaves that were used on the default stream, autograd would wait for that stream.
        wanting = [leaf.detach().clone().requires_grad_() for leaf in wanting]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = both()
        graph.replay()
        same_bits(captured, expected)
    torch.cuda.synchronize()
