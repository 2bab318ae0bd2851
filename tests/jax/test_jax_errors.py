"""Bad input to the JAX adapter raises TypeError or ValueError when the call is traced, never inside XLA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import lowered, on_devices, random  # noqa: E402

import cunorm  # noqa: E402
from cunorm.jax import layer_norm, rms_norm  # noqa: E402

COLS = 8

# (what, arguments beside x, error, what the message says)
CALLS = [
    ("weight too short", {"weight": jnp.ones(7)}, ValueError, r"must be the last axes of x; got \(7,\)"),
    ("wrong normalized_shape", {"normalized_shape": 7}, ValueError, r"must be the last axes of x; got \(7,\)"),
    ("no axes", {"normalized_shape": ()}, ValueError, "at least one axis"),
    (
        "weight unlike normalized_shape",
        {"normalized_shape": 8, "weight": jnp.ones((3, 8))},
        ValueError,
        r"weight must have shape \(8,\) to match the last axis of x; got \(3, 8\)",
    ),
    ("integer weight", {"weight": jnp.ones(8, int)}, TypeError, "weight must have dtype float16, .*; got int32"),
    (
        "complex weight",
        {"weight": jnp.ones(8, complex)},
        TypeError,
        "weight must have dtype float16, .*; got complex64",
    ),
    ("a list", {"weight": [1.0] * 8}, TypeError, "weight must be a JAX or NumPy array; got list"),
    ("negative eps", {"eps": -1.0}, ValueError, "eps must be finite and not negative"),
    ("huge eps", {"eps": 10**400}, ValueError, "eps must be finite; got a number beyond"),
    ("eps of an array", {"eps": jnp.float32(1e-5)}, TypeError, "an array, .*: pass a static argument of jax.jit"),
    ("weight second", {"normalized_shape": jnp.ones(8)}, TypeError, "weight is the third argument"),
    ("eps of text", {"eps": "1e-5"}, TypeError, "eps must be a real number; got str"),
    ("nothing to centre", {"zero_centered_gamma": True}, ValueError, "zero_centered_gamma=True needs a weight"),
    ("integer y", {"dtype": "int8"}, TypeError, "dtype must be one of float16"),
    ("float64 without x64", {"dtype": "float64"}, TypeError, "needs jax_enable_x64"),
    ("negative margin", {"sm_margin": -1}, ValueError, "sm_margin must be 0 or more"),
    ("margin of half an SM", {"sm_margin": 1.5}, TypeError, "sm_margin must be an integer"),
]


@on_devices
@pytest.mark.parametrize("function", [layer_norm, rms_norm], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("what", "options", "error", "phrase"), CALLS, ids=[case[0] for case in CALLS])
def test_arguments(device, function, what, options, error, phrase):
    x = random(3, COLS, device=device)
    jitted = jax.jit(lambda x: function(x, **options))
    of_core = getattr(cunorm, function.__name__)
    for run in (lambda: function(x, **options), lambda: jitted(x), lambda: of_core(x, **options)):
        with pytest.raises(error, match=phrase) as caught:
            run()
        assert str(caught.value).startswith(function.__name__)


@on_devices
@pytest.mark.parametrize("function", [layer_norm, rms_norm, cunorm.layer_norm])
def test_x(device, function):
    with pytest.raises(TypeError, match="x must have dtype float16, bfloat16, float32, float64; got int32"):
        function(jax.device_put(jnp.ones((2, 3), int), jax.devices(device)[0]))
    with pytest.raises(ValueError, match="at least one axis"):
        function(jax.device_put(jnp.float32(1), jax.devices(device)[0]))
    with pytest.raises(ValueError, match="must not be empty"):
        function(jnp.ones((2, 0)))
    with pytest.raises(TypeError, match="x must be "):
        function([1.0, 2.0])


@on_devices
def test_functions_of_cunorm(device):
    x = random(3, COLS, device=device)
    _, mean, rstd = cunorm.layer_norm_forward(x)
    cases = [
        (lambda: cunorm.layer_norm(x, out=x), TypeError, "out must be None, as JAX's arrays are not written to"),
        (lambda: cunorm.rms_norm_backward(x, x, rstd, dx_out=x), TypeError, "dx_out must be None, as JAX's arrays"),
        (lambda: cunorm.layer_norm_backward(x, x, None, rstd), TypeError, "mean must be a JAX or NumPy array"),
        (lambda: cunorm.layer_norm_backward(x, x, mean, rstd[1:]), ValueError, "Pass what layer_norm_forward returned"),
        (lambda: cunorm.layer_norm_backward(x[1:], x, mean, rstd), ValueError, "dy must have the shape of x"),
        (lambda: cunorm.rms_norm_backward(x, x, rstd, output_mask=(True,)), ValueError, "must have 2 entries"),
        (lambda: cunorm.rms_norm_backward(x, x, rstd.astype("float16")), TypeError, "rstd must have dtype float32"),
    ]
    for call, error, phrase in cases:
        with pytest.raises(error, match=phrase):
            call()


def test_eps_is_a_number_of_the_program():
    with pytest.raises(TypeError, match=r"eps must be a real number; got \w*Tracer, an array, .* static"):
        jax.jit(lambda x, eps: layer_norm(x, eps=eps))(random(3, COLS), 1e-5)


def test_a_margin_wider_than_the_gpu():
    with pytest.raises(ValueError, match=r"sm_margin must be 0 or more and below the device's \d+ multiprocessors"):
        lowered(lambda x: layer_norm(x, sm_margin=10_000), random(3, COLS))


@pytest.mark.slow
def test_the_adapter_imports_no_gpu_library():
    """The adapter works on a CPU without CuPy."""
    program = (
        "import sys; sys.modules['cupy'] = sys.modules['cupy_backends'] = None\n"
        "import jax, jax.numpy as jnp, cunorm.jax\n"
        "print(jax.grad(lambda x: cunorm.jax.layer_norm(x).sum())(jnp.ones((2, 3))).shape)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert finished.stdout == "(2, 3)\n", finished.stderr
