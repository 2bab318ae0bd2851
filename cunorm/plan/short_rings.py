"""The forward kernels of rows that wait in shared memory: how many CTAs, and how many places each has.

How many bytes are on their way decides, and how many registers are left for it. LayerNorm and RMSNorm of 16 bits on
Hopper have a file of their own, plain_rings.py.
"""

from __future__ import annotations

from dataclasses import replace

from ..expression.value import FUNCTIONS
from ..kernel.device import Device
from .problem import ITEMSIZE, Problem
from .registers import Needs, ctas_of, sixteen_bits, with_rows_kept
from .shapes import in_clusters
from .shared_memory import ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec, RowShape

# Of rows to each SM. Of more, rows in registers are faster than a ring: 64 M elements 0.95 and 0.91; 8 M 0.83 and 0.92.
RING_BYTES = 512 << 10
UNDER_WAY = 52 << 10  # bytes of x that an SM asks for ahead, where y has 8 bits


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
    if shape.packs <= 2 or len(spec.matrices) > 1 or spec.grouped:
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
    if device.arch >= 100 and problem.norm.subtracts_mean and not spec.scales:
        # LayerNorm of three packs spilled 12 bytes in 80 registers, of four 12 in 96; zero-centred 1024 cols 96 to 116.
        registers += 34 if problem.is_zero_centred and shape.threads <= WARP else 8
    return short_ring(spec, needs.columns + registers + more_in_a_ring(shape), under_way << 10, device)


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
    return spec if ctas <= ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device) else None


def more_in_a_ring(shape: RowShape) -> int:
    """Registers besides those of rows that wait in registers."""
    return 26 if shape.packs == 4 else 14


def short_ring(spec: NormSpec, registers: int, under_way: int, device: Device, stages: int = 2) -> NormSpec | None:
    """So many places for each row group, and CTAs that ask for `under_way` bytes of rows on an SM.

    None if less than half of them fit, weight and bias staying in registers.

    In shared memory they take 40 us to come, all SMs asking L2 for the same lines; late from L1 they cost 4 of 11 us.
    """
    spec = replace(spec, stages=stages, ask_early=True, columns_stay=True)
    needed = shared_memory(spec) + dynamic_shared(spec)
    wanted = max(1, round(under_way / bytes_under_way(replace(spec, ctas_per_sm=1))))
    ctas = min(wanted, ctas_of(spec, registers), ctas_that_fit(needed, device))
    return with_rows_kept(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None


def bytes_under_way(spec: NormSpec) -> int:
    """Bytes of rows that an SM asks for ahead."""
    of_cta = spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta // spec.cluster
    return spec.ctas_per_sm * (spec.stages - 1) * of_cta
