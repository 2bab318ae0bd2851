"""Conversions between JAX arrays and those of the other tests, and the launches of a program lowered for CUDA."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import numpy
import pytest

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

PTX_CALL = "__gpu$xla.gpu.ptx"


def to_jax(array: Any) -> jax.Array:
    """Return a JAX array: on the CPU for a NumPy array, and on its GPU for a CuPy array."""
    if isinstance(array, numpy.ndarray):
        return jax.device_put(array, jax.devices("cpu")[0])
    import cupy

    cupy.cuda.Device().synchronize()
    return jax.dlpack.from_dlpack(array)


def from_jax(array: jax.Array | None) -> Any:
    """Return a NumPy or CuPy array, by where the array is."""
    if array is None:
        return None
    array.block_until_ready()
    if array.device.platform == "cpu":
        return numpy.asarray(array)
    import cupy

    return cupy.from_dlpack(array)


def random(*shape: int, device: str = "cpu", dtype: Any = "float32", seed: int = 0) -> jax.Array:
    values = numpy.random.default_rng(seed + 7 * len(shape) + sum(shape)).standard_normal(shape)
    return jax.device_put(values.astype(dtype), jax.devices(device)[0])


def close(actual: Any, expected: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Check that two trees of arrays have the same shapes and dtypes, and nearly the same values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        numpy.testing.assert_allclose(
            numpy.asarray(a, numpy.float64), numpy.asarray(b, numpy.float64), rtol=rtol, atol=atol
        )


class Call(NamedTuple):
    """A call of PTX in a lowered program."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    ptx: str


def lowered(function: Any, *arguments: Any) -> str:
    """Return the text of the program for CUDA, on any machine."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> list[Call]:
    """Return the calls of PTX in a program. The body of a function counts once, however often it is called."""
    launches = []
    for line in text.splitlines():
        if PTX_CALL in line and "custom_call" in line:
            number = {key: int(value) for key, value in re.findall(r"(\w+) = (\d+) : i32", line)}
            name = re.search(r'name = "(\w+)"', line)[1]
            ptx = re.search(r'kernel_data = "((?:[^"\\]|\\.)*)"', line)[1]
            grid = tuple(number[f"grid_{axis}"] for axis in "xyz")
            launches.append(Call(name, grid, number["block_x"], number["shared_mem_bytes"], ptx))
    return launches
