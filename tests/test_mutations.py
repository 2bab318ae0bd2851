"""The tests find what they are there to find: each mistake is put into the kernels' text (in memory), and what tests
the kernels on the CPU must fail.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import cpu_cupy
import numpy
import pytest
import test_dropout
import test_float8
import test_float8_casts
import test_fused_float8
import test_fusion
import test_sandwich
import test_views
from arrays import inputs, misplaced
from cpu_device import ORDERS, Machine, missing
from cpu_functions import MANY_SMS, MANY_WITHOUT_CLUSTERS, SMALL, WITHOUT_CLUSTERS, check

import cunorm

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

# A layer_norm: (rows, cols, dtype, options of cpu_functions.check and of inputs)
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "lanes": (3, 33, "float32", {}),
    "lanes, a row short": (15, 33, "float32", {}),
    "lanes, partial rows": (170, 65, "float32", {}),
    "one odd row": (1, 129, "float32", {}),
    "warp": (3, 264, "float32", {}),
    "far from zero": (3, 129, "float32", {"offset": 1e4}),
    "zero-centred": (3, 129, "float32", {"zero_centered_gamma": True}),
    "groups of warps": (40, 1024, "float16", {}),
    "idle threads": (3, 1000, "float32", {"offset": 10.0}),
    "CTA": (8, 4096, "float32", {}),
    "cluster": (5, 16400, "float32", {}),
    "cluster, odd": (3, 12001, "float64", {}),
    "cluster, the last CTA nearly full": (3, 12285, "float64", {}),
    "places": (300, 36, "float32", {}),  # three for a row; five turns
    "wide weight": (40, 129, "bfloat16", {"weight": "float64"}),
    "equal values, less than a pack": (3, 7, "bfloat16", {"offset": 1e35}),
    "equal values": (3, 12001, "float32", {"offset": 1e35}),
    "wide weight, row groups without rows": (1, 136, "bfloat16", {"weight": "float64"}),
    "partial rows": (280, 1536, "float32", {"device": MANY_SMS}),
    "partial rows in pieces": (12, 2000, "bfloat16", {}),
    "pieces of several warps": (45, 489, "float16", {}),
    "long partial rows": (17, 32792, "float32", {"device": MANY_WITHOUT_CLUSTERS}),
    "partial rows for threads alone": (17, 131081, "float16", {"device": MANY_WITHOUT_CLUSTERS}),
    "streamed": (17, 8201, "float64", {"device": MANY_WITHOUT_CLUSTERS}),
    "misplaced": (3, 136, "float16", {"misplaced": True}),
    "spread": (3, 1152, "bfloat16", {"device": MANY_SMS}),
    "spread, threads to spare": (2, 322, "bfloat16", {"device": MANY_SMS}),
    "whole columns": (20, 250, "bfloat16", {"device": MANY_SMS}),
    "odd rows": (3, 137, "float16", {}),
}

SUM_IN_MORE_BITS = test_fusion.Case(
    cunorm.fuse(
        "layer_norm",
        prologue=lambda x, residual: x + residual,
        epilogue=lambda xhat, weight: xhat * weight,
        dtype="float32",
    ),
    ("residual",),
    ("weight",),
)
BESIDE = test_fusion.Case(cunorm.fuse("layer_norm", epilogue=lambda xhat, z: xhat * z), ("z",))
ONE_MORE = test_fusion.Case(cunorm.fuse("rms_norm", prologue=lambda x: x + 1))


class FusedRun(NamedTuple):
    """A fused operation as test_fusion.py runs it."""

    operation: test_fusion.Case
    shape: tuple[int, ...]
    dtype: str
    device: Any = SMALL
    dtypes: dict[str, str] | None = None
    wanted: tuple[str, ...] = ()


FUSED = {
    "fused lanes": FusedRun(test_fusion.CASES["add_layer_norm"], (13, 33), "float16"),
    "fused, streamed": FusedRun(test_fusion.CASES["add_rms_norm"], (2, 17000), "float32", WITHOUT_CLUSTERS),
    "gate": FusedRun(test_fusion.CASES["gate"], (13, 33), "float16"),
    "gate, CTA": FusedRun(test_fusion.CASES["gate"], (9, 1000), "float32"),
    "gate, cluster": FusedRun(test_fusion.CASES["gate"], (4, 17000), "float32"),
    "samples": FusedRun(test_fusion.CASES["samples"], (3, 13, 33), "float16"),
    "samples, partial rows": FusedRun(test_fusion.CASES["samples"], (3, 7, 1000), "bfloat16", MANY_SMS),
    "samples, a CTA each": FusedRun(test_fusion.CASES["modulate"], (7, 2, 256), "float32"),
    "heads": FusedRun(test_fusion.CASES["heads"], (5, 3, 128), "bfloat16"),
    "beside, cluster": FusedRun(BESIDE, (4, 17000), "float32"),
    "both, partial rows": FusedRun(test_fusion.CASES["both"], (9, 1000), "float32", MANY_SMS),
    "poles": FusedRun(test_fusion.CASES["poles"], (13, 33), "float32"),
    "poles, CTA": FusedRun(test_fusion.CASES["poles"], (3, 1001), "float16"),
    "poles, streamed": FusedRun(
        test_fusion.CASES["poles"],
        (2, 17001),
        "float32",
        WITHOUT_CLUSTERS,
        wanted=("x", "residual", "z", "weight"),
    ),
    "s in fewer bits": FusedRun(
        SUM_IN_MORE_BITS, (3, 136), "bfloat16", dtypes={"residual": "float32", "weight": "float32", "dy": "float32"}
    ),
    "one more": FusedRun(ONE_MORE, (3, 33), "float32"),
}


# (a view of test_views.py, dtype, width)
VIEWED = {
    "views": ("heads of a packed QKV", "float16", 72),
    "views, odd": ("an odd gap", "float16", 72),
    "views, CTA": ("heads of a packed QKV", "bfloat16", 1000),
}


def float8(cols: int, dtype: str, granularity: str | int, device: Any = SMALL) -> Any:
    """A norm with y in 8 bits as test_float8.py runs it."""
    return lambda monkeypatch, machine: test_float8.check_on_stand_in(
        monkeypatch, test_float8.Run(3, cols, dtype, device, ""), granularity, machine
    )


def float8_edges(monkeypatch: Any, machine: Machine) -> None:
    cpu_cupy.play(monkeypatch, SMALL, machine)
    test_float8.check_edges(cpu_cupy.asarray, 24, "row")


def float8_rounding(monkeypatch: Any, machine: Machine) -> None:
    cpu_cupy.play(monkeypatch, SMALL, machine)
    test_float8.check_rounding(cpu_cupy.asarray, "e4m3")


FLOAT8 = {
    "float8, CTA": float8(4096, "bfloat16", "row"),
    "float8, blocks": float8(224, "bfloat16", 128),
    "float8, a scale for all": float8(224, "bfloat16", "tensor"),
    "float8, streamed": float8(17001, "float32", "row", WITHOUT_CLUSTERS),
    "float8 of a sum, streamed": lambda monkeypatch, machine: test_fused_float8.check_on_stand_in(
        monkeypatch,
        test_fused_float8.Run("add_rms_norm", (3, 17001), "float32", "row", WITHOUT_CLUSTERS, ""),
        machine,
    ),
    "float8 of a sum, CTA": lambda monkeypatch, machine: test_fused_float8.check_on_stand_in(
        monkeypatch, test_fused_float8.Run("add_rms_norm", (3, 4096), "bfloat16", "row", SMALL, ""), machine
    ),
    "norms one after the other": lambda monkeypatch, machine: test_sandwich.check_turns(monkeypatch, machine),
    "float8, edges": float8_edges,
    "float8, rounding": float8_rounding,
    "casts, rows": lambda _, machine: test_float8_casts.rows_and_columns(machine, 37, 1000, "float16"),
    "casts, a CTA a row": lambda _, machine: test_float8_casts.rows_and_columns(machine, 7, 10248, "bfloat16"),
    "casts, not finite": lambda _, machine: test_float8_casts.what_is_not_finite(machine, 130, "bfloat16", SMALL),
    "casts, normalised": lambda _, machine: test_float8_casts.normalised_ones(machine, "layer_norm"),
    "casts, zero-centred": lambda _, machine: test_float8_casts.normalised_ones(machine, "zero_centered_rms_norm"),
}


DROPPED = {
    f"dropout, {name}": test_dropout.RUNS[name]
    for name in ("rows share a warp", "a warp", "packs of four", "a cluster")
}


class Mutation(NamedTuple):
    reason: str
    old: str
    new: str
    case: str
    caught: tuple[tuple[str, str], ...]  # (build, what is said)


MUTATIONS = (
    # Synchronisation
    Mutation(
        "no barrier of the CTA between slots written and read",
        "at most four CTAs.\n    __syncthreads();",
        "at most four CTAs.",
        "CTA",
        (("results", "elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "no barrier of a row's warps",
        "barrier(1 + threadIdx.x / Shape::kThreads, Shape::kThreads);",
        "",
        "groups of warps",
        (("results", "dx: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "rows of a CTA share a barrier",
        "barrier(1 + threadIdx.x / Shape::kThreads, Shape::kThreads);",
        "barrier(1, Shape::kThreads);",
        "groups of warps",
        (("races", "race:"),),
    ),
    Mutation(
        "a barrier for too few",
        "barrier(1 + threadIdx.x / Shape::kThreads, Shape::kThreads);",
        "barrier(1 + threadIdx.x / Shape::kThreads, 32);",
        "groups of warps",
        (("results", "elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "sum_partials without its barrier",
        "__syncthreads();\n    for (int i = threadIdx.x;",
        "for (int i = threadIdx.x;",
        "partial rows",
        (("results", "dweight: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "row groups without the barrier before its sums take the place of rows",
        "if constexpr (kHolders > 1) __syncthreads();  // the rows have been read",
        "",
        "groups of warps",
        (("races", "race:"),),
    ),
    Mutation(
        "row groups without the barrier before it adds up",
        "put<sizeof...(Stores)>(sums);\n    if constexpr (kHolders > 1) __syncthreads();",
        "put<sizeof...(Stores)>(sums);",
        "groups of warps",
        (("results", "dweight: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "a pack for each thread: sums added up before all have come",
        "__syncthreads();\n#pragma unroll\n    for (int k = 0; k < Norm::kLaneSums; ++k) {",
        "#pragma unroll\n    for (int k = 0; k < Norm::kLaneSums; ++k) {",
        "spread",
        (("results", "y: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "a pack for each thread: threads to spare have sums",
        "if (there) lane_sums",
        "lane_sums",
        "spread, threads to spare",
        (("memory", "out of bounds"),),
    ),
    Mutation(
        "whole columns added up before all have come",
        "__syncthreads();\n      store_totals",
        "store_totals",
        "whole columns",
        (("results", "d(weight|bias): .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "whole columns of one row group",
        "other < kHolders; ++other) total += totals",
        "other < 1; ++other) total += totals",
        "whole columns",
        (("results", "d(weight|bias): .* elements are wrong"),),
    ),
    Mutation(
        "a column beyond the row",
        "if (column + own >= First::kCols) continue;",
        "",
        "whole columns",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a weight that nobody waits for",
        "if constexpr (!kColumnsStay) copies_wait<0>();",
        "",
        "wide weight, row groups without rows",
        (("races", "a thread ends while a copy of its own is under way"),),
    ),
    Mutation(
        "rows of a CTA share slots",
        "exchange = exchanges[row_group];",
        "exchange = exchanges[0];",
        "groups of warps",
        (("results", "dx: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "one set of slots",
        "const int set = turn % 2;",
        "const int set = 0;",
        "CTA",
        (("results", "elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "a barrier that only some threads reach",
        "put<sizeof...(Stores)>(sums);\n    if constexpr (kHolders > 1) __syncthreads();",
        "put<sizeof...(Stores)>(sums);\n    if (kHolders > 1 && threadIdx.x < 32) __syncthreads();",
        "groups of warps",
        (("results", "deadlock: .* a barrier"),),
    ),
    # Clusters
    Mutation(
        "one set of mailboxes and slots",
        "const int set = turn % 2;",
        "const int set = 0;",
        "cluster",
        (("races", "race:|told twice"),),
    ),
    Mutation(
        "too few bytes expected",
        "expect(sizeof(Slots));",
        "expect(sizeof(Slots) - sizeof(Compute));",
        "cluster",
        (("results", "deadlock: .* a mailbox|left with bytes"),),
    ),
    Mutation(
        "every warp says what to expect",
        "if (threadIdx.x == 0) mailboxes[set].expect",
        "if (threadIdx.x % 32 == 0) mailboxes[set].expect",
        "cluster",
        (("results", "told twice what to expect"),),
    ),
    Mutation(
        "a value is not sent",
        "if (lane < Shape::kCluster) {",
        "if (lane < Shape::kCluster - 1) {",
        "cluster",
        (("results", "deadlock: .* a mailbox"),),
    ),
    Mutation(
        "waits for the other phase",
        "wait(turn / 2 % 2);",
        "wait(1 - turn / 2 % 2);",
        "cluster",
        (("results", "elements are wrong|deadlock:|told twice"), ("races", "race:")),
    ),
    Mutation(
        "the phase does not change",
        "wait(turn / 2 % 2);",
        "wait(0);",
        "cluster",
        (("races", "race:"),),
    ),
    Mutation(
        "mailboxes used before the cluster knows them",
        "cluster_start();\n    }",
        "}",
        "cluster",
        (("results", "a CTA is written that does not run|not initialised"),),
    ),
    # Rows in shared memory
    Mutation(
        "one group of copies more is left pending",
        "copies_wait<kAhead - 1>();",
        "copies_wait<kAhead>();",
        "CTA",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "one group of copies more is left pending, forward",
        "copies_wait<kAhead - 1>();",
        "copies_wait<kAhead>();",
        "cluster",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "nobody waits for copies",
        "DEVICE static void arrived() { copies_wait<kAhead - 1>(); }",
        "DEVICE static void arrived() {}",
        "places",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "copies are not committed",
        "DEVICE static void sent() { copies_commit(); }",
        "DEVICE static void sent() {}",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "no commit in turns with nothing to ask for",
        "RowsIn::kAhead - 1);\n      RowsIn::sent();",
        "RowsIn::kAhead - 1);\n      if (place + RowsIn::kAhead * row_step < count) RowsIn::sent();",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row",
        "rows_in.ask(which_rows.of(place + RowsIn::kAhead * row_step), RowsIn::kAhead - 1);",
        "rows_in.ask(which_rows.of(place + RowsIn::kAhead * row_step), RowsIn::kAhead);",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row, forward",
        "rows_s.ask(row + RowsS::kAhead * row_step, RowsS::kAhead - 1);",
        "rows_s.ask(row + RowsS::kAhead * row_step, RowsS::kAhead);",
        "cluster",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks for the same row again",
        "rows_in.ask(which_rows.of(place + RowsIn::kAhead * row_step), RowsIn::kAhead - 1);",
        "rows_in.ask(which_rows.of(place + (RowsIn::kAhead - 1) * row_step), RowsIn::kAhead - 1);",
        "places",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "the ring has no way back but to its first place",
        "place(turn < kStages ? turn : turn - kStages)",
        "place(turn < kStages ? turn : 0)",
        "places",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "the ring has no end",
        "taken = taken == kStages - 1 ? 0 : taken + 1;",
        "taken = taken + 1;",
        "CTA",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "asks for a row more ahead than there are places",
        "static constexpr int kAhead = kStages - 1;",
        "static constexpr int kAhead = kStages;",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks for a row too few at first",
        "for (int ahead = 0; ahead < RowsIn::kAhead; ++ahead) {",
        "for (int ahead = 0; ahead < RowsIn::kAhead - 1; ++ahead) {",
        "CTA",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "a place too few",
        "static constexpr int kPlaces = kStages * kRows;",
        "static constexpr int kPlaces = (kStages - 1) * kRows;",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "rows of a CTA share places",
        "return stage * kRows + row_group;",
        "return stage * kRows;",
        "groups of warps",
        (
            ("results", "elements are wrong"),
            ("races", "race:"),
        ),
    ),
    Mutation(
        "packs beyond the row are not cleared",
        "load.template clear<Shape::kCapacity, kPlaces>(places(), place(stage), Shape::pack_slot(p));",
        ";",
        "idle threads",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "packs beyond the row are cleared in the first place alone",
        "for (int stage = 0; stage < kStages; ++stage)",
        "for (int stage = 0; stage < 1; ++stage)",
        "places",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "places as long as the whole row",
        "kFetch>(places(), to, Shape::pack_slot(p), row,",
        "kFetch>(places(), to, PackSlot{Shape::pack_slot(p).thread, Shape::kCluster * Shape::pack_slot(p).run}, row,",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "the weight lies where dy does",
        "dynamic_shared() + RowsIn::kBytes;",
        "dynamic_shared();",
        "cluster",
        (
            ("results", "dx: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "the weight beyond the row is not cleared",
        "columns.template clear<Shape::kCapacity, kRows>(column_places, row_group, Shape::pack_slot(p));",
        ";",
        "cluster",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "rows of a CTA share the place of the weight",
        "(column_places, row_group,",
        "(column_places, 0,",
        "wide weight",
        (("races", "race:"),),
    ),
    Mutation(
        "the weight lies beyond its place",
        "Fetch::kCached>(column_places, row_group, Shape::pack_slot(p),",
        "Fetch::kCached>(column_places, row_group, PackSlot{threadIdx.x, Shape::kCluster * Shape::pack_slot(p).run},",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a row that is not there is read",
        "if (Shape::kThreads < 32 && !active) pack = {};",
        "",
        "lanes",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "vectors copied where the address does not allow them",
        "if constexpr (!kAligned) {\n      copy_covering",
        "if constexpr (false) {\n      copy_covering",
        "misplaced",
        (("results", "misaligned vector access"),),
    ),
    # Bounds
    Mutation(
        "whole packs beyond the row",
        "return left > 0 ? kPack : 0;",
        "return kPack;",
        "idle threads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "packs beyond the row are said to be whole",
        "(p + 1) * kStep <= kCols; }",
        "p * kStep < kCols; }",
        "idle threads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a pack is loaded that is not there, or a part of it",
        "row, column * kSize, valid * kSize,",
        "row, column * kSize, kPack * kSize,",
        "one odd row",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "what lies behind the part of a pack that is there",
        "keep_valid(pack, covering.words, valid > 0 ? valid : kPack);",
        "keep_valid(pack, covering.words, kPack);",
        "one odd row",
        (("results", "nan"),),
    ),
    # Rows at odd addresses
    Mutation(
        "a word taken for the next but one",
        "words[i] = offset & 4 * kStep ? far : near;",
        "words[i] = near;",
        "odd rows",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "half a word taken for the other",
        "funnel_shift(words[i], words[i + 1], 8 * offset);",
        "words[i];",
        "misplaced",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "what others copied is read before it has come for them",
        "if constexpr (!Load::kVectors) warp_barrier();",
        "",
        "misplaced",
        (("races", "race:"),),
    ),
    Mutation(
        "two lanes copy the word that their packs share",
        "(offset == 0 || lane(slot) == 0)",
        "true",
        "misplaced",
        (("races", "race:"),),
    ),
    Mutation(
        "nobody copies the first word of a run",
        "(offset == 0 || lane(slot) == 0)",
        "offset == 0",
        "misplaced",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "a run has no place for the word that its last pack ends in",
        "(kAligned ? 0 : kRunGap)",
        "0",
        "misplaced",
        (("races", "race:"),),
    ),
    Mutation(
        "the last lane of a run writes a word that ends in no pack of it",
        "shuffle_down(valid) < kPack || lane == kLanes - 1;",
        "shuffle_down(valid) < kPack;",
        "lanes",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "a word is written that ends beyond the row",
        "shuffle_down(valid) < kPack || lane == kLanes - 1;",
        "lane == kLanes - 1;",
        "odd rows",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "the first column of the row's last pack is not written",
        "if (i < valid) store_element(row + column, pack, i);",
        "if (i > 0 && i < valid) store_element(row + column, pack, i);",
        "odd rows",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "the head of a run is not written",
        "if (lane == 0) store_parts",
        "if (false) store_parts",
        "lanes",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "the end of a run is not written",
        "} else {\n      store_parts",
        "} else if (false) {\n      store_parts",
        "lanes",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "parts of a run's end begin where the first did",
        "needed ? begin + kSize : begin",
        "begin",
        "odd rows",
        (("results", "misaligned vector access"),),
    ),
    Mutation(
        "part of a pack beyond the row",
        "return left < 0 ? 0 : left < kPack ? left : kPack;",
        "return kPack;",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "beyond the row in a cluster",
        "return left < 0 ? 0 : left < kPack ? left : kPack;",
        "return left < 0 ? 0 : kPack;",
        "cluster, odd",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "packs of a thread as far apart as in one CTA",
        "static_cast<int64>(p) * kStep",
        "static_cast<int64>(p) * kThreads * kPack",
        "cluster, odd",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "columns of a slot counted as of the first",
        "p * kStep + slot * kMost",
        "p * kStep",
        "cluster, odd",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "y of a row that is not there",
        "store_y.store(row, Shape::column(rank, p), valid, values);",
        "store_y.store(row, Shape::column(rank, p), Shape::valid(rank, p), values);",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "dx of a row that is not there",
        "results.store(which_rows.of(place), Shape::column_beside_sums(rank, p), valid, values);",
        "results.store(which_rows.of(place), Shape::column_beside_sums(rank, p), Shape::valid(rank, p), values);",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "mean of a row that is not there",
        "if (active && rank == 0",
        "if (rank == 0",
        "lanes, a row short",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "x of a row that is not there",
        "Shape::column(rank, p), active ? Shape::valid(rank, p) : 0);",
        "Shape::column(rank, p), Shape::valid(rank, p));",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a copy of a row that is not there",
        "if (row < rows) {\n      // By ones",
        "{\n      // By ones",
        "lanes",
        (("memory", "a copy of what is in no array"),),
    ),
    Mutation(
        "rstd of a row that is not there",
        "return Operation::kOfXhat && of < count ? SavedRow::of(mean, rstd, which_rows.of(of)) : SavedRow{};",
        "return SavedRow::of(mean, rstd, of);",
        "lanes, a row short",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "gradients beyond the last column",
        "if (column < cols) store_value(",
        "store_value(",
        "lanes, partial rows",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "gradients of one group beyond the last column",
        "static constexpr int kPlaces = kCols;",
        "static constexpr int kPlaces = (kCols + kPack - 1) / kPack * kPack;",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "gradients of one cluster beyond the last column",
        "pack_values<T>(sums), valid);",
        "pack_values<T>(sums), kPack);",
        "cluster, odd",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a slot too far in shared memory",
        "slots[set][k][warp] = values[k];",
        "slots[set][k][warp + 1] = values[k];",
        "CTA",
        (("memory", "runtime error: index .* out of bounds"),),
    ),
    Mutation(
        "shared memory too small",
        "Compute sums[kSums][kColumns];",
        "Compute sums[kSums][kColumns - 1];",
        "partial rows",
        (("memory", "runtime error: index .* out of bounds"),),
    ),
    Mutation(
        "vectors where the address does not allow them",
        "LoadRows<half, 8, 8, false,",
        "LoadRows<half, 8, 8, true,",
        "misplaced",
        (("results", "misaligned vector access"),),
    ),
    # Views
    Mutation(
        "a view without its gaps",
        "row * stride + gaps_before(row) * gap",
        "row * stride",
        "views",
        (("results", "other bits forward of a view"),),
    ),
    Mutation(
        "gaps alone",
        "row * stride + gaps_before(row) * gap",
        "gaps_before(row) * gap",
        "views",
        (("results", "other bits forward of a view"),),
    ),
    Mutation(
        "a gap a row too early",
        "gaps_before(row) * gap",
        "gaps_before(row + 1) * gap",
        "views",
        (("results", "other bits forward of a view"), ("memory", "AddressSanitizer: heap-buffer-overflow")),
    ),
    Mutation(
        "a gap too late, as by a reciprocal that is rounded down",
        "return static_cast<int64>((high + (low >> 32)) >> 31);",
        "return static_cast<int64>((high + (low >> 32) - (row > 0)) >> 31);",
        "views",
        (("results", "other bits forward of a view"),),
    ),
    Mutation(
        "rows that wait in shared memory come without gaps",
        "(place, slot, data + starts.of(row), column, valid);",
        "(place, slot, data + row * starts.stride, column, valid);",
        "views, CTA",
        (("results", "other bits backward of a view"),),
    ),
    Mutation(
        "results without gaps",
        "T* const to = begin_of_row(data + starts.of(row));",
        "T* const to = data + row * starts.stride;",
        "views",
        (("results", "other bits forward into a view"),),
    ),
    Mutation(
        "vectors where the outer stride does not allow them",
        "LoadRows<half, 8, 4, false, Cache::kKept, true>",
        "LoadRows<half, 8, 4, true, Cache::kKept, true>",
        "views, odd",
        (("results", "misaligned vector access"),),
    ),
    # Arithmetic
    Mutation(
        "the variance counts columns that are not there",
        "i < valid ? values[i] - pivot : 0",
        "values[i] - pivot",
        "lanes",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "the variance counts packs that are not there",
        "i < valid ? values[i] - pivot : 0",
        "values[i] - pivot",
        "idle threads",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "eps ignored",
        "(variance < 0 ? 0 : variance) + eps)",
        "(variance < 0 ? 0 : variance))",
        "warp",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "eps outside the root",
        "reciprocal_sqrt((variance < 0 ? 0 : variance) + eps)",
        "1 / (1 / reciprocal_sqrt(variance) + eps)",
        "warp",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "variance divided by N - 1",
        "of_residual, part[2]) * one_part_in<Compute, kCols>()",
        "of_residual, part[2]) * one_part_in<Compute, kCols - 1>()",
        "CTA",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "E[x^2] - E[x]^2",
        "group_sum<Shape::kLanes>(dot(first, weights))",
        "0 * group_sum<Shape::kLanes>(dot(first, weights))",
        "far from zero",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "what the rounding of the mean lost",
        "const Compute shift = -residual * rstd;",
        "const Compute shift = 0;",
        "far from zero",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "the means of warps summed up, then divided",
        "const Compute base = slots[0][0];",
        "const Compute base = 0;",
        "equal values",
        (("results", "rstd: .* elements are wrong"),),
    ),
    Mutation(
        "bias ignored",
        "multiply_add(xhat, weight, bias)",
        "multiply_add(xhat, weight, 0 * bias)",
        "warp",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "a weight taken as it is where it is zero-centred",
        "static_cast<Compute>(0x1p+0) + weight;",
        "weight;",
        "zero-centred",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its mean term",
        "matrices, columns, i, means[1])",
        "matrices, columns, i, 0 * means[1])",
        "warp",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its projection term",
        "multiply_add(-xhat, means[0], centred_g) * rstd",
        "multiply_add(-xhat, 0 * means[0], centred_g) * rstd",
        "warp",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its mean term, streamed",
        "matrices, columns, i, means[1])",
        "matrices, columns, i, 0 * means[1])",
        "streamed",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dweight without a row",
        "i, p, sums);\n        if constexpr",
        "i, p, sums);\n        if (place == 1) sums[0][p][i] -= matrix_values[0][i] * xhat[i];\n        if constexpr",
        "groups of warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "dbias without a row",
        "i, p, sums);\n        if constexpr",
        "i, p, sums);\n        if (place == 1) sums[1][p][i] -= matrix_values[0][i];\n        if constexpr",
        "CTA",
        (("results", "dbias: .* elements are wrong"),),
    ),
    Mutation(
        "dweight and dbias without a row, streamed",
        "if (first + b * step >= count) break;",
        "if (first + b * step >= count - 1) break;",
        "streamed",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "dweight without what one group of rows holds",
        "for (int other = 1; other < kHolders; ++other)",
        "for (int other = 1; other < kHolders - 1; ++other)",
        "groups of warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "dweight without what half of a warp holds",
        "mask < 32; mask *= 2) sums[k][p][i] +=",
        "mask < 16; mask *= 2) sums[k][p][i] +=",
        "lanes, partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "partial rows that are not whole packs",
        "return (packs() * kPack + kSumColumns - 1) / kSumColumns * kSumColumns;",
        "return cols;",
        "lanes, partial rows",
        (("results", "misaligned vector access"),),
    ),
    Mutation(
        "partial rows further apart",
        "return (packs() * kPack + kSumColumns - 1) / kSumColumns * kSumColumns;",
        "return (packs() * kPack + 7) / 4 * 4;",
        "partial rows",
        (("results", "d(weight|bias): .* elements are wrong"), ("memory", "AddressSanitizer: heap-buffer-overflow")),
    ),
    Mutation(
        "sum_partials without a partial row",
        "group < groups; group += kRows",
        "group < groups - 1; group += kRows",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials without the rows beyond those of the first reading",
        "group < groups; group += kRows",
        "group < groups; group += groups",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials without a warp",
        "other < kSums; ++other",
        "other < kSums - 1; ++other",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials without half of a warp",
        "for (int mask = kLanes; mask < 32; mask *= 2)",
        "for (int mask = kLanes; mask < 16; mask *= 2)",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials takes sets of several warps for one warp's",
        "threadIdx.x / (kLanes < 32 ? 32 : kLanes)",
        "threadIdx.x / 32",
        "long partial rows",
        (("memory", "runtime error: index .* out of bounds"),),
    ),
    Mutation(
        "sum_partials beyond the partial row",
        "&& first + i < row.stride();",
        ";",
        "pieces of several warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials by a thread alone beyond the partial row",
        "if (own < row.stride() && column < cols)",
        "if (column < cols)",
        "partial rows for threads alone",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "groups write one partial row",
        "return {data + group * Row{kCols}.stride()};",
        "return {data};",
        "streamed",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "pieces of a pack side by side in a partial row",
        "return column % kPack / kPiece * (packs() * kPiece) + column / kPack * kPiece + column % kPiece;",
        "return column;",
        "partial rows in pieces",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "columns of a partial row in the order of the row",
        "if (kPack <= kSumColumns) return position;",
        "return position;",
        "partial rows in pieces",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sums of row groups written in the order of the row",
        "return static_cast<int>(Row{kCols}.column(place));",
        "return place;",
        "pieces of several warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "a partial row as long as the row",
        "kPlaces = static_cast<int>(Row{kCols}.packs() * kPack);",
        "kPlaces = kCols;",
        "pieces of several warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sums of row groups that overlap",
        "Shape::kCapacity + ",
        "Shape::kThreads + ",
        "groups of warps",
        (
            ("results", "dweight: .* elements are wrong"),
            ("races", "race:"),
        ),
    ),
    # Lists of arrays
    Mutation(
        "places of the second matrix overlap those of the first",
        "return places + kPlaces * First::place_bytes(kColumns);",
        "return places + (kPlaces - 1) * First::place_bytes(kColumns);",
        "gate, cluster",
        (
            ("results", "dx: .* of what is allowed"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "places of a column as many as of a row",
        "columns.template read<Shape::kCapacity, kRows>(",
        "columns.template read<Shape::kCapacity, RowsIn::kPlaces>(",
        "gate, cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "what stands beside xhat lies where s does",
        "rows_beside(beside, rank, rows, RowsS::kBytes);",
        "rows_beside(beside, rank, rows, 0);",
        "beside, cluster",
        (
            ("results", "y: .* of what is allowed"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "what stands beside xhat is not taken",
        "rows_beside.take(row);",
        "",
        "beside, cluster",
        (("results", "y: .* of what is allowed"),),
    ),
    Mutation(
        "what stands beside xhat is not asked for again",
        "rows_beside.ask(row + RowsS::kAhead * row_step, RowsS::kAhead - 1);",
        "",
        "beside, cluster",
        (("results", "y: .* of what is allowed"),),
    ),
    Mutation(
        "the second matrix read as the first",
        "others.unpack(packed.others, values + 1);",
        "others.unpack(packed.others, values);",
        "fused lanes",
        (("results", "(y|s): .* of what is allowed"),),
    ),
    Mutation(
        "a vector read as a matrix",
        "{shift, 0}",
        "{shift, residual_stride}",
        "gate",
        (("memory", "misaligned vector access"),),
    ),
    Mutation(
        "numbers in each other's place",
        "operation{factor, sharp};",
        "operation{sharp, factor};",
        "gate",
        (("results", "y: .* of what is allowed"),),
    ),
    # The prologue and s
    Mutation(
        "s is not rounded before its statistics",
        "LoadSource<bfloat16,",
        "LoadSource<float,",
        "s in fewer bits",
        (("results", "y: .* of what is allowed"),),
    ),
    Mutation(
        "s made again is not rounded",
        "return rounded<bfloat16>(value);",
        "return value;",
        "s in fewer bits",
        (("results", "d(x|residual): .* of what is allowed"),),
    ),
    Mutation(
        "what the prologue makes of nothing counts",
        "i < valid ? operation.prologue(values, i) : 0",
        "operation.prologue(values, i)",
        "one more",
        (("results", "y: .* of what is allowed"),),
    ),
    Mutation(
        "s of a row that is not there",
        "store_s.store_packed(row, Shape::column(rank, p), valid, s);",
        "store_s.store_packed(row, Shape::column(rank, p), Shape::valid(rank, p), s);",
        "fused lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "s is not written",
        "store_s.store_packed(row, Shape::column(rank, p), valid, s);",
        "",
        "fused lanes",
        (("results", "s: nan of what is allowed"),),
    ),
    Mutation(
        "s is not written, streamed",
        "store_s.store_packed(row, column, valid, s);",
        "",
        "fused, streamed",
        (("results", "s: nan of what is allowed"),),
    ),
    Mutation(
        "s written beyond the row, streamed",
        "store_s.store_packed(row, column, valid, s);",
        "store_s.store_packed(row + 1, column, valid, s);",
        "fused, streamed",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    # Dropout
    Mutation(
        "a round too few",
        "round < 10",
        "round < 9",
        "dropout, rows share a warp",
        (("results", "s: .* elements are dropped that are not"),),
    ),
    Mutation(
        "the halves of a word in the other order",
        "upper ? of_two >> 16 : of_two & 0xffff",
        "upper ? of_two & 0xffff : of_two >> 16",
        "dropout, rows share a warp",
        (("results", "s: .* elements are dropped that are not"),),
    ),
    Mutation(
        "the first half of a draw for the second",
        "second_half ? words[2] : words[0]",
        "words[0]",
        "dropout, packs of four",
        (("results", "s: .* elements are dropped that are not"),),
    ),
    Mutation(
        "in the backward pass what the next row drops",
        "row_taken = row;",
        "row_taken = row + 1;",
        "dropout, a warp",
        (("results", "dx: .* elements are dropped that are not"),),
    ),
    Mutation(
        "each CTA of a cluster drops what the first does",
        "load.stands_at(raw, row_taken, Shape::column(rank, p));",
        "load.stands_at(raw, row_taken, Shape::place_column(p));",
        "dropout, a cluster",
        (("results", "(s|dx): .* elements are dropped that are not"),),
    ),
    # Groups of rows
    Mutation(
        "a row reads the vector of its neighbour's sample",
        "(quotient(row, reciprocal) -",
        "(quotient(row + 1, reciprocal) -",
        "samples",
        (("results", "(y|s): .* of what is allowed"),),
    ),
    Mutation(
        "heads begin anew with no token",
        " - quotient(row, period_reciprocal) * groups) * stride;",
        ") * stride;",
        "heads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "how many rows share a vector does not count",
        "quotient(row, reciprocal) - quotient(row, period_reciprocal) * groups",
        "row - row / groups * groups",
        "samples",
        (("results", "(y|s): .* of what is allowed"),),
    ),
    Mutation(
        "a sample's rows are counted to its neighbour",
        "* (groups - 1) + blockIdx.z) * inner;",
        "* (groups - 1) + (blockIdx.z + 1) % groups) * inner;",
        "samples",
        (("results", "d(x|gate|scale|shift): .* of what is allowed"),),
    ),
    Mutation(
        "the rows of a head after its first are those of others",
        "return place + (quotient(place, reciprocal) * (groups - 1) + blockIdx.z) * inner;",
        "return place + blockIdx.z * group_rows;",
        "heads",
        (("results", "d(x|weight): .* of what is allowed"),),
    ),
    Mutation(
        "all samples have the vectors of the first in the backward pass",
        "scale + blockIdx.z * scale_stride",
        "scale",
        "samples",
        (("results", "d(x|residual): .* of what is allowed"),),
    ),
    Mutation(
        "all samples have the partial rows of the first",
        "blockIdx.z * (gridDim.x / 1)",
        "0 * (gridDim.x / 1)",
        "samples, partial rows",
        (("results", "d(gate|scale|shift|weight): .* of what is allowed"),),
    ),
    Mutation(
        "the partial rows of a sample are added up for all",
        " + blockIdx.z * groups * ",
        " + 0 * groups * ",
        "samples, partial rows",
        (("results", "d(gate|scale|shift): .* of what is allowed"),),
    ),
    Mutation(
        "one CTA for a sample writes its sums to the first",
        "dscale + blockIdx.z * int64{256}",
        "dscale",
        "samples, a CTA each",
        (("results", "dscale: .* of what is allowed"),),
    ),
    # Gradients of fused operations
    Mutation(
        "a gradient written twice, and another not",
        "others.store(row, column, valid, values + 1);",
        "first.store(row, column, valid, values[kCount - 1]);",
        "gate",
        (("results", "dx: .* of what is allowed"),),
    ),
    Mutation(
        "a gradient that is not written",
        "others.store(row, column, valid, values + 1);",
        "",
        "gate",
        (("results", "dresidual: nan of what is allowed"),),
    ),
    Mutation(
        "a gradient with the values of another",
        "others.store(row, column, valid, values + 1);",
        "others.store(row, column, valid, values);",
        "gate",
        (("results", "dresidual: .* of what is allowed"),),
    ),
    Mutation(
        "the gradient of s is not added",
        "of_norm + matrices[1][i];",
        "of_norm;",
        "fused lanes",
        (("results", "dx: .* of what is allowed"),),
    ),
    Mutation(
        "the gradient of s instead of what comes through the norm",
        "of_norm + matrices[1][i];",
        "matrices[1][i];",
        "fused lanes",
        (("results", "dx: .* of what is allowed"),),
    ),
    Mutation(
        "an operand before and after the norm has one gradient alone",
        "cunorm::multiply_add(-dy, xhat, ds);",
        "ds;",
        "both, partial rows",
        (("results", "dresidual: .* of what is allowed"),),
    ),
    Mutation(
        "the sum of a column of the prologue is not kept",
        "sums[0][p][i] = next_dshift;",
        "",
        "gate, CTA",
        (("results", "dshift: .* of what is allowed"),),
    ),
    Mutation(
        "the sum of a column of the prologue of dy, not of ds",
        "multiply_add(ds, x, sum_dshift)",
        "multiply_add(dy, x, sum_dshift)",
        "gate, cluster",
        (("results", "dshift: .* of what is allowed"),),
    ),
    Mutation(
        "sums in each other's place",
        "store_each(sums, k + 1, rank, group, stores.others);",
        "store_each(sums, 0, rank, group, stores.others);",
        "gate",
        (("results", "dfactor: .* of what is allowed"),),
    ),
    Mutation(
        "sums in each other's place, streamed",
        "store_own(sums + 1, column, valid, stores.others);",
        "store_own(sums, column, valid, stores.others);",
        "streamed",
        (("results", "dbias: .* elements are wrong"),),
    ),
    Mutation(
        "every gradient of the same partial rows",
        "blockIdx.y == 0 ? partials0 : partials1",
        "partials0",
        "partial rows",
        (("results", "dbias: .* elements are wrong"),),
    ),
    Mutation(
        "NaN of nothing reaches the sums of a row",
        "if (Operation::kMasks && i >= valid) continue;",
        "",
        "poles",
        (("results", "dx: nan of what is allowed"),),
    ),
    Mutation(
        "NaN of nothing in xhat reaches the sums of a row, streamed",
        "Operation::kOfXhat && (!Operation::kMasks || i < valid);",
        "Operation::kOfXhat;",
        "poles, streamed",
        (("results", "dx: nan of what is allowed"),),
    ),
    Mutation(
        "NaN of nothing reaches the sums of a row, streamed",
        "const bool counts = !Operation::kMasks || i < valid;",
        "const bool counts = true;",
        "poles, streamed",
        (("results", "dx: nan of what is allowed"),),
    ),
    Mutation(
        "NaN of a row that is not there reaches the sums over rows",
        "if (Operation::kMasks && i >= valid) {",
        "if (false) {",
        "poles",
        (("results", "ddivisor: nan of what is allowed"),),
    ),
    Mutation(
        "an operation with poles said to have none",
        "kMasks = true;",
        "kMasks = false;",
        "poles, CTA",
        (("results", "dx: nan of what is allowed"),),
    ),
    # 8 bits
    Mutation(
        "NaN is lost in a maximum",
        "return word_to_float(bits > other ? bits : other);",
        "return b > a ? b : a;",
        "float8, edges",
        (("results", "an infinite x makes NaN of it"),),
    ),
    Mutation(
        "infinity is saturated",
        "multiply_add(lost, kOnePartInLargest, close) + not_finite",
        "close",
        "float8, edges",
        (("results", "the scale of infinity"),),
    ),
    Mutation(
        "a multiplier without its scale",
        "largest == 0 ? 1 : 1 / kMostMultiplier",
        "largest == 0 ? 1 : largest / Format::kLargest",
        "float8, edges",
        (("results", "the scale of tiny numbers"),),
    ),
    Mutation(
        "the largest of a warp for that of the row",
        "return LargestExchange::largest(largest_exchange.collect(turn), larger);",
        "largest_exchange.collect(turn);\n        return largest;",
        "float8, CTA",
        (("results", "Not equal to tolerance|bytes of"),),
    ),
    Mutation(
        "the largest of a warp for that of the row, streamed",
        "largest = LargestExchange::largest(largest_exchange.collect(turn), larger);",
        "largest_exchange.collect(turn);",
        "float8, streamed",
        (("results", "Not equal to tolerance|bytes of"),),
    ),
    Mutation(
        "the warps of a row meet at no barrier before the largest",
        "return LargestExchange::largest(largest_exchange.collect(turn), larger);",
        "return LargestExchange::largest(largest_exchange.slots[turn % 2], larger);",
        "float8, CTA",
        (("races", "race:"),),
    ),
    Mutation(
        "the sum is stored with no pass over a streamed row",
        "y_of(column, valid, values, true);",
        "y_of(column, valid, values, false);",
        "float8 of a sum, streamed",
        (("results", "s is the sum"),),
    ),
    Mutation(
        "y itself is multiplied as its bytes are",
        "wide.store(row, column, valid, values);\n    bytes.store(row, column, valid, scaled);\n  }\n};\n\n// Whether",
        "wide.store(row, column, valid, scaled);\n    bytes.store(row, column, valid, scaled);\n  }\n};\n\n// Whether",
        "float8 of a sum, CTA",
        (("results", "y is as it is without 8 bits"),),
    ),
    # Two norms, one after the other
    Mutation(
        "both norms of a row in one set of slots",
        "statistics_of(turn + 1,",
        "statistics_of(turn,",
        "norms one after the other",
        (("races", "race:"),),
    ),
    Mutation(
        "the second norm by the statistics of the first",
        "second.normalise(values);",
        "first.normalise(values);",
        "norms one after the other",
        (("results", "y"),),
    ),
    # Operands of products in 8 bits
    Mutation(
        "the scale of a column of the first tile",
        "return maxima[column];",
        "return maxima[column % 64];",
        "casts, rows",
        (("results", "scales"),),
    ),
    Mutation(
        "a row group is missing in the sums of columns",
        "for (int other = 1; other < kRows; ++other) {\n            Pack<float, kPack> pack;",
        "for (int other = 2; other < kRows; ++other) {\n            Pack<float, kPack> pack;",
        "casts, rows",
        (("results", "the sums of columns"),),
    ),
    Mutation(
        "a row group is missing in the maxima of columns",
        "for (int other = 1; other < kRows; ++other) {\n            uint32 words[kWords];",
        "for (int other = 1; other < 2; ++other) {\n            uint32 words[kWords];",
        "casts, rows",
        (("results", "maxima of columns"),),
    ),
    Mutation(
        "sums of columns of numbers that have lost bits",
        "sums[p][i] += values[i];",
        "sums[p][i] += word_to_float(float_to_word(values[i]) & 0xfff00000);",
        "casts, rows",
        (("results", "the sums of columns"),),
    ),
    Mutation(
        "NaN is lost in the maximum of a column",
        "own[i] = larger(own[i], values[i]);",
        "own[i] = own[i] < values[i] ? values[i] : own[i];",
        "casts, not finite",
        (("results", "maxima of columns"),),
    ),
    Mutation(
        "the largest of a warp for that of the row of a matrix",
        "largest[0] = Exchange::largest(exchange.collect(turn), [](float a, float b) { return larger(a, b); });",
        "exchange.collect(turn);",
        "casts, a CTA a row",
        (("results", "scales"),),
    ),
    Mutation(
        "padding is what would follow",
        "(low | high << 16) & mask",
        "low | high << 16",
        "casts, normalised",
        (("results", "padding is zero"),),
    ),
    Mutation(
        "the bound of a column without beta",
        "operation.epilogue(bound, Nothing{}, values, j)),",
        "operation.epilogue(bound, Nothing{}, values, j) - operation.epilogue(0, Nothing{}, values, j)),",
        "casts, normalised",
        (("results", "scales"),),
    ),
    Mutation(
        "the bound of a column with gamma where it is 1 + gamma",
        "magnitude(operation.epilogue(bound, Nothing{}, values, j)),\n                    "
        "magnitude(operation.epilogue(-bound, Nothing{}, values, j))",
        "magnitude(operation.epilogue(bound, Nothing{}, values, j) - bound), 0",
        "casts, zero-centred",
        (("results", "scales"),),
    ),
    Mutation(
        "the bound of a norm with a mean for one without",
        "cols > 1 ? cols - 0 : 1",
        "cols > 1 ? cols - 1 : 1",
        "casts, zero-centred",
        (("results", "scales"),),
    ),
    Mutation(
        "a tile is read before it is there",
        "if (left_turns > 1) fetch(first_row + kTileRows);\n    __syncthreads();",
        "if (left_turns > 1) fetch(first_row + kTileRows);",
        "casts, rows",
        (("races", "race:"),),
    ),
    Mutation(
        "blocks of a short row of one pack of its lanes",
        "kRow ? kPacks : kBlockLanes / kLanes",
        "kRow ? kPacks : 1",
        "float8, blocks",
        (("results", "Not equal to tolerance|bytes of"),),
    ),
    Mutation(
        "multiplied by the scale",
        "1 / *y8_scale}",
        "*y8_scale}",
        "float8, a scale for all",
        (("results", "bytes of .* are wrong"),),
    ),
    Mutation(
        "no saturation",
        "(bits < kMost ? bits : kMost)",
        "bits",
        "float8, rounding",
        (("results", "bytes of .* are wrong"),),
    ),
    Mutation(
        "ties away from zero",
        "+ (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)",
        "+ (1u << (kDropped - 1))",
        "float8, rounding",
        (("results", "bytes of .* are wrong"),),
    ),
)


class Edit:
    """Changes kernels' texts wherever `old` is found."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new
        self.changed = 0

    def __call__(self, text: str) -> str:
        changed = text.replace(self.old, self.new)
        self.changed += changed != text
        return changed


def run(case: str, machine: Machine) -> None:
    if case in FUSED:
        run_fused(FUSED[case], machine)
        return
    if case in DROPPED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            cpu_cupy.play(monkeypatch, DROPPED[case].device, machine)
            test_dropout.check_run(DROPPED[case], "add_rms_norm")
        return
    if case in FLOAT8:
        with pytest.MonkeyPatch.context() as monkeypatch:
            FLOAT8[case](monkeypatch, machine)
        return
    if case in VIEWED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            family = test_views.stand_in(monkeypatch, machine)
            family.play(SMALL)
            test_views.check(family, "layer_norm", *VIEWED[case], list)
        return
    rows, cols, dtype, options = CASES[case]
    options = {"device": SMALL, **options}
    x, dy, weight, bias = inputs(
        numpy, rows, cols, dtype, offset=options.pop("offset", 1.0), weight=options.pop("weight", None)
    )
    if options.pop("misplaced", False):
        x, dy, weight, bias = (misplaced(array, 1) for array in (x, dy, weight, bias))
    check(machine, "layer_norm", x, dy, weight, bias, **options)


def run_fused(case: FusedRun, machine: Machine) -> None:
    made = test_fusion.make(case.operation, case.shape, case.dtype, case.dtypes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu_cupy.play(monkeypatch, case.device, machine)
        test_fusion.check(case.operation, made, cpu_cupy.asarray, case.wanted)


def finding(case: str, machine: Machine) -> str:
    """What the first test to fail says, or nothing."""
    try:
        run(case, machine)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mutation", "build", "said"),
    [
        pytest.param(mutation, build, said, id=f"{mutation.reason}-{build}")
        for mutation in MUTATIONS
        for build, said in mutation.caught
    ],
)
def test_a_mistake_is_found(mutation, build, said):
    """In one of the orders in which threads may run."""
    edit = Edit(mutation.old, mutation.new)
    findings = (finding(mutation.case, Machine(build, order, edit)) for order in ORDERS)
    first = next(filter(None, findings), "nothing is found")
    assert edit.changed, "the kernels of this case hold no such text: let the mutation follow them"
    assert re.search(said, first, re.DOTALL), first


@pytest.mark.parametrize("case", ["CTA", "cluster"])
def test_launches_ask_for_no_more_shared_memory_than_they_use(case):
    """The last place of the last row is missed."""
    assert "heap-buffer-overflow" in finding(case, Machine("memory", missing=16))


@pytest.mark.parametrize(
    ("case", "build"),
    sorted({(mutation.case, build) for mutation in MUTATIONS for build, _ in mutation.caught}),
)
def test_nothing_is_found_without_a_mistake(case, build):
    run(case, Machine(build))
