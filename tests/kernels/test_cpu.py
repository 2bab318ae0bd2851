"""The kernels' text on the CPU: rows that wait in shared memory, extreme numbers, options and layouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
from arrays import in_wider_rows, inputs, misplaced, same_bits
from cases import DTYPES, OFFSETS
from cpu_device import ORDERS, Machine, missing
from cpu_functions import (
    FEW_SMS,
    LITTLE_SHARED,
    MANY_SMS,
    SMALL,
    WITHOUT_CLUSTERS,
    backward,
    check,
    forward,
    plan_of_many,
)
from cpu_shapes import turns, weight_waits
from problems import problem
from reference import check_backward, check_forward

from cunorm.plan.choose import tier_of
from cunorm.plan.plan import plan
from cunorm.plan.spec import NormSpec
from cunorm.plan.steps import Step

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


# These rows are held by a part of a warp, a warp, two warps, a CTA (two rows at once) and a cluster.
IN_PLACES = ((128, "float16"), (504, "float16"), (704, "float16"), (6000, "float32"), (3202, "float64"))


def at_once(spec: NormSpec) -> int:
    """Return how many rows a thread has or waits for. An aligned row that it keeps in registers has left its stage."""
    return spec.stages + (spec.rows_in_registers and spec.aligned)


def backward_step(rows: int, cols: int, dtype: str) -> Step:
    return plan_of_many(problem("backward", rows, cols, dtype), SMALL).steps[0]


def rows_that_take(wanted: int, cols: int, dtype: str) -> int:
    """Return the smallest number of rows for which every thread takes `wanted` of them."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moved_by", "output_mask"), [(0, (False, True, True)), (1, (True, True, True)), (1, (False, True, True))]
)
def test_a_row_takes_the_place_of_the_present_one(moved_by, output_mask):
    """Without dx, a row is not needed after the first pass. At odd addresses neighbours read what a thread copied."""
    rows, cols, dtype = 3, 200000, "float32"
    spec = backward_step(rows, cols, dtype).spec
    assert isinstance(spec, NormSpec)
    assert (spec.stages, spec.rows_in_registers) == (1, False)
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
    """The mean has the bits of the values. If it was off by one ulp, the square of that would be infinite."""
    x, _, weight, bias = inputs(numpy, 3, cols, dtype, offset=value)
    assert (x == x[:, :1]).all()
    y, mean, _ = forward(Machine(), "layer_norm", x, weight, bias, device=device)
    numpy.testing.assert_array_equal(mean, x[:, 0].astype("float32"))
    numpy.testing.assert_array_equal(y.astype("float32"), numpy.broadcast_to(bias.astype("float32"), y.shape))


@pytest.mark.parametrize(
    ("cols", "device"), [(33, SMALL), (129, SMALL), (4100, SMALL), (33333, SMALL), (16393, WITHOUT_CLUSTERS)]
)
def test_where_squares_overflow_rstd_is_zero(cols, device):
    """rstd is zero as with torch. It is not NaN, though the square of the mean less the pivot overflows too."""
    x, _, weight, bias = inputs(numpy, 3, cols, "float32")
    y, _, rstd = forward(Machine(), "layer_norm", x * numpy.float32(1e25), weight, bias, device=device)
    numpy.testing.assert_array_equal(rstd, numpy.zeros(3))
    numpy.testing.assert_array_equal(y, numpy.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("cols", [129, 1001, 4100, 33333])
def test_means_beyond_the_sum_that_float_holds(cols):
    """The sum of a row overflows, but the deviations are a few ulps, whose squares float32 holds."""
    x, _, weight, bias = inputs(numpy, 3, cols, "float32")
    x = (x * 3e16 + numpy.float32(4e23) * numpy.sign(x[:, :1])).astype("float32")
    y, mean, rstd = forward(Machine(), "layer_norm", x, weight, bias)
    check_forward("layer_norm", (y, mean, rstd), x, weight, bias)


@pytest.mark.parametrize(("rows", "rows_per_cta"), [(1, 4), (2, 8)])
def test_row_groups_without_rows_wait_for_their_weight(rows, rows_per_cta):
    """The weight waits in shared memory, where row groups without a row never read it."""
    (_, spec) = tier_of(problem("backward", rows, 136, "bfloat16", weight="float64"), SMALL) or pytest.fail("streamed")
    assert (spec.rows_per_cta, weight_waits(spec), spec.aligned) == (rows_per_cta, True, True)
    x, dy, weight, bias = inputs(numpy, rows, 136, "bfloat16", weight="float64", bias="float64")
    check(Machine("races"), "layer_norm", x, dy, weight, bias)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("cols", [129, 768, 4096])
def test_wide_weight_and_bias_beside_bfloat16(cols, wide):
    """A weight that a thread has no registers for waits in shared memory beside the rows."""
    x, dy, weight, bias = inputs(numpy, 40, cols, "bfloat16", weight=wide, bias=wide)
    check(Machine(), "layer_norm", x, dy, weight, bias)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cols", "device", "places", "rows_per_cta"),
    [(8191, SMALL, 2, 1), (704, LITTLE_SHARED, 2, 3), (129, LITTLE_SHARED, 2, 12)],
)
def test_rows_of_a_wide_dy_have_fewer_places(cols, device, places, rows_per_cta):
    """Shared memory does not hold as many stages of a wide dy, so that a CTA has fewer stages or rows."""
    narrow, wide = (problem("backward", 40, cols, "float16", y=y) for y in ("float16", "float64"))
    (_, spec) = tier_of(wide, device) or pytest.fail("streamed")
    assert (at_once(spec), spec.rows_per_cta) == (places, rows_per_cta)
    (_, beside_a_narrow_dy) = tier_of(narrow, device) or pytest.fail("streamed")
    assert places < at_once(beside_a_narrow_dy)
    x, dy, weight, bias = inputs(numpy, 40, cols, "float16", dy="float64")
    check(Machine(), "layer_norm", x, dy, weight, bias, y=numpy.empty_like(dy), device=device)


@pytest.mark.parametrize("cols", [129, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_beside_x(dtype, cols):
    """weight, bias, y and dy each have another dtype."""
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
    """The gradient of bias reads only dy. Up to 16 rows take one launch."""
    x, dy, weight, _ = inputs(numpy, rows, 1001, dtype)
    solution = plan(problem("backward", rows, 1001, dtype, wanted=("bias",)), MANY_SMS)
    dbias = numpy.full(1001, numpy.nan, weight.dtype)
    Machine("memory").run(solution, {}, dy=dy, dbias=dbias)
    check_backward("layer_norm", (None, None, dbias), dy, x, weight)
    assert solution.steps[-1].spec.kernel == last


def layouts(rows: int, cols: int, dtype: str) -> dict[str, tuple]:
    """Return (x, dy, weight, bias, y) in layouts that rule vector access out, and in some that do not."""
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    y = numpy.empty_like(x)
    vector_cols = 16 // x.itemsize
    wide = {key: in_wider_rows(array, vector_cols) for key, array in (("x", x), ("dy", dy), ("y", y))}
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
    """Both leave as many partial rows, so that sums have the same order. They are float32 to show every bit."""
    options = {"device": FEW_SMS, "as_many": True}
    x, dy, weight, bias = inputs(numpy, 13, cols, "bfloat16", weight="float32", bias="float32")
    _, mean, rstd = forward(Machine(), "layer_norm", x, weight, bias, device=FEW_SMS)
    aligned = backward(Machine(), "layer_norm", dy, x, mean, rstd, weight, **options)
    moved = backward(Machine(), "layer_norm", misplaced(dy, 1), misplaced(x, 1), mean, rstd, weight, **options)
    for name, gradient, moved_gradient in zip(("dx", "dweight", "dbias"), aligned, moved, strict=True):
        assert same_bits(gradient, moved_gradient), name


@pytest.mark.parametrize("build", ["races", "memory"])
@pytest.mark.parametrize("cols", [49, 1001])
@pytest.mark.parametrize(
    ("dtype", "other"),
    [("float16", "float32"), ("float32", "float16"), ("float64", "bfloat16"), ("bfloat16", "float64")],
)
def test_packs_of_every_size_at_every_address(dtype, other, cols, build):
    """Vectors have 4 to 64 bytes, and there are enough rows that an odd stride reaches every alignment."""
    x, dy, weight, bias = inputs(numpy, 9, cols, dtype, weight=other, bias=other, dy=other)
    x, dy, y = (in_wider_rows(array, 2 - cols % 2) for array in (x, dy, numpy.empty_like(dy)))
    for matrix in (x, dy, y):
        matrix.base[:, cols:] = numpy.nan
    check(Machine(build), "layer_norm", x, dy, misplaced(weight, 1), misplaced(bias, 3), y=y)
    assert numpy.isnan(y.base[:, cols:].astype("float32")).all(), "written beside a row of y"


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
    for arrays in itertools.chain(*(zip(*launches, strict=True) for launches in results)):
        assert len({array.tobytes() for array in arrays}) == 1
