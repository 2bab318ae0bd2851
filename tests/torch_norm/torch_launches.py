"""Torch tensors on the CPU that play those of a GPU, whose launches run on the stand-in."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import cpu_device
import numpy
import pytest
import torch
from cpu_functions import FEW_SMS
from torch_stand_in import forget, split

from cunorm.torch.norm import gpu, launching, nodes


class Launches:
    """Stand in for cunorm.kernel.launch: `plans` are those that ran, in order, and `streams` those they ran on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.machine = cpu_device.Machine()
        self.plans: list[Any] = []
        self.streams: list[int] = []
        self._views: dict[int, numpy.ndarray] = {}  # views of the tensors' memory, by the pointers of launches
        data_ptr = torch.Tensor.data_ptr

        def pointer(tensor: Any) -> int:
            self._views[data_ptr(tensor)] = view(tensor)
            return data_ptr(tensor)

        monkeypatch.setattr(torch.Tensor, "data_ptr", pointer)

    def run(self, plan, device_id, stream, arguments, workspace=0) -> None:
        self.plans.append(plan)
        self.streams.append(stream)
        pointers, scalars = cpu_device.divided(plan, arguments)
        self.machine.run(plan, scalars, **{name: self._at(pointer) for name, pointer in pointers.items()})

    def _at(self, pointer: int) -> numpy.ndarray | None:
        """Return the array at a pointer, which may lead into its middle as that of rstd does, or None for 0."""
        if not pointer:
            return None
        for start, array in self._views.items():
            if start <= pointer < start + array.nbytes:
                return array if start == pointer else array.reshape(-1)[(pointer - start) // array.itemsize :]
        raise KeyError(pointer)


def view(tensor: Any) -> numpy.ndarray:
    """Return NumPy's view of the memory of a tensor."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def empty(shape, stride, dtype) -> Any:
    """Return a tensor full of NaN, so that whoever reads it before it is written is seen."""
    memory = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return memory.view(torch.uint8).fill_(255).view(dtype) if dtype.itemsize == 1 else memory.fill_(float("nan"))


def on_the_stand_in(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Launches:
    """Let `launching` and `modules` launch on the stand-in; skip the test where there is none."""
    if cpu_device.missing():
        pytest.skip(cpu_device.missing())
    launches = Launches(monkeypatch)
    parts = {
        "current_device": lambda: -1,
        "stream": lambda _: 0,
        "empty": empty,
        "properties_of": lambda *_: FEW_SMS,
    }
    for name, part in parts.items():
        monkeypatch.setattr(gpu, name, part)
    forget(monkeypatch)
    split(monkeypatch)
    for module in (launching, *modules):
        monkeypatch.setattr(module, "launch", launches)
        for kept in ("_plans", "_recipes"):
            if hasattr(module, kept):
                monkeypatch.setattr(module, kept, {})
    monkeypatch.setattr(nodes, "module", functools.cache(lambda: None))  # a GPU's could not launch them
    return launches
