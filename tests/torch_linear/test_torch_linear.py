"""cunorm.torch.layer_norm_linear: values, gradients, memory, errors."""

from __future__ import annotations

import itertools

import linear_reference
import numpy
import pytest
from functions import OPS
from linear_reference import check_backward, check_forward

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402, N812
from torch_linear_calls import five, grad, keeping, run, tensors  # noqa: E402
from torch_tensors import array, on_devices, random, same, tensor  # noqa: E402

import cunorm  # noqa: E402
from cunorm.kernel import device  # noqa: E402
from cunorm.plan import backward as backward_rule  # noqa: E402
from cunorm.torch import layer_norm_linear  # noqa: E402
from cunorm.torch.linear import wide  # noqa: E402
from cunorm.torch.linear.call import Layer, norm_linear  # noqa: E402
from cunorm.torch.norm import repeats  # noqa: E402

SHAPES = [(5, 16, 24), (1, 128, 8), (33, 7, 5), (48, 320, 64)]
DTYPES = ("float16", "bfloat16", "float32", "float64")


@on_devices
@keeping
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1.0, 1e2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(device, keep, op, dtype, offset, shape):
    call = linear_reference.inputs(op, *shape, dtype, offset=offset)
    inputs = tensors(call, device)
    y = run(call, inputs, keep)
    rounded = {"rounded_mean": device == "cpu"}
    check_forward(call, array(y), **rounded)
    check_backward(call, [array(g) for g in grad(y, inputs, tensor(call.dy).to(device))], **rounded)
    with torch.no_grad():
        without = run(call, inputs, keep)
    check_forward(call, array(without), **rounded)
    assert device == "cpu" or same(without, y.detach())


@on_devices
def test_the_gradient_of_ln_bias_is_rounded_once(device):
    """It has a dtype of its own, and is not rounded to that of ln_weight."""
    call = linear_reference.inputs("layer_norm", 12, 32, 16, "bfloat16")
    *inputs, ln_bias = (t.detach() for t in tensors(call, device))
    ln_bias = ln_bias.float().requires_grad_()
    y = layer_norm_linear(*inputs, ln_bias, call.eps)
    dy = tensor(call.dy).to(device)
    (gradient,) = torch.autograd.grad(y, [ln_bias], dy)
    dz = (dy.double() @ inputs[1].double()).bfloat16()
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), dz.double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@keeping
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offset", [1.0, 1e2])
@pytest.mark.parametrize("shape", [(512, 4096, 1024), (2048, 1024, 3072)], ids=str)
def test_large(keep, op, offset, shape):
    call = linear_reference.inputs(op, *shape, "bfloat16", offset=offset)
    inputs = tensors(call, "cuda")
    y = run(call, inputs, keep)
    check_forward(call, array(y))
    check_backward(call, [array(g) for g in grad(y, inputs, tensor(call.dy).cuda())])


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ln_dtype", ["float32", "float16"])
def test_norm_of_other_dtypes_centred(device, op, ln_dtype):
    call = linear_reference.inputs(op, 9, 64, 32, "bfloat16", ln_dtype=ln_dtype, zero_centered_gamma=True)
    inputs = tensors(call, device)
    y = run(call, inputs)
    check_forward(call, array(y))
    check_backward(call, [array(g) for g in grad(y, inputs, tensor(call.dy).to(device))])


@on_devices
@keeping
def test_recomputed_and_kept_have_the_same_bits(device, keep):
    call = linear_reference.inputs("layer_norm", 40, 1000, 48, "bfloat16")
    inputs, dy = tensors(call, device), tensor(call.dy).to(device)
    results = [[y, *grad(y, inputs, dy)] for y in (run(call, inputs, keep), run(call, inputs, not keep))]
    assert all(same(a.detach(), b.detach()) for a, b in zip(*results, strict=True))


@on_devices
@keeping
@pytest.mark.parametrize("op", OPS)
def test_the_gradient_of_z_joins_before_the_norm(device, keep, op):
    call = linear_reference.inputs(op, 24, 64, 48, "bfloat16")
    call = call._replace(dz=linear_reference.narrow(numpy.random.default_rng(5).standard_normal((24, 64)), "bfloat16"))
    inputs, dy, dz = tensors(call, device), tensor(call.dy).to(device), tensor(call.dz).to(device)

    def both():
        return norm_linear(Layer("test", op, call.eps, keep), inputs)[:2]

    there = [t for t in inputs if t is not None]
    gradients = iter(torch.autograd.grad(both(), there, (dy, dz)))
    check_backward(call, [None if t is None else array(next(gradients)) for t in inputs])
    # Only one of the two has a gradient.
    gradients = iter(torch.autograd.grad(both()[0], there, dy))
    check_backward(call._replace(dz=None), [None if t is None else array(next(gradients)) for t in inputs])
    _, z = both()
    wanted = [there[0], *there[3:]]
    of_z = [array(g) for g in torch.autograd.grad(z, wanted, dz)]
    of_z = (of_z[0], None, None, of_z[1], of_z[2] if op == "layer_norm" else None)
    check_backward(call._replace(dy=0 * call.dy), of_z)


@on_devices
@pytest.mark.parametrize("wants", [*itertools.product([True, False], repeat=5)], ids=str)
def test_only_what_needs_a_gradient_gets_one(device, wants):
    inputs = [t.detach().requires_grad_(want) for t, want in zip(five(device), wants, strict=True)]
    y = layer_norm_linear(*inputs, 0.3)
    assert y.requires_grad == any(wants)
    if not any(wants):
        return
    y.square().sum().backward()
    assert [t.grad is not None for t in inputs] == list(wants)
    x, weight, bias, ln_weight, ln_bias = inputs
    expected = F.linear(F.layer_norm(x, (16,), ln_weight, ln_bias, 0.3), weight, bias)
    wanted = [t for t in inputs if t.requires_grad]
    for t, gradient in zip(wanted, torch.autograd.grad(expected.square().sum(), wanted), strict=True):
        torch.testing.assert_close(t.grad, gradient)


@on_devices
@keeping
@pytest.mark.parametrize("rows", [(0,), (2, 3), (), (1, 4, 2)], ids=str)
def test_leading_axes(device, keep, rows):
    inputs = five(device, rows=rows)
    y = layer_norm_linear(*inputs, 0.3, keep_normalized=keep)
    assert y.shape == (*rows, 12)
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    x, weight, bias, ln_weight, ln_bias = inputs
    expected = F.linear(F.layer_norm(x, (16,), ln_weight, ln_bias, 0.3), weight, bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), inputs))


@on_devices
@pytest.mark.parametrize("what", ["x", "dy", "weight"])
def test_strided_tensors(device, what):
    x, weight, bias, ln_weight, ln_bias = (t.detach() for t in five(device, rows=(4, 3)))
    dy = random(4, 3, 12, device=device)
    if what == "x":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif what == "dy":
        dy = dy[:1].expand(4, 3, 12)
    else:
        weight = weight.t().contiguous().t()  # as in GPT-2's Conv1D
    inputs = [t.requires_grad_() for t in (x, weight, bias, ln_weight, ln_bias)]
    gradients = torch.autograd.grad(layer_norm_linear(*inputs, 0.3), inputs, dy)
    expected = F.linear(F.layer_norm(x, (16,), ln_weight, ln_bias, 0.3), weight, bias)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, dy))
    assert gradients[1].stride() == weight.stride()


@on_devices
@keeping
def test_what_is_kept_for_the_backward_pass(device, keep):
    inputs = five(device, rows=(50,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer_norm_linear(*inputs, keep_normalized=keep)
    assert sum(t.shape == inputs[0].shape for t in kept) == 1 + keep  # these are x, and z if it is kept


@pytest.mark.gpu
@keeping
@pytest.mark.parametrize("op", OPS)
def test_a_large_product_is_by_the_algorithm_that_a_table_names(keep, op, monkeypatch):
    from cunorm.linear import gemm
    from cunorm.torch.linear import wide

    if gemm.bindings() is None:
        pytest.skip("there is no cuBLASLt")
    call = linear_reference.inputs(op, 4096, 1024, 3072, "bfloat16")
    inputs = tensors(call, "cuda")
    kind = gemm.kind_of_rows(4096, 3072, 1024, "bfloat16", True, 256, 0)
    *_, last = gemm.offered(kind, inputs[2].data_ptr())
    launched, launch = [], gemm.Prepared.launch

    def recorded(prepared, *arguments):
        launched.append(gemm.configuration(prepared.algorithm))
        launch(prepared, *arguments)

    monkeypatch.setattr(gemm, "measured", lambda kind: last)
    monkeypatch.setattr(gemm, "of_thread", gemm._OfThread())
    monkeypatch.setattr(gemm.Prepared, "launch", recorded)
    monkeypatch.setattr(wide, "_has_algorithm", lambda *_: True)
    repeats._calls.clear()
    y = run(call, inputs, keep)
    check_forward(call, array(y))
    check_backward(call, [array(g) for g in grad(y, inputs, tensor(call.dy).cuda())])
    with torch.no_grad():
        check_forward(call, array(run(call, inputs, keep)))
    assert launched == [last, last]


@pytest.mark.gpu
@keeping
def test_peak_memory_is_below_that_of_two_operators_by_z(keep):
    rows, cols, outs = 8192, 2048, 2048
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters = [
        torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((outs, cols), (outs,), (cols,), (cols,))
    ]
    weight, bias, ln_weight, ln_bias = (p.requires_grad_() for p in parameters)
    dy = torch.randn(rows, outs, device="cuda", dtype=torch.bfloat16)

    def two_operators():
        return F.linear(F.layer_norm(x, (cols,), ln_weight, ln_bias), weight, bias)

    def fused():
        return layer_norm_linear(x, weight, bias, ln_weight, ln_bias, keep_normalized=keep)

    def peak(function):
        for _ in range(2):
            for t in (x, weight, bias, ln_weight, ln_bias):
                t.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function().backward(dy)
        return torch.cuda.max_memory_allocated() - before

    z = rows * cols * 2
    workspace = 2 * 132 * 2 * cols * 4  # partial sums of dweight and dbias
    saved = peak(two_operators) - peak(fused)
    assert saved >= (0 if keep else z) - workspace


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [7, 64, 1000, 4096, 12288, 65536, 131073])
@pytest.mark.parametrize("rows", [1, 33, 700, 3000])
def test_dx_in_the_memory_of_dz_has_the_same_bits(op, cols, rows):
    """With few rows, dz is read while dx is written, so dx has memory of its own."""
    from cunorm.torch.norm import calls, dispatch, launching

    x, dz, weight = (
        random(*s, device="cuda", dtype=torch.bfloat16, seed=i) for i, s in enumerate([(rows, cols)] * 2 + [(cols,)])
    )
    call = calls.affine_call(op, weight, None, None, (0, 0, 0))
    _, statistics = launching.forward_by(launching.recipe_of(call, (x, weight), 0), (x, weight), (), 1e-5, True)
    mask = (True, True, op == "layer_norm")
    with torch.no_grad():
        expected = dispatch.affine_gradients(op, dz, x, statistics, weight, 1e-5, mask, 0)
        copy = dz.clone()
        gradients = dispatch.affine_gradients(op, copy, x, statistics, weight, 1e-5, mask, 0, in_place=True)
    many = rows > backward_rule.MOST_ROWS or rows * cols * 2 > backward_rule.MOST_BYTES * device.current(0).sms
    assert (gradients[0].data_ptr() == copy.data_ptr()) == many
    assert all(same(a, b) for a, b in zip(gradients, expected, strict=True) if a is not None)


@pytest.mark.gpu
def test_streamed_rows_leave_dz_alone():
    from cunorm.torch.norm import calls, dispatch, launching

    x, dz = (random(3, 600_000, device="cuda", dtype=torch.bfloat16, seed=i) for i in (0, 1))
    call = calls.affine_call("layer_norm", None, None, None, (0, 0, 0))
    _, statistics = launching.forward_by(launching.recipe_of(call, (x,), 0), (x,), (), 1e-5, True)
    before, every = dz.clone(), (True, True, True)
    with torch.no_grad():
        dispatch.affine_gradients("layer_norm", dz, x, statistics, None, 1e-5, every, 0, in_place=True)
    assert same(dz, before)


@on_devices
def test_the_functions_of_the_core_take_tensors(device):
    call = linear_reference.inputs("layer_norm", 12, 32, 16, "float32")
    x, weight, bias, ln_weight, ln_bias = (t.detach() for t in tensors(call, device))
    y, mean, rstd = cunorm.layer_norm_linear_forward(x, weight, bias, ln_weight, ln_bias, call.eps)
    check_forward(call, array(y))
    dy = tensor(call.dy).to(device)
    gradients = cunorm.layer_norm_linear_backward(dy, x, mean, rstd, weight, ln_weight, ln_bias, eps=call.eps)
    check_backward(call, [array(g) for g in gradients])
    parameters = [t.requires_grad_() for t in (x, weight, bias)]
    assert cunorm.layer_norm_linear(*parameters).requires_grad


# Weight gradients added up in the product.


@on_devices
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "dtypes", ["bfloat16 float32", "float16 float32", "float32 float32", "bfloat16 bfloat16", "float32 float64"]
)
def test_accumulate(device, overwrite, dtypes):
    dtype, total_dtype = (getattr(torch, name) for name in dtypes.split())
    dy, z = (random(40, n, device=device, dtype=dtype) for n in (12, 16))
    total = random(12, 16, device=device, dtype=total_dtype)
    expected = dy.double().t() @ z.double() + (0 if overwrite else total.double())
    if overwrite:
        total.fill_(float("nan"))
    wide.accumulate(total, dy, z, overwrite)
    eps = torch.finfo(total_dtype if total_dtype is torch.bfloat16 else torch.float32).eps
    torch.testing.assert_close(total.double(), expected, rtol=4 * eps, atol=64 * eps)


# Bad input.

BAD = [
    ("input is a list", lambda a: {"input": [[1.0]]}, TypeError, "input must be a torch.Tensor; got list"),
    ("weight is missing", lambda a: {"weight": None}, TypeError, "weight must be a torch.Tensor; got NoneType"),
    ("weight is a row", lambda a: {"weight": a["weight"][0]}, RuntimeError, "weight must have shape (out, in)"),
    ("weight has no rows", lambda a: {"weight": a["weight"][:0]}, RuntimeError, "neither of them 0; got (0, 8)"),
    ("wrong last axis", lambda a: {"input": a["input"][:, 1:]}, RuntimeError, "the length 8 of a row of weight"),
    ("no axis", lambda a: {"input": a["input"][0, 0]}, RuntimeError, "got input of shape ()"),
    ("short bias", lambda a: {"bias": a["bias"][1:]}, RuntimeError, "bias must have shape (6,); got (5,)"),
    ("short ln_weight", lambda a: {"ln_weight": a["ln_weight"][1:]}, RuntimeError, "ln_weight must have shape (8,)"),
    ("short ln_bias", lambda a: {"ln_bias": a["ln_bias"][1:]}, RuntimeError, "ln_bias must have shape (8,); got (7,)"),
    (
        "weight of another dtype",
        lambda a: {"weight": a["weight"].half()},
        TypeError,
        "float32 and weight of torch.float16",
    ),
    ("bias of another dtype", lambda a: {"bias": a["bias"].double()}, TypeError, "float32 and bias of torch.float64"),
    ("integers", lambda a: {"input": a["input"].long()}, NotImplementedError, "input must have dtype torch.float16"),
    ("eps is a string", lambda a: {"eps": "1"}, TypeError, "eps must be a real number"),
    (
        "unknown normalization",
        lambda a: {"normalization": "Batch"},
        ValueError,
        "'LayerNorm' or 'RMSNorm'; got 'Batch'",
    ),
    ("an RMSNorm with ln_bias", lambda a: {"normalization": "RMSNorm"}, ValueError, "ln_bias must be None"),
    ("nothing to centre", lambda a: {"ln_weight": None, "zero_centered_gamma": True}, ValueError, "needs ln_weight"),
    ("another device", lambda a: {"bias": a["bias"].to("meta")}, RuntimeError, "bias must be on the device of input"),
]


@on_devices
@pytest.mark.parametrize(("what", "change", "error", "phrase"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_input(device, what, change, error, phrase):
    shapes = {"input": (4, 8), "weight": (6, 8), "bias": (6,), "ln_weight": (8,), "ln_bias": (8,)}
    arguments = {name: torch.ones(shape, device=device, requires_grad=True) for name, shape in shapes.items()}
    with torch.no_grad():
        arguments |= change(arguments)
    with pytest.raises(error) as caught:
        layer_norm_linear(**arguments)
    assert phrase in str(caught.value)
    assert str(caught.value).startswith("layer_norm_linear: ")
