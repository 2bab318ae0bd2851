"""How many registers a thread of a kernel takes, as far as its plan depends on it, and how many CTAs then fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..expression.value import FUNCTIONS
from ..kernel.device import Device
from ..operation import NORMS, Norm
from .problem import BLOCK, ITEMSIZE, Operand, Problem
from .shapes import ceil_div
from .spec import BLOCK_VALUES, WARP, NormSpec, RowShape

RESIDENT = 1024  # threads that an SM holds at once where rows are many


def ctas_of(spec: NormSpec, registers: int, most: int = 1536) -> int:
    """CTAs that fit on an SM, of `most` threads, whose threads have so many registers each."""
    return min(most, 65536 // registers // (4 * WARP) * 4 * WARP) // spec.threads if registers <= 200 else 0


def registers_of(threads: int) -> int:
    """Registers per thread when `threads` threads are resident on one SM, whose four parts have 16 K each."""
    return min(255, 16384 // (-(-threads // (4 * WARP)) * WARP) // 8 * 8)


def column_bytes(problem: Problem, shape: RowShape) -> int:
    """Bytes of weight and bias for the columns of a thread."""
    return shape.packs * shape.pack * sum(ITEMSIZE[dtype] for dtype in column_dtypes(problem))


def column_dtypes(problem: Problem) -> list[str]:
    """The dtypes of weight and bias, and of whatever else is read once for all rows."""
    return [one.dtype for one in problem.operands if one.kind in ("column", "group") and not one.written]


def widest_column(spec: NormSpec) -> int:
    """The bytes of an element of the wider of weight and bias; 0 without them."""
    return max((one.itemsize for one in spec.columns), default=0)


def words_to_shift(spec: NormSpec) -> int:
    """Registers in which a thread shifts a vector at an odd address, beside the vector itself: of the widest array."""
    width = max(one.itemsize for one in spec.operands if one.kind in ("full", "column", "group"))
    return spec.shape.pack * width // 4


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
        if device.arch >= 100 and spec.shape.packs > 6:
            return spec
        working = 96 if spec.aligned or spec.shape.packs < 6 else 112
        if spec.kernel == "forward" and spec.columns_stay:
            working = working_of_shifted(NORMS[spec.operation.norm])
    if spec.kernel == "backward" and spec.cols % spec.shape.pack and spec.shape.packs == 5:
        working = 88 if spec.columns else 96  # RMSNorm of such rows gains a fifth by keeping them
    if any(operand.itemsize > ITEMSIZE[spec.row_dtype] for operand in spec.written if operand.kind == "full"):
        working += 16
    if {operand.dtype for operand in spec.matrices if operand.kind == "full"} == {"float16", "bfloat16"}:
        working += 8
    if spec.row_sums:
        working += 24
    words = sum(spec.shape.pack * operand.itemsize // 4 for operand in spec.matrices)
    words += len(spec.sums) * spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if spec.columns_stay:
        words += sum(spec.shape.pack * operand.itemsize // 4 for operand in spec.columns)
    if spec.keeps_g:
        words += spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if working + words * spec.shape.packs > registers_of(spec.threads * spec.ctas_per_sm):
        return spec
    return replace(spec, rows_stay=True, stages=spec.stages - 1 if spec.aligned else spec.stages)


def working_of_shifted(norm: Norm) -> int:
    """Registers of a forward kernel in clusters beside the row, which is shifted, and weight and bias."""
    return 64 if norm.subtracts_mean else 48


def registers_of_one_turn(spec: NormSpec) -> int:
    """Registers of a backward kernel that holds its row and weight and has one iteration: x, dy and a weight of 16
    bits take 64 for two vectors, 96 for three, 160 for five.
    """
    shape = spec.shape

    def beyond(operands: Iterable[Operand], words: int) -> int:
        held = sum(shape.pack * one.itemsize // 4 for one in operands if one.kind in ("full", "column"))
        return shape.packs * max(0, held - words)

    # Per-row scalars, and what is kept for a second matrix that is written, take more.
    more = bool(spec.row_sums) + max(0, len(spec.results) - 1)
    shifted = 0 if spec.aligned and spec.columns_aligned else 2 * words_to_shift(spec)
    return 32 * shape.packs + beyond(spec.matrices, 8) + beyond(spec.columns, 8) + shifted + 24 * more


class Needs(NamedTuple):
    """Registers of a thread, for what it keeps of a row at once."""

    working: int  # besides the others
    columns: int  # weight and bias
    row: int  # on its way: at odd addresses two words for one
    at_once: int  # the two, a column at an odd address one word for each element
    y: int  # held as float32 while the largest of a row, or of blocks, is looked for, and the packs that come later


def needs_of(problem: Problem, spec: NormSpec, device: Device) -> Needs:
    shape = spec.shape
    working = 44 if problem.row_dtype != "float64" else 72
    if spec.scales:
        working += 12 if spec.aligned else 32
    if device.arch < 90 and any(step.function in FUNCTIONS for step in problem.operation.epilogue.steps):
        working += 16  # the sigmoid of a gate
    if device.arch < 90 and problem.norm.subtracts_mean and shape.packs == 7:
        working += 8
    if not spec.aligned:
        working += words_to_shift(spec)
    matrices = (1 + len(spec.beside)) * (2 if len(spec.inputs) > 1 else 1)
    row = shape.packs * shape.pack * ITEMSIZE[problem.row_dtype] // 4 * matrices * (1 if spec.aligned else 2)
    columns = column_bytes(problem, shape) // 4
    at_once = row + columns * (1 if spec.columns_aligned else 2)
    held = _packs_held(spec)
    y = held * shape.pack + (shape.packs - held) * row // shape.packs if held else 0
    return Needs(working, columns, row, at_once, y)


def _packs_held(spec: NormSpec) -> int:
    """Of a thread, whose y is held at once: store_scaled in kernels_cu/rows/float8.cuh."""
    shape = spec.shape
    if spec.scales == "per_row":
        return shape.packs
    if spec.scales != "per_block":
        return 0
    of_block = max(1, BLOCK // shape.pack // shape.lanes)  # packs of a thread
    blocks = ceil_div(shape.packs, of_block)
    turns = ceil_div(blocks, max(1, BLOCK_VALUES // (of_block * shape.pack)))
    return min(shape.packs, ceil_div(blocks, turns) * of_block)


def sixteen_bits(spec: NormSpec, operands: Iterable[Operand] | None = None) -> bool:
    """Whether every array, or these, has 16 bits, and every pack begins at a multiple of its size."""
    arrays = (one.itemsize for one in operands or spec.operands if one.kind in ("full", "column", "group"))
    return spec.aligned and spec.columns_aligned and max(arrays) == 2
