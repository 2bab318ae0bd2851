"""What cunorm's own functions do with torch tensors: as cupy_arrays.py and numpy_arrays.py with theirs.

Arguments are held to the rules of cunorm/norm/checks.py, with its types of error. Then the call goes the way of
cunorm.torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...norm import checks as core
from ...norm.checks import Layout
from ...operation import name_of
from ..private import under_functorch
from . import checks, dispatch, formulas, functional, gpu, launching


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
    tensors = (x, weight, bias, out)
    options = (normalized_shape, eps, zero_centered_gamma, dtype, sm_margin)
    shape, y_dtype, eps, layouts = checked_once(_check_forward, function, tensors, options)
    if out is not None:
        _check_out(function, "out", tensors, layouts, len(shape))
    operation = name_of(function.removesuffix("_forward"), zero_centered_gamma)
    arguments = (weight, bias, eps, y_dtype, sm_margin)
    mean = rstd = None
    if _launchable(out) and dispatch.at_once(functional.given(x, weight, bias)):
        call, (rows, *operands) = functional.prepared(operation, x, len(shape), weight, bias, y_dtype, (sm_margin,) * 3)
        to = out if len(shape) == 1 else out.flatten(-len(shape))  # of what is no view a copy
        (y,), both, _ = launching.forward(call, (rows, *operands), (), eps, statistics, sm_margin=sm_margin, out=to)
        y = out if to.data_ptr() == out.data_ptr() else out.copy_(y.view(x.shape))
        _written(out)
        if both is not None:
            mean, rstd = mean_and_rstd(both)
        return y, mean, rstd
    if statistics:
        y, both = functional.norm_with_statistics(operation, x, shape, *arguments)
        mean, rstd = mean_and_rstd(both)
    else:
        y = functional.norm(operation, x, shape, *arguments)
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
    dx_out: Tensor | None,
    sm_margin: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dweight, dbias), None where output_mask says so."""
    operation = name_of(function.removesuffix("_backward"), zero_centered_gamma)
    options = (zero_centered_gamma, output_mask, sm_margin)
    tensors = (dy, x, mean, rstd, weight, dx_out)
    mask, layouts = checked_once(_check_backward, function, tensors, options)
    if dx_out is not None:
        _check_out(function, "dx_out", tensors, layouts, x.dim() - rstd.dim())
    statistics = torch.stack((mean, rstd) if formulas.subtracts_mean(operation) else (rstd,))
    ndim, shape = x.dim() - rstd.dim(), x.shape[rstd.dim() :]
    rows, of_rows, gamma = (None if one is None else functional.as_rows(one, ndim) for one in (x, dy, weight))
    to = None if dx_out is None else functional.as_rows(dx_out, ndim)  # of what is no view a copy
    launched = _launchable(dx_out) and dispatch.at_once(functional.given(x, weight, None)) and dispatch.launchable(dy)
    found = dispatch.affine_gradients(
        operation, of_rows, rows, statistics, gamma, 0.0, mask, sm_margin, dx_out=to if launched else None
    )
    dx, dweight, dbias = (
        one if one is None or ndim == 1 else one.reshape(of)
        for one, of in zip(found, (x.shape, shape, shape), strict=True)
    )
    if dx_out is None:
        return dx, dweight, dbias
    if launched and to.data_ptr() == dx_out.data_ptr():
        _written(dx_out)
        return dx_out, dweight, dbias
    return dx_out.copy_(dx), dweight, dbias


def _check_forward(function, tensors, normalized_shape, eps, zero_centered_gamma, dtype, sm_margin):
    """(normalized_shape, dtype of y, eps, layouts)"""
    layouts = layouts_of(function, dict(zip(("x", "weight", "bias", "out"), tensors, strict=True)), required=("x",))
    if dtype is not None:
        dtype = checks.dtype_name(dtype) if isinstance(dtype, torch.dtype) else core.dtype_name(function, dtype)
    parameters = (layouts.get(name) for name in ("weight", "bias", "out"))
    shape, y_dtype = core.check_forward(
        function, layouts["x"], normalized_shape, *parameters, dtype, zero_centered_gamma=zero_centered_gamma
    )
    eps = core.check_eps(function, eps)
    _check_sm_margin(function, sm_margin, tensors[0])
    return torch.Size(shape), getattr(torch, y_dtype), eps, layouts


def _launchable(out: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a kernel can write its result there, if the other tensors go straight to a launch."""
    return not torch.compiler.is_compiling() and type(out) in functional.PLAIN and not out.is_neg()


def _written(out: Tensor) -> None:
    """Tell autograd of what it did not see: who kept the tensor for a backward pass shall not use it any more."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _check_backward(function, tensors, zero_centered_gamma, output_mask, sm_margin):
    """(which gradients are wanted, layouts)"""
    layer_norm = function.startswith("layer_norm")
    named = dict(zip(("dy", "x", "mean", "rstd", "weight", "dx_out"), tensors, strict=True))
    layouts = layouts_of(function, named, required=("dy", "x", "rstd", *(("mean",) if layer_norm else ())))
    core.check_backward(function, *map(layouts.get, named), zero_centered_gamma=zero_centered_gamma)
    _check_sm_margin(function, sm_margin, named["x"])
    return core.check_output_mask(function, output_mask, 3 if layer_norm else 2, named["dx_out"]), layouts


_checked: dict[Hashable, Any] = {}  # what calls that fit came to, by their layouts and options


def checked_once(check: Callable[..., Any], function: str, tensors: Sequence[Any], options: tuple) -> Any:
    """check(function, tensors, *options), or what it returned for such tensors and options before: 10 us less a call.

    What cannot be looked up, such as a list among the options, a trace's open size or what is no tensor, is checked.
    """
    if torch.compiler.is_compiling():
        return check(function, tensors, *options)
    try:
        key = (
            function,
            *[
                None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                for tensor in tensors
            ],
            *options,
            *[tuple(map(type, option)) if type(option) is tuple else type(option) for option in options],
        )
        result = _checked.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return check(function, tensors, *options)
    if result is None:
        result = launching.keep(_checked, key, check(function, tensors, *options))
    return result


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
    core.check_sm_margin(function, sm_margin, gpu.properties_of(function, x).sms if real else None)


def _check_out(
    function: str, name: str, tensors: Sequence[Tensor | None], layouts: Mapping[str, Layout], ndim: int
) -> None:
    """What is written, the last of the tensors, may be x or dy itself, and otherwise shares no memory with an input;
    nobody wants a gradient through it.
    """
    there = dict(zip(layouts, (tensor for tensor in tensors if tensor is not None), strict=True))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in there.values()):
        raise ValueError(
            f"{function}: {name} must be None where a gradient is wanted; got a tensor. Use torch.no_grad() or "
            "detach()."
        )
    traced = torch.compiler.is_compiling() or under_functorch()
    if traced or any(type(tensor) not in functional.PLAIN or tensor.is_meta for tensor in there.values()):
        return  # there is no memory to compare
    *inputs, (_, out, out_pointer) = [(name, layouts[name], tensor.data_ptr()) for name, tensor in there.items()]
    core.check_out_memory(function, name, out, out_pointer, inputs, ndim)
