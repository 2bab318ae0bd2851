"""rms_norm_add_rms_norm: values are those of its formula in float64, and bits are those of two calls."""

from __future__ import annotations

import re
from dataclasses import replace

import cpu_cupy
import cpu_device
import numpy
import pytest
import torch
from arrays import on_host, same_bits
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS
from fusion_cases import EPS, close, tensor
from reference import FORMATS, narrow
from test_named_fusions import rms_norm

import cunorm

NAMES = ("x", "residual", "weight", "second_weight")
needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())


def given(shape, dtype):
    random = numpy.random.default_rng(0)
    shapes = dict.fromkeys((*NAMES[:2], "dy", "ds"), shape) | dict.fromkeys(NAMES[2:], shape[-1:])
    return {name: narrow(random.standard_normal(array_shape) + 0.25, dtype) for name, array_shape in shapes.items()}


def expected(values, dtype, offset=0.0):
    """Return ((y, s), gradients by name) in float64, with s rounded. `offset` is added to both weights."""
    leaves = {name: tensor(values[name]).requires_grad_() for name in NAMES}
    exact = leaves["residual"] + rms_norm(leaves["x"]) * (offset + leaves["weight"])
    s = exact + (tensor(narrow(exact.detach().numpy(), dtype)) - exact).detach()
    y = rms_norm(s) * (offset + leaves["second_weight"])
    total = (y * tensor(values["dy"])).sum() + (s * tensor(values["ds"])).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return (y.detach().numpy(), s.detach().numpy()), dict(zip(NAMES, (g.numpy() for g in gradients), strict=True))


def apart(saved, arrays, weight, second_weight, eps=EPS, **options):
    """Return the gradients of two calls, one after the other, with the statistics of `saved`.

    The second call adds zeros, because add_rms_norm is the call whose backward pass takes ds.
    """
    between, of_first = cunorm.rms_norm_add.forward(arrays["x"], arrays["residual"], weight, eps, **options)
    of_first = replace(of_first, statistics={"rstd": saved.statistics["rstd"]})
    _, of_second = cunorm.add_rms_norm.forward(between, between * 0, second_weight, eps, **options)
    of_second = replace(of_second, statistics={"rstd": saved.statistics["second_rstd"]})
    then = cunorm.add_rms_norm.backward(of_second, arrays["dy"], arrays["ds"])
    first = cunorm.rms_norm_add.backward(of_first, then["x"])
    gradients = {"x": first["x"], "residual": then["x"], "weight": first.get("weight")}
    return gradients | {"second_weight": then.get("weight")}


def check(shape, dtype, as_array, zero_centered_gamma=False):
    values = given(shape, dtype)
    (y, s), gradients = expected(values, dtype, float(zero_centered_gamma))
    arithmetic = "float64" if dtype == "float64" else "float32"
    arrays = {name: as_array(value) for name, value in values.items()}
    passed = [arrays[name] for name in NAMES]
    options = {"zero_centered_gamma": zero_centered_gamma}
    results, saved = cunorm.rms_norm_add_rms_norm.forward(*passed, EPS, **options)
    # Where s is rounded to the neighbour, y of 16 bits shows it. The bits are compared with those of two calls below.
    close("s", results[1], s, arithmetic)
    if dtype in ("float32", "float64"):
        close("y", results[0], y, arithmetic)
    for result, again in zip(results, cunorm.rms_norm_add_rms_norm(*passed, EPS, **options), strict=True):
        assert same_bits(on_host(result), on_host(again)), "statistics change nothing"
    between = cunorm.rms_norm_add(*passed[:3], EPS, **options)
    assert same_bits(on_host(results[1]), on_host(between))
    assert same_bits(on_host(results[0]), on_host(cunorm.rms_norm(between, None, passed[3], EPS, **options)))
    of_results = arrays["dy"], arrays["ds"]
    of_all = cunorm.rms_norm_add_rms_norm.backward(saved, *of_results)
    assert tuple(sorted(of_all)) == tuple(sorted(NAMES))
    for name, gradient in of_all.items():
        assert (gradient.dtype, gradient.shape) == (values[name].dtype, values[name].shape)
        if dtype in ("float32", "float64"):
            close(f"d{name}", gradient, gradients[name], arithmetic)
        alone = cunorm.rms_norm_add_rms_norm.backward(saved, *of_results, wanted=(name,))
        assert list(alone) == [name]
        # A sum over rows has the order of its launch, and on a GPU the launch for one gradient may be another.
        if dtype == "float64" and (name in ("x", "residual") or isinstance(gradient, numpy.ndarray)):
            assert same_bits(on_host(alone[name]), on_host(gradient))
        elif dtype in ("float32", "float64"):
            close(f"d{name} alone", alone[name], gradients[name], arithmetic)
    one_by_one = apart(saved, arrays, passed[2], passed[3], **options)
    for name in NAMES:
        assert same_bits(on_host(of_all[name]), on_host(one_by_one[name]))


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 129)], ids=str)
def test_values_and_gradients(xp, shape, dtype, zero_centered_gamma):
    check(shape, dtype, xp.asarray, zero_centered_gamma)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((300, 4096), "bfloat16"), ((3, 7, 1001), "float32"), ((2, 70000), "float32")], ids=str
)
def test_on_a_gpu(shape, dtype):
    import cupy

    check(shape, dtype, cupy.asarray)


@needs_machine
@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [
        ((13, 33), "float16", SMALL),
        ((2, 3, 1600), "bfloat16", SMALL),
        ((3, 1000), "float32", SMALL),
        ((2, 4097), "float64", SMALL),
        ((3, 10240), "bfloat16", MANY_SMS),
    ],
    ids=[
        "rows share a warp, odd",
        "a warp of seven vectors",
        "a CTA",
        "a CTA of float64, odd",
        "few rows of many warps",
    ],
)
def test_one_launch_has_the_bits_of_two_on_the_stand_in(monkeypatch, shape, dtype, device):
    runs = cpu_cupy.play(monkeypatch, device)
    check(shape, dtype, cpu_cupy.asarray)
    assert [plan.steps[0].spec.kernel for plan in runs.plans[:2]] == ["forward_twice", "forward_twice"]


@needs_machine
@pytest.mark.parametrize(
    ("shape", "s_dtype", "device"),
    [((2, 17000), None, WITHOUT_CLUSTERS), ((2, 17000), None, SMALL), ((3, 100), "float64", SMALL)],
    ids=["streamed", "clusters", "s of another dtype"],
)
def test_where_no_cta_holds_a_row_there_are_two_launches(monkeypatch, shape, s_dtype, device):
    runs = cpu_cupy.play(monkeypatch, device)
    if s_dtype is None:
        check(shape, "float32", cpu_cupy.asarray)
    else:
        x = cpu_cupy.asarray(given(shape, "float32")["x"])
        y, s = cunorm.rms_norm_add_rms_norm(x, x, s_dtype=s_dtype)
        assert (y.dtype, s.dtype) == ("float32", s_dtype)
    assert [plan.problem.operation.norm for plan in runs.plans[:2]] == ["rms_norm", "rms_norm"]
    assert all(plan.steps[0].spec.kernel != "forward_twice" for plan in runs.plans)


def check_turns(monkeypatch, machine, shape=(7, 1600), dtype="float32"):
    """Check that a CTA that takes several rows, one after the other, has the bits of two calls."""
    runs = cpu_cupy.play(monkeypatch, MANY_SMS, machine)
    x, residual, weight, second_weight = (cpu_cupy.asarray(given(shape, dtype)[name]) for name in NAMES)
    y, s = cunorm.rms_norm_add_rms_norm(x, residual, weight, second_weight, sm_margin=39)
    between = cunorm.rms_norm_add(x, residual, weight)
    assert same_bits(on_host(s), on_host(between)), "s"
    assert same_bits(on_host(y), on_host(cunorm.rms_norm(between, None, second_weight))), "y"
    return runs.plans[0].steps[0]


@needs_machine
@pytest.mark.parametrize("build", ["results", "memory", "races"])
@pytest.mark.parametrize(("shape", "dtype"), [((9, 1600), "float32"), ((9, 1601), "bfloat16")], ids=str)
def test_a_cta_takes_several_rows(monkeypatch, shape, dtype, build):
    step = check_turns(monkeypatch, cpu_device.Machine(build), shape, dtype)
    assert step.grid[0] * step.spec.rows_per_cta < shape[0]


def test_what_may_be_left_out(xp):
    x, residual = (xp.asarray(given((3, 4), "float64")[name]) for name in NAMES[:2])
    (y, s), saved = cunorm.rms_norm_add_rms_norm.forward(x, residual)
    ones = xp.ones(4)
    for result, expected_result in zip((y, s), cunorm.rms_norm_add_rms_norm(x, residual, ones, ones), strict=True):
        assert abs(on_host(result - expected_result)).max() < 1e-12
    of_y, of_s, both = (
        cunorm.rms_norm_add_rms_norm.backward(saved, *gradients) for gradients in ((y, None), (None, s), (y, s))
    )
    for name in ("x", "residual"):
        assert abs(on_host(of_y[name] + of_s[name] - both[name])).max() < 1e-12
    y, s = cunorm.rms_norm_add_rms_norm(x.astype("float16"), residual, s_dtype="float32")
    assert (y.dtype, s.dtype) == ("float16", "float32")


REFUSED = [
    (TypeError, "residual must be a", lambda x: cunorm.rms_norm_add_rms_norm(x, None)),
    (ValueError, "residual must have the shape of x", lambda x: cunorm.rms_norm_add_rms_norm(x, x[0])),
    (ValueError, "second_weight must have the shape", lambda x: cunorm.rms_norm_add_rms_norm(x, x, x[0], x)),
    (ValueError, "rms_norm_add_rms_norm: eps must be", lambda x: cunorm.rms_norm_add_rms_norm(x, x, eps=-1.0)),
    (
        ValueError,
        "needs a second_weight",
        lambda x: cunorm.rms_norm_add_rms_norm(x, x, x[0], zero_centered_gamma=True),
    ),
    (
        ValueError,
        "one gradient at least must be an array",
        lambda x: cunorm.rms_norm_add_rms_norm.backward(cunorm.rms_norm_add_rms_norm.forward(x, x)[1], None, None),
    ),
    (
        ValueError,
        "wanted must be names out of x, residual; got 'weight'",
        lambda x: cunorm.rms_norm_add_rms_norm.backward(
            cunorm.rms_norm_add_rms_norm.forward(x, x)[1], x, x, wanted=("weight",)
        ),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_refusals(xp, error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call(xp.ones((3, 7), "float32"))
