"""For which GPU, and in which of two ways, kernels enter a jit.

Both are found out once, when the first program is lowered for CUDA. `python -m cunorm info` shows them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy

import jax

from ... import logs
from ...kernel import compile
from ...kernel import device as devices
from ...kernel.device import Device
from ..private import PTX_TARGET

CALL_VARIABLE = "CUNORM_XLA_CALL"
ARCH_VARIABLE = "CUNORM_XLA_ARCH"
DEFAULT_ARCH = 90


class Call(NamedTuple):
    """How kernels are launched, and why; `kind` is "ptx" or "callback"."""

    kind: str
    reason: str


@cache
def gpu() -> Any:
    """Return the first GPU that JAX uses, None where programs for CUDA can only be lowered."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def device(function: str) -> Device:
    """Return the GPU that plans are made for: JAX's first one, or without any the one that CUNORM_XLA_ARCH names."""
    first = gpu()
    if first is None:
        arch = os.environ.get(ARCH_VARIABLE, str(DEFAULT_ARCH))
        known = {str(number): known_device for number, known_device in devices.KNOWN.items()}
        if arch not in known:
            raise ValueError(f"{function}: {ARCH_VARIABLE} must be one of {', '.join(known)}; got {arch!r}.")
        return known[arch]
    try:
        return devices.current(first.local_hardware_id)
    except ImportError as error:
        raise ImportError(
            f"{function}: JAX on a GPU needs CuPy; it could not be imported ({error}). {devices.INSTALL}."
        ) from error
    except RuntimeError as error:  # CuPy's errors of CUDA are such
        raise RuntimeError(
            f"{function}: CuPy cannot use the GPU that JAX uses: {error}. Compare the driver, by nvidia-smi, with what "
            "`python -m cunorm info` says."
        ) from error


def for_xla(device: Device) -> Device:
    """Return the same device without clusters of 16, for which a kernel needs an attribute that XLA does not set."""
    return replace(device, clusters=(*device.clusters[:3], 0)) if device.clusters else device


def call(function: str) -> Call:
    """Return how kernels are launched."""
    forced = os.environ.get(CALL_VARIABLE)
    if forced not in (None, "ptx", "callback"):
        raise ValueError(f"{function}: {CALL_VARIABLE} must be ptx or callback; got {forced!r}.")
    if forced is None:
        return _probed() if gpu() is not None else Call("ptx", "no GPU to try it on")
    too_new = compile.why_ptx_is_too_new() if gpu() is not None else ""
    if forced == "ptx" and too_new:
        raise RuntimeError(f"{function}: {CALL_VARIABLE} must not be ptx here: {too_new}; unset it.")
    return Call(forced, f"{CALL_VARIABLE}={forced}")


@cache
def _probed() -> Call:
    reason = _why_no_ptx()
    if reason:
        logs.fell_back("cunorm.jax", "CuPy launches the kernels from a callback in each step", reason)
        return Call("callback", reason)
    return Call("ptx", "a tiny kernel ran")


def _why_no_ptx() -> str:
    """Return why XLA does not run a tiny kernel of PTX, empty if it does."""
    too_new = compile.why_ptx_is_too_new()
    if too_new:
        return too_new
    values = numpy.arange(32, dtype=numpy.float32)
    try:
        with jax.ensure_compile_time_eval(), jax.default_device(gpu()):
            result = numpy.asarray(jax.jit(_double)(values))
    except Exception as error:  # whatever XLA raises: it promises nothing about this call
        return f"XLA's call of PTX failed: {str(error).splitlines()[0]}"
    return "" if numpy.array_equal(result, 2 * values) else "XLA's call of PTX gave wrong numbers"


PROBE = """
extern "C" __global__ void cunorm_probe(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }
"""


def _double(x: jax.Array) -> jax.Array:
    ones = dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_y", "block_z"), numpy.int32(1))
    return jax.ffi.ffi_call(PTX_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        name="cunorm_probe",
        kernel_type="ptx",
        kernel_data=compile.compile_ptx(PROBE, "cunorm_probe", device("cunorm").arch),
        block_x=numpy.int32(x.size),
        shared_mem_bytes=numpy.int32(0),
        **ones,
    )
