"""Both norms for NumPy arrays on a Machine of cpu_device.py, as call/cupy.py runs them for CuPy arrays."""

from __future__ import annotations

from itertools import compress
from unittest import mock

import numpy
import pytest
from cpu_device import Machine, poisoned
from functions import bias_of
from reference import EPS, check_backward, check_forward

from cunorm.call.numpy import numpy_dtype
from cunorm.kernel.device import Device
from cunorm.plan import backward as backward_rule
from cunorm.plan.plain_problems import plain
from cunorm.plan.plan import plan
from cunorm.plan.problem import Problem
from cunorm.plan.steps import Plan

# GPUs of sm_90 have an H200's bandwidth for each multiprocessor, and so its launches.
# With one multiprocessor, a few rows already make a CTA or a cluster take several, one after the other.
SMALL = Device("one SM", 90, 1, 227 << 10, (1, 1, 1, 1), 37)
WITHOUT_CLUSTERS = Device("one SM without clusters", 80, 1, 163 << 10)
LITTLE_SHARED = Device("one SM of a T4", 75, 1, 64 << 10)
# So many multiprocessors leave more partial rows than a CTA of sum_partials reads at once.
FEW_SMS = Device("4 SMs", 90, 4, 227 << 10, (2, 1, 1, 1), 4 * 37)
MANY_SMS = Device("40 SMs", 90, 40, 227 << 10, (20, 10, 5, 2), 40 * 37)
MANY_WITHOUT_CLUSTERS = Device("80 SMs without clusters", 80, 80, 163 << 10)

# The backward pass runs by the kernels of few rows, and by those of many.
as_few_and_as_many = pytest.mark.parametrize("as_many", [False, True], ids=["few", "many"])

Array = numpy.ndarray | None


def forward(
    machine: Machine,
    op: str,
    x: numpy.ndarray,
    weight: Array = None,
    bias: Array = None,
    *,
    device: Device = SMALL,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
    y: Array = None,
) -> tuple[numpy.ndarray, Array, numpy.ndarray]:
    """Return (y, mean, rstd). y may be passed, for its layout and dtype."""
    y = unwritten(x.shape, x.dtype) if y is None else y
    solution = forward_plan(op, x, weight, bias, y, device, zero_centered_gamma)
    statistics = numpy.dtype(solution.problem.compute)
    mean = unwritten(len(x), statistics) if op == "layer_norm" else None
    rstd = unwritten(len(x), statistics)
    eps = EPS[op] if eps is None else eps
    machine.run(solution, {"eps": eps}, x=x, y=y, weight=weight, bias=bias_of(op, bias), mean=mean, rstd=rstd)
    return y, mean, rstd


def forward_plan(
    op: str, x: numpy.ndarray, weight: Array, bias: Array, y: numpy.ndarray, device: Device, zero_centered_gamma: bool
) -> Plan:
    given = {"weight": weight, "bias": bias_of(op, bias)}
    dtypes = {name: array.dtype.name for name, array in given.items() if array is not None}
    problem = plain(
        op,
        "forward",
        *x.shape,
        x.dtype.name,
        **dtypes,
        y=y.dtype.name,
        zero_centered_gamma=zero_centered_gamma,
        strides={"x": row_stride(x), "y": row_stride(y)},
        aligned=aligned(x, y, weight, bias),
    )
    return plan(problem, device)


def backward(
    machine: Machine,
    op: str,
    dy: numpy.ndarray,
    x: numpy.ndarray,
    mean: Array,
    rstd: numpy.ndarray,
    weight: Array = None,
    *,
    device: Device = SMALL,
    zero_centered_gamma: bool = False,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    as_many: bool = False,
) -> tuple[Array, Array, Array]:
    """Return (dx, dweight, dbias), None where output_mask says so. `as_many` takes the kernels of many rows."""
    mask = (*output_mask[:2], output_mask[2] and op == "layer_norm")
    solution = backward_plan(op, dy, x, mean, rstd, weight, device, zero_centered_gamma, mask, as_many)
    parameter = x.dtype if weight is None else weight.dtype
    dx = unwritten(x.shape, x.dtype) if mask[0] else None
    dweight, dbias = (unwritten(x.shape[1], parameter) if wanted else None for wanted in mask[1:])
    machine.run(solution, {}, x=x, dy=dy, weight=weight, mean=mean, rstd=rstd, dx=dx, dweight=dweight, dbias=dbias)
    return dx, dweight, dbias


def backward_plan(
    op: str,
    dy: numpy.ndarray,
    x: numpy.ndarray,
    mean: Array,
    rstd: numpy.ndarray,
    weight: Array,
    device: Device,
    zero_centered_gamma: bool,
    mask: tuple[bool, bool, bool],
    as_many: bool,
) -> Plan:
    problem = plain(
        op,
        "backward",
        *x.shape,
        x.dtype.name,
        weight=None if weight is None else weight.dtype.name,
        y=dy.dtype.name,
        zero_centered_gamma=zero_centered_gamma,
        wanted=tuple(compress(("x", "weight", "bias"), mask)),
        strides={"x": row_stride(x), "dy": row_stride(dy)},
        aligned=aligned(x, dy, weight, mean, rstd),
    )
    return plan_of_many(problem, device) if as_many else plan(problem, device)


def plan_of_many(problem: Problem, device: Device) -> Plan:
    """Return the plan. A backward pass is planned as if it had many rows."""
    if problem.direction == "forward":
        return plan(problem, device)
    with mock.patch.object(backward_rule, "MOST_ROWS", 0):
        return plan.__wrapped__(problem, device)


def check(
    machine: Machine,
    op: str,
    x: numpy.ndarray,
    dy: numpy.ndarray,
    weight: Array,
    bias: Array,
    *,
    device: Device = SMALL,
    eps: float | None = None,
    zero_centered_gamma: bool = False,
    y: Array = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> None:
    """Check that both passes are as accurate as reference.py says, and leave their inputs alone.

    Backward runs by the kernels of few rows and by those of many.
    """
    inputs = [array for array in (x, dy, weight, bias) if array is not None]
    before = [array.tobytes() for array in inputs]
    options = {"device": device, "zero_centered_gamma": zero_centered_gamma}
    y, mean, rstd = forward(machine, op, x, weight, bias, eps=eps, y=y, **options)
    check_forward(op, (y, mean, rstd), x, weight, bias_of(op, bias), eps=eps, zero_centered_gamma=zero_centered_gamma)
    dx_bytes = []
    for as_many in (False, True):
        gradients = backward(
            machine, op, dy, x, mean, rstd, weight, output_mask=output_mask, as_many=as_many, **options
        )
        check_backward(op, gradients, dy, x, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
        dx_bytes.append(None if gradients[0] is None else gradients[0].tobytes())
    assert dx_bytes[0] == dx_bytes[1], "dx has the same bits whatever adds dweight up"
    assert [array.tobytes() for array in inputs] == before


def aligned(*arrays: Array) -> bool:
    return all(array is None or array.ctypes.data % 16 == 0 for array in arrays)


def row_stride(matrix: numpy.ndarray) -> int:
    return matrix.strides[0] // matrix.itemsize if len(matrix) > 1 else matrix.shape[1]


def unwritten(shape: tuple[int, ...] | int, dtype: numpy.dtype | str) -> numpy.ndarray:
    """Return an array that is aligned as device memory is, and full of NaN."""
    dtype = numpy_dtype("test", dtype) if isinstance(dtype, str) else dtype
    return poisoned(int(numpy.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
