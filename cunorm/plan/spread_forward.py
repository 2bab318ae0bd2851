"""Forward rows that leave SMs idle, or threads of them: by clusters, and by the kernel without turns, which may give a
row more threads than those by whose order it is added up.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernel.device import Device
from ..operation import SEED
from .plain_rings import is_plain
from .problem import ITEMSIZE, Problem
from .registers import RESIDENT, Needs, registers_of, sixteen_bits, widest_column
from .shapes import ceil_div, in_clusters
from .spec import WARP, NormSpec


def few_rows_forward(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
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
    few = 4 * rows <= sms if long else 8 * rows <= sms and places == 1024
    by_clusters = _plain_by_clusters(problem, spec, needs, few, device)
    if by_clusters is not None:
        return by_clusters
    if 1 < shape.threads <= WARP and shape.packs > 2 and rows <= 2 * sms:
        return spread  # 1 x 1600 1.5 us, by a warp 1.75; several warps of one CTA gain nothing
    # 32 x 32768 3.98 us, in one CTA 4.9, by four CTAs 4.54; 8 x 8192 with another matrix 2.15 and 2.43.
    # One matrix, H100: 8 x 8192 2.66 us, in one CTA 2.92, beside float32 weights 2.63 and 3.16; RMSNorm 2.37 and 2.54.
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
    if shape.packs == 4 and shape.threads in (128, 256) and spec.reads_two and sms // 8 < rows <= most:
        # 512 x 4096 with another matrix 6.1 us and 6.5.
        return replace(spread, held=2, ctas_per_sm=ceil_div(rows, sms))
    return None


def _plain_by_clusters(problem: Problem, spec: NormSpec, needs: Needs, few: bool, device: Device) -> NormSpec | None:
    """LayerNorm and RMSNorm alone: by clusters of four, or two; None where that was not measured to win.

    H100. Rows that fill all places, by the kernel for many rows, which then checks nothing: LayerNorm of 8 x 12288
    2.71 us, by clusters of eight without turns 3.16, 64 x 10240 3.48 and, by one CTA, 3.72, 128 x 12288 4.92 and 5.20,
    1 x 6144 1.91 and 2.13, 256 x 8192 beside float32 weights 5.27 and 5.77; few of an even number of packs, 1 x 16384
    beside float32 weights, 2.60 and, without turns, 2.45. LayerNorm's other rows without turns: 8 x 5632 2.56 us, by
    one CTA 2.72, RMSNorm's 2.43 and 2.33; and 1 x 4096, a pack to each of 512 threads, 1.84 and 1.90, RMSNorm's 1.60
    and 1.57.
    """
    shape, rows, sms = spec.shape, problem.rows, device.sms - problem.sm_margin
    places = shape.threads * shape.packs
    if not (is_plain(problem, spec, device) and widest_column(spec) <= 4 and device.runs_clusters(8)):
        return None
    if problem.cols < shape.capacity:
        size = 4 if shape.threads % (4 * WARP) == 0 else 2
        if problem.norm.subtracts_mean and 768 <= places < 1024 and size * rows <= sms:
            return replace(spec, kernel="forward_spread", shape=in_clusters(shape, size), held=shape.packs)
        return None
    if places == 512 and problem.norm.subtracts_mean and 8 * rows <= sms:
        return replace(spec, kernel="forward_spread", shape=in_clusters(shape, 4), held=1)
    size = 4 if 2 * rows <= sms else 2
    most = 3 * sms if problem.norm.subtracts_mean else sms if places > 1024 else sms // 4
    if shape.threads < 8 * WARP or rows > most:
        return None
    if (few and shape.packs % 2 == 0) or shape.packs > (5 if size == 4 else 7):
        return None
    ctas = ceil_div(size * rows, sms)
    if needs.working + needs.at_once > registers_of(ctas * shape.threads // size):
        return None
    return replace(spec, shape=in_clusters(shape, size), ctas_per_sm=ctas)


def without_turns(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """LayerNorm, or modulated rows, of three packs a thread: all rows at once by the kernel without turns, which needs
    fewer registers. RMSNorm and two matrices gain nothing.

    1024 x 3072 5.5 us, in turns 5.7; modulated 5.45 and 6.3.
    """
    shape, resident = spec.shape, RESIDENT // spec.shape.threads
    if spec.reads_two or spec.finds_scales or not (problem.norm.subtracts_mean or spec.grouped):
        return None
    # 64 registers: on sm_100 and sm_120 4 to 12 bytes spilled.
    if shape.packs != 3 or shape.threads <= WARP or not sixteen_bits(spec) or device.arch >= 100:
        return None
    if problem.rows > (device.sms - problem.sm_margin) * resident:
        return None
    return replace(
        spec, kernel="forward_spread", rows_per_cta=1, columns_stay=True, held=shape.packs, ctas_per_sm=resident
    )
