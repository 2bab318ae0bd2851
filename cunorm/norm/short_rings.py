"""The forward kernels of rows that wait in shared memory: how many CTAs, and how many places each has.

How many bytes are on their way decides, and how many registers are left for it.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from ..expression_value import FUNCTIONS
from ..operation import is_named
from .problem import ITEMSIZE, Problem
from .registers import Needs, ctas_of, sixteen_bits, widest_column, with_shifted
from .shapes import in_clusters
from .shared_memory import dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# Bytes of x that an SM asks for ahead: where y has 8 bits, by LayerNorm, many rows and few, and by RMSNorm.
UNDER_WAY, MANY_UNDER_WAY, FEW_UNDER_WAY, RMS_UNDER_WAY = 52 << 10, 32 << 10, 55 << 10, 64 << 10
# Of rows to each SM. Of more, rows in registers are faster: LayerNorm of 4096 cols, 32 M elements, 35.9 us, in a ring
# 39.2; 24 M 27.8 and 29.2, 16 M 19.5 and 19.8, 12 M 15.6 and 15.1.
NARROW_RING_BYTES = 320 << 10
RMS_TWO_PACKS_BYTES = 192 << 10  # likewise: 2560 cols, 16 M elements, 18.5 us, in a ring 19.2; 8 M 10.9 and 10.5
Waits = tuple[int, int, int]  # CTAs of a cluster, places, CTAs of an SM
# By threads and packs of a row, beside weights of 16 bits and of 32. In clusters an SM has parts of more rows, and more
# threads, than whole rows would leave room for: 8 M elements, LayerNorm of 8192 cols 10.9 us, by whole rows 11.7; 12288
# cols 11.9 and 13.8; 20480 cols 12.5 and 14.5.
RINGS: dict[str, dict[tuple[int, int], tuple[Waits | None, Waits]]] = {
    "layer_norm": {
        (128, 2): (None, (1, 2, 7)),  # 2048 cols beside float32 weights 11.0 us, in registers 12.7
        (128, 4): ((1, 2, 5), (2, 2, 8)),
        (256, 3): ((1, 2, 3), (2, 2, 5)),
        (256, 4): ((2, 2, 5), (2, 2, 4)),
        (256, 5): ((2, 2, 5), (1, 2, 2)),
        (512, 3): ((2, 2, 3), (4, 2, 5)),
        (256, 7): ((2, 2, 4), (2, 2, 3)),
        (512, 4): ((4, 2, 5), (4, 2, 4)),
        (512, 5): ((4, 2, 5), (1, 2, 1)),
    },
    "rms_norm": {
        (256, 4): ((2, 2, 7), (2, 2, 5)),
        (256, 5): ((2, 2, 6), (2, 2, 5)),
        (512, 3): ((2, 3, 3), (2, 3, 3)),
        (512, 4): ((2, 2, 4), (4, 2, 6)),
        (512, 5): ((2, 2, 3), (4, 2, 5)),
    },
}


def in_a_ring(problem: Problem, spec: NormSpec, needs: Needs, many: bool, device: Device) -> NormSpec | None:
    """Rows that wait in shared memory, where that is faster than registers."""
    shape = spec.shape
    if (
        many
        and device.arch == 90
        and spec.scales
        and (found := _unpacked_ring(problem, spec, needs, device)) is not None
    ):
        return found
    if many and device.arch == 90 and (found := _ring_beside(spec, device)) is not None:
        return found
    if len(spec.matrices) > 1 or spec.grouped:
        return None
    plain = is_named(problem.operation) and not spec.scales
    if plain and device.arch == 90 and sixteen_bits(spec, spec.matrices):
        return _plain_ring(problem, spec, needs, many, device)
    if shape.packs <= 2:
        return None
    # y in 8 bits by one scale, or by rows that a warp holds: 64 M elements of 4096 cols 53.6 us, in registers 59.0. But
    # of 12288 cols, one CTA on an SM, 67.8 and 61.3, and of 7168, where some threads have a pack less, 62.9 and 57.0.
    whole = not problem.norm.subtracts_mean or spec.cols == shape.capacity
    in_warp = shape.threads <= WARP and spec.scales in ("one", "per_row")
    narrow = in_warp or (shape.threads < 512 and spec.scales == "one" and whole)
    if many and not narrow:
        return None
    under_way = 42 if many else 48
    # There y is made after x has been summed up: 96 registers are enough for four packs.
    late = narrow and spec.aligned and device.arch < 100
    registers = needs.working - 20 if late else needs.working + needs.y
    return _short_ring(spec, needs.columns + registers + _more_in_a_ring(shape), under_way << 10, device)


def _plain_ring(problem: Problem, spec: NormSpec, needs: Needs, many: bool, device: Device) -> NormSpec | None:
    """LayerNorm and RMSNorm of rows of 16 bits: few rows, and many of LayerNorm beside float32 weight and bias.

    Late, from L1, those cost more than a ring: 64 M elements of 4992 cols 72.1 us and 74.5; of 6720 cols 76.0, 74.5;
    of 14336 cols 74.2 and 84.6.
    """
    shape, layer_norm, width = spec.shape, problem.norm.subtracts_mean, widest_column(spec)
    wide, packs = width == 4, shape.threads * shape.packs
    zero_centred = dict(problem.operation.defaults).get("weight") == 0
    # Where gamma is zero-centred five packs beside float32 weights spilled 16 bytes.
    known = width <= 4 and not (wide and layer_norm and zero_centred)
    found = RINGS[problem.operation.norm].get((shape.threads, shape.packs)) if known else None
    # LayerNorm of 704 cols beside float32 weights, 64 M elements, 70.6 us, in registers 67.7.
    if many and not (wide and len(spec.columns) == 2 and (found or 96 < packs <= 640)):
        return None
    # LayerNorm beside wide weights, and rows of two and three warps, stay in a ring: 2240 cols, 24 M elements, 28.1 us
    # and in registers 30.3.
    stays = (layer_norm and wide) or WARP < shape.threads < 128
    if not stays and bytes_per_sm(problem, device) > NARROW_RING_BYTES:
        return None
    if found and device.runs_clusters(4):
        waits = found[wide]
        if waits is None:
            return None
        size, stages, ctas = waits
        # RMSNorm of no more rows than run at once: 256 x 16384 7.1 us, by whole rows 6.5; of 256 x 12288, which three
        # places want more of, 6.3 and in registers 5.6.
        turns = problem.rows / device.resident_clusters(size, ctas, problem.sm_margin)
        if layer_norm or turns > 1.2 * (stages - 1):
            spec = replace(spec, stages=stages, ask_early=True, columns_stay=True, ctas_per_sm=ctas)
            return replace(spec, shape=in_clusters(shape, size))
    if not layer_norm:
        return _rms_ring(problem, spec, needs, device)
    if shape.packs <= 2:
        return None
    under_way = MANY_UNDER_WAY if many else FEW_UNDER_WAY
    registers = needs.working + _more_in_a_ring(shape)
    if zero_centred and shape.threads <= WARP:
        registers += 26  # 240 bytes spilled, 1024 cols
    if shape.threads == 2 * WARP and spec.cols < shape.capacity:
        registers += 24  # 16 bytes, 2368 cols
    if wide and len(spec.columns) == 2 and not zero_centred:
        # As few spilled 4 to 28 bytes beside 16 bits, and 24 with a warp's three packs.
        registers = 56 if packs <= 96 else 48
    ring = _short_ring(spec, needs.columns + registers, under_way, device)
    if wide and not many and shape.threads <= 64:
        # Where registers leave few CTAs, three places for each: 1152 cols 10.5 us, by two 11.5.
        deeper = _short_ring(spec, needs.columns + registers, under_way, device, stages=3)
        if ring is None or (deeper is not None and 2 * deeper.ctas_per_sm > ring.ctas_per_sm):
            return deeper
    return ring


def _rms_ring(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """RMSNorm's, with 64 KB under way: 8 M elements of 1600 cols 9.9 us, with 50 KB 10.4. By three places where
    registers leave two too little, and each row group has so many rows: 2560 cols 10.3 us, in registers 10.9; but
    2432 cols, 3 M elements, 5.4 and 5.0.
    """
    shape = spec.shape
    if shape.threads > WARP or widest_column(spec) > 4:
        registers = needs.columns + 56
    elif shape.packs > 2:
        # Four packs, kept unpacked, spilled 16 to 110 bytes with 72 and 80, 172 with 64; five 8 with 72.
        registers = 96 if shape.packs == 4 else max(72, 44 + 6 * shape.packs)
    else:
        return None
    if shape.packs <= 2 and bytes_per_sm(problem, device) > RMS_TWO_PACKS_BYTES:
        return None
    two = _short_ring(spec, registers, RMS_UNDER_WAY, device) if shape.packs > 2 else None
    if two is not None and _under_way(two) >= RMS_UNDER_WAY * 3 // 4:
        return two
    three = _short_ring(spec, registers, RMS_UNDER_WAY, device, stages=3)
    if three is None or problem.rows < 3 * device.sms * three.ctas_per_sm * three.rows_per_cta:
        return two
    return three


def _ring_beside(spec: NormSpec, device: Device) -> NormSpec | None:
    """A norm that something is added to, of 16 bits: its matrix waits in registers as long as x does, for which two
    shapes have too few.

    layer_norm_add of 16384 cols by one row on an SM 112.9 us, by a cluster of four CTAs, parts of four rows on an SM,
    98.8. Of 5120 cols 105.6 and 98.3.
    """
    shape = spec.shape
    gates = any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps)
    # A number for each row is no matrix: of 16384 cols 1.26 of LayerNorm's time in a ring, 1.03 in registers.
    one_matrix = [one.kind for one in spec.beside] == ["full"]
    alone = spec.inputs == spec.matrices[:1] and one_matrix and not spec.grouped and not spec.scales
    if gates or not alone or not sixteen_bits(spec):
        return None
    ring = replace(spec, stages=2, columns_stay=True, streamed_x=True)
    if (shape.threads, shape.packs) == (160, 4):
        return replace(ring, ctas_per_sm=2, ask_early=True)
    if (shape.threads, shape.packs) == (512, 4) and device.runs_clusters(4):
        return replace(ring, shape=in_clusters(shape, 4), ctas_per_sm=4)
    return None


def _unpacked_ring(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """y in 8 bits: a third less to move than of 16, and more to compute. A thread reads its packs once, and keeps what
    they hold unpacked beside weight and bias; None where that is slower, or registers leave too few threads.

    RMSNorm of 64 M elements, 7168 cols, by rows 51.5 us, in registers 56.2; 16384 cols 50.9 and 58.0; 4096 cols by
    blocks 50.8 and 54.5. LayerNorm by one scale, 4096 cols, 51.1; packed 54.7.
    """
    shape, layer_norm = spec.shape, problem.norm.subtracts_mean
    alone = len(spec.matrices) == 1 and not spec.grouped and "s" not in (one.name for one in spec.written)
    if not (alone and sixteen_bits(spec)) or any(step.function in FUNCTIONS for step in spec.operation.epilogue.steps):
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


def _more_in_a_ring(shape: RowShape) -> int:
    """Registers besides those of rows that wait in registers."""
    return 26 if shape.packs == 4 else 14


def _short_ring(spec: NormSpec, registers: int, under_way: int, device: Device, stages: int = 2) -> NormSpec | None:
    """So many places for each row group, and CTAs that ask for `under_way` bytes of rows on an SM.

    None if less than half of them fit, weight and bias staying in registers.

    In shared memory they take 40 us to come, all SMs asking L2 for the same lines; late from L1 they cost 4 of 11 us.
    """
    spec = replace(spec, stages=stages, ask_early=True, columns_stay=True)
    needed = shared_memory(spec) + dynamic_shared(spec)
    wanted = max(1, round(under_way / _under_way(replace(spec, ctas_per_sm=1))))
    ctas = min(wanted, ctas_of(spec, registers), (device.shared + 1024) // (needed + 1024))
    return with_shifted(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None


def bytes_per_sm(problem: Problem, device: Device) -> float:
    """Of x."""
    return problem.rows * problem.cols * ITEMSIZE[problem.row_dtype] / device.sms


def _under_way(spec: NormSpec) -> int:
    """Bytes of rows that an SM asks for ahead."""
    of_cta = spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta // spec.cluster
    return spec.ctas_per_sm * (spec.stages - 1) * of_cta
