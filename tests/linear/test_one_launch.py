"""Norm and product of few rows in one launch, without a GPU: results, synchronisation, registers, and the table."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import cpu_cupy
import numpy
import pytest
from cpu_device import ORDERS, SanitizerError, divided, missing
from nvrtc import needs_nvrtc
from one_launch_cpu import EPS, HopperMachine, arrays, case, check, gpu, know, run

from cunorm.call.checks import Layout
from cunorm.commands.compilation import compiler
from cunorm.kernel.device import H100, KNOWN
from cunorm.linear import one_launch
from cunorm.linear.one_launch import LinearProblem
from cunorm.linear.problem import LinearOptions

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

CASES = {
    "one CTA": case(3, 768, 136, 1, 2),
    "stages of half a row": case(8, 4096, 24, 1, 2),
    "one row": case(1, 512, 64, 1, 2, dtype="float16", offset=1e4),
    "clusters of 2, the last columns of a stage are no row's": case(17, 264, 136, 2, 4),
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


SYNCHRONISED = ("one CTA", "clusters of 2, the last columns of a stage are no row's", "clusters of 4")


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


class Mistake(NamedTuple):
    reason: str
    old: str
    new: str
    build: str = "results"
    case: str = "clusters of 2, the last columns of a stage are no row's"


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
    def edit(text: str) -> str:
        assert mistake.old in text
        return text.replace(mistake.old, mistake.new)

    run_case = CASES[mistake.case]
    given = arrays(run_case)
    with pytest.raises((SanitizerError, AssertionError)):
        check(run_case, given, run(HopperMachine(mistake.build, edit=edit), run_case, given))


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
        divisions = list(one_launch.divisions(problem, H100))
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"rows": 33}, "for up to 32 rows, not 33"),
        ({"dtype": "float32"}, "not float32"),
        ({"cols": 4092}, "multiples of 8"),
        ({"outs": 12}, "multiples of 8"),
        ({"x_stride": 4100}, "a multiple of 16 bytes"),
        ({"aligned": False}, "a multiple of 16 bytes"),
        ({"ln_weight": "float64"}, "must not be float64"),
        ({"cols": 40000}, "no more than one CTA"),
        ({"cols": 8}, "more than one thread"),
    ],
)
def test_what_is_split(changes, reason):
    problem = replace(PROBLEM, **changes)
    why = one_launch.why_not(problem, H100)
    assert reason in why if reason else not why
    assert "sm_80" in one_launch.why_not(PROBLEM, KNOWN[80])


def test_the_table_decides(monkeypatch):
    assert one_launch.describe(PROBLEM, KNOWN[80]).startswith("split")
    know(monkeypatch, H100.sms, {4096: {12288: {16: 2}, 14336: {16: 0}}})
    chosen = one_launch.chosen(PROBLEM, H100)
    assert chosen is not None
    assert chosen.steps[0].grid == (132, 1, 1)
    assert one_launch.describe(PROBLEM, H100).startswith("one launch: one_launch of layer_norm, 4096 cols")
    for changes in ({"rows": 17}, {"cols": 4104}, {"outs": 24576}, {"dtype": "float32"}, {"rows": 8}):
        assert one_launch.chosen(replace(PROBLEM, **changes), H100) is None
    assert one_launch.chosen(replace(PROBLEM, rows=9, outs=11264), H100) is not None
    assert one_launch.chosen(replace(PROBLEM, outs=13824), H100) is None, "nearer to one that is split"
    assert one_launch.chosen(PROBLEM, KNOWN[90]) is None, "another class of GPUs"
    one_launch.chosen.cache_clear()


@needs_machine
@pytest.mark.parametrize("shape", [(3,), (1, 2)])
def test_cupy_arrays(monkeypatch, shape):
    """CuPy arrays take one launch if the table has the product. y and statistics get their shapes from x."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from cunorm.linear import one_launch_cupy

    run_case = case(math.prod(shape), 768, 136, 1, 4, x_stride=776)
    given = arrays(run_case)
    made: dict[int, numpy.ndarray] = {}

    def new(shape: tuple[int, ...], dtype: Any) -> Any:
        return keep(cpu_cupy.Array(shape, dtype))

    def keep(array: Any) -> Any:
        made[array.data.ptr] = array
        return array

    class Runs:
        @staticmethod
        def run(plan, device_id, stream, arguments):
            pointers, scalars = divided(plan, arguments)
            HopperMachine().run(plan, scalars, **{name: made.get(pointer) for name, pointer in pointers.items()})

    cupy = SimpleNamespace(ndarray=new, cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))
    gpus = SimpleNamespace(current=lambda _: gpu(run_case.sms))
    for name, part in {"cupy": cupy, "launch": Runs, "device": gpus}.items():
        monkeypatch.setattr(one_launch_cupy, name, part)
    know(monkeypatch, run_case.sms, {768: {136: {8: 1}}})
    of_call = [keep(cpu_cupy.asarray(operand)) for operand in given]
    of_call[0] = of_call[0][:, :768].reshape(*shape, 768) if len(shape) == 1 else of_call[0][None, :, :768]
    named = zip(one_launch.NAMES, of_call, strict=True)
    layouts = tuple((name, layout(operand)) for name, operand in named)
    forget()
    try:
        options = LinearOptions("test", "layer_norm", EPS, zero_centered_gamma=False, statistics=True)
        results = one_launch_cupy.forward(options, dict(zip(one_launch.NAMES, of_call, strict=True)), layouts)
    finally:
        forget()
    assert results is not None
    y, mean, rstd = results
    expected = run(HopperMachine(), run_case, given)
    shapes = ((*shape, 136), shape, shape)
    for actual, expected_array, result_shape in zip(
        (y, mean, rstd), (expected.y, expected.mean, expected.rstd), shapes, strict=True
    ):
        assert actual.shape == result_shape
        assert (actual.reshape(expected_array.shape) == expected_array).all()


def forget() -> None:
    from cunorm.linear import one_launch_cupy

    one_launch.chosen.cache_clear()
    one_launch_cupy._chosen.cache_clear()


def layout(array: Any) -> Layout:
    return Layout(array.shape, tuple(stride // array.itemsize for stride in array.strides), array.dtype.name, "0")


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
