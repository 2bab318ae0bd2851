"""CuPy's part in a fused operation played by NumPy arrays, and the GPU's by a Machine of cpu_device.py: the family of
CuPy arrays runs on the CPU as it is, checks, recipes, copies and all."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy
from cpu_device import Machine
from cpu_functions import SMALL, unwritten

from cunorm import cupy_arrays, families
from cunorm.device import Device
from cunorm.norm import fused_cupy
from cunorm.norm.plan import Plan
from cunorm.norm.problem import Operand
from cunorm.numpy_arrays import numpy_dtype
from cunorm.recipes import Recipes


class Array(numpy.ndarray):
    """A NumPy array that says of its memory what one of CuPy says. A new one is full of NaN."""

    def __new__(cls, shape: tuple[int, ...], dtype: Any) -> Array:
        return unwritten(shape, numpy.dtype(dtype)).view(cls)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)

    def get(self) -> numpy.ndarray:
        return self.view(numpy.ndarray)


def asarray(array: numpy.ndarray) -> Array:
    """Its values in memory that begins as that of a GPU does."""
    copy = Array(array.shape, array.dtype)
    copy[...] = array
    return copy


class Runs:
    """Stands in for launch.py: runs plans, and keeps them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.plans: list[Plan] = []

    def run(self, plan: Plan, device_id: int, stream: int, pointers, scalars, workspace: int) -> None:
        problem = plan.problem
        self.plans.append(plan)
        arrays = {
            name: _array_at(pointer, problem.by_name[name], problem.rows, problem.cols) if pointer else None
            for name, pointer in zip(problem.pointers, pointers, strict=True)
        }
        self.machine.run(plan, dict(zip(problem.scalars, scalars, strict=True)), **arrays)


def _array_at(pointer: int, operand: Operand, rows: int, cols: int) -> numpy.ndarray:
    dtype = numpy_dtype("test", operand.dtype)
    count, strides = operand.size(rows, cols), (dtype.itemsize,)
    shape: tuple[int, ...] = (count,)
    if operand.kind == "full":
        shape, strides = (rows, cols), (operand.row_stride * dtype.itemsize, dtype.itemsize)
        count = (rows - 1) * operand.row_stride + cols
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return numpy.ndarray(shape, dtype, memory, 0, strides)


def play(monkeypatch: Any, device: Device = SMALL, machine: Machine | None = None) -> Runs:
    """Until the end of the test."""
    runs = Runs(machine or Machine())
    cupy = SimpleNamespace(
        ndarray=Array,
        zeros=lambda shape, dtype: asarray(numpy.zeros(shape, dtype)),
        ascontiguousarray=lambda array: asarray(array.get()),
        cuda=SimpleNamespace(
            Device=lambda _: contextlib.nullcontext(),
            alloc=lambda _: SimpleNamespace(ptr=0),  # Machine.run brings the workspace
            get_current_stream=lambda _: SimpleNamespace(ptr=0),
        ),
    )
    monkeypatch.setattr(fused_cupy, "cupy", cupy)
    monkeypatch.setattr(cupy_arrays, "cupy", cupy)
    monkeypatch.setattr(fused_cupy, "launch", runs)
    monkeypatch.setattr(fused_cupy, "device", SimpleNamespace(current=lambda _: device))
    monkeypatch.setattr(fused_cupy, "_recipes", Recipes())
    monkeypatch.setitem(families._fused, Array, fused_cupy)
    return runs
