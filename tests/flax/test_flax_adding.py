"""AddLayerNorm and AddRMSNorm of linen and nnx give the sum, and Flax's norm of it with the same parameters."""

from __future__ import annotations

import numpy
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("flax", reason="Flax is not installed")

import flax.linen  # noqa: E402
import flax.nnx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax_arrays import calls, close, lowered, on_devices, random  # noqa: E402

import cunorm.flax.linen  # noqa: E402
import cunorm.flax.nnx  # noqa: E402

COLS = 48
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])
norms = pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])


def applied(framework, module, name, parameters, *arrays, **options):
    """Call a module of Flax's or of ours (named Add...) on the arrays, with these parameters."""
    if framework == "linen":
        return getattr(module.linen, name)(**options).apply({"params": parameters}, *arrays)
    made = getattr(module.nnx, name)(COLS, rngs=flax.nnx.Rngs(0), **options)
    for parameter_name, parameter in parameters.items():
        setattr(made, parameter_name, flax.nnx.Param(parameter))
    return made(*arrays)


def given(norm, device, dtype="float32"):
    x, residual = (random(3, 5, COLS, device=device, seed=i).astype(dtype) for i in range(2))
    parameters = {"scale": random(COLS, device=device), "bias": random(COLS, device=device, seed=1)}
    if norm == "RMSNorm":
        del parameters["bias"]
    return x, residual, parameters


@on_devices
@frameworks
@norms
def test_the_sum_and_flaxs_norm_of_it(device, framework, norm):
    x, residual, parameters = given(norm, device)

    def mine(x, residual, parameters):
        return applied(framework, cunorm.flax, f"Add{norm}", parameters, x, residual)

    def flaxs(x, residual, parameters):
        s = x + residual
        return applied(framework, flax, norm, parameters, s), s

    results, expected = (jax.jit(lambda *a, f=f: jax.vjp(f, *a)[0])(x, residual, parameters) for f in (mine, flaxs))
    close(results, expected)
    gradients, expected_gradients = (
        jax.jit(lambda *a, f=f: jax.vjp(f, *a)[1]((x, residual)))(x, residual, parameters) for f in (mine, flaxs)
    )
    close(gradients, expected_gradients, atol=1e-4)


@on_devices
@frameworks
@norms
def test_dtypes(device, framework, norm):
    """y has `dtype`, or what everything promotes to; s has `s_dtype`, or what x and residual promote to."""
    x, residual, parameters = given(norm, device, "bfloat16")
    y, s = applied(framework, cunorm.flax, f"Add{norm}", parameters, x, residual)
    assert (y.dtype, s.dtype) == ("float32", "bfloat16")
    options = {"dtype": jnp.bfloat16, "s_dtype": jnp.float32}
    y, s = applied(framework, cunorm.flax, f"Add{norm}", parameters, x, residual, **options)
    assert (y.dtype, s.dtype) == ("bfloat16", "float32")
    y, s = applied(framework, cunorm.flax, f"Add{norm}", parameters, x, residual.astype("float32"))
    assert (y.dtype, s.dtype) == ("float32", "float32")
    close(s, x.astype("float32") + residual.astype("float32"))


@frameworks
@norms
def test_parameters_are_those_of_flaxs_norm(framework, norm):
    """They have the same names, shapes, dtypes and values. A module without parameters has none."""
    x = jnp.ones((2, COLS))
    options = {"param_dtype": jnp.bfloat16}
    if framework == "linen":
        mine = getattr(cunorm.flax.linen, f"Add{norm}")(**options).init(jax.random.key(0), x, x)["params"]
        expected = getattr(flax.linen, norm)(**options).init(jax.random.key(0), x)["params"]
        none = getattr(cunorm.flax.linen, f"Add{norm}")(
            use_scale=False, **({"use_bias": False} if norm[0] == "L" else {})
        )
        assert not none.init(jax.random.key(0), x, x)
    else:
        mine, expected = (
            flax.nnx.to_pure_dict(flax.nnx.state(module, flax.nnx.Param))
            for module in (
                getattr(cunorm.flax.nnx, f"Add{norm}")(COLS, rngs=flax.nnx.Rngs(0), **options),
                getattr(flax.nnx, norm)(COLS, rngs=flax.nnx.Rngs(0), **options),
            )
        )
        none = getattr(cunorm.flax.nnx, f"Add{norm}")(COLS, use_scale=False, rngs=flax.nnx.Rngs(0))
        assert none.scale is None
        assert none(x, x)[1].shape == x.shape
    close(mine, expected, 0, 0)


@frameworks
def test_one_kernel_forward(framework):
    pytest.importorskip("cupy_backends", reason="PTX needs NVRTC, which comes with CuPy")
    x, residual, parameters = given("RMSNorm", "cpu", "bfloat16")

    def function(x, residual, parameters):
        return applied(framework, cunorm.flax, "AddRMSNorm", parameters, x, residual)

    text = lowered(function, x, residual, parameters)
    assert len(calls(text)) == 1
    assert "stablehlo.rsqrt" not in text


@frameworks
def test_what_is_wrong_is_said(framework):
    x, residual, parameters = given("RMSNorm", "cpu")
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        applied(framework, cunorm.flax, "AddRMSNorm", parameters, x, residual[0])
    with pytest.raises(ValueError, match="AddRMSNorm: x must have a last axis"):
        applied(framework, cunorm.flax, "AddRMSNorm", parameters, numpy.float32(1), residual)
