"""Fused operations on torch tensors: launches on the stand-in and on a GPU, and torch's own operators on the CPU."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

import cpu_device  # noqa: E402
from fusion_cases import CASES, EPS, Case, close, expected, make  # noqa: E402
from torch_fused import example, leaves  # noqa: E402
from torch_tensors import array, on_devices, random, same  # noqa: E402

import cunorm  # noqa: E402
from cunorm.torch import AddLayerNorm, add_layer_norm, add_rms_norm, rms_norm_add  # noqa: E402
from cunorm.torch.norm import dispatch  # noqa: E402

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())


def check(case: Case, shape: tuple[int, ...], dtype: str, device: str) -> None:
    """Assert that results and gradients, by autograd and by `forward` and `backward`, are those of float64."""
    op = case.op
    # Autograd wants a gradient in the dtype of the result.
    made = make(case, shape, dtype, {"dy": op.dtype or dtype, "ds": op.s_dtype or dtype})
    arithmetic = "float64" if (op.s_dtype or made.x.dtype.name) == "float64" else "float32"
    exact, exact_gradients = expected(op, made)
    x, operands, gradients = leaves(made, device)
    results = op(x, eps=EPS, **operands)
    results = results if isinstance(results, tuple) else (results,)
    for name, result in zip(op.operation.returns, results, strict=True):
        assert result.dtype is getattr(torch, (op.dtype if name == "y" else op.s_dtype) or made.x.dtype.name)
        close(name, array(result), exact[name], arithmetic)
    wanting = {name: value for name, value in {"x": x, **operands}.items() if isinstance(value, torch.Tensor)}
    by_autograd = torch.autograd.grad(results, list(wanting.values()), gradients)
    for (name, leaf), gradient in zip(wanting.items(), by_autograd, strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
        close(f"d{name}", array(gradient), exact_gradients[name].reshape(gradient.shape), arithmetic)
    _, saved = op.forward(x.detach(), eps=EPS, **{k: v.detach() if k in wanting else v for k, v in operands.items()})
    for name, gradient in op.backward(saved, *gradients).items():
        close(f"d{name}", array(gradient), exact_gradients[name].reshape(gradient.shape), arithmetic)


@on_devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_float64(device, name, dtype):
    check(CASES[name], (2, 3, 129), dtype, device)


@needs_machine
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("add_layer_norm", (13, 33), "float16"),
        ("add_rms_norm", (3, 1001), "bfloat16"),
        ("gate", (2, 3, 129), "float32"),
        ("modulated", (5, 64), "float64"),
        ("both", (4, 40), "float32"),
        ("stream", (3, 1000), "bfloat16"),
        ("norm alone", (40, 7), "float32"),
        ("samples", (2, 3, 129), "float32"),
        ("heads and samples", (2, 3, 40), "bfloat16"),
        ("numbers of rows", (2, 3, 40), "float32"),
        ("numbers of rows, s made again", (5, 129), "bfloat16"),
    ],
)
def test_launches_on_the_stand_in(stand_in, name, shape, dtype):
    check(CASES[name], shape, dtype, "cpu")
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward", "backward"] * 2


@needs_machine
def test_a_number_for_each_row_and_a_tensor_without_axes(stand_in):
    """Each is broadcast over rows, so its gradient is a sum over them."""
    op = cunorm.fuse("layer_norm", epilogue=lambda xhat, gate, factor: xhat * gate * factor)
    x, gate, factor = random(2, 3, 40), random(3, 1), torch.tensor(0.75, dtype=torch.float64)
    tensors = [leaf.requires_grad_() for leaf in (x, gate, factor)]
    y = op(x, gate=gate, factor=factor)
    expected_y = torch.nn.functional.layer_norm(x, (40,)) * gate * factor
    dy = random(2, 3, 40, seed=1)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(torch.autograd.grad(y, tensors, dy), torch.autograd.grad(expected_y, tensors, dy))
    assert len(stand_in.plans) == 2


@needs_machine
def test_what_is_kept_and_allocated(stand_in):
    """add_rms_norm keeps s, rstd and weight, and one gradient serves x and residual."""
    x, residual = (random(5, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    weight = torch.ones(64, requires_grad=True)
    y, s = add_rms_norm(x, residual, weight)
    full, statistics = (5, 64), (1, 5)
    assert stand_in.allocated == [full, full, statistics]
    kept = [tensor.data_ptr() for tensor in y.grad_fn.saved_tensors]
    assert {s.data_ptr(), weight.data_ptr()} < set(kept)
    assert len(kept) == 3
    stand_in.allocated.clear()
    ones = (torch.ones_like(y), torch.ones_like(s))
    dx, dresidual, _ = torch.autograd.grad((y, s), (x, residual, weight), ones)
    assert dx.data_ptr() == dresidual.data_ptr()
    assert [shape for shape in stand_in.allocated if len(shape) == 2] == [full]
    y, s = add_rms_norm(x, residual, weight)
    (y.sum() + s.sum()).backward()
    assert x.grad.data_ptr() != residual.grad.data_ptr(), "leaves never share memory"
    assert torch.equal(x.grad, residual.grad)


@needs_machine
def test_the_gradient_of_what_is_added_to_a_norm_is_that_of_y(stand_in):
    """Nothing is written for the sum's gradient, and for it alone nothing is launched."""
    x, residual = (random(5, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    y, dy = rms_norm_add(x, residual), random(5, 64, dtype=torch.float32, seed=2)
    stand_in.allocated.clear()
    _, dresidual = torch.autograd.grad(y, (x, residual), dy, retain_graph=True)
    assert dresidual.data_ptr() == dy.data_ptr()
    assert [shape for shape in stand_in.allocated if len(shape) == 2] == [(5, 64)]
    launches = len(stand_in.plans)
    y = rms_norm_add(x.detach(), residual)
    (dresidual,) = torch.autograd.grad(y, residual, dy)
    assert torch.equal(dresidual, dy)
    assert len(stand_in.plans) == launches + 1, "forward"
    wide = residual.detach().double().requires_grad_()
    (dwide,) = torch.autograd.grad(rms_norm_add(x, wide), wide, dy)
    assert dwide.dtype == torch.float64


@pytest.mark.slow
@needs_machine
@pytest.mark.parametrize("name", ["add_layer_norm", "gate", "samples", "numbers of rows"])
def test_second_derivatives_of_launches(stand_in, monkeypatch, name):
    """A backward pass that is differentiated goes by torch's own operators, on what the forward pass kept."""
    monkeypatch.setattr(dispatch, "launchable", lambda _: not torch.is_grad_enabled())
    function, tensors = example(name, (2, 2, 3))
    assert torch.autograd.gradgradcheck(function, tensors)


@needs_machine
@pytest.mark.parametrize("name", ["add_layer_norm", "gate", "samples"])
def test_a_backward_pass_that_somebody_listens_to(stand_in, monkeypatch, name):
    """The pass goes by the operator then, on what the forward pass kept."""
    function, tensors = example(name, (2, 2, 8))
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    cotangents = [random(*result.shape, seed=seed) for seed, result in enumerate(results)]
    launched = torch.autograd.grad(results, tensors, cotangents, retain_graph=True)
    monkeypatch.setattr(dispatch, "launchable", lambda _: False)
    torch.testing.assert_close(torch.autograd.grad(results, tensors, cotangents), launched)


@needs_machine
@pytest.mark.parametrize("given", ["y", "s"])
def test_a_result_on_which_nothing_depends(stand_in, given):
    x, residual = (random(5, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    weight = random(64, dtype=torch.float32).requires_grad_()
    results = dict(zip("ys", add_rms_norm(x, residual, weight, 1e-5), strict=True))
    total = (x + residual).double()
    y = torch.nn.functional.rms_norm(total, (64,), weight.double(), 1e-5)
    expected_loss = {"y": y, "s": total}[given].pow(3).sum()
    gradients = torch.autograd.grad(results[given].pow(3).sum(), (x, residual, weight))
    expected_gradients = torch.autograd.grad(expected_loss, (x, residual, weight), materialize_grads=True)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


@on_devices
@pytest.mark.parametrize("name", CASES)
def test_what_a_call_returns_is_contiguous_however_the_operands_lie(device, name):
    made = make(CASES[name], (3, 5, 7), "float32", {"dy": CASES[name].op.dtype or "float32"})
    x, operands, gradients = leaves(made, device)

    def moved(operand: Any) -> Any:
        """Return a tensor with its last axis first in memory, and anything else as it is."""
        if not isinstance(operand, torch.Tensor) or operand.dim() < 2:
            return operand
        return operand.detach().movedim(-1, 0).contiguous().movedim(0, -1)

    op, given = CASES[name].op, {key: moved(operand) for key, operand in operands.items()}
    called = op(moved(x), **given)
    returned, saved = op.forward(moved(x), **given)
    results = [*(called if isinstance(called, tuple) else (called,))]
    results += returned if isinstance(returned, tuple) else (returned,)
    results += [statistic for statistic in saved.statistics.values() if statistic is not None]
    results += op.backward(saved, *map(moved, gradients)).values()
    assert all(result.is_contiguous() for result in results)


@needs_machine
def test_views_of_two_strides_are_not_copied(stand_in, lines):
    """The rows lie apart as the queries of a packed QKV do."""
    qkv = random(6, 3 * 4, 32, dtype=torch.float32)
    weight = random(32, dtype=torch.float32)
    op = cunorm.fuse("rms_norm", epilogue=lambda xhat, z, weight: xhat * weight + z)
    q, z = qkv[:, :4].requires_grad_(), qkv[:, 4:8].detach()
    y = op(q, z=z, weight=weight)
    (dq,) = torch.autograd.grad(y, q, qkv[:, 8:])
    assert not [line for line in lines() if "copied" in line]
    assert {plan.problem.by_name["x"].inner for plan in stand_in.plans} == {4}
    whole = op(q.contiguous().detach(), z=z.contiguous(), weight=weight)
    assert same(y.detach(), whole)
    assert dq.shape == q.shape


@needs_machine
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("join", ["", "gate_add_"])
def test_conditions_are_read_where_they_lie(stand_in, lines, join, norm):
    """The vectors are parts of one product, and each pass is one plan."""
    x, residual = (random(2, 5, 64, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    product = random(2, 6 * 64, dtype=torch.float32, seed=2).requires_grad_()
    leaves = [x, residual, product] if join else [x, product]
    results = []
    for dtype in (torch.float64, torch.float32):
        gate, scale, shift = (part[:, None] for part in product.to(dtype).chunk(6, dim=1)[2:5])
        summands = [x.to(dtype), residual.to(dtype), gate] if join else [x.to(dtype)]
        if dtype is torch.float32:
            outputs = getattr(cunorm.torch, f"{join}{norm}_modulate")(*summands, scale, shift, eps=1e-5)
            outputs = [*outputs] if join else [outputs]
        else:
            s = summands[1] + gate * summands[0] if join else summands[0]
            y = getattr(torch.nn.functional, norm)(s, (64,), eps=1e-5) * (1 + scale) + shift
            outputs = [y, s] if join else [y]
        results.append([*outputs, *torch.autograd.grad(sum(output.square().sum() for output in outputs), leaves)])
    for exact, result in zip(*results, strict=True):
        torch.testing.assert_close(result, exact.to(result.dtype), rtol=1e-4, atol=1e-4)
    assert [plan.problem.direction for plan in stand_in.plans] == ["forward", "backward"]
    assert not [line for line in lines() if "copied" in line or "expanded" in line]


# Errors.


def test_errors_of_objects():
    op, x = cunorm.fuse("rms_norm", epilogue=lambda xhat, weight: xhat * weight), random(3, 8)
    dropped = partial(cunorm.add_rms_norm, dropout_p=0.5)
    for error, message, call in (
        (TypeError, "'weight' is missing", lambda: op(x)),
        (TypeError, "got 'bias' too", lambda: op(x, weight=x[0], bias=x[0])),
        (ValueError, "weight must", lambda: op(x, weight=random(7))),
        (TypeError, "weight must be a torch.Tensor", lambda: op(x, weight=numpy.ones(8))),
        (TypeError, "weight must have dtype", lambda: op(x, weight=torch.ones(8, dtype=torch.int32))),
        (TypeError, "strided tensor", lambda: op(x, weight=torch.ones(8).to_sparse())),
        (ValueError, "eps must be finite", lambda: op(x, weight=x[0], eps=-1.0)),
        (ValueError, "last axis to normalise", lambda: op(x[:, :0], weight=x[0, :0])),
        (TypeError, "pass it as an operand", lambda: cunorm.fuse("rms_norm", epilogue=lambda xhat: xhat * x[0])),
        (TypeError, "residual must be a torch.Tensor, as x is; got float", lambda: cunorm.add_rms_norm(x, 1.0)),
        (TypeError, "weight must be a torch.Tensor, as x is; got int", lambda: cunorm.add_rms_norm(x, x, 2)),
        (TypeError, "seed must be a torch.Tensor, as x is; got int", lambda: dropped(x, x, seed=7)),
        (TypeError, "dy must be a torch.Tensor", lambda: op.backward(op.forward(x, weight=x[0])[1], numpy.ones(8))),
        (ValueError, "dy must have the shape of x", lambda: op.backward(op.forward(x, weight=x[0])[1], x[:2])),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_errors_of_functions_are_those_of_torch():
    x, weight = random(3, 8), random(8)
    for error, message, call in (
        (TypeError, "residual must be a torch.Tensor; got NoneType", lambda: add_rms_norm(x, None)),
        (TypeError, "x must be a torch.Tensor", lambda: add_rms_norm([1.0], x)),
        (RuntimeError, "residual must have the shape of x", lambda: add_rms_norm(x, x[0])),
        (RuntimeError, "normalized_shape must be the last axes", lambda: AddLayerNorm(7)(x, x)),
        (RuntimeError, "weight must have the shape of the last axis", lambda: add_layer_norm(x, x, weight[1:])),
        (NotImplementedError, "residual must have dtype", lambda: add_layer_norm(x, x.int())),
        (TypeError, "dtype must be one of", lambda: add_layer_norm(x, x, s_dtype=torch.int32)),
        (ValueError, "needs a weight", lambda: add_rms_norm(x, x, zero_centered_gamma=True)),
        (TypeError, "eps must be a real number", lambda: add_rms_norm(x, x, eps="1")),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


# On a GPU.


def on_gpu(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Return x, residual and weight, which want gradients, and the gradients of y and s."""
    full = [random(rows, cols, device="cuda", dtype=dtype, seed=seed) for seed in range(4)]
    weight = random(cols, device="cuda", dtype=dtype)
    return [*(leaf.requires_grad_() for leaf in (*full[:2], weight)), *full[2:]]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1024), (3, 16384), (5, 65536), (300, 1001)], ids=str)
def test_results_have_the_bits_of_the_two_calls_and_gradients_agree(shape):
    x, residual, weight, dy, ds = on_gpu(*shape)
    y, s = add_rms_norm(x, residual, weight, 1e-5)
    dx, dresidual, dweight = torch.autograd.grad((y, s), (x, residual, weight), (dy, ds))
    total = (x + residual).detach().requires_grad_()
    apart = cunorm.torch.rms_norm(total, shape[1], weight, 1e-5)
    of_norm, expected_dweight = torch.autograd.grad(apart, (total, weight), dy)
    assert same(y.detach(), apart.detach())
    assert same(dx, dresidual)
    torch.testing.assert_close(dweight, expected_dweight)
    # The fused operation rounds once, after the sum.
    torch.testing.assert_close(dx, of_norm + ds, rtol=1e-2, atol=4e-2)


@pytest.mark.gpu
def test_a_captured_training_step_replays():
    x, residual, weight, dy, ds = on_gpu(64, 1024)

    def step():
        return torch.autograd.grad(add_rms_norm(x, residual, weight), (x, residual, weight), (dy, ds))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(random(64, 1024, device="cuda", seed=seed + 7))
        graph.replay()
        assert all(same(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_the_current_stream_of_torch():
    import cupy
    from busy import spin

    x, residual, weight, *_ = on_gpu(64, 1000)
    expected_y, _ = add_rms_norm(x, residual, weight)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with cupy.cuda.ExternalStream(stream.cuda_stream):
            spin(50)
        late.copy_(x.detach())
        y, _ = add_rms_norm(late, residual, weight)
    stream.synchronize()
    assert same(y.detach(), expected_y.detach())


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_results():
    x, residual, weight, dy, ds = on_gpu(4096, 4096)
    add_rms_norm(x, residual, weight)  # the first call makes allocations that are kept
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y, s = add_rms_norm(x, residual, weight)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * x.nbytes
    middle = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad((y, s), (x, residual, weight), (dy, ds))
    assert torch.cuda.max_memory_allocated() - middle < 1.2 * x.nbytes
