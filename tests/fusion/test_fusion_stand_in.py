"""Fused operations on the stand-in for a GPU: every tier is right, touches only its own memory, and has equal bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import cpu_cupy
import cpu_device
import numpy
import pytest
from arrays import same_bits
from cpu_functions import MANY_SMS, SMALL, WITHOUT_CLUSTERS, as_few_and_as_many
from fusion_cases import CASES, EPS, check, make

import cunorm
from cunorm.expression import sigmoid, silu

needs_machine = pytest.mark.skipif(bool(cpu_device.missing()), reason=cpu_device.missing())


class Run(NamedTuple):
    """A case on the stand-in for a GPU, and why."""

    case: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    device: Any = SMALL
    tiers: tuple[str, str] = ("", "")  # forward and backward
    dtypes: dict[str, str] | None = None
    wanted: tuple[str, ...] = ()


RUNS = (
    Run("add_layer_norm", (13, 33), "float16", "several rows in a warp, and rows that do not fill the last", SMALL),
    Run("add_layer_norm", (3, 1000), "bfloat16", "whole vectors that fill no warp", MANY_SMS, ("warp", "cta")),
    Run("add_rms_norm", (5, 1001), "float32", "no row but the first is aligned"),
    Run("add_rms_norm", (12, 3088), "bfloat16", "few rows: two threads for the four vectors of each", MANY_SMS),
    Run("add_rms_norm", (2, 3, 129), "float64", "rows along two axes"),
    Run(
        "add_layer_norm",
        (4, 1000),
        "bfloat16",
        "every array in another dtype",
        dtypes={"residual": "float32", "weight": "float32", "bias": "float16", "dy": "float32", "ds": "float16"},
    ),
    Run("add_layer_norm", (2, 17000), "float32", "a cluster for a row", SMALL, ("cluster", "cluster")),
    Run("add_rms_norm", (2, 17000), "float32", "streamed", WITHOUT_CLUSTERS, ("streamed", "streamed")),
    Run("gate", (13, 33), "float16", "a column and numbers on both sides; rows share a warp"),
    Run("gate", (5, 1001), "bfloat16", "of 16 bits, s made again"),
    Run("gate", (9, 1000), "float32", "more partial rows than one", MANY_SMS),
    Run("gate", (2, 17000), "float32", "a column of the prologue in a cluster", SMALL, ("cluster", "cluster")),
    Run(
        "gate",
        (2, 17000),
        "float32",
        "streamed, but for what the prologue takes for all rows",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "z", "weight", "sharp"),
    ),
    Run("modulated", (4, 1000), "float64", "no prologue"),
    Run("modulated", (40, 7), "float32", "less than a warp's row"),
    Run("both", (13, 33), "float32", "an operand on both sides; rows share a warp"),
    Run("both", (3, 1000), "float16", "the same in 16 bits", MANY_SMS),
    Run("both", (2, 17000), "float32", "the same in a cluster", SMALL, ("cluster", "cluster")),
    Run("poles", (13, 33), "float32", "poles beside rows that share a warp"),
    Run("poles", (3, 1001), "float16", "poles beside a row of a CTA"),
    Run("poles", (2, 17001), "float32", "poles beside a row of a cluster", SMALL, ("cluster", "cluster")),
    Run(
        "poles",
        (2, 17001),
        "float32",
        "poles beside a streamed row",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "z", "weight"),
    ),
    Run("stream", (5, 1001), "bfloat16", "s wider than x and y", dtypes={"residual": "float32", "ds": "float32"}),
    Run("stream", (3, 1000), "float64", "s and y narrower than x"),
    Run("stream", (2, 17000), "bfloat16", "the same in a cluster", tiers=("cluster", "cluster")),
    Run("norm alone", (3, 129), "bfloat16", "nothing before, nothing after"),
    Run("samples", (3, 13, 33), "float16", "samples of rows that share a warp, not whole warps of them"),
    Run("samples", (3, 7, 1000), "bfloat16", "more partial rows than one of each sample", MANY_SMS, ("warp", "cta")),
    Run("samples", (2, 3, 17000), "float32", "samples of a cluster's rows", tiers=("cluster", "cluster")),
    Run("samples", (1, 3, 17000), "float64", "more sums than one SM may have partial rows"),
    Run(
        "samples",
        (2, 3, 17000),
        "float32",
        "samples of streamed rows",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "scale", "shift", "weight"),
    ),
    Run(
        "samples",
        (3, 5, 129),
        "bfloat16",
        "samples, every array in another dtype",
        dtypes={"gate": "float32", "scale": "float16", "shift": "float32", "weight": "float32", "dy": "float32"},
    ),
    Run("samples, s made again", (3, 5, 129), "float16", "a gate for each sample, read again in the backward pass"),
    Run("samples, s made again", (40, 5, 17), "float32", "more samples than CTAs", SMALL),
    Run("modulate", (2, 40, 256), "float32", "gradients of samples alone, in several CTAs", MANY_SMS),
    Run("modulate", (7, 2, 256), "float32", "one CTA for a sample writes its gradients itself"),
    Run("modulate", (2, 40, 17000), "float32", "partial rows of samples of streamed rows", WITHOUT_CLUSTERS),
    Run("modulate", (2, 2, 5000), "bfloat16", "few rows: a thread for each vector", MANY_SMS),
    Run("heads", (5, 3, 128), "bfloat16", "a weight for each head"),
    Run("heads", (3, 5, 3, 33), "float32", "the same under two axes", MANY_SMS),
    Run("heads", (4, 3, 17000), "float32", "the same streamed", WITHOUT_CLUSTERS, ("streamed", "streamed")),
    Run("numbers of rows", (13, 33), "float16", "rows share a warp"),
    Run("numbers of rows", (3, 5, 1000), "bfloat16", "numbers for samples lie 0 apart, with a gap", MANY_SMS),
    Run("numbers of rows", (2, 3, 1001), "float32", "beside rows at odd addresses"),
    Run("numbers of rows", (2, 2, 17000), "float32", "in clusters", tiers=("cluster", "cluster")),
    Run(
        "numbers of rows",
        (2, 2, 17000),
        "float32",
        "streamed",
        WITHOUT_CLUSTERS,
        ("streamed", "streamed"),
        wanted=("x", "residual", "factor", "share", "weight", "shift"),
    ),
    Run("numbers of rows", (3, 129), "float64", "in other dtypes", dtypes={"factor": "float32", "shift": "float16"}),
    Run("numbers of rows, s made again", (40, 7), "float16", "less than a warp's row"),
    Run("numbers of rows, s made again", (3, 1000), "float32", "before and after", MANY_SMS),
    Run("numbers of rows, s made again", (2, 17001), "float16", "at odd addresses in a cluster"),
    Run("numbers of rows of samples", (3, 13, 33), "float16", "beside vectors of samples"),
    Run("numbers of rows of samples", (2, 40, 256), "float32", "the same in several CTAs", MANY_SMS),
    Run("numbers of rows after", (2, 2000), "bfloat16", "few rows: a thread for each vector", MANY_SMS),
    Run("numbers of rows after", (40, 4096), "bfloat16", "a row of a CTA", SMALL),
    Run("names of the library", (400, 40), "float32", "partial rows beside an operand called workspace", MANY_SMS),
    Run("heads and samples", (2, 3, 2, 33), "float16", "the second sort of groups is expanded, and what is of none"),
)


@needs_machine
@as_few_and_as_many
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case}, {run.reason}")
def test_kernels_on_the_stand_in_compute_the_same(monkeypatch, run, as_many):
    runs = cpu_cupy.play(monkeypatch, run.device, as_many=as_many)
    case = CASES[run.case]
    check(case, make(case, run.shape, run.dtype, run.dtypes), cpu_cupy.asarray, run.wanted)
    forward, again, backward = (solution.tier for solution in runs.plans)
    assert forward == again
    assert all(actual == tier for actual, tier in zip((forward, backward), run.tiers, strict=True) if tier)


@needs_machine
@pytest.mark.parametrize(("dtype", "cols"), [("float32", 17001), ("float16", 34001)])
def test_aligned_columns_beside_rows_at_odd_addresses_in_a_ring(monkeypatch, dtype, cols):
    """The columns start at an odd multiple of 16 bytes. A kernel reads them by whole vectors, unlike the rows."""
    runs = cpu_cupy.play(monkeypatch)

    def placed(array: numpy.ndarray) -> cpu_cupy.Array:
        return cpu_cupy.asarray(array, 16 // array.itemsize if array.ndim == 1 else 0)

    case = CASES["gate"]
    made = make(case, (2, cols), dtype)  # the columns have few bits, so that s is not rounded twice
    columns = {name: made.operands[name].astype("float32") for name in case.columns}
    check(case, made._replace(operands=made.operands | columns), placed)
    spec = runs.plans[0].steps[0].spec
    assert (spec.cluster > 1, spec.stages > 0, spec.aligned, spec.columns_aligned) == (True, True, False, True)


@needs_machine
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gate", (13, 33)),
        ("poles", (13, 33)),
        ("samples", (3, 13, 33)),
        ("heads", (3, 2, 1000)),
        ("numbers of rows", (3, 13, 33)),
        ("numbers of rows", (3, 2, 1001)),
    ],
)
def test_no_kernel_reads_or_writes_what_is_not_its_own(monkeypatch, name, shape):
    cpu_cupy.play(monkeypatch, SMALL, cpu_device.Machine("memory"))
    check(CASES[name], make(CASES[name], shape, "float16"), cpu_cupy.asarray)


@needs_machine
def test_the_gradient_of_a_column_before_a_streamed_norm_is_refused(monkeypatch):
    cpu_cupy.play(monkeypatch, WITHOUT_CLUSTERS)
    made = make(CASES["gate"], (2, 17000), "float32")
    operands = {
        name: cpu_cupy.asarray(operand) if hasattr(operand, "dtype") else operand
        for name, operand in made.operands.items()
    }
    _, saved = CASES["gate"].op.forward(cpu_cupy.asarray(made.x), **operands)
    with pytest.raises(NotImplementedError, match="gradient of shift"):
        CASES["gate"].op.backward(saved, cpu_cupy.asarray(made.gradients[0]))


@needs_machine
@pytest.mark.parametrize(("cols", "device"), [(1000, SMALL), (17000, SMALL), (17000, WITHOUT_CLUSTERS)])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_add_and_norm_has_the_bits_of_the_two_calls_on_the_stand_in(monkeypatch, norm, cols, device):
    cpu_cupy.play(monkeypatch, device)
    made = make(CASES["add_rms_norm"], (2, cols), "float32")
    x, residual, weight = map(cpu_cupy.asarray, (made.x, made.operands["residual"], made.operands["weight"]))
    y, s = getattr(cunorm, f"add_{norm}")(x, residual, weight, eps=EPS)
    assert same_bits(s.get(), made.x + made.operands["residual"])
    apart = cunorm.fuse(norm, epilogue=lambda xhat, weight: xhat * weight)
    assert same_bits(y.get(), apart(s, weight=weight, eps=EPS).get())


@needs_machine
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gradient_that_is_kept_has_the_bits_of_one_that_is_computed_again(monkeypatch, norm):
    """Aligned rows keep dy * d(y)/d(xhat) in registers; rows at odd addresses leave none free and compute it again."""
    runs = cpu_cupy.play(monkeypatch, SMALL)
    op = cunorm.fuse(norm, epilogue=lambda xhat, weight, z: silu(xhat * weight) * sigmoid(z))
    random = numpy.random.default_rng(0)
    wide = [cpu_cupy.asarray(random.standard_normal((5, 385)).astype("float16")) for _ in range(3)]
    gradients = []
    for x, z, dy in (wide_rows := [array[:, :384] for array in wide], [cpu_cupy.asarray(rows) for rows in wide_rows]):
        _, saved = op.forward(x, eps=1e-5, z=z, weight=cpu_cupy.asarray(wide[0][0, :384]))
        gradients.append(op.backward(saved, dy))
    specs = [getattr(step.spec, "rows", step.spec) for plan in runs.plans for step in plan.steps]
    kept = [spec.keeps_g for spec in specs if spec.kernel == "backward"]
    assert kept == [False, True]
    for name in ("x", "z"):
        assert gradients[0][name].tobytes() == gradients[1][name].tobytes()


@needs_machine
@pytest.mark.parametrize(
    ("shape", "cluster_and_stages"),
    [((17, 16384), (4, 2)), ((52, 5120), (1, 2)), ((2056, 128), (1, 0))],
    ids=["a cluster of four", "a CTA of five vectors", "rows that share a warp"],
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_many_rows_that_something_is_added_to_have_the_bits_of_one(monkeypatch, norm, shape, cluster_and_stages):
    runs = cpu_cupy.play(monkeypatch, SMALL)
    made = make(CASES["add_rms_norm"], shape, "bfloat16")
    x, residual, weight = map(cpu_cupy.asarray, (made.x, made.operands["residual"], made.operands["weight"]))
    call = getattr(cunorm, f"{norm}_add")
    y = call(x, residual, weight, eps=EPS).get()
    spec = runs.plans[0].steps[0].spec
    assert (spec.cluster, spec.stages) == cluster_and_stages
    for row in (0, shape[0] - 1):
        alone = call(*(cpu_cupy.asarray(array.get()[row : row + 1]) for array in (x, residual)), weight, eps=EPS).get()
        assert same_bits(alone, y[row : row + 1])
