"""Both norms on a Machine of cpu_device.py: NumPy arrays in, NumPy arrays out, as cupy_arrays.py does with CuPy's."""

from __future__ import annotations

import numpy
from cpu_device import POISON, Machine
from functions import bias_of
from reference import EPS, check_backward, check_forward

from cunorm.device import Device
from cunorm.norm.plan import Plan, plan
from cunorm.norm.problem import Problem
from cunorm.numpy_arrays import numpy_dtype

# One multiprocessor: a few rows already make a CTA or a cluster take several, one after the other.
SMALL = Device("one SM", 90, 1, 227 << 10, (1, 1, 1, 1))
WITHOUT_CLUSTERS = Device("one SM without clusters", 80, 1, 163 << 10)
# Enough that a CTA of sum_partials does not read all partial rows at once.
MANY_SMS = Device("40 SMs", 90, 40, 227 << 10, (20, 10, 5, 2))
MANY_WITHOUT_CLUSTERS = Device("80 SMs without clusters", 80, 80, 163 << 10)

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
    """(y, mean, rstd); y may be given for its layout and dtype."""
    bias = bias_of(op, bias)
    y = _unwritten(x.shape, x.dtype) if y is None else y
    solution = forward_plan(op, x, weight, bias, y, device, zero_centered_gamma)
    statistics = numpy.dtype(solution.problem.statistics)
    mean = _unwritten(len(x), statistics) if op == "layer_norm" else None
    rstd = _unwritten(len(x), statistics)
    eps = EPS[op] if eps is None else eps
    machine.run_forward(solution, eps, x=x, y=y, weight=weight, bias=bias, mean=mean, rstd=rstd)
    return y, mean, rstd


def forward_plan(
    op: str, x: numpy.ndarray, weight: Array, bias: Array, y: numpy.ndarray, device: Device, zero_centered_gamma: bool
) -> Plan:
    return _plan("forward", op, x, y, weight, bias, (), device, zero_centered_gamma, (False, False, False))


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
) -> tuple[Array, Array, Array]:
    """(dx, dweight, dbias), None where output_mask says so."""
    mask = (*output_mask[:2], output_mask[2] and op == "layer_norm")
    solution = backward_plan(op, dy, x, mean, rstd, weight, device, zero_centered_gamma, mask)
    parameter = x.dtype if weight is None else weight.dtype
    dx = _unwritten(x.shape, x.dtype) if mask[0] else None
    dweight, dbias = (_unwritten(x.shape[1], parameter) if wanted else None for wanted in mask[1:])
    machine.run_backward(solution, x=x, dy=dy, weight=weight, mean=mean, rstd=rstd, dx=dx, dweight=dweight, dbias=dbias)
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
) -> Plan:
    return _plan("backward", op, x, dy, weight, None, (mean, rstd), device, zero_centered_gamma, mask)


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
    """Forward, and backward of what forward saved, are as accurate as reference.py says, and inputs are left alone."""
    inputs = [array for array in (x, dy, weight, bias) if array is not None]
    before = [array.tobytes() for array in inputs]
    options = {"device": device, "zero_centered_gamma": zero_centered_gamma}
    y, mean, rstd = forward(machine, op, x, weight, bias, eps=eps, y=y, **options)
    check_forward(op, (y, mean, rstd), x, weight, bias_of(op, bias), eps=eps, zero_centered_gamma=zero_centered_gamma)
    gradients = backward(machine, op, dy, x, mean, rstd, weight, output_mask=output_mask, **options)
    check_backward(op, gradients, dy, x, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
    assert [array.tobytes() for array in inputs] == before


def _plan(direction, op, x, y, weight, bias, statistics, device, zero_centered_gamma, mask) -> Plan:
    rows, cols = x.shape
    arrays = (x, y, weight, bias, *statistics)
    return plan(
        Problem(
            op=op,
            direction=direction,
            rows=rows,
            cols=cols,
            x=x.dtype.name,
            y=y.dtype.name,
            weight=None if weight is None else weight.dtype.name,
            bias=None if bias is None else bias.dtype.name,
            zero_centered_gamma=zero_centered_gamma,
            x_stride=_stride(x),
            y_stride=_stride(y),
            sm_margin=0,
            aligned=all(array is None or array.ctypes.data % 16 == 0 for array in arrays),
            output_mask=mask,
        ),
        device,
    )


def _stride(matrix: numpy.ndarray) -> int:
    return matrix.strides[0] // matrix.itemsize if len(matrix) > 1 else matrix.shape[1]


def _unwritten(shape: tuple[int, ...] | int, dtype: numpy.dtype | str) -> numpy.ndarray:
    """Aligned as device memory is, full of NaN."""
    dtype = numpy_dtype("test", dtype) if isinstance(dtype, str) else dtype
    size = int(numpy.prod(shape)) * dtype.itemsize
    buffer = numpy.full(size + 16, POISON, "uint8")
    start = -buffer.ctypes.data % 16
    return buffer[start : start + size].view(dtype).reshape(shape)
