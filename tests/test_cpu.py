"""The kernels' own source, run on the CPU: as accurate as on a GPU, and nothing found by sanitizers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import pytest
from arrays import in_wider_rows, inputs, misplaced, same_bits
from cases import DTYPES, OFFSETS
from cpu_device import BUILDS, ORDERS, Machine, missing
from cpu_functions import (
    FEW_SMS,
    MANY_SMS,
    MANY_WITHOUT_CLUSTERS,
    SMALL,
    WITHOUT_CLUSTERS,
    backward,
    check,
    forward,
    plan_of_many,
)
from functions import OPS
from problems import problem
from reference import check_backward, check_forward

from cunorm.device import Device
from cunorm.norm.plan import plan
from cunorm.norm.problem import Problem
from cunorm.norm.shared_memory import dynamic_shared
from cunorm.norm.spec import FewRowsSpec, KernelSpec, NormSpec, SumSpec
from cunorm.norm.steps import Step
from cunorm.norm.tiers import TABLES, choose
from cunorm.source import FILES

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


class Shape(NamedTuple):
    rows: int
    cols: int
    dtype: str
    device: Device
    reason: str
    parameters: str | None = None  # the dtype of weight and bias, if it is not that of x


LITTLE_SHARED = Device("one SM of a T4", 75, 1, 64 << 10)
PARAMETERS = {"forward": ("weight", "bias"), "backward": ("weight",)}
SHAPES = (
    Shape(3, 1, "float32", SMALL, "a row is its own mean"),
    Shape(8, 2, "float64", SMALL, "xhat is +-1, and dx cancels"),
    Shape(300, 7, "bfloat16", SMALL, "one lane a row, less than a pack; several turns of full CTAs"),
    Shape(8, 31, "float16", SMALL, "two lanes a row, in the backward pass four"),
    Shape(320, 33, "float32", SMALL, "odd: rows begin at every alignment"),
    Shape(3, 127, "bfloat16", SMALL, "eight lanes or sixteen"),
    Shape(8, 128, "float16", SMALL, "whole packs"),
    Shape(1, 129, "float64", SMALL, "a last pack of one column"),
    Shape(8, 50, "float16", SMALL, "a lane of seven packs a row, or four lanes"),
    Shape(8, 64, "bfloat16", SMALL, "four lanes a row"),
    Shape(8, 250, "float16", SMALL, "sixteen lanes a row"),
    Shape(20, 250, "bfloat16", MANY_SMS, "whole columns beside dx"),
    Shape(45, 500, "float16", SMALL, "a warp a row, odd packs; partial rows of two warps"),
    Shape(2, 321, "bfloat16", MANY_SMS, "a thread for every pack, eight lanes to a pack's turn, threads to spare"),
    Shape(3, 1152, "bfloat16", MANY_SMS, "a thread for every pack, a warp to a pack's turn"),
    Shape(2, 500, "float16", SMALL, "gradients of two warps"),
    Shape(40, 768, "float16", SMALL, "a warp a row; partial rows of four warps"),
    Shape(4000, 24, "bfloat16", SMALL, "several turns in registers"),
    Shape(3, 1000, "bfloat16", SMALL, "whole packs that fill no warp"),
    Shape(12, 1024, "float32", SMALL, "a full shape; a ring of rows"),
    Shape(40, 1024, "float16", SMALL, "gradients of four times two warps"),
    Shape(3, 1034, "bfloat16", SMALL, "rows begin at multiples of 4 bytes"),
    Shape(3, 1036, "float16", SMALL, "rows begin at multiples of 8 bytes"),
    Shape(3, 1037, "bfloat16", SMALL, "rows begin at multiples of 2 bytes; shifted packs stay in registers"),
    Shape(3, 2300, "bfloat16", SMALL, "three packs of 96 threads"),
    Shape(3, 2500, "bfloat16", SMALL, "five packs of 64 threads, RMSNorm two of 160"),
    Shape(3, 5300, "bfloat16", SMALL, "three packs of 224 threads"),
    Shape(20, 5000, "bfloat16", MANY_SMS, "a CTA a row, all rows at once"),
    Shape(3, 10240, "bfloat16", SMALL, "a full shape of five packs"),
    Shape(6, 16393, "bfloat16", FEW_SMS, "partial rows of clusters, the last pack holds one column"),
    Shape(33, 16400, "float32", MANY_WITHOUT_CLUSTERS, "a warp adds up the partial rows of its columns"),
    Shape(3, 20488, "bfloat16", MANY_SMS, "six packs by two threads, in a cluster of 8"),
    Shape(18, 20488, "bfloat16", MANY_SMS, "LayerNorm: six packs a thread, in a cluster of 2"),
    Shape(9, 10248, "bfloat16", MANY_SMS, "three packs by two threads, in a cluster of 8"),
    Shape(310, 2568, "bfloat16", MANY_SMS, "LayerNorm of three packs a thread: all rows at once, without turns"),
    Shape(280, 1536, "float32", MANY_SMS, "more partial rows than a CTA of sum_partials reads at once"),
    Shape(8, 3840, "bfloat16", SMALL, "a CTA a row"),
    Shape(8, 4096, "float32", SMALL, "a full shape"),
    Shape(5, 3201, "float64", SMALL, "cluster of 2 in the backward pass, odd"),
    Shape(5, 6001, "float32", SMALL, "three packs a thread in the backward pass, odd"),
    Shape(8, 4601, "bfloat16", SMALL, "six warps of three packs or nine of two in the backward pass, odd"),
    Shape(8, 4992, "float16", SMALL, "ten warps of two packs in the backward pass, RMSNorm by two rows of a CTA"),
    Shape(8, 8191, "float16", SMALL, "a CTA a row, odd"),
    Shape(3, 8192, "bfloat16", SMALL, "a full shape, backward by halves of two rows on a multiprocessor"),
    Shape(7, 12288, "float16", SMALL, "backward by two CTAs, of LayerNorm by half of one row on a multiprocessor"),
    Shape(9, 10240, "bfloat16", SMALL, "backward by two CTAs with three places"),
    Shape(7, 9001, "bfloat16", SMALL, "backward by eight warps of five packs that keep the row, odd"),
    Shape(3, 12345, "float16", SMALL, "RMSNorm backward by ten warps of five packs that keep the row, odd"),
    Shape(3, 20003, "bfloat16", SMALL, "five packs a thread of clusters of 2 in the backward pass, odd"),
    Shape(3, 10501, "bfloat16", SMALL, "RMSNorm backward by nine warps of five packs that keep the row, odd"),
    Shape(3, 2601, "float64", SMALL, "three packs a thread and three places in the backward pass, odd"),
    Shape(3, 3970, "float64", SMALL, "the longest rows of 64 registers, forward"),
    Shape(3, 5999, "float64", SMALL, "six packs a thread, backward cluster of 2, odd"),
    Shape(3, 7001, "float64", SMALL, "seven packs a thread, backward cluster of 4, odd"),
    Shape(2, 30001, "float64", SMALL, "five packs a thread in a cluster of 8 in the backward pass, odd"),
    Shape(2, 60001, "float64", SMALL, "five packs a thread in a cluster of 16 in the backward pass, odd"),
    Shape(2, 32767, "float64", SMALL, "four packs a thread in the backward pass, odd"),
    Shape(2, 32768, "float64", SMALL, "a full shape in the backward pass"),
    Shape(2, 65535, "float64", SMALL, "four packs a thread in a cluster of 16 in the backward pass, odd"),
    Shape(2, 65536, "float64", SMALL, "a full shape in a cluster of 16 in the backward pass"),
    Shape(8, 8192, "float64", SMALL, "cluster of 4 in the backward pass"),
    Shape(3, 16385, "bfloat16", SMALL, "the last pack of the row holds one column"),
    Shape(3, 16393, "bfloat16", MANY_SMS, "five packs by two threads of clusters, the last pack holds one column"),
    Shape(5, 16384, "float32", SMALL, "a cluster takes its third row in a set of slots used before"),
    Shape(5, 12002, "float64", SMALL, "cluster of 2, backward of 4"),
    Shape(5, 12001, "float64", SMALL, "cluster of 8, backward of 4, odd"),
    Shape(3, 32768, "bfloat16", SMALL, "the longest row that one CTA holds, forward"),
    Shape(9, 32768, "float16", SMALL, "many rows of LayerNorm: two CTAs of a row on an SM, with the bits of one"),
    Shape(10, 28680, "bfloat16", SMALL, "many rows of LayerNorm beside wide weight and bias: three places", "float32"),
    Shape(30, 1280, "bfloat16", SMALL, "a warp's rows in three places beside wide weight and bias", "float32"),
    Shape(216, 1280, "bfloat16", SMALL, "many rows in a ring beside wide weight and bias", "float32"),
    Shape(54, 5000, "bfloat16", SMALL, "many rows beside a wide weight, a hundred and sixty threads", "float32"),
    Shape(4, 65537, "float16", SMALL, "four packs a thread of clusters of 8 and 16, backward of 8, odd"),
    Shape(3, 57353, "bfloat16", SMALL, "backward of 8 with four packs a thread, odd"),
    Shape(3, 32771, "float64", SMALL, "cluster of 8, backward of 16 with three packs a thread, odd"),
    Shape(3, 65538, "float64", SMALL, "cluster of 16 in the forward pass, backward streamed"),
    Shape(5, 16388, "float32", SMALL, "cluster of 4 instead of 2 beside wide weight and bias", "float64"),
    Shape(3, 32777, "float32", SMALL, "of 8, odd; backward of 8 too", "float64"),
    Shape(3, 262144, "float32", SMALL, "a full shape whose next row takes the place of the present one, backward"),
    Shape(3, 200000, "float32", SMALL, "the same of a shape that is not full"),
    Shape(2, 65540, "float32", SMALL, "of 16 instead of 8; backward of 16 too", "float64"),
    Shape(3, 8201, "float64", WITHOUT_CLUSTERS, "streamed, odd; gradients of one group"),
    Shape(33, 32792, "float32", MANY_WITHOUT_CLUSTERS, "streamed, whole packs, several partial rows"),
    Shape(1, 32777, "bfloat16", WITHOUT_CLUSTERS, "streamed, odd"),
    Shape(17, 131081, "float16", MANY_WITHOUT_CLUSTERS, "a thread adds up the partial rows of its columns alone"),
)
SHAPES_BY_NAME = {
    f"{one.rows}x{one.cols}-{one.dtype}{'' if one.device.clusters else '-without clusters'}": one for one in SHAPES
}


def problems(direction: str, op: str = "layer_norm") -> list[tuple[Problem, Device]]:
    arrays = PARAMETERS[direction] if op == "layer_norm" else ("weight",)
    return [
        (problem(direction, rows, cols, dtype, op, **dict.fromkeys(arrays, parameters or dtype)), device)
        for rows, cols, dtype, device, _, parameters in SHAPES
    ]


def test_the_table_reaches_every_kind_of_kernel():
    """A change of the plan must not leave one without tests."""
    solutions = [plan(*one) for direction in TABLES for one in problems(direction)]
    solutions += [plan_of_many(*one) for one in problems("backward")]
    steps = [step for solution in solutions for step in solution.steps]
    # Those that test_float8.py and test_sandwich.py run.
    elsewhere = {"forward_pairs", "forward_twice", "backward_twice"}
    assert {step.spec.kernel for step in steps} == set(FILES) - elsewhere
    assert {step.spec.aligned for step in steps if isinstance(step.spec, NormSpec)} == {True, False}
    sums = [(one, step.spec) for one in solutions for step in one.steps if step.spec.kernel == "sum_partials"]
    # A thread takes several partial rows. Added up in a warp and among warps, among warps (two kinds), by a thread.
    assert any(one.groups > spec.rows_per_cta > 1 for one, spec in sums)
    assert {holder(spec) for one, spec in sums if one.groups > 1} == {"part of a warp", "warp", "warps", "CTA"}
    assert any(step.grid[1] > 1 for step in steps if step.spec.kernel == "column_gradients")


@pytest.mark.parametrize("direction", TABLES)
def test_the_table_reaches_every_tier(direction):
    table, mine = TABLES[direction], problems(direction)
    chosen = [choose(*one) for op in OPS for one in problems(direction, op)]
    assert {choice and choice[0] for choice in chosen} == {*table, None}
    specs = [choice[1] for choice in chosen if choice]
    # The last of two is for what draws again which elements were dropped; test_dropout.py runs it.
    choices = {(tier, packs) for tier in table for packs in (tier.packs[:1] if len(tier.packs) == 2 else tier.packs)}
    assert choices <= {(choice[0], choice[1].shape.packs) for choice in chosen if choice}
    assert {spec.row_dtype for spec in specs} == set(DTYPES)
    assert {min(32, spec.shape.threads) for spec in specs} == {1, 2, 4, 8, 16, 32}
    assert {spec.aligned for spec in specs if spec.stages} == {True, False}
    if direction == "backward":
        assert {weight_waits(spec) for spec in specs} == {True, False}
    # Clusters of every size come back to the first place for rows, and to the first set of slots.
    first_steps = [(one[0].rows, plan_of_many(*one).steps[0]) for one in mine]
    again = {step.spec.shape.cluster for rows, step in first_steps if turns(rows, step) > max(2, step.spec.stages)}
    assert again >= {tier.cluster for tier in table if tier.stages}


def test_the_table_reaches_every_way_to_add_up_gradients():
    """Rows share a warp of a CTA, have one or several, all of the CTA, a cluster; one group of them or more."""
    specs = [plan_of_many(*one).steps[0].spec for op in OPS for one in problems("backward", op)]
    ways = {(holder(spec), spec.final) for spec in specs if spec.kernel == "backward"}
    every = set(itertools.product(("part of a warp", "warp", "warps", "CTA", "cluster"), (True, False)))
    assert ways == every


def test_the_table_reaches_backward_kernels_for_few_rows():
    """By columns of a part of a warp or of several, beside rows that anybody holds."""
    solutions = [plan(*one) for op in OPS for one in problems("backward", op)]
    specs = [step.spec for one in solutions for step in one.steps if isinstance(step.spec, FewRowsSpec)]
    assert {holder(spec.rows) for spec in specs} == {"part of a warp", "warp", "warps", "CTA", "cluster"}
    assert {spec.columns.shape.threads >= 32 for spec in specs} == {True, False}
    assert {spec.rows.aligned for spec in specs} == {True, False}


def test_the_table_reaches_forward_kernels_for_few_rows():
    solutions = [plan(*one) for one in problems("forward") if one[0].rows <= one[1].sms]
    specs = [step.spec for one in solutions for step in one.steps if step.spec.kernel != "forward_streamed"]
    found = {(spec.kernel, holder(spec)) for spec in specs if not spec.stages}
    with_more_threads = {("forward_spread", "CTA"), ("forward_spread", "cluster")}
    assert found == {("forward", "part of a warp"), ("forward", "CTA")} | with_more_threads


def turns(rows: int, step: Step) -> int:
    """How many rows a thread takes one after the other."""
    return rows * step.spec.shape.cluster // (step.grid[0] * step.spec.rows_per_cta)


def weight_waits(spec: KernelSpec) -> bool:
    """In shared memory."""
    return dynamic_shared(spec) > dynamic_shared(replace(spec, operands=tuple({*spec.operands} - {*spec.columns})))


def holder(spec: KernelSpec) -> str:
    """What holds a row."""
    threads = spec.lanes if isinstance(spec, SumSpec) else spec.shape.threads
    if spec.cluster > 1:
        return "cluster"
    if spec.rows_per_cta == 1:
        return "CTA"
    return "part of a warp" if threads < 32 else "warp" if threads == 32 else "warps"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES_BY_NAME)
def test_every_shape(name, op):
    check_shape(name, op, Machine())


def check_shape(name: str, op: str, machine: Machine) -> None:
    rows, cols, dtype, device, _, parameters = SHAPES_BY_NAME[name]
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype, weight=parameters, bias=parameters)
    check(machine, op, x, dy, weight, bias, device=device)


# In the backward pass a row is held by a part of a warp, a warp, two warps, a CTA (two rows at once), a cluster.
IN_PLACES = ((128, "float16"), (504, "float16"), (704, "float16"), (6000, "float32"), (3202, "float64"))


def at_once(spec: NormSpec) -> int:
    """Rows that a thread has or waits for: an aligned one that it keeps has left its place."""
    return spec.stages + (spec.rows_stay and spec.aligned)


def backward_step(rows: int, cols: int, dtype: str) -> Step:
    return plan_of_many(problem("backward", rows, cols, dtype), SMALL).steps[0]


def rows_that_take(wanted: int, cols: int, dtype: str) -> int:
    """The fewest rows of which every thread takes so many."""
    return next(rows for rows in range(1, 1000) if turns(rows, backward_step(rows, cols, dtype)) == wanted)


@pytest.mark.parametrize("filled", ["one row", "a turn less than places", "as many", "a row more", "many"])
@pytest.mark.parametrize(("cols", "dtype"), IN_PLACES)
def test_rows_fill_their_places_in_part_and_more_than_once(cols, dtype, filled):
    places = at_once(backward_step(1, cols, dtype).spec)
    rows = {
        "one row": 1,
        "a turn less than places": rows_that_take(places - 1, cols, dtype),
        "as many": rows_that_take(places, cols, dtype),
        "a row more": rows_that_take(places, cols, dtype) + 1,
        "many": rows_that_take(3 * places, cols, dtype) - 1,
    }[filled]
    spec = backward_step(rows, cols, dtype).spec
    assert spec.aligned, "or nothing is copied asynchronously"
    assert at_once(spec) == places
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    check(Machine(), "layer_norm", x, dy, weight, bias)


@pytest.mark.parametrize(
    ("moved_by", "output_mask"), [(0, (False, True, True)), (1, (True, True, True)), (1, (False, True, True))]
)
def test_a_row_takes_the_place_of_the_present_one(moved_by, output_mask):
    """Without dx it has been read after the first pass; at odd addresses neighbours read what a thread copied."""
    rows, cols, dtype = 3, 200000, "float32"
    spec = backward_step(rows, cols, dtype).spec
    assert isinstance(spec, NormSpec)
    assert (spec.stages, spec.rows_stay) == (1, False)
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    check(
        Machine(), "layer_norm", misplaced(x, moved_by), misplaced(dy, moved_by), weight, bias, output_mask=output_mask
    )


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    ("cols", "dtype", "device"),
    [
        (129, "float32", SMALL),
        (2000, "float16", SMALL),
        (12001, "float64", SMALL),
        (16384, "float32", SMALL),
        (16393, "float32", WITHOUT_CLUSTERS),
    ],
)
def test_rows_far_from_zero(cols, dtype, device, offset):
    x, dy, weight, bias = inputs(numpy, 3, cols, dtype, offset=offset)
    check(Machine(), "layer_norm", x, dy, weight, bias, device=device)


@pytest.mark.parametrize("value", [1e38, 3e38])
@pytest.mark.parametrize(
    ("cols", "dtype", "device"),
    [
        (5, "bfloat16", SMALL),
        (33, "float32", SMALL),
        (1001, "float32", SMALL),
        (4100, "float32", SMALL),
        (33333, "bfloat16", SMALL),
        (16393, "float32", WITHOUT_CLUSTERS),
    ],
)
def test_equal_values_up_to_the_largest(cols, dtype, device, value):
    """Their mean is they, to the bit: one step of the format beside it squared would be infinite."""
    x, _, weight, bias = inputs(numpy, 3, cols, dtype, offset=value)
    assert (x == x[:, :1]).all()
    y, mean, _ = forward(Machine(), "layer_norm", x, weight, bias, device=device)
    numpy.testing.assert_array_equal(mean, x[:, 0].astype("float32"))
    numpy.testing.assert_array_equal(y.astype("float32"), numpy.broadcast_to(bias.astype("float32"), y.shape))


@pytest.mark.parametrize(
    ("cols", "device"), [(33, SMALL), (129, SMALL), (4100, SMALL), (33333, SMALL), (16393, WITHOUT_CLUSTERS)]
)
def test_where_squares_overflow_rstd_is_zero(cols, device):
    """As with torch. The square of the mean's distance from the pivot overflows too: infinite less infinite is NaN."""
    x, _, weight, bias = inputs(numpy, 3, cols, "float32")
    y, _, rstd = forward(Machine(), "layer_norm", x * numpy.float32(1e25), weight, bias, device=device)
    numpy.testing.assert_array_equal(rstd, numpy.zeros(3))
    numpy.testing.assert_array_equal(y, numpy.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("cols", [129, 1001, 4100, 33333])
def test_means_beyond_the_sum_that_float_holds(cols):
    """Deviations of a few steps of float32, whose squares it holds."""
    x, _, weight, bias = inputs(numpy, 3, cols, "float32")
    x = (x * 3e16 + numpy.float32(4e23) * numpy.sign(x[:, :1])).astype("float32")
    y, mean, rstd = forward(Machine(), "layer_norm", x, weight, bias)
    check_forward("layer_norm", (y, mean, rstd), x, weight, bias)


@pytest.mark.parametrize(("rows", "rows_per_cta"), [(1, 4), (2, 8)])
def test_row_groups_without_rows_wait_for_their_weight(rows, rows_per_cta):
    """It waits in shared memory, and nobody reads it there."""
    (_, spec) = choose(problem("backward", rows, 136, "bfloat16", weight="float64"), SMALL) or pytest.fail("streamed")
    assert (spec.rows_per_cta, weight_waits(spec), spec.aligned) == (rows_per_cta, True, True)
    x, dy, weight, bias = inputs(numpy, rows, 136, "bfloat16", weight="float64", bias="float64")
    check(Machine("races"), "layer_norm", x, dy, weight, bias)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("cols", [129, 768, 4096])
def test_wide_weight_and_bias_beside_bfloat16(cols, wide):
    """A weight that a thread has no registers for waits in shared memory beside the rows."""
    x, dy, weight, bias = inputs(numpy, 40, cols, "bfloat16", weight=wide, bias=wide)
    check(Machine(), "layer_norm", x, dy, weight, bias)


@pytest.mark.parametrize(
    ("cols", "device", "places", "rows_per_cta"),
    [(8191, SMALL, 2, 1), (704, LITTLE_SHARED, 2, 3), (129, LITTLE_SHARED, 2, 12)],
)
def test_rows_of_a_wide_dy_have_fewer_places(cols, device, places, rows_per_cta):
    """Where shared memory does not hold all of them, and then a CTA takes fewer rows."""
    (tier, spec) = choose(problem("backward", 40, cols, "float16", y="float64"), device) or pytest.fail("streamed")
    assert (at_once(spec), spec.rows_per_cta) == (places, rows_per_cta)
    assert places < tier.stages
    x, dy, weight, bias = inputs(numpy, 40, cols, "float16", dy="float64")
    check(Machine(), "layer_norm", x, dy, weight, bias, y=numpy.empty_like(dy), device=device)


@pytest.mark.parametrize("cols", [129, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_beside_x(dtype, cols):
    """weight, bias, y and dy each of another dtype."""
    others = [other for other in DTYPES if other != dtype]
    x, dy, weight, bias = inputs(numpy, 5, cols, dtype, weight=others[0], bias=others[1], dy=others[2])
    y = numpy.empty_like(dy)
    check(Machine(), "layer_norm", x, dy, weight, bias, y=y)


OPTIONS: dict[str, dict[str, Any]] = {
    "no weight": {"without": ("weight",)},
    "no bias": {"without": ("bias",)},
    "neither": {"without": ("weight", "bias")},
    "zero-centred": {"zero_centered_gamma": True},
    "eps": {"eps": 0.5},
    "dx alone": {"output_mask": (True, False, False)},
    "dweight alone": {"output_mask": (False, True, False)},
    "dbias alone": {"output_mask": (False, False, True)},
    "no dx": {"output_mask": (False, True, True)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("cols", "device"),
    [(50, SMALL), (200, SMALL), (3201, SMALL), (4104, WITHOUT_CLUSTERS)],
    ids=["part of a warp", "CTA", "cluster", "streamed"],
)
def test_options(cols, device, name):
    options = dict(OPTIONS[name])
    without = options.pop("without", ())
    x, dy, weight, bias = inputs(numpy, 5, cols, "float64", weight="float32")
    weight, bias = (None if key in without else array for key, array in (("weight", weight), ("bias", bias)))
    check(Machine(), "layer_norm", x, dy, weight, bias, device=device, **options)


@pytest.mark.parametrize(("rows", "last"), [(16, "column_gradients"), (40, "sum_partials")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dbias_alone(dtype, rows, last):
    """Nothing but dy is read. Up to 16 rows are one launch."""
    x, dy, weight, _ = inputs(numpy, rows, 1001, dtype)
    solution = plan(problem("backward", rows, 1001, dtype, wanted=("bias",)), MANY_SMS)
    dbias = numpy.full(1001, numpy.nan, weight.dtype)
    Machine("memory").run(solution, {}, dy=dy, dbias=dbias)
    check_backward("layer_norm", (None, None, dbias), dy, x, weight)
    assert solution.steps[-1].spec.kernel == last


def layouts(rows: int, cols: int, dtype: str) -> dict[str, tuple]:
    """(x, dy, weight, bias, y) where addresses or strides rule vector access out, and where they do not."""
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    y = numpy.empty_like(x)
    pack = 16 // x.itemsize
    wide = {key: in_wider_rows(array, pack) for key, array in (("x", x), ("dy", dy), ("y", y))}
    odd = {key: in_wider_rows(array, 1) for key, array in (("x", x), ("dy", dy), ("y", y))}
    for matrix in (*wide.values(), *odd.values()):
        matrix.base[:, cols:] = numpy.nan
    return {
        "misplaced": tuple(misplaced(array, 1) for array in (x, dy, weight, bias, y)),
        "weight misplaced": (x, dy, misplaced(weight, 1), bias, y),
        "wider rows": (wide["x"], wide["dy"], weight, bias, wide["y"]),
        "wider by one": (odd["x"], odd["dy"], weight, bias, odd["y"]),
        "negative stride": (x[::-1], dy[::-1], weight, bias, y),
    }


@pytest.mark.parametrize("name", layouts(1, 1, "float32"))
@pytest.mark.parametrize(("cols", "dtype"), [(136, "float16"), (4096, "float32")])
def test_layouts(cols, dtype, name):
    x, dy, weight, bias, y = layouts(5, cols, dtype)[name]
    check(Machine(), "layer_norm", x, dy, weight, bias, y=y)
    padding = y.base[:, cols:] if name.startswith("wider") else numpy.full(1, numpy.nan)
    assert numpy.isnan(padding.astype("float32")).all(), "written beside a row of y"


@pytest.mark.parametrize("cols", [8192, 10240, 12288])
def test_what_two_ctas_add_up_has_the_same_bits_at_odd_addresses(cols):
    """In as many partial rows: four multiprocessors leave two or four. Rounded to 16 bits sums in another order would
    be the same.
    """
    options = {"device": FEW_SMS, "as_many": True}
    x, dy, weight, bias = inputs(numpy, 13, cols, "bfloat16", weight="float32", bias="float32")
    _, mean, rstd = forward(Machine(), "layer_norm", x, weight, bias, device=FEW_SMS)
    aligned = backward(Machine(), "layer_norm", dy, x, mean, rstd, weight, **options)
    moved = backward(Machine(), "layer_norm", misplaced(dy, 1), misplaced(x, 1), mean, rstd, weight, **options)
    for name, one, other in zip(("dx", "dweight", "dbias"), aligned, moved, strict=True):
        assert same_bits(one, other), name


@pytest.mark.parametrize("build", ["results", "memory", "races"])
@pytest.mark.parametrize("cols", [49, 1001])
@pytest.mark.parametrize(
    ("dtype", "other"),
    [("float16", "float32"), ("float32", "float16"), ("float64", "bfloat16"), ("bfloat16", "float64")],
)
def test_packs_of_every_size_at_every_address(dtype, other, cols, build):
    """Of 4 to 64 bytes, for as many rows as an odd stride takes to begin at the same place again."""
    x, dy, weight, bias = inputs(numpy, 9, cols, dtype, weight=other, bias=other, dy=other)
    x, dy, y = (in_wider_rows(array, 2 - cols % 2) for array in (x, dy, numpy.empty_like(dy)))
    for matrix in (x, dy, y):
        matrix.base[:, cols:] = numpy.nan
    check(Machine(build), "layer_norm", x, dy, misplaced(weight, 1), misplaced(bias, 3), y=y)
    assert numpy.isnan(y.base[:, cols:].astype("float32")).all(), "written beside a row of y"


# One of each kind: what a sanitizer build can find does not depend on more.
SANITIZED = (
    "300x7-bfloat16",
    "320x33-float32",
    "8x128-float16",
    "45x500-float16",
    "40x768-float16",
    "3x1152-bfloat16",
    "20x250-bfloat16",
    "3x20488-bfloat16",
    "8x4096-float32",
    "8x8191-float16",
    "5x12001-float64",
    "3x16393-bfloat16",
    "5x16384-float32",
    "3x8201-float64-without clusters",
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [build for build in BUILDS if build != "results"])
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing(name, build, order):
    check_shape(name, "layer_norm", Machine(build, order))


@pytest.mark.parametrize("name", layouts(1, 1, "float32"))
def test_no_layout_leads_beyond_an_array(name):
    x, dy, weight, bias, y = layouts(3, 136, "float16")[name]
    check(Machine("memory"), "layer_norm", x, dy, weight, bias, y=y)


def test_the_order_of_threads_does_not_show():
    x, dy, weight, bias = inputs(numpy, 8, 8191, "float16")
    results = ([], [])
    for order in ORDERS:
        machine = Machine(order=order)
        y, mean, rstd = forward(machine, "layer_norm", x, weight, bias)
        for as_many in (False, True):
            gradients = backward(machine, "layer_norm", dy, x, mean, rstd, weight, as_many=as_many)
            results[as_many].append((y, mean, rstd, *gradients))
    for arrays in itertools.chain(*(zip(*found, strict=True) for found in results)):
        assert len({array.tobytes() for array in arrays}) == 1
