"""How many registers a thread of a kernel takes, as far as its plan depends on it, and how many CTAs then fit."""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from .problem import ITEMSIZE, Problem
from .spec import WARP, NormSpec, RowShape


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


def with_shifted(spec: NormSpec, device: Device) -> NormSpec:
    """The same, with packs at odd addresses kept, once shifted, where a thread has registers for them.

    Beside them, the sums of its columns and what it keeps of weight and bias it takes about 80: with 24 for each pack
    it spilled 76 bytes in 168 registers with four packs, 136 in 128 with three, and none in 128 with two; on sm_100 36.
    In clusters RMSNorm, with 16 for each of five packs, spilled 20 bytes in 168, and with 16 for each of six 12 in 255.
    """
    working = 80 if device.arch < 100 else 88
    if spec.cluster > 1:
        working = 96 if spec.shape.packs < 6 else 112
    if any(one.itemsize > ITEMSIZE[spec.row_dtype] for one in spec.written if one.kind == "full"):
        working += 16  # y of float64 beside 16 bits spilled 4 bytes in 128
    if spec.row_sums:
        working += 24  # numbers for rows and what a thread has added up for their gradients spilled 16 to 24 bytes
    words = sum(spec.shape.pack * one.itemsize // 4 for one in spec.matrices)
    words += len(spec.sums) * spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if spec.columns_stay:
        words += sum(spec.shape.pack * one.itemsize // 4 for one in spec.columns)
    fit = ctas_of(spec, working + words * spec.shape.packs) >= spec.ctas_per_sm
    return replace(spec, shifted_stay=not spec.aligned and fit)
