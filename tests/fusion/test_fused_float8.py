"""Fused operations with FP8 output: the bytes are those of the operation's float32 y, and s is as without FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import numpy
import pytest
from arrays import on_host, same_bits
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS
from reference import narrow
from test_float8 import GRANULARITIES, TYPES, check, needs_machine

import cunorm
from cunorm.expression import silu
from cunorm.fusion import Fused
from cunorm.kernel.device import Device


class Case(NamedTuple):
    """An operation with FP8 output, and the same without.

    `run(x, *operands, granularity=, dtype=, y_scale=)` returns (bytes, scale, y), and s last if the operation has one.
    """

    run: Callable[..., tuple]
    plain: Callable[..., Any]
    operands: tuple[str, ...]  # the kind of each: "full", "column", "sample", "row", "number"
    bounded: bool = True  # one scale for the whole tensor is known beforehand


def of_object(make: Callable[..., Fused], *names: str, kinds: tuple[str, ...]) -> Case:
    """Return the case of an operation of cunorm.fuse."""
    op, wide = make(), make(dtype="float32")

    def run(x: Any, *operands: Any, **options: Any) -> tuple:
        return op.fp8_forward(x, **options, **dict(zip(names, operands, strict=True)))

    def plain(x: Any, *operands: Any, dtype: str | None = None) -> Any:
        return (wide if dtype else op)(x, **dict(zip(names, operands, strict=True)))

    return Case(run, plain, kinds, bounded=False)


def gate(**options: Any) -> Fused:
    """Make an operation whose s is not returned, and whose epilogue takes a matrix and a number."""
    return cunorm.fuse(
        "rms_norm",
        prologue=lambda x, residual: x + residual,
        epilogue=lambda xhat, z, weight, sharp: xhat * weight * silu(sharp * z),
        **options,
    )


def modulated(**options: Any) -> Fused:
    return cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift, **options)


def routed(**options: Any) -> Fused:
    return cunorm.fuse("rms_norm", epilogue=lambda xhat, weight, route: xhat * weight * route, **options)


CASES = {
    "add_layer_norm": Case(cunorm.add_layer_norm.fp8_forward, cunorm.add_layer_norm, ("full", "column", "column")),
    "add_rms_norm": Case(cunorm.add_rms_norm.fp8_forward, cunorm.add_rms_norm, ("full", "column")),
    "gate": of_object(gate, "residual", "z", "weight", "sharp", kinds=("full", "full", "column", "number")),
    "modulated": of_object(modulated, "scale", "shift", kinds=("sample", "sample")),
    "routed": of_object(routed, "weight", "route", kinds=("column", "row")),
}


def arguments(case: Case, shape: tuple[int, ...], dtype: str, as_array: Any) -> list[Any]:
    """Return x and the operands, at random."""
    random = numpy.random.default_rng(0)
    shapes = {"full": shape, "column": shape[-1:], "sample": (shape[0], *(1,) * (len(shape) - 2), shape[-1])}
    shapes["row"] = (*shape[:-1], 1)
    return [
        0.75 if kind == "number" else as_array(narrow(random.standard_normal(shapes[kind]), dtype))
        for kind in ("full", *case.operands)
    ]


def check_case(
    case: Case, shape: tuple[int, ...], dtype: str, granularity: str | int, as_array: Any, name: str = "e4m3"
) -> None:
    given = arguments(case, shape, dtype, as_array)
    scale = None if granularity != "tensor" or case.bounded else 0.01
    y_bytes, scales, y, *s = case.run(*given, granularity=granularity, dtype=name, y_scale=scale)
    wide, alone = case.plain(*given, dtype="float32"), case.plain(*given)
    if s:
        (wide, _), (alone, s_alone) = wide, alone
        assert same_bits(on_host(s[0]), on_host(s_alone))
        assert same_bits(on_host(s[0]), on_host(given[0] + given[1])), "s is the sum"
    cols = shape[-1]
    check(on_host(wide).reshape(-1, cols), on_host(y_bytes).reshape(-1, cols), scales, granularity, name)
    assert same_bits(on_host(y), on_host(alone)), "y is as it is without FP8"
    assert y_bytes.shape == shape
    assert scales.shape == {"row": shape[:-1], "tensor": (), 128: (*shape[:-1], -(-cols // 128))}[granularity]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 33), "float16"), ((5, 1000), "bfloat16"), ((3, 4096), "float32")])
@pytest.mark.parametrize("case", CASES)
def test_bytes_scales_and_the_sum(xp, case, shape, dtype, granularity, name):
    check_case(CASES[case], shape, dtype, granularity, xp.asarray, name)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((300, 4096), "bfloat16"), ((4, 20001), "float32"), ((3, 65537), "float16"), ((2, 7, 8192), "bfloat16")],
)
@pytest.mark.parametrize("case", CASES)
def test_every_tier_on_a_gpu(case, shape, dtype, granularity):
    import cupy

    check_case(CASES[case], shape, dtype, granularity, cupy.asarray)


class Run(NamedTuple):
    """A case on the stand-in for a GPU, and why."""

    case: str
    shape: tuple[int, ...]
    dtype: str
    granularity: str | int
    device: Device
    reason: str


RUNS = (
    Run("add_layer_norm", (13, 33), "float16", "row", SMALL, "several rows in a warp, at odd addresses"),
    Run("add_rms_norm", (40, 768), "bfloat16", 128, SMALL, "a warp a row"),
    Run("add_rms_norm", (3, 1601), "bfloat16", "row", SMALL, "a warp of several vectors, odd"),
    Run("add_layer_norm", (9, 4096), "bfloat16", "tensor", SMALL, "a CTA a row"),
    Run("add_layer_norm", (9, 10248), "bfloat16", "row", MANY_SMS, "few rows: a cluster of 4"),
    Run("add_rms_norm", (4, 65537), "float16", 128, SMALL, "a cluster that takes several rows, odd"),
    Run("add_layer_norm", (3, 40010), "float32", "row", WITHOUT_CLUSTERS, "streamed, odd"),
    Run("routed", (9, 4096), "bfloat16", "row", SMALL, "a number for each row, a CTA a row"),
    Run("routed", (3, 40010), "float32", 128, WITHOUT_CLUSTERS, "the same streamed, odd"),
    Run("gate", (13, 33), "float16", "tensor", SMALL, "two matrices before and one after, odd"),
    Run("gate", (3, 4096), "float32", "row", SMALL, "the same of a CTA"),
    Run("gate", (2, 65536), "bfloat16", "row", SMALL, "the same of twice as many CTAs as without 8 bits"),
    Run("gate", (2, 17000), "float32", 128, WITHOUT_CLUSTERS, "the same streamed"),
    Run("modulated", (3, 5, 1000), "bfloat16", "row", SMALL, "vectors for samples"),
    Run("modulated", (2, 2, 17000), "float32", "tensor", SMALL, "the same in clusters"),
)


def check_on_stand_in(monkeypatch: Any, run: Run, machine: cpu_device.Machine) -> None:
    cpu_cupy.play(monkeypatch, run.device, machine)
    check_case(CASES[run.case], run.shape, run.dtype, run.granularity, cpu_cupy.asarray)


@needs_machine
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case}, {run.reason}")
def test_the_kernels_on_the_stand_in(monkeypatch, run):
    check_on_stand_in(monkeypatch, run, cpu_device.Machine())


@needs_machine
@pytest.mark.parametrize("build", ["memory", "races"])
@pytest.mark.parametrize(
    ("case", "shape", "granularity"),
    [("add_layer_norm", (5, 33), 128), ("gate", (3, 1601), "row"), ("add_rms_norm", (3, 5001), "row")],
)
def test_sanitizers_find_nothing(monkeypatch, case, shape, granularity, build):
    cpu_cupy.play(monkeypatch, SMALL, cpu_device.Machine(build))
    given = arguments(CASES[case], shape, "float16", cpu_cupy.asarray)
    CASES[case].run(*given, granularity=granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("s_dtype", [None, "float32"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_of_the_sum_as_of_the_norm(xp, norm, s_dtype, granularity):
    """The fused call has the bits of the sum and of its norm, with 1 + weight and a scale known beforehand."""
    x, residual, weight = arguments(CASES["add_rms_norm"], (7, 1000), "float16", xp.asarray)
    if s_dtype:
        residual = residual.astype(s_dtype)
    options = {"granularity": granularity, "zero_centered_gamma": True}
    y_bytes, scale, s = getattr(cunorm, f"add_{norm}").fp8(x, residual, weight, s_dtype=s_dtype, **options)
    assert same_bits(on_host(s), on_host(x + residual))
    expected = getattr(cunorm, f"{norm}_fp8")(s, None, weight, **options)
    assert all(same_bits(on_host(a), on_host(b)) for a, b in zip((y_bytes, scale), expected, strict=True))


def test_results_are_in_the_order_of_returns():
    x = numpy.ones((2, 8), "float32")
    op = cunorm.fuse("rms_norm", prologue=lambda x, residual: x + residual, returns=("s", "y"))
    s, y_bytes, scale = op.fp8(x, residual=x)
    assert (s.dtype, y_bytes.dtype, scale.shape) == (x.dtype, numpy.uint8, (2,))
    assert [array.dtype.name for array in op.fp8_forward(x, residual=x)] == ["float32", "uint8", "float32", "float32"]
    assert len(cunorm.fuse("rms_norm").fp8(x)) == 2


WRONG = [
    ({"dtype": "float16"}, TypeError, "dtype must be 'e4m3' or 'e5m2'"),
    ({"granularity": 64}, ValueError, "granularity must be"),
    ({"y_scale": 1.0}, ValueError, "scale is for granularity='tensor'"),
    ({"s_dtype": "float64"}, TypeError, "s_dtype must be float16, bfloat16 or float32"),
    ({"zero_centered_gamma": True}, ValueError, "needs a weight"),
    ({"eps": -1.0}, ValueError, "eps must be finite"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said(xp, options, error, message):
    x = xp.ones((2, 32), "float32")
    with pytest.raises(error, match=message):
        cunorm.add_rms_norm.fp8(x, x, **options)


def test_what_is_wrong_with_an_object_is_said(xp):
    x = xp.ones((2, 32), "float32")
    op = cunorm.fuse("rms_norm")
    with pytest.raises(ValueError, match="granularity='tensor' needs a y_scale"):
        op.fp8(x, granularity="tensor")
    with pytest.raises(TypeError, match="float16, bfloat16 or float32; got float64"):
        op.fp8(xp.ones((2, 32)))
    with pytest.raises(TypeError, match="residual must be an array"):
        cunorm.add_rms_norm.fp8(x, 1.0)
    with pytest.raises(ValueError, match="an operand's name must not be"):
        cunorm.fuse("rms_norm", epilogue=lambda xhat, y_scale: xhat * y_scale)
