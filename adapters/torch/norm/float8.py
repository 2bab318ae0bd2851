"""Operations of tensors with y in 8 bits: one kernel where it can be launched, else y in float32 by the ways of
dispatch.py, rounded by torch's own operators.

These are for the CPU, for torch.compile and for whatever listens to calls; their bytes are those of the kernel where
their float32 y is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ...call import broadcasting
from ...call import store as rules
from ...call.checks import Layout
from ...call.store import Float8Store
from ...operation import NAMED, Operation, name_of
from ...plan.problem import BLOCK, FLOAT8
from . import calls, checks, dispatch, formulas, functional, launching, operators
from .calls import Call, affine_call_of, call_of


def forward_of(
    function: str,
    operation: Operation,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    eps: float,
    *,
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margin: int,
    store: Float8Store,
    scale: Any,
) -> dict[str, Tensor]:
    """y8, y8_scale, y if it is wide and s if it is returned, of x and the operands: tensors, and numbers."""
    rules.check_rows(function, Layout((), (), checks.dtype_name(tensors["x"].dtype), ""), s_dtype)
    refuse_gradients(function, "x and operands", tuple(tensors.values()))
    form = (function, operation, tuple(tensors)[1:], tuple(numbers), demanded)

    def call_for(y_dtype: str | None, y_store: Float8Store | None) -> Call:
        return call_of(*form, y_dtype, s_dtype, (sm_margin,) * 3, y_store)

    return run(call_for, operation, tensors, numbers, eps, dtype, store, scale)


def of_plain_norm(
    name: str, tensors: Mapping[str, Tensor], eps: float, sm_margin: int, store: Float8Store, scale: Any
) -> dict[str, Tensor]:
    """The same of a plain norm, by its name in NAMED; gradients are refused before."""

    def call_for(y_dtype: str | None, y_store: Float8Store | None) -> Call:
        return affine_call_of(name, "weight" in tensors, "bias" in tensors, y_dtype, (sm_margin,) * 3, y_store)

    return run(call_for, NAMED[name], tensors, {}, eps, None, store, scale)


def run(
    call_for: Callable[[str | None, Float8Store | None], Call],
    operation: Operation,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    eps: float,
    dtype: str | None,
    store: Float8Store,
    scale: Any,
) -> dict[str, Tensor]:
    """Both; `call_for(dtype of y, its store)` is what such calls have in common."""
    x, given = tensors["x"], tuple(tensors.values())
    scales = _scale(operation, tensors, store, scale) if store.granularity == "tensor" else None
    if not torch.compiler.is_compiling() and dispatch.at_once(given):
        call = call_for(dtype, store)
        read = given if scales is None else (*given, scales)
        recipe = launching.recipe_of(call, read, call.sm_margins[2])
        results, _ = launching.forward_by(recipe, read, tuple(numbers.values()), eps, False)
        found = dict(zip(recipe.written, results, strict=True))
        return found if scales is None else found | {"y8_scale": scales}
    call = call_for("float32", None)
    results, _ = dispatch.run(call, given, tuple(numbers.values()), eps, False)
    found = dict(zip(operation.returns, results, strict=True))
    y, cols = found["y"], x.shape[-1]
    y8, scales = quantise(y.reshape(-1, cols), store.granularity, store.format, scales)
    found["y8"] = y8.reshape(x.shape)
    found["y8_scale"] = scales.reshape(rules.scales_shape(store.granularity, tuple(x.shape[:-1]), cols))
    found["y"] = y.to(getattr(torch, dtype) if dtype else x.dtype)
    return found


def refuse_gradients(function: str, names: str, tensors: Sequence[Tensor | None]) -> None:
    """There is none of numbers of 8 bits."""
    if operators.wants_gradient(*tensors):
        raise ValueError(
            f"{function}: {names} must want no gradient, as y in 8 bits has none; got one that does. Use "
            "torch.no_grad() or detach()."
        )


def _scale(operation: Operation, tensors: Mapping[str, Tensor], store: Float8Store, scale: Any) -> Tensor:
    """As norm/rules.py has it of arrays."""
    x, weight, bias = tensors["x"], tensors.get("weight"), tensors.get("bias")
    if scale is not None:
        return torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(())
    name = name_of(operation.norm, weight is not None and dict(operation.defaults)["weight"] == 0)
    found = bound(name, x, 1, weight, bias).amax() / FLOAT8[store.format]
    return torch.where(found > 0, found, 1.0)


def row_recipe(
    name: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    of_y: torch.dtype | None,
    dtype: str,
    sm_margin: int,
) -> launching.Forward:
    """Of the kernel that makes a plain norm in 8 bits with a scale for each row, and y in the dtype `of_y`."""
    store = Float8Store(dtype, "row", of_y is not None)
    call = calls.affine_call(name, weight, bias, of_y, (sm_margin,) * 3, store)
    return launching.recipe_of(call, functional.given(x, weight, bias), sm_margin)


def quantise(y: Tensor, granularity: str | int, name: str, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """What kernels_cu/rows/rules.cuh does, of float32 rows, y[rows, cols]; traceable."""
    if scales is not None:
        return rounded(y * scales.reciprocal(), name), scales
    rows, cols = y.shape
    width = BLOCK if granularity == BLOCK else cols
    blocks = -(-cols // width)
    padded = F.pad(y, (0, blocks * width - cols)).reshape(rows, blocks, width)
    multiplier, scales = scaling(padded.abs().amax(dim=2), name)
    return rounded((padded * multiplier[:, :, None]).reshape(rows, blocks * width)[:, :cols], name), scales


def scaling(amax: Tensor, name: str, power_2: bool = False) -> tuple[Tensor, Tensor]:
    """(q, 1 / q) for numbers of which max|v| is `amax`, as kernels_cu/rows/rules.cuh has them."""
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
    return multiplier, scale + (amax - amax)  # NaN where amax is not finite


def power_of_2(q: Tensor) -> Tensor:
    """Without its mantissa, NaN as it is."""
    return torch.where(torch.isnan(q), q, (q.view(torch.int32) & 0x7F800000).view(torch.float32))


def rounded(values: Tensor, name: str) -> Tensor:
    """To nearest even; what is too large becomes the largest."""
    return values.clamp(-FLOAT8[name], FLOAT8[name]).to(getattr(torch, name))


def bound(operation: str, x: Tensor, ndim: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What no |y_j| exceeds, whatever x is, in float32: of the shape of the normalised axes, the last `ndim` of x."""
    shape = x.shape[-ndim:]
    gamma = x.new_ones(shape, dtype=torch.float32) if weight is None else formulas.gamma(operation, weight, x)
    found = gamma.abs() * rules.largest_normalised(formulas.subtracts_mean(operation), math.prod(shape))
    return found if bias is None else found + bias.float().abs()
