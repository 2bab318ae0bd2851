"""How kernels enter a jitted program: which way is chosen and why, and what a program for CUDA needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")

from jax_arrays import lowered, random  # noqa: E402

from cunorm.commands import info  # noqa: E402
from cunorm.jax import layer_norm  # noqa: E402
from cunorm.jax.xla import target as choice  # noqa: E402
from cunorm.kernel.device import INSTALL  # noqa: E402

COLS = 8


class FakeGpu:
    local_hardware_id = 0


@pytest.fixture
def with_gpu(monkeypatch):
    """Pretend that JAX sees a GPU."""
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
    with pytest.raises(ImportError, match=f"layer_norm: JAX on a GPU needs CuPy; .* {re.escape(INSTALL)}"):
        lowered(lambda x: layer_norm(x, eps=1.5), random(3, COLS))


def test_a_gpu_that_cupy_cannot_use(with_gpu, monkeypatch):
    def current(_):
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(choice.devices, "current", current)
    with pytest.raises(RuntimeError, match="CuPy cannot use the GPU that JAX uses: cudaErrorInsufficientDriver"):
        lowered(lambda x: layer_norm(x, eps=1.375), random(3, COLS))


def test_a_driver_too_old_for_the_ptx(with_gpu, with_cupy, monkeypatch):
    """The message names both versions. The callback is taken, unless PTX was asked for."""
    pytest.importorskip("cupy")
    from cupy.cuda import runtime
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
    """The reason says what went wrong in the probe."""
    monkeypatch.setattr(choice.compile, "why_ptx_is_too_new", lambda: "")
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


def test_info_shows_it(with_gpu, monkeypatch):
    monkeypatch.setattr(info, "why_no_gpu", lambda: None)
    monkeypatch.setenv(choice.CALL_VARIABLE, "callback")
    assert info.report()["xla_call"] == "callback (CUNORM_XLA_CALL=callback)"
    monkeypatch.setattr(choice, "gpu", lambda: None)
    assert info.report()["xla_call"] == "jax.numpy (JAX sees no GPU)"
    monkeypatch.setattr(choice, "gpu", lambda: 1 / 0)
    assert info.report()["xla_call"] == {"unavailable": "ZeroDivisionError: division by zero"}


def test_info_without_a_gpu_does_not_import_jax():
    program = "import sys; from cunorm.commands import info; print(info.report()['xla_call'], 'jax' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert finished.stdout.startswith("jax.numpy (")
    assert finished.stdout.endswith(" False\n"), finished.stderr


@pytest.mark.gpu
def test_on_a_gpu_the_probe_runs():
    """The only reason known to take the callback is a driver too old for the PTX of this NVRTC."""
    chosen = choice.call("test")
    too_new = choice.compile.why_ptx_is_too_new()
    assert chosen == (("callback", too_new) if too_new else ("ptx", "a tiny kernel ran"))
