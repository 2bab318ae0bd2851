"""Derivatives of higher order, in both modes and under every transform, are those of the formula in single steps.

torch's own layer_norm is wrong in the third derivative, and in the second where one of the two is forward-mode.
"""

from __future__ import annotations

import pytest
from functions import OPS

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch_tensors import on_devices, random  # noqa: E402

import cunorm.torch  # noqa: E402

COLS, OUTS, EPS = 8, 5, 0.1


def exact(op, x, weight, bias):
    if op == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    return y if bias is None else y + bias


def plain(op, x, weight, bias, _):
    if op == "rms_norm":
        return cunorm.torch.rms_norm(x, (COLS,), weight, EPS)
    return cunorm.torch.layer_norm(x, (COLS,), weight, bias, EPS)


def linear(op, x, weight, bias, product):
    name = "LayerNorm" if op == "layer_norm" else "RMSNorm"
    return cunorm.torch.layer_norm_linear(x, product, None, weight, bias, EPS, normalization=name)


def added(op, x, weight, bias, _):
    if op == "rms_norm":
        return cunorm.torch.add_rms_norm(x, x.sin(), weight, EPS)[0]
    return cunorm.torch.add_layer_norm(x, x.sin(), weight, bias, EPS)[0]


FUNCTIONS = {
    "the norm": (plain, lambda op, x, w, b, _: exact(op, x, w, b)),
    "with its product": (linear, lambda op, x, w, b, product: exact(op, x, w, b) @ product.t()),
    "of a sum": (added, lambda op, x, w, b, _: exact(op, x + x.sin(), w, b)),
}


# What is derived: a function of x and weight, and how often; `t` is a tangent.


def by_autograd(f, x, weight, t):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    scalar, derivatives = f(x, weight).pow(3).sum(), []
    for order in range(4):
        gradients = torch.autograd.grad(scalar, (x, weight), create_graph=order < 3)
        scalar = sum(gradient.square().sum() for gradient in gradients)
        derivatives += gradients
    return derivatives


def by_func_grad(f, x, weight, t):
    def loss(x):
        return f(x, weight).pow(3).sum()

    def then(loss):
        return lambda x: grad(loss)(x).square().sum()

    losses = [loss, then(loss), then(then(loss)), then(then(then(loss)))]
    return [grad(scalar)(x) for scalar in losses]


def by_jvp(f, x, weight, t):
    def y(x):
        return f(x, weight)

    def then(y):
        return lambda x: jvp(y, (x,), (t,))[1]

    return [derivative(x) for derivative in (then(y), then(then(y)), then(then(then(y))))]


def by_both(f, x, weight, t):
    def loss(x):
        return f(x, weight).pow(3).sum()

    return [
        hessian(loss)(x),
        jacrev(jacfwd(loss))(x),
        jacfwd(jacfwd(loss))(x),
        jacfwd(hessian(loss))(x),
        grad(lambda x: hessian(loss)(x).square().sum())(x),
        grad(lambda x: jvp(lambda x: f(x, weight), (x,), (t,))[1].square().sum())(x),
        vmap(hessian(loss))(torch.stack([x, x + 1])),
    ]


def by_weight_too(f, x, weight, t):
    def loss(x, weight):
        return f(x, weight).pow(3).sum()

    mixed = hessian(loss, argnums=(0, 1))(x, weight)
    return [*mixed[0], *mixed[1], jacrev(jacrev(jacrev(loss, argnums=1), argnums=0), argnums=1)(x, weight)]


def forward_mode_of_a_graph_made_before(f, x, weight, t):
    x = x.clone().requires_grad_()
    y = f(x, weight)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), y.detach())
        dx, tangent = forward_ad.unpack_dual(torch.autograd.grad(y, x, dy, create_graph=True)[0])
        return [dx, tangent, torch.autograd.grad(tangent.square().sum(), x)[0]]


def compiled_and_derived(f, x, weight, t):
    torch._dynamo.reset()
    return by_autograd(torch.compile(f, backend="eager", fullgraph=True), x, weight, t)


def derived_and_compiled(f, x, weight, t):
    torch._dynamo.reset()

    def third(x):
        inner = grad(lambda x: f(x, weight).pow(3).sum())
        return grad(lambda x: grad(lambda x: inner(x).square().sum())(x).square().sum())(x)

    def forward_in_reverse(x):
        return grad(lambda x: jvp(lambda x: f(x, weight), (x,), (t,))[1].square().sum())(x)

    functions = (third, forward_in_reverse)
    return [torch.compile(function, backend="aot_eager", fullgraph=True)(x) for function in functions]


WAYS = (
    by_autograd,
    by_func_grad,
    by_jvp,
    by_both,
    by_weight_too,
    forward_mode_of_a_graph_made_before,
    compiled_and_derived,
    derived_and_compiled,
)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_derivatives_of_higher_order_are_exact(device, op, function, way):
    bias = random(COLS, device=device, seed=1) if op == "layer_norm" else None
    product = random(OUTS, COLS, device=device)
    x, t = (random(2, COLS, device=device, seed=seed) for seed in (0, 1))
    weight = random(COLS, device=device)
    results, expected = (
        way(lambda x, weight, f=f: f(op, x, weight, bias, product), x, weight, t) for f in FUNCTIONS[function]
    )
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.detach().abs().max()))


@on_devices
def test_forward_mode_in_forward_mode(device):
    """torch's own operator has -0.3849 for this second derivative."""
    t, tangent = torch.tensor(0.7, device=device), torch.ones((), device=device)
    weight, bias = torch.tensor([1.0, 2.0], device=device), torch.zeros(2, device=device)

    def y(t):
        return cunorm.torch.layer_norm(torch.stack([t, 0 * t])[None], (2,), weight, bias, 0.25).sum()

    second = jvp(lambda t: jvp(y, (t,), (tangent,))[1], (t,), (tangent,))[1]
    assert float(second) == pytest.approx(0.7749, abs=1e-4)


@on_devices
def test_one_column_has_no_gradient_but_that_of_bias(device):
    x, weight = (torch.tensor(value, device=device, requires_grad=True) for value in ([[1e6]], [2.0]))
    dx, dweight = torch.autograd.grad(cunorm.torch.layer_norm(x, (1,), weight).sum(), (x, weight))
    assert (dx.tolist(), dweight.tolist()) == ([[0.0]], [0.0])


@pytest.mark.parametrize("cols", [2, 3, 4])
def test_gradients_on_the_cpu_of_rows_far_from_zero(cols):
    """x holds whole numbers beside a million whose mean is a float32: x * rstd - mean * rstd would lose all digits."""
    steps = torch.arange(cols) - torch.arange(cols).sum() // cols
    steps[-1] -= steps.sum()
    rows = 1e6 + torch.arange(1, 6)[:, None] * steps
    tensors = [tensor.float() for tensor in (rows, random(cols), random(5, cols, seed=1))]

    def gradients(dtype):
        x, weight, dy = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        return torch.autograd.grad(cunorm.torch.layer_norm(x, (cols,), weight), (x, weight), dy)

    for a, b in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))
