"""What a kernel takes of an SM, registers and shared memory, and so which launches a device can run.

Registers are a model, held against ptxas by `compile --all` and the compile test: each number was found by compiling.
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

SHARED_LIMIT = 48 << 10  # bytes that a CTA can declare, on every architecture
RESERVED = 1024  # bytes of an SM's shared memory that a CTA takes besides its own


@lru_cache(maxsize=4096)
def shared_memory(spec: KernelSpec) -> int:
    """Bytes of static shared memory; the compile test holds it against ptxas."""
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
    slots = max(1, spec.shape.threads // WARP) * spec.shape.cluster
    lane_sums = 0
    if spec.kernel == "forward_spread" and spec.shape.vectors > spec.vectors_per_thread:
        lane_sums = norm.lane_sums * spec.shape.vectors * spec.shape.threads * compute
    if slots == 1:
        return lane_sums
    counts = [1] if spec.scales == "per_row" else []
    if spec.kernel == "forward_pairs":
        return 2 * slots * compute * (norm.forward_values + sum(counts))
    if spec.kernel.startswith("backward"):
        counts += [norm.backward_values] if spec.of_s else []
        counts += [len(spec.row_sums)] if spec.row_sums else []
    else:
        counts.append(norm.streamed_values if spec.kernel == "forward_streamed" else norm.forward_values)
    if not counts:
        return lane_sums
    if spec.shape.cluster > 1:  # a slot's numbers go in one message
        counts = [1 << (count - 1).bit_length() for count in counts]
    total = lane_sums + spec.rows_per_cta * 2 * sum(count * slots * compute + MAILBOX for count in counts)
    return -(-total // SHARED_ALIGNMENT) * SHARED_ALIGNMENT if dynamic_shared(spec) else total


def launch_shared(spec: KernelSpec, device: Device) -> int:
    """Bytes of dynamic shared memory that the launch asks for.

    What may begin before the kernel in front of it has left every SM asks for so much that no SM has room for more of
    its CTAs than planned: else they crowd on those that were left first, which costs 3 to 4% (docs/tuning.md).
    """
    needed = dynamic_shared(spec)
    if not needed or not device.overlaps_launches or not isinstance(spec, NormSpec) or not spec.leaves_partial_rows:
        return needed
    of_sm = device.shared + RESERVED
    return max(needed, of_sm // (spec.ctas_per_sm + 1) - RESERVED + SHARED_ALIGNMENT)


def ctas_that_fit(shared: int, device: Device) -> int:
    """How many CTAs that have so many bytes each fit on an SM."""
    return (device.shared + RESERVED) // (shared + RESERVED)


@lru_cache(maxsize=4096)
def dynamic_shared(spec: KernelSpec) -> int:
    """Bytes of shared memory that a kernel needs besides: places of rows and columns, later sums of the row groups."""
    if isinstance(spec, OtherSpec):
        return spec.dynamic_shared
    if isinstance(spec, FewRowsSpec):
        return dynamic_shared(spec.rows)
    if spec.kernel not in ("forward", "backward") or isinstance(spec, SumSpec):
        return 0
    shape, rows = spec.shape, spec.rows_per_cta
    threads = rows * shape.threads

    def places(operands: Iterable[Operand]) -> int:
        """One of each for each of the rows of a CTA."""
        vectors = threads * shape.vectors
        gaps = vectors // shape.lanes * RUN_GAP
        return sum(
            vectors * shape.vector_cols * one.itemsize + gaps * (not spec.has_vectors(one))
            for one in operands
            if one.kind not in ("seed", "per_row")
        )

    if spec.kernel == "forward":
        return spec.stages * places((*spec.inputs, *spec.beside))
    if spec.kernel == "backward" and not spec.stages:
        return 0
    total = spec.stages * places(spec.matrices)
    width = sum(one.itemsize for one in spec.columns)
    if shape.vectors > COLUMN_VECTORS or shape.vectors * shape.vector_cols * width > COLUMN_BYTES:
        total += places(spec.columns)
    # A warp holds a row group, or several whose sums it adds up by shuffles.
    holders = threads // max(WARP, shape.threads)
    sums = len(spec.sums) * holders * shape.capacity // shape.cluster * ITEMSIZE[spec.compute] if holders > 1 else 0
    return max(total, sums)


RESIDENT = 1024  # threads that an SM holds at once where rows are many


def ctas_of(spec: NormSpec, registers: int, most: int = 1536) -> int:
    """CTAs that fit on an SM, of `most` threads, whose threads have so many registers each."""
    return min(most, 65536 // registers // (4 * WARP) * 4 * WARP) // spec.threads if registers <= 200 else 0


def registers_of(threads: int) -> int:
    """Registers per thread when `threads` threads are resident on one SM, whose four parts have 16 K each."""
    return min(255, 16384 // (-(-threads // (4 * WARP)) * WARP) // 8 * 8)


def column_bytes(problem: Problem, shape: RowShape) -> int:
    """Bytes of weight and bias for the columns of a thread."""
    return shape.vectors * shape.vector_cols * sum(ITEMSIZE[dtype] for dtype in column_dtypes(problem))


def column_dtypes(problem: Problem) -> list[str]:
    """The dtypes of weight and bias, and of whatever else is read once for all rows."""
    return [one.dtype for one in problem.operands if one.kind in ("column", "group") and not one.written]


def widest_column(spec: NormSpec) -> int:
    """The bytes of an element of the wider of weight and bias; 0 without them."""
    return max((one.itemsize for one in spec.columns), default=0)


def words_to_shift(spec: NormSpec) -> int:
    """Registers in which a thread shifts a vector at an odd address, beside the vector itself: of the widest array."""
    width = max(one.itemsize for one in spec.operands if one.kind in ("full", "column", "group"))
    return spec.shape.vector_cols * width // 4


def with_rows_kept(spec: NormSpec, device: Device) -> NormSpec:
    """The same kernel, whose threads keep their rows in registers where they have room: in the backward pass, and
    forward for rows at odd addresses. Aligned rows then have a stage fewer.

    `working` is what a thread takes beside the rows, the sums of its columns and its weight and bias. Each number was
    found by compiling: with less, ptxas spills on the architecture or for the layout that the condition names.
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
    words = sum(spec.shape.vector_cols * operand.itemsize // 4 for operand in spec.matrices)
    words += len(spec.sums) * spec.shape.vector_cols * ITEMSIZE[spec.compute] // 4
    if spec.weights_in_registers:
        words += sum(spec.shape.vector_cols * operand.itemsize // 4 for operand in spec.columns)
    if spec.keeps_g:
        words += spec.shape.vector_cols * ITEMSIZE[spec.compute] // 4
    if working + words * spec.shape.vectors > registers_of(spec.threads * spec.ctas_per_sm):
        return spec
    return replace(spec, rows_in_registers=True, stages=spec.stages - 1 if spec.aligned else spec.stages)


def working_of_shifted(norm: Norm) -> int:
    """Registers of a forward kernel in clusters beside the row, which is shifted, and weight and bias."""
    return 64 if norm.subtracts_mean else 48


def registers_of_one_turn(spec: NormSpec) -> int:
    """Registers of a backward kernel that holds its row and weight and has one iteration: x, dy and a weight of 16
    bits take 64 for two vectors, 96 for three, 160 for five.
    """
    shape = spec.shape

    def beyond(operands: Iterable[Operand], words: int) -> int:
        held = sum(shape.vector_cols * one.itemsize // 4 for one in operands if one.kind in ("full", "column"))
        return shape.vectors * max(0, held - words)

    # Per-row scalars, and what is kept for a second matrix that is written, take more.
    more = bool(spec.row_sums) + max(0, len(spec.results) - 1)
    shifted = 0 if spec.aligned and spec.columns_aligned else 2 * words_to_shift(spec)
    return 32 * shape.vectors + beyond(spec.matrices, 8) + beyond(spec.columns, 8) + shifted + 24 * more


class Needs(NamedTuple):
    """Registers of a thread, for what it keeps of a row at once."""

    working: int  # besides the others
    columns: int  # weight and bias
    row: int  # on its way: at odd addresses two words for one
    at_once: int  # the two, a column at an odd address one word for each element
    y: int  # held as float32 while the largest of a row, or of blocks, is looked for, and the vectors that come later


def needs_of(problem: Problem, spec: NormSpec, device: Device) -> Needs:
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
    matrices = (1 + len(spec.beside)) * (2 if len(spec.inputs) > 1 else 1)
    row = shape.vectors * shape.vector_cols * ITEMSIZE[problem.row_dtype] // 4 * matrices * (1 if spec.aligned else 2)
    columns = column_bytes(problem, shape) // 4
    at_once = row + columns * (1 if spec.columns_aligned else 2)
    held = _vectors_held(spec)
    y = held * shape.vector_cols + (shape.vectors - held) * row // shape.vectors if held else 0
    return Needs(working, columns, row, at_once, y)


def _vectors_held(spec: NormSpec) -> int:
    """Of a thread, whose y is held at once: store_scaled in kernels_cu/rows/float8.cuh."""
    shape = spec.shape
    if spec.scales == "per_row":
        return shape.vectors
    if spec.scales != "per_block":
        return 0
    of_block = max(1, BLOCK // shape.vector_cols // shape.lanes)  # vectors of a thread
    blocks = ceil_div(shape.vectors, of_block)
    turns = ceil_div(blocks, max(1, BLOCK_VALUES // (of_block * shape.vector_cols)))
    return min(shape.vectors, ceil_div(blocks, turns) * of_block)


def sixteen_bits(spec: NormSpec, operands: Iterable[Operand] | None = None) -> bool:
    """Whether every array, or these, has 16 bits, and every vector begins at a multiple of its size."""
    arrays = (one.itemsize for one in operands or spec.operands if one.kind in ("full", "column", "group"))
    return spec.aligned and spec.columns_aligned and max(arrays) == 2


KERNELS = {"forward": ("forward", "forward_pairs", "forward_spread"), "backward": ("backward",)}
BARRIERS = 16  # of a CTA; __syncthreads has one of them


def is_legal(spec: NormSpec, device: Device) -> bool:
    """Whether the device can run the launch, and the kernel is one that there is, whatever a table says."""
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
    """Whether the texts of kernels_cu/norms are for such choices: what they assert, and what they take for granted."""
    shape = spec.shape
    stores_s = any(one.name == "s" for one in spec.results)
    if spec.kernel == "forward_spread":
        parts = ceil_div(shape.vectors, spec.vectors_per_thread)
        evenly = spec.vectors_per_thread == ceil_div(shape.vectors, parts) and (parts > 1 or shape.threads % WARP == 0)
        return evenly and spec.rows_per_cta == 1 and not spec.stages and not spec.finds_scales
    if spec.kernel == "forward_pairs":
        alone = len(spec.matrices) == 1 and not spec.grouped and not stores_s
        shared = shape.cluster == 1 and WARP < shape.threads <= 16 * WARP and not spec.stages
        return NORMS[spec.operation.norm].subtracts_mean and alone and shared and spec.rows_per_cta == 2
    # Several rows share a CTA only if it has whole rows, forward only if a warp has.
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
    # The next row of a CTA may be of another group; short rows are asked about that in launches.py.
    stale = spec.grouped and spec.weights_in_registers and ceil_div(spec.cols, shape.vector_cols) > MOST_SHORT
    return not late and not stale and not (spec.unpacked and stores_s)


def at_odd_addresses(spec: NormSpec, device: Device) -> NormSpec:
    """The same with as many CTAs, which leave the same partial sums; a row that is kept frees no stage there."""
    stages = spec.stages + spec.rows_in_registers
    while stages > 2 and not is_legal(replace(spec, stages=stages), device):
        stages -= 1
    spec = replace(spec, stages=stages, rows_in_registers=False)
    return with_rows_kept(spec, device) if spec.cluster == 1 else spec


THREE_STAGES = 52 << 10  # bytes of the parts of rows that an SM loads at once: of more, two stages are enough


def bytes_of_part(shape: RowShape) -> int:
    """Bytes of what a CTA holds of a row, in a matrix of the dtype of x."""
    return 16 * shape.threads * shape.vectors


def stages_for(of_row: int) -> int:
    """Stages for each row of a CTA, of so many bytes: what is under way is enough, and not too much."""
    return 3 if of_row <= THREE_STAGES else 2
