"""The backend of JAX arrays for cunorm's own `layer_norm_linear`."""

from __future__ import annotations

import jax

from ...linear import problem
from . import functional


def forward(
    function: str,
    op: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    ln_weight: jax.Array | None,
    ln_bias: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    statistics: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (y, mean, rstd), statistics None unless asked for. All are differentiable."""
    named = {"x": x, "weight": weight, "bias": bias, "ln_weight": ln_weight, "ln_bias": ln_bias}
    y, found = functional.norm_linear(function, op, named, eps, zero_centered_gamma, statistics=statistics)
    return y, found.get("mean"), found.get("rstd")


def backward(
    function: str,
    op: str,
    dy: jax.Array,
    x: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    weight: jax.Array,
    ln_weight: jax.Array | None,
    ln_bias: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
) -> tuple[jax.Array | None, ...]:
    """Return (dx, dweight, dbias, dln_weight, dln_bias), None where output_mask says so."""
    required = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, **({"mean": mean} if op == "layer_norm" else {})}
    named = {**required, "ln_weight": ln_weight, "ln_bias": ln_bias}
    arrays = functional.given(function, named, tuple(required))
    problem.check_backward(function, functional.layouts(arrays), bool(zero_centered_gamma))
    mask = problem.check_output_mask(function, output_mask)
    names = problem.GRADIENTS[: 5 if op == "layer_norm" else 4]
    wanted = tuple(name for name, flag in zip(names, mask, strict=False) if flag)
    task = functional.norm_task(op, bool(zero_centered_gamma), eps, arrays["x"].dtype.name, arrays)
    inputs = functional.norm_inputs(task, arrays)
    results = functional.gradients(task, wanted, arrays["dy"], arrays["weight"], inputs) if wanted else {}
    return tuple(results.get(name) for name in problem.GRADIENTS)
