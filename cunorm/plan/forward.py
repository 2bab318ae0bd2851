"""The forward kernel of rows by the cost rule, which serves where no table does.

How rows of a shape are run depends on their number. Few rows get more threads each, or several SMs. Rows that all run
at once load weight and bias with x. Of more rows, each is loaded into a ring in shared memory or into registers, and
then weight and bias are loaded when they are needed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..kernel.device import Device
from ..operation import NORMS, SEED
from .problem import ITEMSIZE, Problem, ceil_div
from .resources import (
    RESIDENT,
    Needs,
    column_bytes,
    ctas_by_registers,
    ctas_that_fit,
    dynamic_shared,
    needs_of,
    row_bytes_per_cta,
    shared_memory,
    sixteen_bits,
    stages_for,
    widest_column,
    with_rows_in_registers,
    words_to_shift,
)
from .shapes import CLUSTER_ROWS, SHIFTED_VECTORS, short_forward
from .spec import MOST_SHORT, STREAMED_THREADS, WARP, NormSpec, RowShape, kernel_spec

# Bytes of rows per SM, up to which rows wait in a ring and above which in registers. measured: docs/tuning.md
RING_BYTES = 512 << 10
UNDER_WAY = 48 << 10  # bytes of x on their way to an SM, by a ring
EARLY_WARPS = 12  # the most warps of an SM that have registers enough for prefetch


def forward_by_rule(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel of rows of the shape of `spec`."""
    rule = _cta_kernel if problem.vectors <= MOST_SHORT else _cluster_kernel
    return rule(problem, spec, device)


class _CtaKernels(NamedTuple):
    """The kernels of rows that one CTA holds, for any number of them."""

    at_once: NormSpec  # for rows that all run at once; without CTAs if registers do not suffice for one
    in_clusters: tuple[NormSpec, ...]  # the same with a row on several SMs, the most first
    ring: NormSpec | None  # for rows that are not many
    registers: NormSpec


def _cta_kernel(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    if (spread := _few_rows(problem, spec, device)) is not None:
        return spread
    kernels = _cta_kernels(problem.layout, spec, device)
    at_once, sms = kernels.at_once, device.sms - problem.sm_margin
    for kernel in kernels.in_clusters:
        if problem.rows * kernel.cluster <= kernel.ctas_per_sm * sms:
            return kernel
    if problem.rows <= sms * at_once.ctas_per_sm * at_once.rows_per_cta:
        return at_once
    many = problem.matrix_bytes > RING_BYTES * device.sms
    return kernels.registers if many or kernels.ring is None else kernels.ring


@lru_cache(maxsize=4096)
def _cta_kernels(problem: Problem, spec: NormSpec, device: Device) -> _CtaKernels:
    needs = needs_of(problem, spec, device)
    at_once = _at_once(spec, needs)
    ring, registers = _in_a_ring(problem, spec, needs, device), _in_registers(problem, spec, needs, device)
    if ring is not None and _loses_in_a_ring(spec):
        kept = _at_once(replace(spec, rows_per_cta=registers.rows_per_cta), needs)
        ring, registers = (None, kept) if kept.ctas_per_sm else (ring, registers)
    elif ring is not None:
        ring = _with_a_stage_fewer(ring, at_once, device)
    return _CtaKernels(at_once, _in_clusters(at_once, device) if at_once.ctas_per_sm else (), ring, registers)


def _at_once(spec: NormSpec, needs: Needs) -> NormSpec:
    """Return the kernel that loads weight and bias with the first row, as many CTAs of it as registers suffice for."""
    ctas = ctas_by_registers(spec, needs.working + max(needs.at_once, needs.y))
    return replace(spec, ctas_per_sm=ctas, weights_in_registers=True)


def _with_a_stage_fewer(ring: NormSpec, at_once: NormSpec, device: Device) -> NormSpec:
    """Return a kernel whose rows go to registers when they have come, if that leaves room for more CTAs; else `ring`.

    Registers must suffice: elsewhere ptxas spills, on later architectures, in RMSNorm, and where y is scaled.
    """
    suffice = 80 <= device.arch < 100 and NORMS[ring.operation.norm].subtracts_mean and not ring.scales
    if not suffice or not ring.aligned or ring.shape.threads <= WARP or at_once.ctas_per_sm <= ring.ctas_per_sm:
        return ring
    return replace(at_once, stages=1, rows_in_registers=True)


def _loses_in_a_ring(spec: NormSpec) -> bool:
    """Return whether rows, at odd addresses, take longer out of a ring than out of registers, however many they are.

    Weight and bias are in registers too, and every CTA loads them, so they must be aligned (docs/tuning.md).
    """
    shape = spec.shape
    if spec.aligned or not spec.columns_aligned or spec.scales or spec.compute != "float32":
        return False
    narrow = shape.threads <= WARP and shape.vectors != 4 and widest_column(spec) <= 2
    return narrow or not NORMS[spec.operation.norm].subtracts_mean


def _few_rows(problem: Problem, spec: NormSpec, device: Device) -> NormSpec | None:
    """Return a kernel with more threads for each row, if few rows leave SMs or threads idle; None if it is not faster.

    The partial sums of a row stay those of its shape, and so its bits do too.
    """
    if spec.computes_scales:  # the largest value of a row would be one more exchange between warps
        return None
    shape, rows, sms = spec.shape, problem.rows, device.sms - problem.sm_margin

    def spread(**changes) -> NormSpec:
        return replace(spec, kernel="forward_spread", rows_per_cta=1, weights_in_registers=True, **changes)

    if 1 < shape.threads <= WARP and shape.vectors > 2 and rows <= 2 * sms:
        return spread()
    vectors = shape.threads * shape.vectors
    in_eight = 4 * rows <= sms if vectors > 1024 else 8 * rows <= sms and vectors == 1024
    # Rows of three or five whole vectors a thread, of which half would leave lanes idle, are for clusters of four.
    uneven = _fills_its_shape(spec) and shape.vectors in (3, 5)
    if in_eight and device.runs_clusters(8) and not uneven:
        return spread(shape=shape.in_clusters(8), vectors_per_thread=ceil_div(shape.vectors, 2))
    if not spec.aligned:
        return None
    in_four = vectors == 512 and 8 * rows <= sms and problem.norm.subtracts_mean and _fills_its_shape(spec)
    if in_four and device.runs_clusters(4):
        return spread(shape=shape.in_clusters(4), vectors_per_thread=1)
    in_two = shape.threads == 512 and shape.vectors > (4 if problem.norm.subtracts_mean else 6)
    if in_two and 2 * rows <= sms and device.runs_clusters(2) and not uneven:
        return spread(shape=shape.in_clusters(2), vectors_per_thread=shape.vectors)
    # Beside wide vectors, and with dropout, more than one row on an SM spills.
    narrow = widest_column(spec) <= ITEMSIZE[problem.row_dtype] and SEED not in problem.by_name
    most = sms * (RESIDENT // 2 // shape.threads) if narrow else sms
    if shape.vectors == 4 and shape.threads in (128, 256) and spec.reads_two_matrices and sms // 8 < rows <= most:
        return spread(vectors_per_thread=2, ctas_per_sm=ceil_div(rows, sms))
    return None


def _in_clusters(spec: NormSpec, device: Device) -> tuple[NormSpec, ...]:
    """Return kernels of the same rows in clusters of four and of two CTAs, where they were measured to be faster.

    The tables of two GPUs agree on them for weights of 16 and of 32 bits (docs/tuning.md). A thread has no fewer
    registers than it has without clusters.
    """
    shape = spec.shape
    if not _fills_its_shape(spec) or shape.threads < 256 or shape.vectors < 3:
        return ()
    short_rms = not NORMS[spec.operation.norm].subtracts_mean and shape.threads * shape.vectors <= 1024
    ctas, most_vectors = (1, {4: 4}) if short_rms else (2, {4: 5, 2: 7})
    sizes = [size for size, most in most_vectors.items() if shape.vectors <= most and device.runs_clusters(size)]
    return tuple(replace(spec, shape=shape.in_clusters(size), ctas_per_sm=ctas) for size in sizes)


def _fills_its_shape(spec: NormSpec) -> bool:
    """Return whether every vector of every thread is a whole and aligned part of the row."""
    return spec.aligned and spec.cols == spec.shape.capacity


def _in_a_ring(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec | None:
    """Return a kernel whose rows wait in shared memory; None if too few of them fit."""
    shape = spec.shape
    if shape.vectors <= 2 or len(spec.matrices) > 1 or spec.grouped:
        return None
    registers = needs.working + needs.y + needs.columns + (26 if shape.vectors == 4 else 14)
    if problem.norm.subtracts_mean and not spec.scales and device.arch >= (90 if shape.threads <= 2 * WARP else 100):
        registers += 34 if problem.is_zero_centred and shape.threads <= WARP else 8
    # The first loads of weight and bias into shared memory took 40 us, because all SMs read the same lines of L2.
    spec = replace(spec, stages=2, prefetch=True, weights_in_registers=True)
    wanted = round(UNDER_WAY / (spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta))
    fitting = ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    ctas = min(wanted, ctas_by_registers(spec, registers), fitting)
    return with_rows_in_registers(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None


def _in_registers(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> NormSpec:
    """Return a kernel whose rows wait in registers, and which loads weight and bias vector by vector from L1."""
    shape = spec.shape
    # x is read past L1, which leaves that to weight and bias; but not two matrices of rows that a warp holds.
    through_l1 = spec.aligned and shape.threads <= WARP and spec.reads_two_matrices
    spec = replace(
        spec,
        streamed_x=not through_l1 and (spec.aligned or spec.streamed_x),
        rows_per_cta=max(1, spec.rows_per_cta // 2) if shape.threads <= WARP else 1,
    )
    return replace(spec, ctas_per_sm=max(1, _ctas_of_rows_in_registers(problem, spec, needs, device)))


def _has_few_words(spec: NormSpec, needs: Needs) -> bool:
    """Whether one matrix is read, and nothing is so wide that a thread needs more registers for it."""
    widest = max(4, ITEMSIZE[spec.row_dtype])
    narrow = widest_column(spec) <= widest and all(operand.itemsize <= widest for operand in spec.written)
    grouped_scales = spec.grouped and spec.scales
    return narrow and spec.aligned and len(spec.matrices) == 1 and not needs.y and not grouped_scales


def _ctas_of_rows_in_registers(problem: Problem, spec: NormSpec, needs: Needs, device: Device) -> int:
    """Return how many CTAs an SM has, by the registers of a thread that loads weight and bias vector by vector.

    Every number was found by compiling: with fewer registers ptxas spills on one of the architectures.
    """
    shape, itemsize, width = spec.shape, ITEMSIZE[problem.row_dtype], widest_column(spec)
    few = device.arch == 90 or (device.arch > 90 and shape.vectors < 3)
    if problem.norm.subtracts_mean and width == 4 and shape.vectors == 2:
        few = few and not problem.is_zero_centred and spec.cols < shape.capacity
    most, words = (
        (1536, 28 if few else 40) if shape.vectors <= 3 and _has_few_words(spec, needs) else (RESIDENT, needs.working)
    )
    if needs.y and spec.aligned:  # 64 registers for four vectors, 80 for five, 96 for seven
        words = 32 + 4 * (spec.rows_per_cta > 1) + width // 4 * shape.vector_cols + 8 * (itemsize == 4)
        words += (8 if device.arch < 100 else 16) * (len(spec.matrices) - 1)
        if width < 4 and len(spec.matrices) == 1 and shape.vectors <= (2 if problem.norm.subtracts_mean else 3):
            most, words = 1536, 40 - needs.y
        words += 8 * (device.arch >= 100 or (device.arch < 90 and (spec.grouped or problem.norm.subtracts_mean)))
        words += 24 * (device.arch >= 100 and shape.vectors >= 5)
    elif device.arch >= 100 and shape.vectors == 5 and not sixteen_bits(spec):
        words += 8
    if shape.threads == 1 and shape.vectors > 2 and problem.norm.subtracts_mean:
        words += 8
    return ctas_by_registers(spec, words + max(needs.row, needs.y), most)


def _cluster_kernel(problem: Problem, spec: NormSpec, device: Device) -> NormSpec:
    """Return the kernel of rows that the CTAs of a cluster hold together; `spec` has the most CTAs of an SM."""
    shape, most_ctas = spec.shape, spec.ctas_per_sm
    spec = replace(spec, ctas_per_sm=1, weights_in_registers=_weights_in_registers(problem, spec, device))
    for ctas in range(most_ctas, 0, -1):
        most_stages = stages_for(ctas * row_bytes_per_cta(shape) * len(spec.matrices))
        if problem.cols % shape.vector_cols and shape.vectors > 4 and ctas > 1:
            most_stages = 2
        for stages in range(most_stages, 1, -1):
            # An SM that has parts of two or three rows of clusters of 16 prefetches.
            few = ctas < CLUSTER_ROWS and ctas * shape.threads <= EARLY_WARPS * WARP
            prefetch = stages == 2 and shape.cluster == 16 and few and spec.weights_in_registers
            fitting = replace(spec, ctas_per_sm=ctas, stages=stages, prefetch=prefetch)
            if ctas <= ctas_that_fit(shared_memory(fitting) + dynamic_shared(fitting), device):
                return with_rows_in_registers(fitting, device)
    # Several matrices keep the shape of the plain norm's rows, and so its bits. Without room in shared memory they wait
    # in registers.
    if spec.scales == "per_row" and shape.threads == 512 and device.runs_clusters(2 * shape.cluster):
        # y is held as float32 beside the sum or the gate, for which half the threads have twice the registers.
        shape = shape.in_clusters(2 * shape.cluster)
    return replace(spec, shape=shape)


def _weights_in_registers(problem: Problem, spec: NormSpec, device: Device) -> bool:
    """Whether a thread keeps weight and bias in registers: two matrices need these, and elsewhere ptxas would spill."""
    if len(spec.matrices) > 1 or spec.grouped or (not spec.aligned and spec.shape.vectors > SHIFTED_VECTORS):
        return False
    if {operand.dtype for operand in problem.operands if operand.kind == "full"} != {problem.row_dtype} - {"float64"}:
        return False
    full = spec.shape.capacity == problem.cols
    return device.arch < 100 or (full and not problem.norm.subtracts_mean)


def forward_streamed(problem: Problem, device: Device) -> NormSpec:
    """Return the kernel of rows that no CTA or cluster holds, which reads them twice."""
    spec = kernel_spec(problem, "forward_streamed", RowShape(problem.vector_cols, STREAMED_THREADS, 1))
    # Two CTAs an SM: left to itself ptxas takes 71 registers for bfloat16 and has room for one.
    dtypes = {operand.dtype for operand in problem.operands if operand.kind in ("full", "column", "group")}
    two = dtypes == {problem.row_dtype} - {"float64"} and len(spec.matrices) == 1 and spec.aligned
    return replace(spec, ctas_per_sm=2 if two else 1)


def fits_norm_add_norm(row_dtype: str, cols: int) -> bool:
    """Whether one kernel computes two norms of such rows: a CTA must hold a row in six vectors a thread.

    With eight, at odd addresses, it spills on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_norm_add_norm(problem: Problem, device: Device) -> NormSpec:
    """Return the kernel that computes two norms. A row has the shape, and so the bits, of each norm alone."""
    spec = short_forward(problem, device, "forward_twice")
    shape = spec.shape
    # x and residual are loaded at once; the weights of both norms are loaded vector by vector, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + words_to_shift(spec) * (1 if spec.aligned else 4)
    rows = shape.vectors * sum(shape.vector_cols * matrix.itemsize // 4 for matrix in spec.matrices)
    registers = working + rows * (1 if spec.aligned else 2)
    ctas = ctas_by_registers(spec, registers + column_bytes(problem, shape) // 4, RESIDENT)
    if spec.aligned and problem.rows <= (device.sms - problem.sm_margin) * ctas * spec.rows_per_cta:
        # All rows run at once, and load both weights with x.
        return replace(spec, ctas_per_sm=ctas, weights_in_registers=True)
    return replace(spec, ctas_per_sm=max(1, ctas_by_registers(spec, registers, RESIDENT)))
