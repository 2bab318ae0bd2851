"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions; no GPU library is imported."""

from __future__ import annotations

from functools import lru_cache

from ..kernel.device import Device
from .choose import choose
from .launches import launches
from .problem import Problem
from .steps import Plan


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    return launches(problem, choose(problem, device), device)
