"""A row has the same bits alone or among many, at any address and stride, in y, mean, rstd and dx.

This holds for every kernel that may take the row. The stand-in runs some row lengths, and a GPU those of every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any, NamedTuple

import cpu_functions
import matrix
import numpy
import pytest
from arrays import in_wider_rows, inputs, misplaced, same_bits
from cases import DTYPES
from cpu_device import Machine, missing
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS
from functions import OPS, backward, forward
from problems import DEVICES, problem

from cunorm import fuse
from cunorm.call.numpy import numpy_dtype
from cunorm.kernel.device import KNOWN, Device
from cunorm.plan.choose import tier_of
from cunorm.plan.plan import plan
from cunorm.plan.problem import ITEMSIZE, Problem, backward_problem
from cunorm.plan.shapes import TABLES

ROWS = 3
BATCHES = (
    (1, True, 0),
    (3, False, 4),
    (1000, True, 4),
    (1000, False, 0),
    (100_000, True, 0),
)  # rows, aligned, sm_margin
MANY = 9  # rows on the stand-in: so many that a thread takes several, one after the other


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("direction", TABLES)
def test_who_owns_which_column_depends_on_the_row_alone(direction, name):
    """It does not depend on the number of rows, their addresses, the gradients, or the multiprocessors left free."""
    device = DEVICES[name]
    gradients: list[dict[str, Any]] = [{}]
    if direction == "backward":
        gradients = [{"wanted": ("x",)}, {"wanted": ("x", "weight")}]
    # The norms take turns, so that each meets every dtype and every weight.
    lengths_of = {dtype: matrix.lengths_of_tiers(direction, dtype, device).values() for dtype in DTYPES}
    for op, (dtype, weight) in zip(cycle(OPS), product(DTYPES, ("float16", "float64", None))):
        for cols in {cols for lengths_of_tier in lengths_of[dtype] for cols in lengths_of_tier}:
            chosen = set()
            single = [problem(direction, 1, cols, dtype, op=op, weight=weight, **wanted) for wanted in gradients]
            for (rows, aligned, margin), row in product(BATCHES, single):
                choice = tier_of(replace(row, rows=rows, aligned=aligned, sm_margin=margin), device)
                chosen.add(choice and (choice[0], choice[1].shape.order))
            assert len(chosen) == 1, (op, dtype, weight, cols, chosen)


def orders(problems: Iterable[Problem], device: Device) -> set:
    """Return the orders in which the plans of these problems add up a row."""
    specs = (getattr(step.spec, "rows", step.spec) for asked in problems for step in plan(asked, device).steps)
    return {
        (spec.kernel.replace("_spread", ""), spec.shape.order)
        for spec in specs
        if spec.kernel not in ("sum_partials", "column_gradients")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
def test_beside_a_dy_of_another_dtype_too(name):
    """The order stays in the backward pass, though a wide dy leaves less shared memory and fewer registers."""
    device = DEVICES[name]
    rows_and_addresses = ((1, True), (3, False), (100_000, True), (100_000, False))
    for op, (dy, x) in zip(cycle(OPS), product(DTYPES, ("bfloat16", "float32", "float64"))):
        vector_cols = 16 // ITEMSIZE[x]
        for vectors in range(3072, 32769, 1664):
            gradients = (("x",), ("x", "weight"), ("x", "weight", "bias"))[: 2 if op == "rms_norm" else 3]
            orders_of_sums = orders(
                (
                    problem("backward", rows, vectors * vector_cols, x, op=op, y=dy, wanted=wanted, aligned=aligned)
                    for (rows, aligned), wanted in product(rows_and_addresses, gradients)
                ),
                device,
            )
            assert len(orders_of_sums) == 1, (op, x, dy, vectors * vector_cols, orders_of_sums)


@pytest.mark.parametrize("cols", [10007, 16384, 40960, 81920])
def test_few_rows_of_a_fused_operation_too(cols):
    """The order stays though the threads that add up columns read z, which those that write dx do not read."""
    operation = fuse("layer_norm", epilogue=lambda xhat, z, weight, shift: xhat * weight + z * shift).operation
    kinds = {"z": "full", "weight": "column", "shift": "column"}
    dtypes = dict.fromkeys(("x", "dy", *kinds), "bfloat16")
    for device in DEVICES.values():
        problems = (
            backward_problem(operation, rows, cols, dtypes, ("x", "weight", "shift"), kinds=kinds)
            for rows in (3, 300, 100_000)
        )
        assert len(orders(problems, device)) == 1, device


class Dtypes(NamedTuple):
    """The dtype of x, and those of the other arrays, where None means that of x."""

    x: str
    dy: str | None = None
    weight: str | None = None
    bias: str | None = None
    y: str | None = None


def variants(xp: Any, rows: int, cols: int, dtypes: Dtypes, many: int) -> Iterator[tuple[str, slice, tuple]]:
    """Yield (name, which rows of the first variant these are, (x, dy, weight, bias, y)); `rows` divides `many`."""
    made = inputs(xp, rows, cols, dtypes.x, dy=dtypes.dy, weight=dtypes.weight, bias=dtypes.bias)
    x, dy, weight, bias = (misplaced(array, 0) for array in made)
    y = xp.empty(x.shape, numpy_dtype("test", dtypes.y or dtypes.x))
    vector_cols = 16 // x.dtype.itemsize
    for row in range(rows):
        # Alone a row begins at an aligned address. Among others it does so only if cols are whole vectors.
        alone = (misplaced(array[row : row + 1], 0) for array in (x, dy))
        yield f"row {row} alone", slice(row, row + 1), (*alone, weight, bias, misplaced(y[:1], 0))
    yield "beside each other", slice(rows), (x, dy, weight, bias, y)
    for padding in (1, -cols % vector_cols + vector_cols):
        wide = [in_wider_rows(array, padding) for array in (x, dy, y)]
        yield f"{padding} apart", slice(rows), (*wide[:2], weight, bias, wide[2])
    moved = [misplaced(array, 1) for array in (x, dy, weight, bias, y)]
    yield "at an odd address", slice(rows), tuple(moved)
    yield "beside an odd weight", slice(rows), (x, dy, moved[2], bias, y)
    repeated = [xp.concatenate([array] * (many // rows)) for array in (x, dy, y)]
    yield "many", slice(rows), (*repeated[:2], weight, bias, repeated[2])


def assert_same_bits(
    run_forward: Callable, run_backward: Callable, xp: Any, cols: int, dtypes: Dtypes, many: int
) -> None:
    """Assert that a row has the same bits in every variant.

    The passes are run_forward(x, weight, bias, y) -> (y, mean, rstd) and run_backward(dy, x, mean, rstd, weight) -> dx.
    """
    results_of: dict[str, tuple[slice, tuple]] = {}
    for name, which, (x, dy, weight, bias, y) in variants(xp, ROWS, cols, dtypes, many):
        y, mean, rstd = run_forward(x, weight, bias, y)
        results_of[name] = which, (y, mean, rstd, run_backward(dy, x, mean, rstd, weight))
    _, expected = results_of["beside each other"]
    for name, (which, results) in results_of.items():
        for result, first, what in zip(results, expected, ("y", "mean", "rstd", "dx"), strict=True):
            if first is not None:
                rows = first[which]
                assert len(result) % len(rows) == 0
                for start in range(0, len(result), len(rows)):
                    assert same_bits(result[start : start + len(rows)], rows), f"{cols} columns: {what}, {name}"


ON_THE_STAND_IN: tuple[tuple[str, int, str | Dtypes, Device], ...] = (
    ("layer_norm", 33, "float32", SMALL),  # a part of a warp
    ("rms_norm", 767, "bfloat16", MANY_SMS),  # every row can have an SM
    ("layer_norm", 1001, "bfloat16", SMALL),  # a warp
    ("layer_norm", 4095, "float32", SMALL),  # a CTA
    ("rms_norm", 8191, "bfloat16", SMALL),
    ("layer_norm", 12001, "float64", SMALL),  # a cluster
    ("layer_norm", 33333, "bfloat16", SMALL),
    ("layer_norm", 32768, "bfloat16", SMALL),  # many rows in clusters of 2, few in a CTA
    ("rms_norm", 70001, "float16", SMALL),
    ("layer_norm", 8201, "float64", WITHOUT_CLUSTERS),  # streamed
    ("rms_norm", 1003, Dtypes("float16", dy="float32", weight="float64", y="bfloat16"), SMALL),
    ("layer_norm", 4100, Dtypes("float32", dy="float16", weight="bfloat16", bias="float64", y="float64"), SMALL),
    # This dy is so wide that a tier has no room for the row at an odd address.
    ("layer_norm", 36864, Dtypes("bfloat16", dy="float64"), SMALL),
)


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.parametrize(("op", "cols", "dtype", "device"), ON_THE_STAND_IN)
def test_on_the_stand_in(op, cols, dtype, device):
    machine = Machine()

    def run_forward(x, weight, bias, y):
        return cpu_functions.forward(machine, op, x, weight, bias, y=y, device=device)

    def run_backward(dy, x, mean, rstd, weight):
        return cpu_functions.backward(machine, op, dy, x, mean, rstd, weight, device=device)[0]

    dtypes = dtype if isinstance(dtype, Dtypes) else Dtypes(dtype)
    assert_same_bits(run_forward, run_backward, numpy, cols, dtypes, MANY)


def lengths(dtype: str, op: str, device: Device) -> list[int]:
    """Return a length of every tier that is not whole vectors. In bfloat16 add its longest, and lengths once wrong.

    The other dtypes differ only in the width of a vector, so they are tested with one norm.
    """
    vector_cols = 16 // ITEMSIZE[dtype]
    whole = dtype == "bfloat16"
    chosen = {33333, 70001} if whole else set()
    for direction in TABLES:
        for taken in matrix.lengths_of_tiers(direction, dtype, device).values():
            chosen |= {*([taken[-1]] if whole else []), *[cols for cols in taken if cols % vector_cols][-1:]}
    return sorted(chosen) if whole or op == "layer_norm" else []


# Arrays of different dtypes are tested in some lengths of every tier. Those above 33024 columns were once wrong.
MIXTURES = (
    Dtypes("float16", dy="float32"),
    Dtypes("bfloat16", dy="float64", weight="float32", bias="float64", y="float32"),
    Dtypes("float32", dy="float64", weight="bfloat16", y="float16"),
    Dtypes("float32", dy="float16", weight="float64", bias="float16", y="bfloat16"),
    Dtypes("float64", dy="bfloat16", weight="float16", y="float32"),
)
MIXED_LENGTHS = (129, 1003, 5120, 16384, 20001, 36864, 54272, 58368, 69632, 120832, 145408, 227328)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [*map(Dtypes, DTYPES), *MIXTURES], ids=lambda dtypes: "-".join(filter(None, dtypes)))
@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu(op, dtypes):
    import cupy

    def run_forward(x, weight, bias, y):
        return forward(op, x, weight, bias, out=y)

    def run_backward(dy, x, mean, rstd, weight):
        return backward(op, dy, x, mean, rstd, weight)[0]

    for cols in MIXED_LENGTHS if dtypes in MIXTURES else lengths(dtypes.x, op, KNOWN[90]):
        many = ROWS * max(2, min(8000, 2**23 // (ROWS * cols)))
        assert_same_bits(run_forward, run_backward, cupy, cols, dtypes, many)
