"""JAX's transformations in any order: derivatives of any order and mode, vmap, scan, checkpoint, shard_map."""

from __future__ import annotations

import itertools

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from functions import OPS  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from jax_arrays import calls, close, lowered, on_devices, random  # noqa: E402
from test_jax_functions import call, plain  # noqa: E402

COLS = 48


def arguments(op, device, *leading):
    arrays = (random(*leading, COLS, device=device), random(COLS, device=device), random(COLS, device=device, seed=1))
    return arrays[: 3 if op == "layer_norm" else 2]


def both(op):
    """Return cunorm's function and the definition."""
    return [lambda *a, f=f: f(op, *a) for f in (call, plain)]


def loss(function):
    return lambda *a: jnp.sin(function(*a)).sum()


def gradient(function):
    """Return the gradient with respect to every argument."""
    return lambda *a: jax.grad(loss(function), tuple(range(len(a))))(*a)


def alike(op, make, *arrays):
    mine, expected = (jax.jit(make(function))(*arrays) for function in both(op))
    close(mine, expected)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("op", OPS)
def test_gradient_eager_and_jitted(device, op):
    arrays = arguments(op, device, 3, 5)
    alike(op, gradient, *arrays)
    mine, expected = both(op)
    close(gradient(mine)(*arrays), gradient(expected)(*arrays))
    close(gradient(jax.jit(mine))(*arrays), gradient(expected)(*arrays))


@on_devices
@pytest.mark.parametrize("op", OPS)
def test_forward_mode(device, op):
    arrays = arguments(op, device, 3, 5)
    alike(op, lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.cos(b) for b in a)), *arrays)
    alike(op, lambda f: lambda x, *rest: jax.jvp(lambda x: f(x, *rest), (x,), (x * x,)), *arrays)
    alike(op, lambda f: lambda *a: jax.linearize(f, *a)[1](*a), *arrays)


@on_devices
@pytest.mark.parametrize(
    ("op", "outer", "inner"),
    [
        *itertools.product(["layer_norm"], ["jacrev", "jacfwd"], ["jacrev", "jacfwd", None]),
        *itertools.product(["rms_norm"], ["jacrev", "jacfwd"], ["jacrev"]),
    ],
)
@pytest.mark.slow
def test_jacobians_and_second_derivatives(device, op, outer, inner):
    arrays = [array[..., :6] for array in arguments(op, device, 2)]
    argnums = tuple(range(len(arrays)))
    outer = getattr(jax, outer)
    if inner is None:
        alike(op, lambda f: outer(f, argnums), *arrays)
    else:
        alike(op, lambda f: outer(getattr(jax, inner)(loss(f), argnums), argnums), *arrays)


@on_devices
@pytest.mark.parametrize(
    ("op", "mapped"),
    [
        *(("layer_norm", mapped) for mapped in ((1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1))),
        *(("rms_norm", mapped) for mapped in ((1, 0), (0, 1))),
    ],
)
def test_vmap_of_any_argument(device, op, mapped):
    """vmap of the function and of its gradient, and the gradient of vmap, are right."""
    arrays = arguments(op, device, 2, 5)
    batched = [
        jnp.stack([array, array + 1, 2 * array], axis=1) if flag else array
        for array, flag in zip(arrays, mapped, strict=True)
    ]
    axes = tuple(1 if flag else None for flag in mapped)
    alike(op, lambda f: jax.vmap(f, axes), *batched)
    alike(op, lambda f: jax.vmap(gradient(f), axes), *batched)
    alike(op, lambda f: gradient(jax.vmap(f, axes)), *batched)


@on_devices
def test_vmap_of_vmap_and_of_forward_mode(device):
    x, weight, bias = arguments("layer_norm", device, 2, 3, 5)
    weights = jnp.stack([weight, weight + 1])
    twice = lambda f: jax.vmap(jax.vmap(f, (0, None, None)), (0, 0, None))  # noqa: E731
    alike("layer_norm", twice, x, weights, bias)
    alike("layer_norm", lambda f: gradient(twice(f)), x, weights, bias)
    alike("layer_norm", lambda f: twice(lambda *a: jax.jvp(f, a, a)), x, weights, bias)


@pytest.mark.slow
@on_devices
def test_under_vmap_one_launch_takes_all_rows(device):
    """Under grad of vmap the kernel sums dweight and dbias over all rows."""
    x, weight, bias = arguments("layer_norm", device, 300, 7)
    mine, _ = both("layer_norm")
    mapped = jax.vmap(mine, (0, None, None))
    (forward,) = calls(lowered(mapped, x, weight, bias))
    (expected,) = calls(lowered(mine, x, weight, bias))
    assert forward == expected
    assert calls(lowered(gradient(mapped), x, weight, bias)) == calls(lowered(gradient(mine), x, weight, bias))


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.slow
def test_scan_and_checkpoint(device, op):
    """The arrays are float64, because errors of float32 grow through the steps of a scan."""

    def scanned(function):
        def run(x, *parameters):
            def step(carry, _):
                return function(carry, *parameters) * 0.5 + x, carry.sum()

            y, sums = jax.lax.scan(step, x, None, length=4)
            return y + sums.sum()

        return run

    policy = jax.checkpoint_policies.dots_saveable
    with jax.enable_x64(True):
        arrays = [array.astype("float64") for array in arguments(op, device, 3, 5)]
        alike(op, lambda f: gradient(scanned(f)), *arrays)
        alike(op, lambda f: gradient(jax.checkpoint(f)), *arrays)
        alike(op, lambda f: gradient(scanned(jax.checkpoint(f))), *arrays)
        alike(op, lambda f: jax.vmap(gradient(scanned(f)), (0, *[None] * (len(arrays) - 1))), *arrays)
        alike(op, lambda f: gradient(jax.checkpoint(lambda *a: f(*a) @ jnp.ones((COLS, 4)), policy=policy)), *arrays)


@on_devices
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_on_one_device(device, op, check_vma):
    """For several devices, see test_jax_sharding.py."""
    arrays = arguments(op, device, 4, 5)
    mesh = jax.sharding.Mesh(jax.devices(device)[:1], ("data",))
    data, whole = PartitionSpec("data"), PartitionSpec()
    specs = (data, *[whole] * (len(arrays) - 1))

    def mapped(function):
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=data, check_vma=check_vma)

    alike(op, mapped, *arrays)
    alike(op, lambda f: gradient(mapped(f)), *arrays)


@on_devices
@pytest.mark.slow
def test_custom_rules_and_control_flow_around(device):
    """A cond and a loop around the function, and a stopped gradient within, change nothing."""
    x, weight, bias = arguments("layer_norm", device, 4, 5)

    def run(function):
        def f(x, weight, bias):
            y = jax.lax.cond(x.sum() > 0, lambda: function(x, weight, bias), lambda: function(-x, weight, bias))
            y = y + function(jax.lax.stop_gradient(x), weight, bias)
            return jax.lax.fori_loop(0, 3, lambda _, y: function(y, weight, bias), y)

        return f

    alike("layer_norm", run, x, weight, bias)
    alike("layer_norm", lambda f: gradient(run(f)), x, weight, bias)
