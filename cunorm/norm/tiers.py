"""Who holds what of a row: tables by row length, and from them the kernel of a `Problem` on a `Device`.

The shape of a row (who holds which columns) depends on cols, dtypes and architecture, never on the number of rows nor
on addresses: a row's result is the same to the bit whatever else is in the batch. Pure functions; no GPU library is
imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..device import Device
from ..operation import SEED, derivative
from .cluster_backward import backward_shape, cluster_backward
from .cluster_forward import cluster_forward, places
from .odd_backward import MOST_PACKS, odd_backward
from .problem import ITEMSIZE, Operand, Problem
from .registers import column_dtypes, with_rows_kept
from .shapes import ceil_div, is_power_of_two, kernel_spec, shape_of, short_backward_shape
from .shared_memory import dynamic_shared, shared_memory
from .short_forward import short_forward
from .short_rings import RING_BYTES
from .spec import WARP, NormSpec, RowShape


class Tier(NamedTuple):
    """How rows of up to `most` packs are run."""

    most: int
    # Of a tier of forward rows its own rule has the rest.
    packs: tuple[int, ...] = ()  # that a thread may hold; () by the rule of powers of two
    cluster: int = 1
    cta: int = 512  # threads of a CTA, where a row needs fewer several rows share it
    resident: int = 512  # threads that an SM is to hold at once; bounds the registers of a thread
    stages: int = 0  # rows wait in shared memory: places for each of the rows of a CTA; 0 by their size
    ask_early: tuple[str, ...] = ()  # operations that ask for the next row before they sum up the present one, where
    # x and weight have 16 bits and cols is a power of two: RMSNorm of 1024 and 4096 cols 0.96 early, 0.88 late, but of
    # 2240, 3136 and 5632 cols 0.84 to 0.89 early, 0.90 to 0.95 late
    always_early: bool = False  # whatever cols is
    idle: int = 0  # SMs that are left idle
    norm: str = ""  # that it is for, if not for all
    whole: bool = False  # for rows of whole packs alone
    fused_packs: int = 0  # that a thread holds instead where there is more to do than in a plain norm


# Forward rows that one CTA may hold are run by short_forward.py. A line for each row length at which a thread's packs
# or a row's threads change a good deal, for those who want an example of each.
SHORT = tuple(map(Tier, (2, 32, 64, 128, 256, 288, 320, 512, 640, 672, 1024, 1280, 1536, 1792, 2048, 3072, 4096)))
# Longer ones by cluster_forward.py, likewise.
CLUSTERS = tuple(Tier(most, cluster=2) for most in (5120, 6144, 8192, 10240, 16384, 24576, 32768, 65536))
FORWARD = (*SHORT, *CLUSTERS)
# Backward rows of whole packs, of x and dy alone, by cluster_backward.py.
LONG = Tier(65536, cluster=16, whole=True)
# Those that end within a pack, of x and dy alone, by odd_backward.py, where that has a better kernel.
ODD = Tier(MOST_PACKS)
# Fractions of the streaming roof: bfloat16 on an H200, 2026-11-21; what else was tried is in bench/NOTES.md.
# A thread also holds dweight and dbias of its columns. About 64 KB under way on an SM are best: 448 threads 0.95 of the
# roof at 1024 cols, 512 threads 0.92; for 16384 cols clusters of 2 x 256 threads 0.96, a CTA of 512 threads 0.90.
BACKWARD = (
    ODD,
    Tier(512, (), 1, 512, 512, stages=3, ask_early=("rms_norm",)),
    # 4608 cols: LayerNorm by six warps of three packs 102 us, by nine of two 114, RMSNorm 108 and 100. Two rows on an
    # SM, each in a CTA, 99 us, in one CTA 101.
    Tier(576, (3,), 1, 192, 512, stages=3, norm="layer_norm"),
    Tier(640, (2,), 1, 320, 640, stages=3, norm="layer_norm"),
    Tier(640, (2,), 1, 640, 640, stages=2, norm="rms_norm", always_early=True),
    Tier(1024, (2,), 1, 512, 512, stages=3, ask_early=("rms_norm",)),  # 4096 cols 0.94, 8192 cols 0.95
    Tier(1344, (3,), 1, 448, 448, stages=3),  # 10240 cols 0.91; two places 0.85
    Tier(1536, (3,), 1, 512, 512, stages=2),  # 12288 cols 0.94; three places 0.86
    # 16384 cols 0.99, RMSNorm 0.99; all SMs 1.02, 0.97. By two packs layer_norm_modulate 111 us, by four 132, and
    # add_rms_norm 131 and 133.
    Tier(2048, (4,), 2, 256, 256, stages=3, idle=4, fused_packs=2),
    Tier(2304, (3,), 2, 384, 384, stages=3),  # 18432 cols 0.91; four packs 0.84, clusters of 4 0.56
    Tier(3072, (3, 4), 2, 512, 512),  # 20480 cols by three packs 105 us, by five 112
    Tier(4096, (4,), 4, 256, 256),  # 32768 cols 0.96
    LONG,
    Tier(6144, (3, 4), 4, 512, 512),
    Tier(8192, (4,), 8, 256, 256),  # 65536 cols 0.91 to 0.98; clusters of 4 x 512 threads 0.94
    # Of these packs those that are the least work (cluster_backward.py): 73728 cols by three 105 us, by five 110, by
    # four 116.
    Tier(16384, (3, 4, 5), 8, 512, 512),
    Tier(32768, (3, 4, 5), 16, 512, 512),
)
TABLES = {"forward": FORWARD, "backward": BACKWARD}


def choose(problem: Problem, device: Device) -> tuple[Tier, NormSpec] | None:
    """The tier that takes rows of this length, and its kernel; None if the row has to be streamed."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    vectors = ceil_div(problem.cols, pack)
    for tier in TABLES[problem.direction]:
        if tier.norm not in ("", problem.operation.norm) or (tier.whole and problem.cols % pack):
            continue
        if vectors <= tier.most and device.runs_clusters(tier.cluster):
            spec = _tier_spec(problem, tier, device)
            if spec is not None:
                return tier, spec
    return None


def _tier_spec(problem: Problem, tier: Tier, device: Device) -> NormSpec | None:
    """The kernel of a tier; None if its rows do not fit."""
    if tier in SHORT:
        return short_forward(problem, device)
    if tier in CLUSTERS:
        return cluster_forward(problem, device)
    if tier in (LONG, ODD):
        rule = cluster_backward if tier is LONG else odd_backward
        return rule(problem, device) if _is_plain(problem) else None
    shape = _backward_shape(problem, tier, device)
    if shape is None:
        return None
    spec = kernel_spec(problem, "backward_twice" if problem.operation.second else "backward", shape)
    # In 96 registers rows at odd addresses spilled 4 bytes, on sm_100 others 16, and what is kept of g 100.
    is_dear = _is_dear(problem)
    few = spec.aligned and device.arch < 100 and not is_dear
    resident = tier.resident if few else min(tier.resident, 512)
    groups = problem.groups
    rows_per_cta = max(1, min(tier.cta, resident) // shape.threads) if tier.cluster == 1 else 1
    norm = problem.operation.norm
    early = tier.always_early or (norm in tier.ask_early and is_power_of_two(problem.cols))
    sixteen_bits = max(ITEMSIZE[dtype] for dtype in (problem.row_dtype, *column_dtypes(problem))) == 2
    early = sixteen_bits and early
    if not tier.packs:
        rows_per_cta, ctas = _rows_under_way(problem, tier, shape, early)
        # In one CTA, else each of them leaves a partial row of each group; of more matrices 4 to 12 bytes spilled.
        if groups and shape.threads > WARP and len(_read(problem)) <= 2:
            rows_per_cta, ctas = min(ctas * rows_per_cta, tier.cta // shape.threads), 1
        resident = min(resident, ctas * rows_per_cta * shape.threads)
    late = _asks_late(problem, tier, shape, device)
    if late:
        rows_per_cta, stages = _rows_asked_for_late(problem, tier, shape)
        tier, resident = tier._replace(stages=stages), rows_per_cta * shape.threads
    elif tier.fused_packs and len(_read(problem)) > 2:
        tier = tier._replace(stages=2)  # a place of three matrices has 48 KB
    if groups:  # a CTA has rows of one group alone
        whole_warps = _whole_warps(shape)
        rows_per_cta = min(rows_per_cta, ceil_div(problem.rows // groups.count, whole_warps) * whole_warps)
    spec = replace(
        spec,
        rows_per_cta=rows_per_cta,
        ctas_per_sm=max(1, resident // (shape.threads * rows_per_cta)) if tier.cluster == 1 else 1,
        # Few rows that a warp or two hold ask late: 8 M elements of 256 cols 16.5 us, early 17.1; 64 M 100.5 and 98.7.
        ask_early=early
        and not late
        and (shape.threads > 2 * WARP or 2 * problem.matrix_bytes > RING_BYTES * device.sms),
        # Of rows at odd addresses three packs spilled 44 bytes with it and none without.
        keeps_g=is_dear and (spec.aligned or shape.packs <= 2),
    )
    return _in_shared_memory(spec, tier, problem.rows, device)


def _is_dear(problem: Problem) -> bool:
    """Whether the derivative takes much to compute."""
    wanted = (one.name[1:] for one in problem.operands if one.written)
    return derivative(problem.operation, wanted, problem.by_name).is_dear


def _is_plain(problem: Problem) -> bool:
    """Whether a backward pass reads x and dy, or s and dy, and has little to compute."""
    return not problem.groups and not problem.operation.second and len(_read(problem)) <= 2 and not _is_dear(problem)


def _backward_shape(problem: Problem, tier: Tier, device: Device) -> RowShape | None:
    """Who holds what of a row; None where a thread has no registers for it."""
    pack = 16 // ITEMSIZE[problem.row_dtype]
    packs = ceil_div(ceil_div(problem.cols, pack), tier.cluster)

    def by(choices: Iterable[int]) -> list[RowShape]:
        shapes = [shape_of(pack, packs, choice, tier.cluster) for choice in choices]
        shapes = shapes if tier.packs else [short_backward_shape(pack, packs, whole=problem.cols % pack == 0)]
        return [one for one in shapes if _registers_suffice(problem, one, device)]

    shapes = by([tier.fused_packs]) if tier.fused_packs and not _is_plain(problem) else []
    shapes = shapes or by(tier.packs)
    return backward_shape(shapes) if shapes else None


def _rows_under_way(problem: Problem, tier: Tier, shape: RowShape, early: bool) -> tuple[int, int]:
    """(rows of a CTA, CTAs of an SM), so that an SM has 54 to 64 KB under way.

    Rows that more than two warps hold share a CTA by two or three, which leave one partial row: 8 M elements of 2048
    cols 17.2 us, by a CTA each 18.2, of 2304 18.5 and 19.2. Two of LayerNorm are in a CTA each: 3776 cols 18.8, in one
    19.1, at 64 M elements 99.1 and 100.1; RMSNorm 17.4 and 16.9, 99.2 and 98.1.
    """
    # Rows that end within a pack are kept by fewer threads: LayerNorm of 1001 cols by six rows 145 us, by eight 159; of
    # 301 by 24 rows 163 and by 28 267 (H100).
    odd = problem.cols % shape.pack != 0 and shape.pack == 8
    # RMSNorm takes 98 to 101 us or 105 to 108, and which of them hangs on little: 512 cols, which ask early, 97.4 with
    # 64 KB and 104.8 with 54; 1472, 2112, 2880 cols, which ask late, 105 to 108 with 60 KB and 100 to 101 with 54.
    # LayerNorm of 2880 cols 98.8 with 60 KB, 103.8 with 54.
    under_way = 64 if early else 60 if problem.norm.subtracts_mean and not odd else 54
    rows = (under_way << 10) / ((tier.stages - 1) * _row_bytes(problem))
    if shape.threads > 2 * WARP:
        count = max(2, round(rows))
        count = min(count, tier.cta // shape.threads) if odd else count
        if len(_read(problem)) > 2:
            return 1, count  # two of 4096 cols beside a gate spilled 8 bytes in one
        if count > 3:
            # Five of 96 threads: LayerNorm of 1099 cols 150 us, two in each of two CTAs 156 (H100).
            return (count, 1) if odd and count % 2 else (2, count // 2)
        return (1, 2) if count == 2 and problem.norm.subtracts_mean else (count, 1)
    # Whole warps, in two CTAs: 1280 cols by three of five packs each 99.3 us, by four 105.3. Twice five are uneven for
    # an SM's four schedulers: 8 M elements of 192 cols 18.6 us, by six 17.8; RMSNorm of 64 M elements of 768 cols 5%
    # less by four. But LayerNorm of those 3% more by six.
    warps = ceil(rows / 2 * shape.threads / WARP)
    # LayerNorm of rows that end within a pack 701 cols by four 146, by five 160 (H100).
    if odd and problem.norm.subtracts_mean and warps > 4:
        warps -= warps % 2
    elif warps == 5 and not problem.norm.subtracts_mean:
        warps = 4
    elif warps == 5 and shape.threads < WARP:
        warps = 6
    return min(max(1, warps) * WARP, tier.cta // 2) // shape.threads, 2


def _asks_late(problem: Problem, tier: Tier, shape: RowShape, device: Device) -> bool:
    """Whether two matrices are written by rows: then less is to be under way, and to be asked for late.

    Rows of groups were not measured, nor those of which a warp holds several.
    """
    if problem.operation.second:
        return True
    results = [one for one in problem.operands if one.kind == "full" and one.written]
    many = problem.matrix_bytes > RING_BYTES * device.sms
    return len(results) > 1 and not problem.groups and many and shape.threads >= WARP and tier.stages > 0


def _rows_asked_for_late(problem: Problem, tier: Tier, shape: RowShape) -> tuple[int, int]:
    """(rows of a CTA, the only one of an SM, places for each), so that about 48 KB are under way.

    rms_norm_gated of 4096 cols 164 us, early 172; of 3072 cols 168, by 72 KB 180; of 8192 cols 167, by 98 KB 181.
    """
    if tier.cluster > 1:
        return 1, 2
    if problem.operation.second:  # norm, add, norm of 4096 cols 209 us, by two launches 224
        # Five rows of five packs each, 1152 cols of float16, spilled 8 bytes.
        rows = max(1, (48 << 10) // _row_bytes(problem))
        return min(rows, 4) if shape.packs == 5 else rows, 2
    rows = min(max(1, round((48 << 10) / _row_bytes(problem))), tier.cta // shape.threads)
    return (1, 3) if rows == 2 else (rows, 2)  # 4096 cols by two rows 175 us


def _read(problem: Problem) -> list[Operand]:
    """The matrices that a backward pass reads."""
    return [one for one in problem.operands if one.kind == "full" and not one.written]


def _row_bytes(problem: Problem) -> int:
    """Of what a backward pass reads of a row."""
    return problem.cols * sum(one.itemsize for one in _read(problem))


def _whole_warps(shape: RowShape) -> int:
    """The fewest rows of a CTA."""
    return max(1, WARP // shape.threads)


def _in_shared_memory(spec: NormSpec, tier: Tier, rows: int, device: Device) -> NormSpec | None:
    """As many places as fit, two at least: fewer than the tier's for a wide dy or weight, then fewer rows in a CTA."""
    whole_warps = _whole_warps(spec.shape)
    threads, resident = _small_ctas(spec, rows, device)
    # Of a single row 512 cols 1.67 us, with a row group beside it that has none 2.00; rms_norm 1.54 and 1.68.
    most = whole_warps if rows == 1 else min(spec.rows_per_cta, max(whole_warps, threads // spec.shape.threads))
    # Rows at odd addresses take a little more; whether a tier takes rows of a length must not depend on it.
    least = replace(spec, rows_per_cta=whole_warps, stages=2, aligned=False, columns_aligned=False)
    if shared_memory(least) + dynamic_shared(least) > device.shared:
        most = 0
    of_row = spec.shape.threads * spec.shape.packs * spec.shape.pack * sum(one.itemsize for one in spec.matrices)
    for rows_per_cta in range(most, 0, -whole_warps):
        for stages in range(tier.stages or places(of_row), 1, -1):
            fitting = replace(spec, rows_per_cta=rows_per_cta, stages=stages)
            needed = shared_memory(fitting) + dynamic_shared(fitting)
            if needed <= device.shared:
                ctas = (device.shared + 1024) // (needed + 1024)  # each CTA takes 1 KB besides its own
                most_ctas = max(1, resident // fitting.threads) if tier.cluster == 1 else 1
                return with_rows_kept(replace(fitting, ctas_per_sm=min(most_ctas, ctas)), device)
    return None


def _small_ctas(spec: NormSpec, rows: int, device: Device) -> tuple[int, int]:
    """Threads of a CTA and threads that an SM holds: fewer for a few rows to each SM.

    The more row groups share a CTA, the longer their sums take to be added up.
    """
    threads, resident = spec.threads, spec.threads * spec.ctas_per_sm
    in_warp = spec.shape.threads <= WARP
    # Rows of several warps share a CTA all the same: RMSNorm of 993 x 4224 11.4 us, 13.1 without.
    if not in_warp and spec.rows_per_cta > 1:
        return threads, resident
    if rows <= 8 * device.sms:
        return 64, 256
    if rows <= 32 * device.sms:
        threads = 128
    # Where row groups of a warp would have two rows each: 2 M elements of 192 cols 8.6 us and 9.9.
    if in_warp and threads > 64 and 2 * rows * spec.shape.threads < 5 * resident * device.sms:
        return 128, 256
    return threads, resident


def _registers_suffice(problem: Problem, shape: RowShape, device: Device) -> bool:
    """Whether a thread has registers for the sums of its columns."""
    # Beside the accumulators of four and five packs they are too few for a weight more than twice as wide as x, on
    # sm_100 for any weight.
    if shape.threads > 512 or (shape.packs == 5 and shape.threads > 384):
        return False
    # What draws again which elements were dropped spilled 8 to 36 bytes beside rows at odd addresses.
    if shape.cluster > 1 and shape.threads > 384 and SEED in problem.by_name:
        return False
    if shape.threads <= 256 or shape.packs < 4:
        return True
    width = max((ITEMSIZE[dtype] for dtype in column_dtypes(problem)), default=0) // ITEMSIZE[problem.row_dtype]
    return device.arch < 100 and width <= 2
