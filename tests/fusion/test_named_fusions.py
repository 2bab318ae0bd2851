"""The named functions over fused operations: values and gradients are those of their formulas, in float64."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import numpy
import pytest
import torch
from arrays import on_host
from cpu_functions import SMALL, as_few_and_as_many
from fusion_cases import EPS, close, tensor
from reference import FORMATS, narrow

import cunorm
from cunorm.operation import FUSIONS

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())

FULL, COLUMN, SAMPLE = "full", "column", "sample"


class Named(NamedTuple):
    """A function, its operands' shapes, and the names that its backward function takes and returns, in order."""

    formula: Callable[..., dict[str, torch.Tensor]]  # of float64; `rounded` rounds s, with no gradient of its own
    operands: dict[str, str]
    takes: str
    gradients: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        return ("y", "s") if "ds " in self.takes else ("y",)


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


def norm_add(norm, one=0.0):
    return lambda rounded, x, residual, weight, bias=0.0: {"y": residual + norm(x) * (one + weight) + bias}


def modulate(norm):
    def formula(rounded, x, scale, shift):
        return {"y": norm(x) * (1 + of_sample(scale, x)) + of_sample(shift, x)}

    return formula


def gate_add_modulate(norm):
    def formula(rounded, x, residual, gate, scale, shift):
        s = rounded(residual + of_sample(gate, x) * x)
        return {"y": norm(s) * (1 + of_sample(scale, x)) + of_sample(shift, x), "s": s}

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
TABLE: dict[str, Named] = {
    "add_layer_norm": Named(add_norm(layer_norm), WITH_BIAS, "dy ds s mean rstd weight", "x residual weight bias"),
    "add_rms_norm": Named(add_norm(rms_norm), RESIDUAL, "dy ds s rstd weight", "x residual weight"),
    "layer_norm_add": Named(norm_add(layer_norm), WITH_BIAS, "dy x mean rstd weight", "x weight bias"),
    "rms_norm_add": Named(norm_add(rms_norm), RESIDUAL, "dy x rstd weight", "x weight"),
    "rms_norm_add, 1 + weight": Named(norm_add(rms_norm, 1.0), RESIDUAL, "dy x rstd weight", "x weight", CENTRED),
    "rms_norm_gated": Named(gated(before=True, groups=False), GATE, "dy x rstd z weight", "x z weight"),
    "rms_norm_gated, gate first": Named(
        gated(before=False, groups=False), GATE, "dy x rstd z weight", "x z weight", GATE_FIRST
    ),
    "rms_norm_gated, groups": Named(
        gated(before=True, groups=True), GATE, "dy x rstd z weight", "x z weight", BY_GROUPS
    ),
    "rms_norm_gated, gate first, groups": Named(
        gated(before=False, groups=True), GATE, "dy x rstd z weight", "x z weight", GATE_FIRST + BY_GROUPS
    ),
    "layer_norm_modulate": Named(modulate(layer_norm), MODULATION, "dy x mean rstd scale", "x scale shift"),
    "rms_norm_modulate": Named(modulate(rms_norm), MODULATION, "dy x rstd scale", "x scale shift"),
    "gate_add_layer_norm_modulate": Named(
        gate_add_modulate(layer_norm), GATED, "dy ds x s mean rstd gate scale", "x residual gate scale shift"
    ),
    "gate_add_rms_norm_modulate": Named(
        gate_add_modulate(rms_norm), GATED, "dy ds x s rstd gate scale", "x residual gate scale shift"
    ),
}


def check(name: str, shape: tuple[int, ...], dtype: str, as_array: Callable[[numpy.ndarray], Any]) -> None:
    """Results and every gradient of a function, of random operands and random gradients of all results."""
    case, function = TABLE[name], name.partition(",")[0]
    options = {key: value(shape[-1]) if callable(value) else value for key, value in case.options}
    random = numpy.random.default_rng(0)
    shapes = {FULL: shape, COLUMN: shape[-1:], SAMPLE: (shape[0], *shape[-1:])}

    def made(shape: tuple[int, ...]) -> numpy.ndarray:
        return narrow(random.standard_normal(shape) + 0.25, dtype)

    values = {"x": made(shape)} | {one: made(shapes[kind]) for one, kind in case.operands.items()}
    values |= {f"d{result}": made(shape) for result in case.results}
    leaves = {one: tensor(values[one]).requires_grad_() for one in ("x", *case.operands)}
    arithmetic = "float64" if dtype == "float64" else "float32"

    def rounded(exact: torch.Tensor) -> torch.Tensor:
        return exact + (tensor(narrow(exact.detach().numpy(), dtype)) - exact).detach()

    exact = case.formula(rounded, **leaves)
    total = sum((exact[result] * tensor(values[f"d{result}"])).sum() for result in case.results)
    gradients = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))

    arrays = {one: as_array(value) for one, value in values.items()}
    passed = [arrays[one] for one in ("x", *case.operands)]
    returned = getattr(cunorm, function)(*passed, eps=EPS, **options)
    *kept, rstd = getattr(cunorm, f"{function}_forward")(*passed, eps=EPS, **options)
    for result, one, again in zip(case.results, returned if len(case.results) > 1 else (returned,), kept, strict=False):
        assert one.dtype == values["x"].dtype
        close(result, one, exact[result].detach().numpy(), arithmetic)
        assert on_host(one).tobytes() == on_host(again).tobytes(), "statistics change nothing"
    arrays |= dict(zip((*case.results, "mean"), kept, strict=False)) | {"rstd": rstd}
    backward = getattr(cunorm, f"{function}_backward")
    names = case.gradients.split()
    found = backward(*(arrays[one] for one in case.takes.split()), **options)
    for one, gradient in zip(names, found, strict=True):
        of = values[one]
        assert (gradient.dtype, gradient.shape) == (of.dtype, of.shape), one
        close(f"d{one}", gradient, gradients[one].numpy(), arithmetic)
    for place, one in enumerate(names):
        mask = tuple(other == place for other in range(len(names)))
        alone = backward(*(arrays[one] for one in case.takes.split()), output_mask=mask, **options)
        assert [other is not None for other in alone] == list(mask)
        close(f"d{one} alone", alone[place], gradients[one].numpy(), arithmetic)


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

    # As in fusion_cases: of s = x * silu(z), computed in float32, a few of many values are rounded to the neighbour.
    check(name, shape, "float32" if "gate first" in name else dtype, cupy.asarray)


@needs_machine
@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [((2, 3, 33), "float16", SMALL), ((2, 3, 1000), "bfloat16", SMALL), ((2, 1, 17000), "float32", SMALL)],
    ids=["rows share a warp", "a CTA", "a cluster"],
)
@as_few_and_as_many
@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith("add_")])
def test_kernels_on_the_stand_in_compute_the_same(monkeypatch, name, shape, dtype, device, as_many):
    cpu_cupy.play(monkeypatch, device, as_many=as_many)
    check(name, shape, dtype, cpu_cupy.asarray)


def test_every_named_function_is_here_with_its_three_forms():
    assert {name.partition(",")[0] for name in TABLE} == set(FUSIONS)
    for name in FUSIONS:
        for form in (name, f"{name}_forward", f"{name}_backward"):
            assert form in cunorm.__all__
            assert inspect.getdoc(getattr(cunorm, form)), form


def test_weight_and_bias_may_be_left_out(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 12).reshape(3, 4))
    ones, zeros = xp.ones(4), xp.zeros(4)
    y = cunorm.layer_norm_add(x, x)
    assert abs(on_host(y - cunorm.layer_norm_add(x, x, ones, zeros))).max() < 1e-12
    assert abs(on_host(y - x - cunorm.layer_norm(x))).max() < 1e-12
    _, mean, rstd = cunorm.layer_norm_add_forward(x, x)
    dx, dweight, dbias = cunorm.layer_norm_add_backward(y, x, mean, rstd)
    assert [one.shape for one in (dx, dweight, dbias)] == [(3, 4), (4,), (4,)]


def test_vectors_of_samples_may_have_all_their_axes(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 48).reshape(2, 3, 2, 4))
    scale, shift = x[:, 0, 0], x[:, 1, 1]
    y = cunorm.layer_norm_modulate(x, scale, shift)
    whole = scale[:, None, None], shift[:, None, None]
    assert on_host(y).tobytes() == on_host(cunorm.layer_norm_modulate(x, *whole)).tobytes()
    _, mean, rstd = cunorm.layer_norm_modulate_forward(x, *whole)
    _, dscale, dshift = cunorm.layer_norm_modulate_backward(y, x, mean, rstd, whole[0])
    assert dscale.shape == dshift.shape == (2, 1, 1, 4)


def test_a_wider_residual_stream_is_normalised(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 24, dtype="float16").reshape(2, 3, 4))
    ones = xp.ones((2, 4), "float16")
    y, s, rstd = cunorm.gate_add_rms_norm_modulate_forward(x, x, ones, ones, ones, s_dtype="float32")
    assert (y.dtype, s.dtype) == ("float16", "float32")
    gradients = cunorm.gate_add_rms_norm_modulate_backward(y, s, x, s, rstd, ones, ones)
    assert [one.dtype.name for one in gradients] == ["float16", "float32", "float16", "float16", "float16"]


def test_the_gate_may_be_any_number(xp):
    """silu and its derivative where exp overflows."""
    z = xp.asarray(numpy.array([[-1e4, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e4]], "float32"))
    x, dy = z / z, z / z
    for first in (True, False):
        y, rstd = cunorm.rms_norm_gated_forward(x, z, norm_before_gate=first)
        for one in (y, *cunorm.rms_norm_gated_backward(dy, x, rstd, z, norm_before_gate=first)[:2]):
            assert numpy.isfinite(on_host(one)).all()
    y, rstd = cunorm.rms_norm_gated_forward(x, z)
    _, dz, dweight = cunorm.rms_norm_gated_backward(dy, x, rstd, z)
    assert dweight is None
    assert abs(on_host(dz) - [[0, 0, 0, 0, 1, 1, 1, 1]]).max() < 1e-6


def masked(x: Any, output_mask: Any) -> Any:
    return cunorm.rms_norm_add_backward(x, x, x[:, 0], output_mask=output_mask)


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
    (ValueError, "dy must be an array; got None", lambda x: cunorm.rms_norm_add_backward(None, x, x[:, 0])),
    (ValueError, "must have 2 entries", lambda x: masked(x, ())),
    (TypeError, "output_mask must be a tuple", lambda x: masked(x, 1)),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_named_functions_refuse(xp, error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call(xp.ones((3, 7), "float32"))
