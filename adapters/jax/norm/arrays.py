"""What cunorm's own functions do with JAX arrays: as cupy_arrays.py and numpy_arrays.py with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from ...call import checks
from ...call.checks import Layout
from ...operation import affine
from . import functional, primitives, sharding
from .formulas import Task


def forward(
    function: str,
    x: jax.Array,
    normalized_shape: int | Sequence[int] | None,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (y, mean, rstd), statistics None unless asked for. All are differentiable."""
    _refuse(function, "out", out)
    arrays, task = functional.checked(
        function, x, normalized_shape, weight, bias, eps, zero_centered_gamma, dtype, sm_margin
    )
    results = functional.FORWARD[task.operation.norm](task, statistics, arrays)
    return results["y"], results.get("mean"), results.get("rstd")


def backward(
    function: str,
    dy: jax.Array,
    x: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    weight: jax.Array | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    dx_out: None,
    sm_margin: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    _refuse(function, "dx_out", dx_out)
    layer_norm = function.startswith("layer_norm")
    optional = ("weight",) if layer_norm else ("weight", "mean")
    named = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight}
    arrays = {
        name: functional.array(function, name, a) for name, a in named.items() if a is not None or name not in optional
    }
    layouts = {name: Layout(a.shape, (), a.dtype.name, "") for name, a in arrays.items()}
    shape = checks.check_backward(
        function,
        layouts["dy"],
        layouts["x"],
        layouts.get("mean"),
        layouts["rstd"],
        layouts.get("weight"),
        zero_centered_gamma=zero_centered_gamma,
    )
    mask = checks.check_output_mask(function, output_mask, 3 if layer_norm else 2)
    margin = checks.check_sm_margin(function, sm_margin, None)
    operation = affine(function.removesuffix("_backward"), bool(zero_centered_gamma))
    parameter = layouts.get("weight", layouts["x"]).dtype
    dtypes = (("x", layouts["x"].dtype), ("weight", parameter), ("bias", parameter))
    task = Task(operation, len(shape), 0.0, layouts["dy"].dtype, margin, dtypes)
    names = ("dx", "dweight", "dbias")
    wanted = tuple(name for name, flag in zip(names, mask, strict=True) if flag)
    results = cunorm_backward(task, wanted, sharding.prepared(task, arrays)) if wanted else {}
    return results.get("dx"), results.get("dweight"), results.get("dbias")


def _refuse(function: str, name: str, out: Any) -> None:
    if out is not None:
        got = type(out).__name__
        raise TypeError(f"{function}: {name} must be None, as JAX's arrays are not written to; got {got}.")


@partial(jax.jit, static_argnums=(0, 1))
def cunorm_backward(task: Task, wanted: tuple[str, ...], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return primitives.backward(task, arrays, wanted)
