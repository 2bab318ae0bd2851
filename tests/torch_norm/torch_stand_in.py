"""Torch's launches of fused operations run on the stand-in for a GPU."""

from __future__ import annotations

import functools
from typing import Any

import cpu_cupy
import cpu_device
import torch
from cpu_functions import SMALL

from cunorm.linear import plan as linear_plan
from cunorm.plan.tables import SPLIT
from cunorm.torch import named
from cunorm.torch.norm import calls, dispatch, gpu, launching, nodes, repeats


def forget(monkeypatch: Any) -> None:
    """Forget all earlier calls."""
    calls_of_other_rows = (repeats, "_forms"), (dispatch, "_first_calls")
    for owner, kept in ((calls, "_made"), (calls, "_families"), (repeats, "_calls"), *calls_of_other_rows):
        monkeypatch.setattr(owner, kept, {})
    for function in (calls._affine_call, named._call_of):
        monkeypatch.setattr(function, "results", {})


def split(monkeypatch: Any) -> None:
    """Run a norm and its product as two launches unless a table says something else."""
    monkeypatch.setattr(linear_plan, "_expected", lambda *_: SPLIT)
    linear_plan.chosen.cache_clear()


def play(monkeypatch: Any) -> cpu_cupy.Runs:
    """Let tensors on the CPU play those of a GPU, and run their launches on the stand-in."""
    runs: Any = cpu_cupy.Runs(cpu_device.Machine())

    def empty(shape, stride, dtype):
        runs.allocated.append(tuple(shape))
        memory = torch.empty_strided(shape, stride, dtype=dtype)
        return memory.fill_(float("nan")) if dtype.is_floating_point else memory

    runs.allocated = []
    for name, part in {
        "current_device": lambda: -1,
        "stream": lambda _: 0,
        "empty": empty,
        "properties_of": lambda *_: SMALL,
    }.items():
        monkeypatch.setattr(gpu, name, part)
    monkeypatch.setattr(launching, "launch", runs)
    split(monkeypatch)
    forget(monkeypatch)
    monkeypatch.setattr(dispatch, "at_once", lambda _: True)
    monkeypatch.setattr(dispatch, "launchable", lambda _: True)
    monkeypatch.setattr(nodes, "module", functools.cache(lambda: None))  # a GPU's could not launch them
    return runs
