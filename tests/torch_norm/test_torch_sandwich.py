"""rms_norm_add_rms_norm of tensors: of the two calls, one after the other, with gradients that nobody adds up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

import cunorm  # noqa: E402
from cunorm.torch import rms_norm, rms_norm_add, rms_norm_add_rms_norm  # noqa: E402
from cunorm.torch.norm import dispatch  # noqa: E402

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())


def given(device, *shape, dtype=torch.float32):
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [random(*of, device=device, seed=i).to(dtype).requires_grad_() for i, of in enumerate(shapes)]


def two_calls(x, residual, weight, second_weight, *, eps=1e-3, **options):
    s = rms_norm_add(x, residual, weight, eps, **options)
    return rms_norm(s, x.shape[-1], second_weight, eps, **options), s


def mine(x, residual, weight, second_weight, *, eps=1e-3, **options):
    return rms_norm_add_rms_norm(x, residual, weight, second_weight, eps, **options)


def gradients(function, tensors, results=slice(None), **options):
    found = function(*tensors, **options)
    cotangents = [random(*one.shape, device=one.device, seed=7 + i).to(one.dtype) for i, one in enumerate(found)]
    # Of what no result depends on, one function says None and another zeros.
    return found, torch.autograd.grad(found[results], tensors, cotangents[results], materialize_grads=True)


@on_devices
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_values_and_gradients_are_those_of_the_two_calls(device, zero_centered_gamma):
    tensors = given(device, 2, 3, 40)
    options = {"zero_centered_gamma": zero_centered_gamma}
    for results in (slice(None), slice(1), slice(1, 2)):
        torch.testing.assert_close(
            gradients(mine, tensors, results, **options), gradients(two_calls, tensors, results, **options)
        )
    of_core = cunorm.rms_norm_add_rms_norm(*tensors, eps=1e-3, **options)
    torch.testing.assert_close(of_core, mine(*tensors, **options))
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, tensors, **options), gradients(mine, tensors, **options))


@on_devices
def test_derivatives(device):
    tensors = [one.detach().double().requires_grad_() for one in given(device, 3, 5)]
    torch.autograd.gradcheck(mine, tensors)
    torch.autograd.gradgradcheck(mine, tensors)


@needs_machine
@pytest.mark.parametrize(
    ("cols", "launches"),
    [(129, [["x", "residual", "y", "s"]]), (17000, [["x", "residual", "y"], ["x", "y"]])],
    ids=["a CTA holds a row", "a cluster"],
)
def test_one_launch_forward_or_two_and_two_backward(stand_in, cols, launches):
    tensors = given("cpu", 3, cols)
    (y, s), found = gradients(mine, tensors)
    directions = [plan.problem.direction for plan in stand_in.plans]
    assert directions == ["forward"] * len(launches) + ["backward"] * 2
    reads = [[one.name for one in plan.problem.operands if one.kind == "full"] for plan in stand_in.plans]
    assert reads == [*launches, ["dy", "ds", "s", "dx"], ["dy", "x", "dx"]]
    expected, of_calls = gradients(
        lambda *ones: two_calls(*ones), [one.detach().double().requires_grad_() for one in tensors]
    )
    torch.testing.assert_close((y, s), tuple(one.float() for one in expected))
    torch.testing.assert_close(found, tuple(one.float() for one in of_calls))


@needs_machine
@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone(stand_in, wanted):
    tensors = [one.detach() for one in given("cpu", 4, 64)]
    _, of_all = gradients(mine, [one.clone().requires_grad_() for one in tensors])
    tensors[wanted].requires_grad_()
    found = mine(*tensors)
    cotangents = [random(*one.shape, seed=7 + i) for i, one in enumerate(found)]
    (alone,) = torch.autograd.grad(found, [tensors[wanted]], cotangents)
    torch.testing.assert_close(alone, of_all[wanted])


@needs_machine
def test_second_derivatives_of_launches(stand_in, monkeypatch):
    monkeypatch.setattr(dispatch, "launchable", lambda _: not torch.is_grad_enabled())
    tensors = given("cpu", 3, 33)

    def twice(function):
        found = function(*tensors)
        first = torch.autograd.grad(found, tensors, [one.detach() for one in found], create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), tensors)

    found = twice(mine)
    monkeypatch.setattr(dispatch, "at_once", lambda _: False)
    torch.testing.assert_close(found, twice(two_calls), rtol=1e-4, atol=1e-4)


def test_dtypes_axes_and_what_may_be_left_out():
    x, residual, *_ = (one.detach() for one in given("cpu", 3, 2, 4))
    y, s = rms_norm_add_rms_norm(x.half(), residual, eps=1e-3, s_dtype=torch.float32)
    assert (y.dtype, s.dtype, y.shape, s.shape) == (torch.float16, torch.float32, x.shape, x.shape)
    flat = rms_norm_add_rms_norm(x.half().reshape(6, 4), residual.reshape(6, 4), eps=1e-3, s_dtype=torch.float32)
    torch.testing.assert_close((y.reshape(6, 4), s.reshape(6, 4)), flat)


def test_errors_are_those_of_torch():
    x = torch.ones(3, 4)
    for error, message, call in (
        (TypeError, "residual must be a torch.Tensor", lambda: rms_norm_add_rms_norm(x, None)),
        (RuntimeError, "residual must have the shape of x", lambda: rms_norm_add_rms_norm(x, x[0])),
        (RuntimeError, "second_weight must have the shape", lambda: rms_norm_add_rms_norm(x, x, x[0], x)),
        (ValueError, "weight", lambda: rms_norm_add_rms_norm(x, x, x[0], zero_centered_gamma=True)),
    ):
        with pytest.raises(error, match=message):
            call()
