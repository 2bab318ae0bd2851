"""Fused operations: what a call returns is what its parts return one after the other, and gradients are right."""

from __future__ import annotations

from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import numpy
import pytest
import torch
from arrays import on_host, same_bits
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import FORMATS, narrow, ulp, widen

import cunorm
from cunorm.expression import log, rsqrt, sigmoid, silu, tanh
from cunorm.expression_texts import evaluate
from cunorm.fusion import Fused

EPS = 1e-3

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())


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


def check(case: Case, made: Made, as_array: Any = numpy.asarray, wanted: tuple[str, ...] = ()) -> None:
    """Everything that the operation returns, and the gradients `wanted`, against torch's."""

    def moved(one: Any) -> Any:
        return as_array(one) if hasattr(one, "dtype") else one

    op = case.op
    x, operands = moved(made.x), {name: moved(one) for name, one in made.operands.items()}
    row_dtype = op.s_dtype or made.x.dtype.name
    arithmetic = "float64" if row_dtype == "float64" else "float32"
    exact, exact_gradients = expected(op, made)
    returned, saved = op.forward(x, eps=EPS, **operands)
    alone = op(x, eps=EPS, **operands)
    results = returned if len(op.operation.returns) > 1 else (returned,)
    for name, one, again in zip(op.operation.returns, results, alone if len(results) > 1 else (alone,), strict=True):
        assert one.dtype.name == ((op.dtype if name == "y" else op.s_dtype) or made.x.dtype.name)
        close(name, one, exact[name], arithmetic)
        assert same_bits(on_host(one), on_host(again)), "statistics change nothing"
    gradients = op.backward(saved, *map(moved, made.gradients), wanted=wanted)
    assert list(gradients) == list(wanted or ("x", *op.operation.operands))
    for name, gradient in gradients.items():
        of = {"x": made.x, **made.operands}[name]
        assert gradient.dtype == (of.dtype if hasattr(of, "dtype") else arithmetic)
        close(f"d{name}", gradient, exact_gradients[name].reshape(gradient.shape), arithmetic)


# Shapes and dtypes for every case; on the GPU larger ones too.

SHAPES = ((5, 33), (3, 1000), (2, 3, 129), (2, 3, 2, 17))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch_in_float64(xp, name, shape, dtype):
    case = CASES[name]
    check(case, make(case, shape, dtype), xp.asarray)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((300, 4096), "bfloat16"),
        ((2, 20001), "float32"),
        ((3, 65537), "float16"),
        ((257, 1), "float32"),
        ((4, 100, 2048), "bfloat16"),
        ((9, 7, 2, 128), "float16"),
        ((3, 2, 40000), "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_every_tier_on_a_gpu(name, shape, dtype):
    import cupy

    case = CASES[name]
    # The reference rounds s of float64, a kernel s of float32: of functions a few of many values then go to the
    # neighbour, 12 of 3 x 65537 in float16, and y shows it. The other cases are exact there and keep their 16 bits.
    dtype = "float32" if name in ("both", "poles") else dtype
    # A number's gradient is a sum over all of x, of 240,000 terms of about 1 and either sign: on its way to a small
    # result it is as large as the root of their number, and float32 rounds it there. Smaller shapes show that it is
    # right.
    wanted = (
        ()
        if shape != (3, 2, 40000)
        else tuple(one for one in ("x", *case.op.operation.operands) if one not in case.numbers)
    )
    check(case, make(case, shape, dtype), cupy.asarray, wanted)


class Run(NamedTuple):
    """A case on the stand-in for a GPU, and why."""

    case: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    device: Any = SMALL
    tiers: tuple[str, str] = ("", "")  # forward and backward
    dtypes: dict[str, str] | None = None
    wanted: tuple[str, ...] = ()


RUNS = (
    Run("add_layer_norm", (13, 33), "float16", "several rows in a warp, and rows that do not fill the last", SMALL),
    Run("add_layer_norm", (3, 1000), "bfloat16", "whole packs that fill no warp", MANY_SMS, ("warp", "cta")),
    Run("add_rms_norm", (5, 1001), "float32", "no row but the first is aligned"),
    Run("add_rms_norm", (2, 3, 129), "float64", "rows along two axes"),
    Run(
        "add_layer_norm",
        (4, 1000),
        "bfloat16",
        "every array in another dtype",
        dtypes={"residual": "float32", "weight": "float32", "bias": "float16", "dy": "float32", "ds": "float16"},
    ),
    Run("add_layer_norm", (2, 17000), "float32", "a cluster for a row", SMALL, ("cluster", "cluster")),
    Run("add_rms_norm", (2, 17000), "float32", "streamed", WITHOUT_CLUSTERS, ("streamed", "streamed")),
    Run("gate", (13, 33), "float16", "a column and numbers on both sides; rows share a warp"),
    Run("gate", (5, 1001), "bfloat16", "of 16 bits, s made again"),
    Run("gate", (9, 1000), "float32", "more partial rows than one", MANY_SMS),
    Run("gate", (2, 17000), "float32", "a column of the prologue in a cluster", SMALL, ("cluster", "cluster")),
    Run(
        "gate",
        (2, 17000),
        "float32",
        "streamed, but for what the prologue takes for all rows",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "z", "weight", "sharp"),
    ),
    Run("modulated", (4, 1000), "float64", "no prologue"),
    Run("modulated", (40, 7), "float32", "less than a warp's row"),
    Run("both", (13, 33), "float32", "an operand on both sides; rows share a warp"),
    Run("both", (3, 1000), "float16", "the same in 16 bits", MANY_SMS),
    Run("both", (2, 17000), "float32", "the same in a cluster", SMALL, ("cluster", "cluster")),
    Run("poles", (13, 33), "float32", "poles beside rows that share a warp"),
    Run("poles", (3, 1001), "float16", "poles beside a row of a CTA"),
    Run("poles", (2, 17001), "float32", "poles beside a row of a cluster", SMALL, ("cluster", "cluster")),
    Run(
        "poles",
        (2, 17001),
        "float32",
        "poles beside a streamed row",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "z", "weight"),
    ),
    Run("stream", (5, 1001), "bfloat16", "s wider than x and y", dtypes={"residual": "float32", "ds": "float32"}),
    Run("stream", (3, 1000), "float64", "s and y narrower than x"),
    Run("stream", (2, 17000), "bfloat16", "the same in a cluster", tiers=("cluster", "cluster")),
    Run("norm alone", (3, 129), "bfloat16", "nothing before, nothing after"),
    Run("samples", (3, 13, 33), "float16", "samples of rows that share a warp, not whole warps of them"),
    Run("samples", (3, 7, 1000), "bfloat16", "more partial rows than one of each sample", MANY_SMS, ("warp", "cta")),
    Run("samples", (2, 3, 17000), "float32", "samples of a cluster's rows", tiers=("cluster", "cluster")),
    Run(
        "samples",
        (2, 3, 17000),
        "float32",
        "samples of streamed rows",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "scale", "shift", "weight"),
    ),
    Run(
        "samples",
        (3, 5, 129),
        "bfloat16",
        "samples, every array in another dtype",
        dtypes={"gate": "float32", "scale": "float16", "shift": "float32", "weight": "float32", "dy": "float32"},
    ),
    Run("samples, s made again", (3, 5, 129), "float16", "a gate for each sample, read again in the backward pass"),
    Run("samples, s made again", (40, 5, 17), "float32", "more samples than CTAs", SMALL),
    Run("modulate", (2, 40, 256), "float32", "gradients of samples alone, in several CTAs", MANY_SMS),
    Run("modulate", (7, 2, 256), "float32", "one CTA for a sample writes its gradients itself"),
    Run("modulate", (2, 40, 17000), "float32", "partial rows of samples of streamed rows", WITHOUT_CLUSTERS),
    Run("modulate", (2, 2, 5000), "bfloat16", "few rows: a thread for each pack", MANY_SMS),
    Run("heads", (5, 3, 128), "bfloat16", "a weight for each head"),
    Run("heads", (3, 5, 3, 33), "float32", "the same under two axes", MANY_SMS),
    Run("heads", (4, 3, 17000), "float32", "the same streamed", WITHOUT_CLUSTERS, ("streamed", "streamed")),
    Run("numbers of rows", (13, 33), "float16", "rows share a warp"),
    Run("numbers of rows", (3, 5, 1000), "bfloat16", "numbers for samples lie 0 apart, with a gap", MANY_SMS),
    Run("numbers of rows", (2, 3, 1001), "float32", "beside rows at odd addresses"),
    Run("numbers of rows", (2, 2, 17000), "float32", "in clusters", tiers=("cluster", "cluster")),
    Run(
        "numbers of rows",
        (2, 2, 17000),
        "float32",
        "streamed",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "factor", "share", "weight", "shift"),
    ),
    Run("numbers of rows", (3, 129), "float64", "in other dtypes", dtypes={"factor": "float32", "shift": "float16"}),
    Run("numbers of rows, s made again", (40, 7), "float16", "less than a warp's row"),
    Run("numbers of rows, s made again", (3, 1000), "float32", "before and after", MANY_SMS),
    Run("numbers of rows, s made again", (2, 17001), "float16", "at odd addresses in a cluster"),
    Run("numbers of rows of samples", (3, 13, 33), "float16", "beside vectors of samples"),
    Run("numbers of rows of samples", (2, 40, 256), "float32", "the same in several CTAs", MANY_SMS),
    Run("numbers of rows after", (2, 2000), "bfloat16", "few rows: a thread for each pack", MANY_SMS),
    Run("numbers of rows after", (40, 4096), "bfloat16", "a row of a CTA", SMALL),
    Run("heads and samples", (2, 3, 2, 33), "float16", "the second sort of groups is expanded, and what is of none"),
)


@needs_machine
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case}, {run.reason}")
def test_kernels_on_the_stand_in_compute_the_same(monkeypatch, run):
    runs = cpu_cupy.play(monkeypatch, run.device)
    case = CASES[run.case]
    check(case, make(case, run.shape, run.dtype, run.dtypes), cpu_cupy.asarray, run.wanted)
    forward, again, backward = (one.tier for one in runs.plans)
    assert forward == again
    assert all(found == tier for found, tier in zip((forward, backward), run.tiers, strict=True) if tier)


@needs_machine
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gate", (13, 33)),
        ("poles", (13, 33)),
        ("samples", (3, 13, 33)),
        ("heads", (3, 2, 1000)),
        ("numbers of rows", (3, 13, 33)),
        ("numbers of rows", (3, 2, 1001)),
    ],
)
def test_no_kernel_reads_or_writes_what_is_not_its_own(monkeypatch, name, shape):
    cpu_cupy.play(monkeypatch, SMALL, cpu_device.Machine("memory"))
    check(CASES[name], make(CASES[name], shape, "float16"), cpu_cupy.asarray)


@needs_machine
def test_the_gradient_of_a_column_before_a_streamed_norm_is_refused(monkeypatch):
    cpu_cupy.play(monkeypatch, WITHOUT_CLUSTERS)
    made = make(CASES["gate"], (2, 17000), "float32")
    operands = {name: cpu_cupy.asarray(one) if hasattr(one, "dtype") else one for name, one in made.operands.items()}
    _, saved = CASES["gate"].op.forward(cpu_cupy.asarray(made.x), **operands)
    with pytest.raises(NotImplementedError, match="gradient of shift"):
        CASES["gate"].op.backward(saved, cpu_cupy.asarray(made.gradients[0]))


# The bits of a sum and a norm.


def add_norm_and_separate(norm: str, x: Any, residual: Any, weight: Any) -> None:
    fused = getattr(cunorm, f"add_{norm}")
    y, s = fused(x, residual, weight)
    total = x + residual
    assert same_bits(on_host(s), on_host(total))
    assert same_bits(on_host(y), on_host(getattr(cunorm, norm)(total, None, weight)))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_add_and_norm_has_the_bits_of_the_two_calls(xp, norm, dtype):
    made = make(CASES["add_rms_norm"], (37, 1000), dtype)
    x, residual, weight = map(xp.asarray, (made.x, made.operands["residual"], made.operands["weight"]))
    add_norm_and_separate(norm, x, residual, weight)


@needs_machine
@pytest.mark.parametrize(("cols", "device"), [(1000, SMALL), (17000, SMALL), (17000, WITHOUT_CLUSTERS)])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_add_and_norm_has_the_bits_of_the_two_calls_on_the_stand_in(monkeypatch, norm, cols, device):
    cpu_cupy.play(monkeypatch, device)
    made = make(CASES["add_rms_norm"], (2, cols), "float32")
    x, residual, weight = map(cpu_cupy.asarray, (made.x, made.operands["residual"], made.operands["weight"]))
    y, s = getattr(cunorm, f"add_{norm}")(x, residual, weight, eps=EPS)
    assert same_bits(s.get(), made.x + made.operands["residual"])
    apart = cunorm.fuse(norm, epilogue=lambda xhat, weight: xhat * weight)
    assert same_bits(y.get(), apart(s, weight=weight, eps=EPS).get())


# The named operations.


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_named_operations_are_those_of_fuse(xp, norm, zero_centered_gamma):
    named = CASES[f"add_{norm}"]
    made = make(named, (3, 7), "float32")
    x, residual = xp.asarray(made.x), xp.asarray(made.operands["residual"])
    parameters = [xp.asarray(made.operands[name]) for name in named.columns]
    options = {"zero_centered_gamma": zero_centered_gamma}
    y, s, *statistics = getattr(cunorm, f"add_{norm}_forward")(x, residual, *parameters, eps=EPS, **options)
    shifted = {"weight": parameters[0] + zero_centered_gamma} | dict(
        zip(named.columns[1:], parameters[1:], strict=True)
    )
    results, saved = named.op.forward(x, eps=EPS, residual=residual, **shifted)
    by_name = dict(zip(named.op.operation.returns, results, strict=True))
    assert abs(on_host(y - by_name["y"])).max() < 1e-5
    assert same_bits(on_host(s), on_host(by_name["s"]))
    dy, ds = (xp.asarray(one) for one in made.gradients)
    in_order = {"y": dy, "s": ds}
    gradients = named.op.backward(saved, *(in_order[name] for name in named.op.operation.returns))
    found = getattr(cunorm, f"add_{norm}_backward")(dy, ds, s, *statistics, parameters[0], **options)
    for name, one in zip(("x", "residual", *named.columns), found, strict=True):
        assert abs(on_host(one - gradients[name])).max() < 1e-4, name
    only = getattr(cunorm, f"add_{norm}_backward")(
        dy, None, s, *statistics, parameters[0], output_mask=(False, False, True, False)[: len(found)], **options
    )
    assert [one is None for one in only] == [True, True, False, True][: len(found)]
    assert same_bits(on_host(only[2]), on_host(found[2]))


def test_without_a_weight_its_gradient_has_the_dtype_of_s(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 12, dtype="float16").reshape(3, 4))
    y, s, mean, rstd = cunorm.add_layer_norm_forward(x, x, s_dtype="float32", dtype="float64")
    assert (y.dtype, s.dtype, rstd.dtype) == ("float64", "float32", "float32")
    dx, _, dweight, dbias = cunorm.add_layer_norm_backward(y, None, s, mean, rstd)
    assert {one.dtype.name for one in (dx, dweight, dbias)} == {"float32"}
    assert dweight.shape == dbias.shape == (4,)


# Gradients by differences, of expressions at random.

NAMES = ("first", "a", "b", "c")


@st.composite
def trees(draw, depth: int = 3) -> Any:
    """Smooth functions of four names, bounded for bounded ones."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(NAMES) | st.sampled_from([0.5, -1.5, 2.0]))
    function = draw(st.sampled_from(["+", "-", "*", "tanh", "sigmoid", "exp"]))
    return (function, draw(trees(depth - 1)), draw(trees(depth - 1)))


def computed(tree: Any, values: dict[str, Any]) -> Any:
    if not isinstance(tree, tuple):
        return values.get(tree, tree) if isinstance(tree, str) else tree
    function, left, right = tree[0], computed(tree[1], values), computed(tree[2], values)
    if function in ("+", "-", "*"):
        return {"+": left + right, "-": left - right, "*": left * right}[function]
    return {"tanh": tanh, "sigmoid": sigmoid, "exp": lambda x: sigmoid(x) ** 2}[function](left + 0.5 * right)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["layer_norm", "rms_norm"]), trees(), trees())
def test_gradients_are_the_limits_of_differences(norm, before, after):
    op = cunorm.fuse(
        norm,
        prologue=lambda first, a, b, c: first + computed(before, {"first": first, "a": a, "b": b, "c": c}),
        epilogue=lambda first, a, b, c: computed(after, {"first": first, "a": a, "b": b, "c": c}) + 0 * first,
        returns=("y", "s"),
    )
    random = numpy.random.default_rng(0)
    values = {"x": random.standard_normal((3, 5)), "a": random.standard_normal((3, 5)), "b": random.standard_normal(5)}
    values["c"] = 0.75
    steps = {name: random.standard_normal(numpy.shape(value)) for name, value in values.items()}
    weights = random.standard_normal((2, 3, 5))

    def loss(amount: float) -> float:
        at = {name: value + amount * steps[name] for name, value in values.items()}
        y, s = op(at.pop("x"), eps=0.5, **{k: float(v) if numpy.ndim(v) == 0 else v for k, v in at.items()})
        return float((weights[0] * y + weights[1] * s).sum())

    x, *_ = values.values()
    _, saved = op.forward(x, eps=0.5, **{name: one for name, one in values.items() if name != "x"})
    gradients = op.backward(saved, *weights)
    slope = sum(float((gradients[name] * steps[name]).sum()) for name in values)
    size = sum(float(abs(gradients[name] * steps[name]).sum()) for name in values)
    assert abs((loss(1e-5) - loss(-1e-5)) / 2e-5 - slope) <= 1e-6 * (1 + size)


@needs_machine
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gradient_that_is_kept_has_the_bits_of_one_that_is_computed_again(monkeypatch, norm):
    """Rows at odd addresses leave no registers for what the others keep of dy * d(y)/d(xhat)."""
    runs = cpu_cupy.play(monkeypatch, SMALL)
    op = cunorm.fuse(norm, epilogue=lambda xhat, weight, z: silu(xhat * weight) * sigmoid(z))
    random = numpy.random.default_rng(0)
    wide = [cpu_cupy.asarray(random.standard_normal((5, 385)).astype("float16")) for _ in range(3)]
    found = []
    for x, z, dy in (wide_rows := [one[:, :384] for one in wide], [cpu_cupy.asarray(one) for one in wide_rows]):
        _, saved = op.forward(x, eps=1e-5, z=z, weight=cpu_cupy.asarray(wide[0][0, :384]))
        found.append(op.backward(saved, dy))
    kept = [step.spec.keeps_g for plan in runs.plans for step in plan.steps if step.spec.kernel == "backward"]
    assert kept == [False, True]
    for name in ("x", "z"):
        assert found[0][name].tobytes() == found[1][name].tobytes()
