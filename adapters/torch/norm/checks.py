"""Checks of arguments, which raise torch's own types of error where torch has one."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...call import checks as core
from ...call.checks import Layout
from ...operation import NAMED, name_of
from ...plan.problem import ITEMSIZE

SM_MARGINS = ("forward", "backward", "inference")


def shape(function: str, value: Any) -> torch.Size:
    """Return normalized_shape, an int or a sequence of ints, as a torch.Size."""
    try:
        return torch.Size((value,) if isinstance(value, int) else value)
    except TypeError:
        got = f"Tensor.{core.WEIGHT_COMES_THIRD}" if isinstance(value, Tensor) else f"{value!r}."
        raise TypeError(f"{function}: normalized_shape must be an int or a sequence of ints; got {got}") from None


def eps(function: str, value: Any, x: Tensor) -> float:
    """Return eps as a float; None is the machine epsilon of the arithmetic, as in torch.nn.functional.rms_norm."""
    if value is None and function == "rms_norm":
        return torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    if torch.compiler.is_compiling():
        return value  # it may be a symbol; the operator refuses what is no number
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}: eps must be a real number; got {type(value).__name__}.")
    return float(value)  # a negative one is allowed, as in torch


def sm_margins(function: str, sm_margin: Any) -> tuple[int, int, int]:
    """Return the margins of the forward pass, of the backward pass, and of a forward pass without a backward pass."""
    if type(sm_margin) is int and sm_margin >= 0:
        return sm_margin, sm_margin, sm_margin
    if not isinstance(sm_margin, Mapping):
        return (core.check_sm_margin(function, sm_margin, None),) * 3
    unknown = set(sm_margin) - set(SM_MARGINS)
    if unknown:
        raise ValueError(
            f"{function}: sm_margin must be an int or a dict with keys of {', '.join(SM_MARGINS)}; "
            f"got the key {sorted(map(str, unknown))[0]!r}."
        )
    forward, backward, inference = (core.check_sm_margin(function, sm_margin.get(name, 0), None) for name in SM_MARGINS)
    return forward, backward, inference


def tensors(function: str, x: Any, weight: Any, bias: Any) -> None:
    for name, tensor in (("input", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "input"):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")


def trailing_axes(function: str, x: Tensor, shape: Sequence[int]) -> int:
    """Return the number of normalised axes, which must be the last ones of x. It can be traced."""
    ndim = len(shape)
    if ndim == 0 or tuple(x.shape[-ndim:]) != tuple(shape):
        raise RuntimeError(
            f"{function}: normalized_shape must be the last axes of input, at least one; got {tuple(shape)} for input "
            f"of shape {tuple(x.shape)}. Pass the shape of the axes to normalise over."
        )
    return ndim


def zero_centered(function: str, weight: Tensor | None) -> str:
    """Return the name in cunorm.operation.NAMED of a function with zero_centered_gamma=True."""
    if weight is None:
        raise ValueError(f"{function}: zero_centered_gamma=True needs a weight; got weight=None.")
    return name_of(function, True)


def forward(
    operation: str, x: Tensor, ndim: int, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise what torch's own norms raise: RuntimeError for shapes and devices that do not fit, NotImplementedError for
    tensors that no kernel reads.
    """
    function = NAMED[operation].norm
    layouts = {
        name: layout(function, name, tensor)
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias))
        if tensor is not None
    }
    shape = layouts["x"].shape[-ndim:]
    if any(isinstance(size, torch.SymInt) for size in shape):
        return  # a row length that torch.compile holds open is checked when the kernel runs
    raising_as_torch(core.check_forward, core.NormOptions(function, shape, False, None, 0, False), layouts)
    output_dtype(function, dtype)


def output_dtype(function: str, value: Any) -> None:
    if not isinstance(value, torch.dtype) or dtype_name(value) not in ITEMSIZE:
        names = ", ".join(f"torch.{name}" for name in ITEMSIZE)
        raise TypeError(f"{function}: dtype must be one of {names}; got {value!r}.")


def floating(function: str, **tensors: Tensor | None) -> None:
    """Raise NotImplementedError for dtypes that our kernels do not read, in a call that torch's norms cannot serve."""
    for name, tensor in tensors.items():
        if tensor is not None and dtype_name(tensor.dtype) not in ITEMSIZE:
            raise NotImplementedError(
                f"{function}: {name} must have dtype {', '.join(ITEMSIZE)}; got {dtype_name(tensor.dtype)}. "
                "Convert it first."
            )


def layout(function: str, name: str, tensor: Tensor) -> Layout:
    """Return the layout without strides; raise NotImplementedError for a tensor that is not strided."""
    kind = unlike_strided(tensor)
    if kind:
        raise NotImplementedError(
            f"{function}: {name} must be a strided tensor of floating-point numbers; got {kind}. Convert it first."
        )
    return Layout(tuple(tensor.shape), (), dtype_name(tensor.dtype), str(tensor.device))


def layout_in_memory(function: str, name: str, tensor: Tensor) -> Layout:
    """Return the layout with strides; raise TypeError for a tensor that is not strided."""
    kind = unlike_strided(tensor)
    if kind:
        raise TypeError(f"{function}: {name} must be a strided tensor; got {kind}. Convert it first.")
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype), str(tensor.device))


def unlike_strided(tensor: Tensor) -> str:
    """Say what a tensor is instead of strided; "" for one that is strided."""
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    return "" if tensor.layout is torch.strided else f"layout {tensor.layout}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def name_or_none(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def raising_as_torch(check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return check(...), raising torch's types of error in place of the core's."""
    try:
        return check(*arguments, **options)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    except TypeError as error:
        raise NotImplementedError(str(error)) from None
