"""The elementwise part of a kernel as CUDA text: a struct `Operation` with a function for each of its expressions.

Each function reads the values of a vector from lists of arrays, [array][column], as in kernels_cu/rows/load.cuh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..expression import substitute
from ..expression.grammar import parse
from ..expression.texts import cuda
from ..expression.value import COMPARISONS, Expression
from ..operation import Operation, derivative
from ..plan.spec import NormSpec

CPP_TYPE = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
CPP_TYPE |= {"float8_e4m3fn": "float8_e4m3", "float8_e5m2": "float8_e5m2"}


def cpp(flag: bool) -> str:
    return "true" if flag else "false"


def access(aligned: bool, whole: bool = False) -> str:
    """Return how vectors are read and written (rows/vector_access.cuh). Only aligned ones can be known as whole."""
    return "Access::kAnywhere" if not aligned else "Access::kWhole" if whole else "Access::kAligned"


class Arithmetic(NamedTuple):
    """The fields of a NormSpec that forward_struct reads, for kernels that are no norm's."""

    operation: Operation
    row_dtype: str
    compute: str


def forward_struct(
    spec: NormSpec | Arithmetic,
    inputs: Sequence[str],
    beside: Sequence[str],
    columns: Sequence[str],
    scalars: Sequence[str],
    second_columns: Sequence[str] = (),
) -> str:
    """Return the struct of a forward pass: the prologue of `inputs`, the epilogue of xhat, `beside` (its matrices) and
    `columns`, and the epilogue of a second norm.
    """
    operation = spec.operation
    places = {name: f"inputs[{i}][i]" for i, name in enumerate(inputs)}
    functions = []
    if operation.prologue:
        functions.append(_function("prologue", ("inputs",), operation.prologue, places, spec))
    places = _places(beside=beside, columns=columns) | {"xhat": "xhat"}
    functions.append(_function("epilogue", ("Compute xhat", "beside", "columns"), operation.epilogue, places, spec))
    if operation.second:
        places = _places(columns=second_columns) | {"xhat": "xhat"}
        functions.append(_function("second", ("Compute xhat", "columns"), operation.second, places, spec))
    return _struct(spec, scalars, {"kPrologue": operation.prologue is not None}, functions)


def backward_struct(
    spec: NormSpec, matrices: Sequence[str], columns: Sequence[str], scalars: Sequence[str], name: str = "Operation"
) -> tuple[str, list[str]]:
    """Return (the struct of a backward pass, the gradients that it sums over rows)."""
    operation = spec.operation
    written = [operand.name for operand in spec.written]
    sums = [operand.name for operand in spec.sums]
    results = [operand.name for operand in (*spec.late_results, *spec.row_sums)]
    present = {operand.name for operand in spec.read}
    derived = derivative(operation, [name.removeprefix("d") for name in written], present)
    early, late = ({f"d{name}": expression for name, expression in pairs} for pairs in (derived.early, derived.late))
    places = _places(matrices=matrices, columns=columns) | {"xhat": "xhat"}
    expressions = derived.expressions
    needs_xhat = any(operand.name in ("mean", "rstd") for operand in spec.operands)
    if "s" in matrices or not operation.prologue:
        source = parse("s" if "s" in matrices else "x", ("s", "x"))
    else:
        source = operation.prologue
        expressions.append(source)
    if not needs_xhat:
        source = parse("0", ())  # no kernel calls it
    lists = ("matrices", "columns")
    functions = [_function("source", lists, source, places, spec, rounds=source is operation.prologue)]
    if derived.g:
        functions.append(_function("gradient", ("Compute xhat", *lists), derived.g, places, spec))
        # An expensive g may be kept, and so rounded. Where it is computed again it must be rounded too.
        g = parse("dxhat", ("dxhat",)) if derived.is_expensive else derived.g
        without = substitute(parse("of - taken", ("of", "taken")), {"of": g})
        g_places = places | {"dxhat": "gradient(xhat, matrices, columns, i)"}
        functions.append(
            _function("without", ("Compute xhat", *lists), without, g_places, spec, more=", Compute taken")
        )
    added = {name: expression for name, expression in early.items() if name in sums}
    early_results = {operand.name: early[operand.name] for operand in spec.early_results}
    functions.append(_gradients("early", "Compute xhat", added, early_results, sums, places))
    functions.append(_late(spec, early, late, sums, results, places))
    facts = {
        "kOfS": derived.g is not None,
        "kOfXhat": needs_xhat,
        "kLate": bool(results) or bool(set(late) & set(sums)),
        "kKeepsG": spec.keeps_g,
        "kMasks": any(step.function not in _SAFE for expression in expressions for step in expression.steps),
    }
    return _struct(spec, scalars, facts, functions, name), sums


# Functions whose values for zeros are not too large.
_SAFE = {"name", "constant", "+", "-", "*", "negative", "where", "abs", "erf", "maximum", "minimum", "sigmoid", "tanh"}
_SAFE |= COMPARISONS


def _late(
    spec: NormSpec,
    early: Mapping[str, Expression],
    late: Mapping[str, Expression],
    sums: list[str],
    results: list[str],
    places: Mapping[str, str],
) -> str:
    """Return the function of what depends on ds: gradients that are written, and sums over rows for the prologue."""
    added = {name: expression for name, expression in late.items() if name in sums}
    written = {}
    for name in results:
        parts = [gradients[name] for gradients in (early, late) if name in gradients]
        both = parse("a + b", ("a", "b"))
        written[name] = parts[0] if len(parts) == 1 else substitute(both, dict(zip(("a", "b"), parts, strict=True)))
    matrices = [operand.name for operand in spec.matrices]
    returned = f" + matrices[{matrices.index('ds')}][i]" if "ds" in matrices else ""
    ds = f"    const Compute ds = of_norm{returned};\n"  # takes the place of the matrix ds
    places = {name: place for name, place in places.items() if name != "ds"}
    return _gradients("late", "Compute xhat, Compute of_norm", added, written, sums, places, ds)


def _gradients(
    function: str,
    arguments: str,
    added: Mapping[str, Expression],
    written: Mapping[str, Expression],
    sums: list[str],
    places: Mapping[str, str],
    before: str = "",
) -> str:
    """Return a function that adds to sums[k][p][i] and sets results[k][i]."""
    lines = _definitions((*added.values(), *written.values()), places) + before
    lines += "".join(f"    const Compute sum_{name} = sums[{sums.index(name)}][p][i];\n" for name in added)
    values = {f"value_{name}": expression for name, expression in written.items()}
    for name, expression in added.items():
        total = parse(f"of + sum_{name}", ("of", f"sum_{name}"))
        values[f"next_{name}"] = substitute(total, {"of": expression})
    if values:
        lines += f"{cuda(values, indent='    ')}\n"
    lines += "".join(f"    sums[{sums.index(name)}][p][i] = next_{name};\n" for name in added)
    lines += "".join(f"    results[{k}][i] = value_{name};\n" for k, name in enumerate(written))
    return (
        "  template <class Matrices, class Columns, class Sums, class Results>\n"
        f"  DEVICE void {function}({arguments}, const Matrices& matrices, const Columns& columns, int i, int p, "
        f"Sums& sums, Results& results) const {{\n{lines}  }}\n"
    )


def _function(
    name: str,
    arguments: tuple[str, ...],
    expression: Expression,
    places: Mapping[str, str],
    spec: NormSpec | Arithmetic,
    *,
    rounds: bool = False,
    more: str = "",
) -> str:
    """Return a member function of the struct Operation that computes the value of an expression."""
    lists = [argument for argument in arguments if " " not in argument]
    templates = ", ".join(f"class {argument.capitalize()}" for argument in lists)
    taken = ", ".join(
        argument if " " in argument else f"const {argument.capitalize()}& {argument}" for argument in arguments
    )
    value = f"rounded<{CPP_TYPE[spec.row_dtype]}>(value)" if rounds else "value"
    return (
        f"  template <{templates}>\n  DEVICE Compute {name}({taken}, int i{more}) const {{\n"
        f"{_definitions([expression], places)}{cuda({'value': expression}, indent='    ')}\n    return {value};\n  }}\n"
    )


def _definitions(expressions: Iterable[Expression], places: Mapping[str, str]) -> str:
    """Return definitions of variables for the names that occur and are not variables yet."""
    names = dict.fromkeys(name for expression in expressions for name in expression.uses)
    return "".join(
        f"    const Compute {name} = {places[name]};\n" for name in names if name in places and places[name] != name
    )


def _places(**lists: Iterable[str]) -> dict[str, str]:
    """Return the text of each name's value: in a list of arrays, at column i of the vector."""
    return {name: f"{arrays}[{k}][i]" for arrays, names in lists.items() for k, name in enumerate(names)}


def _struct(
    spec: NormSpec | Arithmetic,
    scalars: Iterable[str],
    facts: Mapping[str, bool],
    functions: Iterable[str],
    name: str = "Operation",
) -> str:
    members = "".join(f"  Compute {name};\n" for name in scalars)
    constants = "".join(f"  static constexpr bool {name} = {cpp(value)};\n" for name, value in facts.items())
    compute = CPP_TYPE[spec.compute]
    return f"struct {name} {{\n  using Compute = {compute};\n{constants}{members}{''.join(functions)}}};\n"
