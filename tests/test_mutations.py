"""The tests find what they are there to find: each mistake is put into the kernels' text (in memory), and what tests
the kernels on the CPU must fail.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy
import pytest
from arrays import inputs, misplaced
from cpu_device import ORDERS, Machine, missing
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS, check

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

# What is run: (rows, cols, dtype, options of cpu_functions.check and of inputs)
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "lanes": (3, 33, "float32", {}),
    "warp": (3, 264, "float32", {}),
    "far from zero": (3, 129, "float32", {"offset": 1e4}),
    "zero-centred": (3, 129, "float32", {"zero_centered_gamma": True}),
    "groups of warps": (8, 768, "float16", {}),
    "idle threads": (3, 1000, "float32", {"offset": 10.0}),
    "CTA": (8, 4096, "float32", {}),
    "cluster": (5, 16400, "float32", {}),
    "cluster, odd": (3, 12001, "float64", {}),
    "places": (150, 36, "float32", {}),  # three for a row; five turns
    "wide weight": (40, 129, "bfloat16", {"weight": "float64"}),
    "partial rows": (80, 1536, "float32", {"device": MANY_SMS}),
    "streamed": (5, 8201, "float64", {"device": WITHOUT_CLUSTERS}),
    "misplaced": (3, 136, "float16", {"misplaced": True}),
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
        "__syncthreads();\n  for (int own",
        "for (int own",
        "lanes",
        (("results", "dweight: .* elements are wrong"), ("races", "race:")),
    ),
    Mutation(
        "store_partial without the barrier before its sums take the place of rows",
        "(kRows * Shape::kThreads);\n    __syncthreads();",
        "(kRows * Shape::kThreads);",
        "groups of warps",
        (("races", "race:"),),
    ),
    Mutation(
        "store_partial without the barrier before it adds up",
        "__syncthreads();\n    for (int column",
        "for (int column",
        "groups of warps",
        (("results", "dweight: .* elements are wrong"), ("races", "race:")),
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
        "(kRows * Shape::kThreads);\n    __syncthreads();",
        "(kRows * Shape::kThreads);\n    if (threadIdx.x < 32) __syncthreads();",
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
            ("results", "dx: .* elements are wrong"),
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
        "RowsX::kAhead - 1);\n      RowsX::sent();",
        "RowsX::kAhead - 1);\n      if (row + RowsX::kAhead * row_step < rows) RowsX::sent();",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row",
        "rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);",
        "rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead);",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row, forward",
        "rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);",
        "rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead);",
        "cluster",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks for the same row again",
        "rows_x.ask(row + RowsX::kAhead * row_step, RowsX::kAhead - 1);",
        "rows_x.ask(row + (RowsX::kAhead - 1) * row_step, RowsX::kAhead - 1);",
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
        "for (int ahead = 0; ahead < RowsX::kAhead; ++ahead) {",
        "for (int ahead = 0; ahead < RowsX::kAhead - 1; ++ahead) {",
        "CTA",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "a place too few",
        "static constexpr int kBytes = kStages * kRows * kRowBytes;",
        "static constexpr int kBytes = (kStages - 1) * kRows * kRowBytes;",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "rows of a CTA share places",
        "offset(offset + static_cast<int>(threadIdx.x) / Shape::kThreads * kRowBytes)",
        "offset(offset)",
        "groups of warps",
        (
            ("results", "elements are wrong"),
            ("races", "race:"),
        ),
    ),
    Mutation(
        "places as long as the whole row",
        "kNeighbours>(to, Shape::column(0, p), row, column,",
        "kNeighbours>(to, Shape::column(rank, p), row, column,",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "the weight lies where dy does",
        "RowsX::kBytes + RowsDy::kBytes + row_group",
        "RowsX::kBytes + row_group",
        "cluster",
        (
            ("results", "dx: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "rows of a CTA share the place of the weight",
        "row_group * (Shape::kSlice * Scale::kColumnBytes)",
        "0",
        "wide weight",
        (("races", "race:"),),
    ),
    Mutation(
        "the weight lies beyond its place",
        "copy<Shape::kSlice>(dynamic_shared() + weight_offset, Shape::column(0, p),",
        "copy<Shape::kSlice>(dynamic_shared() + weight_offset, Shape::column(rank, p),",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a row that is not there is read",
        "active ? Shape::valid(Shape::column(rank, p)) : 0",
        "Shape::valid(Shape::column(rank, p))",
        "lanes",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "vectors copied where the address does not allow them",
        "copy<kAligned, kNeighbours>(",
        "copy<true, kNeighbours>(",
        "misplaced",
        (("results", "misaligned vector access"),),
    ),
    # Bounds
    Mutation(
        "whole packs beyond the row",
        "return column < kCols ? kPack : 0;",
        "return kPack;",
        "idle threads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
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
        "y of a row that is not there",
        "store.store(row, column, active ? Shape::valid(column) : 0, values",
        "store.store(row, column, Shape::valid(column), values",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "mean of a row that is not there",
        "if (active && rank == 0",
        "if (rank == 0",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "x of a row that is not there",
        "load.fetch(to[p], row, column, active ? Shape::valid(column) : 0);",
        "load.fetch(to[p], row, column, Shape::valid(column));",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a copy of a row that is not there",
        "if (row < rows) {\n#pragma",
        "{\n#pragma",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "rstd of a row that is not there",
        "next_rstd = next < rows ? rstd[next] : 0;",
        "next_rstd = rstd[next];",
        "lanes",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "gradients beyond the last column",
        "if (other == 0 && at < cols)",
        "if (other == 0)",
        "lanes",
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
        "sums[32][33];",
        "sums[32][31];",
        "lanes",
        (("memory", "runtime error: index .* out of bounds"),),
    ),
    Mutation(
        "vectors where the address does not allow them",
        "LoadRows<half, 8, false,",
        "LoadRows<half, 8, true,",
        "misplaced",
        (("results", "misaligned vector access"),),
    ),
    # Arithmetic
    Mutation(
        "the variance counts columns that are not there",
        "kWholePacks || i < valid ? values[i] - pivot : 0",
        "values[i] - pivot",
        "lanes",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "the variance counts packs that are not there",
        "if (valid > 0) use(values, valid);",
        "use(values, valid);",
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
        "row.squares / count - residual",
        "row.squares / (count - 1) - residual",
        "CTA",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "E[x^2] - E[x]^2",
        "const Compute pivot = group_sum<Shape::kLanes>(total) / static_cast<Compute>(count > 0 ? count : 1);",
        "const Compute pivot = 0 * total * count;",
        "far from zero",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "what the rounding of the mean lost",
        "const Compute shift = -row.residual * row.rstd;",
        "const Compute shift = 0;",
        "far from zero",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "bias ignored",
        "xhat[i] += beta[i];",
        "xhat[i] += 0 * beta[i];",
        "warp",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "a weight taken as it is where it is zero-centred",
        "xhat[i] *= kZeroCentered ? 1 + gamma[i] : gamma[i];",
        "xhat[i] *= gamma[i];",
        "zero-centred",
        (("results", "y: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its mean term",
        "g[i] - c2 - xhat[i] * c1",
        "g[i] - xhat[i] * c1",
        "warp",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its projection term",
        "g[i] - c2 - xhat[i] * c1",
        "g[i] - c2",
        "warp",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dx without its mean term, streamed",
        "g[i] - c2 - xhat[i] * c1",
        "g[i] - xhat[i] * c1",
        "streamed",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "dweight without a row",
        "if constexpr (Needs::kDweight) dweight[p][i] +=",
        "if (Needs::kDweight && row != 1) dweight[p][i] +=",
        "groups of warps",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "dweight and dbias without a row, streamed",
        "for (int64 row = blockIdx.y; row < rows;",
        "for (int64 row = blockIdx.y; row < rows - 1;",
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
        "mask < 32; mask *= 2) sums[p][i] +=",
        "mask < 16; mask *= 2) sums[p][i] +=",
        "lanes",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "partial rows that are not whole packs",
        "return (cols + 3) / 4 * 4;",
        "return cols;",
        "lanes",
        (("results", "misaligned vector access"),),
    ),
    Mutation(
        "partial rows further apart",
        "return (cols + 3) / 4 * 4;",
        "return (cols + 7) / 4 * 4;",
        "partial rows",
        (("results", "d(weight|bias): .* elements are wrong"), ("memory", "AddressSanitizer: heap-buffer-overflow")),
    ),
    Mutation(
        "sum_partials without a partial row",
        "group < groups; group += blockDim.x / kLanes",
        "group < groups - 1; group += blockDim.x / kLanes",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials without the rows beyond those of the first reading",
        "group < groups; group += blockDim.x / kLanes",
        "group < groups; group += groups",
        "partial rows",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "sum_partials without a warp",
        "other < warps ? sums",
        "other < warps - 1 ? sums",
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
    rows, cols, dtype, options = CASES[case]
    options = {"device": SMALL, **options}
    x, dy, weight, bias = inputs(
        numpy, rows, cols, dtype, offset=options.pop("offset", 1.0), weight=options.pop("weight", None)
    )
    if options.pop("misplaced", False):
        x, dy, weight, bias = (misplaced(array, 1) for array in (x, dy, weight, bias))
    check(machine, "layer_norm", x, dy, weight, bias, **options)


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
