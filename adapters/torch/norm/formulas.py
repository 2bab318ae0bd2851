"""Operations and their first and second derivatives in torch's own operators.

These serve what the kernels do not: tensors on the CPU, functorch's transforms, per-sample gradients, and the
derivative of the backward pass. All functions here are differentiable. The arithmetic is in `compute_dtype` of the rows
that are normalised, with one rounding of y and one of s; the gradient of s passes through that rounding unchanged.

x has the shape (..., cols). `statistics` holds mean and rstd of every row, with the shape (2, ...); for an RMSNorm it
holds rstd alone, with the shape (1, ...).
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
    """Return the dtype of statistics and of all arithmetic on the rows of x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def subtracts_mean(name: str) -> bool:
    """Say whether a plain norm, by its name in NAMED, subtracts the mean."""
    return NORMS[NAMED[name].norm].subtracts_mean


def forward(
    operation: Operation, values: Values, eps: float, dtype: torch.dtype, s_dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (the results by name: y, and s if there is a prologue, statistics)."""
    shape, inputs = values["x"].shape, tuple(values.values())
    operation = operation.given(values)
    values = _wide(values, s_dtype, shape)
    exact, s = _rows(operation, values, shape, s_dtype)
    results = {} if operation.prologue is None else {"s": s}
    rows = _rounded(exact, s)
    statistics = statistics_of(operation.norm, rows, eps)
    xhat, _ = _normalised(rows, statistics)
    results["y"] = _full(operation.epilogue, values | {"xhat": xhat}, shape).to(dtype)
    return {name: _fresh(result, inputs) for name, result in results.items()}, statistics.contiguous()


def affine(name: str, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y = (x - mean) * rstd * weight + bias of a plain norm, by its name in NAMED, in compute_dtype(x)."""
    xhat, _ = _normalised(x.to(compute_dtype(x)), statistics)
    return _scaled(name, xhat, weight, bias)


def norm(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the y of `affine` from x alone. dynamo traces this, also for a GPU on a machine without one."""
    x = x.to(compute_dtype(x))
    if subtracts_mean(name):
        x = x - _mean(x)
    return _scaled(name, x * (_mean(x.square()) + eps).rsqrt(), weight, bias)


def affine_backward(
    name: str, dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Return what `backward` does for a plain norm, by name: without expressions, which take the host longer."""
    xhat, rstd = _normalised(x.to(statistics.dtype), statistics)
    wide, gradients = dy.to(statistics.dtype), {}
    if "x" in wanted:
        g = wide if weight is None else wide * gamma(name, weight, x)
        gradients["x"] = _project(NAMED[name].norm, g, xhat) * rstd
    if "weight" in wanted:
        gradients["weight"] = _summed(wide * xhat, x.shape[-1:])
    if "bias" in wanted:
        gradients["bias"] = _summed(wide, x.shape[-1:])
    return {name: _fresh(gradient, (dy,)) for name, gradient in gradients.items()}


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
    """Return the gradients `wanted` of x and of operands, in their shapes.

    The gradient of an operand that was left out has the shape of a row. `gradients` holds dy, ds or both.
    """
    shape = (values["x"] if s is None else s).shape
    shapes = {name: operand.shape if isinstance(operand, Tensor) else () for name, operand in values.items()}
    inputs = (*values.values(), s, *gradients.values())
    expressions = derivative(operation, wanted, values)
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    values = _wide({**values, **known}, s_dtype, shape)
    if "dy" not in values:
        values["dy"] = torch.zeros_like(statistics[0])[..., None].expand(shape)
    rows = _rounded(*_rows(operation, values, shape, s_dtype)) if s is None else s.to(statistics.dtype)
    values["xhat"], rstd = _normalised(rows, statistics)
    if expressions.g is not None:
        norm_gradient = _project(operation.norm, _full(expressions.g, values, shape), values["xhat"]) * rstd
        values["ds"] = norm_gradient + values["ds"] if "ds" in values else norm_gradient
    totals: dict[str, Tensor] = {}
    for name, expression in (*expressions.early, *expressions.late):
        part = _full(expression, values, shape)
        totals[name] = totals[name] + part if name in totals else part
    return [_fresh(_summed(totals[name], shapes.get(name, shape[-1:])), inputs) for name in wanted]


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
    """Return the gradients with respect to (dy, x, weight) of L = Σ ddx * dx + Σ ddweight * dweight + Σ ddbias * dbias,
    for a plain norm, by its name in NAMED.

    With g = dy * weight, u = ddx, q = xhat, row means m(.), and P the symmetric projection of `_project`:
    L_row = rstd * N * (m(ug) - m(u) m(g) - m(uq) m(gq)) + Σ ddweight * dy * q + Σ ddbias * dy, hence
        L_dy = weight * rstd * P(u) + ddweight * q + ddbias
        L_weight = Σ dy * rstd * P(u)
        L_q = ddweight * dy - rstd * (u * m(gq) + g * m(uq)),   L_rstd = N * (m(ug) - m(u) m(g) - m(uq) m(gq))
    and q and rstd depend on x: dq = rstd * P(dx), drstd = -rstd² * m(q dx), so
        L_x = rstd * P(L_q) - rstd² * q * L_rstd / N.
    mean and rstd are computed from x once more, so that the result can be differentiated again.
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


# The number that a plain norm adds to its weight: the default weight is the number that makes gamma 1.
_ADDED = {name: 1 - dict(operation.defaults)["weight"] for name, operation in NAMED.items()}


def gamma(name: str, weight: Tensor, x: Tensor) -> Tensor:
    """Return gamma, the factor by which a plain norm multiplies xhat."""
    weight = weight.to(compute_dtype(x))
    return weight + _ADDED[name] if _ADDED[name] else weight


def statistics_of(norm: str, rows: Tensor, eps: float) -> Tensor:
    """Return mean and rstd = 1 / sqrt(mean((x - mean)²) + eps) of rows, which have the dtype of the arithmetic.

    For an RMSNorm return rstd alone, with mean = 0.
    """
    if not NORMS[norm].subtracts_mean:
        return (rows.square().mean(-1) + eps).rsqrt()[None]
    mean = _mean(rows)
    return torch.stack((mean[..., 0], ((rows - mean).square().mean(-1) + eps).rsqrt()))


def rows_of(operation: Operation, values: Values, s_dtype: torch.dtype) -> Tensor:
    """Return s, computed again, in the dtype of the arithmetic."""
    shape = values["x"].shape
    return _rounded(*_rows(operation, _wide(values, s_dtype, shape), shape, s_dtype))


def _fresh(result: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Return a contiguous result in memory that is no input's, as a kernel returns it."""
    return (result.clone() if any(result is tensor for tensor in inputs) else result).contiguous()


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1, keepdim=True)


def _normalised(rows: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return (xhat, rstd), where rstd has an axis of length 1 in place of the normalised one."""
    rstd = statistics[-1][..., None]
    return (rows * rstd if len(statistics) == 1 else (rows - statistics[0][..., None]) * rstd), rstd


def _project(norm: str, v: Tensor, xhat: Tensor) -> Tensor:
    """Return P(v) = v - mean(v) - xhat * mean(v * xhat), with means over a row; for an RMSNorm leave out mean(v)."""
    projected = v - xhat * _mean(v * xhat)
    return projected - _mean(v) if NORMS[norm].subtracts_mean else projected


def _rows(operation: Operation, values: Values, shape: Sequence[int], s_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (s before it is rounded, s)."""
    if operation.prologue is None:
        return values["x"], values["x"]
    exact = _full(operation.prologue, values, shape)
    return exact, exact.to(s_dtype)


def _rounded(exact: Tensor, s: Tensor) -> Tensor:
    """Return the values of s with the gradient of the exact ones, which s was rounded from."""
    if s.dtype is exact.dtype:
        return exact
    change = torch.where(exact.isinf(), 0, s.to(exact.dtype) - exact)
    return exact + change.detach()


def _wide(values: Values, s_dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Tensor | float]:
    """Return the values in the dtype of the arithmetic; a seed becomes the numbers drawn for every element of x."""
    compute = getattr(torch, problem.compute_dtype(str(s_dtype).removeprefix("torch.")))
    wide = {name: value.to(compute) if isinstance(value, Tensor) else value for name, value in values.items()}
    seed = values.get(SEED)
    if isinstance(seed, Tensor) and not seed.is_floating_point():  # what stands for an unread seed is floating point
        number = seed.reshape(-1).view(torch.int64)[0] if seed.dtype is not torch.int64 else seed.reshape(())
        wide[SEED] = uniform(number, tuple(shape), torch, device=seed.device).to(compute)
    return wide


def _full(expression: Expression, values: Values, shape: Sequence[int]) -> Tensor:
    """Return the value of an expression for every element of x."""
    value = evaluate(expression, values, torch)
    return value if value.shape == shape else value.expand(shape)
