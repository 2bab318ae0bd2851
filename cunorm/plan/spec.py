"""Everything that changes a kernel's text: two launches with equal specs share one compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache

from ..operation import Operation
from .problem import Operand, Operands, Problem, compute_dtype

WARP = 32
# The backward pass keeps its column operands in registers where a thread has so many bytes and vectors of them at most,
# else in shared memory.
COLUMN_BYTES = 64
COLUMN_VECTORS = 2
SUM_COLUMNS = 4  # of a thread that adds partial rows up, and of a piece of a partial row
LINE_COLUMNS = 32  # a partial row is a multiple of them: lines of L2, of 128 bytes or two of these
MOST_SHORT = 4096  # vectors of a row that one CTA holds forward
STREAMED_THREADS = 512  # of a CTA of a row that no other kernel takes
BLOCK_VALUES = 32  # of y that a thread holds while it looks for the largest of blocks, where one block has no more
MAILBOX = 8  # bytes
SHARED_ALIGNMENT = 128  # of dynamic shared memory
RUN_GAP = 32  # bytes that a run of vectors takes besides them in shared memory where they are at odd addresses


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row is held by `threads` threads in each of `cluster` CTAs, with `vectors` vectors of `vector_cols` each."""

    vector_cols: int
    threads: int
    vectors: int
    cluster: int = 1

    @property
    def lanes(self) -> int:
        """Threads of a warp that hold neighbouring vectors of a row: their vectors are a run."""
        return min(WARP, self.threads)

    @property
    def capacity(self) -> int:
        return self.vector_cols * self.threads * self.vectors * self.cluster

    @property
    def order(self) -> tuple[int, int, int]:
        """What decides in which order a row is added up: not how its threads are spread over CTAs."""
        return self.vector_cols, self.threads * self.cluster, self.vectors


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A kernel that reads rows. `operands` are in the order of its parameters, without their strides."""

    # "forward", "forward_pairs", "forward_spread", "forward_streamed", "forward_twice", "backward",
    # "backward_streamed" or "column_gradients"
    kernel: str
    operation: Operation
    cols: int
    row_dtype: str
    operands: Operands
    aligned: bool  # every vector of every row begins at a multiple of its size (or of 16 bytes)
    shape: RowShape
    columns_aligned: bool = True  # so does every vector of what is read once for all rows
    rows_per_cta: int = 1
    ctas_per_sm: int = 1
    stages: int = 0  # rows wait in shared memory, in so many places for each of rows_per_cta
    rows_in_registers: bool = (
        False  # a thread keeps its vectors of a row in registers once they have come to shared memory
    )
    prefetch: bool = False  # the next row is asked for before the present one is summed up
    streamed_x: bool = False  # x is read past L1
    weights_in_registers: bool = False  # forward: a thread keeps weight and bias in registers from row to row
    vectors_per_thread: int = 1  # forward_spread: vectors of a thread
    unpacked: bool = False  # forward: a thread keeps the values of its row, not the vectors in which they wait
    one_row_per_cta: bool = False  # forward: the grid has a CTA for every row
    keeps_g: bool = False  # backward: a thread keeps the gradient of xhat from the row's sums to dx
    final: bool = False  # backward: what the kernel adds up are the gradients themselves, not partial rows
    several_blocks: bool = False  # column_gradients: a CTA has several blocks of columns, one after the other

    def __hash__(self) -> int:
        """Of what tells most kernels apart: they are looked up for every plan."""
        return hash((self.operands, self.shape, self.rows_per_cta, self.ctas_per_sm, self.stages))

    def __str__(self) -> str:
        """The kernel in short, for logs and messages."""
        operation = self.operation
        y = operation.second or operation.epilogue
        arrays = ", ".join(f"{one.name} {one.dtype}" for one in self.operands if one.kind != "scalar")
        return f"{self.kernel} {operation.norm}, {self.cols} cols, {arrays}; y = {y.text}; {self.layout}"

    @property
    def layout(self) -> str:
        """Who holds what, in words."""
        shape = self.shape
        return (
            f"{self.rows_per_cta} rows a CTA, {shape.threads} threads x {shape.vectors} vectors of "
            f"{shape.vector_cols} cols a row, cluster {shape.cluster}, "
            f"{'aligned' if self.aligned else 'shifted'} access"
        )

    @property
    def grouped(self) -> bool:
        """Whether an operand is for groups of rows."""
        return any(one.kind == "group" for one in self.operands)

    def has_vectors(self, one: Operand) -> bool:
        return self.aligned if one.kind == "full" else self.columns_aligned

    @property
    def has_whole_vectors(self) -> bool:
        """Whether the kernel is told that no row ends within a vector.

        Told so, kernels of streamed and of few rows, of vectors for groups and of rows that a thread keeps, spill.
        """
        told = self.stages > 0 or self.kernel in ("forward", "forward_pairs", "forward_twice")
        kept = self.kernel == "forward" and self.rows_in_registers
        return told and not kept and not self.grouped and self.cols % self.shape.vector_cols == 0

    @property
    def threads(self) -> int:
        if self.kernel == "forward_pairs":
            return self.shape.threads
        if self.kernel == "forward_spread":
            parts = -(-self.shape.vectors // self.vectors_per_thread)
            return -(-self.shape.threads * parts // WARP) * WARP
        return self.shape.threads * self.rows_per_cta

    @property
    def cluster(self) -> int:
        return self.shape.cluster

    @property
    def compute(self) -> str:
        return compute_dtype(self.row_dtype)

    @property
    def read(self) -> tuple[Operand, ...]:
        return self.operands.read

    @property
    def written(self) -> tuple[Operand, ...]:
        return self.operands.written

    @property
    def matrices(self) -> tuple[Operand, ...]:
        """What is read by rows, or made of a seed by rows, or one number for a row."""
        return self.operands.matrices

    @property
    def reads_two(self) -> bool:
        """Whether it reads another matrix beside x."""
        return sum(one.kind == "full" for one in self.matrices) > 1

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Of a forward pass: the arrays that s is made of. A column is read again with every row."""
        before = ("x", *self.operation.before)
        return tuple(one for one in self.read if one.name in before and one.kind != "scalar")

    @property
    def beside(self) -> tuple[Operand, ...]:
        """Of a forward pass: what the epilogue takes by rows."""
        return tuple(one for one in self.matrices if one.name in self.operation.epilogue.uses)

    @property
    def columns(self) -> tuple[Operand, ...]:
        """What is read once for all rows, or for a group of them."""
        return self.operands.columns

    @property
    def sums(self) -> tuple[Operand, ...]:
        """What is added up over rows, all of them or those of a group."""
        return self.operands.summed if self.kernel in BACKWARD else ()

    @property
    def leaves_partial_rows(self) -> bool:
        """Whether a launch behind it adds up what it has added up."""
        return bool(self.sums) and not self.final

    @property
    def row_sums(self) -> tuple[Operand, ...]:
        """Of a backward pass: what is added up over columns, a number for each row."""
        backward = self.kernel.startswith("backward")
        return tuple(one for one in self.written if one.kind == "per_row") if backward else ()

    @property
    def of_s(self) -> bool:
        """Whether a backward pass needs the sums over a row that the gradient of s is made of."""
        before = ("x", *self.operation.before)
        return any(one.name.removeprefix("d") in before for one in self.written)

    @property
    def scales(self) -> str | None:
        """The kind of the scales of FP8 output, if there are any."""
        return next((one.kind for one in self.operands if one.name == "y8_scale"), None)

    @property
    def finds_scales(self) -> bool:
        """Whether the kernel looks for the largest of y."""
        return self.scales in ("per_row", "per_block")

    @property
    def results(self) -> tuple[Operand, ...]:
        """What is written by rows."""
        return tuple(one for one in self.written if one.kind == "full")

    @property
    def early_results(self) -> tuple[Operand, ...]:
        """Of these the gradients that do not depend on the sums over a row."""
        if self.kernel != "backward":
            return ()
        before = ("x", *self.operation.before)
        return tuple(one for one in self.results if one.name.removeprefix("d") not in before)

    @property
    def late_results(self) -> tuple[Operand, ...]:
        return tuple(one for one in self.results if one not in self.early_results)


BACKWARD = ("backward", "column_gradients")


def kernel_spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> NormSpec:
    of_problem = kernel, problem.operation, problem.cols, problem.row_dtype, problem.operands.of_text
    fits = {
        "aligned": _vectors_fit(problem, shape.vector_cols, ("full", "group")),
        "columns_aligned": _vectors_fit(problem, shape.vector_cols, ("group",)),
    }
    return _spec(*of_problem, shape=shape, **fits | changes)


# Calls that differ in their number of rows share it: made anew it takes 9 us.
_spec = lru_cache(maxsize=4096)(NormSpec)


def _vectors_fit(problem: Problem, vector_cols: int, kinds: tuple[str, ...]) -> bool:
    """Every vector of every row, or vector, of such operands starts at a multiple of its size (or of 16 bytes)."""
    return problem.aligned and (problem.rows == 1 or _strides_fit(problem.operands, vector_cols, kinds))


@lru_cache(maxsize=4096)
def _strides_fit(operands: Operands, vector_cols: int, kinds: tuple[str, ...]) -> bool:
    return all(
        stride * one.itemsize % min(16, vector_cols * one.itemsize) == 0
        for one in operands
        if one.kind in kinds
        for stride in (one.row_stride, one.outer_stride)
    )


def in_clusters(shape: RowShape, size: int) -> RowShape:
    """The same threads of a row, in as many CTAs."""
    return replace(shape, threads=shape.threads * shape.cluster // size, cluster=size)


@dataclass(frozen=True, slots=True)
class SumSpec:
    """The kernel that adds partial rows up, for `count` gradients of one dtype."""

    compute: str
    dtype: str
    vector_cols: int
    lanes: int  # threads beside each other
    count: int
    grouped: bool = False  # for each group of rows apart
    next_begins: bool = False  # from where its own waiting ends the kernel behind it may begin
    threads: int = 256
    kernel: str = "sum_partials"
    cluster: int = 1
    several_blocks: bool = False  # a CTA has several blocks of columns, of any gradient and group, one after the other

    def __str__(self) -> str:
        return f"{self.kernel} of {self.count} gradients of {self.dtype}, {self.lanes} threads a row"

    @property
    def rows_per_cta(self) -> int:
        return self.threads // self.lanes


@dataclass(frozen=True, slots=True)
class FewRowsSpec:
    """The backward kernel of few rows: some of its CTAs add whole columns up, the others have rows.

    x and dy are read by either, the second time from L2, and nothing waits for partial rows.
    """

    whole: NormSpec  # both parts as one: their parameters
    columns: NormSpec  # column_gradients, of as many threads as the other
    rows: NormSpec  # backward
    kernel: str = "backward_few"

    def __str__(self) -> str:
        return f"{self.kernel}: {self.rows}; {self.layout}"

    @property
    def layout(self) -> str:
        columns = self.columns.shape.threads
        return f"{self.column_ctas} CTAs with {columns} vectors of all rows, the others with {self.rows.layout}"

    @property
    def column_ctas(self) -> int:
        """Whole clusters."""
        columns = self.columns.shape.vector_cols * self.columns.shape.threads * self.cluster
        return -(-self.columns.cols // columns) * self.cluster

    @property
    def compute(self) -> str:
        return self.rows.compute

    @property
    def threads(self) -> int:
        return self.rows.threads

    @property
    def cluster(self) -> int:
        return self.rows.cluster

    @property
    def ctas_per_sm(self) -> int:
        return self.rows.ctas_per_sm


class OtherSpec(ABC):
    """A kernel of no norm: it says itself what its text and its launch need (linear/float8_spec.py)."""

    kernel: str
    file: str  # of kernels_cu
    compute = "float32"
    ctas_per_sm = 1

    @property
    @abstractmethod
    def threads(self) -> int:
        """Of a CTA."""

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shared_memory(self) -> int:
        """As plan/resources.py says."""
        return 0

    @property
    def dynamic_shared(self) -> int:
        """As plan/resources.py says."""
        return 0

    @abstractmethod
    def parameters(self) -> dict[str, str]:
        """As source.parameters."""

    @abstractmethod
    def text(self) -> tuple[str, str]:
        """(definitions before the entry, the statements of the entry)"""


KernelSpec = NormSpec | SumSpec | FewRowsSpec | OtherSpec
