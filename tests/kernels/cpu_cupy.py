"""A stand-in for CuPy: its arrays are NumPy's, and its GPU is a Machine of cpu_device.py.

So the code for CuPy arrays runs unchanged on the CPU, with its checks, recipes and copies.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy
from cpu_device import Machine, divided
from cpu_functions import SMALL, plan_of_many, unwritten

from cunorm.call import backend, recipe
from cunorm.call import cupy as cupy_backend
from cunorm.call.numpy import numpy_dtype
from cunorm.call.recipe import Recipes
from cunorm.kernel.device import Device
from cunorm.plan.problem import Operand
from cunorm.plan.steps import Plan


class Array(numpy.ndarray):
    """A NumPy array with the attributes of a CuPy array. A new one is full of NaN."""

    allocated = 0  # how many arrays were made

    def __new__(cls, shape: tuple[int, ...], dtype: Any) -> Array:
        Array.allocated += 1
        return unwritten(shape, numpy.dtype(dtype)).view(cls)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)

    def get(self) -> numpy.ndarray:
        return self.view(numpy.ndarray)


def asarray(array: numpy.ndarray, start: int = 0) -> Array:
    """Return a copy of an array that starts `start` elements behind an aligned address."""
    copy = Array((start + array.size,), array.dtype)[start:].reshape(array.shape)
    copy[...] = array
    return copy


class Runs:
    """A stand-in for launch.py, which runs plans and keeps them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.plans: list[Plan] = []

    def run(self, plan: Plan, device_id: int, stream: int, arguments, workspace: int = 0) -> None:
        problem = plan.problem
        self.plans.append(plan)
        pointers, scalars = divided(plan, arguments)
        arrays = {
            name: _array_at(pointer, problem.by_name[name], problem.rows, problem.cols) if pointer else None
            for name, pointer in pointers.items()
        }
        self.machine.run(plan, scalars, **arrays)


def _array_at(pointer: int, operand: Operand, rows: int, cols: int) -> numpy.ndarray:
    dtype = numpy_dtype("test", operand.dtype)
    shape: tuple[int, ...] = (operand.size(rows, cols),)
    strides: tuple[int, ...] = (1,)
    if operand.kind == "full" or (operand.kind == "per_row" and not operand.written):
        inner, length = operand.inner or rows, cols if operand.kind == "full" else 1
        shape, strides = (rows // inner, inner, length), (operand.outer_stride, operand.row_stride, 1)
    elif operand.groups:
        shape, strides = (operand.groups.count, cols), (operand.row_stride, 1)
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    before, count = -sum(min(0, end) for end in reach), 1 + sum(map(abs, reach))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer - before * dtype.itemsize)
    return numpy.ndarray(
        shape, dtype, memory, before * dtype.itemsize, tuple(stride * dtype.itemsize for stride in strides)
    )


def play(monkeypatch: Any, device: Device = SMALL, machine: Machine | None = None, *, as_many: bool = False) -> Runs:
    """Replace CuPy until the end of the test. With `as_many`, backward passes take the kernels of many rows."""
    runs = Runs(machine or Machine())
    cupy = SimpleNamespace(
        ndarray=Array,
        zeros=lambda shape, dtype: asarray(numpy.zeros(shape, dtype)),
        ascontiguousarray=lambda array: asarray(array.get()),
        asarray=lambda array, dtype: asarray(numpy.asarray(array, dtype)),
        ones=lambda shape, dtype: asarray(numpy.ones(shape, dtype)),
        broadcast_to=lambda array, shape: numpy.broadcast_to(array, shape, subok=True),
        where=lambda *arrays: asarray(numpy.where(*arrays)),
        cuda=SimpleNamespace(
            Device=lambda _: contextlib.nullcontext(),
            alloc=lambda _: SimpleNamespace(ptr=0),  # Machine.run brings the workspace
            get_current_stream=lambda _: SimpleNamespace(ptr=0),
        ),
    )
    for name, part in {
        "cupy": cupy,
        "launch": runs,
        "device": SimpleNamespace(current=lambda _: device),
        "_recipes": Recipes(),
        "_current_device": lambda: 0,
        "_current_stream": cupy.cuda.get_current_stream,
    }.items():
        monkeypatch.setattr(cupy_backend, name, part)
    if as_many:
        monkeypatch.setattr(recipe, "plan", plan_of_many)
    monkeypatch.setitem(backend.known, Array, cupy_backend)
    return runs
