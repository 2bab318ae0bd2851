"""What calls of an operation have in common, apart from the memory that their tensors lie in.

A Call holds what follows from an operation and its options. A Family holds what follows for its backward passes from
the shapes and dtypes of the tensors; autograd hands it from the forward pass to the backward pass. Forward and Backward
are recipes, which launching.py makes and follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.checks import Layout
from ...call.recipe import form_of
from ...call.store import Float8Store
from ...operation import NAMED, Operation, added_after
from ...plan.problem import backward_reads
from ...plan.steps import Plan
from .. import private
from . import checks, gpu
from .gpu import Memory
from .repeats import Alike, keep


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What calls of one form have in common. Calls are compared by identity: `call_of` makes one for each form."""

    function: str
    operation: Operation
    whole: Operation  # the operation with numbers for the operands that are left out
    names: tuple[str, ...]  # the names of the tensors: x, then the operands
    numbers: tuple[str, ...]  # the names of the operands that are numbers
    demanded: broadcasting.Kinds
    dtype: str | None
    s_dtype: str | None
    sm_margins: tuple[int, int, int] = (0, 0, 0)  # forward, backward, and forward without a backward pass
    store: Float8Store | None = None  # how FP8 output is stored, for a forward pass without a backward pass
    affine: str | None = None  # the name in NAMED if the operation is a plain norm
    recipes: dict[Hashable, Forward] = field(default_factory=dict)
    families: dict[Hashable, Family] = field(default_factory=dict)
    masks: dict[tuple[bool, ...], tuple[str, ...]] = field(default_factory=dict)
    reads: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def wanted(self, mask: tuple[bool, ...]) -> tuple[str, ...]:
        """Return the names of the tensors whose gradients are wanted."""
        wanted_names = self.masks.get(mask)
        if wanted_names is None:
            named = zip(self.names, mask, strict=True)
            wanted_names = self.masks[mask] = tuple(name for name, wants in named if wants)
        return wanted_names

    def saved(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of those of x, the operands and s that the backward pass for such gradients reads."""
        saved_names = self.reads.get(wanted)
        if saved_names is None:
            reads = backward_reads(self.operation, wanted, (*self.names, *self.numbers))
            saved_names = self.reads[wanted] = tuple(name for name in reads if name == "s" or name in self.names)
        return saved_names


_made: dict[Hashable, Call] = {}
_AFFINE = {operation: name for name, operation in NAMED.items()}


def call_of(
    function: str,
    operation: Operation,
    names: tuple[str, ...],
    numbers: tuple[str, ...],
    demanded: broadcasting.Kinds,
    dtype: str | None,
    s_dtype: str | None,
    sm_margins: tuple[int, int, int] = (0, 0, 0),
    store: Float8Store | None = None,
) -> Call:
    """Return the Call of this form, the same one each time. `names` are those of the operands that are tensors."""
    key = (function, operation, names, numbers, demanded, dtype, s_dtype, sm_margins, store)
    call = None if torch.compiler.is_compiling() else _made.get(key)
    if call is None:
        whole, affine = operation.given((*names, *numbers)), _AFFINE.get(operation)
        tensors = ("x", *names)
        call = Call(function, operation, whole, tensors, numbers, demanded, dtype, s_dtype, sm_margins, store, affine)
        if not torch.compiler.is_compiling():  # a call made in a trace is not needed after it
            keep(_made, key, call)
    return call


COLUMNS: broadcasting.Kinds = (("weight", "column"), ("bias", "column"))


def affine_call(
    name: str,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    sm_margins: tuple[int, int, int],
    store: Float8Store | None = None,
) -> Call:
    """Return the Call of a plain norm, by its name in NAMED; `dtype` is that of y."""
    y_dtype = None if dtype is None else checks.dtype_name(dtype)
    return _affine_call(name, weight is not None, bias is not None, y_dtype, sm_margins, store)


@private.constant
def _affine_call(
    name: str,
    has_weight: bool,
    has_bias: bool,
    dtype: str | None,
    sm_margins: tuple[int, int, int],
    store: Float8Store | None,
) -> Call:
    """Return the Call of a plain norm with or without weight and bias, by its name in NAMED."""
    names = tuple(name for name, is_given in (("weight", has_weight), ("bias", has_bias)) if is_given)
    return call_of(NAMED[name].norm, NAMED[name], names, (), COLUMNS, dtype, None, sm_margins, store)


class Family(NamedTuple):
    """The backward passes of calls with tensors of the same shapes and dtypes, each with its recipe."""

    call: Call
    layouts: dict[str, Layout]
    recipes: dict[Hashable, Backward]
    known: dict[Hashable, tuple[tuple[Alike, Backward], ...]]  # as repeats.remember keeps them
    through: tuple[str, ...]  # the operands whose gradients equal that of y, unless dtypes differ
    form: Hashable  # what it has in common with families of other numbers of rows; None if that is not known
    is_derived: bool  # it was made from one of another number of rows


class Forward(NamedTuple):
    """How forward passes with the same layouts run. `plan` is None where no value is to be computed."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # places and shapes of the tensors that must be made contiguous
    results: tuple[Memory, ...]
    written: tuple[str, ...]  # the names of the results
    statistics: Memory
    rstd_offset: int  # bytes from the first row statistic to the second, 0 if there is only one
    order: Callable[[Sequence[float]], tuple[float, ...]] | None  # picks the plan's arguments from all of a call's
    family: Family
    sm_margin: int
    aligned: bool  # all that is read or written by vectors begins at multiples of 16 bytes
    temporary: bool = False  # y is made in memory of its own and copied, as no kernel can write to `out`


class Backward(NamedTuple):
    """How backward passes with the same layouts run. `plan` is None where no value is to be computed."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # as in Forward, with places among dy, ds and the saved tensors
    gradients: tuple[Memory, ...]
    written: tuple[str, ...]  # the names of the gradients that the kernels write
    wanted: tuple[str, ...]
    places: tuple[int, ...]  # for each wanted gradient, its place among the written ones
    # By place among the wanted ones, a gradient that is yet to be summed: along which axes, to which shape and dtype.
    sums: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeros: Memory | None  # zeros that stand for a missing dy
    rstd_offset: int
    order: Callable[[Sequence[float]], tuple[float, ...]] | None
    family: Family
    aligned: bool
    temporary: bool = False  # dx is made in memory of its own and copied, as no kernel can write to `dx_out`


def family(call: Call, layouts: Mapping[str, Layout]) -> Family:
    """Return the Family of calls with tensors of these shapes and dtypes, the same one each time."""
    contiguous = {name: layout._replace(strides=gpu.strides(layout.shape)) for name, layout in layouts.items()}
    key = tuple(contiguous.values())
    result = call.families.get(key)
    if result is None:
        added, shape = added_after(call.operation, (*call.names, *call.numbers)), contiguous["x"].shape
        through = tuple(name for name in added if name in call.names and contiguous[name].shape == shape)
        form = form_of(shape, key)
        result = keep(call.families, key, Family(call, contiguous, {}, {}, through, form and (call, form), False))
    return result


def family_of_rows(like: Family, shape: tuple[int, ...]) -> Family:
    """Return the Family of calls that differ from those of another in their number of rows alone, with x of `shape`."""
    before, shape = like.layouts["x"].shape, tuple(shape)
    # Matrices have the shape of x, and numbers for rows have it without the columns.
    moved = {old: (new, gpu.strides(new)) for old, new in ((before, shape), (before[:-1], shape[:-1]))}
    layouts = {
        name: Layout(*moved[layout.shape], layout.dtype, layout.device) if layout.shape in moved else layout
        for name, layout in like.layouts.items()
    }
    return like._replace(layouts=layouts, recipes={}, known={}, is_derived=True)


def affine_family(
    name: str, x: Tensor, weight: Tensor | None, sm_margin: int, bias_dtype: torch.dtype | None = None
) -> Family:
    """Return the Family of a plain norm whose bias is not given; dbias gets `bias_dtype`, else that of weight or x."""
    of_weight = None if weight is None else weight.dtype
    key = ("affine", name, sm_margin, x.shape, x.dtype, x.get_device(), of_weight, bias_dtype)
    result = _families.get(key)
    if result is None:
        call = affine_call(name, weight, x, None, (sm_margin,) * 3)
        tensors = {"x": x} if weight is None else {"x": x, "weight": weight}
        layouts = {name: checks.layout_in_memory(call.function, name, tensor) for name, tensor in tensors.items()}
        last = layouts["weight" if weight is not None else "x"]
        dtype = last.dtype if bias_dtype is None else checks.dtype_name(bias_dtype)
        layouts["bias"] = last._replace(shape=last.shape[-1:], strides=(1,), dtype=dtype)
        result = keep(_families, key, family(call, layouts))
    return result


_families: dict[Hashable, Family] = {}


def given_through(family: Family, wanted: Collection[str], dy: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients that are dy itself, such as that of an operand added to the norm: no kernel writes them."""
    if dy is None:
        return {}
    dtype = checks.dtype_name(dy.dtype)
    return {name: dy for name in family.through if name in wanted and family.layouts[name].dtype == dtype}
