"""Fused operations for tests: what is passed to each, and torch's results and gradients in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import torch
from arrays import on_host, same_bits
from reference import FORMATS, narrow, ulp, widen

import cunorm
from cunorm.expression import log, rsqrt, sigmoid, silu, tanh
from cunorm.expression.texts import evaluate
from cunorm.fusion import Fused

EPS = 1e-3


class Case(NamedTuple):
    """An operation, and what is passed to it."""

    op: Fused
    full: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()  # a vector for each index of the first axis
    heads: tuple[str, ...] = ()  # a vector for each index of the last axis but one
    odd: tuple[str, ...] = ()  # a vector for each pair of these indices; with an axis between them it has no kind
    of_rows: tuple[str, ...] = ()  # a number for each row
    of_samples: tuple[str, ...] = ()  # a number for each index of the first axis


CASES = {
    "add_layer_norm": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual: x + residual,
            epilogue=lambda xhat, weight, bias: xhat * weight + bias,
            returns=("y", "s"),
        ),
        ("residual",),
        ("weight", "bias"),
    ),
    "add_rms_norm": Case(
        cunorm.fuse(
            "rms_norm",
            prologue=lambda x, residual: x + residual,
            epilogue=lambda xhat, weight: xhat * weight,
            returns=("s", "y"),
        ),
        ("residual",),
        ("weight",),
    ),
    # A column and a number stand before the norm and after it; the backward pass computes s again.
    "gate": Case(
        cunorm.fuse(
            "rms_norm",
            prologue=lambda x, shift, residual, factor: x * shift + factor * residual,
            epilogue=lambda xhat, z, weight, sharp: xhat * weight * silu(sharp * z),
        ),
        ("residual", "z"),
        ("shift", "weight"),
        ("factor", "sharp"),
    ),
    "modulated": Case(
        cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift),
        (),
        ("scale",),
        ("shift",),
    ),
    # Prologue and epilogue share operands, and neither is linear.
    "both": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual, gate: tanh(x) * gate + residual,
            epilogue=lambda xhat, residual, gate: sigmoid(xhat * gate) - residual * xhat,
            returns=("y", "s"),
        ),
        ("residual",),
        ("gate",),
    ),
    # The zeros beside a row in a kernel give infinities or NaN here.
    "poles": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual, divisor: log(x) * rsqrt(residual) / divisor,
            epilogue=lambda xhat, z, weight: xhat / weight + log(z) + 1 / z,
        ),
        ("residual", "z"),
        ("divisor", "weight"),
    ),
    # Vectors for samples stand before the norm and after it, beside one for all rows. The backward pass reads s.
    "samples": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual, gate: residual + gate * x,
            epilogue=lambda xhat, scale, shift, weight: xhat * weight * (1 + scale) + shift,
            returns=("y", "s"),
        ),
        ("residual",),
        ("weight",),
        (),
        ("gate", "scale", "shift"),
    ),
    "samples, s made again": Case(
        cunorm.fuse(
            "rms_norm",
            prologue=lambda x, gate: gate * x,
            epilogue=lambda xhat, scale, factor: xhat * scale * factor,
        ),
        numbers=("factor",),
        samples=("gate", "scale"),
    ),
    "modulate": Case(
        cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift),
        samples=("scale", "shift"),
    ),
    "heads": Case(
        cunorm.fuse("rms_norm", epilogue=lambda xhat, z, weight: xhat * weight * silu(z)), ("z",), heads=("weight",)
    ),
    # There are two sorts of groups. A kernel takes one of them, and the other is expanded.
    "heads and samples": Case(
        cunorm.fuse("rms_norm", epilogue=lambda xhat, weight, scale, w: xhat * weight * (1 + scale) * w),
        samples=("scale",),
        heads=("weight",),
        odd=("w",),
    ),
    # Numbers for rows and for samples stand before the norm, after it, and on both sides.
    "numbers of rows": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual, factor, share: factor * (x + 1) + share * residual,
            epilogue=lambda xhat, weight, factor, shift: factor * xhat * weight + shift,
            returns=("y", "s"),
        ),
        ("residual",),
        ("weight",),
        of_rows=("factor", "shift"),
        of_samples=("share",),
    ),
    "numbers of rows, s made again": Case(
        cunorm.fuse(
            "rms_norm",
            prologue=lambda x, gate: abs(x) + gate,
            epilogue=lambda xhat, weight, route: xhat * weight * route,
        ),
        (),
        ("weight",),
        of_rows=("gate", "route"),
    ),
    "numbers of rows after": Case(
        cunorm.fuse("layer_norm", epilogue=lambda xhat, route: xhat * route), of_rows=("route",)
    ),
    "numbers of rows of samples": Case(
        cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift, route: route * (xhat * (1 + scale) + shift)),
        samples=("scale", "shift"),
        of_rows=("route",),
    ),
    "norm alone": Case(cunorm.fuse("rms_norm")),
    # The residual stream is float32 beside 16-bit layers. Where x is float64 it is narrower than x.
    "stream": Case(
        cunorm.fuse(
            "rms_norm",
            prologue=lambda x, residual: x + residual,
            epilogue=lambda xhat, weight: xhat * weight,
            returns=("y", "s"),
            dtype="float16",
            s_dtype="float32",
        ),
        ("residual",),
        ("weight",),
    ),
    # Operands called what arrays, numbers and parameters of kernels are called inside (test_operand_names.py).
    "names of the library": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, x_dot: x - x_dot / 2,
            epilogue=lambda xhat, workspace, x_gap, y_dot, half: xhat * workspace * y_dot + x_gap * half,
            returns=("y", "s"),
        ),
        ("x_dot",),
        ("workspace", "half"),
        ("x_gap",),
        of_rows=("y_dot",),
    ),
}


class Made(NamedTuple):
    """The arrays of a call, in NumPy."""

    x: Any
    operands: dict[str, Any]
    gradients: tuple[Any, ...]


def make(case: Case, shape: tuple[int, ...], dtype: str, dtypes: dict[str, str] | None = None) -> Made:
    """Return positive numbers of about 1 as x and operands, and random gradients of the results."""
    random = numpy.random.default_rng(0)
    dtypes = dtypes or {}

    def array(name: str, shape: tuple[int, ...], values: numpy.ndarray) -> numpy.ndarray:
        return narrow(values.reshape(shape), dtypes.get(name, dtype))

    def positive(shape: tuple[int, ...]) -> numpy.ndarray:
        return 0.5 + random.random(shape)

    x = array("x", shape, positive(shape))
    operands = {name: array(name, shape, positive(shape)) for name in case.full}
    operands |= {name: array(name, shape[-1:], positive(shape[-1:])) for name in case.columns}
    ones = (1,) * (len(shape) - 2)
    vectors = dict.fromkeys(case.samples, (shape[0], *ones, shape[-1])) | dict.fromkeys(case.heads, shape[-2:])
    vectors |= dict.fromkeys(case.odd, (*shape[:-2][:1], *ones[:-1], *shape[-2:]))
    vectors |= dict.fromkeys(case.of_rows, (*shape[:-1], 1)) | dict.fromkeys(case.of_samples, (shape[0], *ones, 1))
    operands |= {name: array(name, vector_shape, positive(vector_shape)) for name, vector_shape in vectors.items()}
    operands |= {name: 0.75 + 0.5 * place for place, name in enumerate(case.numbers)}
    gradients = (array(f"d{name}", shape, random.standard_normal(shape)) for name in case.op.operation.returns)
    return Made(x, operands, tuple(gradients))


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(widen(array).astype(float) if hasattr(array, "dtype") else array, dtype=torch.float64)


def expected(op: Fused, made: Made, eps: float = EPS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results and gradients that torch's autograd gives in float64, with s rounded."""
    operation = op.operation
    leaves = {name: tensor(value).requires_grad_() for name, value in {"x": made.x, **made.operands}.items()}
    s = leaves["x"]
    if operation.prologue:
        exact = evaluate(operation.prologue, leaves, torch)
        rounded = narrow(exact.detach().numpy(), op.s_dtype or made.x.dtype.name)
        s = exact + (tensor(rounded) - exact).detach()  # the rounding has no gradient
    centred = s - s.mean(-1, keepdim=True) if operation.norm == "layer_norm" else s
    xhat = centred * ((centred * centred).mean(-1, keepdim=True) + eps) ** -0.5
    results = {"y": evaluate(operation.epilogue, leaves | {"xhat": xhat}, torch), "s": s}
    total = sum(
        (results[name] * tensor(gradient)).sum()
        for name, gradient in zip(operation.returns, made.gradients, strict=True)
        if gradient is not None
    )
    gradients = torch.autograd.grad(total, list(leaves.values()))
    gradients_by_name = {name: gradient.numpy() for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: result.detach().numpy() for name, result in results.items()}, gradients_by_name


def close(name: str, actual: Any, exact: numpy.ndarray, arithmetic: str) -> None:
    """Check that the error is at most what a hundred roundings of the arithmetic and one of the result's dtype cost."""
    actual = on_host(actual)
    assert actual.shape == exact.shape, name
    unit = 2.0 ** -FORMATS[arithmetic][0]
    allowed = 200 * unit * max(1.0, float(abs(exact).max(initial=0))) + ulp(exact, actual.dtype.name)
    error = abs(widen(actual).astype(float) - exact)
    assert (error <= allowed).all(), f"{name}: {float((error / allowed).max())} of what is allowed"


def check(
    case: Case, made: Made, as_array: Any = numpy.asarray, wanted: tuple[str, ...] = (), sm_margin: int = 0
) -> None:
    """Check all results of the operation and the gradients `wanted` against torch's."""

    def moved(value: Any) -> Any:
        return as_array(value) if hasattr(value, "dtype") else value

    op = case.op
    x, operands = moved(made.x), {name: moved(operand) for name, operand in made.operands.items()}
    row_dtype = op.s_dtype or made.x.dtype.name
    arithmetic = "float64" if row_dtype == "float64" else "float32"
    exact, exact_gradients = expected(op, made)
    returned, saved = op.forward(x, eps=EPS, sm_margin=sm_margin, **operands)
    alone = op(x, eps=EPS, **operands)
    results = returned if len(op.operation.returns) > 1 else (returned,)
    for name, result, again in zip(op.operation.returns, results, alone if len(results) > 1 else (alone,), strict=True):
        assert result.dtype.name == ((op.dtype if name == "y" else op.s_dtype) or made.x.dtype.name)
        close(name, result, exact[name], arithmetic)
        assert same_bits(on_host(result), on_host(again)), "statistics change nothing"
    gradients = op.backward(saved, *map(moved, made.gradients), wanted=wanted, sm_margin=sm_margin)
    assert list(gradients) == list(wanted or ("x", *op.operation.operands))
    for name, gradient in gradients.items():
        value = {"x": made.x, **made.operands}[name]
        assert gradient.dtype == (value.dtype if hasattr(value, "dtype") else arithmetic)
        close(f"d{name}", gradient, exact_gradients[name].reshape(gradient.shape), arithmetic)
