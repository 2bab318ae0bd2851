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
    heads: tuple[str, ...] = ()  # for each of the last but one
    odd: tuple[str, ...] = ()  # for each of the first and the last but one: of no kind, where there is one between
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
    # Column and number before and after, s made again in the backward pass.
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
    # An operand of both, and results that depend on x and operands in no linear way.
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
    # Infinite or NaN where a kernel finds zeros beside a row.
    "poles": Case(
        cunorm.fuse(
            "layer_norm",
            prologue=lambda x, residual, divisor: log(x) * rsqrt(residual) / divisor,
            epilogue=lambda xhat, z, weight: xhat / weight + log(z) + 1 / z,
        ),
        ("residual", "z"),
        ("divisor", "weight"),
    ),
    # Vectors for samples, before and after, and one for all rows; s made again, or read.
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
    # Two sorts of groups: kernels have one, and the other is expanded.
    "heads and samples": Case(
        cunorm.fuse("rms_norm", epilogue=lambda xhat, weight, scale, w: xhat * weight * (1 + scale) * w),
        samples=("scale",),
        heads=("weight",),
        odd=("w",),
    ),
    # Numbers for rows and for samples, before and after, on both sides; and with s made again.
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
    # A residual stream of float32 beside 16-bit layers; and, of float64, one narrower than x.
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
    x: Any
    operands: dict[str, Any]
    gradients: tuple[Any, ...]


def make(case: Case, shape: tuple[int, ...], dtype: str, dtypes: dict[str, str] | None = None) -> Made:
    """Positive numbers of about 1 as x and operands, and gradients of the results."""
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
    operands |= {name: array(name, of, positive(of)) for name, of in vectors.items()}
    operands |= {name: 0.75 + 0.5 * place for place, name in enumerate(case.numbers)}
    gradients = (array(f"d{name}", shape, random.standard_normal(shape)) for name in case.op.operation.returns)
    return Made(x, operands, tuple(gradients))


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(widen(array).astype(float) if hasattr(array, "dtype") else array, dtype=torch.float64)


def expected(op: Fused, made: Made, eps: float = EPS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results and gradients by torch's autograd, in float64 but for the rounding of s."""
    operation = op.operation
    leaves = {name: tensor(one).requires_grad_() for name, one in {"x": made.x, **made.operands}.items()}
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
    found = {name: one.numpy() for name, one in zip(leaves, gradients, strict=True)}
    return {name: one.detach().numpy() for name, one in results.items()}, found


def close(name: str, actual: Any, exact: numpy.ndarray, arithmetic: str) -> None:
    """Within what a hundred roundings of the arithmetic cost, and one of the result's own dtype."""
    actual = on_host(actual)
    assert actual.shape == exact.shape, name
    unit = 2.0 ** -FORMATS[arithmetic][0]
    allowed = 200 * unit * max(1.0, float(abs(exact).max(initial=0))) + ulp(exact, actual.dtype.name)
    error = abs(widen(actual).astype(float) - exact)
    assert (error <= allowed).all(), f"{name}: {float((error / allowed).max())} of what is allowed"


def check(
    case: Case, made: Made, as_array: Any = numpy.asarray, wanted: tuple[str, ...] = (), sm_margin: int = 0
) -> None:
    """Everything that the operation returns, and the gradients `wanted`, against torch's."""

    def moved(one: Any) -> Any:
        return as_array(one) if hasattr(one, "dtype") else one

    op = case.op
    x, operands = moved(made.x), {name: moved(one) for name, one in made.operands.items()}
    row_dtype = op.s_dtype or made.x.dtype.name
    arithmetic = "float64" if row_dtype == "float64" else "float32"
    exact, exact_gradients = expected(op, made)
    returned, saved = op.forward(x, eps=EPS, sm_margin=sm_margin, **operands)
    alone = op(x, eps=EPS, **operands)
    results = returned if len(op.operation.returns) > 1 else (returned,)
    for name, one, again in zip(op.operation.returns, results, alone if len(results) > 1 else (alone,), strict=True):
        assert one.dtype.name == ((op.dtype if name == "y" else op.s_dtype) or made.x.dtype.name)
        close(name, one, exact[name], arithmetic)
        assert same_bits(on_host(one), on_host(again)), "statistics change nothing"
    gradients = op.backward(saved, *map(moved, made.gradients), wanted=wanted, sm_margin=sm_margin)
    assert list(gradients) == list(wanted or ("x", *op.operation.operands))
    for name, gradient in gradients.items():
        of = {"x": made.x, **made.operands}[name]
        assert gradient.dtype == (of.dtype if hasattr(of, "dtype") else arithmetic)
        close(f"d{name}", gradient, exact_gradients[name].reshape(gradient.shape), arithmetic)
