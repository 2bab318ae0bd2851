"""The backend of JAX arrays for cunorm's own `layer_norm_linear`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ...linear import checks as linear_checks
from ...linear.checks import LinearOptions
from . import functional


def forward(options: LinearOptions, arrays: Mapping[str, Any]) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (y, mean, rstd), statistics None unless asked for. All are differentiable."""
    y, statistics = functional.norm_linear(options, arrays)
    return y, statistics.get("mean"), statistics.get("rstd")


def backward(options: LinearOptions, arrays: Mapping[str, Any], output_mask: Any) -> tuple[jax.Array | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    given = functional.given(options.function, arrays, linear_checks.required_of_backward(options.norm))
    linear_checks.check_backward(options.function, functional.layouts(given), bool(options.zero_centered_gamma))
    mask = linear_checks.check_output_mask(options.function, output_mask)
    names = linear_checks.GRADIENTS[: 5 if options.norm == "layer_norm" else 4]
    wanted = tuple(name for name, is_wanted in zip(names, mask, strict=False) if is_wanted)
    task = functional.norm_task(options, given["x"].dtype.name, given)
    inputs = functional.norm_inputs(task, given)
    results = functional.gradients(task, wanted, given["dy"], given["weight"], inputs) if wanted else {}
    return tuple(results.get(name) for name in linear_checks.GRADIENTS)
