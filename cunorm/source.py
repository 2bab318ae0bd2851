"""From a spec to CUDA text.

The text is the files of `kernels_cu/` followed by a few generated lines: the operation's expressions as one struct,
and one template of these files, instantiated behind one `extern "C"` entry. Included files are put into the text
itself: the key of CuPy's disk cache is a hash of the text and does not see what `#include` would reach, so an edited
header would not recompile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from .expression import substitute
from .expression_grammar import parse
from .expression_texts import cuda
from .expression_value import Expression
from .norm.spec import (
    COLUMN_BYTES,
    COLUMN_PACKS,
    MAILBOX,
    SHARED_ALIGNMENT,
    SUM_COLUMNS,
    KernelSpec,
    NormSpec,
    SumSpec,
)
from .operation import NORMS, derivative

CPP_TYPE = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}

FILES = {
    "forward": "norm_forward.cu",
    "forward_streamed": "norm_forward_streamed.cu",
    "backward": "norm_backward.cu",
    "backward_streamed": "norm_backward_streamed.cu",
    "column_gradients": "weight_gradient.cu",
    "sum_partials": "weight_gradient.cu",
}

# What host and device both count with.
SHARED_FACTS = "namespace cunorm {{\n{}}}  // namespace cunorm\n".format(
    "".join(
        f"[[maybe_unused]] constexpr int {name} = {value};\n"
        for name, value in {
            "kColumnBytes": COLUMN_BYTES,
            "kColumnPacks": COLUMN_PACKS,
            "kSumColumns": SUM_COLUMNS,
            "kMailboxBytes": MAILBOX,
            "kSharedAlignment": SHARED_ALIGNMENT,
        }.items()
    )
)


class Baked(NamedTuple):
    """What stands in the text of an entry whose only parameters are `pointers`, in this order.

    One that is no parameter of the kernel is a buffer of bytes. `values` are the C++ expressions of other arguments, by
    name: of a pointer one that names another pointer, without any it is null.
    """

    pointers: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


def entry_name(spec: KernelSpec) -> str:
    return f"cunorm_{spec.kernel}"


def source(spec: KernelSpec, baked: Baked | None = None) -> str:
    """The whole CUDA text of a kernel."""
    return f"{SHARED_FACTS}{_file_text(FILES[spec.kernel])}\n{_entry(spec, baked)}"


@cache
def _file_text(name: str) -> str:
    return _inlined(name, set())


def _inlined(name: str, seen: set[str]) -> str:
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    text = resources.files("cunorm.kernels_cu").joinpath(name).read_text()
    for number, line in enumerate(text.splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included:
            if included[1] not in seen:
                lines.append(_inlined(included[1], seen))
            lines.append(f'#line {number + 1} "{name}"')
        elif line != "#pragma once":
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines)


def parameters(spec: KernelSpec) -> dict[str, str]:
    """The C++ type of each parameter of a kernel, by name and in order: arrays, numbers, sizes."""
    if isinstance(spec, SumSpec):
        of_one = {"partials": f"const {CPP_TYPE[spec.compute]}*", "sum": f"{CPP_TYPE[spec.dtype]}*"}
        found = {f"{name}{i}": kind for i in range(spec.count) for name, kind in of_one.items()}
        return found | {"groups": "int64", "cols": "int64"}
    sums = {one.name for one in spec.sums} if not spec.final else set()
    found = {
        one.name: f"{'' if one.written else 'const '}{CPP_TYPE[spec.compute if one.name in sums else one.dtype]}*"
        for one in spec.operands
        if one.kind != "scalar"
    }
    found |= {one.name: CPP_TYPE[one.dtype] for one in spec.operands if one.kind == "scalar"}
    found["rows"] = "int64"
    return found | {f"{one.name}_stride": "int64" for one in spec.operands if one.kind == "full"}


def _entry(spec: KernelSpec, baked: Baked | None) -> str:
    """The expressions of a spec, the instance of a template, and the entry point with what launch.py passes."""
    if isinstance(spec, SumSpec):
        before, call = "", _sum_partials(spec)
        cluster, bounds = 1, f"{spec.threads}, 1"
    else:
        before, call = _KERNELS[spec.kernel](spec)
        cluster, bounds = spec.shape.cluster, f"{spec.threads}, {spec.ctas_per_sm}"
    types = parameters(spec)
    constants = offsets = ""
    if baked is not None:
        types, constants, offsets = _bake(types, baked)
    clusters = f" __cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    return (
        f"using namespace cunorm;\n{before}{constants}"
        f'extern "C" __global__ void{clusters} __launch_bounds__({bounds})\n'
        f"{entry_name(spec)}({', '.join(f'{kind} {name}' for name, kind in types.items())}) {{\n"
        f"{offsets}{call}}}\n"
    )


def _bake(types: Mapping[str, str], baked: Baked) -> tuple[dict[str, str], str, str]:
    """(the parameters that are left, definitions before the entry, definitions in it).

    What is no parameter any more stands in constant memory, as parameters do, so that the compiler knows no more of it:
    of literals and nullptr ptxas made kernels that spill up to 8 bytes.
    """
    left = {name: types.get(name, "char*") for name in baked.pointers}
    values = dict(baked.values)
    others = {name: kind for name, kind in types.items() if name not in left}
    offsets = {name for name, kind in others.items() if kind.endswith("*") and name in values}
    constants = "".join(
        f"__constant__ {kind} {name} = {values.get(name, 'nullptr')};\n"
        for name, kind in others.items()
        if name not in offsets
    )
    within = "".join(f"  {kind} {name} = {values[name]};\n" for name, kind in others.items() if name in offsets)
    return left, constants, within


# The templates' arguments.


def _forward(spec: NormSpec) -> tuple[str, str]:
    operation = spec.operation
    by_name = {one.name: one for one in spec.operands}
    inputs = [one.name for one in spec.inputs]
    beside = [one.name for one in spec.beside]
    columns = [one.name for one in spec.columns if one.name in operation.epilogue.uses]
    scalars = [one.name for one in spec.operands if one.kind == "scalar" and one.name != "eps"]
    places = {name: f"inputs[{i}][i]" for i, name in enumerate(inputs)}
    functions = []
    if operation.prologue:
        functions.append(_function("prologue", ("inputs",), operation.prologue, places, spec))
    places = _places(beside=beside, columns=columns) | {"xhat": "xhat"}
    functions.append(_function("epilogue", ("Compute xhat", "beside", "columns"), operation.epilogue, places, spec))
    before = _struct(spec, scalars, {"kPrologue": operation.prologue is not None}, functions)
    cache_x, cache_y = (_cache(flag) for flag in (spec.streamed_x, spec.streamed_y))
    load = f"{{{_matrices(spec, inputs, cache_x)}, operation}}"
    s = by_name.get("s")
    call = "\n      ".join(
        (
            f"operation, LoadSource<{CPP_TYPE[spec.row_dtype]}, {spec.shape.pack}, Operation, "
            f"{_matrices_type(spec, inputs, cache_x)}>{load},",
            f"{_matrices_type(spec, beside, cache_x)}{_matrices(spec, beside, cache_x)},",
            f"{_matrices_type(spec, columns, KEPT)}{_matrices(spec, columns, KEPT)},",
            f"{_store(spec, 's', s.dtype, cache_y) if s and s.written else 'NoStore{}'},",
            f"{_store(spec, 'y', by_name['y'].dtype, cache_y)},",
            f"{'mean' if 'mean' in by_name else 'static_cast<Operation::Compute*>(nullptr)'}, rstd, rows, eps",
        )
    )
    norm = NORMS[operation.norm].policy
    if spec.kernel == "forward_streamed":
        template = f"norm_forward_streamed<{norm}, {spec.cols}, {_step_shape(spec)}, Operation::Compute>"
        return before, _call(scalars, f"{template}({call})")
    template = (
        f"norm_forward<{norm}, {_row_shape(spec)}, {spec.rows_per_cta}, Rows, {_cpp(spec.columns_stay)}, "
        f"{_cpp(spec.once)}, Operation::Compute>"
    )
    return before + _rows(spec), _call(scalars, f"{template}({call})")


def _backward(spec: NormSpec) -> tuple[str, str]:
    by_name = {one.name: one for one in spec.operands}
    matrices = [one.name for one in spec.matrices]
    columns = [one.name for one in spec.columns]
    scalars = [one.name for one in spec.operands if one.kind == "scalar"]
    before, sums, results = _derivative(spec, matrices, columns, scalars)
    statistics = [
        name if name in by_name else "static_cast<const Operation::Compute*>(nullptr)" for name in ("mean", "rstd")
    ]
    cache = _cache(spec.streamed_y)
    arguments = [
        "operation",
        f"{_matrices_type(spec, matrices, cache)}{_matrices(spec, matrices, cache)}",
        f"{_matrices_type(spec, columns, KEPT)}{_matrices(spec, columns, KEPT)}",
    ]
    if spec.kernel != "column_gradients":
        arguments.append(_list("Results", (_store(spec, name, by_name[name].dtype, KEPT) for name in results)))
    if spec.kernel != "backward_streamed":
        arguments.append(_list("Sums", (_store_sum(spec, name, by_name[name].dtype) for name in sums)))
    call = ",\n      ".join((*arguments, *statistics, "rows"))
    norm = NORMS[spec.operation.norm].policy
    if spec.kernel == "backward":
        template = f"norm_backward<{norm}, {_row_shape(spec)}, {spec.rows_per_cta}, Rows, Operation::Compute>"
        return before + _rows(spec), _call(scalars, f"{template}({call})")
    if spec.kernel == "backward_streamed":
        template = f"norm_backward_streamed<{norm}, {spec.cols}, {_step_shape(spec)}, Operation::Compute>"
    else:
        template = f"column_gradients<{norm}, {spec.cols}, {spec.shape.pack}, Operation::Compute>"
    return before, _call(scalars, f"{template}({call})")


def _derivative(spec, matrices, columns, scalars) -> tuple[str, list[str], list[str]]:
    """(the struct Operation of a backward pass, the gradients that it sums over rows, those that it writes by rows)"""
    operation = spec.operation
    written = [one.name for one in spec.written]
    sums = [one.name for one in spec.sums]
    results = [name for name in written if name not in sums]
    present = {one.name for one in spec.read}
    found = derivative(operation, [name.removeprefix("d") for name in written], present)
    early, late = ({f"d{name}": one for name, one in pairs} for pairs in (found.early, found.late))
    places = _places(matrices=matrices, columns=columns) | {"xhat": "xhat"}
    of_s = places | {"ds": "ds"}
    expressions = [*early.values(), *late.values()] + ([found.g] if found.g else [])
    of_xhat = "mean" in {one.name for one in spec.operands} or "rstd" in {one.name for one in spec.operands}
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
        centred = _sum(found.g, "term", minus=True)
        functions.append(_function("centred", ("Compute xhat", *given), centred, places, spec, more=", Compute term"))
    functions.append(
        _accumulation("early", "Compute xhat", {name: one for name, one in early.items() if name in sums}, sums, places)
    )
    functions.append(_late(spec, early, late, sums, results, of_s))
    functions_of_zero = any(step.function not in _SAFE for one in expressions for step in one.steps)
    facts = {
        "kOfS": found.g is not None,
        "kOfXhat": of_xhat,
        "kLate": bool(results) or bool(set(late) & set(sums)),
        "kMasks": functions_of_zero,
    }
    return _struct(spec, scalars, facts, functions), sums, results


_SAFE = {"name", "constant", "+", "-", "*", "negative"}  # of zeros they make numbers


def _sum(expression: Expression, name: str, *, minus: bool = False) -> Expression:
    """expression + name, or - name."""
    return substitute(parse(f"of {'-' if minus else '+'} {name}", ("of", name)), {"of": expression})


def _accumulation(
    function: str, first: str, added: Mapping[str, Expression], sums: list[str], places: Mapping[str, str]
) -> str:
    """A function that adds to sums[k][p][i]."""
    lines = _definitions(added.values(), places)
    totals = {name: f"sum_{name}" for name in added}
    lines += "".join(f"    const Compute {totals[name]} = sums[{sums.index(name)}][p][i];\n" for name in added)
    results = {f"next_{name}": _sum(expression, totals[name]) for name, expression in added.items()}
    if results:
        lines += f"{cuda(results, indent='    ')}\n"
    lines += "".join(f"    sums[{sums.index(name)}][p][i] = next_{name};\n" for name in added)
    return (
        "  template <class Matrices, class Columns, class Sums>\n"
        f"  DEVICE void {function}({first}, const Matrices& matrices, const Columns& columns, int i, int p, "
        f"Sums& sums) const {{\n{lines}  }}\n"
    )


def _late(spec, early, late, sums, results, places) -> str:
    """What is known with ds: gradients that are written, and sums over rows of what the prologue takes."""
    added = {name: one for name, one in late.items() if name in sums}
    written = {}
    for name in results:
        parts = [of[name] for of in (early, late) if name in of]
        both = parse("a + b", ("a", "b"))
        written[name] = parts[0] if len(parts) == 1 else substitute(both, dict(zip(("a", "b"), parts, strict=True)))
    given = places.pop("ds")
    lines = _definitions((*added.values(), *written.values()), places)
    if "ds" in {one.name for one in spec.matrices}:
        index = [one.name for one in spec.matrices].index("ds")
        lines += f"    const Compute ds = of_norm + matrices[{index}][i];\n"
    else:
        lines += f"    const Compute {given} = of_norm;\n"
    lines += "".join(f"    const Compute sum_{name} = sums[{sums.index(name)}][p][i];\n" for name in added)
    values = {f"value_{name}": one for name, one in written.items()}
    values |= {f"next_{name}": _sum(one, f"sum_{name}") for name, one in added.items()}
    if values:
        lines += f"{cuda(values, indent='    ')}\n"
    lines += "".join(f"    sums[{sums.index(name)}][p][i] = next_{name};\n" for name in added)
    lines += "".join(f"    results[{k}][i] = value_{name};\n" for k, name in enumerate(results))
    return (
        "  template <class Matrices, class Columns, class Sums, class Results>\n"
        "  DEVICE void late(Compute xhat, Compute of_norm, const Matrices& matrices, const Columns& columns, int i, "
        f"int p, Sums& sums, Results& results) const {{\n{lines}  }}\n"
    )


def _function(
    name: str,
    arguments: tuple[str, ...],
    expression: Expression,
    places: Mapping[str, str],
    spec: NormSpec,
    *,
    rounds: bool = False,
    more: str = "",
) -> str:
    """A member function of the struct Operation that returns the value of an expression."""
    lists = [one for one in arguments if " " not in one]
    templates = ", ".join(f"class {one.capitalize()}" for one in lists)
    taken = ", ".join(one if " " in one else f"const {one.capitalize()}& {one}" for one in arguments)
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
    """Where the value of each name is: in a list of arrays, at column i of the pack."""
    return {name: f"{of}[{k}][i]" for of, names in lists.items() for k, name in enumerate(names)}


def _struct(spec: NormSpec, scalars: Iterable[str], facts: Mapping[str, bool], functions: Iterable[str]) -> str:
    members = "".join(f"  Compute {name};\n" for name in scalars)
    constants = "".join(f"  static constexpr bool {name} = {_cpp(value)};\n" for name, value in facts.items())
    compute = CPP_TYPE[spec.compute]
    return f"struct Operation {{\n  using Compute = {compute};\n{constants}{members}{''.join(functions)}}};\n"


def _call(scalars: Iterable[str], call: str) -> str:
    return f"  const Operation operation{{{', '.join(scalars)}}};\n  {call};\n"


KEPT = "Cache::kKept"


def _cache(streamed: bool) -> str:
    return f"Cache::{'kStreamed' if streamed else 'kKept'}"


def _matrices_type(spec: NormSpec, names: Iterable[str], cache: str) -> str:
    by_name = {one.name: one for one in spec.operands}
    loads = (_load_type(spec, by_name[name].dtype, cache if by_name[name].kind == "full" else KEPT) for name in names)
    return f"Matrices<{', '.join(loads)}>"


def _load_type(spec: NormSpec, dtype: str, cache: str) -> str:
    return f"LoadRows<{CPP_TYPE[dtype]}, {spec.shape.pack}, {_cpp(spec.aligned)}, {cache}>"


def _matrices(spec: NormSpec, names: Iterable[str], cache: str) -> str:
    """The initialiser of such a list."""
    by_name = {one.name: one for one in spec.operands}
    text = "{}"
    for name in reversed(list(names)):
        stride = f"{name}_stride" if by_name[name].kind == "full" else "0"
        text = f"{{{{{name}, {stride}}}, {text}}}"
    return text


def _list(template: str, stores: Iterable[str]) -> str:
    """Results or Sums of stores, each written as `Type{...}`."""
    stores = list(stores)
    text = "{}"
    for store in reversed(stores):
        text = f"{{{store}, {text}}}"
    return f"{template}<{', '.join(store.partition('{')[0] for store in stores)}>{text}"


def _store(spec: NormSpec, name: str, dtype: str, cache: str) -> str:
    return f"StoreRows<{CPP_TYPE[dtype]}, {spec.shape.pack}, {_cpp(spec.aligned)}, {cache}>{{{name}, {name}_stride}}"


def _store_sum(spec: NormSpec, name: str, dtype: str) -> str:
    """Where the sum of a gradient goes: to dweight itself, or to a partial row."""
    if spec.final:
        return f"StoreGradient<{CPP_TYPE[dtype]}, {spec.shape.pack}, {spec.cols}, {_cpp(spec.aligned)}>{{{name}}}"
    return f"StorePartial<{CPP_TYPE[spec.compute]}, {spec.shape.pack}, {spec.cols}>{{{name}}}"


def _row_shape(spec: NormSpec) -> str:
    shape = spec.shape
    return f"RowShape<{spec.cols}, {shape.pack}, {shape.threads}, {shape.packs}, {shape.cluster}>"


def _step_shape(spec: NormSpec) -> str:
    shape = spec.shape
    return f"RowShape<{shape.pack * shape.threads}, {shape.pack}, {shape.threads}, 1, 1>"


def _rows(spec: NormSpec) -> str:
    """Where rows wait (rows.cuh)."""
    shape = f"{_row_shape(spec)}, {spec.rows_per_cta}"
    kind = (
        f"SharedRows<{shape}, {spec.stages}, {_cpp(spec.ask_early)}, Load>"
        if spec.stages
        else f"RegisterRows<{shape}, {_cpp(spec.prefetch)}, Load>"
    )
    return f"template <class Load>\nusing Rows = {kind};\n"


def _sum_partials(spec: SumSpec) -> str:
    """blockIdx.y says which."""
    of_this = {
        name: "".join(f"blockIdx.y == {i} ? {name}{i} : " for i in range(spec.count - 1)) + f"{name}{spec.count - 1}"
        for name in ("partials", "sum")
    }
    template = f"sum_partials<{spec.lanes}, {spec.rows_per_cta}, {spec.pack}>"
    return f"  {template}({of_this['partials']}, {of_this['sum']}, groups, cols);\n"


_KERNELS = {
    "forward": _forward,
    "forward_streamed": _forward,
    "backward": _backward,
    "backward_streamed": _backward,
    "column_gradients": _backward,
}


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"
