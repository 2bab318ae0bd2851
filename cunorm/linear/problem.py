"""Every check and message of the arguments of `layer_norm_linear` and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..call.checks import Layout
from ..plan.problem import ITEMSIZE

OPS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
MATRICES = {
    "weight": ("(out, in)", "row"),
    "kernel": ("(in, out)", "column"),
}  # layout, and what of it meets a row of x
GRADIENTS = ("dx", "dweight", "dbias", "dln_weight", "dln_bias")


def op(function: str, normalization: object, ln_bias: object) -> str:
    """The norm that is meant."""
    if normalization not in OPS:
        raise ValueError(f"{function}: normalization must be 'LayerNorm' or 'RMSNorm'; got {normalization!r}.")
    if normalization == "RMSNorm" and ln_bias is not None:
        raise ValueError(f"{function}: ln_bias must be None for an RMSNorm, which has none; got an array.")
    return OPS[str(normalization)]


Named = tuple[tuple[str, Layout], ...]


@lru_cache(maxsize=4096)
def check_forward(function: str, named: Named, zero_centered_gamma: bool, mixed: bool = False) -> None:
    """`named` has those of x, weight, bias, ln_weight and ln_bias that there are; in Flax's layout weight is `kernel`.

    `mixed`: it may have another dtype than x. What held once is not asked again.
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
    """Check what a product in 8 bits asks beside check_forward."""
    found = dict(layouts)
    name = "kernel" if "kernel" in found else "weight"
    if found["x"].dtype == "float64":
        raise TypeError(
            f"{function}: x must have dtype float16, bfloat16 or float32 with fp8; got float64. Convert it."
        )
    shape = found[name].shape
    if any(size % 16 for size in shape):
        raise ValueError(
            f"{function}: both sizes of {name} must be multiples of 16 with fp8; got shape {shape}. Pad it, or leave "
            "fp8=None."
        )
