"""The tests of kernels on the CPU find mistakes: each mistake is put into the kernels' text, and a check must fail."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import cpu_cupy
import fusion_cases
import mutations_arithmetic
import mutations_float8
import mutations_fused
import mutations_layouts
import mutations_rows
import mutations_synchronisation
import numpy
import pytest
import test_dropout
import test_float8
import test_float8_casts
import test_fused_float8
import test_sandwich
import test_views
from arrays import inputs, misplaced
from cpu_device import ORDERS, Machine, missing
from cpu_functions import MANY_SMS, MANY_WITHOUT_CLUSTERS, SMALL, WITHOUT_CLUSTERS, check

import cunorm

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

# Cases of layer_norm: (rows, cols, dtype, options of cpu_functions.check and of inputs)
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "lanes": (3, 33, "float32", {}),
    "lanes, a row short": (15, 33, "float32", {}),
    "lanes, partial rows": (170, 65, "float32", {}),
    "one odd row": (1, 129, "float32", {}),
    "warp": (3, 264, "float32", {}),
    "far from zero": (3, 129, "float32", {"offset": 1e4}),
    "zero-centred": (3, 129, "float32", {"zero_centered_gamma": True}),
    "groups of warps": (40, 1024, "float16", {}),
    "idle threads": (3, 1000, "float32", {"offset": 10.0}),
    "CTA": (8, 4096, "float32", {}),
    "CTA, read for each use": (8, 11000, "bfloat16", {}),
    "cluster": (5, 16400, "float32", {}),
    "cluster, odd": (3, 12001, "float64", {}),
    "cluster, the last CTA nearly full": (3, 12285, "float64", {}),
    "buffers": (300, 36, "float32", {}),  # three stages, and five iterations over rows
    "in place": (3, 200000, "float32", {}),
    "in place, misplaced": (3, 200000, "float32", {"misplaced": True, "output_mask": (False, True, True)}),
    "wide weight": (40, 129, "bfloat16", {"weight": "float64"}),
    "equal values, less than a vector": (3, 7, "bfloat16", {"offset": 1e35}),
    "equal values": (3, 12001, "float32", {"offset": 1e35}),
    "wide weight, row groups without rows": (2, 136, "bfloat16", {"weight": "float64"}),
    "partial rows": (280, 1536, "float32", {"device": MANY_SMS}),
    "partial rows in pieces": (12, 2000, "bfloat16", {}),
    "pieces of several warps": (45, 489, "float16", {}),
    "long partial rows": (17, 32792, "float32", {"device": MANY_WITHOUT_CLUSTERS}),
    "partial rows for threads alone": (17, 131081, "float16", {"device": MANY_WITHOUT_CLUSTERS}),
    "streamed": (17, 8201, "float64", {"device": MANY_WITHOUT_CLUSTERS}),
    "misplaced": (3, 136, "float16", {"misplaced": True}),
    "spread": (3, 1152, "bfloat16", {"device": MANY_SMS}),
    "spread, two vectors a thread": (2, 2100, "float64", {"device": MANY_SMS}),
    "spread, threads to spare": (2, 322, "bfloat16", {"device": MANY_SMS}),
    "whole columns": (20, 250, "bfloat16", {"device": MANY_SMS}),
    "odd rows": (3, 137, "float16", {}),
}

SUM_IN_MORE_BITS = fusion_cases.Case(
    cunorm.fuse(
        "layer_norm",
        prologue=lambda x, residual: x + residual,
        epilogue=lambda xhat, weight: xhat * weight,
        dtype="float32",
    ),
    ("residual",),
    ("weight",),
)
BESIDE = fusion_cases.Case(cunorm.fuse("layer_norm", epilogue=lambda xhat, z: xhat * z), ("z",))
ONE_MORE = fusion_cases.Case(cunorm.fuse("rms_norm", prologue=lambda x: x + 1))


class FusedRun(NamedTuple):
    """A fused operation as test_fusion_stand_in.py runs it."""

    operation: fusion_cases.Case
    shape: tuple[int, ...]
    dtype: str
    device: Any = SMALL
    dtypes: dict[str, str] | None = None
    wanted: tuple[str, ...] = ()


FUSED = {
    "fused lanes": FusedRun(fusion_cases.CASES["add_layer_norm"], (13, 33), "float16"),
    "fused, streamed": FusedRun(fusion_cases.CASES["add_rms_norm"], (2, 17000), "float32", WITHOUT_CLUSTERS),
    "gate": FusedRun(fusion_cases.CASES["gate"], (13, 33), "float16"),
    "gate, CTA": FusedRun(fusion_cases.CASES["gate"], (9, 1000), "float32"),
    "gate, cluster": FusedRun(fusion_cases.CASES["gate"], (4, 17000), "float32"),
    "samples": FusedRun(fusion_cases.CASES["samples"], (3, 13, 33), "float16"),
    "samples, partial rows": FusedRun(fusion_cases.CASES["samples"], (3, 7, 1000), "bfloat16", MANY_SMS),
    "samples, a CTA each": FusedRun(fusion_cases.CASES["modulate"], (7, 2, 256), "float32"),
    "numbers of rows": FusedRun(fusion_cases.CASES["numbers of rows"], (13, 33), "float16"),
    "numbers of rows, CTA": FusedRun(fusion_cases.CASES["numbers of rows"], (9, 1000), "float32"),
    "a number's gradient alone": FusedRun(
        fusion_cases.CASES["numbers of rows after"], (9, 1000), "float32", wanted=("route",)
    ),
    "heads": FusedRun(fusion_cases.CASES["heads"], (5, 3, 128), "bfloat16"),
    "beside, cluster": FusedRun(BESIDE, (4, 17000), "float32"),
    "both, partial rows": FusedRun(fusion_cases.CASES["both"], (9, 1000), "float32", MANY_SMS),
    "poles": FusedRun(fusion_cases.CASES["poles"], (13, 33), "float32"),
    "poles, CTA": FusedRun(fusion_cases.CASES["poles"], (3, 1001), "float16"),
    "poles, streamed": FusedRun(
        fusion_cases.CASES["poles"],
        (2, 17001),
        "float32",
        WITHOUT_CLUSTERS,
        wanted=("x", "residual", "z", "weight"),
    ),
    "s in fewer bits": FusedRun(
        SUM_IN_MORE_BITS, (3, 136), "bfloat16", dtypes={"residual": "float32", "weight": "float32", "dy": "float32"}
    ),
    "one more": FusedRun(ONE_MORE, (3, 33), "float32"),
}


# (a view of test_views.py, dtype, width)
VIEWED = {
    "views": ("heads of a packed QKV", "float16", 72),
    "views, odd": ("an odd gap", "float16", 72),
    "views, CTA": ("heads of a packed QKV", "bfloat16", 1000),
}


def float8(cols: int, dtype: str, granularity: str | int, device: Any = SMALL, rows: int = 3) -> Any:
    """Return a norm with FP8 output as test_float8.py runs it."""
    return lambda monkeypatch, machine: test_float8.check_on_stand_in(
        monkeypatch, test_float8.Run(rows, cols, dtype, device, ""), granularity, machine
    )


def float8_edges(monkeypatch: Any, machine: Machine) -> None:
    cpu_cupy.play(monkeypatch, SMALL, machine)
    test_float8.check_edges(cpu_cupy.asarray, 24, "row")


def float8_rounding(monkeypatch: Any, machine: Machine) -> None:
    cpu_cupy.play(monkeypatch, SMALL, machine)
    test_float8.check_rounding(cpu_cupy.asarray, "e4m3")


FLOAT8 = {
    "float8, CTA": float8(4096, "bfloat16", "row"),
    "float8, rows by two": float8(2048, "bfloat16", "row", rows=131),
    "float8, blocks": float8(224, "bfloat16", 128),
    "float8, blocks of four vectors": float8(1000, "bfloat16", 128),
    "float8, a scale for all": float8(224, "bfloat16", "tensor"),
    "float8, streamed": float8(17001, "float32", "row", WITHOUT_CLUSTERS),
    "float8 of a sum, streamed": lambda monkeypatch, machine: test_fused_float8.check_on_stand_in(
        monkeypatch,
        test_fused_float8.Run("add_rms_norm", (3, 17001), "float32", "row", WITHOUT_CLUSTERS, ""),
        machine,
    ),
    "float8 of a sum, CTA": lambda monkeypatch, machine: test_fused_float8.check_on_stand_in(
        monkeypatch, test_fused_float8.Run("add_rms_norm", (3, 4096), "bfloat16", "row", SMALL, ""), machine
    ),
    "norms one after the other": lambda monkeypatch, machine: test_sandwich.check_turns(monkeypatch, machine),
    "float8, edges": float8_edges,
    "float8, rounding": float8_rounding,
    "casts, rows": lambda _, machine: test_float8_casts.rows_and_columns(machine, 37, 1000, "float16"),
    "casts, a CTA a row": lambda _, machine: test_float8_casts.rows_and_columns(machine, 7, 10248, "bfloat16"),
    "casts, not finite": lambda _, machine: test_float8_casts.what_is_not_finite(machine, 130, "bfloat16", SMALL),
    "casts, normalised": lambda _, machine: test_float8_casts.normalised_ones(machine, "layer_norm"),
    "casts, zero-centred": lambda _, machine: test_float8_casts.normalised_ones(machine, "zero_centered_rms_norm"),
}


DROPPED = {
    f"dropout, {name}": test_dropout.RUNS[name]
    for name in ("rows share a warp", "a warp", "vectors of four", "a cluster")
}


MUTATIONS = (
    *mutations_synchronisation.MUTATIONS,
    *mutations_rows.MUTATIONS,
    *mutations_layouts.MUTATIONS,
    *mutations_arithmetic.MUTATIONS,
    *mutations_fused.MUTATIONS,
    *mutations_float8.MUTATIONS,
)


class Edit:
    """A function that replaces `old` by `new` in kernels' texts, and counts the texts that it changed."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new
        self.changed = 0

    def __call__(self, text: str) -> str:
        changed = text.replace(self.old, self.new)
        self.changed += changed != text
        return changed


def run(case: str, machine: Machine) -> None:
    if case in FUSED:
        for as_many in (False, True):
            run_fused(FUSED[case], machine, as_many)
        return
    if case in DROPPED:
        for as_many in (False, True):
            with pytest.MonkeyPatch.context() as monkeypatch:
                cpu_cupy.play(monkeypatch, DROPPED[case].device, machine, as_many=as_many)
                test_dropout.check_run(DROPPED[case], "add_rms_norm")
        return
    if case in FLOAT8:
        with pytest.MonkeyPatch.context() as monkeypatch:
            FLOAT8[case](monkeypatch, machine)
        return
    if case in VIEWED:
        for as_many in (False, True):
            with pytest.MonkeyPatch.context() as monkeypatch:
                family = test_views.stand_in(monkeypatch, machine, as_many)
                family.play(SMALL)
                test_views.check(family, "layer_norm", *VIEWED[case], list)
        return
    rows, cols, dtype, options = CASES[case]
    options = {"device": SMALL, **options}
    x, dy, weight, bias = inputs(
        numpy, rows, cols, dtype, offset=options.pop("offset", 1.0), weight=options.pop("weight", None)
    )
    if options.pop("misplaced", False):
        x, dy, weight, bias = (misplaced(array, 1) for array in (x, dy, weight, bias))
    check(machine, "layer_norm", x, dy, weight, bias, **options)


def run_fused(case: FusedRun, machine: Machine, as_many: bool) -> None:
    made = fusion_cases.make(case.operation, case.shape, case.dtype, case.dtypes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu_cupy.play(monkeypatch, case.device, machine, as_many=as_many)
        fusion_cases.check(case.operation, made, cpu_cupy.asarray, case.wanted)


def finding(case: str, machine: Machine) -> str:
    """Return what the check says if it fails, or an empty text."""
    try:
        run(case, machine)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("mutation", "build", "said"),
    [
        pytest.param(mutation, build, said, id=f"{mutation.reason}-{build}")
        for mutation in MUTATIONS
        for build, said in mutation.caught
    ],
)
def test_a_mistake_is_found(mutation, build, said):
    """The mistake is found in at least one of the orders in which threads may run."""
    edit = Edit(mutation.old, mutation.new)
    findings = (finding(mutation.case, Machine(build, order, edit)) for order in ORDERS)
    first = next(filter(None, findings), "nothing is found")
    assert edit.changed, "the kernels of this case hold no such text: let the mutation follow them"
    assert re.search(said, first, re.DOTALL), first


@pytest.mark.parametrize("case", ["CTA", "cluster"])
def test_launches_ask_for_no_more_shared_memory_than_they_use(case):
    """With 16 bytes less, a launch writes behind its shared memory."""
    assert "heap-buffer-overflow" in finding(case, Machine("memory", missing=16))


RUNS = {(mutation.case, build) for mutation in MUTATIONS for build, _ in mutation.caught}


@pytest.mark.parametrize(
    ("case", "build"),
    sorted(
        (case, build) for case, build in RUNS if build != "results" or not RUNS & {(case, "memory"), (case, "races")}
    ),
)
def test_nothing_is_found_without_a_mistake(case, build):
    """Results are checked in every build, so that a case which a sanitizer runs needs no run without one."""
    run(case, Machine(build))
