"""The plan of a `Problem` on a `Device`. Pure functions; no GPU library is imported."""

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
    """Return the plan of a problem with at least one row."""
    for record in _records:
        record.append(problem)
    return launches(problem, choose(problem, device), device)


@contextmanager
def recorded() -> Iterator[list[Problem]]:
    """Record the problems that are planned within, without those of calls that a backend has kept from before."""
    plan.cache_clear()
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()
