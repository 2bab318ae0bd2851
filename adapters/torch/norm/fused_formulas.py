"""Fused operations in torch's own operators: on the CPU, under functorch, and for second derivatives.

All of it is differentiable. Arithmetic in `compute_dtype` of the rows that are normalised, with one rounding of y and
one of s, whose gradient passes through it unrounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...expression.philox import uniform
from ...expression.texts import evaluate
from ...expression.value import Expression
from ...operation import NORMS, SEED, Operation, derivative
from ...plan.problem import compute_dtype

# x (..., cols); statistics as in formulas.py: (mean, rstd) or (rstd,) of every row, shape (2 or 1, ...).


def forward(
    operation: Operation, values: Mapping[str, Tensor | float], eps: float, dtype: torch.dtype, s_dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """({"y": y, "s": s if there is a prologue}, statistics). `values`: x and the operands, by name."""
    shape, given = values["x"].shape, tuple(values.values())
    operation = operation.given(values)
    values = _wide(values, s_dtype, shape)
    exact, s = _rows(operation, values, shape, s_dtype)
    results = {} if operation.prologue is None else {"s": s}
    rows = _rounded(exact, s)
    statistics = statistics_of(operation, rows, eps)
    xhat, _ = _normalised(rows, statistics)
    results["y"] = _full(operation.epilogue, values | {"xhat": xhat}, shape).to(dtype)
    return {name: _fresh(one, given) for name, one in results.items()}, statistics.contiguous()


def backward(
    operation: Operation,
    values: Mapping[str, Tensor | float],
    s: Tensor | None,
    gradients: Mapping[str, Tensor | None],
    statistics: Tensor,
    wanted: Sequence[str],
    s_dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients `wanted` of x and of operands, in their shapes; in that of a row of one that was left out.

    `gradients`: dy, ds or both.
    """
    shape = (values["x"] if s is None else s).shape
    shapes = {name: one.shape if isinstance(one, Tensor) else () for name, one in values.items()}
    given = (*values.values(), s, *gradients.values())
    found = derivative(operation, wanted, values)
    values = _wide({**values, **{name: one for name, one in gradients.items() if one is not None}}, s_dtype, shape)
    values.setdefault("dy", torch.zeros_like(statistics[0])[..., None].expand(shape))
    rows = _rounded(*_rows(operation, values, shape, s_dtype)) if s is None else s.to(statistics.dtype)
    values["xhat"], rstd = _normalised(rows, statistics)
    if found.g is not None:
        g = _full(found.g, values, shape)
        of_norm = g - values["xhat"] * (g * values["xhat"]).mean(-1, keepdim=True)
        if NORMS[operation.norm].subtracts_mean:
            of_norm = of_norm - g.mean(-1, keepdim=True)
        values["ds"] = of_norm * rstd + values["ds"] if "ds" in values else of_norm * rstd
    totals: dict[str, Tensor] = {}
    for name, expression in (*found.early, *found.late):
        part = _full(expression, values, shape)
        totals[name] = totals[name] + part if name in totals else part
    return [_fresh(totals[name].sum_to_size(shapes.get(name, shape[-1:])), given) for name in wanted]


def _fresh(result: Tensor, given: Sequence[Any]) -> Tensor:
    """A result is not the memory of an input, and contiguous, as a kernel's is."""
    return (result.clone() if any(result is one for one in given) else result).contiguous()


def statistics_of(operation: Operation, rows: Tensor, eps: float) -> Tensor:
    """As in formulas.py, of rows in the dtype of the arithmetic."""
    if not NORMS[operation.norm].subtracts_mean:
        return (rows.square().mean(-1) + eps).rsqrt()[None]
    mean = rows.mean(-1, keepdim=True)
    return torch.stack((mean[..., 0], ((rows - mean).square().mean(-1) + eps).rsqrt()))


def rows_of(operation: Operation, values: Mapping[str, Tensor | float], s_dtype: torch.dtype) -> Tensor:
    """s, made again, in the dtype of the arithmetic."""
    shape = values["x"].shape
    return _rounded(*_rows(operation, _wide(values, s_dtype, shape), shape, s_dtype))


def _normalised(rows: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(xhat, rstd), rstd with an axis of length 1 in place of the normalised one."""
    rstd = statistics[-1][..., None]
    return (rows * rstd if len(statistics) == 1 else (rows - statistics[0][..., None]) * rstd), rstd


def _rows(operation: Operation, values: Mapping[str, Tensor | float], shape, s_dtype) -> tuple[Tensor, Tensor]:
    """(s before it is rounded, s)"""
    if operation.prologue is None:
        return values["x"], values["x"]
    exact = _full(operation.prologue, values, shape)
    return exact, exact.to(s_dtype)


def _rounded(exact: Tensor, s: Tensor) -> Tensor:
    """The values of s with the gradient of what was rounded."""
    if s.dtype is exact.dtype:
        return exact
    change = torch.where(exact.isinf(), 0, s.to(exact.dtype) - exact)
    return exact + change.detach()


def _wide(
    values: Mapping[str, Tensor | float], s_dtype: torch.dtype, shape: Sequence[int]
) -> dict[str, Tensor | float]:
    """In the dtype of the arithmetic; of a seed the numbers for every element of x."""
    compute = getattr(torch, compute_dtype(str(s_dtype).removeprefix("torch.")))
    wide = {name: one.to(compute) if isinstance(one, Tensor) else one for name, one in values.items()}
    seed = values.get(SEED)
    if isinstance(seed, Tensor) and not seed.is_floating_point():  # what stands for one that is not read is
        one = seed.reshape(-1).view(torch.int64)[0] if seed.dtype is not torch.int64 else seed.reshape(())
        wide[SEED] = uniform(one, tuple(shape), torch, device=seed.device).to(compute)
    return wide


def _full(expression: Expression, values: Mapping[str, Tensor | float], shape: Sequence[int]) -> Tensor:
    """The value of an expression for every element of x."""
    value = evaluate(expression, values, torch)
    return value if value.shape == shape else value.expand(shape)
