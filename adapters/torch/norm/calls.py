"""What calls of an operation have in common, apart from the memory that their tensors lie in.

A Call is what an operation and its options come to. A Family is what its backward passes come to for tensors of given
shapes and dtypes: autograd hands it from the forward pass to the backward pass. Forward and Backward are recipes:
launching.py makes and follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import broadcasting
from ...call.checks import Layout
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
    """What calls of one form have in common. Told apart by identity: `call_of` makes one for each form."""

    function: str
    operation: Operation
    whole: Operation  # with numbers for the operands that are left out
    names: tuple[str, ...]  # of the tensors: x, and operands
    numbers: tuple[str, ...]  # of the operands that are numbers
    demanded: broadcasting.Kinds
    dtype: str | None
    s_dtype: str | None
    sm_margins: tuple[int, int, int] = (0, 0, 0)  # forward, backward, forward where nobody will go back
    store: Float8Store | None = None  # of y in 8 bits: a forward pass alone
    affine: str | None = None  # the name of a plain norm in NAMED
    recipes: dict[Hashable, Forward] = field(default_factory=dict)
    forms: dict[Hashable, Any] = field(default_factory=dict)  # a recipe of any number of rows, forward or backward
    families: dict[Hashable, Family] = field(default_factory=dict)
    masks: dict[tuple[bool, ...], tuple[str, ...]] = field(default_factory=dict)
    reads: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def wanted(self, mask: tuple[bool, ...]) -> tuple[str, ...]:
        """The names of the tensors whose gradients are wanted."""
        found = self.masks.get(mask)
        if found is None:
            named = zip(self.names, mask, strict=True)
            found = self.masks[mask] = tuple(name for name, wants in named if wants)
        return found

    def saved(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """What the backward pass for such gradients reads of x, the operands and s."""
        found = self.reads.get(wanted)
        if found is None:
            reads = backward_reads(self.operation, wanted, (*self.names, *self.numbers))
            found = self.reads[wanted] = tuple(name for name in reads if name == "s" or name in self.names)
        return found

    def through(self) -> tuple[str, ...]:
        """The operands whose gradients are that of y."""
        found = self.reads.get(("", "through"))  # no operand has such a name
        if found is None:
            added = added_after(self.operation, (*self.names, *self.numbers))
            found = tuple(name for name in added if name in self.names)
            self.reads["", "through"] = found
        return found


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
    """`names`: of the operands that are tensors."""
    key = (function, operation, names, numbers, demanded, dtype, s_dtype, sm_margins, store)
    found = None if torch.compiler.is_compiling() else _made.get(key)
    if found is None:
        whole, affine = operation.given((*names, *numbers)), _AFFINE.get(operation)
        of = (function, operation, whole, ("x", *names), numbers, demanded, dtype, s_dtype, sm_margins, store, affine)
        found = Call(*of)
        if not torch.compiler.is_compiling():  # nothing of it is needed after the trace
            keep(_made, key, found)
    return found


COLUMNS: broadcasting.Kinds = (("weight", "column"), ("bias", "column"))


def affine_call(
    name: str,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    sm_margins: tuple[int, int, int],
    store: Float8Store | None = None,
) -> Call:
    """Of a plain norm, by its name in NAMED."""
    of_y = None if dtype is None else checks.dtype_name(dtype)
    return affine_call_of(name, weight is not None, bias is not None, of_y, sm_margins, store)


@private.constant
def affine_call_of(
    name: str,
    has_weight: bool,
    has_bias: bool,
    dtype: str | None,
    sm_margins: tuple[int, int, int],
    store: Float8Store | None,
) -> Call:
    key = (name, has_weight, has_bias, dtype, sm_margins, store)
    found = _made.get(key)
    if found is None:
        names = tuple(name for name, there in (("weight", has_weight), ("bias", has_bias)) if there)
        found = call_of(NAMED[name].norm, NAMED[name], names, (), COLUMNS, dtype, None, sm_margins, store)
        keep(_made, key, found)
    return found


class Family(NamedTuple):
    """The backward passes of calls with tensors of the same shapes and dtypes, each with its recipe.

    Autograd hands from the forward pass to the backward one which family is meant: little is left to tell apart.
    """

    call: Call
    layouts: dict[str, Layout]
    recipes: dict[Hashable, Backward]
    known: dict[Hashable, tuple[tuple[Alike, Backward], ...]]  # by what tensors do not tell
    has_through: bool  # some gradient may be that of y


class Forward(NamedTuple):
    """How forward passes with the same layouts run. `plan` is None where there is nothing to compute."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # places of tensors that must be made contiguous, of such shapes
    results: tuple[Memory, ...]
    written: tuple[str, ...]  # their names
    statistics: Memory
    rstd_offset: int  # bytes from the first of the statistics to the second, 0 where there is one
    order: Callable[[Sequence[float]], tuple[float, ...]] | None  # picks, of all pointers of a call, those of the plan
    family: Family
    sm_margin: int
    aligned: bool  # what is read or written by vectors begins at multiples of 16
    temporary: bool = False  # no kernel can write where y is to be written


class Backward(NamedTuple):
    """As Forward."""

    plan: Plan | None
    copies: tuple[tuple[int, tuple[int, ...]], ...]  # places among dy, ds and what was saved
    gradients: tuple[Memory, ...]
    written: tuple[str, ...]  # their names
    wanted: tuple[str, ...]
    places: tuple[int, ...]  # of each gradient that is wanted among those
    # What is yet to be added up of those that are wanted, by place: along which axes, and what it comes to.
    sums: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeros: Memory | None  # what stands for a dy that is not there
    rstd_offset: int
    order: Callable[[Sequence[float]], tuple[float, ...]] | None
    family: Family
    aligned: bool
    temporary: bool = False  # no kernel can write where dx is to be written


def family(call: Call, layouts: Mapping[str, Layout]) -> Family:
    """What `backward` wants to know of tensors that it does not see."""
    contiguous = {name: one._replace(strides=gpu.strides(one.shape)) for name, one in layouts.items()}
    key = tuple(contiguous.values())
    found = call.families.get(key)
    if found is None:
        of_x = contiguous["x"].shape
        has_through = any(contiguous[name].shape == of_x for name in call.through())
        found = keep(call.families, key, Family(call, contiguous, {}, {}, has_through))
    return found


def affine_family(name: str, x: Tensor, weight: Tensor | None, sm_margin: int) -> Family:
    """Of a plain norm whose bias nobody has told of: its gradient has the dtype of weight, else of x."""
    key = ("affine", name, sm_margin, x.shape, x.dtype, x.get_device(), None if weight is None else weight.dtype)
    found = _families.get(key)
    if found is None:
        call = affine_call(name, weight, x, None, (sm_margin,) * 3)
        given = {"x": x} if weight is None else {"x": x, "weight": weight}
        layouts = {name: checks.layout_in_memory(call.function, name, one) for name, one in given.items()}
        last = layouts["weight" if weight is not None else "x"]
        layouts["bias"] = last._replace(shape=last.shape[-1:], strides=(1,))
        found = keep(_families, key, family(call, layouts))
    return found


_families: dict[Hashable, Family] = {}


def given_through(family: Family, wanted: Collection[str], dy: Tensor | None) -> dict[str, Tensor]:
    """The gradients that are dy itself, as that of what is added to a norm: nobody need write them."""
    call, layouts, *_ = family
    through = call.through()
    if dy is None:
        return {}
    of_dy = dy.shape, checks.dtype_name(dy.dtype)
    return {name: dy for name in through if name in wanted and (layouts[name].shape, layouts[name].dtype) == of_dy}
