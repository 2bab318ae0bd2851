"""rms_norm_add_rms_norm: two norms, of which the second is of the sum that the first makes.

One launch runs both where a CTA holds a row. Else the second norm reads s, which the first wrote, from memory again.
The backward pass is that of either norm, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .call import checks
from .call.backend import NormAddNorm, backend_of
from .call.broadcasting import Kinds
from .call.store import Float8Store
from .operation import Operation, norm_add_norm_steps


def forward(
    function: str,
    operation: Operation,
    x: Any,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
    float8: Float8Store | None = None,
    scale: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (results by name, statistics by name if they are asked for); arguments as `Backend.forward` has them."""
    backend = backend_of(function, x)
    options: dict[str, Any] = {"demanded": demanded, "statistics": statistics, "sm_margin": sm_margin}
    if float8 is None and isinstance(backend, NormAddNorm):
        found = backend.forward_norm_add_norm(
            function, operation, x, operands, eps, dtype=dtype, s_dtype=s_dtype, **options
        )
        if found is not None:
            return found, {name: found[name] for name in operation.statistics if name in found}
    first, second, _ = _parts(operation)
    before, after = _told_apart(operands)
    results, _, rstd = backend.forward(function, first, x, before, eps, dtype=s_dtype, s_dtype=None, **options)
    s = results["y"]
    options |= {"dtype": dtype or checks.dtype_name(function, x.dtype), "s_dtype": None}
    results, _, second_rstd = backend.forward(function, second, s, after, eps, **options, float8=float8, scale=scale)
    return results | {"s": s}, {"rstd": rstd, "second_rstd": second_rstd} if statistics else {}


def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: Kinds,
    sm_margin: int,
) -> dict[str, Any]:
    """Return the gradients by name. `arrays` are x, s, dy, ds, both statistics and operands; dy or ds may be None.

    The whole gradient of s is rounded to the dtype of s before those of x and weight are computed from it.
    """
    of_x, of_sum = [name for name in ("x", "weight") if name in wanted], "residual" in wanted
    backend = backend_of(function, arrays["s"], "s")
    first, _, second = _parts(operation)
    options: dict[str, Any] = {"demanded": demanded, "s_dtype": None, "sm_margin": sm_margin}
    given = {"x": arrays["s"], "rstd": arrays["second_rstd"]}
    given |= {name: arrays.get(name) for name in ("s", "dy", "ds", "second_weight")}
    of_s = ("x",) if of_x or of_sum else ()
    found = backend.backward(
        function, second, given, (*of_s, *(name for name in ("second_weight",) if name in wanted)), **options
    )
    gradients = {"residual": found.pop("x", None), **found}
    if of_x:
        given = {"x": arrays["x"], "dy": gradients["residual"], "rstd": arrays["rstd"], "weight": arrays.get("weight")}
        gradients |= backend_of(function, arrays["x"]).backward(function, first, given, of_x, **options)
    return {name: gradients[name] for name in wanted}


def _parts(operation: Operation) -> tuple[Operation, Operation, Operation]:
    return norm_add_norm_steps(dict(operation.defaults)["weight"] == 0)


def _told_apart(operands: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands of the first norm and those of the second."""
    after = {name: one for name, one in operands.items() if name == "second_weight"}
    return {name: one for name, one in operands.items() if name not in after}, after
