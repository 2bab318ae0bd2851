"""Dropout of JAX arrays: the elements that are dropped are those of NumPy arrays, under every transformation."""

from __future__ import annotations

import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import calls, close, lowered, on_devices, random  # noqa: E402

import cunorm  # noqa: E402
import cunorm.jax  # noqa: E402
from cunorm.expression.philox import uniform  # noqa: E402

P, COLS = 0.25, 48
SEED = numpy.array([7, 2**31 + 5], "uint32")


def call(x, residual, weight, seed, **options):
    return cunorm.jax.add_rms_norm(x, residual, weight, dropout_p=P, seed=seed, **options)


def masked(x, residual, weight, seed):
    mask = uniform(numpy.asarray(seed).view("int64")[0], x.shape, numpy) >= P
    return cunorm.jax.add_rms_norm(x * jnp.asarray(mask / (1 - P), x.dtype), residual, weight)


def given(device, *shape):
    x, residual, dy, ds = (random(*shape, device=device, seed=i) for i in range(4))
    seed = jax.device_put(SEED, jax.devices(device)[0])
    return (x, residual, random(shape[-1], device=device)), seed, (dy, ds)


def gradients(function, arrays, seed, cotangents):
    results, pull = jax.vjp(lambda *arrays: function(*arrays, seed), *arrays)
    return [*results], [*pull(cotangents)]


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("shape", [(3, 5, 33)], ids=str)
def test_values_and_gradients_are_those_of_a_mask(device, shape):
    arrays, seed, cotangents = given(device, *shape)
    expected = gradients(masked, arrays, seed, cotangents)
    close(gradients(call, arrays, seed, cotangents), expected, 1e-3, 1e-4)
    close(jax.jit(lambda *all: gradients(call, *all))(arrays, seed, cotangents), expected, 1e-3, 1e-4)
    _, saved = cunorm.add_rms_norm.forward(*arrays, dropout_p=P, seed=seed)
    actual = cunorm.add_rms_norm.backward(saved, *cotangents)
    close([*actual.values()], expected[1], 1e-3, 1e-4)
    tangents = jax.jvp(lambda *arrays: call(*arrays, seed), arrays, arrays)[1]
    close(tangents, jax.jvp(lambda *arrays: masked(*arrays, seed), arrays, arrays)[1], 1e-3, 1e-4)
    again = jax.checkpoint(call)
    close(gradients(again, arrays, seed, cotangents), expected, 1e-3, 1e-4)


@pytest.mark.slow
@on_devices
def test_second_derivatives(device):
    (x, *others), seed, _ = given(device, 4, COLS)

    def twice(function):
        return jax.grad(lambda x: (jax.grad(lambda x: function(x, *others, seed)[0].sum())(x) ** 2).sum())(x)

    close(twice(call), twice(masked), 1e-3, 1e-3)


@pytest.mark.slow
@on_devices
def test_vmap_draws_of_each_sample_what_it_draws_alone(device):
    (x, residual, weight), seed, (dy, ds) = given(device, 3, 4, COLS)
    seeds = jnp.stack([seed, seed + 1, seed])
    for of_seed, axis in ((seed, None), (seeds, 0)):
        results = jax.vmap(call, (0, 0, None, axis))(x, residual, weight, of_seed)
        pulled = jax.vmap(
            lambda x, r, seed, dy, ds: gradients(call, (x, r, weight), seed, (dy, ds))[1][0], (0, 0, axis, 0, 0)
        )(x, residual, of_seed, dy, ds)
        for i in range(3):
            own = of_seed if axis is None else of_seed[i]
            close([result[i] for result in results], [*call(x[i], residual[i], weight, own)])
            _, (dx, *_) = gradients(call, (x[i], residual[i], weight), own, (dy[i], ds[i]))
            close(pulled[i], dx, 1e-3, 1e-4)


def test_numbers_are_those_of_numpy():
    from cunorm.jax.norm import philox

    for shape in ((3, 5, 19), (40, 64)):
        numbers = philox.uniform(jnp.asarray(SEED), shape, "float32")
        assert (numpy.asarray(numbers) == uniform(SEED.view("int64")[0], shape, numpy)).all()


@pytest.mark.slow
def test_a_program_for_cuda_has_no_mask():
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    x, weight = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8192, 1024), (1024,)))
    seed = jax.ShapeDtypeStruct((2,), "uint32")

    def step(x, residual, weight, seed):
        return jax.vjp(lambda *arrays: call(*arrays, seed), x, residual, weight)[1]((x, residual))

    text = lowered(step, x, x, weight, seed)
    assert [launch.name for launch in calls(text)][:1] == ["cunorm_forward"]
    assert "cunorm_backward" in [launch.name for launch in calls(text)]
    assert "i1>" not in text
    assert "stablehlo.rsqrt" not in text


def test_refusals():
    x = jnp.ones((3, 4))
    for error, message, options in (
        (ValueError, "at least 0 and less than 1", {"dropout_p": 1.0, "seed": jnp.asarray(SEED)}),
        (ValueError, "needs a seed", {"dropout_p": 0.1}),
        (TypeError, "seed must be an array of one int64 or two uint32", {"dropout_p": 0.1, "seed": 7}),
        (TypeError, "got dtype int32", {"dropout_p": 0.1, "seed": jnp.arange(1)}),
        (ValueError, r"got uint32 of shape \(1,\)", {"dropout_p": 0.1, "seed": jnp.arange(1, dtype="uint32")}),
    ):
        with pytest.raises(error, match=message):
            cunorm.jax.add_rms_norm(x, x, **options)
