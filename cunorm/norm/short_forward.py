"""The forward kernels of rows that one CTA may hold.

How a row is divided follows from its length, and how it waits from how many rows there are.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from ..expression_value import FUNCTIONS
from ..operation import SEED
from .cluster_forward import WORKING
from .plain_rings import is_plain, plain_ring
from .problem import ITEMSIZE, Problem
from .registers import Needs, column_bytes, ctas_of, needs_of, registers_of, sixteen_bits, widest_column, words_to_shift
from .shapes import ceil_div, forward_shape, in_clusters, kernel_spec
from .short_rings import RING_BYTES, in_a_ring
from .spec import WARP, NormSpec

THREADS = 128  # of a CTA of rows that a warp or less holds
RESIDENT = 1024  # threads that an SM is to hold at once, where rows are many
PAIRS_BYTES = 112 << 10  # of rows to each SM: two rows of two packs a thread, where y has 8 bits


def short_forward(problem: Problem, device: Device) -> NormSpec:
    """Rows of up to 4096 packs. How they wait follows from how many there are.

    Whoever holds what of a row is the same for all, and so are the bits.
    """
    pack = 16 // ITEMSIZE[problem.row_dtype]
    shape = forward_shape(problem.norm, pack, ceil_div(problem.cols, pack))
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    needs = needs_of(problem, spec, device)
    few = _few_rows(problem, spec, needs, device)
    if few is not None:
        return few
    ctas = ctas_of(spec, needs.working + max(needs.at_once, needs.y))
    if ctas and problem.rows <= (device.sms - problem.sm_margin) * ctas * rows_per_cta:
        # All rows at once: weight and bias are asked for with x.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    if (once := _without_turns(problem, spec, device)) is not None:
        return once
    many = problem.matrix_bytes > RING_BYTES * device.sms
    if (in_pairs := _in_pairs(problem, spec, device)) is not None:
        return in_pairs
    plain, late = is_plain(problem, spec, device), _in_registers(problem, spec, needs, device)
    ring = plain_ring(problem, spec, needs, device) if plain else in_a_ring(problem, spec, needs, many, device)
    if ring is None and many:
        ring = _by_two_ctas(problem, spec, needs, device)
    return late if ring is None or (plain and _all_at_once(problem, late, device)) else ring


def _all_at_once(problem: Problem, late: NormSpec, device: Device) -> bool:
    """Whether registers hold all rows at once, weight and bias coming late, and rather that than a ring: LayerNorm of
    five warps and more, where two thirds of the places or more are taken.

    512 x 10240 8.0 us, in a ring 8.6; 256 x 20480 8.3 and 9.2. Beside float32 weights five packs and more by 256
    threads, six by 512, and half of the places: 217 x 14336 7.4 and 8.6, but 297 x 12288 8.8 and 8.0.
    """
    if not problem.norm.subtracts_mean or late.shape.threads < 5 * WARP:
        return False
    rows = (device.sms - problem.sm_margin) * late.ctas_per_sm * late.rows_per_cta
    if widest_column(late) <= 2:
        return 2 * rows < 3 * problem.rows <= 3 * rows
    shape = late.shape
    few = (shape.threads == 256 and shape.packs >= 5) or (shape.threads == 512 and shape.packs >= 6)
    return few and rows < 2 * problem.rows <= 2 * rows


def _few_rows(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """Of rows that leave SMs idle, or threads of them: more threads for each row; None where nothing wins.

    All of it with the bits of the same threads in one CTA. Beside each rule its time and that of one CTA a row, in
    bfloat16 on an H200.
    """
    shape, rows, sms = spec.shape, problem.rows, device.sms - problem.sm_margin
    spec = replace(spec, rows_per_cta=1, columns_stay=True)
    places = shape.threads * shape.packs
    long = places > 1024
    if spec.finds_scales:  # the largest of a row would be one exchange more
        if not long or 4 * rows > sms or not device.runs_clusters(8):
            return None
        # 160 registers of weight and bias beside a row at odd addresses spilled 128 bytes.
        return replace(spec, shape=in_clusters(shape, 4), columns_stay=needs.columns <= 128)
    spread = replace(spec, kernel="forward_spread")
    if 1 < shape.threads <= WARP and shape.packs > 2 and rows <= 2 * sms:
        return spread  # 1 x 1600 1.5 us, by a warp 1.75; of several warps and one matrix no gain
    two = _reads_two(spec)
    # 32 x 32768 3.98 us, in one CTA 4.9, by four CTAs 4.54; 8 x 8192 with another matrix 2.15 and 2.43.
    # One matrix, H100: 8 x 8192 2.66 us, in one CTA 2.92, beside float32 weights 2.63 and 3.16; RMSNorm 2.37 and 2.54.
    few = 4 * rows <= sms if long else 8 * rows <= sms and places == 1024
    if few and device.runs_clusters(8):
        # By two: gates of 16 x 14336 3.1 us, by four 3.3; but of five packs 10240 cols 3% longer than by three.
        held = 2 if shape.packs == 7 and shape.threads == 256 else ceil_div(shape.packs, 2)
        return replace(spread, shape=in_clusters(shape, 8), held=held)
    if not spec.aligned:
        return None
    # 64 x 32768 5.9 us and 7.15; RMSNorm of 24576 cols with a matrix added 5.3 and 4.9.
    in_two = shape.threads == 512 and shape.packs > (4 if problem.norm.subtracts_mean else 6)
    if in_two and 2 * rows <= sms and device.runs_clusters(2):
        return replace(spread, shape=in_clusters(shape, 2), held=shape.packs)
    # Beside wide vectors, and dropout, more than one row on an SM spilled 4 to 280 bytes.
    narrow = widest_column(spec) <= ITEMSIZE[problem.row_dtype] and SEED not in (one.name for one in spec.matrices)
    most = sms * (RESIDENT // 2 // shape.threads) if narrow else sms
    if shape.packs == 4 and shape.threads in (128, 256) and two and sms // 8 < rows <= most:
        # 512 x 4096 with another matrix 6.1 us and 6.5.
        return replace(spread, held=2, ctas_per_sm=ceil_div(rows, sms))
    return None


def _without_turns(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """LayerNorm, or modulated rows, of three packs a thread: all rows at once by the kernel without turns, which needs
    fewer registers. RMSNorm and two matrices gain nothing.

    1024 x 3072 5.5 us, in turns 5.7; modulated 5.45 and 6.3.
    """
    shape, resident = spec.shape, RESIDENT // spec.shape.threads
    two = _reads_two(spec)
    if two or spec.finds_scales or not (problem.norm.subtracts_mean or spec.grouped):
        return None
    # 64 registers: on sm_100 and sm_120 4 to 12 bytes spilled.
    if shape.packs != 3 or shape.threads <= WARP or not sixteen_bits(spec) or device.arch >= 100:
        return None
    if problem.rows > (device.sms - problem.sm_margin) * resident:
        return None
    return replace(
        spec, kernel="forward_spread", rows_per_cta=1, columns_stay=True, held=shape.packs, ctas_per_sm=resident
    )


def _by_two_ctas(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """LayerNorm of more than 2560 packs, of which an SM would have one row at a time, where plain_rings.py has no
    better way, as beside zero-centred float32 or float64 weights: two CTAs hold a row, keep weight and bias and have
    the next rows under way, with the same bits.

    Timed before there were better ways, 32768 cols beside 16 bits 73.6 us, by one CTA 90.3. RMSNorm took 74.8 and 71.6.
    """
    alone = len(spec.matrices) == 1 and not spec.grouped and not spec.scales
    if not (alone and spec.aligned and ITEMSIZE[problem.row_dtype] == 2 and problem.norm.subtracts_mean):
        return None
    if spec.shape.packs <= 5 or spec.shape.threads < 512 or device.arch != 90 or not device.runs_clusters(2):
        return None
    shape = in_clusters(spec.shape, 2)
    ctas = 2 if WORKING + needs.columns <= registers_of(2 * shape.threads) else 1
    return kernel_spec(problem, "forward", shape, columns_stay=True, ctas_per_sm=ctas, stages=2 if ctas == 2 else 3)


def _in_pairs(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """LayerNorm's y in 8 bits, of rows that several warps hold in two or three packs: two rows a thread, which share
    what is read of weight and bias, and of whose sums each half of a warp merges one row's.

    64 M elements, by rows: 2048 cols 60.1 us, one by one 68.1; 6144 cols 61.5 and 70.3; 12288 cols 66.9 and 77.0. Four
    packs in 80 registers gain nothing, and y in 16 bits, which waits for memory, loses 1 to 14%.
    """
    alone = len(spec.matrices) == 1 and not spec.grouped and "s" not in (one.name for one in spec.written)
    if not (alone and spec.columns and sixteen_bits(spec)) or not (spec.scales and problem.norm.subtracts_mean):
        return None
    if any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps):
        return None
    packs = spec.shape.packs
    # By one scale 12288 cols 68.2 us, one by one 61.5. From 8 M elements on: 2048 cols by rows 11.1 us and 11.8.
    few_packs, enough = packs <= (3 if spec.finds_scales else 2), PAIRS_BYTES if packs <= 2 else RING_BYTES
    if spec.shape.threads <= WARP or not few_packs or problem.matrix_bytes <= enough * device.sms:
        return None
    if device.arch != 90 or problem.sm_margin:
        return None
    return replace(spec, kernel="forward_pairs", rows_per_cta=2, ctas_per_sm=ctas_of(spec, 64), streamed_x=True)


def _in_registers(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec:
    """Weight and bias come late, from L1. Threads enough: three packs beside a float32 weight, 11008 cols, 78 us with
    1536 on an SM and 88 with 1024.
    """
    shape, itemsize = spec.shape, ITEMSIZE[problem.row_dtype]
    # Past L1, which is left to weight and bias: 64 M elements of 5760 cols 68.7 and 67.9. But not two matrices of rows
    # that a warp holds: rms_norm_gated of 128 cols 102.1 us, by way of L1 96.2; of 1024 cols as fast.
    two = _reads_two(spec)
    by_l1 = spec.aligned and shape.threads <= WARP and two
    spec = replace(
        spec,
        streamed_x=not by_l1 and (spec.aligned or spec.streamed_x),
        # 1728 cols by CTAs of two warps 68.9, of four 70.0.
        rows_per_cta=max(1, spec.rows_per_cta // 2) if shape.threads <= WARP else 1,
    )
    width = widest_column(spec)
    if shape.threads <= 8 and shape.packs <= 2 and sixteen_bits(spec) and is_plain(problem, spec, device):
        # Weight and bias asked for with x: heads of 64 cols, H100, 13.9 us, late 14.2. Of 256 they gain nothing.
        return replace(spec, columns_stay=True, ctas_per_sm=ctas_of(spec, 64, RESIDENT))
    narrow = spec.aligned and len(spec.matrices) == 1 and width <= max(4, itemsize) and not needs.y
    narrow = narrow and not (spec.grouped and spec.scales)  # 4 bytes spilled on sm_80, 128 cols
    # 16 bytes on sm_100, y of float64, 4104 cols
    narrow = narrow and all(one.itemsize <= max(4, itemsize) for one in spec.written)
    # On sm_80 two packs spilled 8 bytes in 40 registers, on sm_100 and sm_120 three 24 to 40, on sm_90 two of LayerNorm
    # beside a zero-centred float32 weight 4.
    few = device.arch == 90 or (device.arch > 90 and shape.packs < 3)
    if problem.norm.subtracts_mean and width == 4 and shape.packs == 2 and problem.is_zero_centred:
        few = False
    most, words = (1536, 28 if few else 40) if shape.packs <= 3 and narrow else (RESIDENT, needs.working)
    if device.arch == 90 and not spec.scales and sixteen_bits(spec):
        if spec.grouped and narrow:
            # An SM has few rows of a group at once, so that late its vectors come from L2: modulated rows of 4096 cols
            # 82 us, with x 72. Not of six packs, 3072 cols 73 and 78.
            ctas = ctas_of(spec, 16 + 16 * shape.packs)
            if shape.packs in (4, 5) and ctas * spec.threads >= 640:
                return replace(spec, columns_stay=True, ctas_per_sm=ctas)
        if shape.packs == 4 and sum(one.kind != "seed" for one in spec.matrices) == 2 and _fits_64_registers(spec):
            return replace(spec, ctas_per_sm=ctas_of(spec, 64))
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
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, words + max(needs.row, needs.y), most)))


def holds_twice(row_dtype: str, cols: int) -> bool:
    """Whether one kernel does two norms of such rows, one after the other: a CTA holds them in six packs a thread.

    With eight, at odd addresses, it spilled 48 bytes on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_twice(problem: Problem, device: Device) -> NormSpec:
    """That kernel. A row has the shape of either norm's own, and so its bits."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    shape = forward_shape(problem.norm, pack, packs)
    rows_per_cta = THREADS // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward_twice", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    # x and residual wait at once; of either norm's vectors a pack comes late, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + words_to_shift(spec) * (1 if spec.aligned else 4)
    waiting = shape.packs * sum(pack * one.itemsize // 4 for one in spec.matrices) * (1 if spec.aligned else 2)
    ctas = ctas_of(spec, working + waiting + column_bytes(problem, shape) // 4, RESIDENT)
    if spec.aligned and problem.rows <= (device.sms - problem.sm_margin) * ctas * rows_per_cta:
        # All rows at once, as in short_forward: else they wait for either weight after the sums.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    return replace(spec, ctas_per_sm=max(1, ctas_of(spec, working + waiting, RESIDENT)))


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


def _reads_two(spec: NormSpec) -> bool:
    """Whether it reads another matrix beside x."""
    return sum(one.kind == "full" for one in spec.matrices) > 1
