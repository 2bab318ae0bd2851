"""The CUDA text of a kernel.

It is the files of `kernels_cu/` followed by a few generated lines: the operation's expressions as one struct, and an
instance of one template behind one `extern "C"` entry. Included files are copied into the text, so that a kernel is
known by its text alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..plan.problem import GROUP_PARAMETERS, Operand
from ..plan.spec import (
    BLOCK_VALUES,
    COLUMN_BYTES,
    COLUMN_VECTORS,
    LINE_COLUMNS,
    MAILBOX,
    RUN_GAP,
    SHARED_ALIGNMENT,
    SUM_COLUMNS,
    FewRowsSpec,
    KernelSpec,
    NormSpec,
    OtherSpec,
    SumSpec,
)
from .call import by_position, call_of, row_parameters
from .text import CPP_TYPE

PACKAGE = Path(__file__).resolve().parent.parent
# Inside the package if it is installed, next to it in a checkout.
KERNELS = next(folder for folder in (PACKAGE / "kernels_cu", PACKAGE.parent / "kernels_cu") if folder.is_dir())

FILES = {
    "forward": "norms/norm_forward.cu",
    "forward_pairs": "norms/norm_forward_pairs.cu",
    "forward_spread": "norms/norm_forward_spread.cu",
    "forward_streamed": "norms/norm_forward_streamed.cu",
    "forward_twice": "norms/norm_forward_twice.cu",
    "backward": "norms/norm_backward.cu",
    "backward_few": "norms/norm_backward_few.cu",
    "backward_streamed": "norms/norm_backward_streamed.cu",
    "column_gradients": "norms/weight_gradient.cu",
    "sum_partials": "norms/sum_partials.cu",
}

# The constants that host and device share.
SHARED_FACTS = "namespace cunorm {{\n{}}}  // namespace cunorm\n".format(
    "".join(
        f"[[maybe_unused]] constexpr int {name} = {value};\n"
        for name, value in {
            "kColumnBytes": COLUMN_BYTES,
            "kColumnVectors": COLUMN_VECTORS,
            "kSumColumns": SUM_COLUMNS,
            "kLineColumns": LINE_COLUMNS,
            "kBlockValues": BLOCK_VALUES,
            "kMailboxBytes": MAILBOX,
            "kSharedAlignment": SHARED_ALIGNMENT,
            "kRunGap": RUN_GAP,
        }.items()
    )
)


class Baked(NamedTuple):
    """An entry whose only parameters are `pointers`, in this order. Those that no kernel has are byte buffers.

    `values` are C++ expressions for other parameters of the kernel, by name. That of a pointer is an offset from one of
    `pointers`; a pointer without a value is null.
    """

    pointers: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


def entry_name(spec: KernelSpec) -> str:
    return f"cunorm_{spec.kernel}"


def source(spec: KernelSpec, baked: Baked | None = None) -> str:
    """Return the whole CUDA text of a kernel."""
    file = spec.file if isinstance(spec, OtherSpec) else FILES[spec.kernel]
    return f"{SHARED_FACTS}{_file_text(file)}\n{_entry(spec, baked)}"


@cache
def _file_text(name: str) -> str:
    return _inlined(name, set())


def _inlined(name: str, seen: set[str]) -> str:
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    text = (KERNELS / name).read_text()
    for number, line in enumerate(text.splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included:
            if included[1] not in seen:
                lines.append(_inlined(included[1], seen))
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append("" if line == "#pragma once" else line)
    return "\n".join(lines)


def parameters(spec: KernelSpec) -> dict[str, str]:
    """Return the C++ type of each parameter of a kernel, by name and in order: arrays, numbers, sizes."""
    if isinstance(spec, OtherSpec):
        return spec.parameters()
    if isinstance(spec, FewRowsSpec):
        return parameters(spec.whole)
    if isinstance(spec, SumSpec):
        pair = {"partials": f"const {CPP_TYPE[spec.compute]}*", "sum": f"{CPP_TYPE[spec.dtype]}*"}
        types = {f"{name}{i}": kind for i in range(spec.count) for name, kind in pair.items()}
        return types | dict.fromkeys(("groups", "cols", *(("blocks", "tasks") if spec.several_blocks else ())), "int64")
    spec = by_position(spec)
    partial_sums = spec.sums if not spec.final else ()
    types = {
        operand.name: _pointer(operand, spec.compute if operand in partial_sums else operand.dtype)
        for operand in spec.operands
        if operand.kind != "scalar"
    }
    types |= {operand.name: CPP_TYPE[operand.dtype] for operand in spec.operands if operand.kind == "scalar"}
    types["rows"] = "int64"
    types |= dict.fromkeys((name for operand in spec.operands for name in row_parameters(operand)), "int64")
    return types | dict.fromkeys(GROUP_PARAMETERS if spec.grouped else (), "int64")


def _pointer(operand: Operand, dtype: str) -> str:
    kind = "uint32" if operand.kind == "seed" else CPP_TYPE[dtype]  # the two halves of a seed
    return f"{'' if operand.written else 'const '}{kind}*"


def _entry(spec: KernelSpec, baked: Baked | None) -> str:
    """Return the struct of a spec's expressions, and the entry with the parameters that launch.py passes."""
    before, call = spec.text() if isinstance(spec, OtherSpec) else call_of(spec, owns_workspace=baked is None)
    ctas_per_sm = 1 if isinstance(spec, SumSpec) else spec.ctas_per_sm
    types = parameters(spec)
    constants = offsets = ""
    if baked is not None:
        types, constants, offsets = _bake(types, baked)
    next_begins = "  next_kernel_may_begin();\n" if isinstance(spec, NormSpec) and spec.lets_next_begin else ""
    clusters = f" __cluster_dims__({spec.cluster}, 1, 1)" if spec.cluster > 1 else ""
    return (
        f"using namespace cunorm;\n{before}{constants}"
        f'extern "C" __global__ void{clusters} __launch_bounds__({spec.threads}, {ctas_per_sm})\n'
        f"{entry_name(spec)}({', '.join(f'{kind} {name}' for name, kind in types.items())}) {{\n"
        f"{offsets}{next_begins}{call}}}\n"
    )


def _bake(types: Mapping[str, str], baked: Baked) -> tuple[dict[str, str], str, str]:
    """Return (the remaining parameters, definitions before the entry, definitions in it).

    Baked arguments are in constant memory, as parameters are, so that the compiler knows no more about them: with
    literals and nullptr ptxas made kernels that spill up to 8 bytes.
    """
    remaining = {name: types.get(name, "char*") for name in baked.pointers}
    values = dict(baked.values)
    others = {name: kind for name, kind in types.items() if name not in remaining}
    offsets = {name for name, kind in others.items() if kind.endswith("*") and name in values}
    constants = "".join(
        f"__constant__ {kind} {name} = {values.get(name, 'nullptr')};\n"
        for name, kind in others.items()
        if name not in offsets
    )
    within = "".join(f"  {kind} {name} = {values[name]};\n" for name, kind in others.items() if name in offsets)
    return remaining, constants, within
