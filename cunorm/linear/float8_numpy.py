"""`layer_norm_linear` in 8 bits on NumPy arrays: the bytes that a GPU would multiply, and their product in float64."""

from __future__ import annotations

import numpy

from ..call import numpy as norms
from ..call.numpy import layout, numpy_dtype, rounded
from ..call.store import Float8Store
from ..plan.problem import E4M3
from . import problem


def forward(
    function: str,
    op: str,
    x: numpy.ndarray,
    weight: numpy.ndarray,
    bias: numpy.ndarray | None,
    ln_weight: numpy.ndarray | None,
    ln_bias: numpy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
) -> numpy.ndarray:
    """Return y."""
    named = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    layouts = tuple(
        (name, layout(function, name, array))
        for name, array in named.items()
        if array is not None or name in ("x", "weight")
    )
    problem.check_forward(function, layouts, zero_centered_gamma)
    problem.check_float8(function, layouts)
    asked = (f"{op}_fp8", x.shape[-1], zero_centered_gamma, None, 0)
    z, z_scale = norms.norm_float8(asked, x, ln_weight, ln_bias, eps, Float8Store(E4M3, "row", wide=False), None)
    rows, row_scale = norms.quantise(weight.astype(numpy.float32), "row", E4M3)
    with numpy.errstate(all="ignore"):
        y = (_numbers(z) @ _numbers(rows).T) * z_scale[..., None].astype(numpy.float64) * row_scale[:, 0]
        if bias is not None:
            y += bias.astype(numpy.float64)
        return rounded(y, x.dtype)


def _numbers(found: numpy.ndarray) -> numpy.ndarray:
    return found.view(numpy_dtype("layer_norm_linear", E4M3)).astype(numpy.float64)
