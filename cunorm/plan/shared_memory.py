"""The shared memory of a kernel: what its text declares, and what its launch adds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..kernel.device import Device
from ..operation import NORMS
from .problem import ITEMSIZE, Operand
from .spec import (
    COLUMN_BYTES,
    COLUMN_PACKS,
    MAILBOX,
    RUN_GAP,
    SHARED_ALIGNMENT,
    SUM_COLUMNS,
    WARP,
    FewRowsSpec,
    KernelSpec,
    NormSpec,
    OtherSpec,
    SumSpec,
)

SHARED_LIMIT = 48 << 10  # bytes that a CTA can declare, on every architecture
RESERVED = 1024  # bytes of an SM's shared memory that a CTA takes besides its own


@lru_cache(maxsize=4096)
def shared_memory(spec: KernelSpec) -> int:
    """Bytes of static shared memory; the compile test holds it against ptxas."""
    if isinstance(spec, OtherSpec):
        return spec.shared_memory
    if isinstance(spec, FewRowsSpec):
        return shared_memory(spec.columns) + shared_memory(spec.rows)
    compute = ITEMSIZE[spec.compute]
    if isinstance(spec, SumSpec):
        sums = spec.threads // max(WARP, spec.lanes)
        return compute * sums * spec.lanes * SUM_COLUMNS if sums > 1 else 0
    if spec.kernel == "column_gradients":
        holders = spec.threads // max(WARP, spec.shape.threads)
        return len(spec.sums) * holders * spec.shape.capacity * compute if spec.rows_per_cta > 1 else 0
    norm = NORMS[spec.operation.norm]
    slots = max(1, spec.shape.threads // WARP) * spec.shape.cluster
    lane_sums = 0
    if spec.kernel == "forward_spread" and spec.shape.packs > spec.held:
        lane_sums = norm.lane_sums * spec.shape.packs * spec.shape.threads * compute
    if slots == 1:
        return lane_sums
    counts = [1] if spec.scales == "per_row" else []
    if spec.kernel == "forward_pairs":
        return 2 * slots * compute * (norm.forward_values + sum(counts))
    if spec.kernel.startswith("backward"):
        counts += [norm.backward_values] if spec.of_s else []
        counts += [len(spec.row_sums)] if spec.row_sums else []
    else:
        counts.append(norm.streamed_values if spec.kernel == "forward_streamed" else norm.forward_values)
    if not counts:
        return lane_sums
    if spec.shape.cluster > 1:  # a slot's numbers go in one message
        counts = [1 << (count - 1).bit_length() for count in counts]
    total = lane_sums + spec.rows_per_cta * 2 * sum(count * slots * compute + MAILBOX for count in counts)
    return -(-total // SHARED_ALIGNMENT) * SHARED_ALIGNMENT if dynamic_shared(spec) else total


def launch_shared(spec: KernelSpec, device: Device) -> int:
    """Bytes of dynamic shared memory that the launch asks for.

    What may begin before the kernel in front of it has left every SM asks for so much that no SM has room for more of
    its CTAs than planned: else they crowd on those that were left first, which costs 3 to 4% (docs/tuning.md).
    """
    needed = dynamic_shared(spec)
    if not needed or not device.overlaps_launches or not isinstance(spec, NormSpec) or not spec.leaves_partial_rows:
        return needed
    of_sm = device.shared + RESERVED
    return max(needed, of_sm // (spec.ctas_per_sm + 1) - RESERVED + SHARED_ALIGNMENT)


def ctas_that_fit(shared: int, device: Device) -> int:
    """How many CTAs that have so many bytes each fit on an SM."""
    return (device.shared + RESERVED) // (shared + RESERVED)


@lru_cache(maxsize=4096)
def dynamic_shared(spec: KernelSpec) -> int:
    """Bytes of shared memory that a kernel needs besides: places of rows and columns, later sums of the row groups."""
    if isinstance(spec, OtherSpec):
        return spec.dynamic_shared
    if isinstance(spec, FewRowsSpec):
        return dynamic_shared(spec.rows)
    if spec.kernel not in ("forward", "backward") or isinstance(spec, SumSpec):
        return 0
    shape, rows = spec.shape, spec.rows_per_cta
    threads = rows * shape.threads

    def places(operands: Iterable[Operand]) -> int:
        """One of each for each of the rows of a CTA."""
        packs = threads * shape.packs
        gaps = packs // shape.lanes * RUN_GAP
        return sum(
            packs * shape.pack * one.itemsize + gaps * (not spec.has_vectors(one))
            for one in operands
            if one.kind not in ("seed", "per_row")
        )

    if spec.kernel == "forward":
        return spec.stages * places((*spec.inputs, *spec.beside))
    if spec.kernel == "backward" and not spec.stages:
        return 0
    total = spec.stages * places(spec.matrices)
    width = sum(one.itemsize for one in spec.columns)
    if shape.packs > COLUMN_PACKS or shape.packs * shape.pack * width > COLUMN_BYTES:
        total += places(spec.columns)
    # A warp holds a row group, or several whose sums it adds up by shuffles.
    holders = threads // max(WARP, shape.threads)
    sums = len(spec.sums) * holders * shape.capacity // shape.cluster * ITEMSIZE[spec.compute] if holders > 1 else 0
    return max(total, sums)
