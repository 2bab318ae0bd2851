"""A kernel as an instance of a template, as text: the definitions before its entry, and the call within the entry.

There is a function for each family of kernels. The templates are in kernels_cu/, which explains their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..operation import NORMS
from ..plan.problem import BLOCK, Operand, Operands
from ..plan.spec import BACKWARD, FewRowsSpec, NormSpec, SumSpec
from .text import CPP_TYPE, access, backward_struct, cpp, forward_struct


def call_of(spec: NormSpec | SumSpec | FewRowsSpec, *, owns_workspace: bool) -> tuple[str, str]:
    """Return (definitions before the entry, the statements of the entry).

    A launch by XLA does not own the workspace that it reads, because for XLA it is an operand, which must not change.
    """
    if isinstance(spec, SumSpec):
        return "", _sum_partials(spec, owns_workspace)
    before, call = _FAMILIES[spec.kernel](by_position(spec) if isinstance(spec, NormSpec) else spec)
    if isinstance(spec, NormSpec) and spec.leaves_partial_sums:
        call = f"  wait_for_kernel_before();\n{call}"
    return before, call


def by_position(spec: NormSpec) -> NormSpec:
    """Return the spec with the names of its text: operand_0, operand_1, ... by the place in the operation, and
    doperand_0, doperand_1, ... for gradients.

    So a user's names cannot clash with the text's, and operations that differ only in names share a kernel.
    """
    names = {name: f"operand_{place}" for place, name in enumerate(spec.operation.operands)}
    operation = spec.operation.renamed(names)
    names |= {f"d{name}": f"d{text_name}" for name, text_name in names.items()}
    operands = Operands(replace(operand, name=names.get(operand.name, operand.name)) for operand in spec.operands)
    return replace(spec, operation=operation, operands=operands)


def row_parameters(operand: Operand) -> tuple[str, ...]:
    """Return the names of the parameters that say where rows or vectors of an operand begin."""
    return tuple(f"{operand.name}_{number}" for number in operand.row_arguments)


def _forward(spec: NormSpec) -> tuple[str, str]:
    operation, by_name = spec.operation, spec.operands.by_name
    inputs = [operand.name for operand in spec.inputs]
    beside = [operand.name for operand in spec.epilogue_matrices]
    columns = [operand.name for operand in spec.columns if operand.name in operation.epilogue.uses]
    scalars = [operand.name for operand in spec.operands if operand.kind == "scalar" and operand.name != "eps"]
    before = forward_struct(spec, inputs, beside, columns, scalars)
    cache_x = STREAMED if spec.streamed_x else KEPT
    load = f"{{{_matrices(spec, inputs)}, operation}}"
    # Beside y8, rows of y at odd addresses are stored by elements: shifted, those of 24577 columns spilled 28 bytes. So
    # are those of s with one scale for all; with other scales, by elements, those of 65537 columns spilled 4.
    by_elements = "y8" in by_name and not spec.aligned
    s_by_elements = by_elements and not spec.computes_scales
    s = by_name.get("s")
    call = "\n      ".join(
        (
            f"operation, LoadSource<{CPP_TYPE[spec.row_dtype]}, {spec.shape.vector_cols}, Operation, "
            f"{_matrices_type(spec, inputs, cache_x)}>{load},",
            f"{_matrices_type(spec, beside, cache_x)}{_matrices(spec, beside)},",
            f"{_columns_type(spec, columns)}{_matrices(spec, columns)},",
            f"{_store(spec, s, STREAMED, s_by_elements) if s and s.written else 'NoStore{}'},",
            f"{_store_y(spec, by_name, by_elements)},",
            f"{'mean' if 'mean' in by_name else 'static_cast<Operation::Compute*>(nullptr)'}, rstd",
        )
    )
    norm = NORMS[operation.norm].policy
    if spec.kernel == "forward_streamed":
        template = f"norm_forward_streamed<{norm}, {spec.cols}, {_step_shape(spec)}, Operation::Compute>"
        return before, _call(scalars, f"{template}({call}, rows, eps)")
    if spec.kernel == "forward_spread":
        template = f"norm_forward_spread<{norm}, {_row_shape(spec)}, {spec.vectors_per_thread}, Operation::Compute>"
        return before, _call(scalars, f"{template}({call}, eps)")
    if spec.kernel == "forward_pairs":
        template = f"norm_forward_pairs<{norm}, {_row_shape(spec)}, Operation::Compute>"
        return before, _call(scalars, f"{template}({call}, rows, eps)")
    template = (
        f"norm_forward<{norm}, {_row_shape(spec)}, {spec.rows_per_cta}, Rows, {cpp(spec.weights_in_registers)}, "
        f"{cpp(spec.one_row_per_cta)}, {cpp(spec.unpacked)}, Operation::Compute>"
    )
    return before + _rows(spec), _call(scalars, f"{template}({call}, rows, eps)")


def _forward_twice(spec: NormSpec) -> tuple[str, str]:
    operation, by_name = spec.operation, spec.operands.by_name
    beside = [operand.name for operand in spec.epilogue_matrices]
    first, second = (
        [operand.name for operand in spec.columns if expression and operand.name in expression.uses]
        for expression in (operation.epilogue, operation.second)
    )
    before = forward_struct(spec, ["x"], beside, first, [], second)
    cache_x = STREAMED if spec.streamed_x else KEPT
    call = ",\n      ".join(
        (
            f"operation, LoadSource<{CPP_TYPE[spec.row_dtype]}, {spec.shape.vector_cols}, Operation, "
            f"{_matrices_type(spec, ['x'], cache_x)}>{{{_matrices(spec, ['x'])}, operation}}",
            f"{_matrices_type(spec, beside, cache_x)}{_matrices(spec, beside)}",
            *(f"{_columns_type(spec, names)}{_matrices(spec, names)}" for names in (first, second)),
            *(_store(spec, by_name[name], STREAMED) for name in ("s", "y")),
            "rstd, second_rstd, rows, eps",
        )
    )
    template = (
        f"norm_forward_twice<{NORMS[operation.norm].policy}, {_row_shape(spec)}, {spec.rows_per_cta}, "
        f"{cpp(spec.weights_in_registers)}, {CPP_TYPE[spec.row_dtype]}, Operation::Compute>"
    )
    return before, _call([], f"{template}({call})")


def _few_rows(spec: FewRowsSpec) -> tuple[str, str]:
    """Return the text in which the first CTAs add up columns, and the others compute rows."""
    first = spec.column_ctas
    # With 128 bytes on their way to a thread it takes 93 registers, with 64 no more than 64.
    before_columns, columns = _backward(by_position(spec.columns), "OfColumns", ahead=64)
    ctas = f"blockIdx.x - {first}, gridDim.x - {first}"
    before_rows, rows = _backward(by_position(spec.rows), "OfRows", ctas)
    return before_columns + before_rows, f"  if (blockIdx.x < {first}) {{\n{columns}  }} else {{\n{rows}  }}\n"


def _backward(
    spec: NormSpec, name: str = "Operation", ctas: str = "blockIdx.x, gridDim.x", ahead: int = 128
) -> tuple[str, str]:
    """Return the text of a backward kernel.

    `name` is that of the struct; `ctas` is the number of a CTA among those that have rows, and how many these are;
    `ahead` is the bytes on their way to a thread of column_gradients.
    """
    by_name = spec.operands.by_name
    matrices = [operand.name for operand in spec.matrices]
    columns = [operand.name for operand in spec.columns]
    scalars = [operand.name for operand in spec.operands if operand.kind == "scalar"]
    before, sums = backward_struct(spec, matrices, columns, scalars, name)
    statistics = [
        statistic if statistic in by_name else f"static_cast<const {name}::Compute*>(nullptr)"
        for statistic in ("mean", "rstd")
    ]
    arguments = [
        "operation",
        f"{_matrices_type(spec, matrices, KEPT)}{_matrices(spec, matrices)}",
        f"{_matrices_type(spec, columns, KEPT)}{_matrices(spec, columns)}",
    ]
    if spec.kernel != "column_gradients":
        lists = [spec.late_results] if spec.kernel == "backward_streamed" else [spec.early_results, spec.late_results]
        arguments += [_list("Results", (_store(spec, result, KEPT) for result in of_list)) for of_list in lists]
        arguments.append(_row_sums(spec))
    if spec.kernel != "backward_streamed":
        arguments.append(_list("Sums", (_store_sum(spec, gradient, by_name[gradient].dtype) for gradient in sums)))
    if spec.kernel == "backward_streamed":
        which_rows = ()
    elif spec.grouped:
        which_rows = ("RowsOfGroup{group_rows, group_inner, group_count, group_reciprocal}",)
    else:
        which_rows = ("AllRows{}",)
    if spec.kernel == "column_gradients":
        arguments.insert(0, "block" if spec.several_blocks else "blockIdx.x")
    call = ",\n      ".join((*arguments, *statistics, "rows", *which_rows))
    norm = NORMS[spec.operation.norm].policy
    if spec.kernel == "backward":
        template = f"norm_backward<{norm}, {_row_shape(spec)}, {spec.rows_per_cta}, Rows, {name}::Compute>"
        return before + _rows(spec), _call(scalars, f"{template}({call}, {ctas})", name)
    if spec.kernel == "backward_streamed":
        template = f"norm_backward_streamed<{norm}, {spec.cols}, {_step_shape(spec)}, {name}::Compute>"
    else:
        template = (
            f"column_gradients<{norm}, {ahead}, {spec.cols}, {spec.shape.threads}, {spec.rows_per_cta}, "
            f"{spec.shape.vector_cols}, {name}::Compute>"
        )
    call = f"{template}({call})"
    if spec.several_blocks:
        blocks = -(-spec.cols // (spec.shape.vector_cols * spec.shape.threads))
        call = f"for (int64 block = blockIdx.x; block < {blocks}; block += gridDim.x) {call}"
    return before, _call(scalars, call, name)


def _call(scalars: Iterable[str], call: str, name: str = "Operation") -> str:
    return f"  const {name} operation{{{', '.join(scalars)}}};\n  {call};\n"


# Through L1, or past it. A forward kernel writes past it, which leaves it to weight and bias: on an H100, 64 M elements
# in us, past and through L1, 4096 cols 92.9 and 94.1, 8192 92.5 and 93.3, 98304 97.7 and 102, 131072 96.6 and 101.
# dx gains nothing by it.
KEPT, STREAMED = "Cache::kKept", "Cache::kStreamed"


def _matrices_type(spec: NormSpec, names: Iterable[str], cache: str) -> str:
    by_name = spec.operands.by_name
    loads = (_rows_type("Load", spec, by_name[name], cache if by_name[name].kind == "full" else KEPT) for name in names)
    return f"Matrices<{', '.join(loads)}>"


def _columns_type(spec: NormSpec, names: Sequence[str]) -> str:
    """Return the C++ type of the operands that the epilogue of a forward pass takes for all rows."""
    if spec.columns_aligned:
        return _matrices_type(spec, names, KEPT)
    by_name = spec.operands.by_name
    layout = f"{spec.shape.vector_cols}, {spec.shape.lanes}"
    starts = {name: ", GroupStarts" if by_name[name].kind == "group" else "" for name in names}
    loads = (f"LoadElements<{CPP_TYPE[by_name[name].dtype]}, {layout}{starts[name]}>" for name in names)
    return f"Matrices<{', '.join(loads)}>"


def _rows_type(use: str, spec: NormSpec, operand: Operand, cache: str, by_elements: bool = False) -> str:
    """Return the C++ type that loads or stores rows of an operand; the latter may do so by elements."""
    if operand.kind == "seed":
        return f"RandomRows<{spec.shape.vector_cols}>"
    if operand.kind == "per_row":
        return f"RowNumbers<{CPP_TYPE[operand.dtype]}, {spec.shape.vector_cols}, {cpp(operand.inner > 0)}>"
    layout = (
        f"{spec.shape.vector_cols}, {spec.shape.lanes}, {access(spec.is_aligned(operand), spec.knows_whole_vectors)}"
    )
    options = f", {cpp(operand.inner > 0)}, true" if by_elements else ", true" if operand.inner else ""
    if operand.kind == "group" and not _of_one_group(spec):
        options = ", false, GroupStarts"
    return f"{use}Rows<{CPP_TYPE[operand.dtype]}, {layout}, {cache}{options}>"


def _matrices(spec: NormSpec, names: Iterable[str]) -> str:
    """Return the initialiser of such a list."""
    by_name = spec.operands.by_name
    text = "{}"
    for name in reversed(list(names)):
        start, starts = name, row_parameters(by_name[name]) or ("0",)
        if by_name[name].kind == "seed":
            start, starts = f"{name}[0]", (f"{name}[1]",)
        if by_name[name].kind == "per_row":
            starts = (f"{{{', '.join(starts)}}}", "rows")
        if by_name[name].kind == "group":
            if _of_one_group(spec):
                start, starts = f"{name} + blockIdx.z * {name}_stride", ("0",)
            else:
                starts = (*starts, "group_count", "group_reciprocal", "group_period_reciprocal")
        text = f"{{{{{', '.join((start, *starts))}}}, {text}}}"
    return text


def _of_one_group(spec: NormSpec) -> bool:
    """Return whether a CTA has rows of one group alone, whose vectors it reads once."""
    return spec.kernel in BACKWARD


def _list(template: str, stores: Iterable[str]) -> str:
    """Return a list of stores, each of which is written as `Type{...}`."""
    stores = list(stores)
    text = "{}"
    for store in reversed(stores):
        text = f"{{{store}, {text}}}"
    return f"{template}<{', '.join(store.partition('{')[0] for store in stores)}>{text}"


def _row_sums(spec: NormSpec) -> str:
    types = ", ".join(CPP_TYPE[row_sum.dtype] for row_sum in spec.row_sums)
    text = "{}"
    for row_sum in reversed(spec.row_sums):
        text = f"{{{row_sum.name}, {text}}}"
    return f"RowSums<{types}>{text}"


def _store(spec: NormSpec, operand: Operand, cache: str, by_elements: bool = False) -> str:
    arguments = ", ".join((operand.name, *row_parameters(operand)))
    return f"{_rows_type('Store', spec, operand, cache, by_elements)}{{{arguments}}}"


def _store_y(spec: NormSpec, by_name: Mapping[str, Operand], by_elements: bool) -> str:
    """Return the store of y: to y, or to y8 with its scales, or to both."""
    wide = _store(spec, by_name["y"], STREAMED, by_elements) if "y" in by_name else "NoStore{}"
    if "y8" not in by_name:
        return wide
    narrow, scales = _store(spec, by_name["y8"], STREAMED), by_name["y8_scale"]
    types = f"{narrow.partition('{')[0]}, {wide.partition('{')[0]}"
    if scales.kind == "one":
        return f"StoreByTensor<{types}>{{{narrow}, {wide}, 1 / *y8_scale}}"
    block, blocks = (0, 1) if scales.kind == "per_row" else (BLOCK, scales.size(1, spec.cols))
    return f"StoreScaled<{CPP_TYPE[by_name['y8'].dtype]}, {types}, {block}, {blocks}>{{{narrow}, {wide}, y8_scale}}"


def _store_sum(spec: NormSpec, name: str, dtype: str) -> str:
    """Return the store of a gradient that is added up over rows: to the gradient itself, or to partial sums."""
    if spec.final:
        start = f"{name} + blockIdx.z * int64{{{spec.cols}}}" if spec.grouped else name
        stored = access(spec.columns_aligned, spec.cols % spec.shape.vector_cols == 0)
        return f"StoreGradient<{CPP_TYPE[dtype]}, {spec.shape.vector_cols}, {spec.cols}, {stored}>{{{start}}}"
    start = name
    if spec.grouped:
        partials = "gridDim.y" if spec.kernel == "column_gradients" else f"gridDim.x / {spec.cluster}"
        start += f" + blockIdx.z * ({partials}) * {_partial_stride(spec.shape.vector_cols, str(spec.cols))}"
    return f"StorePartial<{CPP_TYPE[spec.compute]}, {spec.shape.vector_cols}, {spec.cols}>{{{start}}}"


def _partial_stride(vector_cols: int, cols: str) -> str:
    return f"PartialSums<{vector_cols}>{{{cols}}}.stride()"


def _row_shape(spec: NormSpec) -> str:
    shape = spec.shape
    return f"RowShape<{spec.cols}, {shape.vector_cols}, {shape.threads}, {shape.vectors}, {shape.cluster}>"


def _step_shape(spec: NormSpec) -> str:
    shape = spec.shape
    return f"RowShape<{shape.vector_cols * shape.threads}, {shape.vector_cols}, {shape.threads}, 1, 1>"


def _rows(spec: NormSpec) -> str:
    """Return the definition of Rows, by which rows wait in shared memory or registers (rows.cuh)."""
    rows = f"RegisterRows<{_row_shape(spec)}, Load>"
    if spec.stages:
        options = f"{spec.rows_per_cta}, {spec.stages}, {cpp(spec.prefetch)}, {cpp(spec.rows_in_registers)}"
        rows = f"SharedRows<{_row_shape(spec)}, {options}, Load{', true' * spec.copies_together}>"
    return f"template <class Load>\nusing Rows = {rows};\n"


def _sum_partials(spec: SumSpec, owns_workspace: bool) -> str:
    """Return the call that adds up one block of columns, of the gradient blockIdx.y and the group of rows blockIdx.z.

    With several blocks for a CTA, the number of a block among all says the same.
    """
    block, gradient, group = "blockIdx.x", "blockIdx.y", "blockIdx.z"
    if spec.several_blocks:
        block, gradient, group = "task % blocks", f"task / blocks % {spec.count}", f"task / (blocks * {spec.count})"
    partials, total = (
        "".join(f"{gradient} == {i} ? {name}{i} : " for i in range(spec.count - 1)) + f"{name}{spec.count - 1}"
        for name in ("partials", "sum")
    )
    if spec.grouped:
        partials = f"({partials}) + {group} * groups * {_partial_stride(spec.vector_cols, 'cols')}"
        total = f"({total}) + {group} * cols"
    layout = f"{spec.lanes}, {spec.rows_per_cta}, {spec.vector_cols}"
    template = f"sum_partials<{layout}, {cpp(owns_workspace)}, {cpp(spec.lets_next_begin)}>"
    call = f"  {template}({block}, {partials}, {total}, groups, cols);\n"
    if not spec.several_blocks:
        return call
    # The next block's sums take the place of this one's, which all threads must have read.
    return f"  for (int64 task = blockIdx.x; task < tasks; task += gridDim.x) {{\n{call}  __syncthreads();\n  }}\n"


_FAMILIES: dict[str, Callable[[Any], tuple[str, str]]] = {
    "forward": _forward,
    "forward_pairs": _forward,
    "forward_spread": _forward,
    "forward_streamed": _forward,
    "forward_twice": _forward_twice,
    "backward": _backward,
    "backward_few": _few_rows,
    "backward_streamed": _backward,
    "column_gradients": _backward,
}
