"""Forward rows that wait in registers, to which weight and bias come a pack at a time, from L1."""

from __future__ import annotations

from dataclasses import replace

from ..expression.value import FUNCTIONS
from ..kernel.device import Device
from .plain_rings import is_plain
from .problem import ITEMSIZE, Problem
from .registers import RESIDENT, Needs, ctas_of, sixteen_bits, widest_column
from .spec import WARP, NormSpec


def late_columns(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec:
    """Weight and bias come late, from L1. Threads enough: three packs beside a float32 weight, 11008 cols, 78 us with
    1536 on an SM and 88 with 1024.
    """
    shape = spec.shape
    # Past L1, which is left to weight and bias: 64 M elements of 5760 cols 68.7 and 67.9. But not two matrices of rows
    # that a warp holds: rms_norm_gated of 128 cols 102.1 us, by way of L1 96.2; of 1024 cols as fast.
    by_l1 = spec.aligned and shape.threads <= WARP and spec.reads_two
    spec = replace(
        spec,
        streamed_x=not by_l1 and (spec.aligned or spec.streamed_x),
        # 1728 cols by CTAs of two warps 68.9, of four 70.0.
        rows_per_cta=max(1, spec.rows_per_cta // 2) if shape.threads <= WARP else 1,
    )
    if shape.threads <= 8 and shape.packs <= 2 and sixteen_bits(spec) and is_plain(problem, spec, device):
        # Weight and bias asked for with x: heads of 64 cols, H100, 13.9 us, late 14.2. Of 256 they gain nothing.
        return replace(spec, columns_stay=True, ctas_per_sm=ctas_of(spec, 64, RESIDENT))
    if device.arch == 90 and not spec.scales and sixteen_bits(spec):
        if spec.grouped and _has_few_words(spec, needs):
            # An SM has few rows of a group at once, so that late its vectors come from L2: modulated rows of 4096 cols
            # 82 us, with x 72. Not of six packs, 3072 cols 73 and 78.
            ctas = ctas_of(spec, 16 + 16 * shape.packs)
            if shape.packs in (4, 5) and ctas * spec.threads >= 640:
                return replace(spec, columns_stay=True, ctas_per_sm=ctas)
        if shape.packs == 4 and sum(one.kind != "seed" for one in spec.matrices) == 2 and _fits_64_registers(spec):
            return replace(spec, ctas_per_sm=ctas_of(spec, 64))
    return replace(spec, ctas_per_sm=max(1, _ctas_beside_late_columns(problem, spec, needs, device)))


def _has_few_words(spec: NormSpec, needs: Needs) -> bool:
    """Whether one matrix is read, and nothing is so wide that a thread needs more registers for it."""
    itemsize = ITEMSIZE[spec.row_dtype]
    narrow = spec.aligned and len(spec.matrices) == 1 and widest_column(spec) <= max(4, itemsize) and not needs.y
    # 4 bytes spilled on sm_80, 128 cols; 16 on sm_100, y of float64, 4104 cols
    return (
        narrow and not (spec.grouped and spec.scales) and all(one.itemsize <= max(4, itemsize) for one in spec.written)
    )


def _ctas_beside_late_columns(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> int:
    """CTAs of an SM, by the registers of a thread to which weight and bias come a pack at a time."""
    shape, itemsize, width = spec.shape, ITEMSIZE[problem.row_dtype], widest_column(spec)
    # On sm_80 two packs spilled 8 bytes in 40 registers, on sm_100 and sm_120 three 24 to 40, on sm_90 two of LayerNorm
    # beside a float32 weight 4, where it is zero-centred or 2048 cols fill all places.
    few = device.arch == 90 or (device.arch > 90 and shape.packs < 3)
    if problem.norm.subtracts_mean and width == 4 and shape.packs == 2:
        few = few and not problem.is_zero_centred and spec.cols < shape.capacity
    most, words = (
        (1536, 28 if few else 40) if shape.packs <= 3 and _has_few_words(spec, needs) else (RESIDENT, needs.working)
    )
    if needs.y and spec.aligned and spec.columns_aligned:  # 64 registers for four packs, 80 for five, 96 for seven
        words = 32 + 4 * (spec.rows_per_cta > 1) + width // 4 * shape.pack + 8 * (itemsize == 4)
        # Beside a residual 64 registers for four packs spilled 4 bytes; on sm_100 108 for seven 8.
        words += (8 if device.arch < 100 else 16) * (len(spec.matrices) - 1)
        if width < 4 and len(spec.matrices) == 1 and shape.packs <= (2 if problem.norm.subtracts_mean else 3):
            most, words = 1536, 40 - needs.y
        # Four packs alone spilled 8 to 16 bytes there too, five and seven 8 to 20 in 80; vectors of groups 8 on sm_86,
        # LayerNorm of two and four packs 4 on sm_80.
        words += 8 * (device.arch >= 100 or (device.arch < 90 and (spec.grouped or problem.norm.subtracts_mean)))
        words += 24 * (device.arch >= 100 and shape.packs >= 5)
    elif device.arch >= 100 and shape.packs == 5 and not sixteen_bits(spec):
        words += 8  # float32 weights, or y of more bits, spilled 4 to 8 bytes in 64 on sm_120
    if shape.threads == 1 and shape.packs > 2 and problem.norm.subtracts_mean:
        words += 8  # 24 and 40 cols spilled 4 to 12 bytes by NVRTC 13.0
    return ctas_of(spec, words + max(needs.row, needs.y), most)


def _fits_64_registers(spec: NormSpec) -> bool:
    """Whether two matrices, four packs of each, are to have 64 registers: 1024 threads on an SM.

    Then rows of 16384 cols are two on an SM and not one: add_layer_norm 179 us and 137, rms_norm_gated 120 and 98,
    add_rms_norm with dropout 151 and 135.
    """
    gates = any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps)
    if spec.beside and not gates:  # a sum after the norm spilled 8 to 20 bytes
        return False
    # Of a sum alone, in shorter rows, 768 threads are as fast.
    return len(spec.columns) <= 3 and (spec.grouped or gates or spec.shape.threads == 512)
