"""The named functions over fused operations: values and gradients are those of their formulas, in float64."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import numpy
import pytest
import torch
from arrays import on_host
from cpu_functions import SMALL
from fusion_cases import EPS, close, tensor
from reference import FORMATS, narrow

import cunorm
from cunorm.named import OPERATIONS

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())

FULL, COLUMN, SAMPLE = "full", "column", "sample"


class Named(NamedTuple):
    """The formula of a function, the shapes of its operands, and options of a call."""

    formula: Callable[..., dict[str, torch.Tensor]]  # in float64; its argument `rounded` rounds s and has no gradient
    operands: dict[str, str]
    options: tuple[tuple[str, Any], ...] = ()


def norm_of(s: torch.Tensor, *, centred: bool) -> torch.Tensor:
    s = s - s.mean(-1, keepdim=True) if centred else s
    return s * ((s * s).mean(-1, keepdim=True) + EPS) ** -0.5


def layer_norm(s: torch.Tensor) -> torch.Tensor:
    return norm_of(s, centred=True)


def rms_norm(s: torch.Tensor) -> torch.Tensor:
    return norm_of(s, centred=False)


def add_norm(norm):
    def formula(rounded, x, residual, weight, bias=0.0):
        s = rounded(x + residual)
        return {"y": norm(s) * weight + bias, "s": s}

    return formula


def norm_add(norm, offset=0.0):
    return lambda rounded, x, residual, weight, bias=0.0: {"y": residual + norm(x) * (offset + weight) + bias}


def modulate(norm):
    def formula(rounded, x, scale, shift, weight=1.0, bias=0.0):
        return {"y": (norm(x) * weight + bias) * (1 + of_sample(scale, x)) + of_sample(shift, x)}

    return formula


def gate_add_modulate(norm):
    def formula(rounded, x, residual, gate, scale, shift, weight=1.0, bias=0.0):
        s = rounded(residual + of_sample(gate, x) * x)
        return {"y": (norm(s) * weight + bias) * (1 + of_sample(scale, x)) + of_sample(shift, x), "s": s}

    return formula


def size_of_groups(columns: int) -> int:
    return columns // next(count for count in (3, 4, 7) if columns % count == 0)


def gated(*, before: bool, groups: bool):
    def formula(rounded, x, z, weight):
        def norm(s):
            grouped = s.reshape(*s.shape[:-1], -1, size_of_groups(s.shape[-1])) if groups else s
            return rms_norm(grouped).reshape(s.shape)

        silu = z * torch.sigmoid(z)
        return {"y": norm(x) * weight * silu if before else norm(rounded(x * silu)) * weight}

    return formula


def of_sample(vectors: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vectors.reshape(len(x), *(1,) * (x.ndim - 2), -1)


RESIDUAL = {"residual": FULL, "weight": COLUMN}
WITH_BIAS = RESIDUAL | {"bias": COLUMN}
MODULATION = {"scale": SAMPLE, "shift": SAMPLE}
GATE = {"z": FULL, "weight": COLUMN}
GATE_FIRST, BY_GROUPS = (("norm_before_gate", False),), (("group_size", size_of_groups),)
GATED = {"residual": FULL, "gate": SAMPLE} | MODULATION
CENTRED = (("zero_centered_gamma", True),)
OF_LAYER_NORM, OF_RMS_NORM = {"weight": COLUMN, "bias": COLUMN}, {"weight": COLUMN}
TABLE: dict[str, Named] = {
    "add_layer_norm": Named(add_norm(layer_norm), WITH_BIAS),
    "add_rms_norm": Named(add_norm(rms_norm), RESIDUAL),
    "layer_norm_add": Named(norm_add(layer_norm), WITH_BIAS),
    "rms_norm_add": Named(norm_add(rms_norm), RESIDUAL),
    "rms_norm_add, 1 + weight": Named(norm_add(rms_norm, 1.0), RESIDUAL, CENTRED),
    "rms_norm_gated": Named(gated(before=True, groups=False), GATE),
    "rms_norm_gated, gate first": Named(gated(before=False, groups=False), GATE, GATE_FIRST),
    "rms_norm_gated, groups": Named(gated(before=True, groups=True), GATE, BY_GROUPS),
    "rms_norm_gated, gate first, groups": Named(gated(before=False, groups=True), GATE, GATE_FIRST + BY_GROUPS),
    "layer_norm_modulate": Named(modulate(layer_norm), MODULATION),
    "layer_norm_modulate, weight and bias": Named(modulate(layer_norm), MODULATION | OF_LAYER_NORM),
    "rms_norm_modulate": Named(modulate(rms_norm), MODULATION),
    "rms_norm_modulate, weight": Named(modulate(rms_norm), MODULATION | OF_RMS_NORM),
    "gate_add_layer_norm_modulate": Named(gate_add_modulate(layer_norm), GATED),
    "gate_add_layer_norm_modulate, weight and bias": Named(gate_add_modulate(layer_norm), GATED | OF_LAYER_NORM),
    "gate_add_rms_norm_modulate": Named(gate_add_modulate(rms_norm), GATED),
    "gate_add_rms_norm_modulate, weight": Named(gate_add_modulate(rms_norm), GATED | OF_RMS_NORM),
}


def check(
    name: str, shape: tuple[int, ...], dtype: str, as_array: Callable[[numpy.ndarray], Any], *, apart: bool = True
) -> None:
    """Check all results and gradients of a function, with random operands and random gradients of the results.

    Each gradient is asked for together with the others, and with `apart` alone too.
    """
    case, function = TABLE[name], name.partition(",")[0]
    options = {key: value(shape[-1]) if callable(value) else value for key, value in case.options}
    random = numpy.random.default_rng(0)
    shapes = {FULL: shape, COLUMN: shape[-1:], SAMPLE: (shape[0], *shape[-1:])}

    def made(shape: tuple[int, ...]) -> numpy.ndarray:
        return narrow(random.standard_normal(shape) + 0.25, dtype)

    values = {"x": made(shape)} | {operand: made(shapes[kind]) for operand, kind in case.operands.items()}
    results = ("y", "s") if "s_dtype" in inspect.signature(getattr(cunorm, function)).parameters else ("y",)
    values |= {f"d{result}": made(shape) for result in results}
    leaves = {operand: tensor(values[operand]).requires_grad_() for operand in ("x", *case.operands)}
    arithmetic = "float64" if dtype == "float64" else "float32"

    def rounded(exact: torch.Tensor) -> torch.Tensor:
        return exact + (tensor(narrow(exact.detach().numpy(), dtype)) - exact).detach()

    exact = case.formula(rounded, **leaves)
    total = sum((exact[result] * tensor(values[f"d{result}"])).sum() for result in results)
    gradients = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))

    arrays = {operand: as_array(value) for operand, value in values.items()}
    passed = [arrays[operand] for operand in ("x", *case.operands)]
    op = getattr(cunorm, function)
    returned, (kept, saved) = op(*passed, eps=EPS, **options), op.forward(*passed, eps=EPS, **options)
    if results == ("y",):
        returned, kept = (returned,), (kept,)
    for result, array, again in zip(results, returned, kept, strict=True):
        assert array.dtype == values["x"].dtype
        close(result, array, exact[result].detach().numpy(), arithmetic)
        assert on_host(array).tobytes() == on_host(again).tobytes(), "statistics change nothing"
    of_results = [arrays[f"d{result}"] for result in results]
    actual_gradients = op.backward(saved, *of_results)
    assert list(actual_gradients) == [
        "x",
        *(operand for operand in saved.fused.operation.operands if operand in case.operands),
    ]
    for operand, gradient in actual_gradients.items():
        value = values[operand]
        assert (gradient.dtype, gradient.shape) == (value.dtype, value.shape), operand
        close(f"d{operand}", gradient, gradients[operand].numpy(), arithmetic)
        if apart:
            alone = op.backward(saved, *of_results, wanted=(operand,))
            assert list(alone) == [operand]
            close(f"d{operand} alone", alone[operand], gradients[operand].numpy(), arithmetic)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 129)], ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_values_and_gradients_are_those_of_the_formula(xp, name, shape, dtype):
    check(name, shape, dtype, xp.asarray)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 50, 4096), "bfloat16"), ((3, 7, 1001), "float16"), ((2, 3, 20001), "float32")], ids=str
)
@pytest.mark.parametrize("name", TABLE)
def test_values_and_gradients_on_a_gpu(name, shape, dtype):
    import cupy

    # As in test_fusion.py: a kernel computes s = x * silu(z) in float32, and rounds a few values to the neighbour.
    check(name, shape, "float32" if "gate first" in name else dtype, cupy.asarray)


# (shape, dtype) by what holds a row. Backward passes take the kernel of few rows and those of many in turn, so both
# meet every function and every holder. Gradients alone are asked for with one holder for each function, in turns.
HOLDERS = {
    "rows share a warp": ((2, 3, 33), "float16"),
    "a CTA": ((2, 3, 1000), "bfloat16"),
    "a cluster": ((2, 1, 17000), "float32"),
}
NAMES = [name for name in TABLE if not name.startswith("add_")]
ON_THE_STAND_IN = [
    pytest.param(name, *HOLDERS[holder], (place + i) % 2 == 1, place % 3 == i, id=f"{name}-{holder}")
    for place, name in enumerate(NAMES)
    for i, holder in enumerate(HOLDERS)
]


@needs_machine
@pytest.mark.parametrize(("name", "shape", "dtype", "as_many", "apart"), ON_THE_STAND_IN)
def test_kernels_on_the_stand_in_compute_the_same(monkeypatch, name, shape, dtype, as_many, apart):
    cpu_cupy.play(monkeypatch, SMALL, as_many=as_many)
    check(name, shape, dtype, cpu_cupy.asarray, apart=apart)


def test_every_named_operation_is_here_and_says_how_it_is_called():
    assert {name.partition(",")[0] for name in TABLE} == set(OPERATIONS) - {"rms_norm_add_rms_norm"}
    for name in OPERATIONS:
        op = getattr(cunorm, name)
        assert inspect.isfunction(op)  # so that help() shows its signature and docstring
        own = inspect.signature(op).parameters
        assert list(inspect.signature(op.forward).parameters) == list(own)
        assert {*inspect.signature(op.fp8).parameters} == {*own, "granularity", "y_scale"}
        for function in (op, op.forward, op.backward, op.fp8, op.fp8_forward):
            assert inspect.getdoc(function), (name, function)
            assert pickle.loads(pickle.dumps(function)) is function


def test_the_same_ten_have_the_same_signature_in_every_framework():
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
        package = importlib.import_module(f"cunorm.{framework}")
        for name in OPERATIONS:
            op, of_core = getattr(package, name), getattr(cunorm, name)
            assert name in package.__all__
            assert inspect.signature(op) == inspect.signature(of_core)
            assert inspect.getdoc(op) == inspect.getdoc(of_core)
            assert pickle.loads(pickle.dumps(op)) is op
            assert inspect.signature(op.fp8) == inspect.signature(of_core.fp8)


def test_weight_and_bias_may_be_left_out(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 12).reshape(3, 4))
    ones, zeros = xp.ones(4), xp.zeros(4)
    y, saved = cunorm.layer_norm_add.forward(x, x)
    assert abs(on_host(y - cunorm.layer_norm_add(x, x, ones, zeros))).max() < 1e-12
    assert abs(on_host(y - x - cunorm.layer_norm(x))).max() < 1e-12
    assert list(cunorm.layer_norm_add.backward(saved, y)) == ["x", "residual"]
    with pytest.raises(ValueError, match="wanted must be names out of x, residual; got 'weight'"):
        cunorm.layer_norm_add.backward(saved, y, wanted=("weight",))


def test_a_modulated_norm_may_have_a_bias_alone(xp):
    x, zeros = xp.asarray(numpy.linspace(-1, 1, 24).reshape(2, 3, 4)), xp.zeros((2, 4))
    y = cunorm.layer_norm_modulate(x, zeros, zeros, None, xp.ones(4))
    assert abs(on_host(y - 1 - cunorm.layer_norm(x))).max() < 1e-12


def test_vectors_of_samples_may_have_all_their_axes(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 48).reshape(2, 3, 2, 4))
    scale, shift = x[:, 0, 0], x[:, 1, 1]
    y = cunorm.layer_norm_modulate(x, scale, shift)
    whole = scale[:, None, None], shift[:, None, None]
    again, saved = cunorm.layer_norm_modulate.forward(x, *whole)
    assert on_host(y).tobytes() == on_host(again).tobytes()
    gradients = cunorm.layer_norm_modulate.backward(saved, y)
    assert gradients["scale"].shape == gradients["shift"].shape == (2, 1, 1, 4)


def test_a_wider_residual_stream_is_normalised(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 24, dtype="float16").reshape(2, 3, 4))
    ones, op = xp.ones((2, 4), "float16"), cunorm.gate_add_rms_norm_modulate
    (y, s), saved = op.forward(x, x.astype("float32"), ones, ones, ones, s_dtype="float32")
    assert (y.dtype, s.dtype) == ("float16", "float32")
    dtypes = {name: gradient.dtype.name for name, gradient in op.backward(saved, y, s).items()}
    assert dtypes.pop("residual") == "float32"
    assert set(dtypes.values()) == {"float16"}


def test_the_gate_may_be_any_number(xp):
    """silu and its derivative are finite where exp overflows."""
    z = xp.asarray(numpy.array([[-1e4, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e4]], "float32"))
    x, dy, op = z / z, z / z, cunorm.rms_norm_gated
    for first in (False, True):
        y, saved = op.forward(x, z, norm_before_gate=first)
        for array in (y, *op.backward(saved, dy).values()):
            assert numpy.isfinite(on_host(array)).all()
    assert abs(on_host(op.backward(saved, dy)["z"]) - [[0, 0, 0, 0, 1, 1, 1, 1]]).max() < 1e-6


@pytest.mark.parametrize("granularity", ["row", "tensor", 128])
@pytest.mark.parametrize("options", [{"norm_before_gate": False}, {"norm_before_gate": False, "group_size": 4}, {}])
def test_fp8_output_of_a_gated_norm(xp, options, granularity):
    """The bytes have the shape of x. One scale for all is known beforehand only if y is a norm times a weight."""
    x = xp.asarray(numpy.linspace(-1, 1, 24, dtype="float32").reshape(2, 12))
    op, weight = cunorm.rms_norm_gated, xp.ones(12, "float32")
    if granularity == "tensor" and not options:
        with pytest.raises(ValueError, match="granularity='tensor' needs a y_scale"):
            op.fp8(x, x, weight, granularity=granularity)
        return
    y_bytes, scale, y = op.fp8_forward(x, x, weight, granularity=granularity, **options)
    fewer = op.fp8(x, x, weight, granularity=granularity, **options)
    for array, expected_array in zip(fewer, (y_bytes, scale), strict=True):
        assert on_host(array).tobytes() == on_host(expected_array).tobytes()
    assert y_bytes.shape == y.shape == x.shape
    assert on_host(y).tobytes() == on_host(op(x, x, weight, **options)).tobytes()


def backward(x: Any, dy: Any, **options: Any) -> Any:
    return cunorm.rms_norm_add.backward(cunorm.rms_norm_add.forward(x, x)[1], dy, **options)


REFUSED = [
    (TypeError, "residual must be a", lambda x: cunorm.layer_norm_add(x, None)),
    (ValueError, "residual must have the shape of x", lambda x: cunorm.rms_norm_add(x, x[0])),
    (ValueError, "scale must broadcast against x", lambda x: cunorm.layer_norm_modulate(x, x[:, :3], x)),
    (TypeError, "gate must be a", lambda x: cunorm.gate_add_rms_norm_modulate(x, x, None, x, x)),
    (ValueError, "group_size must divide", lambda x: cunorm.rms_norm_gated(x, x, group_size=2)),
    (TypeError, "group_size must be an integer", lambda x: cunorm.rms_norm_gated(x, x, group_size=1.0)),
    (ValueError, "z must have the shape of x", lambda x: cunorm.rms_norm_gated(x, x[:1])),
    (ValueError, "z must have the shape of x", lambda x: cunorm.rms_norm_gated(x, x[:1], group_size=7)),
    (ValueError, "weight must have shape (7,)", lambda x: cunorm.rms_norm_gated(x, x, x)),
    (ValueError, "needs a weight", lambda x: cunorm.rms_norm_add(x, x, zero_centered_gamma=True)),
    (ValueError, "one gradient at least must be an array; got None", lambda x: backward(x, None)),
    (ValueError, "wanted must be names out of x, residual; got 'weight'", lambda x: backward(x, x, wanted=("weight",))),
    (TypeError, "wanted must be a tuple", lambda x: backward(x, x, wanted="x")),
    (TypeError, "saved must be what rms_norm_add.forward returned; got", lambda x: cunorm.rms_norm_add.backward(x, x)),
    (
        ValueError,
        "saved must be what layer_norm_add.forward returned; got that of rms_norm_add",
        lambda x: cunorm.layer_norm_add.backward(cunorm.rms_norm_add.forward(x, x)[1], x),
    ),
    (
        ValueError,
        "dy must have the shape of x, (3, 7); got (7, 3)",
        lambda x: cunorm.rms_norm_gated.backward(cunorm.rms_norm_gated.forward(x, x, group_size=7)[1], x.T),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_named_functions_refuse(xp, error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call(xp.ones((3, 7), "float32"))
