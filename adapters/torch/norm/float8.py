"""Operations of tensors with FP8 output.

One kernel makes it where it can be launched. On the CPU, under torch.compile and where a mode listens to calls,
dispatch.py computes y in float32 and torch's own operators round it, to the same bytes as the kernel where the float32
values are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ...call import store as rules
from ...call.backend import CallOptions
from ...call.checks import Layout
from ...call.store import Float8Store
from ...operation import NAMED, Operation, name_of
from ...plan.problem import BLOCK, FLOAT8
from . import checks, dispatch, formulas, functional, launching, operators
from .calls import Call, affine_call, call_of


def forward_of(
    options: CallOptions, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], eps: float, scale: Any
) -> dict[str, Tensor]:
    """Check a call and return y8, y8_scale, y if it is wide and s if it is returned, by name.

    `tensors` are x and the operands that are tensors, `numbers` the operands that are numbers. `scale` is for a store
    with one scale for all of y; it is computed if it is None.
    """
    function, operation, demanded, dtype, s_dtype, sm_margin, _, store, _, _ = options
    assert store is not None
    rules.check_rows(function, Layout((), (), checks.dtype_name(tensors["x"].dtype), ""), s_dtype)
    refuse_gradients(function, "x and operands", tuple(tensors.values()))
    scale = _scale(operation, tensors, store, scale)
    form = (function, operation, tuple(tensors)[1:], tuple(numbers), demanded)
    margins = (sm_margin,) * 3
    values = tuple(tensors.values()), tuple(numbers.values()), eps
    if _is_one_launch(tensors):
        return _launched(call_of(*form, dtype, s_dtype, margins, store), *values, scale)
    results, _ = dispatch.run(call_of(*form, "float32", s_dtype, margins), *values, False)
    return _stored(dict(zip(operation.returns, results, strict=True)), dtype, tensors["x"], store, scale)


def of_plain_norm(
    name: str, tensors: Mapping[str, Tensor], eps: float, sm_margin: int, store: Float8Store, scale: Any
) -> dict[str, Tensor]:
    """Return what `forward_of` does, for a plain norm, by its name in NAMED, and arguments that are checked."""
    x, weight, bias = tensors["x"], tensors.get("weight"), tensors.get("bias")
    scale = _scale(NAMED[name], tensors, store, scale)
    if _is_one_launch(tensors):
        call = affine_call(name, weight, bias, None, (sm_margin,) * 3, store)
        return _launched(call, tuple(tensors.values()), (), eps, scale)
    y = functional.norm(name, x, x.shape[-1:], weight, bias, eps, torch.float32, sm_margin)
    return _stored({"y": y}, None, x, store, scale)


def _is_one_launch(tensors: Mapping[str, Tensor]) -> bool:
    return not torch.compiler.is_compiling() and dispatch.at_once(tuple(tensors.values()))


def _launched(
    call: Call, tensors: Sequence[Tensor], numbers: Sequence[float], eps: float, scale: Tensor | None
) -> dict[str, Tensor]:
    read = tensors if scale is None else (*tensors, scale)
    recipe = launching.recipe_of(call, read, call.sm_margins[2])
    results, _ = launching.forward_by(recipe, read, numbers, eps, False)
    by_name = dict(zip(recipe.written, results, strict=True))
    return by_name if scale is None else by_name | {"y8_scale": scale}


def _stored(
    by_name: dict[str, Tensor], dtype: str | None, x: Tensor, store: Float8Store, scale: Tensor | None
) -> dict[str, Tensor]:
    """Round a float32 y to FP8 and return the results by name, with y in `dtype`, by default that of x."""
    y, cols = by_name["y"], x.shape[-1]
    y8, scales = quantise(y.reshape(-1, cols), store.granularity, store.format, scale)
    by_name["y8"] = y8.reshape(x.shape)
    by_name["y8_scale"] = scales.reshape(rules.scales_shape(store.granularity, tuple(x.shape[:-1]), cols))
    by_name["y"] = y.to(getattr(torch, dtype) if dtype else x.dtype)
    return by_name


def refuse_gradients(function: str, names: str, tensors: Sequence[Tensor | None]) -> None:
    if operators.wants_gradient(*tensors):
        raise ValueError(
            f"{function}: {names} must want no gradient, as FP8 output has none; got one that does. Use "
            "torch.no_grad() or detach()."
        )


def _scale(operation: Operation, tensors: Mapping[str, Tensor], store: Float8Store, scale: Any) -> Tensor | None:
    """Return the one scale for all of y, by default one with which no value is too large; None if there are several."""
    if store.granularity != "tensor":
        return None
    x, weight, bias = tensors["x"], tensors.get("weight"), tensors.get("bias")
    if scale is not None:
        return torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(())
    name = name_of(operation.norm, weight is not None and dict(operation.defaults)["weight"] == 0)
    scale = bound(name, x, weight, bias).amax() / FLOAT8[store.format]
    return torch.where(scale > 0, scale, 1.0)


def quantise(y: Tensor, granularity: str | int, name: str, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round float32 rows y[rows, cols] as kernels_cu/rows/float8.cuh does; return (y8, scales). It can be traced."""
    if scales is not None:
        return rounded(y * scales.reciprocal(), name), scales
    rows, cols = y.shape
    width = BLOCK if granularity == BLOCK else cols
    blocks = -(-cols // width)
    padded = F.pad(y, (0, blocks * width - cols)).reshape(rows, blocks, width)
    multiplier, scales = scaling(padded.abs().amax(dim=2), name)
    return rounded((padded * multiplier[:, :, None]).reshape(rows, blocks * width)[:, :cols], name), scales


def scaling(amax: Tensor, name: str, power_2: bool = False) -> tuple[Tensor, Tensor]:
    """Return (q, 1 / q) for numbers whose largest magnitude is `amax`, as kernels_cu/rows/float8.cuh computes them."""
    largest = FLOAT8[name]
    quotient = largest / amax
    tiny = quotient > rules.MOST_MULTIPLIER
    multiplier = torch.where(tiny, rules.MOST_MULTIPLIER, quotient)
    if power_2:
        multiplier = power_of_2(multiplier)
        scale = multiplier.reciprocal()
    else:
        scale = torch.where(tiny, 1 / rules.MOST_MULTIPLIER, amax / largest)
    scale = torch.where(amax == 0, 1.0, scale)
    return multiplier, scale + (amax - amax)  # adding this makes it NaN where amax is not finite


def power_of_2(q: Tensor) -> Tensor:
    """Clear the mantissa of q, which rounds it down to a power of two, and leave NaN as it is."""
    return torch.where(torch.isnan(q), q, (q.view(torch.int32) & 0x7F800000).view(torch.float32))


def rounded(values: Tensor, name: str) -> Tensor:
    """Round to nearest even; values that are too large become the largest one."""
    return values.clamp(-FLOAT8[name], FLOAT8[name]).to(getattr(torch, name))


def bound(operation: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return, in float32 and with the shape of a row, what |y_j| does not exceed whatever the values of x are."""
    cols = x.shape[-1]
    gamma = x.new_ones(cols, dtype=torch.float32) if weight is None else formulas.gamma(operation, weight, x)
    largest = gamma.abs() * rules.largest_normalised(formulas.subtracts_mean(operation), cols)
    return largest if bias is None else largest + bias.float().abs()
