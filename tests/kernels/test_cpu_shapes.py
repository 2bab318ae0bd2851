"""The kernels' text on the CPU, in every shape of a table that reaches every kernel."""

from __future__ import annotations

import itertools

import numpy
import pytest
from arrays import inputs
from cases import DTYPES
from cpu_device import BUILDS, ORDERS, Machine, missing
from cpu_functions import check, plan_of_many
from cpu_shapes import FOR_LAYER_NORM_ALONE, SHAPES_BY_NAME, holder, problems, turns, weight_waits
from functions import OPS

from cunorm.kernel.device import Device
from cunorm.kernel.source import FILES
from cunorm.plan.choose import tier_of
from cunorm.plan.plan import plan
from cunorm.plan.problem import Problem
from cunorm.plan.shapes import TABLES, ShapeChoices
from cunorm.plan.spec import FewRowsSpec, NormSpec

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


@pytest.mark.slow
def test_the_table_reaches_every_kind_of_kernel():
    """A change of the plan must not leave a kernel without tests."""
    solutions = [plan(*case) for direction in TABLES for case in problems(direction)]
    solutions += [plan_of_many(*case) for case in problems("backward")]
    steps = [step for solution in solutions for step in solution.steps]
    # test_float8.py and test_sandwich.py run these.
    elsewhere = {"forward_pairs", "forward_twice"}
    assert {step.spec.kernel for step in steps} == set(FILES) - elsewhere
    assert {step.spec.aligned for step in steps if isinstance(step.spec, NormSpec)} == {True, False}
    sums = [
        (solution, step.spec) for solution in solutions for step in solution.steps if step.spec.kernel == "sum_partials"
    ]
    # A thread takes several partial rows. They are added up in a warp, among warps (two kinds), or by one thread.
    assert any(solution.groups > spec.rows_per_cta > 1 for solution, spec in sums)
    assert {holder(spec) for solution, spec in sums if solution.groups > 1} == {
        "part of a warp",
        "warp",
        "warps",
        "CTA",
    }
    assert any(step.grid[1] > 1 for step in steps if step.spec.kernel == "column_gradients")


@pytest.mark.parametrize("direction", TABLES)
def test_the_table_reaches_every_tier(direction):
    table, mine = TABLES[direction], problems(direction)
    chosen = [tier_of(*case) for op in OPS for case in problems(direction, op)]
    assert {choice and choice[0] for choice in chosen} == {*table, None}
    specs = [choice[1] for choice in chosen if choice]
    # The last of two choices is for dropout in the backward pass, which test_dropout.py runs.
    rules = {tier: tier.rule.vectors for tier in table if isinstance(tier.rule, ShapeChoices)}
    choices = {
        (tier, count) for tier, counts in rules.items() for count in (counts[:1] if len(counts) == 2 else counts)
    }
    assert choices <= {(choice[0], choice[1].shape.vectors) for choice in chosen if choice}
    assert {spec.row_dtype for spec in specs} == set(DTYPES)
    assert {min(32, spec.shape.threads) for spec in specs} == {1, 2, 4, 8, 16, 32}
    assert {spec.aligned for spec in specs if spec.stages} == {True, False}
    if direction == "backward":
        assert {weight_waits(spec) for spec in specs} == {True, False}
    # With so many rows, a CTA and a cluster return to the first stage and to the first set of slots.
    first_steps = [(case[0].rows, plan_of_many(*case).steps[0]) for case in mine]
    again = {step.spec.shape.cluster for rows, step in first_steps if turns(rows, step) > max(2, step.spec.stages)}
    assert again >= ({1, 2} if rules else set())


def test_the_table_reaches_every_way_to_add_up_gradients():
    """A part of a warp, a warp, several, a CTA or a cluster holds a row, and there are one group of rows or more."""
    specs = [plan_of_many(*case).steps[0].spec for op in OPS for case in problems("backward", op)]
    ways = {(holder(spec), spec.final) for spec in specs if spec.kernel == "backward"}
    every = set(itertools.product(("part of a warp", "warp", "warps", "CTA", "cluster"), (True, False)))
    assert ways == every


def test_the_table_reaches_backward_kernels_for_few_rows():
    """Columns are added up by a part of a warp or by several, and anything from there to a cluster holds a row."""
    solutions = [plan(*case) for op in OPS for case in problems("backward", op)]
    specs = [step.spec for solution in solutions for step in solution.steps if isinstance(step.spec, FewRowsSpec)]
    assert {holder(spec.rows) for spec in specs} == {"part of a warp", "warp", "warps", "CTA", "cluster"}
    assert {spec.columns.shape.threads >= 32 for spec in specs} == {True, False}
    assert {spec.rows.aligned for spec in specs} == {True, False}


def test_the_table_reaches_forward_kernels_for_few_rows():
    solutions = [plan(*case) for case in problems("forward") if case[0].rows <= case[1].sms]
    specs = [step.spec for solution in solutions for step in solution.steps if step.spec.kernel != "forward_streamed"]
    kinds = {(spec.kernel, holder(spec)) for spec in specs if not spec.stages}
    with_more_threads = {("forward_spread", "CTA"), ("forward_spread", "cluster")}
    of_its_shape = {("forward", "part of a warp"), ("forward", "CTA"), ("forward", "cluster")}
    assert kinds == of_its_shape | with_more_threads


@pytest.mark.slow
def test_rms_norm_reaches_as_much_without_the_shapes_for_layer_norm_alone():
    """Kernels are as much alike as what holds their rows, and how: tier, vectors, stages, alignment, dtype."""
    reached = {
        name: set().union(*map(kinds_of, cases))
        for name, *cases in zip(SHAPES_BY_NAME, *(problems(direction, "rms_norm") for direction in TABLES), strict=True)
    }
    others = set().union(*(kinds for name, kinds in reached.items() if name not in FOR_LAYER_NORM_ALONE))
    assert set().union(*reached.values()) == others


def kinds_of(case: tuple[Problem, Device]) -> set[tuple]:
    tier = tier_of(*case)
    kinds = set()
    for step in (*plan(*case).steps, *plan_of_many(*case).steps):
        spec = getattr(step.spec, "rows", step.spec)
        kinds.add((step.spec.kernel, tier and (tier[0], tier[1].shape.vectors)))
        if isinstance(spec, NormSpec):
            choices = (("aligned", spec.aligned), ("stages", spec.stages), ("final", spec.final))
            kinds |= {(step.spec.kernel, holder(spec), choice) for choice in choices}
            kinds.add((step.spec.kernel, spec.row_dtype))
        else:
            kinds.add((step.spec.kernel, holder(spec)))
    return kinds


@pytest.mark.parametrize(
    ("name", "op"),
    [(name, op) for name in SHAPES_BY_NAME for op in OPS if op == "layer_norm" or name not in FOR_LAYER_NORM_ALONE],
)
def test_every_shape(name, op):
    check_shape(name, op, Machine())


def check_shape(name: str, op: str, machine: Machine) -> None:
    rows, cols, dtype, device, _, parameters = SHAPES_BY_NAME[name]
    x, dy, weight, bias = inputs(numpy, rows, cols, dtype, weight=parameters, bias=parameters)
    check(machine, op, x, dy, weight, bias, device=device)


# One shape of each kind is enough, because what a sanitizer can find does not depend on more.
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
