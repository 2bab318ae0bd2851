"""Operations and their first and second derivatives in torch's own operators.

These serve tensors that the kernels do not: those on the CPU, what functorch transforms, per-sample gradients, and the
derivative of the backward pass. All of it is differentiable. Arithmetic in `compute_dtype` of the rows that are
normalised, with one rounding of y and one of s, whose gradient passes through it unrounded.

x (..., cols). `statistics` holds (mean, rstd) of every row, as (2, ...), for an RMSNorm rstd alone, as (1, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...expression.philox import uniform
from ...expression.texts import evaluate
from ...expression.value import Expression
from ...operation import NAMED, NORMS, SEED, Operation, derivative
from ...plan import problem

Values = Mapping[str, Tensor | float]  # x and the operands, by name


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of statistics and of all arithmetic on the rows of x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def subtracts_mean(name: str) -> bool:
    """Whether a plain norm, by its name in NAMED, subtracts the mean."""
    return NORMS[NAMED[name].norm].subtracts_mean


def forward(
    operation: Operation, values: Values, eps: float, dtype: torch.dtype, s_dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """({"y": y, "s": s if there is a prologue}, statistics)"""
    shape, given = values["x"].shape, tuple(values.values())
    operation = operation.given(values)
    values = _wide(values, s_dtype, shape)
    exact, s = _rows(operation, values, shape, s_dtype)
    results = {} if operation.prologue is None else {"s": s}
    rows = _rounded(exact, s)
    statistics = statistics_of(operation.norm, rows, eps)
    xhat, _ = _normalised(rows, statistics)
    results["y"] = _full(operation.epilogue, values | {"xhat": xhat}, shape).to(dtype)
    return {name: _fresh(result, given) for name, result in results.items()}, statistics.contiguous()


def affine(name: str, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = (x - mean) * rstd * weight + bias of a plain norm, by its name in NAMED, in compute_dtype(x)."""
    xhat, _ = _normalised(x.to(compute_dtype(x)), statistics)
    return _scaled(name, xhat, weight, bias)


def norm(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The same y of x alone: traced by dynamo, and for a GPU where there is none."""
    x = x.to(compute_dtype(x))
    if subtracts_mean(name):
        x = x - _mean(x)
    return _scaled(name, x * (_mean(x.square()) + eps).rsqrt(), weight, bias)


def _scaled(name: str, xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = xhat if weight is None else xhat * gamma(name, weight, xhat)
    return y if bias is None else y + bias.to(y.dtype)


def backward(
    operation: Operation,
    values: Values,
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
    if "dy" not in values:
        values["dy"] = torch.zeros_like(statistics[0])[..., None].expand(shape)
    rows = _rounded(*_rows(operation, values, shape, s_dtype)) if s is None else s.to(statistics.dtype)
    values["xhat"], rstd = _normalised(rows, statistics)
    if found.g is not None:
        of_norm = _project(operation.norm, _full(found.g, values, shape), values["xhat"]) * rstd
        values["ds"] = of_norm + values["ds"] if "ds" in values else of_norm
    totals: dict[str, Tensor] = {}
    for name, expression in (*found.early, *found.late):
        part = _full(expression, values, shape)
        totals[name] = totals[name] + part if name in totals else part
    return [_fresh(_summed(totals[name], shapes.get(name, shape[-1:])), given) for name in wanted]


def _summed(total: Tensor, shape: Sequence[int]) -> Tensor:
    return total if total.shape == shape else total.sum_to_size(shape)


def second_backward(
    name: str,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of L = Σ ddx * dx + Σ ddweight * dweight + Σ ddbias * dbias with respect to (dy, x, weight), of a
    plain norm, by its name in NAMED.

    With g = dy * weight, u = ddx, q = xhat, row means m(.), and P the symmetric projection of `_project`:
    L_row = rstd * N * (m(ug) - m(u) m(g) - m(uq) m(gq)) + Σ ddweight * dy * q + Σ ddbias * dy, hence
        L_dy = weight * rstd * P(u) + ddweight * q + ddbias
        L_weight = Σ dy * rstd * P(u)
        L_q = ddweight * dy - rstd * (u * m(gq) + g * m(uq)),   L_rstd = N * (m(ug) - m(u) m(g) - m(uq) m(gq))
    and q and rstd depend on x: dq = rstd * P(dx), drstd = -rstd² * m(q dx), so
        L_x = rstd * P(L_q) - rstd² * q * L_rstd / N.
    mean and rstd are computed from x once more: the result can be differentiated again.
    """
    norm, rows = NAMED[name].norm, x.to(compute_dtype(x))
    xhat, rstd = _normalised(rows, statistics_of(norm, rows, eps))
    dy = dy.to(xhat.dtype)
    scale = None if weight is None else gamma(name, weight, x)
    g = dy if scale is None else dy * scale
    grad_dy = torch.zeros_like(dy)
    grad_xhat = torch.zeros_like(dy)
    grad_weight = grad_rstd = None
    if ddx is not None:
        u = ddx.to(xhat.dtype)
        projected = rstd * _project(norm, u, xhat)
        grad_dy = grad_dy + (projected if scale is None else projected * scale)
        if weight is not None:
            grad_weight = (dy * projected).sum_to_size(weight.shape)
        gq, uq = _mean(g * xhat), _mean(u * xhat)
        grad_xhat = grad_xhat - rstd * (u * gq + g * uq)
        grad_rstd = _mean(u * g) - uq * gq
        if NORMS[norm].subtracts_mean:
            grad_rstd = grad_rstd - _mean(u) * _mean(g)
    if ddweight is not None:
        grad_dy = grad_dy + ddweight.to(dy.dtype) * xhat
        grad_xhat = grad_xhat + ddweight.to(dy.dtype) * dy
    if ddbias is not None:
        grad_dy = grad_dy + ddbias.to(dy.dtype)
    grad_x = rstd * _project(norm, grad_xhat, xhat)
    if grad_rstd is not None:
        grad_x = grad_x - rstd.square() * xhat * grad_rstd
    return grad_dy, grad_x, grad_weight


# What is added to the weight of a plain norm: a weight that is left out stands for the number that makes gamma 1.
_ADDED = {name: 1 - dict(operation.defaults)["weight"] for name, operation in NAMED.items()}


def gamma(name: str, weight: Tensor, x: Tensor) -> Tensor:
    """What a plain norm multiplies xhat by."""
    weight = weight.to(compute_dtype(x))
    return weight + _ADDED[name] if _ADDED[name] else weight


def statistics_of(norm: str, rows: Tensor, eps: float) -> Tensor:
    """(mean, rstd) of rows in the dtype of the arithmetic, rstd = 1 / sqrt(mean((x - mean)²) + eps); of an RMSNorm rstd
    alone, with mean = 0.
    """
    if not NORMS[norm].subtracts_mean:
        return (rows.square().mean(-1) + eps).rsqrt()[None]
    mean = _mean(rows)
    return torch.stack((mean[..., 0], ((rows - mean).square().mean(-1) + eps).rsqrt()))


def rows_of(operation: Operation, values: Values, s_dtype: torch.dtype) -> Tensor:
    """s, made again, in the dtype of the arithmetic."""
    shape = values["x"].shape
    return _rounded(*_rows(operation, _wide(values, s_dtype, shape), shape, s_dtype))


def _fresh(result: Tensor, given: Sequence[Any]) -> Tensor:
    """A result is not the memory of an input, and contiguous, as a kernel's is."""
    return (result.clone() if any(result is one for one in given) else result).contiguous()


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1, keepdim=True)


def _normalised(rows: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(xhat, rstd), rstd with an axis of length 1 in place of the normalised one."""
    rstd = statistics[-1][..., None]
    return (rows * rstd if len(statistics) == 1 else (rows - statistics[0][..., None]) * rstd), rstd


def _project(norm: str, v: Tensor, xhat: Tensor) -> Tensor:
    """P(v) = v - mean(v) - xhat * mean(v * xhat), the means over a row; for an RMSNorm without mean(v)."""
    projected = v - xhat * _mean(v * xhat)
    return projected - _mean(v) if NORMS[norm].subtracts_mean else projected


def _rows(operation: Operation, values: Values, shape: Sequence[int], s_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def _wide(values: Values, s_dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Tensor | float]:
    """In the dtype of the arithmetic; of a seed the numbers for every element of x."""
    compute = getattr(torch, problem.compute_dtype(str(s_dtype).removeprefix("torch.")))
    wide = {name: one.to(compute) if isinstance(one, Tensor) else one for name, one in values.items()}
    seed = values.get(SEED)
    if isinstance(seed, Tensor) and not seed.is_floating_point():  # what stands for one that is not read is
        number = seed.reshape(-1).view(torch.int64)[0] if seed.dtype is not torch.int64 else seed.reshape(())
        wide[SEED] = uniform(number, tuple(shape), torch, device=seed.device).to(compute)
    return wide


def _full(expression: Expression, values: Values, shape: Sequence[int]) -> Tensor:
    """The value of an expression for every element of x."""
    value = evaluate(expression, values, torch)
    return value if value.shape == shape else value.expand(shape)
