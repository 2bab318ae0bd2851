"""A problem: an operation on a number of rows, with every array that it reads or writes declared once.

The kernel's parameters and text, the launch's arguments, the constants baked for XLA, the memory of the results and the
bytes moved all follow from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from ..operation import NORMS, SEED, Derivative, Norm, Operation, derivative

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
E4M3 = "float8_e4m3fn"  # the format that matrix products take
FLOAT8 = {E4M3: 448.0, "float8_e5m2": 57344.0}  # formats of FP8 output, with the largest number of each
BLOCK = 128  # columns that share a scale where scales are by blocks
SCALES = {"row": "per_row", BLOCK: "per_block", "tensor": "one"}  # the kind of operand for each granularity of scales


class RowStrides(NamedTuple):
    """Where the rows of a matrix begin, in elements.

    Row r begins at r * row. With two strides, as for the heads of a packed QKV, it begins at
    r // inner * outer + r % inner * row.
    """

    row: int
    outer: int = 0
    inner: int = 0  # rows to a step of `outer`; 0 if there is one stride


class Groups(NamedTuple):
    """Groups of rows that share a vector, such as samples or heads: row r has vector r // inner % count."""

    inner: int
    count: int

    def arguments(self, rows: int) -> tuple[int, ...]:
        """Return the values of GROUP_PARAMETERS. Kernels divide by reciprocals, as for two strides."""
        reciprocal, period_reciprocal = (-(-(2**63) // length) for length in (self.inner, self.inner * self.count))
        if self.inner == 1:
            reciprocal = -(2**63)  # the same 64 bits as 2**63, as a signed number
        return self.inner, self.count, rows // self.count, reciprocal, period_reciprocal


GROUP_PARAMETERS = ("group_inner", "group_count", "group_rows", "group_reciprocal", "group_period_reciprocal")
MOST_GROUPS = 2**16 - 1  # the limit of a grid's last axis


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that a kernel reads or writes, or a number that a launch passes."""

    name: str
    # "full": rows x cols
    # "column": one vector for all rows
    # "group": one vector for each group of rows
    # "per_row": a number for each row
    # "statistic": a number for each row that the norm itself makes: mean, rstd
    # "per_block": a number for each BLOCK columns of a row
    # "one": a number in memory
    # "scalar": a number that the launch passes
    # "seed": 8 bytes in memory, from which a kernel makes rows x cols random numbers
    kind: str
    dtype: str
    written: bool = False
    # As in RowStrides, for "full" and "per_row". For "group" row_stride leads from vector to vector.
    row_stride: int = 0
    outer_stride: int = 0
    inner: int = 0
    groups: Groups | None = None

    @property
    def strides(self) -> RowStrides:
        return RowStrides(self.row_stride, self.outer_stride, self.inner)

    @property
    def row_arguments(self) -> dict[str, int]:
        """The numbers that tell a kernel where rows or vectors begin, by the last word of each parameter's name.

        With two strides there is a gap after every `inner` rows, and row r begins at r * row_stride + r // inner * gap.
        A kernel computes r // inner as r * reciprocal // 2^63, for rows below 2^32: it need not divide, and serves
        every `inner`.
        """
        contiguous = self.written and self.kind != "full"
        if contiguous or self.kind not in ("full", "per_row", "group"):
            return {}
        arguments = {"stride": self.row_stride}
        if self.inner:
            arguments["gap"] = self.outer_stride - self.inner * self.row_stride
            arguments["reciprocal"] = -(-(2**63) // self.inner)
        return arguments

    @property
    def itemsize(self) -> int:
        if self.kind == "seed":
            return 8
        return 1 if self.dtype in FLOAT8 else ITEMSIZE[self.dtype]

    def size(self, rows: int, cols: int) -> int:
        """Return how many numbers it holds."""
        sizes = {"full": rows * cols, "column": cols, "per_row": rows, "statistic": rows}
        sizes |= {"per_block": rows * ceil_div(cols, BLOCK), "group": self.groups.count * cols if self.groups else 0}
        return sizes.get(self.kind, 1)


class Operands(tuple[Operand, ...]):
    """The operands of a layout, in the order of a kernel's parameters, and what follows from them.

    Calls that differ only in their number of rows share one value, so each property is computed once for all of them.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    @cached_property
    def by_name(self) -> dict[str, Operand]:
        return {operand.name: operand for operand in self}

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(operand.name for operand in self if operand.kind != "scalar")

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The names of the numbers."""
        return tuple(operand.name for operand in self if operand.kind == "scalar")

    @cached_property
    def row_arguments(self) -> tuple[int, ...]:
        """The numbers that a launch passes after the number of rows, for all operands."""
        return tuple(number for operand in self for number in operand.row_arguments.values())

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(operand.kind for operand in self)

    @cached_property
    def groups(self) -> Groups | None:
        """The groups of rows, which all operands of the kind "group" share."""
        return next((operand.groups for operand in self if operand.groups), None)

    @cached_property
    def read(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self if not operand.written)

    @cached_property
    def written(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self if operand.written)

    @cached_property
    def summed(self) -> tuple[Operand, ...]:
        """The operands that are written once for all rows, or once for a group of them."""
        return tuple(operand for operand in self.written if operand.kind not in ("full", "per_row"))

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The names of `summed`."""
        return tuple(operand.name for operand in self.summed)

    @cached_property
    def row_results(self) -> tuple[str, ...]:
        """The names of the operands that are written by rows."""
        return tuple(operand.name for operand in self.written if operand.name not in self.sums)

    @cached_property
    def matrices(self) -> tuple[Operand, ...]:
        """The operands that are read by rows: matrices, per-row scalars, and random numbers that a seed makes."""
        return tuple(operand for operand in self.read if operand.kind in ("full", "seed", "per_row"))

    @cached_property
    def full_matrices(self) -> tuple[Operand, ...]:
        """The matrices in memory that are read."""
        return tuple(operand for operand in self.read if operand.kind == "full")

    @cached_property
    def columns(self) -> tuple[Operand, ...]:
        """The operands that are read once for all rows, or once for a group of them."""
        return tuple(operand for operand in self.read if operand.kind in ("column", "group"))

    @cached_property
    def without_strides(self) -> Operands:
        """The operands as a kernel's text knows them: only whether they have one stride or two."""
        return Operands(
            replace(operand, row_stride=0, outer_stride=0, inner=min(1, operand.inner), groups=None) for operand in self
        )


@dataclass(frozen=True)
class Problem:
    """A pass of an operation over `rows` rows of `cols` columns, with every argument checked.

    `operands` are in the order of the kernel's parameters: first those that are read, then those that are written. A
    backward pass writes `da` for each operand `a` whose gradient is wanted.
    """

    operation: Operation
    direction: str  # "forward" | "backward"
    rows: int
    cols: int
    row_dtype: str  # the dtype of s, the rows that are normalised
    operands: Operands
    sm_margin: int = 0
    aligned: bool = True  # every array begins at a multiple of 16 bytes
    overwrites: bool = False  # dx may take the memory of x or dy

    def __hash__(self) -> int:
        """Return a hash of the fields that tell most problems apart, because every plan looks problems up."""
        return hash((self.rows, self.cols, self.operands))

    def with_rows(self, rows: int) -> Problem:
        """Return the same pass over another number of rows, where no stride depends on it.

        The copy keeps every cached_property, so none but `layout` may depend on rows. By replace() it takes 5 us more.
        """
        copy = object.__new__(Problem)
        vars(copy).update(vars(self), rows=rows)
        if min(2, rows) != min(2, self.rows):
            vars(copy).pop("layout", None)
        return copy

    @cached_property
    def layout(self) -> Problem:
        """The same pass of one or two rows: the key of caches that serve every number of rows.

        A single row is a key of its own, because it is aligned whatever its stride.
        """
        return self.with_rows(min(2, self.rows))

    @property
    def norm(self) -> Norm:
        return NORMS[self.operation.norm]

    @property
    def by_name(self) -> dict[str, Operand]:
        return self.operands.by_name

    @property
    def is_zero_centred(self) -> bool:
        """Whether a weight is given and the norm multiplies by 1 + weight."""
        return dict(self.operation.defaults).get("weight") == 0

    @cached_property
    def compute(self) -> str:
        """The dtype of mean and rstd, and of all arithmetic."""
        return compute_dtype(self.row_dtype)

    @property
    def groups(self) -> Groups | None:
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
        """The names of the gradients that a backward pass writes."""
        return tuple(operand.name for operand in self.operands.written)

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the gradients that a backward pass adds up over rows."""
        return self.operands.sums

    @property
    def row_results(self) -> tuple[str, ...]:
        """The names of the gradients that a backward pass writes by rows."""
        return self.operands.row_results

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that can go through device memory, without per-row scalars."""
        moved = (operand for operand in self.operands if operand.kind in ("full", "column", "group"))
        return sum(operand.size(self.rows, self.cols) * operand.itemsize for operand in moved)

    @property
    def vector_cols(self) -> int:
        """Columns of a vector, which has 16 bytes of x."""
        return 16 // ITEMSIZE[self.row_dtype]

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return ceil_div(self.cols, self.vector_cols)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of x."""
        return self.rows * self.cols * ITEMSIZE[self.row_dtype]


Items = tuple[tuple[str, Any], ...]  # the items of a mapping, as part of a cache's key


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
    """Return the forward pass. `dtypes` names x, y, s if there is a prologue, and the operands that are given.

    Operands are columns unless `kinds` says otherwise. Matrices and vectors of `groups` are contiguous unless `strides`
    has their row stride, or two as RowStrides. y8 in `dtypes` is FP8 output: then `kinds` has the kind of y8_scale, and
    y is written only if `dtypes` has it.
    """
    layout = cols, _items(dtypes), _items(kinds), _items(strides), groups
    operation, operands = _forward_operands(operation, *layout)
    row_dtype = dtypes.get("s", dtypes["x"])
    return Problem(operation, "forward", rows, cols, row_dtype, operands, sm_margin, aligned)


@lru_cache(maxsize=4096)
def _forward_operands(
    operation: Operation,
    cols: int,
    dtype_items: Items,
    kind_items: Items,
    stride_items: Items,
    groups: Groups | None,
) -> tuple[Operation, Operands]:
    """Return the operation with numbers for operands that are not given, and the operands of its forward pass."""
    dtypes, kinds, strides = dict(dtype_items), dict(kind_items), dict(stride_items)
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
    written = (replace(operand, written=True) for operand in written)
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
    """Return the backward pass, for the gradients of x and operands in `wanted`.

    `dtypes` names dy, x, the operands that are given, s if there is a prologue, ds if s has a gradient, and `da` where
    the gradient of `a` has another dtype than `a`. The pass reads only what the gradients need: s if it was returned,
    else x and the operands of the prologue.
    """
    layout = cols, _items(dtypes), tuple(wanted), _items(kinds), _items(strides), groups
    operands = _backward_operands(operation, *layout)
    row_dtype = dtypes.get("s", dtypes["x"])
    return Problem(operation, "backward", rows, cols, row_dtype, operands, sm_margin, aligned)


@lru_cache(maxsize=4096)
def _backward_operands(
    operation: Operation,
    cols: int,
    dtype_items: Items,
    wanted: tuple[str, ...],
    kind_items: Items,
    stride_items: Items,
    groups: Groups | None,
) -> Operands:
    dtypes, strides = dict(dtype_items), dict(stride_items)
    kinds = {"dy": "full", "ds": "full", "s": "full", "x": "full"} | dict(kind_items)
    compute = compute_dtype(dtypes.get("s", dtypes["x"]))
    arrays = backward_reads(operation, wanted, dtypes)
    statistics = [name for name in arrays if name in NORMS[operation.norm].statistics]
    read = _operands([name for name in arrays if name not in statistics], dtypes, kinds, cols, strides, groups)
    gradients = []
    for name in wanted:
        kind, dtype = kinds.get(name), dtypes.get(f"d{name}") or dtypes.get(name) or dtypes["x"]
        if kind == "full":
            gradients.append(Operand(f"d{name}", "full", dtype, True, *_row_strides(f"d{name}", cols, strides)))
        elif kind == "group":
            gradients.append(Operand(f"d{name}", "group", dtype, True, cols, groups=groups))
        elif kind == "per_row":
            gradients.append(Operand(f"d{name}", "per_row", dtype, True))
        else:  # the gradient of a scalar is written as a sum for each column, which the caller adds up
            gradients.append(Operand(f"d{name}", "column", compute if kind == "scalar" else dtype, True))
    return Operands((*read, *(Operand(name, "statistic", compute) for name in statistics), *gradients))


def backward_reads(operation: Operation, wanted: Iterable[str], present: Collection[str]) -> tuple[str, ...]:
    """Return the arrays, of those `present`, that a backward pass for the gradients `wanted` reads."""
    gradients = derivative(operation, wanted, present)
    used = {name for expression in gradients.expressions for name in expression.uses}
    statistics: tuple[str, ...] = ()
    if gradients.g is not None or "xhat" in used:
        used |= {"s"} if "s" in operation.returns else {"x", *operation.before}
        statistics = NORMS[operation.norm].statistics
    gradients_read = ("dy", "ds") if "ds" in present and gradients.late else ("dy",)
    return (*gradients_read, *(name for name in ("s", "x", *operation.operands) if name in used), *statistics)


def _operands(
    names: Collection[str] | dict,
    dtypes: Mapping[str, str],
    kinds: Mapping[str, str],
    cols: int,
    strides: Mapping,
    groups: Groups | None = None,
) -> tuple[Operand, ...]:
    operands = []
    for name in names:
        kind = "full" if name == "x" else "seed" if name == SEED else kinds.get(name, "column")
        length = 1 if kind == "per_row" else cols
        row_strides = _row_strides(name, length, strides) if kind in ("full", "group", "per_row") else ()
        dtype = "int64" if kind == "seed" else dtypes[name]
        operands.append(Operand(name, kind, dtype, False, *row_strides, groups=groups if kind == "group" else None))
    return tuple(operands)


def _row_strides(name: str, length: int, strides: Mapping[str, int | RowStrides]) -> RowStrides:
    given = strides.get(name, length)
    return RowStrides(given) if isinstance(given, int) else given


def argument_order(problem: Problem, names: Sequence[str]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """Return a function that picks the pointers and numbers of a launch, in its order, from the values of `names`.

    `names` may lack numbers, which the caller then passes after those that are picked.
    """
    return _argument_order(problem.operands, tuple(names))


@lru_cache(maxsize=4096)
def _argument_order(operands: Operands, names: tuple[str, ...]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    places = [names.index(name) for name in (*operands.pointers, *(name for name in operands.scalars if name in names))]
    return itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


def only_gradients(problem: Problem, wanted: Iterable[str]) -> Problem:
    """Return the same backward pass for some of its gradients, which reads only what they need."""
    operands = problem.by_name
    dtypes = {name: operand.dtype for name, operand in operands.items()}
    kinds = {name: operand.kind for name, operand in operands.items()}
    fewer = backward_problem(
        problem.operation,
        problem.rows,
        problem.cols,
        {"x": problem.row_dtype, "s": problem.row_dtype} | dtypes,
        sources(wanted),
        # An operand that is not read has the kind of its gradient.
        kinds={name.removeprefix("d"): kinds[name] for name in problem.wanted} | kinds,
        strides={name: operands[name].strides for name in operands if kinds[name] in ("full", "group", "per_row")},
        groups=problem.groups,
    )
    return replace(problem, operands=fewer.operands)


def sources(gradients: Iterable[str]) -> tuple[str, ...]:
    """Return the names of what they are the gradients of."""
    return tuple(name.removeprefix("d") for name in gradients)


def row_bytes(problem: Problem) -> int:
    """Return the bytes of a row of all matrices that are read."""
    return problem.cols * sum(matrix.itemsize for matrix in problem.operands.full_matrices)


def derivative_of(problem: Problem) -> Derivative:
    """Return the expressions of the gradients that a backward pass writes."""
    return derivative(problem.operation, sources(problem.wanted), problem.by_name)


def is_plain(problem: Problem) -> bool:
    """Whether it reads x and dy, or s and dy, and has little to compute."""
    plain_operands = not problem.groups and len(problem.operands.full_matrices) <= 2
    return plain_operands and not derivative_of(problem).is_expensive


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
