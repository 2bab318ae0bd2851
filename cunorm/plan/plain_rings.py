"""Rows of 16 bits of LayerNorm and RMSNorm, with nothing before or after them, that wait in shared memory on Hopper.

An H200 was searched for how: bfloat16, us in the comments.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..kernel.device import Device
from ..operation import NORMS, is_named
from .problem import Problem
from .registers import Needs, ctas_of, sixteen_bits, widest_column
from .shapes import in_clusters
from .short_rings import RING_BYTES, bytes_under_way, more_in_a_ring, short_ring
from .spec import WARP, NormSpec, RowShape

# Bytes of x that an SM asks for ahead: by LayerNorm, many rows and few, and by RMSNorm.
MANY_UNDER_WAY, FEW_UNDER_WAY, RMS_UNDER_WAY = 32 << 10, 55 << 10, 64 << 10
# Of rows to each SM (_most_bytes): LayerNorm of 4096 cols, 32 M elements, in registers 35.9 us, in a ring 39.2; 24 M
# 27.8 and 29.2, 16 M 19.5 and 19.8, 12 M 15.6 and 15.1.
PLAIN_RING_BYTES = 320 << 10
RMS_TWO_PACKS_BYTES = 192 << 10  # likewise: 2560 cols, 16 M elements, 18.5 us, in a ring 19.2; 8 M 10.7 and 10.3
# Likewise, of LayerNorm beside float32 weight and bias: of fewer a thread keeps its rows (_few_wide_rows).
FEW_WIDE_BYTES = 64 << 10
# By threads and packs of a row, beside weights of 16 bits and of 32: CTAs of a cluster, places, and CTAs of an SM. With
# one place a thread keeps its row, so that the place is free for the next one. More threads than stand here spilled. In
# clusters an SM has parts of more rows, and more threads, than whole rows would leave room for. LayerNorm, 8 M
# elements, us, and by two places: 3072 cols 10.4 and 10.6, 8192 10.5 and 10.9, 12288 11.0 and 11.9; 28672 11.2, and by
# a CTA a row 13.8. None: by the rules below.
Waits = tuple[int, int, int] | None
RINGS: dict[str, dict[tuple[int, int], tuple[Waits, Waits]]] = {
    "layer_norm": {
        (32, 4): ((1, 1, 5), None),
        (32, 5): ((1, 1, 5), None),
        (32, 6): ((1, 1, 4), None),
        (32, 7): ((1, 1, 4), None),
        (32, 8): ((1, 1, 4), None),
        (64, 5): ((1, 1, 8), None),
        (96, 3): ((1, 1, 8), None),
        (128, 2): (None, (1, 2, 7)),
        (128, 3): ((1, 1, 6), (1, 2, 5)),
        (128, 4): ((1, 1, 5), (1, 1, 4)),
        (160, 4): ((1, 1, 4), None),
        (192, 3): ((2, 1, 8), None),
        (192, 5): ((2, 1, 5), (1, 1, 2)),
        (224, 3): (None, (1, 1, 2)),
        (256, 3): ((2, 1, 6), (2, 1, 4)),
        (256, 4): ((2, 1, 5), (2, 1, 4)),
        (256, 5): ((2, 1, 4), (2, 1, 3)),
        (256, 7): ((2, 1, 3), (2, 1, 2)),
        (512, 3): ((4, 1, 6), (4, 1, 4)),
        (512, 4): ((4, 1, 5), (4, 1, 4)),
        (512, 5): ((4, 1, 4), (4, 1, 3)),
        (512, 6): ((8, 1, 6), (4, 1, 3)),
        (512, 7): ((8, 1, 6), (8, 1, 4)),
        (512, 8): ((8, 1, 6), (8, 1, 4)),
    },
    "rms_norm": {
        (96, 3): ((1, 1, 10), None),
        (128, 2): ((1, 1, 8), (1, 1, 8)),
        (128, 3): ((1, 1, 8), (1, 1, 7)),
        (128, 4): (None, (1, 2, 7)),
        (160, 2): ((1, 1, 7), None),
        (160, 4): ((1, 1, 5), (1, 2, 5)),
        (192, 3): ((1, 1, 5), (1, 2, 5)),
        (192, 5): ((2, 1, 6), (1, 1, 3)),
        (224, 3): ((1, 1, 4), (1, 2, 4)),
        (256, 3): ((2, 1, 8), (2, 1, 7)),
        (256, 4): ((2, 1, 6), (2, 1, 5)),
        (256, 5): ((2, 1, 5), (2, 1, 4)),
        (512, 3): ((4, 1, 8), (4, 1, 7)),
        (512, 4): ((4, 1, 7), (4, 1, 5)),
        (512, 5): ((4, 1, 5), (4, 1, 4)),
        (512, 6): ((8, 1, 8), (4, 1, 3)),
        (512, 7): ((8, 1, 8), (4, 2, 3)),
        (512, 8): ((8, 1, 8), (4, 2, 3)),
    },
}
# LayerNorm's rows that fill all places, which need fewer registers, by threads, packs and whether weights have 32 bits:
# 5120 cols beside such, 8 M elements, 10.5 us, by two places 11.5; 5376 cols beside 16 bits 10.1 and 11.1.
FULL_RINGS: dict[tuple[int, int, bool], Waits] = {
    (96, 3, True): (1, 1, 6),
    (160, 4, True): (1, 1, 3),
    (192, 3, True): (1, 1, 3),
    (224, 3, False): (1, 1, 4),
}
# LayerNorm's many rows where memory is slow, of which an SM then asks for less at once, by threads, packs and whether
# weights have 32 bits. H100, 64 M elements: 32768 cols 96.5 us, by 48 KB 100.8; 24576 beside float32 weights 95.5, by
# 36 KB 97.9.
SLOW_RINGS: dict[tuple[int, int, bool], Waits] = {(512, 8, False): (8, 1, 4), (512, 6, True): (8, 1, 5)}
# Where memory is slow, LayerNorm's rows that make three turns or more, beside weights of 16 bits and of 32. H100, 8 M
# elements: 4480 cols 13.2 us, by one place 13.6, 7040 13.4 and 13.7, beside float32 weights 6144 13.5 and 13.9; but of
# 1.8 turns, 4 M elements, 10 to 20% more, and of 20 M up to 4%.
SLOW_TURNS, SLOW_TURNS_BYTES = 3, 192 << 10  # at least; of a matrix to each SM at most
SLOW_TURN_RINGS: dict[tuple[int, int], tuple[Waits, Waits]] = {
    (160, 4): (None, (1, 3, 4)),
    (192, 3): ((2, 3, 8), (2, 3, 6)),
    (192, 5): ((2, 3, 5), (2, 3, 5)),
    (256, 3): ((2, 3, 6), (2, 3, 5)),
    (256, 4): ((2, 3, 5), None),
    (256, 5): ((2, 3, 4), None),
    (512, 3): (None, (4, 3, 5)),
}
# And many rows beside float32 weights: 64 M elements of 5696 cols 72.3 us, as of few 75.5; of 5184 cols in registers
# 76.3, as of few 78.5.
MANY_WIDE_RINGS: dict[tuple[int, int], Waits] = {(64, 5): (1, 1, 6), (224, 3): None, (256, 3): (2, 2, 5)}


def is_plain(problem: Problem, spec: NormSpec, device: Device) -> bool:
    """Whether the searches were of such rows."""
    alone = is_named(problem.operation) and len(spec.matrices) == 1 and not spec.grouped and not spec.scales
    return alone and device.arch == 90 and sixteen_bits(spec, spec.matrices)


def plain_ring(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """The kernel of rows that wait in shared memory; None where registers win."""
    shape, layer_norm, wide = spec.shape, problem.norm.subtracts_mean, widest_column(spec) == 4
    many = problem.matrix_bytes > RING_BYTES * device.sms
    # Where gamma is zero-centred five packs beside float32 weights spilled 8 bytes, four beside 16 bits, 1024 and 4096
    # cols, 108 to 136.
    spills = layer_norm and (wide or (shape.packs == 4 and shape.threads in (WARP, 4 * WARP)))
    searched = widest_column(spec) <= 4 and not (spills and problem.is_zero_centred)
    slow = device.memory_is_slow and problem.matrix_bytes > PLAIN_RING_BYTES * device.sms
    waits = None
    if searched and device.runs_clusters(8):
        waits = _of_some_turns(problem, shape, wide, device) or _waits(spec, wide, many, slow)
    if problem.matrix_bytes > _most_bytes(spec, wide, waits, device) * device.sms:
        return None
    if waits:
        size, stages, ctas = waits
        # RMSNorm of hardly more rows than run at once: by two places 256 x 16384 7.1 us, by whole rows 6.5; 256 x 12288
        # 6.3 and 5.6.
        if layer_norm or _turns(problem, waits, device) > 1.2:
            spec = replace(spec, stages=stages, rows_stay=stages == 1, ask_early=stages < 3, columns_stay=True)
            return replace(spec, shape=in_clusters(shape, size), ctas_per_sm=ctas)
    of_norm = _layer_norm_ring if layer_norm else _rms_norm_ring
    return of_norm(problem, spec, needs, many, device)


def _most_bytes(spec: NormSpec, wide: bool, waits: Waits, device: Device) -> float:
    """Of a matrix, to each SM, of which rows wait in a ring: of more, registers win.

    LayerNorm of rows that 512 threads hold, and beside wide weights, stays in a ring: 64 M elements of 24576 cols 69.6
    us, by two CTAs a row 72.3. So does that of two and three warps for longer: 24 M of 2240 cols 28.1, in registers
    30.3; but 64 M of 2112 cols on an H100 101.4 and 95.4. Late, from L1, wide weight and bias cost more: 64 M elements
    of 4992 cols 74.5 us, in a ring 72.1, of 14336 84.8 and 74.4; but of 704 cols 67.7 and 70.6. Where memory is slower
    that is hidden: H100, 1088 cols 92.8 and 100.7, 5056 93.3 and 97.7, 12288 93.5 and 96.1, and beside 16 bits 16384
    92.6 and 94.9, 28672 93.8 and 96.0; but of two and three warps 2112 cols 98.2 and 97.2.
    """
    shape, places = spec.shape, spec.shape.threads * spec.shape.packs
    few_warps = WARP < shape.threads < 128
    if NORMS[spec.operation.norm].subtracts_mean:
        if device.memory_is_slow and not few_warps and (places <= 1024 or shape.packs <= (5 if wide else 7)):
            return PLAIN_RING_BYTES
        if wide and len(spec.columns) == 2 and (waits or 96 < places <= 640):
            return inf
        if not (wide or few_warps or shape.threads == 512):
            return PLAIN_RING_BYTES
        return inf if waits and places > 1536 else RING_BYTES
    most = RING_BYTES if few_warps else PLAIN_RING_BYTES
    return min(most, RMS_TWO_PACKS_BYTES) if shape.packs <= 2 else most


def _waits(spec: NormSpec, wide: bool, many: bool, slow: bool) -> Waits:
    """How rows of such threads wait, by the tables. `slow`: they are many, and memory is slow."""
    shape, norm = spec.shape, spec.operation.norm
    held = shape.threads, shape.packs
    if norm == "layer_norm":
        if slow and (*held, wide) in SLOW_RINGS:
            return SLOW_RINGS[*held, wide]
        if many and wide and held in MANY_WIDE_RINGS:
            return MANY_WIDE_RINGS[held]
        if spec.cols == shape.capacity and (*held, wide) in FULL_RINGS:
            return FULL_RINGS[*held, wide]
    return RINGS[norm].get(held, (None, None))[wide]


def _of_some_turns(problem: Problem, shape: RowShape, wide: bool, device: Device) -> Waits:
    """How rows wait where memory is slow and they make so many turns; None where that was not measured to win."""
    waits = SLOW_TURN_RINGS.get((shape.threads, shape.packs), (None, None))[wide]
    searched = problem.norm.subtracts_mean and problem.matrix_bytes <= SLOW_TURNS_BYTES * device.sms
    if waits is None or not (searched and device.memory_is_slow):
        return None
    return waits if _turns(problem, waits, device) >= SLOW_TURNS else None


def _turns(problem: Problem, waits: tuple[int, int, int], device: Device) -> float:
    size, _, ctas = waits
    return problem.rows / device.resident_clusters(size, ctas, problem.sm_margin)


def _few_wide_rows(spec: NormSpec, needs: Needs) -> NormSpec | None:
    """One place for each row group, which keeps its row: of a few rows the registers are there. By two CTAs a row where
    an SM then has more threads.

    2 M elements of 5056 cols 5.6 us, by two places 5.9; 4 M of 4224 cols, by two CTAs a row, 7.0 and 7.7.
    """
    shape = spec.shape
    # Weight and bias, the row, and 62: with less rows that do not fill all places spilled.
    registers = needs.columns + shape.packs * shape.pack // 2 + 62
    spec = replace(spec, stages=1, rows_stay=True, ask_early=True, columns_stay=True)
    halves = in_clusters(shape, 2) if shape.threads % (4 * WARP) == 2 * WARP and shape.threads > 2 * WARP else shape
    by_shape = (replace(spec, shape=one) for one in dict.fromkeys((shape, halves)))
    found = [replace(one, ctas_per_sm=ctas_of(one, registers)) for one in by_shape]
    best = max(found, key=lambda one: one.ctas_per_sm * one.threads)
    return best if best.ctas_per_sm else None


def _layer_norm_ring(problem: Problem, spec: NormSpec, needs: Needs, many: bool, device: Device) -> NormSpec | None:
    shape, wide, zero_centred = spec.shape, widest_column(spec) == 4, problem.is_zero_centred
    if shape.packs <= 2:
        return None
    wide_pair = wide and len(spec.columns) == 2 and not zero_centred
    if wide_pair and shape.threads > WARP and problem.matrix_bytes <= FEW_WIDE_BYTES * device.sms:
        return _few_wide_rows(spec, needs)
    under_way = MANY_UNDER_WAY if many else FEW_UNDER_WAY
    registers = needs.working + more_in_a_ring(shape)
    if zero_centred and shape.threads <= WARP:
        registers += 26  # 120 bytes spilled, 1024 cols
    if shape.threads == 2 * WARP and spec.cols < shape.capacity:
        registers += 24  # 8 bytes, 2368 cols
    if wide_pair:
        # As few spilled 4 to 28 bytes beside 16 bits, and 12 with a warp's three packs.
        registers = 56 if shape.threads * shape.packs <= 96 else 48
    ring = short_ring(spec, needs.columns + registers, under_way, device)
    if wide and not many and shape.threads <= 64:
        # Where registers leave few CTAs, three places for each: 1152 cols 10.5 us, by two 11.5.
        deeper = short_ring(spec, needs.columns + registers, under_way, device, stages=3)
        if ring is None or (deeper is not None and 2 * deeper.ctas_per_sm > ring.ctas_per_sm):
            return deeper
    return ring


def _rms_norm_ring(problem: Problem, spec: NormSpec, needs: Needs, _: bool, device: Device) -> NormSpec | None:
    """With 64 KB under way: 8 M elements of 1600 cols 9.9 us, with 50 KB 10.4. By three places where registers leave
    two too little, and each row group has so many rows.
    """
    shape = spec.shape
    if shape.threads > WARP or widest_column(spec) > 4:
        registers = needs.columns + 56
        if widest_column(spec) == 4 and problem.is_zero_centred:
            registers += 8  # 4 bytes spilled, 5128 cols
    elif shape.packs > 2:
        # Four packs, kept unpacked, spilled 8 to 52 bytes with 72 and 80, 84 with 64; five 4 with 72.
        registers = 96 if shape.packs == 4 else max(72, 44 + 6 * shape.packs)
    else:
        return None
    two = short_ring(spec, registers, RMS_UNDER_WAY, device) if shape.packs > 2 else None
    if two is not None and bytes_under_way(two) >= RMS_UNDER_WAY * 3 // 4:
        return two
    three = short_ring(spec, registers, RMS_UNDER_WAY, device, stages=3)
    if three is None or problem.rows < 3 * device.sms * three.ctas_per_sm * three.rows_per_cta:
        return two
    return three
