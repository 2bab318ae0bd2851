"""Norm and product of few rows in one launch, without a GPU: results, synchronisation and registers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from cpu_device import ORDERS, missing
from linear_cpu import HopperMachine, Mistake, arrays, case, check, check_is_found, run
from nvrtc import needs_nvrtc

from cunorm.commands.compilation import compiler
from cunorm.kernel.device import H100
from cunorm.linear import one_launch
from cunorm.linear.problem import LinearProblem

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

CLUSTERS_OF_2 = "clusters of 2, the last columns of a stage are no row's"
CASES = {
    "one CTA": case(3, 768, 136, 1, 2),
    "stages of half a row": case(8, 4096, 24, 1, 2),
    "one row": case(1, 512, 64, 1, 2, dtype="float16", offset=1e4),
    CLUSTERS_OF_2: case(17, 264, 136, 2, 4),
    "clusters of 4": case(16, 1024, 200, 4, 8, ln_weight="float32", ln_bias="float32"),
    "clusters of 8, CTAs without a row": case(3, 4096, 24, 8, 8),
    "two tiles of rows": case(32, 2048, 64, 2, 8, zero_centered_gamma=True),
    "rows apart, nothing but x and weight": case(
        9, 640, 64, 1, 2, ln_weight=None, ln_bias=None, bias=False, x_stride=648, weight_stride=656
    ),
    "RMSNorm, seven vectors": case(11, 1600, 72, 2, 4, norm="rms_norm", ln_bias=None),
    "a part of a warp": case(6, 96, 64, 1, 2, stages=2),
}


@needs_machine
@pytest.mark.parametrize("run_case", CASES.values(), ids=CASES)
def test_results(run_case):
    given = arrays(run_case)
    check(run_case, given, run(HopperMachine(), run_case, given))


SYNCHRONISED = ("one CTA", CLUSTERS_OF_2, "clusters of 4")


@pytest.mark.slow
@needs_machine
@pytest.mark.parametrize(("name", "build", "order"), list(product(SYNCHRONISED, ("races", "memory"), ORDERS)))
def test_order_of_threads_changes_nothing(name, build, order):
    """Any order of warps and CTAs, with copies as late as they may be, gives the same bits and has no race."""
    run_case = CASES[name]
    given = arrays(run_case)
    results = run(HopperMachine(build, order), run_case, given)
    check(run_case, given, results)
    assert (results.y == run(HopperMachine(), run_case, given).y).all()


@needs_machine
def test_a_row_does_not_depend_on_the_others():
    run_case = CASES["clusters of 4"]
    given = arrays(run_case)
    whole = run(HopperMachine(), run_case, given)
    some = run_case._replace(problem=replace(run_case.problem, rows=9))
    alone = run(HopperMachine(), some, given._replace(x=given.x[:9]))
    for name in whole._fields:
        assert (getattr(alone, name) == getattr(whole, name)[:9]).all()


MISTAKES = (
    Mistake("the ring is filled without a wait", "memory.empty[stage].wait((i / kStages - 1) % 2);", "", "races"),
    Mistake("the wrong phase of an empty stage", "(i / kStages - 1) % 2", "(i / kStages) % 2"),
    Mistake("a stage is read before it is full", "memory.full[stage].wait(phase);", "", "races"),
    Mistake("the phase of full stages never turns", "phase ^= stage == 0;", ""),
    Mistake(
        "a stage is given back by one warp alone", "memory.empty[lane].init(kConsumers);", "memory.empty[lane].init(1);"
    ),
    Mistake("a stage is never given back", "if (lane == 0) memory.empty[stage].arrive();", ""),
    Mistake("x is read before it has come", "if constexpr (kCluster > 1) memory.arrived.wait(0);", "", "races"),
    Mistake(
        "statistics are read before they are known",
        "memory.statistics_known.wait_in_order_of_cluster(0);",
        "",
        "races",
    ),
    Mistake(
        "statistics of one row less are expected", "expect(given.rows * 16)", "expect((given.rows - 1) * 16)", "races"
    ),
    Mistake("partial sums overwrite x of another CTA", "memory.x_is_read.wait(0);", "", "races", "two tiles of rows"),
    Mistake(
        "partial sums overwrite x of this CTA",
        "consumers_meet();  // x makes room for partial sums",
        "",
        "races",
        "one CTA",
    ),
    Mistake(
        "partial sums of a cluster are read too early", "memory.summed[slot].wait_in_order_of_cluster(0);", "", "races"
    ),
    Mistake(
        "partial sums of warps are read too early",
        "    consumers_meet();\n#pragma unroll\n    for (int row_tile",
        "\n#pragma unroll\n    for (int row_tile",
        "races",
    ),
    Mistake("one set of partial sums", "by_warp[tile % 2]", "by_warp[0]", "races", "one CTA"),
    Mistake("a cluster's CTAs may not have started", "if constexpr (kCluster > 1) cluster_start();", ""),
    Mistake("barriers are used before they are initialised", "  __syncthreads();\n", "", "races", "one CTA"),
    Mistake("the last columns of a stage count", "there ? odd == which", "true ? odd == which"),
    Mistake("a bias of the next tile", "memory.bias + tile * kTileOuts", "memory.bias + (tile + 1) * kTileOuts"),
    Mistake(
        "the order of columns in z is not that in weight",
        "odd == which ? one.words[k] : other.words[k]",
        "which ? one.words[k] : other.words[k]",
    ),
)


@needs_machine
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.reason for mistake in MISTAKES])
def test_mistakes_are_found(mistake):
    check_is_found(mistake, "linear/one_launch.cu", CASES[mistake.case or CLUSTERS_OF_2])


LAYERS = ((4096, 12288), (8192, 10240), (5120, 7168), (2880, 5120), (1600, 4800), (7168, 2112), (768, 2304), (264, 520))
OPTIONS = (
    {"dtype": "bfloat16", "ln_weight": "bfloat16", "ln_bias": "bfloat16", "bias": True},
    {"dtype": "bfloat16", "norm": "rms_norm", "ln_weight": "float32"},
    {"dtype": "float16", "ln_weight": "float32", "ln_bias": "float32", "bias": True, "zero_centered_gamma": True},
)


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("rows", one_launch.ROWS)
def test_no_kernel_spills(rows):
    """The options take turns over the layers, so that each meets every number of rows."""
    first = one_launch.ROWS.index(rows)
    for number, (cols, outs) in enumerate(LAYERS):
        options = {"norm": "layer_norm"} | OPTIONS[(first + number) % len(OPTIONS)]
        problem = LinearProblem(**options, rows=rows, cols=cols, outs=outs)
        divisions = one_launch.divisions(problem, H100)
        assert divisions
        for division in divisions[:2]:
            (step,) = one_launch.plan(problem, H100, division).steps
            with compiler(keep=False) as compile_one:
                used = compile_one(step.spec, 90)
            assert (used.spill_stores, used.spill_loads, used.stack, used.shared) == (0, 0, 0, 0), (
                str(step.spec),
                used,
            )
            assert step.dynamic_shared <= H100.shared


PROBLEM = LinearProblem("layer_norm", 16, 4096, 12288, "bfloat16", bias=True, x_stride=4096, weight_stride=4096)


def test_divisions_cover_every_column_and_fit():
    for rows, cols in product(one_launch.ROWS, range(72, 16385, 248)):
        problem = replace(PROBLEM, rows=rows, cols=cols, x_stride=cols, weight_stride=cols)
        for division in one_launch.divisions(problem, H100):
            assert (
                division.slice * division.cluster
                >= cols
                > (division.parts * division.cluster - 1) * division.stage_columns
            )
            (step,) = one_launch.plan(problem, H100, division).steps
            assert step.dynamic_shared <= H100.shared
            tiles = problem.outs // one_launch.TILE_OUTS
            clusters = step.grid[0] // division.cluster
            most = max(tiles * (i + 1) // clusters - tiles * i // clusters for i in range(clusters))
            assert -(-most // division.cluster) <= division.slots
