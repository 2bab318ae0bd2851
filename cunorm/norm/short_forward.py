"""The forward kernels of rows that one CTA may hold.

How a row is divided follows from its length, and how it waits from how many rows there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..device import Device
from ..expression_value import FUNCTIONS
from ..operation import NORMS
from .clusters import WORKING
from .problem import BLOCK, ITEMSIZE, Problem
from .registers import column_bytes, ctas_of, registers_of, widest_column, with_shifted, words_to_shift
from .shapes import ceil_div, forward_shape, in_clusters, kernel_spec
from .spec import BLOCK_VALUES, WARP, NormSpec, dynamic_shared, shared_memory

THREADS = 128  # of a CTA of rows that a warp or less holds
RESIDENT = 1024  # threads that an SM is to hold at once, where rows are many
# Of rows to each SM. Of more, rows in registers are faster than a ring: 64 M elements 0.95 and 0.91; 8 M 0.83 and 0.92.
RING_BYTES = 512 << 10
UNDER_WAY = 52 << 10  # bytes of x that an SM asks for ahead, where y has 8 bits


def short_forward(problem: Problem, device: Device) -> NormSpec:
    """Rows of up to 4096 packs. How they wait follows from how many there are.

    Whoever holds what of a row is the same for all, and so are the bits.
    """
    pack = 16 // ITEMSIZE[problem.row_dtype]
    shape = forward_shape(pack, ceil_div(problem.cols, pack))
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    needs = _needs(problem, spec, device)
    alone = _rows_alone(problem, spec, needs, device)
    if alone is not None:
        return alone
    ctas = ctas_of(spec, needs.working + max(needs.at_once, needs.y))
    if ctas and problem.rows <= (device.sms - problem.sm_margin) * ctas * rows_per_cta:
        # All rows at once: weight and bias are asked for with x.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    many = bytes_per_sm(problem, device) > RING_BYTES
    if many and (by_two := _by_two_ctas(problem, spec, needs, device)) is not None:
        return by_two
    return _in_a_ring(problem, spec, needs, many, device) or _in_registers(problem, spec, needs, device)


class _Needs(NamedTuple):
    """Registers of a thread, for what it keeps of a row at once."""

    working: int  # besides the others
    columns: int  # weight and bias
    row: int  # on its way: at odd addresses two words for one
    at_once: int  # the two, a column at an odd address one word for each element
    y: int  # held as float32 while the largest of a row, or of blocks, is looked for, and the packs that come later


def _needs(problem: Problem, spec: NormSpec, device: Device) -> _Needs:
    shape = spec.shape
    working = 44 if problem.row_dtype != "float64" else 72
    if spec.scales:
        working += 12 if spec.aligned else 32
    if device.arch < 90 and any(step.function in FUNCTIONS for step in problem.operation.epilogue.steps):
        working += 16  # a gate's sigmoid spilled 4 bytes, few rows of 4096 cols
    if not spec.aligned:
        working += words_to_shift(spec)
    matrices = (1 + len(spec.beside)) * (2 if len(spec.inputs) > 1 else 1)
    row = shape.packs * shape.pack * ITEMSIZE[problem.row_dtype] // 4 * matrices * (1 if spec.aligned else 2)
    columns = column_bytes(problem, shape) // 4
    at_once = row + columns * (1 if spec.columns_aligned else 2)
    held = _packs_held(spec)
    y = held * shape.pack + (shape.packs - held) * row // shape.packs if held else 0
    return _Needs(working, columns, row, at_once, y)


def _packs_held(spec: NormSpec) -> int:
    """Of a thread, whose y is held at once: store_scaled in kernels_cu/float8.cuh."""
    shape = spec.shape
    if spec.scales == "per_row":
        return shape.packs
    if spec.scales != "per_block":
        return 0
    of_block = max(1, BLOCK // shape.pack // shape.lanes)  # packs of a thread
    blocks = ceil_div(shape.packs, of_block)
    turns = ceil_div(blocks, max(1, BLOCK_VALUES // (of_block * shape.pack)))
    return min(shape.packs, ceil_div(blocks, turns) * of_block)


def _rows_alone(problem: Problem, spec: NormSpec, needs: _Needs, device: Device) -> NormSpec | None:
    """Of fewer rows than there are SMs: a thread for each pack, or a cluster for each row; None where neither wins."""
    shape, sms = spec.shape, device.sms - problem.sm_margin
    spec = replace(spec, rows_per_cta=1, columns_stay=True)
    spread = replace(spec, kernel="forward_spread")
    can_spread = not spec.finds_scales  # the largest of a row would be one exchange more
    if can_spread and 1 < shape.threads <= WARP and shape.packs > 2 and problem.rows <= 2 * sms:
        return spread  # 1 x 1600 1.5 us, by a warp 1.75; of several warps no gain
    if problem.cols <= 1024 * shape.pack or not device.runs_clusters(8):
        return None
    few_threads = shape.threads * shape.packs <= 8 * 1024
    if can_spread and few_threads and 8 * problem.rows <= sms:  # 1 x 16384 2.3 us, in one CTA 3.2
        return replace(spread, shape=in_clusters(shape, 8))
    if 4 * problem.rows <= sms:  # 32 x 16384 3.5 us, in one CTA 3.8
        # Beside a row at odd addresses 160 registers of weight and bias spilled 128 bytes.
        return replace(spec, shape=in_clusters(shape, 4), columns_stay=needs.columns <= 128)
    return None


def _by_two_ctas(problem: Problem, spec: NormSpec, needs: _Needs, device: Device) -> NormSpec | None:
    """LayerNorm of more than 2560 packs, of which an SM would have one row at a time: two CTAs hold a row, keep weight
    and bias and have the next rows under way, with the same bits.

    32768 cols 73.6 us, by one CTA 90.3; with a float32 weight 74.1 and 107.8. RMSNorm took 74.8 and 71.6.
    """
    alone = len(spec.matrices) == 1 and not spec.grouped and not spec.scales
    if not (alone and spec.aligned and ITEMSIZE[problem.row_dtype] == 2 and problem.norm.subtracts_mean):
        return None
    if spec.shape.packs <= 5 or spec.shape.threads < 512 or device.arch != 90 or not device.runs_clusters(2):
        return None
    shape = in_clusters(spec.shape, 2)
    ctas = 2 if WORKING + needs.columns <= registers_of(2 * shape.threads) else 1
    return kernel_spec(problem, "forward", shape, columns_stay=True, ctas_per_sm=ctas, stages=2 if ctas == 2 else 3)


def _in_a_ring(problem: Problem, spec: NormSpec, needs: _Needs, many: bool, device: Device) -> NormSpec | None:
    """Rows that wait in shared memory, where that is faster than registers."""
    shape = spec.shape
    if many and device.arch == 90 and spec.scales and (unpacked := _unpacked_ring(spec, needs, device)) is not None:
        return unpacked
    # y in 8 bits by one scale, or by rows that a warp holds: 64 M elements of 4096 cols 53.6 us, in registers 59.0. But
    # of 12288 cols, one CTA on an SM, 67.8 and 61.3, and of 7168, where some threads have a pack less, 62.9 and 57.0.
    whole = not problem.norm.subtracts_mean or spec.cols == shape.capacity
    in_warp = shape.threads <= WARP and spec.scales in ("one", "per_row")
    narrow = in_warp or (shape.threads < 512 and spec.scales == "one" and whole)
    if shape.packs <= 2 or len(spec.matrices) > 1 or spec.grouped or not (narrow or not many):
        return None
    under_way = 48 if not many else 42 if narrow else 32
    # There y is made after x has been summed up: 96 registers are enough for four packs.
    late = narrow and spec.aligned and device.arch < 100
    registers = needs.working - 20 if late else needs.working + needs.y
    return _short_ring(spec, needs.columns, registers, under_way << 10, device)


def _unpacked_ring(spec: NormSpec, needs: _Needs, device: Device) -> NormSpec | None:
    """y in 8 bits: a third less to move than of 16, and more to compute. A thread reads its packs once, and keeps what
    they hold unpacked beside weight and bias; None where that is slower, or registers leave too few threads.

    RMSNorm of 64 M elements, 7168 cols, by rows 51.5 us, in registers 56.2; 16384 cols 50.9 and 58.0; 4096 cols by
    blocks 50.8 and 54.5. LayerNorm by one scale, 4096 cols, 51.1; packed 54.7.
    """
    shape, layer_norm = spec.shape, NORMS[spec.operation.norm].subtracts_mean
    alone = len(spec.matrices) == 1 and not spec.grouped and "s" not in (one.name for one in spec.written)
    if not (alone and _sixteen_bits(spec)) or any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps):
        return None
    # LayerNorm's rows of several warps: 4096 cols 61.3 us, in registers 57.1. By ncu the scheduler is busy 68% of the
    # time with four of its warps in a ring, 73% with eight. RMSNorm's of three packs, 12288 cols: 57.2 and 55.5.
    in_warp = shape.threads <= WARP
    if not in_warp and layer_norm and spec.finds_scales:
        return None
    if shape.packs < (3 if in_warp else 2 if spec.scales == "one" and not layer_norm else 4):
        return None
    words = max(72, needs.columns + shape.packs * shape.pack + (32 if layer_norm else 24))
    of_cta = spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta
    ctas = min(max(1, round(UNDER_WAY / of_cta)), ctas_of(spec, words))
    # LayerNorm of 1600 cols, 384 threads, by blocks 60.2 us, in registers 65.4.
    if ctas * spec.threads < (384 if in_warp and spec.scales == "per_block" else 512):
        return None
    # Three places where one row fills an SM's threads: 16384 cols 50.9 us, two 54.7.
    stages = 1 + max(1, round(UNDER_WAY / (ctas * of_cta)))
    spec = replace(spec, ctas_per_sm=ctas, stages=stages, ask_early=True, columns_stay=True, unpacked=True)
    fits = ctas * (shared_memory(spec) + dynamic_shared(spec) + 1024) <= device.shared + 1024
    return spec if fits else None


def _in_registers(problem: Problem, spec: NormSpec, needs: _Needs, device: Device) -> NormSpec:
    """Weight and bias come late, from L1. Threads enough: three packs beside a float32 weight, 11008 cols, 78 us with
    1536 on an SM and 88 with 1024.
    """
    shape, itemsize = spec.shape, ITEMSIZE[problem.row_dtype]
    spec = replace(
        spec,
        # Past L1, which is left to weight and bias: 64 M elements of 5760 cols 68.7 and 67.9.
        streamed_x=spec.aligned or spec.streamed_x,
        # 1728 cols by CTAs of two warps 68.9, of four 70.0.
        rows_per_cta=max(1, spec.rows_per_cta // 2) if shape.threads <= WARP else 1,
    )
    width = widest_column(spec)
    narrow = spec.aligned and len(spec.matrices) == 1 and width <= max(4, itemsize) and not needs.y
    narrow = narrow and not (spec.grouped and spec.scales)  # 4 bytes spilled on sm_80, 128 cols
    # On sm_80 two packs spilled 8 bytes in 40 registers.
    most, words = (1536, 28 if device.arch >= 90 else 40) if shape.packs <= 3 and narrow else (RESIDENT, needs.working)
    if device.arch == 90 and not spec.scales and _sixteen_bits(spec):
        if spec.grouped and narrow:
            # An SM has few rows of a group at once, so that late its vectors come from L2: modulated rows of 4096 cols
            # 82 us, with x 72. Not of six packs, 3072 cols 73 and 78.
            ctas = ctas_of(spec, 16 + 16 * shape.packs)
            if shape.packs in (4, 5) and ctas * spec.threads >= 640:
                return replace(spec, columns_stay=True, ctas_per_sm=ctas)
        if shape.packs == 4 and len(spec.matrices) == 2 and _fits_64_registers(spec):
            return replace(spec, ctas_per_sm=ctas_of(spec, 64))
    if needs.y and spec.aligned and spec.columns_aligned:  # 64 registers for four packs, 80 for five, 96 for seven
        words = 32 + 4 * (spec.rows_per_cta > 1) + width // 4 * shape.pack + 8 * (itemsize == 4)
        # Beside a residual 64 registers for four packs spilled 4 bytes; on sm_100 108 for seven 8.
        words += (8 if device.arch < 100 else 16) * (len(spec.matrices) - 1)
        if width < 4 and len(spec.matrices) == 1 and shape.packs <= (2 if problem.norm.subtracts_mean else 3):
            most, words = 1536, 40 - needs.y
        # Four packs alone spilled 8 to 16 bytes there too, and vectors of groups 8 on sm_86.
        words += 8 * (device.arch >= 100 or (device.arch < 90 and spec.grouped))
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, words + max(needs.row, needs.y), most)))


def holds_twice(row_dtype: str, cols: int) -> bool:
    """Whether one kernel does two norms of such rows, one after the other: a CTA holds them in six packs a thread.

    With eight, at odd addresses, it spilled 48 bytes on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_twice(problem: Problem) -> NormSpec:
    """That kernel. A row has the shape of either norm's own, and so its bits."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    shape = forward_shape(pack, packs)
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward_twice", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    # x and residual wait at once; of either norm's vectors a pack comes late, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + words_to_shift(spec) * (1 if spec.aligned else 4)
    waiting = shape.packs * sum(pack * one.itemsize // 4 for one in spec.matrices) * (1 if spec.aligned else 2)
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, working + waiting, RESIDENT)))


def _sixteen_bits(spec: NormSpec) -> bool:
    """Whether every array has 16 bits, and every pack begins at a multiple of its size."""
    arrays = (one.itemsize for one in spec.operands if one.kind in ("full", "column", "group"))
    return spec.aligned and spec.columns_aligned and max(arrays) == 2


def _fits_64_registers(spec: NormSpec) -> bool:
    """Whether two matrices, four packs of each, are to have 64 registers: 1024 threads on an SM.

    Then rows of 16384 cols are two on an SM and not one: add_layer_norm 179 us and 137, rms_norm_gated 120 and 98.
    """
    gates = any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps)
    if spec.beside and not gates:  # a sum after the norm spilled 8 to 20 bytes
        return False
    # Of a sum alone, in shorter rows, 768 threads are as fast.
    return len(spec.columns) <= 3 and (spec.grouped or gates or spec.shape.threads == 512)


def bytes_per_sm(problem: Problem, device: Device) -> float:
    return problem.rows * problem.cols * ITEMSIZE[problem.row_dtype] / device.sms


def _short_ring(spec: NormSpec, column_words: int, working: int, under_way: int, device: Device) -> NormSpec | None:
    """Two places for each row group, and CTAs that ask for `under_way` bytes of rows on an SM.

    None if less than half of them fit beside weight and bias, which stay in registers.

    In shared memory they take 40 us to come, all SMs asking L2 for the same lines; late from L1 they cost 4 of 11 us.
    """
    # RMSNorm of four packs spilled 12 bytes in 80 registers.
    words = working + (26 if spec.shape.packs == 4 else 14)
    spec = replace(spec, stages=2, ask_early=True, columns_stay=True)
    needed = shared_memory(spec) + dynamic_shared(spec)
    wanted = max(1, round(under_way / (spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta)))
    ctas = min(wanted, ctas_of(spec, words + column_words), (device.shared + 1024) // (needed + 1024))
    return with_shifted(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None
