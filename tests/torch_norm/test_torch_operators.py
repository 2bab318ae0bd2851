"""The operators in torch's registry: their values, derivatives and rules, by torch's own checkers."""

from __future__ import annotations

import numpy
import pytest
from arrays import inputs
from functions import OPS, bias_of
from reference import EPS, check_backward, check_forward, normalise, widen

torch = pytest.importorskip("torch")

import torch_plain  # noqa: E402
from torch.func import functional_call, grad, jacrev, vjp, vmap  # noqa: E402
from torch_tensors import array, on_devices, random, tensor  # noqa: E402

from cunorm.operation import name_of  # noqa: E402
from cunorm.torch.norm import formulas, operators  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COLS = 8


def options(op, dtype, *, eps=1e-5, zero_centered_gamma=False, wants_statistics=True, ndim=1):
    return (name_of(op, zero_centered_gamma), ndim, eps, dtype, wants_statistics, 0, 0)


def example(op, device, *lead, cols=COLS, dtype=torch.float64, requires_grad=True):
    """Return x, weight and bias, without the bias for rms_norm."""
    x, weight, bias = (random(*shape, device=device, dtype=dtype) for shape in ((*lead, cols), (cols,), (cols, 1)))
    tensors = (x, weight, bias[:, 0].contiguous())
    return [t.requires_grad_(requires_grad) for t in tensors[: 3 if op == "layer_norm" else 2]]


def apply(op, zero_centered_gamma=False, eps=1e-5, call=torch_plain.norm):
    """Return y as a function of (x, weight) or (x, weight, bias)."""

    def function(x, weight, bias=None):
        return call(x, weight, bias, *options(op, x.dtype, eps=eps, zero_centered_gamma=zero_centered_gamma))[0]

    return function


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("weight", ["same", "float32", None])
def test_values(device, op, dtype, weight):
    """Both passes are within the bounds of reference.py of float64."""
    x, dy, gamma, beta = inputs(numpy, 40, 300, dtype, weight=dtype if weight in ("same", None) else weight)
    if weight is None:
        gamma = beta = None
    tensors = [None if a is None else tensor(a).to(device) for a in (x, gamma, bias_of(op, beta))]
    tensors += [None] * (3 - len(tensors))
    y, statistics = torch_plain.norm_forward(*tensors, *options(op, tensors[0].dtype, eps=EPS[op]))
    mean, rstd = (array(statistics[0]) if op == "layer_norm" else None), array(statistics[-1])
    check_forward(op, (array(y), mean, rstd), array(tensors[0]), gamma, bias_of(op, beta))
    mask = [True, True, op == "layer_norm"]
    gradients = torch_plain.norm_backward(tensor(dy).to(device), tensors[0], statistics, tensors[1], op, EPS[op], mask)
    gradients = [array(g) if wanted else None for g, wanted in zip(gradients, mask, strict=True)]
    check_backward(op, gradients, dy, x, gamma)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_first_and_second_derivatives(device, op, zero_centered_gamma):
    function, tensors = apply(op, zero_centered_gamma), example(op, device, 3, 2)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_without_weight_over_two_axes(device, op):
    x = random(2, 3, 4, device=device).requires_grad_()

    def function(x):
        return torch_plain.norm(x, None, None, *options(op, x.dtype, ndim=2, eps=0.1))[0]

    assert torch.autograd.gradgradcheck(function, [x])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_third_derivative(op):
    function, (x, weight, *bias) = apply(op, eps=0.1), example(op, "cpu", 2)

    def second(x, weight):
        (dx,) = torch.autograd.grad(function(x, weight, *bias).square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.pow(3).sum(), x, create_graph=True)
        return ddx

    assert torch.autograd.gradcheck(second, (x, weight))


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wants_statistics", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck_of_the_forward_pass(device, op, wants_statistics, dtype):
    for operator, requires_grad in ((operators.fused_norm, True), (operators.fused_norm_forward, False)):
        x, weight, *bias = example(op, device, 3, 4, dtype=dtype, requires_grad=requires_grad)
        arguments = torch_plain.arguments(x, weight, *(bias or [None]), op, 1e-5, dtype, wants_statistics)
        # 16-bit y may differ by a rounding between eager and compiled: each is held against float64 elsewhere.
        torch.library.opcheck(operator, arguments, atol=1e-2, rtol=2e-2)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_opcheck_of_the_backward_pass(device, op, mask):
    if op == "rms_norm":
        mask = (*mask[:2], False)
    x, weight, *_ = example(op, device, 3, 4, requires_grad=False)
    statistics = torch_plain.statistics_of(op, x, 1, 1e-5)
    dy = random(3, 4, COLS, device=device, seed=1)
    arguments = torch_plain.backward_arguments(dy, x, statistics, weight, op, 1e-5, mask)
    torch.library.opcheck(operators.fused_norm_backward, arguments)


# The operators of the kernels, which are what compiled code has, have no derivative registered.


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")  # torch cannot know better
def test_the_kernels_called_by_hand_are_differentiated_all_the_same(device, op):
    """A decomposed program that is trained after all has first and second derivatives, by fused_norm_backward."""
    tensors = example(op, device, 3)
    results = []
    for call in (torch_plain.norm, torch_plain.norm_forward):
        first = torch.autograd.grad(apply(op, call=call)(*tensors).pow(3).sum(), tensors, create_graph=True)
        results.append([*first, *torch.autograd.grad(first[0].pow(3).sum(), tensors[:2])])
    torch.testing.assert_close(*results)
    x, weight, *_ = tensors
    statistics = torch_plain.statistics_of(op, x.detach(), 1, 1e-5)
    dy = random(3, COLS, device=device, seed=1).requires_grad_()
    twice = []
    for backward in (torch_plain.norm_backward, torch_plain.backward_function):
        dx, _, _ = backward(dy, x, statistics, weight, op, 1e-5, [True, False, False])
        twice.append(torch.autograd.grad(dx.pow(3).sum(), (dy, x, weight)))
    torch.testing.assert_close(*twice)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_torch_compile_differentiates_the_kernels_called_by_hand(device, op):
    torch._dynamo.reset()
    tensors = example(op, device, 3)
    results = []
    for call in (torch_plain.norm, torch_plain.norm_forward):
        compiled = torch.compile(apply(op, call=call), backend="aot_eager", fullgraph=True)
        results.append(torch.autograd.grad(compiled(*tensors).pow(3).sum(), tensors))
    torch.testing.assert_close(*results)


def test_compiled_code_holds_the_kernels_alone():
    """Compiled code would run whatever is registered on their autograd keys too, at a cost in host time."""
    for operator in (operators.fused_norm_forward, operators.fused_norm_backward):
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


# functorch's transforms of the operators have the results of its transforms of the same formula in torch's own.


def plain(op, x, weight, bias=None):
    statistics = torch_plain.statistics_of(op, x, 1, 1e-5)
    return formulas.affine(op, x, statistics, weight, bias)


def transformed(op, x, weight, bias=None):
    return apply(op, call=torch_plain.function)(x, weight, bias)


DIMS = [(0, None, None), (1, None, None), (0, 0, None), (None, 0, 1), (0, None, 0), (2, 1, 1)]


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_vmap_of_values_and_of_gradients(device, op, dims):
    """Gradients are those of each sample, each with its own dweight."""
    shapes = ((4, 3, COLS), (COLS,), (COLS,))
    tensors = []
    for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        shape = list(shape[1:] if i == 0 else shape)
        if dim is not None:
            shape.insert(dim, 4)
        tensors.append(random(*shape, device=device, seed=i))
    count = 3 if op == "layer_norm" else 2
    tensors, dims = tensors[:count], dims[:count]
    if dims == (None, 0):
        tensors[0] = tensors[0][:3]
    results = [vmap(lambda *t, f=f: f(op, *t), in_dims=dims)(*tensors) for f in (transformed, plain)]
    torch.testing.assert_close(*results)
    gradients = []
    for function in (transformed, plain):
        loss = grad(lambda *t, f=function: f(op, *t).pow(3).sum(), argnums=tuple(range(count)))
        gradients.append(vmap(loss, in_dims=dims)(*tensors))
    torch.testing.assert_close(*gradients)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_transforms_nest(device, op):
    tensors = [t.detach() for t in example(op, device, 2)]
    hessians, twice, pulled = [], [], []
    for function in (transformed, plain):

        def loss(*t, function=function):
            return function(op, *t).pow(3).sum()

        hessians.append(jacrev(jacrev(loss, argnums=(0, 1)), argnums=(0, 1))(*tensors))
        twice.append(grad(lambda x, loss=loss: grad(loss)(x, *tensors[1:]).square().sum())(tensors[0]))
        y, pull = vjp(lambda *t, function=function: function(op, *t), *tensors)
        pulled.append((y, pull(random(2, COLS, device=device, seed=3))))
    for results in (hessians, twice, pulled):
        torch.testing.assert_close(*results)


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_batched_cotangents_of_an_eager_graph(device, op):
    """autograd.grad(is_grads_batched=True) maps the backward pass of a graph that was made without functorch."""
    tensors = example(op, device, 3)
    cotangents = random(5, 3, COLS, device=device, seed=2)
    y = apply(op)(*tensors)
    batched = torch.autograd.grad(y, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, tensors, c, retain_graph=True) for c in cotangents]
    torch.testing.assert_close(batched, tuple(torch.stack(g) for g in zip(*singly, strict=True)))


@on_devices
def test_functional_call_with_stacked_parameters(device):
    """An ensemble is one module called with the parameters of four."""
    from cunorm.torch import LayerNorm

    module = LayerNorm(COLS, device=device, dtype=torch.float64)
    parameters = {"weight": random(4, COLS, device=device), "bias": random(4, COLS, device=device, seed=1)}
    x = random(3, COLS, device=device)
    y = vmap(lambda p: functional_call(module, p, (x,)))(parameters)
    expected = torch.nn.functional.layer_norm(x, (COLS,)) * parameters["weight"][:, None] + parameters["bias"][:, None]
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True)])
def test_what_is_not_wanted_is_not_returned(op, mask):
    mask = mask if op == "layer_norm" else (*mask[:2], False)
    x, weight, *_ = example(op, "cpu", 3)
    statistics = torch_plain.statistics_of(op, x.detach(), 1, 1e-5)
    arguments = torch_plain.backward_arguments(x.detach(), x.detach(), statistics, weight, op, 1e-5, mask)
    gradients = operators.fused_norm_backward(*arguments)
    expected = [x.shape] if mask[0] else [weight.shape] * sum(mask)
    assert [gradient.shape for gradient in gradients] == expected


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_statistics_have_no_gradient(device, op):
    """No gradient goes through the statistics: the formulas hold what depends on x by way of them."""
    x, weight, *_ = example(op, device, 3)
    y, statistics = torch_plain.norm(x, weight, None, *options(op, x.dtype))
    assert (y.requires_grad, statistics.requires_grad) == (True, False)


def test_the_statistics_are_those_of_the_reference():
    x = random(5, COLS, dtype=torch.float32)
    expected = normalise("layer_norm", widen(array(x)), 1e-5)
    mean, rstd = torch_plain.statistics_of("layer_norm", x, 1, 1e-5)
    torch.testing.assert_close(mean.double(), torch.from_numpy(expected.mean[:, 0]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd.double(), torch.from_numpy(expected.rstd[:, 0]), rtol=1e-6, atol=1e-6)
