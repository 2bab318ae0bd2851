"""The named operations of cunorm on tensors, with autograd, autocast and the errors of torch's functions.

`eps=None` means what it means in torch.nn.functional.rms_norm, and `sm_margin` may be a dict as in `layer_norm`.
`.forward`, `.backward` and `.fp8` are those of cunorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .. import named
from ..named import Call, ShapeError, kinds_of, of_its_own, operation_of, reshaped
from ..operation import SEED
from . import private
from .norm import calls, checks, dispatch, functional, norm_add_norm

Operation = TypeVar("Operation")


def _of_torch(operation: Operation) -> Operation:
    """Return a named operation of cunorm for tensors alone, with the errors of torch's functions."""
    original: Any = operation
    interpret = original.__wrapped__  # makes a Call of the arguments

    @wraps(original)
    def called(*arguments: Any, **options: Any) -> Any:
        x = arguments[0] if arguments else options.get("x")
        if not isinstance(x, Tensor):
            node = functional.symbolic(called, *arguments, **options)
            if node is not None:
                return node
        if torch.compiler.is_compiling():  # the operators raise as torch does
            call = interpret(*arguments, **options)
        else:
            try:
                call = interpret(*arguments, **options)
            except ShapeError as error:
                raise RuntimeError(str(error)) from None
        results = _run(call)
        return tuple(results) if len(results) > 1 else reshaped(call, results[0])

    called.__module__ = __name__
    of_its_own(called)
    return cast(Operation, called)


def _run(call: Call) -> Sequence[Tensor]:
    """Run a call and return its results in order."""
    function, flags, x, operands, eps, dtype, s_dtype, sm_margin, _ = call
    numbers: Sequence[float] = ()
    if SEED in operands:
        operands = dict(operands)
        numbers = (operands.pop("dropped"), operands.pop("factor"))
    tensors = (x, *operands.values())
    for name, tensor in zip(("x", *operands), tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
    norm = "layer_norm" if "layer_norm" in function else "rms_norm"
    if type(eps) is not float:
        eps = checks.eps(norm, eps, x)
    for output_dtype in (dtype, s_dtype):
        if output_dtype is not None:
            checks.output_dtype(function, output_dtype)
    if dtype is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = functional.default_dtype(norm, x)
    margins = checks.sm_margins(function, sm_margin)
    names = tuple(operands)
    if function == "rms_norm_add_rms_norm":
        return norm_add_norm.run(flags[0], names, tensors, eps, dtype or x.dtype, s_dtype, margins)
    form = _call_of(function, flags, names, checks.name_or_none(dtype), checks.name_or_none(s_dtype), margins)
    if torch.compiler.is_compiling():
        results, _ = dispatch.run(form, tensors, numbers, eps, False)
    else:
        results, _ = checks.raising_as_torch(dispatch.run, form, tensors, numbers, eps, False)
    return results


@private.constant
def _call_of(
    function: str,
    flags: tuple[bool, ...],
    names: tuple[str, ...],
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int],
) -> calls.Call:
    """Return the Call of a named function with operands of these names."""
    numbers = ("dropped", "factor") if SEED in names else ()  # the numbers of dropout
    operation = operation_of(function, flags, (*names, *numbers))
    return calls.call_of(function, operation, names, numbers, kinds_of(function), dtype, s_dtype, sm_margins)


add_layer_norm = _of_torch(named.add_layer_norm)
add_rms_norm = _of_torch(named.add_rms_norm)
gate_add_layer_norm_modulate = _of_torch(named.gate_add_layer_norm_modulate)
gate_add_rms_norm_modulate = _of_torch(named.gate_add_rms_norm_modulate)
layer_norm_add = _of_torch(named.layer_norm_add)
layer_norm_modulate = _of_torch(named.layer_norm_modulate)
rms_norm_add = _of_torch(named.rms_norm_add)
rms_norm_add_rms_norm = _of_torch(named.rms_norm_add_rms_norm)
rms_norm_gated = _of_torch(named.rms_norm_gated)
rms_norm_modulate = _of_torch(named.rms_norm_modulate)
