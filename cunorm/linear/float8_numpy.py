"""`layer_norm_linear` in 8 bits on NumPy arrays: the bytes that a GPU would multiply, and their product in float64."""

from __future__ import annotations

import numpy

from ..norm import float8_numpy
from ..numpy_arrays import layout, numpy_dtype, rounded
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
    z, z_scale, _ = float8_numpy.forward(
        f"{op}_fp8",
        x,
        x.shape[-1],
        ln_weight,
        ln_bias,
        eps,
        zero_centered_gamma=zero_centered_gamma,
        granularity="row",
        scale=None,
        dtype=E4M3,
        sm_margin=0,
        output=False,
    )
    rows, row_scale = float8_numpy.quantise(weight.astype(numpy.float32), "row", E4M3)
    with numpy.errstate(all="ignore"):
        y = (_numbers(z) @ _numbers(rows).T) * z_scale[..., None].astype(numpy.float64) * row_scale[:, 0]
        if bias is not None:
            y += bias.astype(numpy.float64)
        return rounded(y, x.dtype)


def _numbers(found: numpy.ndarray) -> numpy.ndarray:
    return found.view(numpy_dtype("layer_norm_linear", E4M3)).astype(numpy.float64)
