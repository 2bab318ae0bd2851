"""What follows for a call with CuPy arrays from layouts and options alone: checks, plan, dtypes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import cupy
import numpy

from . import logs
from .call import checks
from .call.checks import Layout
from .kernel import device
from .numpy_arrays import numpy_dtype
from .plan.plain_problems import BACKWARD, FORWARD, plain
from .plan.plan import plan
from .plan.problem import RowStrides, argument_order
from .plan.steps import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How calls with the same layouts and options run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    device_id: int
    copies: tuple[bool, ...]  # which inputs must be made contiguous, in the order of the call's arrays; () for none
    x_shape: tuple[int, ...]  # of x, y, dy and dx
    shape: tuple[int, ...]  # of the normalised axes
    leading: tuple[int, ...]  # of the other axes
    dtype: numpy.dtype  # of y, or of dweight and dbias
    statistics: numpy.dtype  # of mean and rstd
    layer_norm: bool
    order: Callable[..., Any]  # picks, of all pointers and numbers of a call, what the plan takes
    layouts: dict[str, Layout | None]  # of the call's arrays, by name
    temporary: bool  # out, or dx_out, cannot be written by a kernel
    widest: int  # bytes of an element of any array
    # Forward.
    eps: float = 0.0  # rounded as the kernel's parameter is
    # Backward: which gradients are wanted.
    mask: tuple[bool, bool, bool] = (False, False, False)

    def of_rows(self, x_shape: tuple[int, ...]) -> Recipe:
        """That of a call which differs from this one's in its number of rows alone."""
        assert self.plan is not None
        leading = x_shape[: len(x_shape) - len(self.shape)]
        problem = self.plan.problem.of_rows(math.prod(leading))
        return replace(self, plan=plan(problem, self.plan.device), x_shape=x_shape, leading=leading)


# The arrays of a call, in the order in which it is given them.
FORWARD_ARRAYS = ("x", "weight", "bias", "out")
BACKWARD_ARRAYS = ("dy", "x", "mean", "rstd", "weight", "dx_out")


def forward_recipe(function, arrays, normalized_shape, eps, zero_centered_gamma, dtype, sm_margin) -> Recipe:
    """That of a forward pass; TypeError or ValueError for what no kernel takes. `arrays`: those of FORWARD_ARRAYS."""
    x, weight, bias, out = layouts = tuple(
        layout(function, name, array) if array is not None or name == "x" else None
        for name, array in zip(FORWARD_ARRAYS, arrays, strict=True)
    )
    assert x is not None
    if dtype is not None:
        dtype = checks.dtype_name(function, dtype)
    shape, y_dtype = checks.check_forward(
        function, x, normalized_shape, weight, bias, out, dtype, zero_centered_gamma=zero_centered_gamma
    )
    eps = checks.check_eps(function, eps)
    properties = device.current(int(x.device))
    cols = math.prod(shape)
    x_rows, y_rows = (None if array is None else checks.row_strides(array, len(shape)) for array in (x, out))
    copies = (x_rows is None, *(array is not None and not contiguous(array) for array in (weight, bias)))
    temporary = out is not None and y_rows is None
    logs.copied(function, FORWARD_ARRAYS, layouts, (*copies, temporary))
    task = plain(
        "layer_norm" if function.startswith("layer_norm") else "rms_norm",
        "forward",
        math.prod(x.shape) // cols,
        cols,
        x.dtype,
        weight and weight.dtype,
        bias and bias.dtype,
        y=y_dtype,
        zero_centered_gamma=bool(zero_centered_gamma),
        strides=_strides(x=x_rows, y=y_rows),
        sm_margin=checks.check_sm_margin(function, sm_margin, properties.sms),
        aligned=aligned(arrays),
    )
    if task.compute == "float32":
        eps = ctypes.c_float(eps).value
    return Recipe(
        plan=plan(task, properties) if task.rows else None,
        device_id=int(x.device),
        copies=copies if True in copies else (),
        x_shape=x.shape,
        shape=shape,
        leading=x.shape[: len(x.shape) - len(shape)],
        dtype=numpy_dtype(function, y_dtype),
        statistics=numpy.dtype(task.compute),
        layer_norm=task.norm.subtracts_mean,
        order=argument_order(task, FORWARD),
        layouts=dict(zip(FORWARD_ARRAYS, layouts, strict=True)),
        temporary=temporary,
        widest=_widest(arrays),
        eps=eps,
    )


def backward_recipe(function, arrays, zero_centered_gamma, output_mask, sm_margin) -> Recipe:
    """That of a backward pass, likewise. `arrays`: those of BACKWARD_ARRAYS."""
    layer_norm = function.startswith("layer_norm")
    optional = ("weight", "dx_out") if layer_norm else ("weight", "dx_out", "mean")
    dy, x, mean, rstd, weight, dx_out = layouts = tuple(
        layout(function, name, array) if array is not None or name not in optional else None
        for name, array in zip(BACKWARD_ARRAYS, arrays, strict=True)
    )
    assert dy is not None
    assert x is not None
    assert rstd is not None
    shape = checks.check_backward(function, dy, x, mean, rstd, weight, dx_out, zero_centered_gamma=zero_centered_gamma)
    properties = device.current(int(x.device))
    mask = checks.check_output_mask(function, output_mask, 3 if layer_norm else 2, dx_out)
    cols = math.prod(shape)
    dy_rows, x_rows = (checks.row_strides(array, len(shape)) for array in (dy, x))
    dx_rows = None if dx_out is None else checks.row_strides(dx_out, len(shape))
    small = (array is not None and not contiguous(array) for array in (mean, rstd, weight))
    copies = (dy_rows is None, x_rows is None, *small)
    temporary = dx_out is not None and dx_rows is None
    logs.copied(function, BACKWARD_ARRAYS, layouts, (*copies, temporary))
    task = plain(
        "layer_norm" if layer_norm else "rms_norm",
        "backward",
        math.prod(x.shape) // cols,
        cols,
        x.dtype,
        weight and weight.dtype,
        y=dy.dtype,
        zero_centered_gamma=bool(zero_centered_gamma),
        wanted=[name for name, wanted in zip(("x", "weight", "bias"), mask, strict=True) if wanted],
        strides=_strides(x=x_rows, dy=dy_rows, dx=dx_rows),
        sm_margin=checks.check_sm_margin(function, sm_margin, properties.sms),
        aligned=aligned(arrays),
        overwrites=dx_rows is not None,
    )
    return Recipe(
        plan=plan(task, properties) if task.rows and any(mask) else None,
        device_id=int(x.device),
        copies=copies if True in copies else (),
        x_shape=dy.shape,
        shape=shape,
        leading=rstd.shape,
        dtype=arrays[1].dtype if weight is None else arrays[4].dtype,
        statistics=numpy.dtype(task.compute),
        layer_norm=layer_norm,
        order=argument_order(task, BACKWARD),
        layouts=dict(zip(BACKWARD_ARRAYS, layouts, strict=True)),
        temporary=temporary,
        widest=_widest(arrays),
        mask=mask,
    )


def _strides(**rows: RowStrides | None) -> dict[str, RowStrides]:
    """Those of the arrays that are not copied."""
    return {name: strides for name, strides in rows.items() if strides is not None}


def _widest(arrays: Sequence[Any]) -> int:
    return max(array.dtype.itemsize for array in arrays if array is not None)


def kind_of(option: Any) -> Hashable:
    """Tells 8.0 and True, which are equal to what is allowed, from what is."""
    return tuple(map(type, option)) if type(option) is tuple else type(option)


def contiguous(array: Layout) -> bool:
    return checks.row_strides(array, len(array.shape)) is not None


def aligned(arrays: Sequence[Any]) -> bool:
    """All arrays begin at multiples of 16 bytes; memory that CuPy allocates does."""
    return all(array is None or array.data.ptr % 16 == 0 for array in arrays)


def check_addresses(function: str, arrays: Mapping[str, Any]) -> None:
    """That each array begins where a GPU can read an element: for arrays of which a recipe knows but the layouts."""
    for name, array in arrays.items():
        if array is not None:
            layout(function, name, array)


def layout(function: str, name: str, array: Any) -> Layout:
    """The layout of a CuPy array; TypeError for anything else, ValueError for one that no kernel can read."""
    if not isinstance(array, cupy.ndarray):
        raise TypeError(
            f"{function}: {name} must be a CuPy array, as x is; got {type(array).__name__}. Convert one of them."
        )
    itemsize = array.dtype.itemsize
    if array.data.ptr % itemsize and array.size:
        raise ValueError(
            f"{function}: {name} must begin at a multiple of its {itemsize} bytes an element, as a GPU reads it; got "
            f"the address {array.data.ptr:#x}. Copy the array that it is a view of, from there on."
        )
    strides = checks.strides_in_elements(function, name, array.shape, array.strides, itemsize)
    return Layout(array.shape, strides, _name(array.dtype), array.data.device_id)


@cache
def _name(dtype: numpy.dtype) -> str:
    """NumPy makes it anew each time it is asked for it, which takes 5 us."""
    return dtype.name
