"""Norm and product of few rows that overlap, without a GPU: results, synchronisation and registers."""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from cpu_device import ORDERS, missing
from linear_cpu import HopperMachine, Mistake, arrays, case, check, check_is_found, run
from nvrtc import needs_nvrtc

from cunorm.commands.compilation import compiler
from cunorm.kernel import driver, launch
from cunorm.kernel.device import H100
from cunorm.linear import overlapped
from cunorm.linear.problem import LinearProblem

needs_machine = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

CASES = {
    "one row": case(1, 512, 64, 0, 4, dtype="float16", offset=1e4),
    "fewer columns than a stage": case(5, 40, 24, 0, 4),
    "several CTAs, the last with fewer outs": case(7, 136, 200, 0, 4),
    "the ring is filled again, the last stage has fewer columns": case(64, 712, 16, 0, 2, ln_weight="float32"),
    "two warpgroups, nothing but x and weight": case(
        65, 264, 48, 0, 2, ln_weight=None, ln_bias=None, bias=False, x_stride=272, weight_stride=280
    ),
    "three warpgroups, RMSNorm": case(130, 128, 24, 0, 4, norm="rms_norm", ln_bias=None),
}


@needs_machine
@pytest.mark.parametrize("run_case", CASES.values(), ids=CASES)
def test_results(run_case):
    given = arrays(run_case)
    check(run_case, given, run(HopperMachine(), run_case, given))


SMALL = case(9, 712, 16, 0, 2)  # it fills the ring again, too


@needs_machine
@pytest.mark.parametrize(("build", "order"), list(product(("races", "memory"), ORDERS)))
def test_order_of_threads_changes_nothing(build, order):
    """Any order of warps and CTAs, with copies and products as late as they may be, gives the same bits and no race."""
    given = arrays(SMALL)
    results = run(HopperMachine(build, order), SMALL, given)
    check(SMALL, given, results)
    assert (results.y == run(HopperMachine(), SMALL, given).y).all()


@needs_machine
def test_a_row_does_not_depend_on_the_others():
    given = arrays(SMALL)
    whole = run(HopperMachine(), SMALL, given)
    some = SMALL._replace(problem=replace(SMALL.problem, rows=4))
    assert (run(HopperMachine(), some, given._replace(x=given.x[:4])).y == whole.y[:4]).all()


def test_a_launch_is_given_the_description_of_its_matrices(monkeypatch):
    """Each argument has the bytes that the kernel's parameter has, a matrix 128 of them."""
    launched = []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(setDevice=lambda _: None), driver=SimpleNamespace(launchKernel=lambda *_: None)
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "address", lambda *_: 1)
    monkeypatch.setattr(driver, "early_launch", lambda *given: lambda _: launched.append(given))
    monkeypatch.setattr(driver, "tensor_map", lambda address, *_: struct.pack("Q", address) * 16)
    plan = overlapped.plan(SMALL.problem, H100)
    pointers = {name: 1000 + place for place, name in enumerate(plan.problem.pointers)}
    launch.run(plan, 0, 0, (*pointers.values(), 1e-5), 77)
    ((_, _, threads, shared, start),) = launched
    (step,) = plan.steps[1:]
    assert (threads, shared) == (step.spec.threads, step.dynamic_shared)
    places = (ctypes.c_uint64 * 7).from_address(start)
    z, weight = ((ctypes.c_uint64 * 16).from_address(place) for place in places[:2])
    assert (set(z), set(weight)) == ({77}, {pointers["weight"]})
    others = [ctypes.c_uint64.from_address(place).value for place in places[2:]]
    assert others == [pointers["bias"], pointers["y"], SMALL.problem.rows, SMALL.problem.cols, SMALL.problem.outs]


MISTAKES = (
    Mistake("z is read before the norm has ended", "  wait_for_kernel_before();\n", ""),
    Mistake(
        "the ring is filled without a wait", "memory.empty[stage].wait((i / Tile::kStages - 1) % 2);", ";", "races"
    ),
    Mistake("the wrong phase of an empty stage", "(i / Tile::kStages - 1) % 2", "(i / Tile::kStages) % 2"),
    Mistake("a stage is read before it is full", "memory.full[stage].wait(i / Tile::kStages % 2);", "", "races"),
    Mistake("the phase of full stages never turns", "wait(i / Tile::kStages % 2)", "wait(0)", "races"),
    Mistake("a stage is given back by one warp alone", "empty[stage].init(Tile::kConsumers)", "empty[stage].init(1)"),
    Mistake("a stage is never given back", "if (i > 0) give_back(i - 1);", ""),
    Mistake("a stage is given back before its products end", "if (i > 0) give_back(i - 1);", "give_back(i);", "races"),
    Mistake("more bytes are expected than come", "(rows + Tile::kOuts)", "(Tile::kRows + Tile::kOuts)"),
    Mistake("the columns of the next product", "&memory.weight[stage][0][column]", "&memory.weight[stage][0][0]"),
    Mistake("sums of the stage before are lost", "i > 0 || column > 0", "column > 0"),
    Mistake("sums are stored before they are there", "wait_for_products<0>(sums);", ""),
    Mistake("barriers are used before they are initialised", "  __syncthreads();\n", "", "races"),
    Mistake(
        "blocks of columns in each other's place",
        "exchange(words[0], words[2], 2);",
        "exchange(words[2], words[0], 2);",
    ),
    Mistake(
        "the bias of other columns",
        "load_words<Cache::kKept>(bias + out",
        "load_words<Cache::kKept>(bias + out - first_out",
    ),
    Mistake("rows beyond the last are stored", "own_row < rows && ", "", "memory"),
)


@needs_machine
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.reason for mistake in MISTAKES])
def test_mistakes_are_found(mistake):
    check_is_found(mistake, "linear/product.cu", SMALL, "descending")


LAYERS = ((4096, 12288), (8192, 10240), (768, 2304), (7168, 2112))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("rows", "dtype"), [(64, "bfloat16"), (128, "float16"), (192, "bfloat16")])
def test_no_kernel_spills(rows, dtype):
    for cols, outs in (*LAYERS, (4096, H100.sms * overlapped.MOST_OUTS[rows])):
        problem = LinearProblem("layer_norm", rows, cols, outs, dtype, bias=True, x_stride=cols, weight_stride=cols)
        for step in overlapped.plan(problem, H100).steps:
            with compiler(keep=False) as compile_one:
                used = compile_one(step.spec, 90)
            assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (str(step.spec), used)
            assert step.dynamic_shared <= H100.shared
