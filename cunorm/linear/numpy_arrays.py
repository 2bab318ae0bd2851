"""`layer_norm_linear` on NumPy arrays, in float64 with one rounding at the end; in 8 bits from the bytes of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from ..call import numpy as norms
from ..call.numpy import layout, numpy_dtype, rounded, sum_of_rows
from ..call.store import Float8Store
from ..plan.problem import E4M3
from . import checks as linear_checks
from .checks import LinearOptions

Arrays = Mapping[str, Any]


def forward(options: LinearOptions, arrays: Arrays) -> tuple[numpy.ndarray, numpy.ndarray | None, numpy.ndarray | None]:
    """Return (y, mean, rstd), statistics None unless asked for."""
    layouts = linear_checks.layouts_of(options.function, arrays, layout)
    linear_checks.check_forward(options.function, layouts, options.zero_centered_gamma)
    z, mean, rstd = _normalised(options, arrays)
    with numpy.errstate(all="ignore"):
        return _with_bias(z @ arrays["weight"].astype(numpy.float64).T, arrays), mean, rstd


def forward_float8(options: LinearOptions, arrays: Arrays) -> numpy.ndarray:
    """Return y, from the bytes that a GPU would multiply and their product in float64."""
    layouts = linear_checks.layouts_of(options.function, arrays, layout)
    linear_checks.check_forward(options.function, layouts, options.zero_centered_gamma)
    linear_checks.check_float8(options.function, layouts)
    x = arrays["x"]
    of_norm = options.of_norm("fp8", x.shape[-1], Float8Store(E4M3, "row", wide=False))
    z, z_scale = norms.norm_float8(of_norm, (x, arrays["ln_weight"], arrays["ln_bias"]), options.eps, None)
    rows, row_scale = norms.quantise(arrays["weight"].astype(numpy.float32), "row", E4M3)
    with numpy.errstate(all="ignore"):
        y = (_numbers(z) @ _numbers(rows).T) * z_scale[..., None].astype(numpy.float64) * row_scale[:, 0]
        return _with_bias(y, arrays)


def backward(options: LinearOptions, arrays: Arrays, output_mask: Any) -> tuple[numpy.ndarray | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    required = linear_checks.required_of_backward(options.norm)
    layouts = linear_checks.layouts_of(options.function, arrays, layout, required)
    linear_checks.check_backward(options.function, layouts, options.zero_centered_gamma)
    wants_dx, wants_dweight, wants_dbias, *wants_ln = linear_checks.check_output_mask(options.function, output_mask)
    x, weight = arrays["x"], arrays["weight"]
    dy = arrays["dy"].astype(numpy.float64)
    rows = dy.reshape(-1, len(weight))
    dweight = dbias = None
    with numpy.errstate(all="ignore"):
        if wants_dweight:
            z, _, _ = _normalised(options, arrays)
            dweight = rounded(rows.T @ z.reshape(-1, z.shape[-1]), x.dtype)
        if wants_dbias:
            dbias = rounded(sum_of_rows(rows, 1), x.dtype)
        dz = dy @ weight.astype(numpy.float64)
    mask = (wants_dx, *wants_ln)[: 3 if options.norm == "layer_norm" else 2]
    of_norm = options.of_norm("backward", None, mask)
    read = (dz, x, arrays["mean"], arrays["rstd"], arrays["ln_weight"])
    dx, dln_weight, dln_bias = norms.norm_backward(of_norm, read, None)
    return dx, dweight, dbias, dln_weight, dln_bias


def _normalised(options: LinearOptions, arrays: Arrays) -> tuple[numpy.ndarray, Any, Any]:
    """Return (z, mean, rstd), z in float64, statistics None unless asked for."""
    x = arrays["x"]
    of_norm = options.of_norm("forward", x.shape[-1], options.statistics, "float64")
    z, *statistics = norms.norm(of_norm, (x, arrays["ln_weight"], arrays["ln_bias"]), options.eps, None)
    mean, rstd = (None, *statistics)[-2:] if statistics else (None, None)
    return z, mean, rstd


def _with_bias(y: numpy.ndarray, arrays: Arrays) -> numpy.ndarray:
    """Add bias, if there is one, to a product in float64, and round it to the dtype of x."""
    if arrays["bias"] is not None:
        y += arrays["bias"].astype(numpy.float64)
    return rounded(y, arrays["x"].dtype)


def _numbers(bytes: numpy.ndarray) -> numpy.ndarray:
    return bytes.view(numpy_dtype("layer_norm_linear", E4M3)).astype(numpy.float64)
