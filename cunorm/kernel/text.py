"""The elementwise part of a kernel as CUDA text: a struct `Operation` with a function for each of its expressions.

Each reads the values of a vector from lists of arrays, [array][column], as kernels_cu/rows/load.cuh has them.
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
    """Write how vectors of a row are read and written (rows/vector_access.cuh); only aligned ones are called whole."""
    return "Access::kAnywhere" if not aligned else "Access::kWhole" if whole else "Access::kAligned"


class Arithmetic(NamedTuple):
    """The fields that are read of a spec of a kernel that is no norm's."""

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
    """The struct of a forward pass: the prologue of `inputs`, the epilogue of xhat, `beside` and `columns`, and what
    comes after a second norm.
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
    found = derivative(operation, [name.removeprefix("d") for name in written], present)
    early, late = ({f"d{name}": expression for name, expression in pairs} for pairs in (found.early, found.late))
    places = _places(matrices=matrices, columns=columns) | {"xhat": "xhat"}
    of_s = places | {"ds": "ds"}
    expressions = [*early.values(), *late.values()] + ([found.g] if found.g else [])
    of_xhat = "mean" in {operand.name for operand in spec.operands} or "rstd" in {
        operand.name for operand in spec.operands
    }
    if "s" in matrices or not operation.prologue:
        source = parse("s" if "s" in matrices else "x", ("s", "x"))
    else:
        source = operation.prologue
        expressions.append(source)
    given = ("matrices", "columns")
    functions = []
    if not of_xhat:
        source = parse("0", ())  # nobody asks
    functions.append(_function("source", given, source, places, spec, rounds=source is operation.prologue))
    if found.g:
        functions.append(_function("gradient", ("Compute xhat", *given), found.g, places, spec))
        # What is kept is rounded, so that what is computed again must be.
        g = parse("dxhat", ("dxhat",)) if found.is_expensive else found.g
        without = substitute(parse("of - taken", ("of", "taken")), {"of": g})
        of_g = places | {"dxhat": "gradient(xhat, matrices, columns, i)"}
        functions.append(_function("without", ("Compute xhat", *given), without, of_g, spec, more=", Compute taken"))
    added = {name: expression for name, expression in early.items() if name in sums}
    at_once = {operand.name: early[operand.name] for operand in spec.early_results}
    functions.append(_gradients("early", "Compute xhat", added, at_once, sums, places))
    functions.append(_late(spec, early, late, sums, results, of_s))
    functions_of_zero = any(step.function not in _SAFE for expression in expressions for step in expression.steps)
    facts = {
        "kOfS": found.g is not None,
        "kOfXhat": of_xhat,
        "kLate": bool(results) or bool(set(late) & set(sums)),
        "kKeepsG": spec.keeps_g,
        "kMasks": functions_of_zero,
    }
    return _struct(spec, scalars, facts, functions, name), sums


# Of zeros they make numbers that are not too large.
_SAFE = {"name", "constant", "+", "-", "*", "negative", "where", "abs", "erf", "maximum", "minimum", "sigmoid", "tanh"}
_SAFE |= COMPARISONS


def _sum(expression: Expression, name: str) -> Expression:
    """expression + name."""
    return substitute(parse(f"of + {name}", ("of", name)), {"of": expression})


def _late(spec, early, late, sums, results, places) -> str:
    """Write what is known with ds: gradients that are written, and sums over rows of what the prologue takes."""
    added = {name: expression for name, expression in late.items() if name in sums}
    written = {}
    for name in results:
        parts = [of[name] for of in (early, late) if name in of]
        both = parse("a + b", ("a", "b"))
        written[name] = parts[0] if len(parts) == 1 else substitute(both, dict(zip(("a", "b"), parts, strict=True)))
    given = places.pop("ds")
    if "ds" in {operand.name for operand in spec.matrices}:
        index = [operand.name for operand in spec.matrices].index("ds")
        ds = f"    const Compute ds = of_norm + matrices[{index}][i];\n"
    else:
        ds = f"    const Compute {given} = of_norm;\n"
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
    """Write a function that adds to sums[k][p][i], and sets results[k][i]."""
    lines = _definitions((*added.values(), *written.values()), places) + before
    lines += "".join(f"    const Compute sum_{name} = sums[{sums.index(name)}][p][i];\n" for name in added)
    values = {f"value_{name}": expression for name, expression in written.items()}
    values |= {f"next_{name}": _sum(expression, f"sum_{name}") for name, expression in added.items()}
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
    """Write a member function of the struct Operation that returns the value of an expression."""
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
    """Variables for the names that occur and are not variables yet."""
    names = dict.fromkeys(name for expression in expressions for name in expression.uses)
    return "".join(
        f"    const Compute {name} = {places[name]};\n" for name in names if name in places and places[name] != name
    )


def _places(**lists: Iterable[str]) -> dict[str, str]:
    """Return where the value of each name is: in a list of arrays, at column i of the vector."""
    return {name: f"{of}[{k}][i]" for of, names in lists.items() for k, name in enumerate(names)}


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
