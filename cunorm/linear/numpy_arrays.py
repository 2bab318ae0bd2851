"""`layer_norm_linear` on NumPy arrays, in float64 with one rounding at the end."""

from __future__ import annotations

import numpy

from ..call import numpy as norms
from ..call.numpy import layout, rounded, sum_of_rows
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
    statistics: bool,
) -> tuple[numpy.ndarray, numpy.ndarray | None, numpy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    named = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    layouts = tuple(
        (name, layout(function, name, array))
        for name, array in named.items()
        if array is not None or name in ("x", "weight")
    )
    problem.check_forward(function, layouts, zero_centered_gamma)
    z, mean, rstd = _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics)
    with numpy.errstate(all="ignore"):
        y = z @ weight.astype(numpy.float64).T
        if bias is not None:
            y += bias.astype(numpy.float64)
        return rounded(y, x.dtype), mean, rstd


def backward(
    function: str,
    op: str,
    dy: numpy.ndarray,
    x: numpy.ndarray,
    mean: numpy.ndarray | None,
    rstd: numpy.ndarray,
    weight: numpy.ndarray,
    ln_weight: numpy.ndarray | None,
    ln_bias: numpy.ndarray | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
) -> tuple[numpy.ndarray | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    layer_norm = op == "layer_norm"
    required = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, **({"mean": mean} if layer_norm else {})}
    named = {**required, "ln_weight": ln_weight, "ln_bias": ln_bias}
    layouts = tuple(
        (name, layout(function, name, array)) for name, array in named.items() if array is not None or name in required
    )
    problem.check_backward(function, layouts, zero_centered_gamma)
    wants_dx, wants_dweight, wants_dbias, *wants_ln = problem.check_output_mask(function, output_mask)
    grad = dy.astype(numpy.float64)
    rows = grad.reshape(-1, len(weight))
    dweight = dbias = None
    with numpy.errstate(all="ignore"):
        if wants_dweight:
            z, _, _ = _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, False)
            dweight = rounded(rows.T @ z.reshape(-1, z.shape[-1]), x.dtype)
        if wants_dbias:
            dbias = rounded(sum_of_rows(rows, 1), x.dtype)
        dz = grad @ weight.astype(numpy.float64)
    asked = (f"{op}_backward", None, zero_centered_gamma, None, 0)
    mask = (wants_dx, *wants_ln)[: 3 if layer_norm else 2]
    of_mean = mean if layer_norm else None
    dx, dln_weight, dln_bias = norms.norm_backward(asked, dz, x, of_mean, rstd, ln_weight, None, mask)
    return dx, dweight, dbias, dln_weight, dln_bias


def _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics):
    """Return (z, mean, rstd), z in float64."""
    asked = (f"{op}_forward", x.shape[-1], zero_centered_gamma, "float64", 0)
    z, *kept = norms.norm(asked, x, ln_weight, ln_bias, eps, None, statistics)
    mean, rstd = (None, *kept)[-2:] if statistics else (None, None)
    return z, mean, rstd
