"""Checked problems, as api.py would make them, for tests of plans and kernels that need no arrays."""

from __future__ import annotations

from typing import Any

from cunorm.norm.problem import Problem


def problem(direction: str, rows: int, cols: int, dtype: str, **changes: Any) -> Problem:
    """Everything there is and is wanted: layer_norm, contiguous rows, weight and bias of the dtype of x."""
    arguments = {
        "op": "layer_norm",
        "direction": direction,
        "rows": rows,
        "cols": cols,
        "x": dtype,
        "y": dtype,
        "weight": dtype,
        "bias": dtype if direction == "forward" else None,
        "zero_centered_gamma": False,
        "x_stride": cols,
        "y_stride": cols,
        "sm_margin": 0,
        "aligned": True,
        "output_mask": (direction == "backward",) * 3,
    }
    if changes.get("op") == "rms_norm":
        arguments |= {"bias": None, "output_mask": (*arguments["output_mask"][:2], False)}
    return Problem(**arguments | changes)
