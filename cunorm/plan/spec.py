"""Everything that changes a kernel's text: two launches with equal specs share one compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache

from ..operation import Operation
from .problem import Operand, Operands, Problem, ceil_div, compute_dtype

WARP = 32
# A backward kernel keeps its column operands in registers if a thread has at most so many bytes and vectors of them,
# else in shared memory.
COLUMN_BYTES = 64
COLUMN_VECTORS = 2
SUM_COLUMNS = 4  # columns of a thread that adds up partial sums, which lie in pieces of so many columns
LINE_COLUMNS = 32  # partial sums are padded to a multiple of so many columns: one or two lines of L2, of 128 bytes
MOST_SHORT = 4096  # the most vectors of a row that one CTA holds forward
STREAMED_THREADS = 512  # threads of a CTA of streamed rows
BLOCK_VALUES = 32  # values of y that a thread holds while it computes scales of blocks, if one block has no more
MAILBOX = 8  # bytes
SHARED_ALIGNMENT = 128  # bytes, of dynamic shared memory
RUN_GAP = 32  # bytes of shared memory that a run of vectors at odd addresses takes besides the vectors


@dataclass(frozen=True, slots=True)
class RowShape:
    """A row is held by `threads` threads in each of `cluster` CTAs. A thread has `vectors` vectors of `vector_cols`."""

    vector_cols: int
    threads: int
    vectors: int
    cluster: int = 1

    @property
    def lanes(self) -> int:
        """Threads of a warp that hold neighbouring vectors of a row. Their vectors are called a run."""
        return min(WARP, self.threads)

    @property
    def capacity(self) -> int:
        return self.vector_cols * self.threads * self.vectors * self.cluster

    @property
    def order(self) -> tuple[int, int, int]:
        """The numbers that decide in which order a row is added up, however its threads are spread over CTAs."""
        return self.vector_cols, self.threads * self.cluster, self.vectors

    def in_clusters(self, size: int) -> RowShape:
        """Return the shape of the same threads of a row, spread over `size` CTAs."""
        return replace(self, threads=self.threads * self.cluster // size, cluster=size)


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
    aligned: bool  # every vector of every row begins at a multiple of its size, or of 16 bytes
    shape: RowShape
    columns_aligned: bool = True  # the same for the operands that are read once for all rows
    rows_per_cta: int = 1
    ctas_per_sm: int = 1
    stages: int = 0  # stages in shared memory for each of rows_per_cta; 0 if rows wait in registers
    rows_in_registers: bool = False  # a thread copies its vectors of a row from the stage to registers, and keeps them
    prefetch: bool = False  # the next row is loaded before the present one is summed up
    streamed_x: bool = False  # x is read past L1
    weights_in_registers: bool = False  # forward: a thread keeps weight and bias in registers from row to row
    vectors_per_thread: int = 1  # forward_spread
    unpacked: bool = False  # forward: a thread keeps the values of its row, not the vectors in which they were loaded
    one_row_per_cta: bool = False  # forward: the grid has a CTA for every row
    lets_next_begin: bool = False  # forward: the kernel after it may begin as soon as every CTA has
    keeps_g: bool = False  # backward: a thread keeps the gradient of xhat from the row's sums to dx
    final: bool = False  # backward: the kernel's sums are the gradients themselves, not partial sums
    several_blocks: bool = False  # column_gradients: a CTA has several blocks of columns, one after the other

    def __hash__(self) -> int:
        """Return a hash of the fields that tell most kernels apart, because every plan looks kernels up."""
        shape = self.shape
        return hash((self.operands, shape.threads, shape.cluster, self.rows_per_cta, self.ctas_per_sm, self.stages))

    def __str__(self) -> str:
        """Describe the kernel in short, for logs and messages."""
        operation = self.operation
        y = operation.second or operation.epilogue
        arrays = ", ".join(f"{operand.name} {operand.dtype}" for operand in self.operands if operand.kind != "scalar")
        return f"{self.kernel} {operation.norm}, {self.cols} cols, {arrays}; y = {y.text}; {self.layout}"

    @property
    def layout(self) -> str:
        """The rows of a CTA and the threads of a row, in words."""
        shape = self.shape
        return (
            f"{self.rows_per_cta} rows a CTA, {shape.threads} threads x {shape.vectors} vectors of "
            f"{shape.vector_cols} cols a row, cluster {shape.cluster}, "
            f"{'aligned' if self.aligned else 'shifted'} access"
        )

    @property
    def grouped(self) -> bool:
        """Whether an operand is for groups of rows."""
        return "group" in self.operands.kinds

    def is_aligned(self, operand: Operand) -> bool:
        return self.aligned if operand.kind == "full" else self.columns_aligned

    @property
    def knows_whole_vectors(self) -> bool:
        """Whether the kernel's text says that no row ends within a vector.

        Other kernels spill with it: those of streamed rows, of few rows, of groups, and forward of rows in registers.
        """
        gains = self.stages > 0 or self.kernel in ("forward", "forward_pairs", "forward_twice")
        spills = self.grouped or (self.kernel == "forward" and self.rows_in_registers)
        return gains and not spills and self.cols % self.shape.vector_cols == 0

    @property
    def copies_together(self) -> bool:
        """Return whether a warp copies its rows to shared memory together, not each thread its own (rows.cuh)."""
        of_two_threads = self.shape.threads <= 2 and self.shape.vectors > 1
        whole_vectors = self.aligned and self.cols % self.shape.vector_cols == 0
        return self.kernel == "forward" and self.stages > 1 and of_two_threads and whole_vectors

    @property
    def threads(self) -> int:
        if self.kernel == "forward_pairs":
            return self.shape.threads
        if self.kernel == "forward_spread":
            parts = ceil_div(self.shape.vectors, self.vectors_per_thread)
            return ceil_div(self.shape.threads * parts, WARP) * WARP
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
        """The operands that are read by rows: matrices, per-row scalars, and random numbers that a seed makes."""
        return self.operands.matrices

    @property
    def reads_two_matrices(self) -> bool:
        return len(self.operands.full_matrices) > 1

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that a forward pass makes s of. It reads columns among them again with every row."""
        return tuple(operand for operand in self.read if self._makes_s(operand.name) and operand.kind != "scalar")

    @property
    def epilogue_matrices(self) -> tuple[Operand, ...]:
        """The operands that the epilogue of a forward pass takes by rows."""
        return tuple(operand for operand in self.matrices if operand.name in self.operation.epilogue.uses)

    @property
    def columns(self) -> tuple[Operand, ...]:
        """The operands that are read once for all rows, or once for a group of them."""
        return self.operands.columns

    @property
    def sums(self) -> tuple[Operand, ...]:
        """The gradients that are added up over all rows, or over those of a group."""
        return self.operands.summed if self.kernel in BACKWARD else ()

    @property
    def leaves_partial_sums(self) -> bool:
        """Whether another launch must add up its sums."""
        return bool(self.sums) and not self.final

    @property
    def row_sums(self) -> tuple[Operand, ...]:
        """The gradients that a backward pass adds up over columns, a number for each row."""
        backward = self.kernel.startswith("backward")
        return tuple(operand for operand in self.written if operand.kind == "per_row") if backward else ()

    def _makes_s(self, name: str) -> bool:
        return name == "x" or name in self.operation.before

    @property
    def computes_ds(self) -> bool:
        """Whether a backward pass computes the gradient of s, and so the sums over a row that it is made of."""
        return any(self._makes_s(gradient.name.removeprefix("d")) for gradient in self.written)

    @property
    def scales(self) -> str | None:
        """The kind of the scales of FP8 output, if there are any."""
        return next((operand.kind for operand in self.operands if operand.name == "y8_scale"), None)

    @property
    def computes_scales(self) -> bool:
        """Whether the kernel computes scales, from the largest values of y."""
        return self.scales in ("per_row", "per_block")

    @property
    def results(self) -> tuple[Operand, ...]:
        """The matrices that are written."""
        return tuple(operand for operand in self.written if operand.kind == "full")

    @property
    def early_results(self) -> tuple[Operand, ...]:
        """The matrices among the gradients that do not depend on the sums over a row."""
        if self.kernel != "backward":
            return ()
        return tuple(gradient for gradient in self.results if not self._makes_s(gradient.name.removeprefix("d")))

    @property
    def late_results(self) -> tuple[Operand, ...]:
        return tuple(result for result in self.results if result not in self.early_results)


BACKWARD = ("backward", "column_gradients")


def kernel_spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> NormSpec:
    """Return the kernel of a problem's rows, with the given fields in place of the usual ones."""
    of_problem = kernel, problem.operation, problem.cols, problem.row_dtype, problem.operands.without_strides
    alignment = {
        "aligned": _is_aligned(problem, shape.vector_cols, ("full", "group")),
        "columns_aligned": _is_aligned(problem, shape.vector_cols, ("group",)),
    }
    return _spec(*of_problem, shape=shape, **alignment | changes)


UNALIGNED = {"aligned": False, "columns_aligned": False}  # the fields of kernels whose arrays may begin at any address

# Calls that differ in their number of rows share it: made anew it takes 9 us.
_spec = lru_cache(maxsize=4096)(NormSpec)


def _is_aligned(problem: Problem, vector_cols: int, kinds: tuple[str, ...]) -> bool:
    """Whether every vector of the operands of these kinds begins at a multiple of its size, or of 16 bytes."""
    return problem.aligned and (problem.rows == 1 or _strides_are_aligned(problem.operands, vector_cols, kinds))


@lru_cache(maxsize=4096)
def _strides_are_aligned(operands: Operands, vector_cols: int, kinds: tuple[str, ...]) -> bool:
    return all(
        stride * operand.itemsize % min(16, vector_cols * operand.itemsize) == 0
        for operand in operands
        if operand.kind in kinds
        for stride in (operand.row_stride, operand.outer_stride)
    )


@dataclass(frozen=True, slots=True)
class SumSpec:
    """The kernel that adds up partial sums, for `count` gradients of one dtype."""

    compute: str
    dtype: str
    vector_cols: int
    lanes: int  # threads that read neighbouring columns
    count: int
    grouped: bool = False  # each group of rows has sums of its own
    lets_next_begin: bool = False  # once it has waited for the kernel before it, the kernel after it may begin
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
    """The backward kernel of few rows: some of its CTAs add up whole columns, the others compute rows.

    Both read x and dy, the second time from L2, and no launch waits for partial sums.
    """

    whole: NormSpec  # the problem as one kernel, for its parameters
    columns: NormSpec  # column_gradients, with as many threads as `rows`
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
        """The CTAs that add up columns: whole clusters of them."""
        cluster_cols = self.columns.shape.vector_cols * self.columns.shape.threads * self.cluster
        return ceil_div(self.columns.cols, cluster_cols) * self.cluster

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
    """A kernel that is no norm's and provides its text and the facts of its launch itself (linear/float8_spec.py)."""

    kernel: str
    file: str  # in kernels_cu
    compute = "float32"
    ctas_per_sm = 1
    of_one_arch = False  # whether it has instructions that later architectures lack

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a CTA."""

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shared_memory(self) -> int:
        """Bytes of static shared memory."""
        return 0

    @property
    def dynamic_shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return 0

    @abstractmethod
    def parameters(self) -> dict[str, str]:
        """Return the C++ type of each parameter, by name and in order."""

    @abstractmethod
    def text(self) -> tuple[str, str]:
        """Return (definitions before the entry, the statements of the entry)."""


KernelSpec = NormSpec | SumSpec | FewRowsSpec | OtherSpec
