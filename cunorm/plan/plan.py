"""How a `Problem` is run: `Problem` x `Device` -> `Plan`. Pure functions; no GPU library is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ..kernel.device import Device
from .choose import choose
from .launches import launches
from .problem import Problem
from .steps import Plan

_records: list[list[Problem]] = []


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device) -> Plan:
    """The plan of a problem with at least one row."""
    for record in _records:
        record.append(problem)
    return launches(problem, choose(problem, device), device)


@contextmanager
def recorded() -> Iterator[list[Problem]]:
    """The problems that are planned within. Calls that were planned before, and are kept by their backend, are not."""
    plan.cache_clear()
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()
