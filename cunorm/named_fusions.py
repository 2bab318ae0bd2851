"""What the named functions over fused operations share: each is a line of `FUSIONS`, and hands its arrays by name to
`forward` or `backward`.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from .call import checks
from .call.backend import backend_of
from .call.broadcasting import Kinds
from .call.store import store_of
from .operation import FUSIONS, NORMS, SEED, Operation

# What these operands must be, whatever the shape of x.
KINDS = (("residual", "full"), ("z", "full"), ("weight", "column"), ("bias", "column"), ("second_weight", "column"))


def _operation(function: str, weight: Any, flags: Mapping[str, Any]) -> Operation:
    check_zero_centered(function, weight, flags.get("zero_centered_gamma"))
    of = FUSIONS[function.removesuffix("_forward").removesuffix("_backward")]
    return of(**{name: bool(flag) for name, flag in flags.items()})


def check_zero_centered(function: str, weight: Any, zero_centered_gamma: Any) -> None:
    if zero_centered_gamma and weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")


def check_dropout_p(function: str, dropout_p: Any) -> float:
    if type(dropout_p) is not float and (isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)):
        raise TypeError(f"{function}: dropout_p must be a real number; got {checks.kind_of_option(dropout_p)}")
    dropout_p = checks.as_float(function, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{function}: dropout_p must be at least 0 and less than 1; got {dropout_p}.")
    return dropout_p


def dropout(function: str, dropout_p: Any, seed: Any) -> dict[str, Any]:
    """The operands that dropout adds; none where nothing is dropped.

    A kernel compares 16 bits, so dropout_p is rounded to a multiple of 2^-16, and so is what scales the rest.
    """
    dropout_p = check_dropout_p(function, dropout_p)
    if dropout_p == 0:
        return {}
    if seed is None:
        raise ValueError(f"{function}: dropout_p={dropout_p} needs a seed, an array of one int64; got seed=None.")
    dropped = min(round(dropout_p * 2**16), 2**16 - 1) / 2**16
    return {SEED: seed, "dropped": dropped, "factor": 1 / (1 - dropped)}


def forward(
    function: str,
    x: Any,
    operands: Mapping[str, Any],
    eps: float,
    dtype: Any = None,
    s_dtype: Any = None,
    *,
    kinds: Kinds = KINDS,
    sm_margin: int = 0,
    **flags: Any,
) -> tuple[Any, ...]:
    """The results in order; of a function `..._forward` also what the norm keeps of a row."""
    dtype, s_dtype = (None if one is None else checks.dtype_name(function, one) for one in (dtype, s_dtype))
    operation = _operation(function, operands.get("weight"), flags)
    optional = dict(operation.defaults)
    statistics = function.endswith("_forward")
    results, mean, rstd = backend_of(function, x).forward(
        function,
        operation,
        x,
        {name: one for name, one in operands.items() if one is not None or name not in optional},
        eps,
        demanded=kinds,
        dtype=dtype,
        s_dtype=s_dtype,
        statistics=statistics,
        sm_margin=sm_margin,
    )
    kept = {"mean": mean, "rstd": rstd}
    of_rows = (kept[name] for name in NORMS[operation.norm].statistics) if statistics else ()
    return (*(results[name] for name in operation.returns), *of_rows)


def forward8(
    function: str,
    operation: Operation,
    x: Any,
    operands: Mapping[str, Any],
    eps: float,
    s_dtype: Any,
    *,
    granularity: str | int,
    scale: Any,
    dtype: Any,
    sm_margin: int,
) -> tuple[Any, ...]:
    """The results in order with (bytes, scale) in place of y, of a function `..._fp8_forward` (bytes, scale, y)."""
    wide = function.endswith("_forward")
    store = store_of(function, dtype, granularity, scale, wide=wide)
    s_dtype = None if s_dtype is None else checks.dtype_name(function, s_dtype)
    results, _, _ = backend_of(function, x).forward(
        function,
        operation,
        x,
        operands,
        eps,
        demanded=KINDS,
        dtype=None,
        s_dtype=s_dtype,
        statistics=False,
        sm_margin=sm_margin,
        float8=store,
        scale=scale,
    )
    return tuple(results[name] for name in store.results(operation.returns))


def backward(
    function: str,
    arrays: Mapping[str, Any],
    names: Sequence[str],
    output_mask: object,
    x_is: str = "x",
    *,
    kinds: Kinds = KINDS,
    sm_margin: int = 0,
    **flags: Any,
) -> tuple[Any, ...]:
    """The gradients of `names`, None where output_mask says so. `x_is` is what the caller knows x by."""
    operation = _operation(function, arrays.get("weight"), flags)
    given = [f"d{name}" for name in operation.returns]
    if all(arrays[name] is None for name in given):
        must_be = "dy must be an array; got None" if len(given) == 1 else "dy or ds must be an array; got None for both"
        raise ValueError(f"{function}: {must_be}.")
    mask = checks.check_flags(function, output_mask, len(names))
    gradients = backend_of(function, arrays["x"], x_is).backward(
        function,
        operation,
        arrays,
        tuple(name for name, wanted in zip(names, mask, strict=True) if wanted),
        demanded=kinds,
        s_dtype=None,
        sm_margin=sm_margin,
    )
    return tuple(map(gradients.get, names))
