"""Problems as calls make them, for tests of plans and kernels that need no arrays."""

from __future__ import annotations

from typing import Any

from cunorm.kernel.device import KNOWN, Device, known
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan
from cunorm.plan.problem import Problem

DEVICES = {device.name: device for arch in KNOWN for device in known(arch)}


def problem(direction: str, rows: int, cols: int, dtype: str, op: str = "layer_norm", **changes: Any) -> Problem:
    """Return a problem with contiguous rows, weight and bias of the dtype of x, and all gradients wanted."""
    arguments: dict[str, Any] = {"weight": dtype}
    if direction == "forward" and op == "layer_norm":
        arguments["bias"] = dtype
    if direction == "backward" and op == "rms_norm":
        arguments["wanted"] = ("x", "weight")
    return plain(op, direction, rows, cols, dtype, **arguments | changes)


def refused(problem: Problem, device: Device) -> bool:
    """Whether there is no plan: streamed rows have no gradient of a vector or number that the prologue shares."""
    try:
        plan(problem, device)
    except NotImplementedError:
        return True
    return False
