"""What is asked of the kernels: an operation on so many rows, and every array that it reads or writes, declared once.

From the declarations come the kernel's parameters and text, the launch's arguments, what is baked for XLA, the memory
of the results and the bytes that are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from ..operation import NORMS, SEED, Norm, Operation, derivative

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
E4M3 = "float8_e4m3fn"  # what products take
FLOAT8 = {E4M3: 448.0, "float8_e5m2": 57344.0}  # the largest number of each; y alone may have them
BLOCK = 128  # columns that share a scale, where neither a row nor all do
# The granularity of scales, and what kind of operand they are.
SCALES = {"row": "per_row", BLOCK: "per_block", "tensor": "one"}


class RowStrides(NamedTuple):
    """Where the rows of a matrix begin, in elements: row r at r * row; where there are two strides, as for the heads of
    a packed QKV, at r // inner * outer + r % inner * row.
    """

    row: int
    outer: int = 0
    inner: int = 0  # rows to a step of `outer`; 0: there is one stride


class Groups(NamedTuple):
    """Rows that share a vector: row r has vector r // inner % count, as of samples or heads."""

    inner: int
    count: int

    def numbers(self, rows: int) -> tuple[int, ...]:
        """What a kernel is told: GROUP_NUMBERS. Quotients come of reciprocals, as for two strides."""
        own, period = (-(-(2**63) // length) for length in (self.inner, self.inner * self.count))
        if self.inner == 1:
            own = -(2**63)  # the same 64 bits
        return self.inner, self.count, rows // self.count, own, period


GROUP_NUMBERS = ("group_inner", "group_count", "group_rows", "group_reciprocal", "group_period_reciprocal")
MOST_GROUPS = 2**16 - 1  # the last axis of a grid has no more


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that a kernel reads or writes, or a number that it is given."""

    name: str
    # "full": rows x cols; "column": one vector for all rows; "group": one for each group of rows; "per_row": a number
    # for each row; "statistic": the same, of the norm itself; "per_block": a number for each BLOCK columns of a row;
    # "one": a number in memory; "scalar": a number that the launch is given; "seed": 8 bytes in memory, of which a
    # kernel makes random numbers, rows x cols.
    kind: str
    dtype: str
    written: bool = False
    # Of a full one and of numbers for rows, as in RowStrides. Of groups row_stride leads from vector to vector; what is
    # written lies close.
    row_stride: int = 0
    outer_stride: int = 0
    inner: int = 0
    groups: Groups | None = None

    @property
    def strides(self) -> RowStrides:
        return RowStrides(self.row_stride, self.outer_stride, self.inner)

    @property
    def row_numbers(self) -> dict[str, int]:
        """What a kernel is told of its rows or vectors, by the last word of each parameter's name.

        With two strides there is a gap after every `inner` rows, and row r begins at r * row_stride + r // inner * gap.
        r // inner is r * reciprocal // 2^63 for rows below 2^32: no kernel divides, and none is of one `inner`.
        """
        if self.written and self.kind != "full":
            return {}
        if self.kind not in ("full", "per_row"):
            return {"stride": self.row_stride} if self.kind == "group" else {}
        numbers = {"stride": self.row_stride}
        if self.inner:
            numbers["gap"] = self.outer_stride - self.inner * self.row_stride
            numbers["reciprocal"] = -(-(2**63) // self.inner)
        return numbers

    @property
    def itemsize(self) -> int:
        if self.kind == "seed":
            return 8
        return 1 if self.dtype in FLOAT8 else ITEMSIZE[self.dtype]

    def size(self, rows: int, cols: int) -> int:
        """How many numbers it holds."""
        blocks = rows * -(-cols // BLOCK)
        sizes = {"full": rows * cols, "column": cols, "per_row": rows, "statistic": rows, "per_block": blocks}
        sizes |= {"one": 1, "scalar": 1, "seed": 1}
        sizes["group"] = self.groups.count * cols if self.groups else 0
        return sizes[self.kind]


class Operands(tuple[Operand, ...]):
    """The operands of a layout, in the order of a kernel's parameters, and what follows from them.

    Calls that differ in their number of rows alone share them, so that each of these is worked out once for all.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    @cached_property
    def by_name(self) -> dict[str, Operand]:
        return {one.name: one for one in self}

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(one.name for one in self if one.kind != "scalar")

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The names of the numbers."""
        return tuple(one.name for one in self if one.kind == "scalar")

    @cached_property
    def row_numbers(self) -> tuple[int, ...]:
        """What a launch passes behind the number of rows, for all of them."""
        return tuple(number for one in self for number in one.row_numbers.values())

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(one.kind for one in self)

    @cached_property
    def groups(self) -> Groups | None:
        """Of the operands that are for groups of rows: all have the same."""
        return next((one.groups for one in self if one.groups), None)

    @cached_property
    def read(self) -> tuple[Operand, ...]:
        return tuple(one for one in self if not one.written)

    @cached_property
    def written(self) -> tuple[Operand, ...]:
        return tuple(one for one in self if one.written)

    @cached_property
    def summed(self) -> tuple[Operand, ...]:
        """What is written for all rows, or for a group of them."""
        return tuple(one for one in self.written if one.kind not in ("full", "per_row"))

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The names of these."""
        return tuple(one.name for one in self.summed)

    @cached_property
    def matrices(self) -> tuple[Operand, ...]:
        """What is read by rows, or made of a seed by rows, or one number for a row."""
        return tuple(one for one in self.read if one.kind in ("full", "seed", "per_row"))

    @cached_property
    def columns(self) -> tuple[Operand, ...]:
        """What is read once for all rows, or for a group of them."""
        return tuple(one for one in self.read if one.kind in ("column", "group"))

    @cached_property
    def of_text(self) -> Operands:
        """As a kernel's text has them: of strides it has no more than how many there are."""
        return Operands(
            replace(one, row_stride=0, outer_stride=0, inner=min(1, one.inner), groups=None) for one in self
        )


@dataclass(frozen=True)
class Problem:
    """A pass of an operation over `rows` rows of `cols` columns, every argument checked.

    `operands` are in the order of the kernel's parameters: what is read, then what is written. A backward pass has for
    each operand `a` of which the gradient is wanted one that is written, `da`.
    """

    operation: Operation
    direction: str  # "forward" | "backward"
    rows: int
    cols: int
    row_dtype: str  # of s, the rows that are normalised
    operands: Operands
    sm_margin: int = 0
    aligned: bool = True  # every array begins at a multiple of 16 bytes
    overwrites: bool = False  # dx may take the memory of x or dy

    def of_rows(self, rows: int) -> Problem:
        """The same pass over another number of rows, where no stride depends on it.

        What a problem keeps (cached_property) must not depend on rows: it is kept on. By replace() it takes 5 us more.
        """
        found = object.__new__(Problem)
        vars(found).update(vars(self), rows=rows)
        return found

    @property
    def layout(self) -> Problem:
        """The pass of so few rows that what is kept of it serves every number; a single row is aligned in any case."""
        return self.of_rows(min(2, self.rows))

    @property
    def norm(self) -> Norm:
        return NORMS[self.operation.norm]

    @property
    def by_name(self) -> dict[str, Operand]:
        return self.operands.by_name

    @property
    def is_zero_centred(self) -> bool:
        """Whether the norm multiplies by 1 + weight, of a weight that is given."""
        return dict(self.operation.defaults).get("weight") == 0

    @cached_property
    def compute(self) -> str:
        """The dtype of mean and rstd, and of all arithmetic."""
        return compute_dtype(self.row_dtype)

    @property
    def groups(self) -> Groups | None:
        """Of the operands that are for groups of rows: all have the same."""
        return self.operands.groups

    @property
    def pointers(self) -> tuple[str, ...]:
        """The names of the arrays, in the order in which a launch takes their addresses."""
        return self.operands.pointers

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the numbers, in the order in which a launch takes them."""
        return self.operands.scalars

    @property
    def wanted(self) -> tuple[str, ...]:
        """Of a backward pass: the names of the gradients."""
        return tuple(operand.name for operand in self.operands.written)

    @property
    def sums(self) -> tuple[str, ...]:
        """Of a backward pass: the names of the gradients that are added up over rows."""
        return self.operands.sums

    @property
    def bytes_moved(self) -> int:
        """The least that must go through device memory, but for what is a number for each row."""
        moved = (o for o in self.operands if o.kind in ("full", "column", "group"))
        return sum(o.size(self.rows, self.cols) * o.itemsize for o in moved)

    @property
    def matrix_bytes(self) -> int:
        """Of x."""
        return self.rows * self.cols * ITEMSIZE[self.row_dtype]


Items = tuple[tuple[str, Any], ...]  # of a mapping


def _items(mapping: Mapping[str, Any] | None) -> Items:
    return tuple(mapping.items()) if mapping else ()


def compute_dtype(row_dtype: str) -> str:
    return "float64" if row_dtype == "float64" else "float32"


def forward_problem(
    operation: Operation,
    rows: int,
    cols: int,
    dtypes: Mapping[str, str],
    *,
    kinds: Mapping[str, str] | None = None,
    strides: Mapping[str, int | RowStrides] | None = None,
    groups: Groups | None = None,
    sm_margin: int = 0,
    aligned: bool = True,
) -> Problem:
    """The forward pass. `dtypes` has x, y, s if there is a prologue, and the operands that are given.

    Operands are columns unless `kinds` says otherwise; full arrays and those of `groups` are contiguous unless
    `strides` has their rows': a number where there is one. With y8, which is FP8 output, `kinds` has the kind of its
    scales, and y itself is written if `dtypes` has it.
    """
    layout = cols, _items(dtypes), _items(kinds), _items(strides), groups
    operation, operands = _forward_operands(operation, *layout)
    row_dtype = dtypes.get("s", dtypes["x"])
    return Problem(operation, "forward", rows, cols, row_dtype, operands, sm_margin, aligned)


@lru_cache(maxsize=4096)
def _forward_operands(
    operation: Operation, cols: int, of_dtypes: Items, of_kinds: Items, of_strides: Items, groups: Groups | None
) -> tuple[Operation, Operands]:
    """Those of a forward pass, and the operation with numbers in place of those that are not given."""
    dtypes, kinds, strides = dict(of_dtypes), dict(of_kinds), dict(of_strides)
    operation = operation.given(dtypes)
    compute = compute_dtype(dtypes.get("s", dtypes["x"]))
    read = _operands(("x", *operation.operands), dtypes, kinds, cols, strides, groups)
    returns = operation.returns
    if "y8" in dtypes:
        returns = ("y8", *(name for name in returns if name in dtypes))
    written = _operands(returns, dtypes, dict.fromkeys(returns, "full"), cols, strides)
    if "y8" in dtypes:
        scales = (Operand("y8_scale", kinds["y8_scale"], "float32"),)
        read, written = (read + scales, written) if kinds["y8_scale"] == "one" else (read, written + scales)
    statistics = (Operand(name, "statistic", compute, True) for name in operation.statistics)
    written = (replace(one, written=True) for one in written)
    return operation, Operands((*read, *written, *statistics, Operand("eps", "scalar", compute)))


def backward_problem(
    operation: Operation,
    rows: int,
    cols: int,
    dtypes: Mapping[str, str],
    wanted: Iterable[str],
    *,
    kinds: Mapping[str, str] | None = None,
    strides: Mapping[str, int | RowStrides] | None = None,
    groups: Groups | None = None,
    sm_margin: int = 0,
    aligned: bool = True,
) -> Problem:
    """The backward pass, for the gradients `wanted` of x and of operands.

    `dtypes` has dy, x, the operands that are given, s if there is a prologue, ds if there is a gradient of s, and as
    `da` the dtype of the gradient of `a` where it is not that of `a`. Only what the gradients need is read: s if it was
    returned, else it is made again.
    """
    layout = cols, _items(dtypes), tuple(wanted), _items(kinds), _items(strides), groups
    operands = _backward_operands(operation, *layout)
    row_dtype = dtypes.get("s", dtypes["x"])
    return Problem(operation, "backward", rows, cols, row_dtype, operands, sm_margin, aligned)


@lru_cache(maxsize=4096)
def _backward_operands(
    operation: Operation,
    cols: int,
    of_dtypes: Items,
    wanted: tuple[str, ...],
    of_kinds: Items,
    of_strides: Items,
    groups: Groups | None,
) -> Operands:
    """Those of a backward pass."""
    dtypes, strides = dict(of_dtypes), dict(of_strides)
    kinds = {"ds": "full", "s": "full"} | dict(of_kinds)
    compute = compute_dtype(dtypes.get("s", dtypes["x"]))
    uses = backward_reads(operation, wanted, dtypes)
    of_rows = [name for name in uses if name in NORMS[operation.norm].statistics]
    uses = [name for name in uses if name not in of_rows]
    read = _operands(uses, dtypes, {"dy": "full"} | kinds, cols, strides, groups)
    statistics = [Operand(name, "statistic", compute) for name in of_rows]
    gradients = []
    for name in wanted:
        dtype = dtypes.get(f"d{name}") or dtypes.get(name) or dtypes["x"]
        if name == "x" or kinds.get(name) == "full":
            gradients.append(Operand(f"d{name}", "full", dtype, True, *_row_strides(f"d{name}", cols, strides)))
        elif kinds.get(name) == "group":
            gradients.append(Operand(f"d{name}", "group", dtype, True, cols, groups=groups))
        elif kinds.get(name) == "per_row":
            gradients.append(Operand(f"d{name}", "per_row", dtype, True))
        else:  # of a scalar the sums of the columns, which are added up later
            gradients.append(Operand(f"d{name}", "column", compute if kinds.get(name) == "scalar" else dtype, True))
    return Operands((*read, *statistics, *gradients))


def backward_reads(operation: Operation, wanted: Iterable[str], present: Collection[str]) -> tuple[str, ...]:
    """What a backward pass for the gradients `wanted` reads, of what is `present`; dy always, and mean and rstd."""
    found = derivative(operation, wanted, present)
    expressions = [e for _, e in (*found.early, *found.late)] + ([found.g] if found.g else [])
    used = {name for e in expressions for name in e.uses} - {"xhat", "dy", "ds"}
    statistics: tuple[str, ...] = ()
    if found.g is not None or any("xhat" in e.uses for e in expressions):
        used |= {"s"} if "s" in operation.returns else {"x", *operation.before}
        statistics = NORMS[operation.norm].statistics
    gradients = ("dy", "ds") if "ds" in present and found.late else ("dy",)
    return (*gradients, *(name for name in ("s", "x", *operation.operands) if name in used), *statistics)


def _operands(
    names: Collection[str] | dict,
    dtypes: Mapping[str, str],
    kinds: Mapping[str, str],
    cols: int,
    strides: Mapping,
    groups: Groups | None = None,
) -> tuple[Operand, ...]:
    found = []
    for name in names:
        kind = "full" if name == "x" else "seed" if name == SEED else kinds.get(name, "column")
        length = 1 if kind == "per_row" else cols
        rows = _row_strides(name, length, strides) if kind in ("full", "group", "per_row") else ()
        dtype = "int64" if kind == "seed" else dtypes[name]
        found.append(Operand(name, kind, dtype, False, *rows, groups=groups if kind == "group" else None))
    return tuple(found)


def _row_strides(name: str, length: int, strides: Mapping[str, int | RowStrides]) -> RowStrides:
    given = strides.get(name, length)
    return RowStrides(given) if isinstance(given, int) else given


def argument_order(problem: Problem, names: Sequence[str]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """Picks what a launch of the problem takes, in its order, from the pointers and numbers `names`; numbers may be
    absent there, and come after what is picked.
    """
    return _order(problem.operands, tuple(names))


@lru_cache(maxsize=4096)
def _order(operands: Operands, names: tuple[str, ...]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    places = [names.index(name) for name in (*operands.pointers, *(one for one in operands.scalars if one in names))]
    return itemgetter(*places) if len(places) > 1 else lambda given: (given[places[0]],)


def part(problem: Problem, wanted: Iterable[str]) -> Problem:
    """The same backward pass for some of its gradients: it reads no more than they need."""
    given = problem.by_name
    found = backward_problem(
        problem.operation,
        problem.rows,
        problem.cols,
        {"x": problem.row_dtype, "s": problem.row_dtype} | {name: one.dtype for name, one in given.items()},
        sources(wanted),
        # The gradient of a number is written as a column; what the number itself is, the operand says.
        kinds={name[1:]: one.kind for name, one in given.items() if one.written}
        | {name: one.kind for name, one in given.items()},
        strides={name: one.strides for name, one in given.items() if one.kind in ("full", "group", "per_row")},
        groups=problem.groups,
    )
    return replace(problem, operands=found.operands)


def sources(gradients: Iterable[str]) -> tuple[str, ...]:
    """What they are the gradients of."""
    return tuple(name.removeprefix("d") for name in gradients)


def matrices_read(problem: Problem) -> list[Operand]:
    return [one for one in problem.operands if one.kind == "full" and not one.written]


def row_bytes(problem: Problem) -> int:
    """Of all matrices that are read."""
    return problem.cols * sum(one.itemsize for one in matrices_read(problem))


def is_expensive(problem: Problem) -> bool:
    """Whether the derivative takes much to compute."""
    return derivative(problem.operation, sources(problem.wanted), problem.by_name).is_expensive


def is_plain(problem: Problem) -> bool:
    """Whether it reads x and dy, or s and dy, and has little to compute."""
    alone = not problem.groups and not problem.operation.second and len(matrices_read(problem)) <= 2
    return alone and not is_expensive(problem)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
