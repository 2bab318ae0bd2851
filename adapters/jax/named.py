"""Functions of cunorm that have no other form in JAX, for arrays of NumPy too: those become JAX's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from .. import (
    add_layer_norm,
    add_layer_norm_fp8,
    add_layer_norm_fp8_forward,
    add_rms_norm,
    add_rms_norm_fp8,
    add_rms_norm_fp8_forward,
    layer_norm_fp8,
    layer_norm_fp8_forward,
    rms_norm_add_rms_norm,
    rms_norm_fp8,
    rms_norm_fp8_forward,
)
from .norm.functional import array

Function = TypeVar("Function", bound=Callable[..., Any])


def _of_jax(function: Function) -> Function:
    name = function.__name__

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if "x" in options:
            options["x"] = array(name, "x", options["x"])
        elif arguments:
            arguments = (array(name, "x", arguments[0]), *arguments[1:])
        return function(*arguments, **options)

    return cast(Function, called)


add_layer_norm = _of_jax(add_layer_norm)
add_layer_norm_fp8 = _of_jax(add_layer_norm_fp8)
add_layer_norm_fp8_forward = _of_jax(add_layer_norm_fp8_forward)
add_rms_norm = _of_jax(add_rms_norm)
add_rms_norm_fp8 = _of_jax(add_rms_norm_fp8)
add_rms_norm_fp8_forward = _of_jax(add_rms_norm_fp8_forward)
layer_norm_fp8 = _of_jax(layer_norm_fp8)
layer_norm_fp8_forward = _of_jax(layer_norm_fp8_forward)
rms_norm_add_rms_norm = _of_jax(rms_norm_add_rms_norm)
rms_norm_fp8 = _of_jax(rms_norm_fp8)
rms_norm_fp8_forward = _of_jax(rms_norm_fp8_forward)
