"""The registers and shared memory that a kernel takes of an SM, and so the launches that a device can run.

Registers are a model, with numbers found by compiling. The compile test (tests/kernels/matrix.py) checks it by ptxas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..expression.value import FUNCTIONS
from ..kernel.device import Device
from ..operation import NORMS, Norm
from .problem import BLOCK, ITEMSIZE, Operand, Problem, ceil_div
from .spec import (
    BLOCK_VALUES,
    COLUMN_BYTES,
    COLUMN_VECTORS,
    MAILBOX,
    MOST_SHORT,
    RUN_GAP,
    SHARED_ALIGNMENT,
    SUM_COLUMNS,
    WARP,
    FewRowsSpec,
    KernelSpec,
    NormSpec,
    OtherSpec,
    RowShape,
    SumSpec,
)

SHARED_LIMIT = 48 << 10  # bytes of static shared memory that a CTA can have on every architecture
RESERVED = 1024  # bytes of an SM's shared memory that the hardware reserves for each CTA


@lru_cache(maxsize=4096)
def shared_memory(spec: KernelSpec) -> int:
    """Return the bytes of static shared memory, which the compile test compares with ptxas."""
    if isinstance(spec, OtherSpec):
        return spec.shared_memory
    if isinstance(spec, FewRowsSpec):
        return shared_memory(spec.columns) + shared_memory(spec.rows)
    compute = ITEMSIZE[spec.compute]
    if isinstance(spec, SumSpec):
        sums = spec.threads // max(WARP, spec.lanes)
        return compute * sums * spec.lanes * SUM_COLUMNS if sums > 1 else 0
    if spec.kernel == "column_gradients":
        holders = spec.threads // max(WARP, spec.shape.threads)
        return len(spec.sums) * holders * spec.shape.capacity * compute if spec.rows_per_cta > 1 else 0
    norm = NORMS[spec.operation.norm]
    warps = max(1, spec.shape.threads // WARP) * spec.shape.cluster
    lane_sums = 0
    if spec.kernel == "forward_spread" and spec.shape.vectors > spec.vectors_per_thread:
        lane_sums = norm.lane_sums * spec.shape.vectors * spec.shape.threads * compute
    if warps == 1:
        return lane_sums
    counts = [1] if spec.scales == "per_row" else []  # of values that the warps of a row exchange at once
    if spec.kernel == "forward_pairs":
        return 2 * warps * compute * (norm.forward_values + sum(counts))
    if spec.kernel.startswith("backward"):
        counts += [norm.backward_values] if spec.computes_ds else []
        counts += [len(spec.row_sums)] if spec.row_sums else []
    else:
        counts.append(norm.streamed_values if spec.kernel == "forward_streamed" else norm.forward_values)
    if not counts:
        return lane_sums
    if spec.shape.cluster > 1:  # the values of a warp go in one message
        counts = [1 << (count - 1).bit_length() for count in counts]
    total = lane_sums + spec.rows_per_cta * 2 * sum(count * warps * compute + MAILBOX for count in counts)
    return ceil_div(total, SHARED_ALIGNMENT) * SHARED_ALIGNMENT if dynamic_shared(spec) else total


def launch_shared(spec: KernelSpec, device: Device) -> int:
    """Return the bytes of dynamic shared memory with which a kernel is launched.

    A kernel that may begin before the one before it has left every SM gets so much that no SM has room for more of its
    CTAs than planned. Else they crowd on the SMs that were left first, which costs 3 to 4% (docs/tuning.md).
    """
    needed = dynamic_shared(spec)
    if not needed or not device.overlaps_launches or not isinstance(spec, NormSpec) or not spec.leaves_partial_sums:
        return needed
    return max(needed, (device.shared + RESERVED) // (spec.ctas_per_sm + 1) - RESERVED + SHARED_ALIGNMENT)


def ctas_that_fit(shared: int, device: Device) -> int:
    """Return how many CTAs with so many bytes each fit on an SM."""
    return (device.shared + RESERVED) // (shared + RESERVED)


@lru_cache(maxsize=4096)
def dynamic_shared(spec: KernelSpec) -> int:
    """Return the bytes of dynamic shared memory that a kernel needs: for stages and columns, and then for sums."""
    if isinstance(spec, OtherSpec):
        return spec.dynamic_shared
    if isinstance(spec, FewRowsSpec):
        return dynamic_shared(spec.rows)
    if spec.kernel not in ("forward", "backward") or isinstance(spec, SumSpec):
        return 0
    shape, rows = spec.shape, spec.rows_per_cta
    threads = rows * shape.threads

    def bytes_of(operands: Iterable[Operand]) -> int:
        """Return the bytes of one array of each for each row of a CTA."""
        vectors = threads * shape.vectors
        gaps = vectors // shape.lanes * RUN_GAP
        return sum(
            vectors * shape.vector_cols * operand.itemsize + gaps * (not spec.is_aligned(operand))
            for operand in operands
            if operand.kind not in ("seed", "per_row")
        )

    if spec.kernel == "forward":
        return spec.stages * bytes_of((*spec.inputs, *spec.epilogue_matrices))
    if not spec.stages:
        return 0
    total = spec.stages * bytes_of(spec.matrices)
    width = sum(column.itemsize for column in spec.columns)
    if shape.vectors > COLUMN_VECTORS or shape.vectors * shape.vector_cols * width > COLUMN_BYTES:
        total += bytes_of(spec.columns)
    # A warp adds up the sums of its rows by shuffles, so that it or the warps of a row have one set of sums.
    sets = threads // max(WARP, shape.threads)
    sums = len(spec.sums) * sets * shape.capacity // shape.cluster * ITEMSIZE[spec.compute] if sets > 1 else 0
    return max(total, sums)


RESIDENT = 1024  # threads of an SM where there are many rows


def ctas_by_registers(spec: NormSpec, registers: int, most: int = 1536) -> int:
    """Return how many CTAs fit on an SM, with `most` threads in all, if a thread has so many registers."""
    return min(most, 65536 // registers // (4 * WARP) * 4 * WARP) // spec.threads if registers <= 200 else 0


def registers_per_thread(threads: int) -> int:
    """Return the registers of a thread if so many threads are resident on an SM, whose four parts have 16 K each."""
    return min(255, 16384 // (ceil_div(threads, 4 * WARP) * WARP) // 8 * 8)


def column_bytes(problem: Problem, shape: RowShape) -> int:
    """Return the bytes of weight and bias for the columns of a thread."""
    return shape.vectors * shape.vector_cols * sum(column.itemsize for column in problem.operands.columns)


def widest_column(spec: NormSpec) -> int:
    """Return the bytes of an element of weight or bias, whichever is wider; 0 without them."""
    return max((column.itemsize for column in spec.columns), default=0)


def words_to_shift(spec: NormSpec) -> int:
    """Return the registers, besides a vector's own, by which a thread shifts a vector of the widest array."""
    width = max(operand.itemsize for operand in spec.operands if operand.kind in ("full", "column", "group"))
    return spec.shape.vector_cols * width // 4


def with_rows_in_registers(spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel with rows in registers if threads have room: in the backward pass, and forward for rows at odd
    addresses. Aligned rows then have a stage fewer.

    `working` counts the registers of a thread besides its rows, the sums of its columns, weight and bias. With fewer
    ptxas spills on the architecture or for the layout that the condition names.
    """
    if spec.aligned and spec.kernel != "backward":
        return spec
    working = 80 if device.arch < 100 else 88 if spec.aligned else 104
    if device.arch >= 100 and widest_column(spec) == 8:
        working += 24
    if spec.cluster > 1:
        if device.arch >= 100 and spec.shape.vectors > 6:
            return spec
        working = 96 if spec.aligned or spec.shape.vectors < 6 else 112
        if spec.kernel == "forward" and spec.weights_in_registers:
            working = working_of_shifted(NORMS[spec.operation.norm])
    if spec.kernel == "backward" and spec.cols % spec.shape.vector_cols and spec.shape.vectors == 5:
        working = 88 if spec.columns else 96  # RMSNorm of such rows gains a fifth by keeping them
    if any(operand.itemsize > ITEMSIZE[spec.row_dtype] for operand in spec.written if operand.kind == "full"):
        working += 16
    if {operand.dtype for operand in spec.matrices if operand.kind == "full"} == {"float16", "bfloat16"}:
        working += 8
    if spec.row_sums:
        working += 24
    words = sum(spec.shape.vector_cols * matrix.itemsize // 4 for matrix in spec.matrices)
    words += (len(spec.sums) + spec.keeps_g) * spec.shape.vector_cols * ITEMSIZE[spec.compute] // 4
    if spec.weights_in_registers:
        words += sum(spec.shape.vector_cols * column.itemsize // 4 for column in spec.columns)
    if working + words * spec.shape.vectors > registers_per_thread(spec.threads * spec.ctas_per_sm):
        return spec
    return replace(spec, rows_in_registers=True, stages=spec.stages - 1 if spec.aligned else spec.stages)


def working_of_shifted(norm: Norm) -> int:
    """Return the registers of a forward kernel in clusters besides weight, bias and a row that ends within a vector."""
    return 64 if norm.subtracts_mean else 48


def registers_of_one_iteration(spec: NormSpec) -> int:
    """Return the registers of a backward kernel that has one iteration, in which it keeps its row and weight.

    With x, dy and a weight of 16 bits two vectors take 64, three 96 and five 160.
    """
    shape = spec.shape

    def words_beyond_eight(operands: Iterable[Operand]) -> int:
        words = sum(
            shape.vector_cols * operand.itemsize // 4 for operand in operands if operand.kind in ("full", "column")
        )
        return shape.vectors * max(0, words - 8)

    wide = words_beyond_eight(spec.matrices) + words_beyond_eight(spec.columns)
    shifted = 0 if spec.aligned else 2 * words_to_shift(spec)
    more_results = bool(spec.row_sums) + max(0, len(spec.results) - 1)
    return 32 * shape.vectors + wide + shifted + 24 * more_results


class Needs(NamedTuple):
    """Registers of a forward kernel's thread, by what they hold."""

    working: int  # everything else
    columns: int  # weight and bias
    row: int  # the row as it is loaded: at odd addresses two words for one
    at_once: int  # row and columns together, a column at an odd address with a word for each element
    y: int  # y as float32 while scales are computed, and the vectors that are computed later


def needs_of(problem: Problem, spec: NormSpec, device: Device) -> Needs:
    """Return the registers that a thread needs for a row."""
    shape = spec.shape
    working = 44 if problem.row_dtype != "float64" else 72
    if spec.scales:
        working += 12 if spec.aligned else 32
    if device.arch < 90 and any(step.function in FUNCTIONS for step in problem.operation.epilogue.steps):
        working += 16  # the sigmoid of a gate
    if device.arch < 90 and problem.norm.subtracts_mean and shape.vectors == 7:
        working += 8
    if not spec.aligned:
        working += words_to_shift(spec)
    matrices = (1 + len(spec.epilogue_matrices)) * (2 if len(spec.inputs) > 1 else 1)
    row = shape.vectors * shape.vector_cols * ITEMSIZE[problem.row_dtype] // 4 * matrices * (1 if spec.aligned else 2)
    columns = column_bytes(problem, shape) // 4
    at_once = row + columns * (1 if spec.columns_aligned else 2)
    vectors_of_y = _vectors_to_scale(spec)
    y = vectors_of_y * shape.vector_cols + (shape.vectors - vectors_of_y) * row // shape.vectors if vectors_of_y else 0
    return Needs(working, columns, row, at_once, y)


def _vectors_to_scale(spec: NormSpec) -> int:
    """Return how many vectors of y a thread keeps until it knows their scales (store_scaled in rows/float8.cuh)."""
    shape = spec.shape
    if spec.scales == "per_row":
        return shape.vectors
    if spec.scales != "per_block":
        return 0
    block_vectors = max(1, BLOCK // shape.vector_cols // shape.lanes)  # of a thread
    blocks = ceil_div(shape.vectors, block_vectors)
    iterations = ceil_div(blocks, max(1, BLOCK_VALUES // (block_vectors * shape.vector_cols)))
    return min(shape.vectors, ceil_div(blocks, iterations) * block_vectors)


def sixteen_bits(spec: NormSpec) -> bool:
    """Whether every array has 16 bits, and every vector begins at a multiple of its size."""
    widths = (operand.itemsize for operand in spec.operands if operand.kind in ("full", "column", "group"))
    return spec.aligned and max(widths) == 2


KERNELS = {"forward": ("forward", "forward_pairs", "forward_spread"), "backward": ("backward",)}
BARRIERS = 16  # of a CTA; __syncthreads takes one of them


def is_legal(spec: NormSpec, device: Device) -> bool:
    """Whether the device can run the launch, and its kernel exists, whatever a table says."""
    shape = spec.shape
    return (
        device.runs_clusters(shape.cluster)
        and (shape.cluster == 1 or shape.threads % WARP == 0)
        and _is_a_kernel(spec)
        and spec.threads <= 1024
        and spec.threads * spec.ctas_per_sm <= 2048
        and shared_memory(spec) <= SHARED_LIMIT
        and spec.ctas_per_sm <= ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    )


def _is_a_kernel(spec: NormSpec) -> bool:
    """Whether the fields satisfy what the texts of kernels_cu/norms assert or take for granted."""
    shape = spec.shape
    stores_s = any(result.name == "s" for result in spec.results)
    if spec.kernel == "forward_spread":
        parts = ceil_div(shape.vectors, spec.vectors_per_thread)
        evenly = spec.vectors_per_thread == ceil_div(shape.vectors, parts) and (parts > 1 or shape.threads % WARP == 0)
        return evenly and spec.rows_per_cta == 1 and not spec.stages and not spec.computes_scales
    if spec.kernel == "forward_pairs":
        plain = NORMS[spec.operation.norm].subtracts_mean and len(spec.matrices) == 1
        plain = plain and not spec.grouped and not stores_s
        in_a_cta = shape.cluster == 1 and WARP < shape.threads <= 16 * WARP and not spec.stages
        return plain and in_a_cta and spec.rows_per_cta == 2
    # Several rows share a CTA only if it has whole rows, and forward only if a warp has.
    if spec.rows_per_cta > 1 and (shape.cluster > 1 or (spec.kernel == "forward" and shape.threads > WARP)):
        return False
    if shape.threads > WARP and spec.rows_per_cta >= BARRIERS:
        return False
    if shape.threads < WARP and shape.threads * spec.rows_per_cta % WARP:
        return False
    if spec.stages == 1 and not (spec.rows_in_registers and spec.aligned):  # filled again in place
        return spec.kernel == "backward" and not spec.rows_in_registers and not spec.prefetch
    if spec.kernel == "backward":
        return spec.stages > 0
    late = spec.stages > 0 and not spec.prefetch and shape.threads * shape.cluster <= WARP
    # The next row of a CTA may be of another group; launches.py takes care of short rows.
    stale = spec.grouped and spec.weights_in_registers and ceil_div(spec.cols, shape.vector_cols) > MOST_SHORT
    return not late and not stale and not (spec.unpacked and stores_s)


def at_odd_addresses(spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel of arrays at odd addresses with as many CTAs, so that it leaves the same partial sums.

    There rows in registers free no stage.
    """
    stages = spec.stages + spec.rows_in_registers
    while stages > 2 and not is_legal(replace(spec, stages=stages), device):
        stages -= 1
    spec = replace(spec, stages=stages, rows_in_registers=False)
    return with_rows_in_registers(spec, device) if spec.cluster == 1 else spec


THREE_STAGES = 52 << 10  # the most bytes of a stage, of all CTAs of an SM, for which there are three; else two


def row_bytes_per_cta(shape: RowShape) -> int:
    """Return the bytes of the part of a row that a CTA holds, of a matrix of the dtype of x."""
    return 16 * shape.threads * shape.vectors


def stages_for(stage_bytes: int) -> int:
    """Return the stages by which enough bytes of rows are on their way, and not too many."""
    return 3 if stage_bytes <= THREE_STAGES else 2
