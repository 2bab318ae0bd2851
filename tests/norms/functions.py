"""Functions that call either norm with one signature."""

from __future__ import annotations

from typing import Any

import cunorm

OPS = ("layer_norm", "rms_norm")


def forward(op: str, x: Any, weight: Any = None, bias: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return (y, mean, rstd); rms_norm has no mean and ignores the bias."""
    if op == "layer_norm":
        return cunorm.layer_norm_forward(x, None, weight, bias, **options)
    y, rstd = cunorm.rms_norm_forward(x, None, weight, **options)
    return y, None, rstd


def backward(
    op: str, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Return (dx, dweight, dbias); rms_norm has no dbias."""
    if op == "layer_norm":
        return cunorm.layer_norm_backward(dy, x, mean, rstd, weight, **options)
    if "output_mask" in options:
        options["output_mask"] = options["output_mask"][:2]
    dx, dweight = cunorm.rms_norm_backward(dy, x, rstd, weight, **options)
    return dx, dweight, None


def bias_of(op: str, bias: Any) -> Any:
    """Return the bias that the reference needs: rms_norm has none."""
    return bias if op == "layer_norm" else None
