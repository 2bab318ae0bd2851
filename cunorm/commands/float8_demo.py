"""`demo --fp8`: a norm that writes 8 bits and the product that reads them: plan, time, and how near the results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from .. import layer_norm_forward, layer_norm_fp8
from ..call.store import NAMES
from ..kernel import device
from ..plan.plain_problems import float8_problem
from ..plan.plan import plan

NAME = NAMES["e4m3"]


def show(
    inputs: Any,
    target: device.Device,
    to_host: Callable[[Any], numpy.ndarray],
    seconds_of: Callable[[Callable[[Any], Any], Any], float],
) -> None:
    """Show a norm with FP8 output and the error of a product that reads it.

    `inputs` has x, weight and bias. The product is computed in float32, of the numbers that the bytes stand for.
    """
    from ..call.numpy import quantise

    x, dtype = inputs.x, inputs.x.dtype.name
    cols = x.shape[-1]
    problem = float8_problem("layer_norm", x.size // cols, cols, dtype, dtype, dtype, y8=NAME, granularity="row")
    print(plan(problem, target).describe())

    print(f"\n{'':<22}{'time':>12}")
    calls = {
        "norm": lambda arrays: layer_norm_forward(arrays.x, None, arrays.weight, arrays.bias),
        "norm to 8 bits": lambda arrays: layer_norm_fp8(arrays.x, None, arrays.weight, arrays.bias),
    }
    for name, call in calls.items():
        print(f"{name:<22}{seconds_of(call, inputs) * 1e6:>9.1f} us")

    numbers = numpy.arange(256, dtype="uint8").view(_float8()).astype("float64")
    wide = [to_host(array).astype("float64") for array in (x, inputs.weight, inputs.bias)]
    exact = layer_norm_forward(wide[0], None, wide[1], wide[2])[0].reshape(-1, cols)
    bytes, scale = (to_host(array) for array in calls["norm to 8 bits"](inputs))
    z = numbers[bytes.reshape(-1, cols)] * scale.reshape(-1, 1)
    linear = numpy.random.default_rng(1).standard_normal((3 * cols, cols), "float32") / numpy.float32(cols) ** 0.5
    linear8, linear_scale = quantise(linear, "row", NAME)
    y = z @ (numbers[linear8] * linear_scale).T
    finite = numpy.isfinite(exact).all(axis=1)

    print(f"\n{'':<22}{'error to float64, relative':>28}")
    for name, result, expected in (("norm to 8 bits", z, exact), ("product after it", y, exact @ linear.T)):
        result, expected = result[finite], expected[finite]
        error = numpy.linalg.norm(result - expected) / max(float(numpy.linalg.norm(expected)), 1e-300)
        print(f"{name:<22}{error:>28.4f}")
    print(f"\nThe product, {cols} -> {3 * cols}, is of random weights with a scale for each row, computed on the host.")


def _float8() -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, NAME)
