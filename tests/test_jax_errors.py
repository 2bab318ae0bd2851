"""Bad input to the JAX adapter: TypeError or ValueError when the call is traced, never from inside XLA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_arrays import lowered, on_devices, random  # noqa: E402

import cunorm  # noqa: E402
from cunorm.jax import choice, layer_norm, rms_norm  # noqa: E402

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
    for run in (lambda: function(x, **options), lambda: jitted(x), lambda: of_cunorm(function)(x, **options)):
        with pytest.raises(error, match=phrase) as caught:
            run()
        assert str(caught.value).startswith(function.__name__)


def of_cunorm(function):
    return getattr(cunorm, function.__name__)


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
    with pytest.raises(TypeError, match="eps must be a real number; got .*Tracer"):
        jax.jit(lambda x, eps: layer_norm(x, eps=eps))(random(3, COLS), 1e-5)


# What a program for CUDA needs.


class FakeGpu:
    local_hardware_id = 0
    compute_capability = "9.0"


@pytest.fixture
def with_gpu(monkeypatch):
    """JAX sees a GPU, whatever there is."""
    monkeypatch.setattr(choice, "gpu", lambda: FakeGpu)
    choice._probed.cache_clear()
    yield
    choice._probed.cache_clear()


@pytest.fixture
def with_cupy(monkeypatch):
    monkeypatch.setattr(choice.devices, "current", lambda _: choice.devices.KNOWN[90])


def test_without_cupy(with_gpu, monkeypatch):
    def current(_):
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(choice.devices, "current", current)
    with pytest.raises(ImportError, match=r"layer_norm: JAX on a GPU needs CuPy; .* pip install 'cunorm\[cuda13\]'"):
        lowered(lambda x: layer_norm(x, eps=1.5), random(3, COLS))


def test_a_gpu_that_cupy_cannot_use(with_gpu, monkeypatch):
    def current(_):
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(choice.devices, "current", current)
    with pytest.raises(RuntimeError, match="CuPy cannot use the GPU that JAX uses: cudaErrorInsufficientDriver"):
        lowered(lambda x: layer_norm(x, eps=1.375), random(3, COLS))


def test_a_driver_too_old_for_the_ptx(with_gpu, with_cupy, monkeypatch):
    """Both versions are named; the other way in is taken, unless PTX was asked for."""
    pytest.importorskip("cupy_backends")
    from cupy_backends.cuda.api import runtime
    from cupy_backends.cuda.libs import nvrtc

    monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 5))
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: 13000)
    call = choice.call("test")
    assert call.kind == "callback"
    assert "PTX of NVRTC 13.5 is too new for the driver, of CUDA 13.0" in call.reason
    assert "xla_buffer_python_gpu_callback" in lowered(lambda x: layer_norm(x, eps=1.25), random(3, COLS))
    monkeypatch.setenv(choice.CALL_VARIABLE, "ptx")
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.5 .* CUDA 13\.0"):
        lowered(lambda x: layer_norm(x, eps=1.75), random(3, COLS))
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: 13050)
    assert choice.call("test") == ("ptx", "CUNORM_XLA_CALL=ptx")


def test_a_probe_that_fails(with_gpu, monkeypatch):
    """Here XLA has no GPU: what it says is the reason."""
    monkeypatch.setattr(choice.kernels, "why_ptx_is_too_new", lambda: "")
    monkeypatch.setattr(choice.jax, "default_device", lambda _: jax.ensure_compile_time_eval())
    monkeypatch.setattr(choice, "_double", lambda x: 3 * x)
    assert choice.call("test") == ("callback", "XLA's call of PTX gave wrong numbers")
    choice._probed.cache_clear()
    monkeypatch.setattr(choice, "_double", lambda x: 1 / 0)
    assert choice.call("test") == ("callback", "XLA's call of PTX failed: division by zero")
    choice._probed.cache_clear()
    monkeypatch.setattr(choice, "_double", lambda x: 2 * x)
    assert choice.call("test") == ("ptx", "a tiny kernel ran")


def test_an_unknown_choice(monkeypatch):
    monkeypatch.setenv(choice.CALL_VARIABLE, "cubin")
    with pytest.raises(ValueError, match="CUNORM_XLA_CALL must be ptx or callback; got 'cubin'"):
        lowered(lambda x: layer_norm(x, eps=2.5), random(3, COLS))


def test_a_margin_wider_than_the_gpu():
    with pytest.raises(ValueError, match=r"sm_margin must be 0 or more and below the device's \d+ multiprocessors"):
        lowered(lambda x: layer_norm(x, sm_margin=10_000), random(3, COLS))


def test_the_adapter_imports_no_gpu_library():
    """On a CPU it works without CuPy."""
    program = (
        "import sys; sys.modules['cupy'] = sys.modules['cupy_backends'] = None\n"
        "import jax, jax.numpy as jnp, cunorm.jax\n"
        "print(jax.grad(lambda x: cunorm.jax.layer_norm(x).sum())(jnp.ones((2, 3))).shape)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert finished.stdout == "(2, 3)\n", finished.stderr
