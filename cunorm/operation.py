"""An operation: a norm with the elementwise functions before and after it, as a value; and its derivative.

                      s = prologue(x, ...)          elementwise; x itself without a prologue
    Operation:     xhat = normalise(s)              by one of NORMS: the only part that is not elementwise
                      y = epilogue(xhat, ...)       elementwise

Every name besides x and xhat is an operand. The plain norms are operations too (`affine`).
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
    """The properties of a norm that plans depend on; its arithmetic is in kernels_cu/norms/statistics.cuh."""

    policy: str  # the name of its struct there
    subtracts_mean: bool
    lane_sums: int  # sums that a thread of the forward pass adds its columns to
    forward_values: int  # values that warps exchange for a row in the forward pass
    streamed_values: int  # the same for streamed rows
    backward_values: int  # the same in the backward pass

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the per-row scalars that the forward pass keeps."""
        return ("mean", "rstd") if self.subtracts_mean else ("rstd",)


NORMS = {
    "layer_norm": Norm("LayerNorm", True, 2, 3, 4, 2),
    "rms_norm": Norm("RmsNorm", False, 1, 1, 1, 1),
}


X = parse("x", ("x",))
# The operand of this name is an array of 8 bytes, from which each element gets a random number (expression/philox.py).
SEED = "seed"


@dataclass(frozen=True)
class Operation:
    """A norm, its prologue and its epilogue. `defaults` are the numbers that replace operands which a call leaves out.

    With `second` the epilogue computes s, which is rounded, and y = second(normalise(s), ...). Such an operation has
    only a forward pass.

    The hash and the operands are computed at once, because every call needs them, and because torch.compile cannot
    trace a computation that caches its result.
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
        object.__setattr__(self, "_hash", hash(self._values))

    @property
    def _values(self) -> tuple:
        return self.norm, self.epilogue, self.prologue, self.returns, self.defaults, self.second

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        """Pickle the fields alone, because another process has another hash."""
        return Operation, self._values

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
        """The names of the per-row scalars that the forward pass keeps."""
        names = NORMS[self.norm].statistics
        return (*names, *(f"second_{name}" for name in names)) if self.second else names

    def renamed(self, names: Mapping[str, str]) -> Operation:
        """Return the same operation of operands that have other names."""
        prologue, second = (step.renamed(names) if step else None for step in (self.prologue, self.second))
        defaults = tuple((names.get(name, name), number) for name, number in self.defaults)
        return replace(self, epilogue=self.epilogue.renamed(names), prologue=prologue, second=second, defaults=defaults)

    def given(self, names: Collection[str]) -> Operation:
        """Return the same operation with numbers in place of the operands that are not among `names`."""
        absent = {name: number for name, number in self.defaults if name not in names}
        if not absent:
            return self
        defaults = tuple((name, number) for name, number in self.defaults if name in names)
        second = _with_numbers(self.second, absent) if self.second else None
        return replace(self, epilogue=_with_numbers(self.epilogue, absent), defaults=defaults, second=second)


@cache
def affine(norm: str, zero_centered_gamma: bool = False) -> Operation:
    """Return layer_norm or rms_norm: y = xhat * weight + bias, or with 1 + weight. RMSNorm is called without bias."""
    if zero_centered_gamma:
        epilogue, neutral_weight = trace(lambda xhat, weight, bias: xhat * (1 + weight) + bias), 0.0
    else:
        epilogue, neutral_weight = trace(lambda xhat, weight, bias: xhat * weight + bias), 1.0
    return Operation(norm, epilogue, defaults=(("weight", neutral_weight), ("bias", 0.0)))


@cache
def added(norm: str, zero_centered_gamma: bool = False, dropout: bool = False) -> Operation:
    """Return add_layer_norm or add_rms_norm: the norm of s = x + residual, which is returned too.

    With dropout an element of x becomes 0 where its random number is below `dropped`, and is else times `factor`.
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
    """Return layer_norm_add or rms_norm_add: residual + the norm of x."""
    plain = affine(norm, zero_centered_gamma)
    total = trace(lambda xhat, residual, of_norm: residual + of_norm)
    return replace(plain, epilogue=substitute(total, {"of_norm": plain.epilogue}))


@cache
def norm_add_norm_steps(zero_centered_gamma: bool = False) -> tuple[Operation, Operation, Operation]:
    """Return the operations of rms_norm_add_rms_norm: that of s, that of y from s, and that of y's backward pass.

    The last has s as its prologue, because s is returned: its gradient is added to the one that comes through the norm.
    """
    if zero_centered_gamma:
        epilogue, neutral_weight = trace(lambda xhat, second_weight: xhat * (1 + second_weight)), 0.0
    else:
        epilogue, neutral_weight = trace(lambda xhat, second_weight: xhat * second_weight), 1.0
    second_norm = Operation("rms_norm", epilogue, defaults=(("second_weight", neutral_weight),))
    backward = replace(second_norm, prologue=X, returns=("y", "s"))
    return norm_added("rms_norm", zero_centered_gamma), second_norm, backward


@cache
def norm_add_norm(zero_centered_gamma: bool = False) -> Operation:
    """Return rms_norm_add_rms_norm as one operation, which one kernel runs forward."""
    first, second, _ = norm_add_norm_steps(zero_centered_gamma)
    first = first.given(("residual", "weight"))
    return replace(first, returns=("y", "s"), defaults=first.defaults + second.defaults, second=second.epilogue)


@cache
def modulated(norm: str, affine_norm: bool = False) -> Operation:
    """Return layer_norm_modulate or rms_norm_modulate, of a norm without parameters or with weight and bias."""
    plain = affine(norm) if affine_norm else Operation(norm, parse("xhat", ("xhat",)))
    modulation = trace(lambda xhat, scale, shift: xhat * (1 + scale) + shift)
    return replace(plain, epilogue=substitute(modulation, {"xhat": plain.epilogue}))


@cache
def gate_added_modulated(norm: str, affine_norm: bool = False) -> Operation:
    """Return gate_add_layer_norm_modulate or its like: a modulated norm of s = residual + gate * x, returned too."""
    prologue = trace(lambda x, residual, gate: residual + gate * x, role="prologue")
    return replace(modulated(norm, affine_norm), prologue=prologue, returns=("y", "s"))


@cache
def gated(norm_before_gate: bool = True) -> Operation:
    """Return rms_norm_gated: the norm of x times silu(z), or the norm of x * silu(z)."""
    defaults = (("weight", 1.0),)
    if norm_before_gate:
        return Operation("rms_norm", trace(lambda xhat, z, weight: xhat * weight * silu(z)), defaults=defaults)
    prologue = trace(lambda x, z: x * silu(z), role="prologue")
    return Operation("rms_norm", trace(lambda xhat, weight: xhat * weight), prologue, defaults=defaults)


# The operations of layer_norm and rms_norm, by names that also serve frameworks which need a name for each.
NAMED = {
    "layer_norm": affine("layer_norm"),
    "rms_norm": affine("rms_norm"),
    "zero_centered_layer_norm": affine("layer_norm", True),
    "zero_centered_rms_norm": affine("rms_norm", True),
}


@cache
def is_named(operation: Operation) -> bool:
    """Return whether it is one of NAMED, of a call that may leave out weight or bias."""
    return any(operation == named.given(operation.operands) for named in NAMED.values())


# Functions that return the operation of each named function, from the flags of a call.
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
    """Return the function that computes it, of a call that may leave out weight or bias; None if there is none."""
    named = {**NAMED, **{name: make() for name, make in FUSIONS.items()}}
    return next((name for name, other in named.items() if operation == other.given(operation.operands)), None)


def name_of(norm: str, zero_centered_gamma: bool) -> str:
    """Return the name in NAMED of a norm with this option."""
    return f"zero_centered_{norm}" if zero_centered_gamma else norm


@lru_cache(maxsize=512)
def added_after(operation: Operation, present: tuple[str, ...]) -> tuple[str, ...]:
    """Return the operands, of those present, that are added to a norm, so that their gradients are dy itself."""
    after = [name for name in operation.after if name in present and name not in operation.before]
    return tuple(name for name, gradient in derivative(operation, after, present).early if gradient.text == "dy")


class Derivative(NamedTuple):
    """The wanted gradients of an operation, as expressions.

    The gradients of the epilogue's operands are functions of xhat, dy (the gradient of y) and the epilogue's operands.
    Those of x and of the prologue's operands are functions of ds (the whole gradient of s), x and the prologue's
    operands. An operand of both has a gradient in each list, and the two are added.
    """

    g: Expression | None  # the gradient of xhat; None if no gradient in `late` is wanted
    early: tuple[tuple[str, Expression], ...]  # the epilogue's, which do not depend on the sums over a row
    late: tuple[tuple[str, Expression], ...]  # those of x and the prologue

    @property
    def expressions(self) -> list[Expression]:
        return [expression for _, expression in (*self.early, *self.late)] + ([self.g] if self.g else [])

    @property
    def is_expensive(self) -> bool:
        """Return whether g takes longer to compute twice than to keep: it has a function or over three operations."""
        steps = [step for step in self.g.steps if step.operands] if self.g else []
        return len(steps) > 3 or any(step.function in FUNCTIONS for step in steps)


def derivative(operation: Operation, wanted: Iterable[str], present: Collection[str]) -> Derivative:
    """Return the gradients of x or operands, named in `wanted`, for a call that has the operands `present`."""
    absent = tuple((name, number) for name, number in operation.defaults if name not in present)
    return _derivative(operation, tuple(wanted), absent)


# A plan for another number of rows needs it a few times. A backward pass is planned in 0.18 ms, without this cache in
# 0.6 (4096 columns, one core of an EPYC).
@lru_cache(maxsize=4096)
def _derivative(operation: Operation, wanted: tuple[str, ...], absent: tuple[tuple[str, float], ...]) -> Derivative:
    late_names = [name for name in wanted if name == "x" or name in operation.before]
    early_names = [name for name in wanted if name in operation.after]
    early = gradients(operation.epilogue, ("xhat", *early_names), seed="dy")
    early = {name: _with_numbers(expression, dict(absent)) for name, expression in early.items()}
    late = gradients(operation.prologue or X, late_names, seed="ds")
    return Derivative(
        early["xhat"] if late_names else None,
        tuple((name, early[name]) for name in early_names),
        tuple((name, late[name]) for name in late_names),
    )


def _with_numbers(expression: Expression, numbers: Mapping[str, float]) -> Expression:
    """Return the expression with numbers in place of names."""
    return substitute(
        expression, {name: parse(repr(number), ()) for name, number in numbers.items() if name in expression.names}
    )
