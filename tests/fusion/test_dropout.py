"""Dropout in the adding functions: a seed drops the same elements everywhere, also in the backward pass."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import matrix
import numpy
import pytest
from arrays import on_host, same_bits
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS, as_few_and_as_many
from fusion_cases import Case, close, make
from nvrtc import needs_nvrtc
from reference import narrow, widen

import cunorm
import cunorm.expression
from cunorm.commands.compilation import fault
from cunorm.expression.philox import COLUMNS, draw, uniform
from cunorm.kernel.compile import compile_for
from cunorm.kernel.device import KNOWN
from cunorm.operation import added
from cunorm.plan.plan import plan
from cunorm.plan.problem import backward_problem, compute_dtype, forward_problem

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())
SEEDS = (numpy.array([7]), numpy.array(-(2**40) + 3), numpy.array([9, 2**31 + 1], "uint32"))
P = 0.25


# These are known answers of Random123, from its file kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_words_are_those_of_philox(counter, key, words):
    def product(word, number):
        return divmod(word * number, 2**32)

    assert draw(counter, key, product, lambda word, number: (word + number) % 2**32) == words


def test_numbers_follow_from_seed_row_and_column():
    """The shape does not matter. The numbers are uniform, without a pattern along rows or columns."""
    seed = numpy.int64(3)
    whole = uniform(seed, (500, 400), numpy)
    assert (whole[:20, :33] == uniform(seed, (2, 10, 33), numpy).reshape(20, 33)).all()
    assert 0 <= whole.min() < 1e-4
    assert 1 - 1e-4 < whole.max() < 1
    other = uniform(numpy.int64(4), (500, 400), numpy)
    for numbers in (whole, other):
        for axes, count in (((), 1), ((0,), 500), ((1,), 400), ((0, 1), 200000)):
            allowed = 5 * (1 / 12 / count) ** 0.5 if axes else 1
            assert abs(numbers.mean(axes) - 0.5 if axes else numbers - 0.5).max() < allowed
        neighbours = [correlation(numbers[:, :-step], numbers[:, step:]) for step in range(1, COLUMNS + 1)]
        neighbours.append(correlation(numbers[:-1], numbers[1:]))
        assert max(map(abs, neighbours)) < 0.015
    assert abs(correlation(whole, other)) < 0.015


def correlation(a: numpy.ndarray, b: numpy.ndarray) -> float:
    return numpy.corrcoef(a.ravel(), b.ravel())[0, 1]


class Run(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    device: Any = SMALL
    seed: numpy.ndarray = SEEDS[0]


RUNS = {
    "rows share a warp": Run((13, 33), "float16"),
    "a seed without axes": Run((13, 33), "float16", seed=SEEDS[1]),
    "a seed of two words": Run((13, 33), "float16", seed=SEEDS[2]),
    "a warp": Run((3, 1000), "bfloat16", MANY_SMS),
    "rows at multiples of 4 bytes": Run((5, 1002), "bfloat16"),
    "vectors of four": Run((5, 2004), "float32"),
    "odd rows": Run((2, 3, 1001), "float32"),
    "float64": Run((2, 3, 129), "float64"),
    "a row spread over threads": Run((2, 1600), "bfloat16", MANY_SMS),
    "a cluster": Run((2, 17000), "float32"),
    "a cluster, backward of four vectors for three": Run((2, 20001), "bfloat16"),
    "a cluster of odd rows": Run((2, 17001), "float32"),
    "streamed": Run((3, 17000), "float32", WITHOUT_CLUSTERS),
}


def check_drops(function: str, x: Any, seed: Any, expected: numpy.ndarray) -> None:
    """Check which elements both passes drop: x and ds are ones, so s and dx are 0 exactly there."""
    zeros = x * 0
    op = getattr(cunorm, function)
    (_, s), saved = op.forward(x, zeros, dropout_p=P, seed=seed)
    gradients = op.backward(saved, None, x)
    assert list(gradients) == ["x", "residual"], "the seed and the numbers of dropout have no gradient"
    assert same_bits(on_host(gradients["residual"]), on_host(x)), "dy is None, so dresidual is ds"
    for name, array in (("s", s), ("dx", gradients["x"])):
        wrong = ((on_host(array) == 0) != expected).sum()
        assert not wrong, f"{name}: {wrong} elements are dropped that are not, or the other way round"


def check_run(run: Run, function: str) -> None:
    """Check what a run drops on the stand-in, which the caller has started."""
    x = narrow(numpy.ones(run.shape), run.dtype)
    expected = uniform(run.seed.reshape(-1).view("int64")[0], run.shape, numpy) < P
    assert 0.1 < expected.mean() < 0.4
    check_drops(function, cpu_cupy.asarray(x), cpu_cupy.asarray(run.seed), expected)


@needs_machine
def test_the_backward_pass_of_four_packs_for_three_has_four(monkeypatch):
    runs = cpu_cupy.play(monkeypatch, SMALL, as_many=True)
    check_run(RUNS["a cluster, backward of four vectors for three"], "add_layer_norm")
    backward = next(step.spec for step in runs.plans[-1].steps if step.spec.kernel == "backward")
    assert (backward.cluster, backward.shape.vectors) == (2, 4)


@needs_machine
@as_few_and_as_many
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_kernels_drop_what_numpy_does(monkeypatch, run, as_many):
    cpu_cupy.play(monkeypatch, run.device, as_many=as_many)
    for function in ("add_layer_norm", "add_rms_norm"):
        check_run(run, function)


def test_every_family_drops_the_same(xp):
    seed = SEEDS[0]
    expected = uniform(seed[0], (4, 70), numpy) < P
    for function in ("add_layer_norm", "add_rms_norm"):
        check_drops(function, xp.ones((4, 70), "float32"), xp.asarray(seed), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("cols", [7, 129, 1000, 1002, 4096, 8192, 16384, 20001, 65536, 300000])
def test_every_tier_on_a_gpu(cols, dtype):
    import cupy

    shape = (9, cols)
    expected = uniform(SEEDS[0][0], shape, numpy) < P
    x = cupy.asarray(narrow(numpy.ones(shape), dtype))
    check_drops("add_rms_norm", x, cupy.asarray(SEEDS[0]), expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_results_and_gradients_are_those_of_a_mask(xp, norm, dtype):
    """The mask multiplies x by 0 or 2, so the scale is exact."""
    mask = 2 * (uniform(SEEDS[0][0], (5, 129), numpy) >= 0.5)
    masked = Case(
        cunorm.fuse(
            norm,
            prologue=lambda x, residual, mask: residual + x * mask,
            epilogue=lambda xhat, weight: xhat * weight,
            returns=("y", "s"),
        ),
        ("residual", "mask"),
        ("weight",),
    )
    made = make(masked, (5, 129), dtype)
    operands = made.operands | {"mask": narrow(mask.astype(float), dtype)}
    x, *gradients = (xp.asarray(array) for array in (made.x, *made.gradients))
    given = {name: xp.asarray(operand) for name, operand in operands.items()}
    named = {name: operand for name, operand in given.items() if name != "mask"}
    results, saved = masked.op.forward(x, **given)
    expected = masked.op.backward(saved, *gradients, wanted=["x", "residual", "weight"])
    options = {"dropout_p": 0.5, "seed": xp.asarray(SEEDS[0])}
    of_name = getattr(cunorm, f"add_{norm}")
    (y, s), of_call = of_name.forward(x, **named, **options)
    for result, expected_result in zip((y, s), results, strict=True):
        assert same_bits(on_host(result), on_host(expected_result))
    gradients_of_name = of_name.backward(of_call, *gradients)
    assert gradients_of_name.keys() == {"x", "residual", "weight"}
    for name, gradient in gradients_of_name.items():
        close(name, gradient, widen(on_host(expected[name])).astype(float), "float32" if dtype != "float64" else dtype)
    op = cunorm.fuse(
        norm,
        prologue=lambda x, residual, seed: residual + cunorm.expression.where(seed < 0.5, 0, x * 2),
        epilogue=lambda xhat, weight: xhat * weight,
        returns=("y", "s"),
    )
    again, saved = op.forward(x, **named, seed=options["seed"])
    for result, expected_result in zip(again, results, strict=True):
        assert same_bits(on_host(result), on_host(expected_result))
    of_op = op.backward(saved, *gradients, wanted=["x", "weight"])
    assert same_bits(on_host(of_op["x"]), on_host(gradients_of_name["x"]))


def test_nothing_is_dropped_where_dropout_is_off(xp):
    x = xp.asarray(numpy.linspace(-1, 1, 12).reshape(3, 4))
    expected = cunorm.add_rms_norm(x, x)
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0, "seed": xp.asarray(SEEDS[0])}):
        for result, expected_result in zip(cunorm.add_rms_norm(x, x, **options), expected, strict=True):
            assert same_bits(on_host(result), on_host(expected_result))
    (y, s), saved = cunorm.add_rms_norm.forward(x, x)
    gradients = cunorm.add_rms_norm.backward(saved, y, s)
    assert gradients["x"] is gradients["residual"], "equal gradients are one array"


def test_the_mean_stays_and_the_largest_probability_keeps_something(xp):
    x = xp.ones((200, 1000), "float32")
    for p in (0.1, 0.5, 0.999, 1 - 1e-9):
        _, s = cunorm.add_rms_norm(x, x * 0, dropout_p=p, seed=xp.asarray(SEEDS[0]))
        deviation = (p / (1 - p) / 200000) ** 0.5 if p < 1 - 2**-16 else 1.0
        assert abs(float(s.mean()) - 1) < 5 * deviation
        assert on_host(s).max() <= 2**16


REFUSED = [
    (ValueError, "dropout_p must be at least 0 and less than 1; got 1", {"dropout_p": 1.0, "seed": SEEDS[0]}),
    (ValueError, "dropout_p must be at least 0 and less than 1; got -0.5", {"dropout_p": -0.5, "seed": SEEDS[0]}),
    (ValueError, "got nan", {"dropout_p": float("nan"), "seed": SEEDS[0]}),
    (TypeError, "dropout_p must be a real number; got str", {"dropout_p": "0.1"}),
    (TypeError, "dropout_p must be a real number; got bool", {"dropout_p": True}),
    (ValueError, "needs a seed", {"dropout_p": 0.1}),
    (TypeError, "seed must be an array of one int64 or two uint32", {"dropout_p": 0.1, "seed": 7}),
    (TypeError, "got dtype float32", {"dropout_p": 0.1, "seed": numpy.ones(1, "float32")}),
    (ValueError, "got int64 of shape (2,)", {"dropout_p": 0.1, "seed": numpy.arange(2)}),
]


@pytest.mark.parametrize(("error", "message", "options"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_refusals(xp, error, message, options):
    x = xp.ones((3, 4), "float32")
    given = {name: xp.asarray(value) if isinstance(value, numpy.ndarray) else value for name, value in options.items()}
    calls = (
        lambda: cunorm.add_layer_norm(x, x, **given),
        lambda: cunorm.add_rms_norm.forward(x, x, **given),
        lambda: cunorm.add_rms_norm.fp8(x, x, **given),
    )
    for call in calls:
        with pytest.raises(error, match=re.escape(message)):
            call()


@pytest.mark.slow
@needs_nvrtc
def test_no_kernel_spills():
    """test_compile_matrix.py compiles kernels of these problems for sm_80 and sm_90, and they are a third of all."""
    operations = {added(norm, dropout=True) for norm in ("layer_norm", "rms_norm")}
    problems = [problem for problem in matrix.named_fusions() if problem.operation in operations]
    for spec in matrix.kernels_of(problems, KNOWN[100])[::3]:
        assert not fault(spec, compile_for(spec, 100))


ODD = [("float64", 1000), ("float16", 20001), ("bfloat16", 80001), ("bfloat16", 1002), ("float32", 1001)]
ODD += [("bfloat16", 300000)]


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("dtype", "cols"), ODD)
def test_no_kernel_of_odd_rows_spills(dtype, cols):
    """The table has odd row lengths, vectors of fewer than eight columns, and streamed rows."""
    operation, compute = added("layer_norm", dropout=True), compute_dtype(dtype)
    names = ("x", "y", "s", "dy", "ds", "residual", "weight", "bias")
    dtypes = dict.fromkeys(names, dtype) | {"seed": "int64", "dropped": compute, "factor": compute}
    kinds = {"residual": "full", "dropped": "scalar", "factor": "scalar"}
    for problem in (
        forward_problem(operation, 300, cols, dtypes, kinds=kinds),
        backward_problem(operation, 300, cols, dtypes, ("x", "residual", "weight", "bias"), kinds=kinds),
    ):
        for step in plan(problem, KNOWN[90]).steps:
            assert not fault(step.spec, compile_for(step.spec, 90))
