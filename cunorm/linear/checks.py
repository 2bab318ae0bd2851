"""The options of a call of `layer_norm_linear`, and every check and message of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..call.checks import Layout, NormOptions
from ..plan.problem import ITEMSIZE

OPS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
MATRICES = {
    "weight": ("(out, in)", "row"),
    "kernel": ("(in, out)", "column"),
}  # layout, and what of it meets a row of x
GRADIENTS = ("dx", "dweight", "dbias", "dln_weight", "dln_bias")


class LinearOptions(NamedTuple):
    """What a call of `layer_norm_linear`, or of its backward pass, asks for besides its arrays."""

    function: str  # what errors call it
    norm: str  # a key of NORMS
    eps: float
    zero_centered_gamma: Any
    statistics: bool = False  # whether mean and rstd are returned too

    def of_norm(self, name: str, cols: int | None, returns: Any, dtype: str | None = None) -> NormOptions:
        """Return the options of the norm's own function, such as `layer_norm_forward`; `name` is "forward" then."""
        return NormOptions(f"{self.norm}_{name}", cols, self.zero_centered_gamma, dtype, 0, returns)


def op(function: str, normalization: object, ln_bias: object) -> str:
    """Return the key of NORMS for the name of a norm."""
    if normalization not in OPS:
        raise ValueError(f"{function}: normalization must be 'LayerNorm' or 'RMSNorm'; got {normalization!r}.")
    if normalization == "RMSNorm" and ln_bias is not None:
        raise ValueError(f"{function}: ln_bias must be None for an RMSNorm, which has none; got an array.")
    return OPS[str(normalization)]


Named = tuple[tuple[str, Layout], ...]


def layouts_of(
    function: str,
    arrays: Mapping[str, Any],
    layout: Callable[[str, str, Any], Layout],
    required: Sequence[str] = ("x", "weight"),
) -> Named:
    """Return the layouts of the arrays that are given; `layout` raises TypeError for a required one that is None."""
    return tuple(
        (name, layout(function, name, array)) for name, array in arrays.items() if array is not None or name in required
    )


def required_of_backward(norm: str) -> tuple[str, ...]:
    """Return the names of the arrays that a backward pass cannot do without."""
    return ("dy", "x", "rstd", "weight", *(("mean",) if norm == "layer_norm" else ()))


@lru_cache(maxsize=4096)
def check_forward(function: str, named: Named, zero_centered_gamma: bool, mixed: bool = False) -> None:
    """Check the layouts of x, weight, bias, ln_weight and ln_bias that there are; weight in Flax's layout is `kernel`.

    With `mixed` weight may have another dtype than x. What held once is not checked again.
    """
    layouts = dict(named)
    x = layouts["x"]
    matrix = "kernel" if "kernel" in layouts else "weight"
    shape = layouts[matrix].shape
    layout, vector = MATRICES[matrix]
    for name, array in layouts.items():
        if array.dtype not in ITEMSIZE:
            raise TypeError(f"{function}: {name} must have dtype {', '.join(ITEMSIZE)}; got {array.dtype}.")
        if array.device != x.device:
            raise ValueError(
                f"{function}: {name} must be on the device of x, {x.device}; got device {array.device}. Move one."
            )
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{function}: {matrix} must have shape {layout}, neither of them 0; got {shape}.")
    outs, cols = shape if matrix == "weight" else shape[::-1]
    if x.shape[-1:] != (cols,):
        raise ValueError(
            f"{function}: the last axis of x must have the length {cols} of a {vector} of {matrix}; got x of shape "
            f"{x.shape}."
        )
    for name, size in (("bias", outs), ("ln_weight", cols), ("ln_bias", cols)):
        if name in layouts and layouts[name].shape != (size,):
            raise ValueError(f"{function}: {name} must have shape ({size},); got {layouts[name].shape}.")
    for name in (matrix, "bias"):
        if name in layouts and not mixed:
            _check_dtype(function, name, layouts[name], x)
    if zero_centered_gamma and "ln_weight" not in layouts:
        raise ValueError(f"{function}: zero_centered_gamma=True needs ln_weight; got ln_weight=None.")


@lru_cache(maxsize=4096)
def check_backward(function: str, named: Named, zero_centered_gamma: bool) -> None:
    """Check what check_forward does, with dy, mean and rstd among the arrays."""
    among = ("dy", "mean", "rstd")
    check_forward(function, tuple(pair for pair in named if pair[0] not in among), zero_centered_gamma)
    layouts = dict(named)
    x, dy = layouts["x"], layouts["dy"]
    leading = x.shape[:-1]
    if dy.shape != (*leading, layouts["weight"].shape[0]):
        raise ValueError(
            f"{function}: dy must have the shape of y, {(*leading, layouts['weight'].shape[0])}; got {dy.shape}."
        )
    _check_dtype(function, "dy", dy, x)
    statistics = "float64" if x.dtype == "float64" else "float32"
    for name in ("mean", "rstd"):
        if name in layouts and (layouts[name].shape, layouts[name].dtype) != (leading, statistics):
            raise ValueError(
                f"{function}: {name} must have shape {leading} and dtype {statistics}; got {layouts[name].shape}, "
                f"{layouts[name].dtype}. Pass what {function.replace('backward', 'forward')} returned."
            )
    for name in among:
        if name in layouts and layouts[name].device != x.device:
            raise ValueError(f"{function}: {name} must be on the device of x, {x.device}; got {layouts[name].device}.")


def check_output_mask(function: str, output_mask: object) -> tuple[bool, ...]:
    if not isinstance(output_mask, Sequence) or isinstance(output_mask, str):
        raise TypeError(f"{function}: output_mask must be a tuple of 5 bools; got {type(output_mask).__name__}.")
    if len(output_mask) != len(GRADIENTS):
        raise ValueError(f"{function}: output_mask must have 5 entries, for {', '.join(GRADIENTS)}; got {output_mask}.")
    return tuple(bool(flag) for flag in output_mask)


def _check_dtype(function: str, name: str, array: Layout, x: Layout) -> None:
    if array.dtype != x.dtype:
        raise TypeError(
            f"{function}: x and {name} must have one dtype; got x of {x.dtype} and {name} of {array.dtype}. Convert "
            "one of them."
        )


def check_float8(function: str, layouts: Named) -> None:
    """Check what a product in 8 bits needs beyond check_forward."""
    by_name = dict(layouts)
    name = "kernel" if "kernel" in by_name else "weight"
    if by_name["x"].dtype == "float64":
        raise TypeError(
            f"{function}: x must have dtype float16, bfloat16 or float32 with fp8; got float64. Convert it."
        )
    shape = by_name[name].shape
    if any(size % 16 for size in shape):
        raise ValueError(
            f"{function}: both sizes of {name} must be multiples of 16 with fp8; got shape {shape}. Pad it, or leave "
            "fp8=None."
        )
