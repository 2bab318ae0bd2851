"""The backend of torch tensors, which runs cunorm's own functions and what `cunorm.fuse` makes.

Arguments are held to the rules of cunorm/call/checks.py and raise its types of error. The call then goes through
dispatch.py, as those of cunorm.torch do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...call import broadcasting
from ...call import checks as core
from ...call.backend import CallOptions
from ...call.checks import Layout, NormTuple
from ...call.store import check_x, scales_shape
from ...operation import NORMS, SEED, name_of
from ..private import under_functorch
from . import checks, dispatch, float8, formulas, functional, gpu, launching
from .calls import call_of
from .calls import family as family_of
from .launching import Saved
from .repeats import keep, known_call, remember_call


def norm(options: NormTuple, arrays: Sequence[Any], eps: float, out: Any) -> tuple[Tensor, ...]:
    """Run `Backend.norm`; y is differentiable unless it is written to `out`."""
    function, _, zero_centered_gamma, _, sm_margin, statistics = options
    x, weight, bias = arrays
    tensors = (x, weight, bias, out)
    shape, y_dtype, eps, layouts = checked_once(_check_forward, function, tensors, (*options[1:5], eps))
    if out is not None:
        _check_out(function, "out", tensors, layouts, len(shape))
    operation = name_of(function.removesuffix("_forward"), zero_centered_gamma)
    arguments = (weight, bias, eps, y_dtype, sm_margin)
    if _launchable(out) and dispatch.at_once(functional.given(x, weight, bias)):
        call, rows = functional.in_rows(operation, x, len(shape), weight, bias, y_dtype, (sm_margin,) * 3)
        # flatten copies where no view is possible; the result is then copied back into out.
        target = out if len(shape) == 1 else out.flatten(-len(shape))
        key, rows_and_target = (call, sm_margin, "out"), (*rows, target)
        recipe = known_call(key, rows_and_target)
        if recipe is None:
            recipe = launching.recipe_of(call, rows, sm_margin, target)
            remember_call(key, rows_and_target, recipe)
        (y,), row_statistics = launching.forward_by(recipe, rows, (), eps, statistics, target)
        y = out if target.data_ptr() == out.data_ptr() else out.copy_(y.view(x.shape))
        _written(out)
        return (y,) if row_statistics is None else (y, *row_statistics)
    if not statistics:
        y = functional.norm(operation, x, shape, *arguments)
        return (y if out is None else out.copy_(y),)
    y, row_statistics = functional.norm_with_statistics(operation, x, shape, *arguments)
    return (y if out is None else out.copy_(y), *row_statistics)


@torch.no_grad()
def norm_backward(
    options: NormTuple, arrays: Sequence[Any], dx_out: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run `Backend.norm_backward`."""
    function, _, zero_centered_gamma, _, sm_margin, _ = options
    operation = name_of(function.removesuffix("_backward"), zero_centered_gamma)
    dy, x, mean, rstd, weight = arrays
    tensors = (dy, x, mean, rstd, weight, dx_out)
    mask, layouts = checked_once(_check_backward, function, tensors, options[1:])
    if dx_out is not None:
        _check_out(function, "dx_out", tensors, layouts, x.dim() - rstd.dim())
    statistics = torch.stack((mean, rstd) if formulas.subtracts_mean(operation) else (rstd,))
    ndim, shape = x.dim() - rstd.dim(), x.shape[rstd.dim() :]
    rows, dy_rows, gamma = (None if tensor is None else functional.as_rows(tensor, ndim) for tensor in (x, dy, weight))
    # as_rows copies where no view is possible; dx is then copied back into dx_out.
    target = None if dx_out is None else functional.as_rows(dx_out, ndim)
    launched = _launchable(dx_out) and dispatch.at_once(functional.given(x, weight, None)) and dispatch.launchable(dy)
    gradients = dispatch.affine_gradients(
        operation, dy_rows, rows, statistics, gamma, 0.0, mask, sm_margin, dx_out=target if launched else None
    )
    dx, dweight, dbias = (
        tensor if tensor is None or ndim == 1 else tensor.reshape(size)
        for tensor, size in zip(gradients, (x.shape, shape, shape), strict=True)
    )
    if dx_out is None:
        return dx, dweight, dbias
    if launched and target.data_ptr() == dx_out.data_ptr():
        _written(dx_out)
        return dx_out, dweight, dbias
    return dx_out.copy_(dx), dweight, dbias


def _check_forward(function, tensors, normalized_shape, zero_centered_gamma, dtype, sm_margin, eps):
    """Check the arguments of a forward pass and return (normalized_shape, dtype of y, eps, layouts)."""
    layouts = layouts_of(function, dict(zip(("x", "weight", "bias", "out"), tensors, strict=True)), required=("x",))
    if "fp8" in function:
        check_x(function, layouts["x"])
    if dtype is not None:
        dtype = checks.dtype_name(dtype) if isinstance(dtype, torch.dtype) else core.dtype_name(function, dtype)
    options = core.NormOptions(function, normalized_shape, zero_centered_gamma, dtype, sm_margin, False)
    shape, y_dtype = core.check_forward(options, layouts)
    eps = core.check_eps(function, eps)
    _check_sm_margin(function, sm_margin, tensors[0])
    return torch.Size(shape), getattr(torch, y_dtype), eps, layouts


def _launchable(out: Tensor | None) -> TypeGuard[Tensor]:
    """Say whether a kernel can write its result to `out`, if the other tensors can go straight to a launch."""
    return not torch.compiler.is_compiling() and type(out) in functional.PLAIN and not out.is_neg()


def _written(out: Tensor) -> None:
    """Tell autograd that `out` was overwritten, so that a backward pass that saved it raises an error."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _check_backward(function, tensors, *others):
    """Check the arguments of a backward pass and return (which gradients are wanted, layouts)."""
    options = core.NormOptions(function, *others)
    is_layer_norm = function.startswith("layer_norm")
    named = dict(zip(("dy", "x", "mean", "rstd", "weight", "dx_out"), tensors, strict=True))
    layouts = layouts_of(function, named, required=("dy", "x", "rstd", *(("mean",) if is_layer_norm else ())))
    core.check_backward(options, layouts)
    _check_sm_margin(function, options.sm_margin, named["x"])
    return core.check_output_mask(function, options.returns, 3 if is_layer_norm else 2, named["dx_out"]), layouts


_checked: dict[Hashable, Any] = {}  # results of checks that passed, by the layouts and options of the call


def checked_once(check: Callable[..., Any], function: str, tensors: Sequence[Any], options: tuple) -> Any:
    """Return check(function, tensors, *options), from a cache if tensors and options like these were checked before.

    A call that cannot be looked up is checked each time: one with a list among the options, with a size that a trace
    holds open, or with an argument that is no tensor.
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
        result = keep(_checked, key, check(function, tensors, *options))
    return result


def layouts_of(function: str, named: Mapping[str, Any], required: Sequence[str]) -> dict[str, Layout]:
    """Return the layouts of the tensors that are not None; raise TypeError for what is no strided tensor."""
    layouts = {}
    for name, tensor in named.items():
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{function}: {name} must be a torch.Tensor, as x is; got {type(tensor).__name__}. Convert one of them."
            )
        layouts[name] = checks.layout_in_memory(function, name, tensor)
    return layouts


def _check_sm_margin(function: str, sm_margin: Any, x: Tensor) -> None:
    real = type(x) in functional.PLAIN and x.is_cuda and not torch.compiler.is_compiling()
    core.check_sm_margin(function, sm_margin, gpu.properties_of(function, x).sms if real else None)


def _check_out(
    function: str, name: str, tensors: Sequence[Tensor | None], layouts: Mapping[str, Layout], ndim: int
) -> None:
    """Check the last of the tensors, which is written to.

    It may be x or dy itself but must share no other memory with an input, and no gradient may be wanted through it.
    """
    present = dict(zip(layouts, (tensor for tensor in tensors if tensor is not None), strict=True))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present.values()):
        raise ValueError(
            f"{function}: {name} must be None where a gradient is wanted; got a tensor. Use torch.no_grad() or "
            "detach()."
        )
    traced = torch.compiler.is_compiling() or under_functorch()
    if traced or any(type(tensor) not in functional.PLAIN or tensor.is_meta for tensor in present.values()):
        return  # there is no memory to compare
    *inputs, (_, out, out_pointer) = [(name, layouts[name], tensor.data_ptr()) for name, tensor in present.items()]
    core.check_out_memory(function, name, out, out_pointer, inputs, ndim)


def norm_float8(options: NormTuple, arrays: Sequence[Any], eps: float, scale: Any) -> tuple[Tensor, ...]:
    """Run `Backend.norm_float8`; its results are not differentiable."""
    function, _, zero_centered_gamma, _, sm_margin, store = options
    x, weight, bias = tensors = tuple(arrays)
    shape, _, eps, _ = checked_once(_check_forward, function, (*tensors, None), (*options[1:5], eps))
    float8.refuse_gradients(function, "x, weight and bias", tensors)
    operation = name_of("layer_norm" if function.startswith("layer") else "rms_norm", zero_centered_gamma)
    present = {"x": x, "weight": weight, "bias": bias}
    rows = {name: functional.as_rows(tensor, len(shape)) for name, tensor in present.items() if tensor is not None}
    results = float8.of_plain_norm(operation, rows, eps, sm_margin, store, scale)
    leading = tuple(x.shape[: x.dim() - len(shape)])
    scales = results["y8_scale"].reshape(scales_shape(store.granularity, leading, math.prod(shape)))
    y8 = results["y8"].reshape(x.shape)
    return (y8, scales, results["y"].reshape(x.shape)) if store.wide else (y8, scales)


# Operations made by `cunorm.fuse`.


def forward(options: CallOptions, arrays: Mapping[str, Any], eps: float, scale: Any = None) -> dict[str, Tensor]:
    """Run `Backend.forward`; y and s are differentiable, but not an FP8 output."""
    function, operation, demanded, dtype, s_dtype, sm_margin, statistics, store, _, _ = options
    if not torch.compiler.is_compiling() and not (type(eps) is float and 0 <= eps < math.inf):
        eps = core.check_eps(function, eps)
    tensors, scalars = _told_apart(options, arrays)
    names = tuple(tensors)
    sm_margin = core.check_sm_margin(function, sm_margin, None)
    if store:
        return float8.forward_of(options._replace(sm_margin=sm_margin), tensors, scalars, eps, scale)
    call = call_of(function, operation, names[1:], tuple(scalars), demanded, dtype, s_dtype, (sm_margin,) * 3)
    values, row_statistics = dispatch.run(call, tuple(tensors.values()), tuple(scalars.values()), eps, statistics)
    results = dict(zip(operation.returns, values, strict=True))
    if row_statistics is not None:
        results |= dict(zip(operation.statistics, row_statistics.unbind(), strict=True))
    return results


def _told_apart(options: CallOptions, arrays: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Split x and the operands into tensors and numbers; an operand of a demanded kind must be a tensor."""
    x, function = arrays["x"], options.function
    tensors, scalars = {"x": x}, {}
    no_numbers = (SEED, *dict(options.demanded))
    for name, operand in arrays.items():
        if name == "x":
            continue
        if isinstance(operand, Tensor):
            tensors[name] = operand.expand(x.shape[-1:]) if operand.dim() == 0 and x.dim() and name != SEED else operand
        elif name not in no_numbers and (isinstance(operand, numbers.Real) or type(operand) is torch.SymFloat):
            scalars[name] = broadcasting.number(function, name, operand)
        else:
            or_number = "" if name in no_numbers else ", or a number"
            raise TypeError(
                f"{function}: {name} must be a torch.Tensor, as x is{or_number}; got {type(operand).__name__}. "
                "Convert it."
            )
    return tensors, scalars


@torch.no_grad()
def backward(options: CallOptions, arrays: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Run `Backend.backward`. A tensor without axes stands for a column filled with its number."""
    function, operation, demanded = options.function, options.operation, options.demanded
    margins = (core.check_sm_margin(function, options.sm_margin, None),) * 3
    statistic_names = NORMS[operation.norm].statistics
    needed = ("x", *statistic_names)
    arrays = {name: array for name, array in arrays.items() if array is not None or name in needed}
    tensors, scalars = _told_apart(
        options, {name: arrays[name] for name in ("x", *operation.operands) if name in arrays}
    )
    others = {name: arrays[name] for name in ("dy", "ds", "s", *statistic_names) if name in arrays}
    layouts = layouts_of(function, {**tensors, **others}, required=tuple(others))
    x = layouts["x"]
    known = {name: layouts[name] for name in tensors if name != "x"} | scalars
    broadcasting.check_operands(function, x, known, demanded=demanded)
    row_dtype = options.s_dtype or layouts.get("s", x).dtype
    broadcasting.check_backward(function, operation, layouts, row_dtype)
    statistics = torch.stack([others[name] for name in statistic_names])
    dy, ds, s = (others.get(name) for name in ("dy", "ds", "s"))
    if dispatch.at_once([*tensors.values(), *others.values()]):
        call = call_of(function, operation, tuple(tensors)[1:], tuple(scalars), demanded, None, row_dtype, margins)
        family = family_of(call, {name: layouts[name] for name in tensors})
        saved_tensors = tensors if s is None else {**tensors, "s": s}
        saved = Saved(tuple(saved_tensors), tuple(saved_tensors.values()), tuple(scalars.values()), statistics)
        recipe = launching.backward_recipe_of(family, saved, dy, ds, tuple(wanted))
        return dict(zip(wanted, launching.backward_by(recipe, saved, dy, ds), strict=True))
    rows = getattr(torch, row_dtype)
    values = {**tensors, **scalars}
    gradients = formulas.backward(operation, values, s, {"dy": dy, "ds": ds}, statistics, wanted, rows)
    dtypes = {name: array.dtype for name, array in tensors.items()} | dict.fromkeys(scalars, statistics.dtype)
    return {name: array.to(dtypes.get(name, tensors["x"].dtype)) for name, array in zip(wanted, gradients, strict=True)}
