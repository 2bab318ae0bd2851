"""The kernels' own source, run on the CPU: as accurate as on a GPU, and nothing found by sanitizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy
import pytest
from arrays import in_wider_rows, inputs, misplaced
from cases import DTYPES, OFFSETS
from cpu_device import BUILDS, Machine, missing
from cpu_functions import SMALL, WITHOUT_CLUSTERS, backward, check, forward
from functions import OPS
from problems import problem

from cunorm.device import Device
from cunorm.plan import plan

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


class Shape(NamedTuple):
    rows: int
    cols: int
    dtype: str
    device: Device
    reason: str


SHAPES = (
    Shape(3, 1, "float32", SMALL, "a row is its own mean"),
    Shape(8, 2, "float64", SMALL, "xhat is +-1, and dx cancels"),
    Shape(300, 7, "bfloat16", SMALL, "one lane a row, less than a pack; several turns of full CTAs"),
    Shape(8, 31, "float16", SMALL, "two lanes a row, in the backward pass four"),
    Shape(300, 33, "float32", SMALL, "odd: rows begin at every alignment"),
    Shape(3, 127, "bfloat16", SMALL, "eight lanes or sixteen"),
    Shape(8, 128, "float16", SMALL, "whole packs"),
    Shape(1, 129, "float64", SMALL, "a last pack of one column"),
    Shape(8, 500, "float16", SMALL, "sixteen lanes a row, or more"),
    Shape(8, 768, "float16", SMALL, "a warp a row, some lanes idle"),
    Shape(3, 1000, "bfloat16", SMALL, "whole packs that fill no warp"),
    Shape(8, 1024, "float32", SMALL, "a full shape"),
    Shape(8, 3840, "bfloat16", SMALL, "a CTA a row"),
    Shape(8, 4096, "float32", SMALL, "a full shape"),
    Shape(8, 8191, "float16", SMALL, "a CTA a row, odd; backward a cluster or nearly"),
    Shape(3, 8192, "bfloat16", SMALL, "a full shape"),
    Shape(8, 8192, "float64", SMALL, "cluster of 4 in the backward pass"),
    Shape(3, 16385, "bfloat16", SMALL, "the last pack of the row holds one column"),
    Shape(5, 16384, "float32", SMALL, "a cluster takes its third row in a set of slots used before"),
    Shape(5, 12001, "float64", SMALL, "cluster of 2 or more, odd"),
    Shape(3, 32768, "bfloat16", SMALL, "the longest row that one CTA holds, forward"),
    Shape(3, 65537, "float16", SMALL, "cluster of 8, odd"),
    Shape(3, 8201, "float64", WITHOUT_CLUSTERS, "streamed, odd"),
    Shape(3, 16392, "float32", WITHOUT_CLUSTERS, "streamed, whole packs"),
    Shape(1, 32777, "bfloat16", WITHOUT_CLUSTERS, "streamed, odd"),
)
SHAPES_BY_NAME = {f"{one.rows}x{one.cols}-{one.dtype}": one for one in SHAPES}


def steps(shape: Shape, op: str = "layer_norm"):
    tasks = (problem(direction, shape.rows, shape.cols, shape.dtype, op=op) for direction in ("forward", "backward"))
    return [(solution, step) for task in tasks for solution in (plan(task, shape.device),) for step in solution.steps]


def test_the_table_reaches_every_kind_of_kernel():
    """A change of the plan must not leave one without tests."""
    specs = [step.spec for shape in SHAPES for _, step in steps(shape)]
    kernels = {(spec.kernel, spec.x) for spec in specs}
    assert {name for name, _ in kernels} == {
        "forward",
        "forward_streamed",
        "backward",
        "backward_streamed",
        "weight_gradient_partials",
        "sum_partials",
    }
    for name in ("forward", "backward"):
        mine = [spec for spec in specs if spec.kernel == name]
        assert {spec.x for spec in mine} == set(DTYPES)
        assert {min(32, spec.shape.threads) for spec in mine} == {1, 2, 4, 8, 16, 32}
        assert {spec.shape.cluster for spec in mine} >= ({1, 2, 8} if name == "forward" else {1, 2, 4, 8})
        assert {spec.rows_per_cta > 1 for spec in mine} == {True, False}
    turns = {
        (step.spec.kernel, step.spec.shape.cluster > 1): 1
        for shape in SHAPES
        for _, step in steps(shape)
        if shape.rows * step.spec.shape.cluster > 2 * step.grid[0] * step.spec.rows_per_cta
    }
    assert turns.keys() >= {("forward", True), ("backward", False), ("backward", True)}, "no CTA takes three rows"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES_BY_NAME)
def test_every_shape(name, op):
    rows, cols, dtype, device, _ = SHAPES_BY_NAME[name]
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    check(Machine(), op, x, dy, weight, bias, device=device)


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
@pytest.mark.parametrize(("cols", "device"), [(200, SMALL), (4104, WITHOUT_CLUSTERS)], ids=["held", "streamed"])
def test_options(cols, device, name):
    options = dict(OPTIONS[name])
    without = options.pop("without", ())
    x, dy, weight, bias = inputs(numpy, 5, cols, "float64", weight="float32")
    weight, bias = (None if key in without else array for key, array in (("weight", weight), ("bias", bias)))
    check(Machine(), "layer_norm", x, dy, weight, bias, device=device, **options)


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


# One of each kind: what a sanitizer build can find does not depend on more.
SANITIZED = (
    "300x7-bfloat16",
    "300x33-float32",
    "8x128-float16",
    "8x768-float16",
    "8x4096-float32",
    "8x8191-float16",
    "5x12001-float64",
    "3x8201-float64",
    "5x16384-float32",
)


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("build", [build for build in BUILDS if build != "results"])
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing(name, build, reverse):
    rows, cols, dtype, device, _ = SHAPES_BY_NAME[name]
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype)
    check(Machine(build, reverse), "layer_norm", x, dy, weight, bias, device=device)


@pytest.mark.parametrize("name", layouts(1, 1, "float32"))
def test_no_layout_leads_beyond_an_array(name):
    x, dy, weight, bias, y = layouts(3, 136, "float16")[name]
    check(Machine("memory"), "layer_norm", x, dy, weight, bias, y=y)


def test_the_order_of_threads_does_not_show():
    x, dy, weight, bias = inputs(numpy, 8, 8191, "float16")
    results = []
    for machine in (Machine(), Machine(reverse=True)):
        y, mean, rstd = forward(machine, "layer_norm", x, weight, bias)
        results.append((y, mean, rstd, *backward(machine, "layer_norm", dy, x, mean, rstd, weight)))
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()
