"""A norm with what stands before and after it, as a value, and its derivative.

                      s = prologue(x, ...)          elementwise; x itself without a prologue
    Operation:     xhat = normalise(s)              by one of NORMS: the only part that is not elementwise
                      y = epilogue(xhat, ...)       elementwise

Every name besides x and xhat is an operand. The plain norms are entries of a table over this (`affine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

from .expression import gradients, silu, substitute, trace, where
from .expression.grammar import parse
from .expression.value import FUNCTIONS, Expression


class Norm(NamedTuple):
    """The properties of a norm that plans know; kernels_cu/norms/statistics.cuh has its arithmetic."""

    policy: str  # its struct there
    subtracts_mean: bool
    lane_sums: int  # that a thread of the forward pass adds its columns to
    forward_values: int  # that warps tell each other in the forward pass
    streamed_values: int  # where rows are streamed
    backward_values: int

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what the forward pass keeps of a row."""
        return ("mean", "rstd") if self.subtracts_mean else ("rstd",)


NORMS = {
    "layer_norm": Norm("LayerNorm", True, 2, 3, 4, 2),
    "rms_norm": Norm("RmsNorm", False, 1, 1, 1, 1),
}


X = parse("x", ("x",))
# The operand of this name is an array of 8 bytes, of which each element gets a random number (norm/philox.py).
SEED = "seed"


@dataclass(frozen=True)
class Operation:
    """`defaults` are the numbers that stand for operands which a call leaves out.

    What follows from the fields is worked out at once: every call asks for the hash and the operands, and
    torch.compile traces neither how they are made nor that they are kept.

    With `second` the epilogue makes s, which is rounded, and y = second(normalise(s), ...): a forward pass alone.
    """

    norm: str
    epilogue: Expression
    prologue: Expression | None = None
    returns: tuple[str, ...] = ("y",)
    defaults: tuple[tuple[str, float], ...] = ()
    second: Expression | None = None
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)  # all of them, each once
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = (*self.before, *self.after, *(self.second.names[1:] if self.second else ()))
        object.__setattr__(self, "operands", tuple(dict.fromkeys(names)))
        fields = (self.norm, self.epilogue, self.prologue, self.returns, self.defaults, self.second)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:  # another process has another hash
        return Operation, (self.norm, self.epilogue, self.prologue, self.returns, self.defaults, self.second)

    @property
    def before(self) -> tuple[str, ...]:
        """The operands of the prologue."""
        return self.prologue.names[1:] if self.prologue else ()

    @property
    def after(self) -> tuple[str, ...]:
        """The operands of the epilogue."""
        return self.epilogue.names[1:]

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what the forward pass keeps of a row."""
        of_norm = NORMS[self.norm].statistics
        return (*of_norm, *(f"second_{name}" for name in of_norm)) if self.second else of_norm

    def renamed(self, names: Mapping[str, str]) -> Operation:
        """Return the same operation of operands that have other names."""
        prologue, second = (None if one is None else one.renamed(names) for one in (self.prologue, self.second))
        defaults = tuple((names.get(name, name), number) for name, number in self.defaults)
        return replace(self, epilogue=self.epilogue.renamed(names), prologue=prologue, second=second, defaults=defaults)

    def given(self, names: Collection[str]) -> Operation:
        """Return the same operation with numbers in place of the operands that are not among `names`."""
        absent = {name: number for name, number in self.defaults if name not in names}
        if not absent:
            return self
        left = tuple((name, number) for name, number in self.defaults if name in names)
        second = None if self.second is None else _with_numbers(self.second, absent)
        return replace(self, epilogue=_with_numbers(self.epilogue, absent), defaults=left, second=second)


@cache
def affine(norm: str, zero_centered_gamma: bool = False) -> Operation:
    """layer_norm and rms_norm: y = xhat * weight + bias, or with 1 + weight. Of an RMSNorm there is no bias."""
    if zero_centered_gamma:
        epilogue, one = trace(lambda xhat, weight, bias: xhat * (1 + weight) + bias), 0.0
    else:
        epilogue, one = trace(lambda xhat, weight, bias: xhat * weight + bias), 1.0
    return Operation(norm, epilogue, defaults=(("weight", one), ("bias", 0.0)))


@cache
def added(norm: str, zero_centered_gamma: bool = False, dropout: bool = False) -> Operation:
    """add_layer_norm and add_rms_norm: the same of s = x + residual, which is returned too.

    With dropout what is `dropped` of x has a random number below it, and what is kept is scaled.
    """
    if dropout:
        prologue = trace(
            lambda x, residual, seed, dropped, factor: residual + where(seed < dropped, 0, x * factor), role="prologue"
        )
    else:
        prologue = trace(lambda x, residual: x + residual, role="prologue")
    return replace(affine(norm, zero_centered_gamma), prologue=prologue, returns=("y", "s"))


@cache
def norm_added(norm: str, zero_centered_gamma: bool = False) -> Operation:
    """layer_norm_add and rms_norm_add: residual + the norm of x."""
    of_norm = affine(norm, zero_centered_gamma)
    total = trace(lambda xhat, residual, of_norm: residual + of_norm)
    return replace(of_norm, epilogue=substitute(total, {"of_norm": of_norm.epilogue}))


@cache
def norm_add_norm_steps(zero_centered_gamma: bool = False) -> tuple[Operation, Operation, Operation]:
    """Return the operations of rms_norm_add_rms_norm: that of s, that of y from s, and that of y's backward pass.

    The last one has s as its prologue too: s is returned, so its gradient is added to what comes through the norm.
    """
    if zero_centered_gamma:
        epilogue, one = trace(lambda xhat, second_weight: xhat * (1 + second_weight)), 0.0
    else:
        epilogue, one = trace(lambda xhat, second_weight: xhat * second_weight), 1.0
    then = Operation("rms_norm", epilogue, defaults=(("second_weight", one),))
    return norm_added("rms_norm", zero_centered_gamma), then, replace(then, prologue=X, returns=("y", "s"))


@cache
def norm_add_norm(zero_centered_gamma: bool = False) -> Operation:
    """Return rms_norm_add_rms_norm as one operation, which one kernel runs forward."""
    of_sum, then, _ = norm_add_norm_steps(zero_centered_gamma)
    defaults = (*((name, value) for name, value in of_sum.defaults if name == "weight"), *then.defaults)
    of_weight = of_sum.given(("residual", "weight"))
    return replace(of_weight, returns=("y", "s"), defaults=defaults, second=then.epilogue)


@cache
def modulated(norm: str, affine_norm: bool = False) -> Operation:
    """Return layer_norm_modulate or rms_norm_modulate, of a norm without parameters or with weight and bias."""
    of_norm = affine(norm) if affine_norm else Operation(norm, parse("xhat", ("xhat",)))
    modulation = trace(lambda xhat, scale, shift: xhat * (1 + scale) + shift)
    return replace(of_norm, epilogue=substitute(modulation, {"xhat": of_norm.epilogue}))


@cache
def gate_added_modulated(norm: str, affine_norm: bool = False) -> Operation:
    """Return gate_add_layer_norm_modulate or its like: a modulated norm of s = residual + gate * x, returned too."""
    prologue = trace(lambda x, residual, gate: residual + gate * x, role="prologue")
    return replace(modulated(norm, affine_norm), prologue=prologue, returns=("y", "s"))


@cache
def gated(norm_before_gate: bool = True) -> Operation:
    """rms_norm_gated: the norm times silu(z), or the norm of x times it."""
    if norm_before_gate:
        return Operation(
            "rms_norm", trace(lambda xhat, z, weight: xhat * weight * silu(z)), defaults=(("weight", 1.0),)
        )
    of_norm = Operation("rms_norm", trace(lambda xhat, weight: xhat * weight), defaults=(("weight", 1.0),))
    return replace(of_norm, prologue=trace(lambda x, z: x * silu(z), role="prologue"))


# What the public functions compute, by the name that stands for it below them, where a framework wants one as well.
NAMED = {
    "layer_norm": affine("layer_norm"),
    "rms_norm": affine("rms_norm"),
    "zero_centered_layer_norm": affine("layer_norm", True),
    "zero_centered_rms_norm": affine("rms_norm", True),
}


@cache
def is_named(operation: Operation) -> bool:
    """Return whether it is one of NAMED, of a call that may leave weight or bias out."""
    return any(operation == one.given(operation.operands) for one in NAMED.values())


# What the named functions compute, by the flags of a call: zero_centered_gamma and dropout, norm_before_gate, or
# whether the norm has parameters of its own.
FUSIONS: dict[str, Callable[..., Operation]] = {
    "add_layer_norm": partial(added, "layer_norm"),
    "add_rms_norm": partial(added, "rms_norm"),
    "layer_norm_add": partial(norm_added, "layer_norm"),
    "rms_norm_add": partial(norm_added, "rms_norm"),
    "rms_norm_gated": gated,
    "layer_norm_modulate": partial(modulated, "layer_norm"),
    "rms_norm_modulate": partial(modulated, "rms_norm"),
    "gate_add_layer_norm_modulate": partial(gate_added_modulated, "layer_norm"),
    "gate_add_rms_norm_modulate": partial(gate_added_modulated, "rms_norm"),
}


@cache
def name_of_operation(operation: Operation) -> str | None:
    """The function that computes it, of a call that may leave weight or bias out; None for a user's own operation."""
    named = {**NAMED, **{name: make() for name, make in FUSIONS.items()}}
    return next((name for name, one in named.items() if operation == one.given(operation.operands)), None)


def name_of(norm: str, zero_centered_gamma: bool) -> str:
    """The entry of NAMED that a function and its option mean."""
    return f"zero_centered_{norm}" if zero_centered_gamma else norm


@lru_cache(maxsize=512)
def added_after(operation: Operation, present: tuple[str, ...]) -> tuple[str, ...]:
    """The operands, of those present, whose gradients are dy itself: what is added to a norm."""
    after = [name for name in operation.after if name in present and name not in operation.before]
    return tuple(name for name, gradient in derivative(operation, after, present).early if gradient.text == "dy")


class Derivative(NamedTuple):
    """The gradients that are wanted of an operation, as expressions.

    Those of the epilogue's operands are of xhat, dy (the gradient of y) and the epilogue's operands; those of x and of
    the prologue's operands are of ds (the whole gradient of s), x and the prologue's operands. An operand of both has
    one in each, and they are added.
    """

    g: Expression | None  # the gradient of xhat; None where nobody asks for what comes of it
    early: tuple[tuple[str, Expression], ...]  # known before the sums over a row are
    late: tuple[tuple[str, Expression], ...]

    @property
    def is_expensive(self) -> bool:
        """Return whether g takes longer to compute twice than to keep: it has a function or over three operations."""
        steps = [step for step in self.g.steps if step.operands] if self.g else []
        return len(steps) > 3 or any(step.function in FUNCTIONS for step in steps)


def derivative(operation: Operation, wanted: Iterable[str], present: Collection[str]) -> Derivative:
    """The gradients with respect to `wanted`, names of operands or x, of a call that has the operands `present`."""
    absent = tuple((name, number) for name, number in operation.defaults if name not in present)
    return _derivative(operation, tuple(wanted), absent)


# Every plan for another number of rows asks for it a few times: a backward pass is planned in 0.18 ms, without what is
# kept here in 0.6 (4096 columns, one core of an EPYC).
@lru_cache(maxsize=4096)
def _derivative(operation: Operation, wanted: tuple[str, ...], absent: tuple[tuple[str, float], ...]) -> Derivative:
    late_names = [name for name in wanted if name == "x" or name in operation.before]
    early_names = [name for name in wanted if name in operation.after]
    found = gradients(operation.epilogue, ("xhat", *early_names), seed="dy")
    numbers = dict(absent)
    found = {name: _with_numbers(expression, numbers) for name, expression in found.items()}
    prologue = operation.prologue or X
    late = gradients(prologue, late_names, seed="ds")
    return Derivative(
        found.pop("xhat") if late_names else None,
        tuple((name, found[name]) for name in early_names),
        tuple((name, late[name]) for name in late_names),
    )


def _with_numbers(expression: Expression, numbers: dict[str, float]) -> Expression:
    """The expression with numbers in place of names, which it then has no more."""
    return substitute(
        expression, {name: parse(repr(number), ()) for name, number in numbers.items() if name in expression.names}
    )
