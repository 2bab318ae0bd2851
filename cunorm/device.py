"""The facts about a GPU that plan.py reads. They can be made up, for tests and for compiling without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Device:
    """`arch` is the compute capability without its point: 90 for 9.0."""

    name: str
    arch: int
    sms: int

    @property
    def has_clusters(self) -> bool:
        return self.arch >= 90


# A common GPU of each architecture that kernels are compiled for.
KNOWN = {
    75: Device("Tesla T4", 75, 40),
    80: Device("A100", 80, 108),
    86: Device("A10", 86, 72),
    89: Device("L40S", 89, 142),
    90: Device("H200", 90, 132),
    100: Device("B200", 100, 148),
    120: Device("RTX PRO 6000", 120, 188),
}


@cache
def current(device_id: int) -> Device:
    """The GPU of that number, through CuPy."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        properties["name"].decode(), 10 * properties["major"] + properties["minor"], properties["multiProcessorCount"]
    )
