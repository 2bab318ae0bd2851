"""Checks of the operands beside x: the kind of each, what must hold of every array, and which gradients are equal.

An operand is a `Layout`, or a float where a number was passed. `demanded` has the kinds of operands that a named
function knows beforehand; the kind of any other operand follows from its shape, by NumPy's rules of broadcasting. Kinds
are those of problem.py and "expanded", for which kernels have no kind: such an operand is broadcast to the shape of x,
and is full then. An operand with one number for each row, or for several rows, is "per_row".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping

from ..operation import NORMS, SEED, Operation, derivative
from ..plan.problem import MOST_GROUPS, Groups, compute_dtype
from .checks import Layout, as_float, check_dtype, check_same_device

Given = Layout | float
Kinds = tuple[tuple[str, str], ...]
AFFINE: Kinds = (("weight", "column"), ("bias", "column"))  # of the plain norms


def number(function: str, name: str, value: numbers.Real) -> float:
    """Return an operand that is a number, but no seed, as a Python float."""
    if name == SEED:
        raise TypeError(
            f"{function}: {SEED} must be an array of one int64 or two uint32, on the device of x; got "
            f"{type(value).__name__}."
        )
    if isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be an array or a number; got bool. Pass float({name}).")
    return as_float(function, name, value)


def check_operands(
    function: str, x: Layout, operands: Mapping[str, Given], *, demanded: Kinds, ndim: int = 1
) -> dict[str, str]:
    """Check x and the operands of a forward pass, and return the kinds of the operands.

    The last `ndim` axes of x are normalised. With more than one, all kinds are demanded.
    """
    check_dtype(function, "x", x)
    if not x.shape or x.shape[-1] == 0:
        raise ValueError(f"{function}: x must have a last axis to normalise, and not an empty one; got {x.shape}.")
    expected = dict(demanded)
    kinds = {name: _kind(function, name, operand, x, expected.get(name), ndim) for name, operand in operands.items()}
    first = groups_of(x, operands, kinds)
    for name, kind in kinds.items():
        if kind == "group" and groups_of(x, {name: operands[name]}, kinds) != first:
            kinds[name] = "expanded"  # a kernel has groups of one sort
    return kinds


def groups_of(x: Layout, operands: Mapping[str, Given], kinds: Mapping[str, str]) -> Groups | None:
    """Return the groups of rows that operands of the kind "group" have vectors for, None if there are none."""
    for name, operand in operands.items():
        if kinds.get(name) == "group" and isinstance(operand, Layout):
            return _groups(operand.shape, x.shape)
    return None


def broadcast_axes(shape: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of `to` along which an operand of this shape is repeated."""
    padded = (1,) * (len(to) - len(shape)) + shape
    return tuple(axis for axis, (own, full) in enumerate(zip(padded, to, strict=True)) if own != full)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return all(own in (1, full) for own, full in zip(reversed(shape), reversed(to), strict=False))


def read_by_vectors(name: str, shape: tuple[int, ...], of_x: tuple[int, ...]) -> bool:
    """Return whether kernels read an array by vectors, as they do not read a seed or a number for each row."""
    return name != SEED and not (shape[-1:] == (1,) != of_x[-1:])


def _groups(shape: tuple[int, ...], to: tuple[int, ...]) -> Groups | None:
    """Return the groups of rows that share a vector of an operand, None without vectors or if groups are irregular."""
    rows = math.prod(to[:-1])
    repeated = broadcast_axes(shape, to)
    axes = [axis for axis, size in enumerate(to[:-1]) if size != 1]  # what leads from row to row
    own = [axis for axis in axes if axis not in repeated]
    if not own or len(to) - 1 in repeated or rows >= 2**32:
        return None
    if axes.index(own[-1]) - axes.index(own[0]) + 1 != len(own):
        return None
    count = math.prod(to[axis] for axis in own)
    return Groups(math.prod(to[own[-1] + 1 : -1]), count) if count <= MOST_GROUPS else None


# The dtypes of a seed, and how many numbers it is: 8 bytes.
SEEDS = {"int64": 1, "uint32": 2}


def _check_seed(function: str, seed: Given, x: Layout) -> None:
    must_be = f"{function}: {SEED} must be an array of one int64 or two uint32"
    assert isinstance(seed, Layout)  # `number` refuses others
    if seed.dtype not in SEEDS:
        raise TypeError(f"{must_be}; got dtype {seed.dtype}.")
    if math.prod(seed.shape) != SEEDS[seed.dtype]:
        raise ValueError(f"{must_be}; got {seed.dtype} of shape {seed.shape}.")
    check_same_device(function, SEED, seed, x)


def _kind(function: str, name: str, operand: Given, x: Layout, expected: str | None, ndim: int) -> str:
    if name == SEED:
        _check_seed(function, operand, x)
        return "seed"
    if not isinstance(operand, Layout):
        if expected:
            raise TypeError(f"{function}: {name} must be an array; got a number. Leave it out, or pass an array.")
        return "scalar"
    check_dtype(function, name, operand)
    check_same_device(function, name, operand, x)
    shape, columns = operand.shape, x.shape[len(x.shape) - ndim :]
    if expected:
        shapes = {"full": x.shape, "column": columns}
        if shape != shapes[expected]:
            of_x = "the shape of x" if expected == "full" else "the shape of the last axis of x"
            raise ValueError(f"{function}: {name} must have {of_x}, {shapes[expected]}; got {shape}.")
        return expected
    if len(shape) == len(x.shape) and shape == x.shape:  # an open size is not compared with another axis
        return "full"
    if shape == (1,) * (len(shape) - 1) + columns and 0 < len(shape) <= len(x.shape):
        return "column"
    if shape and len(shape) <= len(x.shape) and _broadcasts(shape, x.shape):
        if shape[-1] != columns[0]:
            return "per_row"
        return "group" if _groups(shape, x.shape) else "expanded"
    instead = f"Reshape it, or pass broadcast_to({name}, x.shape)." if shape else f"Pass float({name})."
    raise ValueError(
        f"{function}: {name} must broadcast against x, whose shape is {x.shape}, or be a number; got an array of shape "
        f"{shape}. {instead}"
    )


def check_backward(
    function: str, operation: Operation, arrays: Mapping[str, Given], row_dtype: str, ndim: int = 1
) -> None:
    """Check the gradients, s, mean and rstd of a backward pass, as far as they are given.

    `row_dtype` is the dtype of the rows that were normalised.
    """
    x = arrays["x"]
    assert isinstance(x, Layout)
    compute = compute_dtype(row_dtype)
    expected: dict[str, tuple[tuple[int, ...], str | None]] = {
        **dict.fromkeys(("dy", "ds"), (x.shape, None)),
        "s": (x.shape, row_dtype),
        **dict.fromkeys(NORMS[operation.norm].statistics, (x.shape[: len(x.shape) - ndim], compute)),
    }
    for name, (shape, dtype) in expected.items():
        array = arrays.get(name)
        if array is None or (not shape and not isinstance(array, Layout)):
            continue  # of a row alone a statistic has no axes, and what has none is a number
        if not isinstance(array, Layout):
            raise TypeError(f"{function}: {name} must be an array; got a number. Pass an array of shape {shape}.")
        check_dtype(function, name, array)
        check_same_device(function, name, array, x)
        if array.shape != shape:
            axes_of_x = "the shape of x" if shape == x.shape else "the shape of x without its last axis"
            raise ValueError(f"{function}: {name} must have {axes_of_x}, {shape}; got {array.shape}.")
        if dtype and array.dtype != dtype:
            raise TypeError(
                f"{function}: {name} must have dtype {dtype}; got {array.dtype}. Pass what forward returned."
            )


def same_gradients(
    operation: Operation,
    wanted: Iterable[str],
    present: Collection[str],
    kinds: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> dict[str, str]:
    """Return for each wanted name the first wanted name with an equal gradient, as x and residual in x + residual have.

    Only arrays of the shape of x count, as the gradient of a vector is small; `dtypes` are needed for these.
    """
    wanted = tuple(wanted)
    gradients = derivative(operation, wanted, present)
    early, late = dict(gradients.early), dict(gradients.late)
    first: dict[tuple, str] = {}
    same = {}
    for name in wanted:
        same[name] = name
        if name == "x" or kinds.get(name) == "full":
            same[name] = first.setdefault((early.get(name), late.get(name), dtypes[name]), name)
    return same
