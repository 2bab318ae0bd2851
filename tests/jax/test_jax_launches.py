"""The launches of a program for CUDA, run on the stand-in as XLA runs them: each call writes buffers of its own."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from arrays import inputs
from cpu_device import Machine, memory, missing
from cpu_functions import MANY_SMS, MANY_WITHOUT_CLUSTERS, SMALL, plan_of_many, unwritten
from cpu_shapes import Shape
from functions import OPS, bias_of
from problems import problem
from reference import EPS, check_backward, check_forward

pytest.importorskip("jax")

import cunorm
from cunorm.call.numpy import numpy_dtype
from cunorm.expression import parse
from cunorm.fusion import Fused, composed
from cunorm.jax.xla import call as xla_call
from cunorm.operation import affine
from cunorm.plan.plain_problems import float8_problem
from cunorm.plan.plan import plan
from cunorm.plan.problem import backward_problem, forward_problem
from cunorm.plan.steps import WORKSPACE, Plan

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

GRADIENTS = ("dx", "dweight", "dbias")


SHAPES = (
    Shape(3, 1000, "bfloat16", SMALL, "one group, whose sums are the gradients"),
    Shape(40, 768, "float16", MANY_SMS, "partial rows"),
    Shape(3, 16393, "bfloat16", MANY_SMS, "partial rows of clusters"),
    Shape(3, 8201, "float64", MANY_WITHOUT_CLUSTERS, "streamed, gradients of one group"),
    Shape(33, 8201, "float64", MANY_WITHOUT_CLUSTERS, "streamed, partial rows"),
)
WANTED = (("x", "weight", "bias"), ("x",), ("weight",), ("bias",), ("x", "bias"))


def run(
    solution: Plan,
    op: str,
    given: dict[str, numpy.ndarray],
    wanted: dict[str, numpy.ndarray],
    numbers: dict[str, float] | None = None,
) -> None:
    """Run all launches and fill `wanted`. A buffer holds nothing before the call that writes it."""
    buffers: dict[str, Any] = dict(given)
    empty = wanted | {WORKSPACE: numpy.empty(solution.workspace, "uint8")}
    for call in xla_call.launches(solution, {"eps": EPS[op]} | (numbers or {}), tuple(wanted)):
        results = {name: unwritten(empty[name].shape, empty[name].dtype) for name in call.writes}
        with memory({name: buffers[name] for name in call.reads} | results) as pointers:
            write, launch = Machine().prepare(call.step, call.baked)
            write(*pointers.values())
            read = {name: buffers[name].tobytes() for name in call.reads}
            launch(0)
        assert {name: buffers[name].tobytes() for name in call.reads} == read, "what a call reads is the program's"
        buffers |= results
    for name, result in wanted.items():
        result[...] = buffers[name]


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.reason)
def test_forward(op, shape):
    rows, cols, dtype, device, *_ = shape
    x, _, weight, bias = inputs(numpy, rows, cols, dtype)
    bias = bias_of(op, bias)
    solution = plan(problem("forward", rows, cols, dtype, op), device)
    statistics = numpy.empty(rows, solution.problem.compute)
    results = {"y": numpy.empty_like(x), "mean": statistics, "rstd": statistics.copy()}
    if op == "rms_norm":
        del results["mean"]
    run(solution, op, {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias}), results)
    check_forward(op, tuple(results.get(name) for name in ("y", "mean", "rstd")), x, weight, bias)


@pytest.mark.parametrize("wanted", WANTED, ids=" and ".join)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.reason)
def test_backward(shape, wanted):
    rows, cols, dtype, device, *_ = shape
    x, dy, weight, _ = inputs(numpy, rows, cols, dtype)
    solution = plan(problem("backward", rows, cols, dtype, wanted=wanted), device)
    wide = x.astype(numpy.longdouble)
    mean, variance = wide.mean(1), wide.var(1)
    statistics = numpy_dtype("test", solution.problem.compute)
    rstd = (1 / numpy.sqrt(variance + EPS["layer_norm"])).astype(statistics)
    given = {"dy": dy, "x": x, "mean": mean.astype(statistics), "rstd": rstd, "weight": weight}
    results = {f"d{name}": numpy.empty_like(x if name == "x" else weight) for name in wanted}
    run(solution, "layer_norm", given, results)
    check_backward("layer_norm", tuple(results.get(name) for name in GRADIENTS), dy, x, weight)


@pytest.mark.parametrize("granularity", ["row", 128, "tensor"])
def test_y_in_8_bits(granularity):
    """The kernel writes the bytes alone; the pointer of y is null."""
    rows, cols = 9, 1000
    x, _, weight, bias = inputs(numpy, rows, cols, "bfloat16")
    dtypes = ("bfloat16",) * 3
    task = float8_problem("layer_norm", rows, cols, *dtypes, y8="float8_e4m3fn", granularity=granularity)
    scales = numpy.full(task.by_name["y8_scale"].size(rows, cols), 0.1, "float32")
    given = {"x": x, "weight": weight, "bias": bias}
    results: dict[str, Any] = {"y8": numpy.empty(x.shape, numpy_dtype("test", "float8_e4m3fn"))}
    (given if granularity == "tensor" else results)["y8_scale"] = scales
    run(plan(task, SMALL), "layer_norm", given, results)
    y = cunorm.layer_norm(x, None, weight, bias, dtype="float32").astype("float32")
    width = {"row": cols, 128: 128, "tensor": rows * cols}[granularity]
    wide = scales.reshape(-1, 1) if granularity != 128 else scales.reshape(rows, -1).repeat(width, 1)[:, :cols]
    numpy.testing.assert_allclose(results["y8"].astype("float32") * wide, y, rtol=0.07, atol=0.01)


@pytest.mark.parametrize(
    ("rows", "residual", "weight", "factor"), [(9, "residual", "weight", "factor"), (90, "x_dot", "workspace", "x_gap")]
)
def test_a_fused_operation(rows, residual, weight, factor):
    """A number stands in the text. Forward writes s beside y, and backward reads s and its gradient, but not x."""
    cols, names = 1000, (residual, weight, factor)
    before = parse(f"x + {factor} * {residual}", ("x", residual, factor))
    op = Fused(
        composed("rms_norm", before, parse(f"xhat * {weight}", ("xhat", weight)), ("y", "s")),
        None,
        None,
        "fused rms_norm",
    )
    x, *others, _ = inputs(numpy, rows, cols, "float32")
    operands = dict(zip((residual, weight), others, strict=True))
    dy, ds = others[0][::-1].copy(), x[::-1].copy()
    expected, saved = op.forward(x, **operands, **{factor: 0.75}, eps=EPS["rms_norm"])
    gradients = op.backward(saved, dy, ds, wanted=("x", weight))
    dtypes = dict.fromkeys(("x", "s", "y", *names), "float32")
    kinds = {residual: "full", factor: "scalar"}
    forward = plan(forward_problem(op.operation, rows, cols, dtypes, kinds=kinds), MANY_SMS)
    results = {"y": numpy.empty_like(x), "s": numpy.empty_like(x), "rstd": numpy.empty(rows, "float32")}
    run(forward, "rms_norm", {"x": x} | operands, results, {factor: 0.75})
    for name, result in zip(("y", "s"), expected, strict=True):
        numpy.testing.assert_allclose(results[name], result, rtol=1e-5, atol=1e-5)
    dtypes |= {"dy": "float32", "ds": "float32"}
    problem = backward_problem(op.operation, rows, cols, dtypes, ("x", weight), kinds=kinds)
    given = {"dy": dy, "ds": ds, "s": results["s"], "rstd": results["rstd"], weight: operands[weight]}
    actual_gradients = {"dx": numpy.empty_like(x), f"d{weight}": numpy.empty(cols, "float32")}
    run(plan_of_many(problem, MANY_SMS), "rms_norm", given, actual_gradients, {factor: 0.75})
    for name, gradient in gradients.items():
        numpy.testing.assert_allclose(actual_gradients[f"d{name}"], gradient, rtol=1e-4, atol=1e-4)


def test_a_launch_has_the_buffers_that_it_declares():
    """Here one launch writes partial sums, one writes dx, and one adds up the partial sums."""
    solution = plan(problem("backward", 33, 8201, "float64"), MANY_WITHOUT_CLUSTERS)
    launches = xla_call.launches(solution, {}, solution.problem.wanted)
    assert [(set(launch.reads), set(launch.writes)) for launch in launches] == [
        ({"dy", "x", "mean", "rstd"}, {WORKSPACE}),
        ({"dy", "x", "mean", "rstd", "weight"}, {"dx"}),
        ({WORKSPACE}, {"dweight", "dbias"}),
    ]


def test_gradients_of_two_dtypes():
    """Each dtype has a launch that adds up partial sums; those of the second dtype begin inside the workspace."""
    rows, cols = 40, 768
    x, dy, weight, _ = inputs(numpy, rows, cols, "float32")
    dtypes = dict.fromkeys(("x", "dy", "weight"), "float32") | {"dbias": "float64"}
    task = backward_problem(affine("rms_norm"), rows, cols, dtypes, ("weight", "bias"))
    rstd = (1 / numpy.sqrt(numpy.square(x, dtype="float64").mean(1) + EPS["rms_norm"])).astype("float32")
    results = {"dweight": numpy.empty_like(weight), "dbias": numpy.empty(cols)}
    run(plan(task, MANY_SMS), "rms_norm", {"dy": dy, "x": x, "rstd": rstd, "weight": weight}, results)
    check_backward("rms_norm", (None, results["dweight"], None), dy, x, weight)
    numpy.testing.assert_allclose(results["dbias"], dy.sum(0, dtype="float64"), atol=1e-5)
