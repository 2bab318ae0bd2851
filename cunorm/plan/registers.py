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

RESIDENT = 1024  # threads that an SM is to hold at once, where rows are many


def ctas_of(spec: NormSpec, registers: int, most: int = 1536) -> int:
    """CTAs whose threads have so many registers each, on an SM with 64 K of them in four equal parts."""
    return min(most, 65536 // registers // (4 * WARP) * 4 * WARP) // spec.threads if registers <= 200 else 0


def registers_of(threads: int) -> int:
    """Of a thread, where an SM has so many: each of its four parts has 16 K of them for its warps."""
    return min(255, 16384 // (-(-threads // (4 * WARP)) * WARP) // 8 * 8)


def column_bytes(problem: Problem, shape: RowShape) -> int:
    """Of weight and bias for the columns of a thread."""
    return shape.packs * shape.pack * sum(ITEMSIZE[dtype] for dtype in column_dtypes(problem))


def column_dtypes(problem: Problem) -> list[str]:
    """Of weight and bias, and whatever else is read once for all rows."""
    return [one.dtype for one in problem.operands if one.kind in ("column", "group") and not one.written]


def widest_column(spec: NormSpec) -> int:
    """Bytes of an element of weight or bias."""
    return max((one.itemsize for one in spec.columns), default=0)


def words_to_shift(spec: NormSpec) -> int:
    """Registers in which a thread shifts a pack at an odd address, beside the pack itself: of the widest array."""
    width = max(one.itemsize for one in spec.operands if one.kind in ("full", "column", "group"))
    return spec.shape.pack * width // 4


def with_rows_kept(spec: NormSpec, device: Device) -> NormSpec:
    """The same, with rows that a thread keeps where it has registers for them: in the backward pass, and forward of
    rows at odd addresses. (Forward of aligned rows: plain_rings.py.) Aligned ones have a place fewer then.

    Backward of 4096 x 2048 17.1 us, read for each use 17.2; 64 M elements of 2880 cols 98.0 and 99.6.

    Beside them, the sums of its columns and what it keeps of weight and bias it takes about 80: with 24 for each pack
    it spilled 76 bytes in 168 registers with four packs, 136 in 128 with three, and none in 128 with two; on sm_100 36.
    There rows at odd addresses spilled 4 to 8 with 88, and eight packs in clusters 8 in 255.
    In clusters RMSNorm, with 16 for each of five packs, spilled 20 bytes in 168, and with 16 for each of six 12 in 255.
    """
    if spec.aligned and spec.kernel != "backward":
        return spec
    working = 80 if device.arch < 100 else 88 if spec.aligned else 104
    if device.arch >= 100 and widest_column(spec) == 8:
        working += 24  # 4 bytes, three packs in 168 registers at odd addresses
    if spec.cluster > 1:
        if device.arch >= 100 and spec.shape.packs > 6:
            return spec
        working = 96 if spec.aligned or spec.shape.packs < 6 else 112
        if spec.kernel == "forward" and spec.columns_stay:
            working = working_of_shifted(NORMS[spec.operation.norm])
    if spec.kernel == "backward" and spec.cols % spec.shape.pack and spec.shape.packs == 5:
        # RMSNorm of 50257 columns, five packs in 168 registers, H100, 148 us, else 185. But without a weight clusters
        # of eight and more spilled 80 bytes.
        working = 88 if spec.columns else 96
    if any(one.itemsize > ITEMSIZE[spec.row_dtype] for one in spec.written if one.kind == "full"):
        working += 16  # y of float64 beside 16 bits spilled 4 bytes in 128
    if {one.dtype for one in spec.matrices if one.kind == "full"} == {"float16", "bfloat16"}:
        working += 8  # three packs of RMSNorm, backward beside a float32 weight, spilled 4 bytes in 128
    if spec.row_sums:
        working += 24  # numbers for rows and what a thread has added up for their gradients spilled 16 to 24 bytes
    words = sum(spec.shape.pack * one.itemsize // 4 for one in spec.matrices)
    words += len(spec.sums) * spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if spec.columns_stay:
        words += sum(spec.shape.pack * one.itemsize // 4 for one in spec.columns)
    if spec.keeps_g:
        words += spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if working + words * spec.shape.packs > registers_of(spec.threads * spec.ctas_per_sm):
        return spec
    return replace(spec, rows_stay=True, stages=spec.stages - 1 if spec.aligned else spec.stages)


def working_of_shifted(norm: Norm) -> int:
    """Registers of a forward kernel in clusters besides the row, shifted, and weight and bias: 111 and 79 in all, 50257
    columns of 16 bits."""
    return 64 if norm.subtracts_mean else 48


def registers_of_one_turn(spec: NormSpec) -> int:
    """Of a backward kernel that holds its row, and weight, in registers: with x, dy and a weight of 16 bits 64 for two
    packs, 96 for three, 160 for five.
    """
    shape = spec.shape

    def beyond(operands: Iterable[Operand], words: int) -> int:
        held = sum(shape.pack * one.itemsize // 4 for one in operands if one.kind in ("full", "column"))
        return shape.packs * max(0, held - words)

    # Numbers for rows, and what is kept for a second matrix that is written, spilled 180 to 580 bytes in 64.
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
        working += 16  # a gate's sigmoid spilled 4 bytes, few rows of 4096 cols
    if device.arch < 90 and problem.norm.subtracts_mean and shape.packs == 7:
        working += 8  # 4 to 8 bytes on sm_80, 14336 cols
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
