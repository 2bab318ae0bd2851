"""rms_norm_add_rms_norm: two norms, of which the second is of the sum that the first makes.

One launch runs both where a CTA holds a row. Else the second norm reads s, which the first wrote, from memory again.
The backward pass is that of either norm, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import checks
from .call.backend import Arrays, CallOptions, backend_of
from .operation import Operation, norm_add_norm_steps


def forward(options: CallOptions, arrays: Arrays, eps: float, scale: Any = None) -> dict[str, Any]:
    """Return results and, if they are asked for, statistics by name; arguments are those of `Backend.forward`."""
    backend = backend_of(options.function, arrays["x"])
    runs_both = getattr(backend, "runs_both_norms", None)
    if options.store is None and runs_both is not None and runs_both(options, arrays["x"]):
        return backend.forward(options._replace(s_dtype=None), arrays, eps)
    first, second, _ = _parts(options.operation)
    before = {name: array for name, array in arrays.items() if name != "second_weight"}
    of_first = options._replace(operation=first, dtype=options.s_dtype, s_dtype=None, store=None)
    results = backend.forward(of_first, before, eps)
    after = {"x": results["y"]} | {name: array for name, array in arrays.items() if name == "second_weight"}
    dtype = options.dtype or checks.dtype_name(options.function, arrays["x"].dtype)
    of_second = options._replace(operation=second, dtype=dtype, s_dtype=None)
    others = backend.forward(of_second, after, eps, scale)
    if options.statistics:
        others |= {"rstd": results["rstd"], "second_rstd": others["rstd"]}
    return others | {"s": results["y"]}


def backward(options: CallOptions, arrays: Arrays, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the gradients by name; arguments are those of `Backend.backward`, with the statistics of both norms.

    The whole gradient of s is rounded to the dtype of s before those of x and weight are computed from it.
    """
    of_x, of_sum = tuple(name for name in ("x", "weight") if name in wanted), "residual" in wanted
    backend = backend_of(options.function, arrays["s"], "s")
    first, _, second = _parts(options.operation)
    options = options._replace(s_dtype=None)
    given = {"x": arrays["s"], "rstd": arrays["second_rstd"]}
    given |= {name: arrays.get(name) for name in ("s", "dy", "ds", "second_weight")}
    of_second = (*(("x",) if of_x or of_sum else ()), *(("second_weight",) if "second_weight" in wanted else ()))
    gradients = backend.backward(options._replace(operation=second), given, of_second)
    gradients["residual"] = gradients.pop("x", None)
    if of_x:
        given = {"x": arrays["x"], "dy": gradients["residual"], "rstd": arrays["rstd"], "weight": arrays.get("weight")}
        backend = backend_of(options.function, arrays["x"])
        gradients |= backend.backward(options._replace(operation=first), given, of_x)
    return {name: gradients[name] for name in wanted}


def _parts(operation: Operation) -> tuple[Operation, Operation, Operation]:
    """Return the operations of s, of y from s, and of y's backward pass."""
    return norm_add_norm_steps(dict(operation.defaults)["weight"] == 0)
