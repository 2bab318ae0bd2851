"""rms_norm_add_rms_norm of tensors has the values and gradients of the two calls one after the other."""

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
    return [random(*size, device=device, seed=i).to(dtype).requires_grad_() for i, size in enumerate(shapes)]


def two_calls(x, residual, weight, second_weight, *, eps=1e-3, **options):
    s = rms_norm_add(x, residual, weight, eps, **options)
    return rms_norm(s, x.shape[-1], second_weight, eps, **options), s


def mine(x, residual, weight, second_weight, *, eps=1e-3, **options):
    return rms_norm_add_rms_norm(x, residual, weight, second_weight, eps, **options)


def cotangents_of(results):
    return [
        random(*result.shape, device=result.device, seed=7 + i).to(result.dtype) for i, result in enumerate(results)
    ]


def gradients(function, tensors, chosen=slice(None), **options):
    """Return the results, and the gradients by those of them that are chosen."""
    results = function(*tensors, **options)
    # For a tensor on which no result depends, one function has the gradient None and another has zeros.
    chosen_cotangents = cotangents_of(results)[chosen]
    return results, torch.autograd.grad(results[chosen], tensors, chosen_cotangents, materialize_grads=True)


@on_devices
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_values_and_gradients_are_those_of_the_two_calls(device, zero_centered_gamma):
    tensors = given(device, 2, 3, 40)
    options = {"zero_centered_gamma": zero_centered_gamma}
    for chosen in (slice(None), slice(1), slice(1, 2)):
        torch.testing.assert_close(
            gradients(mine, tensors, chosen, **options), gradients(two_calls, tensors, chosen, **options)
        )
    of_core = cunorm.rms_norm_add_rms_norm(*tensors, eps=1e-3, **options)
    torch.testing.assert_close(of_core, mine(*tensors, **options))
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, tensors, **options), gradients(mine, tensors, **options))


@on_devices
def test_derivatives(device):
    tensors = [tensor.detach().double().requires_grad_() for tensor in given(device, 3, 5)]
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
    results, leaf_gradients = gradients(mine, tensors)
    directions = [plan.problem.direction for plan in stand_in.plans]
    assert directions == ["forward"] * len(launches) + ["backward"] * 2
    full = [[operand.name for operand in plan.problem.operands if operand.kind == "full"] for plan in stand_in.plans]
    assert full == [*launches, ["dy", "ds", "s", "dx"], ["dy", "x", "dx"]]
    exact, exact_gradients = gradients(two_calls, [tensor.detach().double().requires_grad_() for tensor in tensors])
    torch.testing.assert_close(results, tuple(result.float() for result in exact))
    torch.testing.assert_close(leaf_gradients, tuple(gradient.float() for gradient in exact_gradients))


@needs_machine
@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone(stand_in, wanted):
    tensors = [tensor.detach() for tensor in given("cpu", 4, 64)]
    _, every = gradients(mine, [tensor.clone().requires_grad_() for tensor in tensors])
    tensors[wanted].requires_grad_()
    results = mine(*tensors)
    (alone,) = torch.autograd.grad(results, [tensors[wanted]], cotangents_of(results))
    torch.testing.assert_close(alone, every[wanted])


@needs_machine
def test_second_derivatives_of_launches(stand_in, monkeypatch):
    monkeypatch.setattr(dispatch, "launchable", lambda _: not torch.is_grad_enabled())
    tensors = given("cpu", 3, 33)

    def twice(function):
        results = function(*tensors)
        first = torch.autograd.grad(results, tensors, [result.detach() for result in results], create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)

    second = twice(mine)
    monkeypatch.setattr(dispatch, "at_once", lambda _: False)
    torch.testing.assert_close(second, twice(two_calls), rtol=1e-4, atol=1e-4)


def test_dtypes_axes_and_what_may_be_left_out():
    x, residual, *_ = (tensor.detach() for tensor in given("cpu", 3, 2, 4))
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
