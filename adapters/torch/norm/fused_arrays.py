"""What calls of fused operations do with torch tensors: as norm/fused_cupy.py and fused_numpy.py with their arrays.

A tensor without axes is a column of that number.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...norm import checks as core
from ...norm import fused
from ...norm.float8 import Float8Store
from ...operation import NORMS, SEED, Operation
from . import dispatch, formulas, launching
from .arrays import layouts_of, mean_and_rstd
from .float8 import forward_of
from .launching import Saved, call_of


def forward(
    function: str,
    operation: Operation,
    x: Tensor,
    operands: Mapping[str, Any],
    eps: float,
    *,
    demanded: fused.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    statistics: bool,
    sm_margin: int,
    float8: Float8Store | None = None,
    scale: Any = None,
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Return ({"y": y, "s": s if it is returned}, mean, rstd), statistics None unless asked for. y and s are
    differentiable. With `float8` y8 and y8_scale, and y if it is wide: nothing is differentiable.
    """
    if not torch.compiler.is_compiling() and not (type(eps) is float and 0 <= eps < math.inf):
        eps = core.check_eps(function, eps)
    tensors, given = _told_apart(function, x, operands, demanded)
    names = tuple(tensors)
    margins = (core.check_sm_margin(function, sm_margin, None),) * 3
    if float8:
        options: dict[str, Any] = {"demanded": demanded, "dtype": dtype, "s_dtype": s_dtype, "sm_margin": margins[0]}
        found = forward_of(function, operation, tensors, given, eps, **options, store=float8, scale=scale)
        return found, None, None
    call = call_of(function, operation, names[1:], tuple(given), demanded, dtype, s_dtype, margins)
    results, found = dispatch.run(call, tuple(tensors.values()), tuple(given.values()), eps, statistics)
    mean = rstd = None
    if found is not None:
        mean, rstd = mean_and_rstd(found)
    return dict(zip(operation.returns, results, strict=True)), mean, rstd


def _told_apart(
    function: str, x: Tensor, operands: Mapping[str, Any], demanded: fused.Kinds
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(x and the operands that are tensors, those that are numbers, which none of a demanded kind is)"""
    tensors, given = {"x": x}, {}
    no_numbers = (SEED, *dict(demanded))
    for name, one in operands.items():
        if isinstance(one, Tensor):
            tensors[name] = one.expand(x.shape[-1:]) if one.dim() == 0 and x.dim() and name != SEED else one
        elif name not in no_numbers and (isinstance(one, numbers.Real) or type(one) is torch.SymFloat):
            given[name] = fused.number(function, name, one)
        else:
            or_number = "" if name in no_numbers else ", or a number"
            raise TypeError(
                f"{function}: {name} must be a torch.Tensor, as x is{or_number}; got {type(one).__name__}. Convert it."
            )
    return tensors, given


@torch.no_grad()
def backward(
    function: str,
    operation: Operation,
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    *,
    demanded: fused.Kinds,
    s_dtype: str | None,
    sm_margin: int,
) -> dict[str, Tensor]:
    """The gradients `wanted`, by name. `arrays`: x, dy, ds, s, mean, rstd and the operands, None or absent where there
    is none.
    """
    margins = (core.check_sm_margin(function, sm_margin, None),) * 3
    of_rows = NORMS[operation.norm].statistics
    needed = ("x", *of_rows)
    arrays = {name: one for name, one in arrays.items() if one is not None or name in needed}
    operands = {name: arrays[name] for name in operation.operands if name in arrays}
    tensors, given = _told_apart(function, arrays["x"], operands, demanded)
    others = {name: arrays[name] for name in ("dy", "ds", "s", *of_rows) if name in arrays}
    layouts = layouts_of(function, {**tensors, **others}, required=tuple(others))
    x = layouts["x"]
    known = {name: layouts[name] for name in tensors if name != "x"} | given
    fused.check_operands(function, x, known, demanded=demanded)
    row_dtype = s_dtype or layouts.get("s", x).dtype
    fused.check_backward(function, operation, layouts, row_dtype)
    statistics = torch.stack([others[name] for name in of_rows])
    dy, ds, s = (others.get(name) for name in ("dy", "ds", "s"))
    if dispatch.at_once([*tensors.values(), *others.values()]):
        call = call_of(function, operation, tuple(tensors)[1:], tuple(given), demanded, None, row_dtype, margins)
        family = launching.family(call, {name: layouts[name] for name in tensors})
        kept = tensors if s is None else {**tensors, "s": s}
        saved = Saved(tuple(kept), tuple(kept.values()), tuple(given.values()), statistics)
        found = launching.backward(family, saved, dy, ds, tuple(wanted))
        return dict(zip(wanted, found, strict=True))
    rows = getattr(torch, row_dtype)
    values = {**tensors, **given}
    found = formulas.backward(operation, values, s, {"dy": dy, "ds": ds}, statistics, wanted, rows)
    dtypes = {name: one.dtype for name, one in tensors.items()} | dict.fromkeys(given, statistics.dtype)
    return {name: one.to(dtypes.get(name, tensors["x"].dtype)) for name, one in zip(wanted, found, strict=True)}
