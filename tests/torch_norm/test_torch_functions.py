"""cunorm.torch.layer_norm and rms_norm: values, gradients and what torch's own functions promise."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import inputs, misplaced, same_bits
from cases import adapter_cases
from functions import OPS, bias_of
from reference import EPS, check_backward, check_forward

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch_tensors import array, on_devices, random, same, tensor  # noqa: E402

import cunorm  # noqa: E402
from cunorm.operation import name_of  # noqa: E402
from cunorm.torch import layer_norm, rms_norm  # noqa: E402
from cunorm.torch.norm import launching, operators  # noqa: E402
from cunorm.torch.norm.functional import AUTOCAST_TO_FLOAT32, norm  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COLS = 96


def call(op, x, weight=None, bias=None, eps=None, zero_centered_gamma=False, dtype=None, sm_margin=0):
    shape = x.shape[-1:] if weight is None else weight.shape
    eps = EPS[op] if eps is None else eps
    return norm(name_of(op, zero_centered_gamma), x, shape, weight, bias_of(op, bias), eps, dtype, sm_margin)


def torch_call(op, x, weight=None, bias=None):
    if op == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS[op])
    return F.rms_norm(x, x.shape[-1:], weight, EPS[op])


def close(a, b, dtype):
    """Hold results to one rounding of `dtype` and what a few sums in float32 lose."""
    return torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("xp", "rows", "cols", "dtype"), adapter_cases(), indirect=["xp"])
def test_every_shape(xp, op, rows, cols, dtype):
    """Every tier is right through autograd, and a call without gradient gives the same bits."""
    x, dy, weight, bias = inputs(xp, rows, cols, dtype)
    tensors = [tensor(a) for a in (x, weight, bias)]
    without = call(op, *tensors)
    for t in tensors:
        t.requires_grad_()
    y = call(op, *tensors)
    wanted = tensors if op == "layer_norm" else tensors[:2]
    gradients = torch.autograd.grad(y, wanted, tensor(dy))
    assert same(y.detach(), without)
    check_forward(op, (array(y), None, None), x, weight, bias_of(op, bias))
    gradients = [array(g) for g in gradients]
    check_backward(op, [*gradients, *[None] * (3 - len(gradients))], dy, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [7, 1000, 8191, 65537])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_the_bits_are_those_of_the_core(op, cols, zero_centered_gamma):
    import cupy

    x, dy, weight, bias = inputs(cupy, 9, cols, "bfloat16", weight="float32")
    tensors = [tensor(a).requires_grad_() for a in (x, weight, bias)]
    y = call(op, *tensors, zero_centered_gamma=zero_centered_gamma)
    gradients = torch.autograd.grad(y, tensors[: 3 if op == "layer_norm" else 2], tensor(dy))
    option = {"zero_centered_gamma": zero_centered_gamma}
    if op == "layer_norm":
        y_core, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias, **option)
        core = cunorm.layer_norm_backward(dy, x, mean, rstd, weight, **option)
    else:
        y_core, rstd = cunorm.rms_norm_forward(x, None, weight, **option)
        core = cunorm.rms_norm_backward(dy, x, rstd, weight, **option)
    assert all(same_bits(array(a), b) for a, b in zip((y, *gradients), (y_core, *core), strict=True))


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [*itertools.product(DTYPES, DTYPES)])
def test_mixed_dtypes(device, op, dtype, weight_dtype):
    x, dy, weight, bias = (random(*s, device=device) for s in ((6, COLS), (6, COLS), (COLS,), (COLS,)))
    x, dy = x.to(dtype), dy.to(dtype)
    weight, bias = weight.to(weight_dtype), bias.to(DTYPES[DTYPES.index(weight_dtype) - 1])
    tensors = [t.requires_grad_() for t in (x, weight, bias)[: 3 if op == "layer_norm" else 2]]
    y = call(op, *tensors)
    gradients = torch.autograd.grad(y, tensors, dy)
    assert y.dtype is dtype
    assert [g.dtype for g in gradients] == [t.dtype for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y_wide = torch_call(op, *wide)
    close(y.double(), y_wide, dtype)
    for gradient, expected in zip(gradients, torch.autograd.grad(y_wide, wide, dy.double()), strict=True):
        # The gradient of a bias is rounded to weight's dtype first (README, Limits).
        coarsest = max((t.dtype for t in (gradient, weight, x)), key=lambda d: torch.finfo(d).eps)
        torch.testing.assert_close(
            gradient.double(), expected, rtol=2 * torch.finfo(coarsest).eps, atol=64 * torch.finfo(coarsest).eps
        )


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wants", [*itertools.product([True, False], repeat=3)], ids=str)
def test_only_what_needs_a_gradient_gets_one(device, op, wants, monkeypatch):
    x, weight, bias = (random(*s, device=device) for s in ((6, COLS), (COLS,), (COLS,)))
    tensors = [t.requires_grad_(want) for t, want in zip((x, weight, bias), wants, strict=True)]
    if op == "rms_norm":
        wants = (*wants[:2], False)
    if device == "cuda":  # the launches of nodes.cpp could not be observed
        from cunorm.torch.norm import nodes, repeats

        monkeypatch.setattr(nodes, "module", lambda: None)
        monkeypatch.setattr(repeats, "_calls", {})
    y = call(op, *tensors)
    assert y.requires_grad == any(wants)
    if not any(wants):
        return
    if device == "cuda":
        written = []
        backward_by = launching.backward_by
        monkeypatch.setattr(launching, "backward_by", lambda *a: written.append(a[0].wanted) or backward_by(*a))
    wanted = [t for t, want in zip(tensors, wants, strict=True) if want]
    gradients = torch.autograd.grad(y.square().sum(), wanted)
    expected = torch.autograd.grad(torch_call(op, *tensors[: 3 if op == "layer_norm" else 2]).square().sum(), wanted)
    torch.testing.assert_close(gradients, expected)
    if device == "cuda":
        assert written == [tuple(name for name, want in zip(("x", "weight", "bias"), wants, strict=True) if want)]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_saved_for_backward_are_x_weight_and_two_numbers_a_row(op):
    x, weight, bias = (random(*s, device="cuda").requires_grad_() for s in ((6, COLS), (COLS,), (COLS,)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call(op, x, weight, bias)
    per_row = 2 if op == "layer_norm" else 1
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), weight.numel(), per_row * 6])
    assert {t.data_ptr() for t in saved} >= {x.data_ptr(), weight.data_ptr()}
    assert y.data_ptr() not in {t.data_ptr() for t in saved}


def layouts(device):
    base = random(4, 6, 2 * COLS, device=device)
    yield "rows of a wider matrix", base[..., :COLS]
    yield "every second column", base[..., ::2]
    yield "transposed", random(COLS, 6, 4, device=device).permute(2, 1, 0)
    yield "rows exchanged", random(6, 4, COLS, device=device).transpose(0, 1)
    yield "expanded rows", base[:1, :, :COLS].expand(4, 6, COLS)
    yield "expanded columns", base[..., :1].expand(4, 6, COLS)
    yield "one element too far", random(4 * 6 * COLS + 1, device=device)[1:].view(4, 6, COLS)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("of", ["x", "dy"])
def test_any_layout(device, op, number, of):
    name, strided = list(layouts(device))[number]
    plain = random(4, 6, COLS, device=device, seed=5)
    x, dy = (strided, plain) if of == "x" else (plain, strided)
    weight, bias = random(COLS, device=device), random(COLS, device=device, seed=1)
    # A leaf with memory of its own would be contiguous, so x itself gets a gradient that goes on to a leaf.
    results = []
    for function in (call, torch_call):
        leaf = torch.zeros_like(x, memory_format=torch.contiguous_format).requires_grad_()
        y = function(op, leaf + x if of == "dy" else _view_with_gradient(x, leaf), weight, bias_of(op, bias))
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    torch.testing.assert_close(*results, msg=lambda m: f"{name}: {m}")


def _view_with_gradient(x, leaf):
    """Return x itself, strides and all, with a gradient that `leaf` gets."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.contiguous()

    return Same.apply(leaf)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_strided_weight(device, op):
    x, weight = random(5, COLS, device=device), random(2 * COLS, device=device)[::2]
    torch.testing.assert_close(call(op, x, weight, weight), torch_call(op, x, weight, bias_of(op, weight)))


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, COLS), (3, 0, COLS), (2, 0, 4, COLS)])
def test_empty(device, op, shape):
    x, weight = random(*shape, device=device).requires_grad_(), random(COLS, device=device).requires_grad_()
    y = call(op, x, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == shape
    assert dweight.tolist() == [0.0] * COLS


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_several_normalised_axes(device, op):
    x, weight = random(5, 3, 4, 8, device=device), random(4, 8, device=device)
    y = norm(op, x, [4, 8], weight, None, 1e-5, None, 0)
    flat = torch_call(op, x.flatten(2), weight.flatten()) if op == "layer_norm" else None
    if flat is None:
        flat = F.rms_norm(x.flatten(2), (32,), weight.flatten(), 1e-5)
    torch.testing.assert_close(y.flatten(2), flat)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_the_machine_epsilon_of_the_arithmetic(device, dtype):
    x = (random(4, COLS, device=device) * (1e-8 if dtype is torch.float64 else 1e-4)).to(dtype)
    close(rms_norm(x, (COLS,)).double(), F.rms_norm(x, (COLS,)).double(), dtype)
    arithmetic = torch.float64 if dtype is torch.float64 else torch.float32
    eps = torch.finfo(arithmetic).eps
    assert same(rms_norm(x, (COLS,)), rms_norm(x, (COLS,), eps=eps))
    assert not torch.allclose(rms_norm(x, (COLS,)), rms_norm(x, (COLS,), eps=2 * eps), rtol=1e-3)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_autocast_as_torch(device, op, dtype, cast):
    """On CUDA torch computes layer_norm in float32, some versions rms_norm too; on the CPU neither."""
    x, weight = random(4, COLS, device=device, dtype=dtype), random(COLS, device=device, dtype=torch.float32)
    x.requires_grad_()
    weight = weight.to(dtype)
    with torch.autocast(device, cast):
        y, expected = call(op, x, weight), torch_call(op, x, weight)
        asked = call(op, x, weight, dtype=torch.float16)
    assert y.dtype == expected.dtype
    assert asked.dtype is torch.float16
    assert torch.autograd.grad(y.sum(), x)[0].dtype is dtype
    if device == "cuda" and dtype is cast:
        assert (y.dtype is torch.float32) == AUTOCAST_TO_FLOAT32[op]
    close(y.double(), expected.double(), expected.dtype)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_dtype_of_y(device, op):
    x = random(4, COLS, device=device, dtype=torch.bfloat16)
    y = call(op, x, dtype=torch.float32)
    assert y.dtype is torch.float32
    close(y.double(), torch_call(op, x.double()), torch.float32)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoint(device, op, selective):
    x, weight = (random(*s, device=device).requires_grad_() for s in ((6, COLS), (COLS,)))

    def block(x):
        return call(op, x, weight).tanh() * x

    kept = [operators.fused_norm_forward, torch.ops.aten.tanh.default]
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(kept)} if selective else {}
    y = checkpoint(block, x, use_reentrant=False, **options)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), (x, weight)), torch.autograd.grad(block(x).sum(), (x, weight))
    )


@on_devices
def test_inference_mode_and_no_grad(device):
    x = random(4, COLS, device=device)
    weight = torch.nn.Parameter(random(COLS, device=device))
    expected = layer_norm(x, (COLS,), weight).detach()
    with torch.inference_mode():
        y = layer_norm(x, (COLS,), weight)
        assert y.is_inference()
        assert same(layer_norm(x.clone(), (COLS,), weight).clone(), expected)
    with torch.no_grad():
        y = layer_norm(x, (COLS,), weight)
    assert not y.requires_grad
    assert not y.is_inference()


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_forward_mode_derivative(device, op):
    x, tangent, weight = (
        random(3, COLS, device=device),
        random(3, COLS, device=device, seed=1),
        random(COLS, device=device),
    )
    pairs = [torch.func.jvp(lambda x, f=f: f(op, x, weight), (x,), (tangent,)) for f in (call, torch_call)]
    torch.testing.assert_close(*pairs)
    with torch.autograd.forward_ad.dual_level():
        y = call(op, torch.autograd.forward_ad.make_dual(x, tangent), weight)
        torch.testing.assert_close(tuple(torch.autograd.forward_ad.unpack_dual(y)), pairs[1])


@on_devices
def test_lazy_negative(device):
    """x is a view whose numbers are the negatives of those in memory."""
    x = torch._neg_view(random(3, COLS, device=device))
    torch.testing.assert_close(layer_norm(x, (COLS,)), F.layer_norm(x, (COLS,)))


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("op", OPS)
def test_second_derivative_of_a_call(device, op):
    tensors = [random(*s, device=device).requires_grad_() for s in ((3, 8), (8,), (8,))]
    tensors = tensors[: 3 if op == "layer_norm" else 2]
    assert torch.autograd.gradcheck(lambda *t: call(op, *t), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: call(op, *t), tensors)


@pytest.mark.gpu
def test_backward_twice_gives_the_same_bits():
    x, weight = (random(*s, device="cuda", dtype=torch.float32).requires_grad_() for s in ((4096, 1000), (1000,)))
    y = layer_norm(x, (1000,), weight)
    dy = random(4096, 1000, device="cuda", dtype=torch.float32, seed=1)
    first, second = (torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_a_changed_input_is_noticed():
    x = random(4, COLS, device="cuda").requires_grad_()
    hidden = x * 1
    y = layer_norm(hidden, (COLS,))
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_a_misplaced_input_gives_the_same_bits(offset):
    x = numpy.random.default_rng(0).standard_normal((50, 1000)).astype(numpy.float16)
    import cupy

    aligned = cupy.asarray(x)
    assert same(*[layer_norm(tensor(a), (1000,)) for a in (aligned, misplaced(aligned, offset))])


@on_devices
def test_functions_of_cunorm_take_tensors(device):
    x, weight, bias, dy = (
        random(*s, device=device, seed=i) for i, s in enumerate([(4, COLS), (COLS,), (COLS,), (4, COLS)])
    )
    x.requires_grad_()
    y = cunorm.layer_norm(x, None, weight, bias)
    expected = F.layer_norm(x, (COLS,), weight, bias)
    torch.testing.assert_close(y, expected)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dy)[0])
    y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias)
    gradients = cunorm.layer_norm_backward(dy, x, mean, rstd, weight)
    torch.testing.assert_close(gradients[0], dx)
    assert not gradients[0].requires_grad
    y, rstd = cunorm.rms_norm_forward(x, None, weight)
    dx, dweight = cunorm.rms_norm_backward(dy, x, rstd, weight, output_mask=(False, True))
    assert dx is None
    assert dweight.shape == (COLS,)
    with torch.no_grad():
        out = torch.empty_like(x)
        assert cunorm.rms_norm(x, None, weight, out=out, sm_margin=1) is out
        torch.testing.assert_close(out, F.rms_norm(x, (COLS,), weight, 1e-6))
        assert cunorm.rms_norm(x, dtype="float32").dtype is torch.float32


# cunorm's own functions with tensors.


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("statistics", [False, True])
def test_out_may_be_x_itself(device, op, statistics):
    function = getattr(cunorm, f"{op}_forward" if statistics else op)
    x, weight = random(5, COLS, device=device, dtype=torch.float32), random(COLS, device=device)
    expected, in_place = function(x, None, weight), x.clone()
    results = function(in_place, None, weight, out=in_place)
    y = results[0] if statistics else results
    assert y is in_place
    if not statistics:
        expected, results = (expected,), (results,)
    assert all(same(a, b) for a, b in zip(results, expected, strict=True))


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_out_beside_x_in_one_buffer(device, op):
    """Columns of one matrix share no memory."""
    buffer = random(5, 2 * COLS, device=device, dtype=torch.float32)
    x, out = buffer[:, :COLS], buffer[:, COLS:]
    expected = getattr(cunorm, op)(x)
    assert getattr(cunorm, op)(x, out=out) is out
    assert torch.equal(out, expected)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_cunorms_own_function_is_the_same_road(device, op, cast):
    """cunorm's function has the bits and gradients of cunorm.torch's, but y has x's dtype under autocast too."""
    x, weight = (random(*s, device=device, dtype=torch.float32).requires_grad_() for s in ((5, COLS), (COLS,)))
    with torch.autocast(device, cast, enabled=cast is not None):
        y = getattr(cunorm, op)(x, None, weight, eps=EPS[op])
        expected = call(op, x, weight)
    assert y.dtype is x.dtype
    assert same(y.detach(), expected.detach())
    gradients = [torch.autograd.grad(result.sin().sum(), (x, weight)) for result in (y, expected)]
    assert all(same(a, b) for a, b in zip(*gradients, strict=True))


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_statistics_under_transformations(device, op):
    """jvp, grad and vmap go through cunorm's _forward functions."""
    x, tangent = random(3, COLS, device=device), random(3, COLS, device=device, seed=1)

    def ours(x):
        return getattr(cunorm, f"{op}_forward")(x, eps=EPS[op])[0].sin().sum()

    def torchs(x):
        return torch_call(op, x).sin().sum()

    for transform in (
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(x[:, None]),
        lambda f: torch.func.jvp(f, (x,), (tangent,)),
    ):
        torch.testing.assert_close(transform(ours), transform(torchs))
