"""sm_margin of fused operations: a launch leaves so many multiprocessors to others, and results are the same."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from itertools import cycle, product

import cpu_cupy
import cpu_device
import numpy
import pytest
from arrays import inputs, on_host, same_bits
from cpu_functions import MANY_SMS, MANY_WITHOUT_CLUSTERS
from nvrtc import needs_nvrtc
from problems import problem
from reference import check_backward

import cunorm
from cunorm.commands.compilation import fault
from cunorm.kernel.compile import compile_for
from cunorm.kernel.device import KNOWN
from cunorm.named import OPERATIONS
from cunorm.plan import launches
from cunorm.plan.plan import plan
from cunorm.plan.problem import ceil_div
from cunorm.plan.spec import NormSpec

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())
FUNCTIONS = sorted(OPERATIONS)


def test_every_function_takes_it():
    for name in FUNCTIONS:
        op = getattr(cunorm, name)
        for form in (op, op.forward, op.backward, op.fp8, op.fp8_forward):
            assert inspect.signature(form).parameters["sm_margin"].default == 0, form


def calls(name, xp, **options):
    """Return (results and statistics, gradients) of a function, called with x as matrices and with vectors of ones."""
    x = xp(numpy.linspace(-1, 1, 600 * 64, dtype="float32").reshape(600, 64))
    signature = inspect.signature(getattr(cunorm, name)).parameters
    positional = [name for name in signature if signature[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    shapes = dict.fromkeys(("weight", "bias", "second_weight"), (64,))
    given = {
        name: x if name in ("residual", "z") else xp(numpy.ones(shapes.get(name, (1, 64)), "float32"))
        for name in positional[1:-1]  # without x and eps
    }
    results, saved = getattr(cunorm, name).forward(x, **given, **options)
    results = results if isinstance(results, tuple) else (results,)
    gradients = getattr(cunorm, name).backward(saved, *[x for _ in results], **options)
    statistics = [statistic for statistic in saved.statistics.values() if statistic is not None]
    return (*results, *statistics), list(gradients.values())


@needs_machine
@pytest.mark.parametrize("name", FUNCTIONS)
def test_launches_leave_multiprocessors_and_give_the_same(monkeypatch, name):
    runs = cpu_cupy.play(monkeypatch, MANY_SMS)
    (results, gradients), plain = (calls(name, cpu_cupy.asarray, sm_margin=margin) for margin in (37, 0))
    half = len(runs.plans) // 2
    assert [plan.problem.sm_margin for plan in runs.plans] == [37] * half + [0] * half
    few, many = (
        max(
            ceil_div(step.grid[0] * step.grid[2], step.spec.ctas_per_sm)
            for plan in part
            for step in plan.steps
            if isinstance(step.spec, NormSpec)
        )
        for part in (runs.plans[:half], runs.plans[half:])
    )
    # A CTA has rows of one sample only, and there is only one sample here.
    assert few <= MANY_SMS.sms - 37 < many or "modulate" in name
    for result, plain_result in zip(results, plain[0], strict=True):
        assert same_bits(on_host(result), on_host(plain_result))
    for gradient, plain_gradient in zip(gradients, plain[1], strict=True):
        numpy.testing.assert_allclose(on_host(gradient), on_host(plain_gradient), rtol=1e-4, atol=1e-4)


# (rows, cols, GPU of the stand-in, which gradients): a CTA that adds up rows, or partial rows, takes several blocks of
# columns.
IN_TURNS = {
    "partial rows of a warp": (900, 264, MANY_SMS, (True, True, True)),
    "partial rows of several warps": (300, 1536, MANY_SMS, (True, True, True)),
    "an odd length": (300, 1001, MANY_SMS, (False, True, True)),
    "columns alone": (40, 10_001, MANY_SMS, (False, False, True)),
    "streamed rows": (40, 8201, MANY_WITHOUT_CLUSTERS, (True, True, True)),
}


@needs_machine
@pytest.mark.parametrize(
    ("name", "dtype"), [*product(IN_TURNS, ["float32"]), *zip(IN_TURNS, cycle(["float64", "bfloat16"]))]
)
def test_sums_over_rows_by_few_multiprocessors(monkeypatch, name, dtype):
    rows, cols, device, mask = IN_TURNS[name]
    runs = cpu_cupy.play(monkeypatch, device)
    x, dy, weight, _ = (cpu_cupy.asarray(array) for array in inputs(numpy, rows, cols, dtype))
    _, mean, rstd = cunorm.layer_norm_forward(x, None, weight)
    runs.plans.clear()
    margin = device.sms - 2
    gradients = cunorm.layer_norm_backward(dy, x, mean, rstd, weight, output_mask=mask, sm_margin=margin)
    on_the_host = [None if gradient is None else gradient.get() for gradient in gradients]
    check_backward("layer_norm", on_the_host, dy.get(), x.get(), weight.get())
    assert any(getattr(step.spec, "several_blocks", False) for step in runs.plans[0].steps), runs.plans[0].describe()


@needs_machine
def test_sums_of_groups_by_few_multiprocessors(monkeypatch):
    """The gradients of shift and scale have the same bits whether a CTA takes one block of columns or several."""
    runs = cpu_cupy.play(monkeypatch, MANY_SMS)
    x = cpu_cupy.asarray(numpy.random.default_rng(0).standard_normal((6, 90, 264)).astype("float32"))
    vectors = cpu_cupy.asarray(numpy.ones((6, 1, 264), "float32"))
    _, saved = cunorm.layer_norm_modulate.forward(x, vectors, vectors)
    gradients = []
    for margin in (0, 24):
        with monkeypatch.context() as patch:
            patch.setattr(launches, "_ctas_of_group", lambda *_: 2)
            gradients.append(cunorm.layer_norm_modulate.backward(saved, x, sm_margin=margin).values())
    assert [step.spec.several_blocks for plan in runs.plans[1:] for step in plan.steps[1:]] == [False, True]
    for gradient, other_gradient in zip(*gradients, strict=True):
        assert same_bits(on_host(gradient), on_host(other_gradient))


@pytest.mark.slow
@needs_nvrtc
def test_kernels_in_turns_take_no_more_than_others():
    task = problem("backward", 10**5, 600_001, "bfloat16", sm_margin=100)
    for step in (*plan(task, KNOWN[90]).steps, *plan(replace(task, cols=5120), KNOWN[90]).steps):
        assert fault(step.spec, compile_for(step.spec, 90)) == ""


@needs_machine
def test_what_fuse_makes_takes_it(monkeypatch):
    runs = cpu_cupy.play(monkeypatch, MANY_SMS)
    op = cunorm.fuse("rms_norm", epilogue=lambda xhat, weight: xhat * weight)
    x = cpu_cupy.asarray(numpy.ones((300, 64), "float32"))
    y = op(x, weight=x[0], sm_margin=5)
    again, saved = op.forward(x, weight=x[0], sm_margin=6)
    assert same_bits(on_host(y), on_host(again))
    op.backward(saved, x, sm_margin=7)
    assert [plan.problem.sm_margin for plan in runs.plans] == [5, 6, 7]
    with pytest.raises(ValueError, match="got 'sm_margin': rename"):
        cunorm.fuse("rms_norm", epilogue=lambda xhat, sm_margin: xhat * sm_margin)
    with pytest.raises(ValueError, match="below the device's 40 multiprocessors; got 40"):
        op(x, weight=x[0], sm_margin=40)


def test_refusals(xp):
    x = xp.ones((3, 4), "float32")
    _, saved = cunorm.add_rms_norm.forward(x, x)
    op = cunorm.fuse("rms_norm")
    for error, message, margin in (
        (TypeError, "sm_margin must be an integer; got float", 1.0),
        (TypeError, "sm_margin must be an integer; got bool", True),
        (ValueError, "sm_margin must be 0 or more", -1),
    ):
        for call in (
            lambda margin=margin: cunorm.add_rms_norm(x, x, sm_margin=margin),
            lambda margin=margin: cunorm.add_rms_norm.backward(saved, x, x, sm_margin=margin),
            lambda margin=margin: cunorm.rms_norm_add_rms_norm(x, x, sm_margin=margin),
            lambda margin=margin: op(x, sm_margin=margin),
        ):
            with pytest.raises(error, match=re.escape(message)):
                call()


torch = pytest.importorskip("torch")


@needs_machine
def test_torch_refuses(stand_in):
    from cunorm.torch import AddRMSNorm, add_rms_norm

    x = torch.ones(5, 64)
    with pytest.raises(RuntimeError, match="below the device's 1 multiprocessors; got 1"):
        add_rms_norm(x, x, sm_margin=1)
    with pytest.raises(ValueError, match="sm_margin must be"):
        AddRMSNorm(64, sm_margin={"sideways": 1})


@needs_machine
def test_each_pass_of_torch_has_its_own(stand_in, monkeypatch):
    from cunorm.torch import AddRMSNorm, add_rms_norm, layer_norm_modulate, rms_norm_add_rms_norm
    from cunorm.torch.norm import dispatch, gpu

    monkeypatch.setattr(gpu, "properties_of", lambda *_: MANY_SMS)
    x = torch.ones(5, 64, requires_grad=True)
    margins = {"forward": 1, "backward": 2, "inference": 3}
    module = AddRMSNorm(64, sm_margin=margins)
    for call, backward_launches in (
        (lambda: add_rms_norm(x, x, sm_margin=margins)[0], 1),
        (lambda: layer_norm_modulate(x, x, x, sm_margin=margins), 1),
        (lambda: rms_norm_add_rms_norm(x, x, sm_margin=margins)[0], 2),
        (lambda: module(x, x)[0], 1),
    ):
        stand_in.plans.clear()
        call().sum().backward()
        with torch.no_grad():
            call()
        margins_of_launches = [plan.problem.sm_margin for plan in stand_in.plans]
        assert margins_of_launches == [1] + [2] * backward_launches + [3]
    # The operators get the margins of both passes.
    seen = []
    original = dispatch.operators.Norm.apply
    monkeypatch.setattr(
        dispatch.operators.Norm,
        "apply",
        lambda x, options, *operands: seen.append(options[-2:]) or original(x, options, *operands),
    )
    dispatch.by_operator(*arguments_of(x, margins))
    with torch.no_grad():
        dispatch.by_operator(*arguments_of(x, margins))
    assert seen == [(1, 2), (3, 2)]


def arguments_of(x, margins):
    from cunorm.operation import added
    from cunorm.torch.norm.calls import call_of

    call = call_of("test", added("rms_norm"), ("residual",), (), (), None, None, tuple(margins.values()))
    return call, (x, x), (), 1e-6, False


def test_jax_launches_fewer():
    jax = pytest.importorskip("jax")
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    from jax_arrays import calls as launches
    from jax_arrays import lowered

    import cunorm.jax

    x = jax.ShapeDtypeStruct((65536, 1024), "bfloat16")
    few, many = (
        launches(lowered(lambda x, margin=margin: cunorm.jax.add_rms_norm(x, x, sm_margin=margin), x))[0].grid[0]
        for margin in (100, 0)
    )
    assert few < many
