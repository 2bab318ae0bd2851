"""Fused operations of JAX arrays have the values and gradients of NumPy arrays, and one kernel for a pass on CUDA."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy
import pytest
from arrays import same_bits

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
from fusion_cases import CASES, EPS, Made, make  # noqa: E402
from jax_arrays import calls, close, from_jax, lowered, on_devices, random  # noqa: E402

import cunorm  # noqa: E402
import cunorm.jax  # noqa: E402
from cunorm.jax.xla import target as choice  # noqa: E402
from cunorm.kernel import source  # noqa: E402
from cunorm.operation import added  # noqa: E402
from cunorm.plan.plan import plan  # noqa: E402
from cunorm.plan.problem import backward_problem, forward_problem  # noqa: E402

COLS = 96


def put(tree: Any, device: str) -> Any:
    """Put the NumPy arrays of a tree on a device. Numbers stay."""
    to = jax.devices(device)[0]
    return jax.tree.map(lambda leaf: jax.device_put(leaf, to) if isinstance(leaf, numpy.ndarray) else leaf, tree)


def as_arrays(made: Made) -> dict[str, Any]:
    """Return the operands, with numbers as arrays, which can be differentiated."""
    numbers = {name: jnp.asarray(value, "float32") for name, value in made.operands.items() if isinstance(value, float)}
    return made.operands | numbers


def near(actual: Any, expected: numpy.ndarray, dtype: str) -> None:
    """Check the error, which may be a few roundings of the dtypes of `actual` and x, and of float32 of the largest."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    coarse = max(float(jnp.finfo(kind).eps) for kind in (actual.dtype, dtype))
    actual, expected = (numpy.asarray(array, "float64") for array in (actual, expected))
    atol = 64 * 2.0**-23 * max(1, abs(expected).max(initial=0))
    numpy.testing.assert_allclose(actual, expected, rtol=4 * coarse, atol=atol)


# These have each norm and each kind of operand: matrices, vectors, vectors for groups, numbers, per-row scalars.
IN_16_BITS = ("add_layer_norm", "add_rms_norm", "gate", "poles", "samples", "heads", "numbers of rows", "stream")


@on_devices
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in CASES), *((name, "bfloat16") for name in IN_16_BITS)]
)
def test_results_and_gradients(device, name, dtype):
    """The gradients of `backward` and of JAX's differentiation are those of NumPy arrays."""
    case = CASES[name]
    made = make(case, (2, 5, COLS), dtype)
    results, saved = case.op.forward(made.x, **made.operands, eps=EPS)
    in_order = results if len(case.op.operation.returns) > 1 else (results,)
    cotangents = tuple(gradient.astype(result.dtype) for gradient, result in zip(made.gradients, in_order, strict=True))
    expected = case.op.backward(saved, *cotangents)
    x, operands, gradients = (put(tree, device) for tree in (made.x, made.operands, cotangents))
    mine, mine_saved = case.op.forward(x, **operands, eps=EPS)
    for actual, expected_result in zip(jax.tree.leaves(mine), jax.tree.leaves(results), strict=True):
        near(actual, expected_result, dtype)
    explicit = case.op.backward(mine_saved, *gradients)
    _, pull = jax.vjp(lambda x, operands: case.op(x, **operands, eps=EPS), x, as_arrays(Made(x, operands, gradients)))
    dx, by_jax = pull(gradients if len(gradients) > 1 else gradients[0])
    for operand, gradient in expected.items():
        if (name, dtype) == ("poles", "bfloat16"):
            continue  # s is rounded, and the functions amplify an ulp of it
        near(explicit[operand], gradient, dtype)
        near(dx if operand == "x" else by_jax[operand], gradient, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [7, 1000, 8191, 16384])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_core(name, cols):
    import cupy

    case = CASES[name]
    made = make(case, (9, cols), "float16")
    x, operands, gradients = (
        jax.tree.map(lambda leaf: cupy.asarray(leaf) if hasattr(leaf, "shape") else leaf, part) for part in made
    )
    # A Python number would stand in the text of JAX's kernel, while the core passes it at run time. So it is an array
    # without axes here. Kernels take such an array as a vector for all rows, and the core gets that vector.
    operands |= {name: cupy.full(cols, made.operands[name], "float32") for name in case.numbers}
    core, saved = case.op.forward(x, **operands, eps=EPS)
    of_core = case.op.backward(saved, *gradients)
    x, operands, gradients = (put(part, "cuda") for part in made._replace(operands=as_arrays(made)))
    mine, saved = case.op.forward(x, **operands, eps=EPS)
    for actual, expected in zip(jax.tree.leaves(mine), jax.tree.leaves(core), strict=True):
        assert same_bits(from_jax(actual), expected)
    for operand, gradient in case.op.backward(saved, *gradients).items():
        if operand in case.numbers:  # JAX sums the columns of the vector itself
            near(gradient, of_core[operand].get().sum(dtype="float64").astype("float32"), "float16")
        else:
            assert same_bits(from_jax(gradient), of_core[operand]), operand


@pytest.mark.gpu
def test_through_the_callback(monkeypatch):
    """A launch by XLA's callback gives the same bits as one by its call of PTX."""
    arrays = arguments("cuda", 40, cols=1000)
    by_ptx = gradient(named)(*arrays)
    monkeypatch.setenv("CUNORM_XLA_CALL", "callback")
    jax.clear_caches()
    by_callback = gradient(named)(*arrays)
    jax.clear_caches()
    close(by_ptx, by_callback, 0, 0)


def definition(x, residual, weight, bias=None):
    """Compute add_layer_norm, or add_rms_norm if there is no bias, in jax.numpy in float32."""
    s = x + residual
    centred = s if bias is None else s - s.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * weight
    return (y if bias is None else y + bias), s


def named(x, residual, weight, bias=None):
    if bias is None:
        return cunorm.jax.add_rms_norm(x, residual, weight, eps=EPS)
    return cunorm.jax.add_layer_norm(x, residual, weight, bias, eps=EPS)


def loss(function):
    def of_both(*arrays):
        y, s = function(*arrays)
        return jnp.sin(y).sum() + (s**3).sum()

    return of_both


def gradient(function):
    return lambda *arrays: jax.grad(loss(function), tuple(range(len(arrays))))(*arrays)


def alike(make, *arrays):
    mine, expected = (jax.jit(make(function))(*arrays) for function in (named, definition))
    close(mine, expected, 1e-3, 1e-4)


def arguments(device, *leading, cols=12):
    rows = [random(*leading, cols, device=device, seed=i) for i in range(2)]
    return (*rows, random(cols, device=device, seed=2), random(cols, device=device, seed=3))


@pytest.mark.slow
@on_devices
def test_derivatives(device):
    """Derivatives of both results or one, in reverse and forward mode, and second derivatives are right."""
    arrays = arguments(device, 2, 3)
    for some in (arrays, arrays[:3]):
        alike(gradient, *some)
        alike(lambda f: lambda *a: jax.grad(lambda *a: jnp.sin(f(*a)[0]).sum(), (0, 1, 2))(*a), *some)
        alike(lambda f: lambda *a: jax.grad(lambda *a: jnp.sin(f(*a)[1]).sum())(*a), *some)
        alike(lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.cos(b) for b in a)), *some)
    small = [array[..., :4] for array in arguments(device, 2, cols=8)]
    alike(lambda f: jax.jacfwd(jax.grad(loss(f), (0, 2)), (1, 3)), *small)
    alike(lambda f: jax.jacrev(jax.grad(loss(f), (0, 2)), (1, 3)), *small)
    alike(lambda f: gradient(jax.checkpoint(f)), *arrays)


@pytest.mark.slow
@on_devices
def test_in_shard_map(device):
    """Gradients of both results and of each are right on one device. For several, see test_jax_sharding.py."""
    mesh = jax.sharding.Mesh(jax.devices(device)[:1], ("data",))
    data, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    arrays = arguments(device, 4)

    def mapped(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(data, data, whole, whole), out_specs=(data, data))

    for part in (loss, lambda f: lambda *a: jnp.sin(f(*a)[0]).sum(), lambda f: lambda *a: jnp.sin(f(*a)[1]).sum()):
        gradients = jax.jit(jax.grad(part(mapped(named)), (0, 2)))(*arrays)
        close(gradients, jax.grad(part(definition), (0, 2))(*arrays), 1e-3, 1e-4)


@on_devices
@pytest.mark.parametrize("mapped", [(1, 1, 0, 0), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)])
def test_vmap_of_any_argument(device, mapped):
    arrays = arguments(device, 5)
    batched = [jnp.stack([a, a + 1, 2 * a], 1) if flag else a for a, flag in zip(arrays, mapped, strict=True)]
    axes = tuple(1 if flag else None for flag in mapped)
    alike(lambda f: jax.vmap(f, axes), *batched)
    alike(lambda f: jax.vmap(gradient(f), axes), *batched)
    alike(lambda f: gradient(jax.vmap(f, axes)), *batched)


# For x of shape (3, 4, 48): vectors for samples and for heads, numbers for rows and for samples, groups of two sorts.
GROUPS = [
    {"scale": (3, 1, 48), "shift": (3, 1, 48)},
    {"scale": (4, 48), "shift": (48,)},
    {"scale": (3, 4, 1), "shift": (1, 4, 48)},
    {"scale": (3, 1, 1), "shift": (3, 4, 1)},
    {"scale": (3, 1, 48), "shift": (4, 48)},
]


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("shapes", GROUPS)
def test_operands_for_groups_of_rows(device, shapes):
    """The gradients of `backward`, of JAX's differentiation and under vmap are those of NumPy arrays."""
    op = cunorm.fuse(
        "layer_norm",
        prologue=lambda x, residual, shift: x + residual * shift,
        epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift,
        returns=("y", "s"),
    )
    x, residual, dy, ds = (random(3, 4, 48, device=device, seed=i) for i in range(4))
    operands = {"residual": residual} | {name: random(*shape, device=device) for name, shape in shapes.items()}
    results, saved = op.forward(numpy.asarray(x), **jax.tree.map(numpy.asarray, operands))
    expected = op.backward(saved, numpy.asarray(dy), numpy.asarray(ds))

    def gradients(x, operands, dy, ds):
        dx, others = jax.vjp(lambda x, operands: op(x, **operands), x, operands)[1]((dy, ds))
        return {"x": dx} | others

    mine, saved = op.forward(x, **operands)
    close([*mine], [*map(jnp.asarray, results)], 1e-4, 1e-5)
    expected = jax.tree.map(jnp.asarray, expected)
    close(op.backward(saved, dy, ds), expected, 1e-3, 1e-4)
    close(jax.jit(gradients)(x, operands, dy, ds), expected, 1e-3, 1e-4)
    # First only the operands have a batch axis, then everything has one.
    twice = jax.tree.map(lambda operand: jnp.stack([operand, operand * 2], 1), operands)
    by_two = jax.tree.map(lambda array: jnp.stack([array, array]), (x, dy, ds))
    for axes, x_, dy_, ds_ in ((None, x, dy, ds), (0, *by_two)):
        mapped = jax.vmap(gradients, (axes, 1, axes, axes))(x_, twice, dy_, ds_)
        close(jax.tree.map(lambda batch: batch[0], mapped), expected, 1e-3, 1e-4)
        of_second = gradients(x, jax.tree.map(lambda operand: operand * 2, operands), dy, ds)
        close(jax.tree.map(lambda batch: batch[1], mapped), of_second, 1e-3, 1e-4)


@pytest.mark.slow
def test_vectors_for_groups_are_not_spread_over_their_rows():
    """Vectors of a call, and those that vmap makes, stay vectors in the program."""
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    op = cunorm.fuse("layer_norm", epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift)
    x, vector = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 100, 1024), (3, 1, 1024)))

    def function(x, scale, shift):
        return op(x, scale=scale, shift=shift)

    def both(function):
        return lambda x, *vectors: jax.vjp(function, x, *vectors)[1](x)

    of_each = jax.ShapeDtypeStruct((3, 1024), "bfloat16")
    for text in (lowered(both(function), x, vector, vector), lowered(jax.vmap(both(function)), x, of_each, of_each)):
        assert [launch.name for launch in calls(text)][:2] == ["cunorm_forward", "cunorm_backward"]
        assert "tensor<3x100x1024xf32>" not in text
        assert "stablehlo.rsqrt" not in text


@on_devices
def test_statistics_are_of_the_rounded_sum(device):
    """y is the norm of s as rounded."""
    x, residual = (random(40, COLS, device=device, seed=i).astype("bfloat16") * 100 for i in range(2))
    y, s = jax.jit(cunorm.jax.add_layer_norm)(x, residual)
    assert (s == x + residual).all()
    assert (y == jax.jit(cunorm.jax.layer_norm)(s)).all()


@on_devices
def test_named_functions_forward_and_backward(device):
    arrays = make(CASES["add_layer_norm"], (6, COLS), "float32")
    x, residual, weight, bias = arrays.x, *(arrays.operands[name] for name in ("residual", "weight", "bias"))
    for options in ({}, {"zero_centered_gamma": True}):
        expected, saved = cunorm.add_layer_norm.forward(x, residual, weight, bias, **options)
        given = [put(array, device) for array in (x, residual, weight, bias)]
        mine, of_mine = cunorm.jax.add_layer_norm.forward(*given, **options)
        close([*mine], [*map(jnp.asarray, expected)], 1e-5, 1e-5)
        close([*of_mine.statistics.values()], [*map(jnp.asarray, saved.statistics.values())], 1e-5, 1e-5)
        gradients = cunorm.add_layer_norm.backward(saved, *arrays.gradients)
        actual = cunorm.jax.add_layer_norm.backward(of_mine, *put(arrays.gradients, device))
        assert list(actual) == list(gradients)
        close([*actual.values()], [*map(jnp.asarray, gradients.values())], 1e-4, 1e-4)
    (_, s), saved = cunorm.jax.add_rms_norm.forward(put(x, device), put(residual, device))
    actual = cunorm.jax.add_rms_norm.backward(saved, None, s, wanted=["x"])
    assert list(actual) == ["x"]
    numpy.testing.assert_array_equal(actual["x"], s)


@on_devices
@pytest.mark.parametrize("name", ["modulated", "gated", "gate added"])
def test_named_functions_of_vectors_and_gates(device, name):
    """Operands are reshaped before the trace, and derivatives go back through that."""
    x, other, dy = (random(2, 3, COLS, device=device, seed=i) for i in range(3))
    vectors, weight = [random(2, COLS, device=device, seed=i) for i in range(3)], random(COLS, device=device)
    groups = {"group_size": COLS // 3}
    call, given = {
        "modulated": (cunorm.jax.layer_norm_modulate, (x, *vectors[:2], weight, weight)),
        "gated": (partial(cunorm.jax.rms_norm_gated, **groups), (x, other, weight)),
        "gate added": (cunorm.jax.gate_add_rms_norm_modulate, (x, other, *vectors, weight)),
    }[name]
    of_core = getattr(cunorm, getattr(call, "func", call).__name__)
    arrays = [*map(numpy.asarray, given)]
    results, saved = of_core.forward(*arrays, **(groups if name == "gated" else {}))
    results = results if isinstance(results, tuple) else (results,)
    expected = of_core.backward(saved, *[numpy.asarray(dy) for _ in results])
    mine, pull = jax.vjp(jax.jit(call), *given)
    close([*(mine if isinstance(mine, tuple) else (mine,))], [*map(jnp.asarray, results)], 1e-4, 1e-4)
    gradients = pull((dy,) * len(results) if isinstance(mine, tuple) else dy)
    names = [*inspect.signature(of_core).parameters][: len(given)]
    for operand, gradient in zip(names, gradients, strict=True):
        close([gradient], [jnp.asarray(expected[operand])], 1e-3, 1e-3)


@on_devices
def test_a_norm_before_and_after_a_sum(device):
    """The function of JAX, and its `forward` and `backward`, give what those of NumPy arrays give."""
    x, residual, dy, ds = (random(5, COLS, device=device, seed=i) for i in range(4))
    weight, second = (random(COLS, device=device, seed=i) for i in range(2))
    given = x, residual, weight, second
    kept, saved = cunorm.rms_norm_add_rms_norm.forward(*map(numpy.asarray, given))
    of_saved = cunorm.rms_norm_add_rms_norm.backward(saved, *map(numpy.asarray, (dy, ds)))
    expected = [of_saved[name] for name in ("x", "residual", "weight", "second_weight")]
    results, pull = jax.vjp(jax.jit(cunorm.jax.rms_norm_add_rms_norm), *given)
    close([*results], [*map(jnp.asarray, kept)])
    close([*pull((dy, ds))], [*map(jnp.asarray, expected)], 1e-3, 1e-4)
    mine, saved = cunorm.jax.rms_norm_add_rms_norm.forward(*given)
    close([*mine], [*map(jnp.asarray, kept)])
    actual = cunorm.jax.rms_norm_add_rms_norm.backward(saved, dy, ds)
    close([*actual.values()], [*map(jnp.asarray, of_saved.values())], 1e-3, 1e-4)


@on_devices
def test_numbers(device):
    """A Python number stands in the program; an array without axes may change and has a gradient, in any dtype."""
    op = cunorm.fuse("rms_norm", epilogue=lambda xhat, scale, shift: xhat * scale + shift)
    x = random(4, COLS, device=device)
    expected = 0.3 * cunorm.rms_norm(x) + 2
    close(op(x, scale=0.3, shift=2), expected)
    run = jax.jit(lambda x, scale: op(x, scale=scale, shift=2))
    for number in (0.3, 0.7):
        close(run(x, number), number / 0.3 * (expected - 2) + 2)
    scale = jnp.asarray(0.3, "bfloat16")
    gradient = jax.grad(lambda scale: op(x, scale=scale, shift=jnp.float32(2)).sum())(scale)
    close(gradient, cunorm.rms_norm(x).sum().astype("bfloat16"), 1e-2, 1e-2)
    with pytest.raises(TypeError, match="shift must be an array or a number; got bool"):
        op(x, scale=scale, shift=True)


@on_devices
def test_what_is_wrong_is_said(device):
    op = cunorm.fuse("rms_norm", prologue=lambda x, residual: x + residual, dtype="float64")
    x = random(3, COLS, device=device)
    with pytest.raises(TypeError, match="dtype float64 needs jax_enable_x64"):
        op(x, residual=x)
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        cunorm.jax.add_rms_norm(x, x[:2])
    with pytest.raises(TypeError, match="residual must be a JAX or NumPy array; got list"):
        cunorm.jax.add_rms_norm(x, [1.0])
    with pytest.raises(TypeError, match=r"weight must have dtype float16, .*; got int32"):
        cunorm.jax.add_rms_norm(x, x, jnp.ones(COLS, "int32"))
    with pytest.raises(TypeError, match="eps must be a real number"):
        jax.jit(lambda x, eps: cunorm.jax.add_rms_norm(x, x, eps=eps))(x, 1e-5)


@on_devices
def test_a_single_row(device):
    x, residual, weight, bias = arguments(device)
    alike(gradient, x, residual, weight, bias)
    scaled = cunorm.fuse("rms_norm", epilogue=lambda xhat, weight: xhat * weight)
    close(scaled(x, weight=weight), cunorm.rms_norm(x) * weight)


@on_devices
def test_no_rows(device):
    x, weight = jax.device_put(jnp.zeros((0, COLS)), jax.devices(device)[0]), random(COLS, device=device)
    (y, s), pull = jax.vjp(lambda x, weight: cunorm.jax.add_rms_norm(x, x, weight), x, weight)
    dx, dweight = pull((y, s))
    assert y.shape == s.shape == dx.shape == x.shape
    assert dweight.tolist() == [0.0] * COLS


def expected_launches(problem):
    steps = plan(problem, choice.for_xla(choice.device("test"))).steps
    return [(source.entry_name(s.spec), s.grid, s.spec.threads, s.dynamic_shared) for s in steps]


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [("dx", "dweight"), ("dx",)])
@pytest.mark.parametrize("cols", [33, 4096, 65536])
def test_a_program_for_cuda_has_the_launches_of_the_plan(cols, wanted):
    """x and residual share a gradient, and the backward pass reads neither. The program computes nothing else."""
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    rows = jax.ShapeDtypeStruct((3000, cols), "bfloat16")
    weight = jax.ShapeDtypeStruct((cols,), "float32")
    argnums = (0, 1, 2) if "dweight" in wanted else (0, 1)

    def function(x, residual, weight, dy, ds):
        def of_some(*some):
            return cunorm.jax.add_rms_norm(*(some if len(some) == 3 else (*some, weight)), eps=EPS)

        return jax.vjp(of_some, *(x, residual, weight)[: len(argnums)])[1]((dy, ds))

    text = lowered(function, rows, rows, weight, rows, rows)
    dtypes = dict.fromkeys(("x", "s", "y", "residual", "dy", "ds"), "bfloat16") | {"weight": "float32"}
    operation, kinds = added("rms_norm"), {"residual": "full"}
    forward = forward_problem(operation, 3000, cols, {n: d for n, d in dtypes.items() if n[0] != "d"}, kinds=kinds)
    names = tuple(name.removeprefix("d") for name in wanted)
    backward = backward_problem(
        operation, 3000, cols, {n: d for n, d in dtypes.items() if n != "y"}, names, kinds=kinds
    )
    launches = calls(text)
    assert [launch[:4] for launch in launches] == expected_launches(forward) + expected_launches(backward)
    assert "stablehlo.rsqrt" not in text
    read = ("dy", "ds", "s", "weight", "rstd")
    assert launches[1].ptx.count(".param .u64") == len(read) + 1 + ("dweight" in wanted)
    mapped = lowered(jax.vmap(cunorm.jax.add_rms_norm), *[jax.ShapeDtypeStruct((20, 100, cols), "bfloat16")] * 2)
    assert len(calls(mapped)) == 1


def test_a_number_stands_in_the_text():
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    op = cunorm.fuse("rms_norm", epilogue=lambda xhat, scale: xhat * scale)
    x = jax.ShapeDtypeStruct((300, COLS), "float32")
    (first,), (second,) = (calls(lowered(lambda x, n=n: op(x, scale=n), x)) for n in (0.3, 0.7))
    assert first.ptx.count(".param .u64") == 2
    assert first.ptx != second.ptx
