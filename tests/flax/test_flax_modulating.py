"""AdaLayerNorm of linen and nnx gives what Flax's LayerNorm, Dense and arithmetic give, with the same parameters."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

import flax.linen  # noqa: E402
import flax.nnx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax_arrays import calls, close, lowered, on_devices, random  # noqa: E402

import cunorm.flax.linen  # noqa: E402
import cunorm.flax.nnx  # noqa: E402

BATCH, TOKENS, COLS, FEATURES = 3, 5, 48, 8
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


def given(device, dtype="float32"):
    x, condition = random(BATCH, TOKENS, COLS, device=device), random(BATCH, FEATURES, device=device, seed=1)
    parameters = {
        "kernel": random(FEATURES, 2 * COLS, device=device, seed=2),
        "bias": random(2 * COLS, device=device, seed=3),
    }
    return x.astype(dtype), condition.astype(dtype), parameters


def applied(framework, x, condition, parameters, **options):
    if framework == "linen":
        module = cunorm.flax.linen.AdaLayerNorm(**options)
        return module.apply({"params": {"linear": parameters}}, x, condition)
    module = cunorm.flax.nnx.AdaLayerNorm(FEATURES, COLS, rngs=flax.nnx.Rngs(0), **options)
    module.linear.kernel, module.linear.bias = (flax.nnx.Param(parameters[name]) for name in ("kernel", "bias"))
    return module(x, condition)


def by_hand(x, condition, parameters):
    shift, scale = jnp.split(jax.nn.silu(condition) @ parameters["kernel"] + parameters["bias"], 2, axis=-1)
    norm = flax.linen.LayerNorm(use_scale=False, use_bias=False, use_fast_variance=False)
    return norm.apply({}, x) * (1 + scale[:, None]) + shift[:, None]


@on_devices
@frameworks
def test_values_and_gradients(device, framework):
    """A vector is for a sample, also where there are as many samples as tokens."""
    x, condition, parameters = given(device)
    for some in (x, x[:, :BATCH], x[:, None]):
        result, expected = (
            jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2)))(some, condition, parameters)
            for f in (lambda *a: applied(framework, *a), by_hand if some.ndim == 3 else by_hand_of_two_axes)
        )
        close(result, expected, atol=1e-4)


def by_hand_of_two_axes(x, condition, parameters):
    return by_hand(x.reshape(BATCH, -1, COLS), condition, parameters).reshape(x.shape)


@on_devices
@frameworks
def test_dtypes(device, framework):
    x, condition, parameters = given(device, "bfloat16")
    assert applied(framework, x, condition, parameters).dtype == "float32"
    assert applied(framework, x, condition, parameters, dtype=jnp.bfloat16).dtype == "bfloat16"


@frameworks
def test_parameters_of_zero_leave_the_norm(framework):
    x, condition, _ = given("cpu")
    zeros = {"kernel_init": jax.nn.initializers.zeros, "param_dtype": jnp.bfloat16}
    if framework == "linen":
        y, variables = cunorm.flax.linen.AdaLayerNorm(**zeros).init_with_output(jax.random.key(0), x, condition)
        dtypes = jax.tree.map(lambda parameter: str(parameter.dtype), variables["params"])
        assert dtypes == {"linear": {"kernel": "bfloat16", "bias": "bfloat16"}}
    else:
        y = cunorm.flax.nnx.AdaLayerNorm(FEATURES, COLS, rngs=flax.nnx.Rngs(0), **zeros)(x, condition)
    close(y, flax.linen.LayerNorm(use_scale=False, use_bias=False, use_fast_variance=False).apply({}, x))


@frameworks
def test_one_kernel_forward(framework):
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    x, condition, parameters = given("cpu", "bfloat16")
    text = lowered(lambda *a: applied(framework, *a), x, condition, parameters)
    assert len(calls(text)) == 1
    assert "stablehlo.rsqrt" not in text


@frameworks
@pytest.mark.parametrize(
    "shapes", [((COLS,), (FEATURES,)), ((2, 5, COLS), (3, FEATURES)), ((3, COLS), (3, 1, FEATURES))]
)
def test_a_condition_is_for_each_sample(framework, shapes):
    _, _, parameters = given("cpu")
    with pytest.raises(ValueError, match=r"x must be \(batch, ..., columns\) and condition \(batch, features\)"):
        applied(framework, *map(jnp.ones, shapes), parameters)
