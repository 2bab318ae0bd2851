"""Who holds what of a row: tables by row length, and from them the kernel of a `Problem` on a `Device`.

The shape of a row (who holds which columns) depends on cols, dtypes and architecture, never on the number of rows nor
on addresses: a row's result is the same to the bit whatever else is in the batch. Pure functions; no GPU library is
imported.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..device import Device
from ..expression_value import FUNCTIONS
from .problem import ITEMSIZE, Problem
from .spec import WARP, NormSpec, RowShape, dynamic_shared, shared_memory


class Tier(NamedTuple):
    """How rows of up to `most` packs are run."""

    most: int
    packs: tuple[int, ...]  # a thread holds: the first number that leaves no thread idle, or the last; () by the rule
    cluster: int
    cta: int  # threads of a CTA, where a row needs fewer several rows share it
    resident: int  # threads that an SM is to hold at once; bounds the registers of a thread
    stages: int = 0  # rows wait in shared memory: places for each of the rows of a CTA
    ask_early: tuple[str, ...] = ()  # operations that ask for the next row before they sum up the present one, where
    # x and weight have 16 bits and cols is a power of two: RMSNorm of 1024 and 4096 cols 0.96 early, 0.88 late, but of
    # 2240, 3136 and 5632 cols 0.84 to 0.89 early, 0.90 to 0.95 late
    idle: int = 0  # SMs that are left idle
    columns: int = 64  # bytes of weight and bias that a thread of the forward pass keeps in registers


# Forward rows that one CTA may hold are run by _short_forward. A line for each row length at which a thread's packs or
# a row's threads change a good deal, for those who want an example of each.
SHORT = tuple(
    Tier(most, (), 1, 128, 1024) for most in (2, 32, 64, 128, 256, 320, 512, 640, 1024, 1280, 2048, 3072, 4096)
)
# Fractions of the streaming roof: bfloat16 on an H200, 2026-11-21; what else was tried is in bench/NOTES.md.
FORWARD = (
    *SHORT,
    Tier(8192, (8,), 2, 512, 512, stages=2, columns=256, idle=8),  # 65536 cols 0.97; all SMs 0.96, three places 0.95
    Tier(16384, (8,), 4, 512, 512, stages=2, columns=256),  # 131072 cols 0.98
    Tier(32768, (8,), 8, 512, 512, stages=2, columns=256),  # 262144 cols 0.97
    Tier(65536, (8,), 16, 512, 512, stages=2, columns=256),
    # With wider weight and bias, of which a thread can keep half as many.
    Tier(8192, (4,), 4, 512, 512, stages=3, columns=256),
    Tier(16384, (4,), 8, 512, 512, stages=3, columns=256),
    Tier(32768, (4,), 16, 512, 512, stages=3, columns=256),
)
# A thread also holds dweight and dbias of its columns. About 64 KB under way on an SM are best: 448 threads 0.95 of the
# roof at 1024 cols, 512 threads 0.92; for 16384 cols clusters of 2 x 256 threads 0.96, a CTA of 512 threads 0.90.
BACKWARD = (
    Tier(512, (), 1, 512, 512, stages=3, ask_early=("rms_norm",)),
    Tier(1024, (2,), 1, 512, 512, stages=3, ask_early=("rms_norm",)),  # 4096 cols 0.94, 8192 cols 0.95
    Tier(1344, (3,), 1, 448, 448, stages=3),  # 10240 cols 0.91; two places 0.85
    Tier(1536, (3,), 1, 512, 512, stages=2),  # 12288 cols 0.94; three places 0.86
    Tier(2048, (4,), 2, 256, 256, stages=3, idle=4),  # 16384 cols 0.99, RMSNorm 0.99; all SMs 1.02, 0.97
    Tier(2304, (3,), 2, 384, 384, stages=3),  # 18432 cols 0.91; four packs 0.84, clusters of 4 0.56
    Tier(3072, (4,), 2, 384, 384, stages=3),  # 20480 cols 0.91, 24576 cols 0.80; clusters of 4 0.60, 0.79
    Tier(4096, (4,), 4, 256, 256, stages=3),  # 32768 cols 0.96
    Tier(6144, (4,), 4, 384, 384, stages=3),  # 45056 cols 0.90, 49152 cols 0.84; clusters of 8 0.71, 0.75
    Tier(8192, (4,), 8, 256, 256, stages=3),  # 65536 cols 0.91 to 0.98; clusters of 4 x 512 threads 0.94
    Tier(15360, (5,), 8, 384, 384, stages=3),  # 114688 cols 0.87; two places 0.83
    Tier(16384, (4, 6), 8, 512, 512, stages=2),  # 131072 cols 0.95; three places 0.86
    Tier(32768, (4, 6), 16, 512, 512, stages=2),  # 262144 cols 0.87
)
TABLES = {"forward": FORWARD, "backward": BACKWARD}


def choose(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """The tier that takes rows of this length, and its kernel; None if the row has to be streamed."""
    vectors = ceil_div(problem.cols, 16 // ITEMSIZE[problem.row_dtype])
    for tier in TABLES[problem.direction]:
        if vectors <= tier.most and device.runs_clusters(tier.cluster):
            spec = _tier_spec(problem, tier, device)
            if spec is not None:
                return tier, spec
    return None


def _tier_spec(problem: Problem, tier: Tier, device: Device) -> NormSpec | None:
    """The kernel of a tier; None if its rows do not fit."""
    if tier in SHORT:
        return _short_forward(problem, tier, device)
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(ceil_div(problem.cols, pack), tier.cluster)
    shapes = (
        [_power_of_two_shape(pack, packs, problem.direction)]
        if not tier.packs
        else [_shape(pack, packs, choice, tier.cluster) for choice in tier.packs]
    )
    shapes = [one for one in shapes if _registers_suffice(problem, tier, one, device)]
    if not shapes:
        return None
    shape = next((one for one in shapes if one.capacity == packs * pack * tier.cluster), shapes[-1])
    columns = _column_bytes(problem, shape)
    spec = kernel_spec(problem, problem.direction, shape)
    resident = tier.resident
    groups = problem.groups
    rows_per_cta = max(1, min(tier.cta, resident) // shape.threads) if tier.cluster == 1 else 1
    if not tier.packs:
        # Rows that several warps hold wait for each other: in one CTA where they are many (4096 cols 0.94 of the roof,
        # in two 0.86 to 0.95), in two where they are few (8 M elements of 2048 cols 0.77 and 0.74).
        ctas = 1 if shape.threads > 64 and _bytes_per_sm(problem, device) > RING_BYTES else 2
        rows_per_cta = min(max(1, tier.cta // ctas // shape.threads), _rows_under_way(problem, tier, shape, ctas))
        resident = min(resident, ctas * rows_per_cta * shape.threads)
    if groups:  # a CTA has rows of one group alone
        whole_warps = _whole_warps(shape)
        rows_per_cta = min(rows_per_cta, ceil_div(problem.rows // groups.count, whole_warps) * whole_warps)
    sixteen_bits = max(ITEMSIZE[dtype] for dtype in (problem.row_dtype, *_column_dtypes(problem))) == 2
    spec = replace(
        spec,
        rows_per_cta=rows_per_cta,
        ctas_per_sm=max(1, resident // (shape.threads * rows_per_cta)) if tier.cluster == 1 else 1,
        ask_early=sixteen_bits and problem.operation.norm in tier.ask_early and _is_power_of_two(problem.cols),
        columns_stay=_columns_stay(problem, tier, spec, columns, device),
    )
    return _in_shared_memory(spec, tier, problem.rows, device)


# Packs of a thread, the best first, where several numbers waste as little.
PREFERRED_PACKS = {"forward": (5, 4, 6, 3, 7, 8, 2, 1), "backward": (2, 3, 4, 5, 6, 7, 8, 1)}


def _power_of_two_shape(pack: int, packs: int, direction: str) -> RowShape:
    """Threads, a power of two, that leave the fewest places for packs empty."""

    def badness(shape: RowShape) -> tuple:
        within_warp = shape.threads < WARP
        order = -shape.threads if within_warp else PREFERRED_PACKS[direction].index(shape.packs)
        return shape.capacity, within_warp, order

    def allowed(shape: RowShape) -> bool:
        # In the backward pass a thread also holds the sums of its columns, twice 8 registers a pack.
        most = {WARP: 5, 64: 4}.get(shape.threads, 3)
        if direction == "forward":
            most = 5 if shape.threads == 256 else 8  # 12288 cols by 512 threads 0.95, by 256 less than 0.94
        return shape.packs <= most and (shape.packs > 1 or shape.threads == 1)

    shapes = (RowShape(pack, 2**power, ceil_div(packs, 2**power)) for power in range(10))
    return min(filter(allowed, shapes), key=badness)


def _short_forward(problem: Problem, tier: Tier, device: Device) -> NormSpec:
    """Rows of up to 4096 packs. How they wait follows from how many there are.

    Whoever holds what of a row is the same for all, and so are the bits.
    """
    itemsize = ITEMSIZE[problem.row_dtype]
    pack = 16 // itemsize
    packs = ceil_div(problem.cols, pack)
    shape = _power_of_two_shape(pack, packs, "forward")
    rows_per_cta = tier.cta // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    sms = device.sms - problem.sm_margin
    column_words = _column_bytes(problem, shape) // 4
    alone = replace(spec, rows_per_cta=1, columns_stay=True)
    can_spread = not spec.finds_scales  # the largest of a row would be one exchange more
    if can_spread and 1 < shape.threads <= WARP and shape.packs > 2 and problem.rows <= 2 * sms:
        return replace(alone, kernel="forward_spread")  # 1 x 1600 1.5 us, by a warp 1.75; of several warps no gain
    if packs > 1024 and device.runs_clusters(8):
        few_threads = shape.threads * shape.packs <= 8 * 1024
        if can_spread and few_threads and 8 * problem.rows <= sms:  # 1 x 16384 2.3 us, in one CTA 3.2
            return replace(alone, kernel="forward_spread", shape=_in_clusters(shape, 8))
        if 4 * problem.rows <= sms:  # 32 x 16384 3.5 us, in one CTA 3.8
            # Beside a row at odd addresses 160 registers of weight and bias spilled 128 bytes.
            return replace(alone, shape=_in_clusters(shape, 4), columns_stay=column_words <= 128)

    working = 44 if problem.row_dtype != "float64" else 72
    if spec.scales:
        working += 12 if spec.aligned else 32
    row_words = shape.packs * pack * itemsize // 4 * (1 + len(spec.beside)) * (2 if len(spec.inputs) > 1 else 1)
    if device.arch < 90 and any(step.function in FUNCTIONS for step in problem.operation.epilogue.steps):
        working += 16  # a gate's sigmoid spilled 4 bytes, few rows of 4096 cols
    if not spec.aligned:
        working += _words_to_shift(spec)
    # At odd addresses a row on its way to registers takes two words for one, and a column one for each element.
    waiting = row_words if spec.aligned else 2 * row_words
    at_once = waiting + (column_words if spec.columns_aligned else 2 * column_words)
    # While the largest of a row is looked for, y is held as float32.
    y_words = shape.packs * pack if spec.scales == "per_row" else 0
    ctas = _ctas_of(spec, working + max(at_once, y_words))
    if ctas and problem.rows <= sms * ctas * rows_per_cta:
        # All rows at once: weight and bias are asked for with x.
        return replace(spec, ctas_per_sm=ctas, columns_stay=True)
    many = _bytes_per_sm(problem, device) > RING_BYTES
    waits = shape.packs > 2 and len(spec.matrices) == 1 and not spec.grouped
    if waits and not (many and shape.packs <= 5):
        found = _short_ring(spec, column_words, working + y_words, (32 if many else 48) << 10, device)
        if found is not None:
            return found
    # Weight and bias come late, from L1. Threads enough: of three packs 0.95 to 0.97 with 1408 on an SM.
    width = _widest_column(spec)
    narrow = spec.aligned and len(spec.matrices) == 1 and width <= ITEMSIZE[problem.row_dtype] and not y_words
    narrow = narrow and not (spec.grouped and spec.scales)  # 4 bytes spilled on sm_80, 128 cols
    most, words = (1536, 28) if shape.packs <= 3 and narrow else (tier.resident, working)
    if y_words and spec.aligned and spec.columns_aligned:  # 64 registers for four packs, 80 for five, 96 for seven
        words = 32 + 4 * (rows_per_cta > 1) + width // 4 * pack + 8 * (itemsize == 4)
        # Beside a residual 64 registers for four packs spilled 4 bytes; on sm_100 108 for seven 8.
        words += (8 if device.arch < 100 else 16) * (len(spec.matrices) - 1)
        if width < 4 and len(spec.matrices) == 1 and shape.packs <= (2 if problem.norm.subtracts_mean else 3):
            most, words = 1536, 40 - y_words
    return replace(spec, ctas_per_sm=max(1, _ctas_of(spec, words + max(waiting, y_words), most)))


def holds_twice(row_dtype: str, cols: int) -> bool:
    """Whether one kernel does two norms of such rows, one after the other: a CTA holds them in six packs a thread.

    With eight, at odd addresses, it spilled 48 bytes on sm_100.
    """
    return ceil_div(cols, 16 // ITEMSIZE[row_dtype]) <= 3072


def forward_twice(problem: Problem) -> NormSpec:
    """That kernel. A row has the shape of either norm's own, and so its bits."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(problem.cols, pack)
    shape = _power_of_two_shape(pack, packs, "forward")
    rows_per_cta = SHORT[0].cta // shape.threads if shape.threads <= WARP else 1
    spec = kernel_spec(
        problem, "forward_twice", shape, rows_per_cta=rows_per_cta, streamed_x=shape.threads <= 64, streamed_y=True
    )
    # x and residual wait at once; of either norm's vectors a pack comes late, from L1.
    working = (52 if problem.row_dtype != "float64" else 88) + _words_to_shift(spec) * (1 if spec.aligned else 4)
    waiting = shape.packs * sum(pack * one.itemsize // 4 for one in spec.matrices) * (1 if spec.aligned else 2)
    return replace(spec, ctas_per_sm=max(1, _ctas_of(spec, working + waiting, SHORT[0].resident)))


def _widest_column(spec: NormSpec) -> int:
    """Bytes of an element of weight or bias."""
    return max((one.itemsize for one in spec.columns), default=0)


# Of rows to each SM. Of more, rows in registers are faster than a ring: 64 M elements 0.95 and 0.91; 8 M 0.83 and 0.92.
RING_BYTES = 512 << 10


def _bytes_per_sm(problem: Problem, device: Device) -> float:
    return problem.rows * problem.cols * ITEMSIZE[problem.row_dtype] / device.sms


def _in_clusters(shape: RowShape, size: int) -> RowShape:
    """The same threads, in as many CTAs."""
    return replace(shape, threads=shape.threads // size, cluster=size)


def _short_ring(spec: NormSpec, column_words: int, working: int, under_way: int, device: Device) -> NormSpec | None:
    """Two places for each row group, and CTAs that ask for `under_way` bytes of rows on an SM.

    None if less than half of them fit beside weight and bias, which stay in registers.

    In shared memory they take 40 us to come, all SMs asking L2 for the same lines; late from L1 they cost 4 of 11 us.
    """
    words = working + 14 + 3 * spec.shape.packs
    spec = replace(spec, stages=2, ask_early=True, columns_stay=True)
    needed = shared_memory(spec) + dynamic_shared(spec)
    wanted = max(1, round(under_way / (spec.cols * ITEMSIZE[spec.row_dtype] * spec.rows_per_cta)))
    ctas = min(wanted, _ctas_of(spec, words + column_words), (device.shared + 1024) // (needed + 1024))
    return _with_shifted(replace(spec, ctas_per_sm=ctas), device) if ctas and 2 * ctas + 1 >= wanted else None


def _words_to_shift(spec: NormSpec) -> int:
    """Registers in which a thread shifts a pack at an odd address, beside the pack itself: of the widest array."""
    width = max(one.itemsize for one in spec.operands if one.kind in ("full", "column", "group"))
    return spec.shape.pack * width // 4


def _ctas_of(spec: NormSpec, registers: int, most: int = 1536) -> int:
    """CTAs whose threads have so many registers each, on an SM with 64 K of them in four equal parts."""
    return min(most, 65536 // registers // (4 * WARP) * 4 * WARP) // spec.threads if registers <= 200 else 0


def _rows_under_way(problem: Problem, tier: Tier, shape: RowShape, ctas: int) -> int:
    """Rows of a CTA, whole warps of them, so that the CTAs of an SM have about 64 KB under way."""
    read = (one for one in problem.operands if one.kind == "full" and not one.written)
    row_bytes = problem.cols * sum(one.itemsize for one in read)
    rows = (64 << 10) / (ctas * (tier.stages - 1) * row_bytes)
    if shape.threads <= WARP:  # three warps of 1280 cols, of five packs each, 0.69 of the roof, four of 1152 0.94
        return max(1, ceil(rows * shape.threads / WARP)) * WARP // shape.threads
    return max(1, round(rows))


def _whole_warps(shape: RowShape) -> int:
    """The fewest rows of a CTA."""
    return max(1, WARP // shape.threads)


def _in_shared_memory(spec: NormSpec, tier: Tier, rows: int, device: Device) -> NormSpec | None:
    """As many places as fit, two at least: fewer than the tier's for a wide dy or weight, then fewer rows in a CTA."""
    whole_warps = _whole_warps(spec.shape)
    threads, resident = _small_ctas(rows, device, spec.threads, spec.threads * spec.ctas_per_sm)
    most = min(spec.rows_per_cta, max(whole_warps, threads // spec.shape.threads))
    # Rows at odd addresses take a little more; whether a tier takes rows of a length must not depend on it.
    least = replace(spec, rows_per_cta=whole_warps, stages=2, aligned=False, columns_aligned=False)
    if shared_memory(least) + dynamic_shared(least) > device.shared:
        most = 0
    for rows_per_cta in range(most, 0, -whole_warps):
        for stages in range(tier.stages, 1, -1):
            fitting = replace(spec, rows_per_cta=rows_per_cta, stages=stages)
            needed = shared_memory(fitting) + dynamic_shared(fitting)
            if needed <= device.shared:
                ctas = (device.shared + 1024) // (needed + 1024)  # each CTA takes 1 KB besides its own
                most_ctas = max(1, resident // fitting.threads) if tier.cluster == 1 else 1
                return _with_shifted(replace(fitting, ctas_per_sm=min(most_ctas, ctas)), device)
    # A forward pass of several matrices keeps the shape of the plain norm's rows, and so its bits: they wait in
    # registers where shared memory is too small.
    if spec.kernel == "forward" and len(spec.matrices) > 1:
        return replace(spec, rows_per_cta=whole_warps, ctas_per_sm=1)
    return None


def _with_shifted(spec: NormSpec, device: Device) -> NormSpec:
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
    words = sum(spec.shape.pack * one.itemsize // 4 for one in spec.matrices)
    words += len(spec.sums) * spec.shape.pack * ITEMSIZE[spec.compute] // 4
    if spec.columns_stay:
        words += sum(spec.shape.pack * one.itemsize // 4 for one in spec.columns)
    fit = _ctas_of(spec, working + words * spec.shape.packs) >= spec.ctas_per_sm
    return replace(spec, shifted_stay=not spec.aligned and fit)


def _small_ctas(rows: int, device: Device, threads: int, resident: int) -> tuple[int, int]:
    """Threads of a CTA and threads that an SM holds, for a few rows to each SM.

    The more row groups share a CTA, the longer their sums take to be added up. Backward of 512 x 1024 takes 6.1 us
    with a CTA a row and 7.2 with seven rows in a CTA, 4096 x 1024 13.0 with two and 13.7 with seven.
    """
    if rows <= 8 * device.sms:
        return 64, 256
    return (128, resident) if rows <= 32 * device.sms else (threads, resident)


def _column_dtypes(problem: Problem) -> list[str]:
    """Of weight and bias, and whatever else is read once for all rows."""
    return [one.dtype for one in problem.operands if one.kind in ("column", "group") and not one.written]


def _full_dtypes(problem: Problem) -> set[str]:
    """Of all that is read or written by rows."""
    return {problem.row_dtype} | {one.dtype for one in problem.operands if one.kind == "full"}


def _column_bytes(problem: Problem, shape: RowShape) -> int:
    """Of weight and bias for the columns of a thread."""
    return shape.packs * shape.pack * sum(ITEMSIZE[dtype] for dtype in _column_dtypes(problem))


def _registers_suffice(problem: Problem, tier: Tier, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for what it keeps from row to row, where rows wait in shared memory."""
    if problem.direction == "forward":
        return _column_bytes(problem, shape) <= tier.columns
    # 128 registers are too few for a weight wider than x beside the accumulators of four packs, 168 for float64 beside
    # those of five; on sm_100 for any weight.
    if shape.threads <= 256 or shape.packs < 4:
        return True
    width = max((ITEMSIZE[dtype] for dtype in _column_dtypes(problem)), default=0) // ITEMSIZE[problem.row_dtype]
    return device.arch < 100 and width <= (1 if shape.packs == 4 else 2)


def _columns_stay(problem: Problem, tier: Tier, spec: NormSpec, columns: int, device: Device) -> bool:
    """Whether a thread of the forward pass keeps weight and bias. Where it says no, ptxas spilled 4 to 176 bytes."""
    # Beside two matrices add_layer_norm took 173 us with them and 139 without, 16384 x 4096.
    if problem.direction == "forward" and (len(spec.matrices) > 1 or spec.finds_scales or spec.grouped):
        return False
    if problem.direction == "backward" or columns > tier.columns:
        return False
    same = _full_dtypes(problem) == {problem.row_dtype} != {"float64"}
    plain = spec.aligned and same and (spec.shape.packs <= 4 or tier.cluster < 16)
    full = spec.shape.capacity == problem.cols
    return plain and (device.arch < 100 or (full and not problem.norm.subtracts_mean))


def kernel_spec(problem: Problem, kernel: str, shape: RowShape, **changes) -> NormSpec:
    spec = NormSpec(
        kernel=kernel,
        operation=problem.operation,
        cols=problem.cols,
        row_dtype=problem.row_dtype,
        # Of strides the text has no more than how many there are.
        operands=tuple(
            replace(one, row_stride=0, outer_stride=0, inner=min(1, one.inner), groups=None) for one in problem.operands
        ),
        aligned=_vectors_fit(problem, shape.pack, ("full", "group")),
        columns_aligned=_vectors_fit(problem, shape.pack, ("group",)),
        shape=shape,
    )
    return replace(spec, **changes)


def _vectors_fit(problem: Problem, pack: int, kinds: tuple[str, ...]) -> bool:
    """Every pack of every row, or vector, of such operands starts at a multiple of its size (or of 16 bytes)."""
    return problem.aligned and (
        problem.rows == 1
        or all(
            stride * one.itemsize % min(16, pack * one.itemsize) == 0
            for one in problem.operands
            if one.kind in kinds
            for stride in (one.row_stride, one.outer_stride)
        )
    )


def _shape(pack: int, packs: int, packs_per_thread: int, cluster: int) -> RowShape:
    """The fewest threads that hold `packs` packs in a CTA: a power of two within a warp, else whole warps."""
    threads = ceil_div(packs, packs_per_thread)
    threads = _power_of_two_from(threads) if threads <= WARP else ceil_div(threads, WARP) * WARP
    if cluster > 1:
        threads = max(threads, WARP)
    return RowShape(pack, threads, ceil_div(packs, threads), cluster)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two_from(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
