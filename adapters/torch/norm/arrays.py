"""What cunorm's own functions do with torch tensors: as cupy_arrays.py and numpy_arrays.py with theirs.

Arguments are held to the rules of cunorm/norm/problem.py, with its types of error. Then the call goes the way of
cunorm.torch's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...norm import problem
from ...norm.problem import Layout
from . import checks, functional, launching, operators


def forward(
    function: str,
    x: Tensor,
    normalized_shape: int | Sequence[int] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool,
    out: Tensor | None,
    dtype: Any,
    sm_margin: int,
    statistics: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (y, mean, rstd), statistics None unless asked for. y is differentiable unless it is written to `out`."""
    named = {"x": x, "weight": weight, "bias": bias, "out": out}
    layouts = layouts_of(function, named, required=("x",))
    if dtype is not None:
        dtype = checks.dtype_name(dtype) if isinstance(dtype, torch.dtype) else problem.dtype_name(function, dtype)
    shape, y_dtype = problem.check_forward(
        function,
        layouts["x"],
        normalized_shape,
        layouts.get("weight"),
        layouts.get("bias"),
        layouts.get("out"),
        dtype,
        zero_centered_gamma=zero_centered_gamma,
    )
    eps = problem.check_eps(function, eps)
    _check_sm_margin(function, sm_margin, x)
    if out is not None:
        _check_out(function, named, layouts, len(shape))
    op = function.removesuffix("_forward")
    arguments = (weight, bias, eps, zero_centered_gamma, getattr(torch, y_dtype), sm_margin)
    mean = rstd = None
    if statistics:
        y, both = functional.norm_with_statistics(op, x, len(shape), *arguments)
        mean, rstd = mean_and_rstd(both)
    else:
        y = functional.norm(op, x, shape, *arguments)
    return (y if out is None else out.copy_(y)), mean, rstd


@torch.no_grad()
def backward(
    function: str,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    zero_centered_gamma: bool,
    output_mask: tuple[bool, ...],
    sm_margin: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    op = function.removesuffix("_backward")
    layer_norm = op == "layer_norm"
    named = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight}
    layouts = layouts_of(function, named, required=("dy", "x", "rstd", *(("mean",) if layer_norm else ())))
    problem.check_backward(
        function,
        layouts["dy"],
        layouts["x"],
        layouts.get("mean"),
        layouts["rstd"],
        layouts.get("weight"),
        zero_centered_gamma=zero_centered_gamma,
    )
    mask = problem.check_output_mask(function, output_mask, 3 if layer_norm else 2)
    _check_sm_margin(function, sm_margin, x)
    statistics = torch.stack((mean, rstd) if layer_norm else (rstd,))
    return operators.backward(dy, x, statistics, weight, op, 0.0, zero_centered_gamma, mask, sm_margin)


def layouts_of(function: str, named: Mapping[str, Any], required: Sequence[str]) -> dict[str, Layout]:
    """The layouts of those tensors that there are; TypeError for anything that is no tensor laid out by strides."""
    layouts = {}
    for name, tensor in named.items():
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{function}: {name} must be a torch.Tensor, as x is; got {type(tensor).__name__}. Convert one of them."
            )
        kind = checks.unlike_strided(tensor)
        if kind:
            raise TypeError(f"{function}: {name} must be a strided tensor; got {kind}. Convert it first.")
        strides = tuple(tensor.stride())
        layouts[name] = Layout(tuple(tensor.shape), strides, checks.dtype_name(tensor.dtype), str(tensor.device))
    return layouts


def mean_and_rstd(statistics: Tensor) -> tuple[Tensor | None, Tensor]:
    """Of what formulas.py calls statistics; mean None for rms_norm."""
    return (statistics[0] if len(statistics) == 2 else None), statistics[-1]


def _check_sm_margin(function: str, sm_margin: Any, x: Tensor) -> None:
    real = type(x) in functional.PLAIN and x.is_cuda and not torch.compiler.is_compiling()
    problem.check_sm_margin(function, sm_margin, launching.properties_of(function, x).sms if real else None)


def _check_out(function: str, named: Mapping[str, Any], layouts: Mapping[str, Layout], ndim: int) -> None:
    """`out` may be x itself, and otherwise shares no memory with an input; nobody wants a gradient through it."""
    tensors = [named[name] for name in layouts]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{function}: out must be None where a gradient is wanted; got a tensor. Use torch.no_grad() or detach()."
        )
    traced = torch.compiler.is_compiling() or operators.under_functorch()
    if traced or any(type(tensor) not in functional.PLAIN or tensor.is_meta for tensor in tensors):
        return  # there is no memory to compare
    inputs = [(name, layouts[name], named[name].data_ptr()) for name in layouts if name != "out"]
    problem.check_out_memory(function, layouts["out"], named["out"].data_ptr(), inputs, ndim)
