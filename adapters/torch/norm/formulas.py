"""The norms and their first and second derivatives in torch's own operators.

These serve tensors that the kernels do not: those on the CPU, the derivative of the backward pass, per-sample gradients
under vmap. They are differentiable themselves. All arithmetic is in `compute_dtype(x)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...operation import NAMED, NORMS

# `operation` is a name of cunorm.operation.NAMED.
#
# x (..., *normalized_shape): the normalised axes are the last `ndim` ones, `leading` the others. mean and rstd have the
# shape of `leading`; `statistics` holds both as (2, *leading), for rms_norm rstd alone as (1, *leading).


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of statistics and of all arithmetic."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def statistics_of(operation: str, x: Tensor, ndim: int, eps: float) -> Tensor:
    """(mean, rstd), rstd = 1 / sqrt(mean((x - mean)²) + eps); for rms_norm rstd alone, with mean = 0."""
    x = x.to(compute_dtype(x))
    axes = _axes(ndim)
    if not subtracts_mean(operation):
        return (x.square().mean(axes) + eps).rsqrt()[None]
    mean = x.mean(axes, keepdim=True)
    rstd = ((x - mean).square().mean(axes) + eps).rsqrt()
    return torch.stack((mean.reshape(rstd.shape), rstd))


def forward(operation: str, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = (x - mean) * rstd * weight + bias, in compute_dtype(x)."""
    xhat, _ = _normalised(x, statistics)
    return _scaled(operation, xhat, weight, bias)


def norm(operation: str, x: Tensor, ndim: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """y of x alone, in compute_dtype(x): autograd's derivatives of it are exact in every order and mode."""
    x = x.to(compute_dtype(x))
    axes = _axes(ndim)
    if subtracts_mean(operation):
        x = x - x.mean(axes, keepdim=True)
    return _scaled(operation, x * (x.square().mean(axes, keepdim=True) + eps).rsqrt(), weight, bias)


def _scaled(operation: str, xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = xhat if weight is None else xhat * gamma(operation, weight, xhat)
    return y if bias is None else y + bias.to(y.dtype)


def backward(
    operation: str,
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    output_mask: tuple[bool, bool, bool],
    batch_ndim: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx = rstd * P(dy * weight), dweight = Σ dy * xhat, dbias = Σ dy, None where not wanted; P as in `_project`.

    The sums go over the leading axes but the first `batch_ndim`. In compute_dtype(x).
    """
    ndim = x.dim() - statistics.dim() + 1
    xhat, rstd = _normalised(x, statistics)
    dy = dy.to(xhat.dtype)
    g = dy if weight is None else dy * gamma(operation, weight, x)
    rows = tuple(range(batch_ndim, x.dim() - ndim))
    return (
        rstd * _project(operation, g, xhat, ndim) if output_mask[0] else None,
        _sum(dy * xhat, rows) if output_mask[1] else None,
        _sum(dy, rows) if output_mask[2] else None,
    )


def second_backward(
    operation: str,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    dy: Tensor,
    x: Tensor,
    ndim: int,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of L = Σ ddx * dx + Σ ddweight * dweight + Σ ddbias * dbias with respect to (dy, x, weight).

    With g = dy * weight, u = ddx, q = xhat, row means m(.), and P the symmetric projection of `_project`:
    L_row = rstd * N * (m(ug) - m(u) m(g) - m(uq) m(gq)) + Σ ddweight * dy * q + Σ ddbias * dy, hence
        L_dy = weight * rstd * P(u) + ddweight * q + ddbias
        L_weight = Σ dy * rstd * P(u)
        L_q = ddweight * dy - rstd * (u * m(gq) + g * m(uq)),   L_rstd = N * (m(ug) - m(u) m(g) - m(uq) m(gq))
    and q and rstd depend on x: dq = rstd * P(dx), drstd = -rstd² * m(q dx), so
        L_x = rstd * P(L_q) - rstd² * q * L_rstd / N.
    mean and rstd are computed from x once more: the result can be differentiated again.
    """
    statistics = statistics_of(operation, x, ndim, eps)
    xhat, rstd = _normalised(x, statistics)
    axes = _axes(ndim)
    dy = dy.to(xhat.dtype)
    scale = None if weight is None else gamma(operation, weight, x)
    g = dy if scale is None else dy * scale

    def mean(values: Tensor) -> Tensor:
        return values.mean(axes, keepdim=True)

    grad_dy = torch.zeros_like(dy)
    grad_xhat = torch.zeros_like(dy)
    grad_weight = grad_rstd = None
    if ddx is not None:
        u = ddx.to(xhat.dtype)
        projected = rstd * _project(operation, u, xhat, ndim)
        grad_dy = grad_dy + (projected if scale is None else projected * scale)
        if weight is not None:
            grad_weight = _sum(dy * projected, tuple(range(x.dim() - ndim)))
        gq, uq = mean(g * xhat), mean(u * xhat)
        grad_xhat = grad_xhat - rstd * (u * gq + g * uq)
        grad_rstd = mean(u * g) - uq * gq
        if subtracts_mean(operation):
            grad_rstd = grad_rstd - mean(u) * mean(g)
    if ddweight is not None:
        grad_dy = grad_dy + ddweight.to(dy.dtype) * xhat
        grad_xhat = grad_xhat + ddweight.to(dy.dtype) * dy
    if ddbias is not None:
        grad_dy = grad_dy + ddbias.to(dy.dtype)
    grad_x = rstd * _project(operation, grad_xhat, xhat, ndim)
    if grad_rstd is not None:
        grad_x = grad_x - rstd.square() * xhat * grad_rstd
    return grad_dy, grad_x, grad_weight


def subtracts_mean(operation: str) -> bool:
    return NORMS[NAMED[operation].norm].subtracts_mean


# What is added to weight, by operation: a weight that is left out stands for the number that makes gamma 1.
_ADDED = {name: 1 - dict(operation.defaults)["weight"] for name, operation in NAMED.items()}


def gamma(operation: str, weight: Tensor, x: Tensor) -> Tensor:
    """What xhat is multiplied by."""
    weight = weight.to(compute_dtype(x))
    return weight + _ADDED[operation] if _ADDED[operation] else weight


def _axes(ndim: int) -> tuple[int, ...]:
    return tuple(range(-ndim, 0))


def _normalised(x: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(xhat, rstd), rstd with axes of length 1 in place of the normalised ones."""
    ndim = x.dim() - statistics.dim() + 1
    statistics = statistics.reshape(*statistics.shape, *(1,) * ndim)
    x = x.to(compute_dtype(x))
    rstd = statistics[-1]
    return (x * rstd if len(statistics) == 1 else (x - statistics[0]) * rstd), rstd


def _project(operation: str, v: Tensor, xhat: Tensor, ndim: int) -> Tensor:
    """P(v) = v - mean(v) - xhat * mean(v * xhat), the means over a row; for rms_norm without mean(v)."""
    axes = _axes(ndim)
    projected = v - xhat * (v * xhat).mean(axes, keepdim=True)
    return projected - v.mean(axes, keepdim=True) if subtracts_mean(operation) else projected


def _sum(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    return values.sum(axes) if axes else values.clone()  # a result is not the memory of an input
