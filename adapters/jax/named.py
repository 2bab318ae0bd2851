"""The named operations and the norms with FP8 output, which also take NumPy arrays and make JAX arrays of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from .. import functions, named
from .norm.functional import array

Function = TypeVar("Function", bound=Callable[..., Any])


def _of_jax(function: Function) -> Function:
    """Make x a JAX array before a call of the operation, and of its attributes that take x."""
    name = function.__name__

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if "x" in options:
            options["x"] = array(name, "x", options["x"])
        elif arguments:
            arguments = (array(name, "x", arguments[0]), *arguments[1:])
        return function(*arguments, **options)

    called.__module__ = __name__
    for attribute in ("forward", "fp8", "fp8_forward"):
        if hasattr(function, attribute):
            setattr(called, attribute, _of_jax(getattr(function, attribute)))
    return cast(Function, called)


add_layer_norm = _of_jax(named.add_layer_norm)
add_rms_norm = _of_jax(named.add_rms_norm)
gate_add_layer_norm_modulate = _of_jax(named.gate_add_layer_norm_modulate)
gate_add_rms_norm_modulate = _of_jax(named.gate_add_rms_norm_modulate)
layer_norm_add = _of_jax(named.layer_norm_add)
layer_norm_fp8 = _of_jax(functions.layer_norm_fp8)
layer_norm_fp8_forward = _of_jax(functions.layer_norm_fp8_forward)
layer_norm_modulate = _of_jax(named.layer_norm_modulate)
rms_norm_add = _of_jax(named.rms_norm_add)
rms_norm_add_rms_norm = _of_jax(named.rms_norm_add_rms_norm)
rms_norm_fp8 = _of_jax(functions.rms_norm_fp8)
rms_norm_fp8_forward = _of_jax(functions.rms_norm_fp8_forward)
rms_norm_gated = _of_jax(named.rms_norm_gated)
rms_norm_modulate = _of_jax(named.rms_norm_modulate)
