"""`layer_norm_linear` on NumPy arrays, in float64 with one rounding at the end; in 8 bits of the bytes of a GPU."""

from __future__ import annotations

from typing import Any

import numpy

from ..call import numpy as norms
from ..call.numpy import layout, numpy_dtype, rounded, sum_of_rows
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
    statistics: bool,
) -> tuple[numpy.ndarray, numpy.ndarray | None, numpy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    layouts = _layouts(function, x=x, weight=weight, bias=bias, ln_weight=ln_weight, ln_bias=ln_bias)
    problem.check_forward(function, layouts, zero_centered_gamma)
    z, mean, rstd = _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics)
    with numpy.errstate(all="ignore"):
        y = z @ weight.astype(numpy.float64).T
        if bias is not None:
            y += bias.astype(numpy.float64)
        return rounded(y, x.dtype), mean, rstd


def forward_float8(
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
    """Return y, from the bytes that a GPU would multiply and their product in float64."""
    layouts = _layouts(function, x=x, weight=weight, bias=bias, ln_weight=ln_weight, ln_bias=ln_bias)
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
    named = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, **({"mean": mean} if layer_norm else {})}
    layouts = _layouts(function, **named, ln_weight=ln_weight, ln_bias=ln_bias, required=tuple(named))
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


def _layouts(function: str, *, required: tuple[str, ...] = ("x", "weight"), **arrays: Any) -> problem.Named:
    return tuple(
        (name, layout(function, name, array)) for name, array in arrays.items() if array is not None or name in required
    )


def _numbers(bytes: numpy.ndarray) -> numpy.ndarray:
    return bytes.view(numpy_dtype("layer_norm_linear", E4M3)).astype(numpy.float64)


def _normalised(op, x, ln_weight, ln_bias, eps, zero_centered_gamma, statistics):
    """Return (z, mean, rstd), z in float64."""
    asked = (f"{op}_forward", x.shape[-1], zero_centered_gamma, "float64", 0)
    z, *kept = norms.norm(asked, x, ln_weight, ln_bias, eps, None, statistics)
    mean, rstd = (None, *kept)[-2:] if statistics else (None, None)
    return z, mean, rstd
