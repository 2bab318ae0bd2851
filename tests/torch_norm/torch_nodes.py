"""A driver for nodes.cpp whose launches run on the stand-in, of torch tensors on the CPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cpu_device
import pytest
import torch
import torch_stand_in

from cunorm.kernel import launch
from cunorm.kernel.launch import NUMBERS
from cunorm.torch import named
from cunorm.torch.norm import dispatch, launching, nodes, repeats

CONTEXT = 77
OF_GPU = nodes.module


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class OfThread(threading.local):
    """The context that a thread set, and the pointers and numbers of the launches of its plan so far."""

    def __init__(self):
        self.context: int | None = None
        self.pointers: dict[str, int] = {}
        self.numbers: dict[str, float] = {}


class Driver:
    """Stand in for CUDA's driver: `plans` are those that C++ launched, `fails` is the error that a launch returns.

    `runs` runs a plan on pointers, as kernel/launch.py does, one at a time. `errors` keeps the exceptions of launches,
    since ctypes lets none through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: Any, runs: Any):
        self.plans: list[Any] = []
        self.errors: list[Exception] = []
        self.fails = 0
        self._runs, self._one_at_a_time = runs, threading.Lock()
        self._steps: dict[int, tuple[Any, int]] = {}
        self._thread = OfThread()
        pointer = ctypes.POINTER(ctypes.c_void_p)
        words = ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64))
        kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, words, ctypes.c_void_p)
        self._functions = (
            kernel(self._launch),
            ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._current_context),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._set_context),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, pointer)(self._stream),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(self._is_capturing),
        )
        self.compiled = compiled
        self.addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        compiled.set_driver(*self.addresses)
        monkeypatch.setattr(launch, "context", lambda _: CONTEXT)
        monkeypatch.setattr(nodes, "module", lambda: compiled)
        launches = nodes._launches

        def described(work, *rest):
            plan, steps = work.plan, iter(range(len(work.plan.steps)))

            def address(*_):
                number = len(self._steps) + 1
                self._steps[number] = plan, next(steps)
                return number

            with monkeypatch.context() as patch:
                patch.setattr(launch, "address", address)
                return launches(work, *rest)

        monkeypatch.setattr(nodes, "_launches", described)

    def _current_context(self, to) -> int:
        to[0] = self._thread.context
        return 0

    def _set_context(self, context) -> int:
        self._thread.context = context
        return 0

    def _stream(self, _, to) -> int:
        to[0] = 5
        return 0

    def _is_capturing(self, _, status) -> int:
        status[0] = 0
        return 0

    def _launch(self, config, function, arguments, extra) -> int:
        if self.fails:
            return self.fails
        try:
            self._run(config, function, arguments, extra)
        except Exception as error:
            self.errors.append(error)
            return 1
        return 0

    def _run(self, config, function, arguments, extra) -> None:
        plan, index = self._steps[function]
        step, given = plan.steps[index], config[0]
        launched = (*given.grid, *given.block, given.shared, given.stream, given.attribute_count)
        assert launched == (*step.grid, step.spec.threads, 1, 1, step.dynamic_shared, 5, int(step.begins_early))
        assert (self._thread.context, extra) == (CONTEXT, None)
        count = len(step.pointers) + len(step.scalars) + len(step.integers)
        words = [arguments[i][0] for i in range(count)]
        seen = self._thread.pointers
        for (name, offset), word in zip(step.pointers, words, strict=False):
            assert seen.setdefault(name, word - offset) == word - offset
        for name, word in zip(step.scalars, words[len(step.pointers) :], strict=False):
            self._thread.numbers[name] = struct.unpack(NUMBERS[step.spec.compute], struct.pack("Q", word))[0]
        assert words[count - len(step.integers) :] == [number % 2**64 for number in step.integers]
        if index == len(plan.steps) - 1:
            pointers = [seen.get(name, 0) for name in plan.problem.pointers]
            scalars = [self._thread.numbers[name] for name in plan.problem.scalars]
            seen.clear()
            with self._one_at_a_time:
                self._runs.run(plan, -1, 0, (*pointers, *scalars))
            self.plans.append(plan)


@contextmanager
def playing_a_gpu(monkeypatch: pytest.MonkeyPatch, stand_in: Any) -> Iterator[Driver]:
    """Let tensors on the CPU play those of a GPU, for Python's launches and for those of C++."""
    if cpu_device.missing():
        pytest.skip(cpu_device.missing())
    assert nodes.build() == ""
    driver = Driver(monkeypatch, nodes.load(), stand_in)
    monkeypatch.setattr(launching, "launch", stand_in)
    torch_stand_in.forget(monkeypatch)
    monkeypatch.setattr(dispatch, "at_once", lambda _: True)
    monkeypatch.setattr(dispatch, "launchable", lambda dy: not torch.is_grad_enabled())
    try:
        yield driver
    finally:
        nodes._ready, nodes._look_again_at = None, 0.0
        OF_GPU()  # launches on a GPU again, if there is one
    assert driver.errors == []


def by_python(call: Any, wanting: list[Any], given: list[Any]) -> list[Any]:
    """Return the results and gradients that Python's nodes compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "module", lambda: None)
        patch.setattr(repeats, "_calls", {})
        patch.setattr(repeats, "_forms", {})
        patch.setattr(named._call_of, "results", {})
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        return [*results, *gradients(results, wanting, given)]


def gradients(results: Any, wanting: list[Any], given: list[Any]) -> list[Any]:
    return [gradient.clone() for gradient in torch.autograd.grad(results, wanting, given)]


def same_bits(results: Any, expected: Any) -> None:
    torch.testing.assert_close([*results], [*expected], rtol=0, atol=0, equal_nan=True)
