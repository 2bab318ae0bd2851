"""A search over the launches of a problem's rows, on a GPU: for `tune`, and for `python -m bench.search`.

The candidates are compiled, those that spill left out, and timed over rotating buffers (timing.py): all of them once,
then the fastest, whose results are held against today's, in turns. The best of these meets today's once more, alone, so
that the luck of the fastest of many is no gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy

from ..kernel import launch
from ..kernel.device import Device
from ..plan.choose import choose
from ..plan.launches import launches
from ..plan.problem import Operand, Problem
from ..plan.spec import KernelSpec, NormSpec
from ..plan.steps import Plan
from ..plan.tables import Launch, run_by
from . import timing
from .compilation import compile_all, compiler

FINALISTS = 8  # timed in turns with today's
SCREENING = 3  # replays of a graph, the fastest of which counts
RANDOM = 1 << 20  # numbers that are drawn; longer arrays have them again and again
SCALARS = {"eps": 1e-5}  # others are a half
# Of a sum over rows, in parts of its largest number, by how much another number of partial sums may change it: a
# rounding of bfloat16, twice. A row that is missing changes it by more.
SUM_TOLERANCE = 2.0**-6

P = TypeVar("P")


@dataclass(frozen=True)
class Found:
    """What a search found; seconds of a call."""

    today: timing.Times
    fastest: tuple[tuple[float, NormSpec], ...]  # the finalists, the fastest first, by their medians
    better: NormSpec | None  # what is ahead of today's by more than both spread
    best: timing.Times  # of it, else today's
    tried: int
    faults: tuple[tuple[NormSpec, str], ...]  # those left out as their results were wrong, or they could not run
    spilled: int


def search(
    problem: Problem, today: Plan, others: Sequence[NormSpec], device: Device, step: Callable[[], None] = lambda: None
) -> Found:
    """Time `others`, kernels of the problem's rows, beside today's plan. `step` is called twice for each of them."""
    plans = {launches(problem, spec, device): spec for spec in others}
    without_spills = _without_spills(plans, problem, device, step)
    buffers = Buffers(problem)
    expected = buffers.results(today)
    faults: dict[Plan, str] = {}
    screened: dict[Plan, float] = {}
    for plan in without_spills:
        step()
        try:
            timer = buffers.timer(plan)
            screened[plan] = min(timer() for _ in range(SCREENING))
        except RuntimeError as error:  # CUDA's, such as too many resources asked for
            faults[plan] = str(error)
    finalists = sorted(screened, key=screened.__getitem__)[:FINALISTS]
    faults |= {plan: why for plan in finalists if (why := buffers.fault(plan, expected))}
    finalists = [plan for plan in finalists if plan not in faults]
    own = buffers.timer(today)
    of_today, *times = map(checked, timing.in_turns([own, *map(buffers.timer, finalists)]))
    ranked = sorted(zip(times, finalists, strict=True), key=lambda pair: pair[0].median)
    better, best = None, of_today
    if ranked and ranked[0][0].median < of_today.median:
        of_today, of_best = map(checked, timing.in_turns([own, buffers.timer(ranked[0][1])]))
        if of_best.p80 < of_today.p20:
            better, best = plans[ranked[0][1]], of_best
    return Found(
        of_today,
        tuple((taken.median, plans[plan]) for taken, plan in ranked),
        better,
        best if better else of_today,
        len(without_spills),
        tuple((plans[plan], why) for plan, why in faults.items()),
        len(plans) - len(without_spills),
    )


def _without_spills(
    plans: Mapping[Plan, NormSpec], problem: Problem, device: Device, step: Callable[[], None]
) -> list[Plan]:
    """Return the plans whose kernels compile and spill nothing.

    A backward pass has the same launch at odd addresses, so that kernel must not spill either.
    """
    kernels = {plan: [step.spec for step in plan.steps] for plan in plans}
    elsewhere = choose(replace(problem, aligned=False), device) if problem.direction == "backward" else None
    if isinstance(elsewhere, NormSpec):
        for plan, spec in plans.items():
            kernel = run_by(Launch.of(spec), elsewhere, device)
            kernels[plan] += [kernel] if kernel else []
    return sound(kernels, device, step)


def sound(kernels: Mapping[P, Sequence[KernelSpec]], device: Device, step: Callable[[], None]) -> list[P]:
    """Return the plans whose kernels compile, into the kernel cache, and spill nothing. `step` is called for each."""
    faults = set()
    work = list(dict.fromkeys((spec, device.arch) for specs in kernels.values() for spec in specs))
    with compiler(keep=True) as compile_one:
        for place, compiled in enumerate(compile_all(work, compile_one)):
            if compiled.fault:
                faults.add(compiled.spec)
            if place < len(kernels):
                step()
    return [plan for plan, specs in kernels.items() if not faults.intersection(specs)]


def checked(times: timing.Times | Exception) -> timing.Times:
    """Return times, or raise what the measurement raised."""
    if isinstance(times, Exception):
        raise times
    return times


class Buffers:
    """The arrays of a problem, in so many sets that L2 holds nothing of the next one's."""

    def __init__(self, problem: Problem):
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # those of the last problem
        self.problem = problem
        self.device_id = cupy.cuda.Device().id
        count = timing.buffers_needed(problem.bytes_moved)
        operands = [operand for operand in problem.operands if operand.kind != "scalar"]
        first = {operand.name: self._array(operand) for operand in operands}
        self.sets = [first, *({name: array.copy() for name, array in first.items()} for _ in range(count - 1))]
        cupy.cuda.Device().synchronize()

    def _array(self, operand: Operand) -> Any:
        import cupy

        count = _extent(self.problem, operand)
        array = cupy.empty(count * operand.itemsize, "uint8")
        if not operand.written:
            numbers = numpy.random.default_rng(len(operand.name)).standard_normal(min(count, RANDOM))
            if operand.kind not in ("full", "column", "group"):  # rstd and scales are not negative
                numbers = abs(numbers) + 0.5
            of_drawn = bytes_of(numbers, operand)
            for start in range(0, array.size, of_drawn.size):
                part = array[start : start + of_drawn.size]
                part.set(of_drawn[: part.size])
        return array

    def calls(self, plan: Plan) -> list[timing.Call]:
        """Return a call for each set of buffers."""
        import cupy

        workspace = cupy.empty(max(1, plan.workspace), "uint8")
        scalars = [SCALARS.get(name, 0.5) for name in self.problem.scalars]

        def call(arrays: dict[str, Any]) -> timing.Call:
            arguments = (*(arrays[name].data.ptr for name in self.problem.pointers), *scalars)
            return lambda: launch.run(
                plan, self.device_id, cupy.cuda.get_current_stream().ptr, arguments, workspace.data.ptr
            )

        return [call(arrays) for arrays in self.sets]

    def timer(self, plan: Plan) -> timing.Timer:
        calls = self.calls(plan)
        rounds = -(-timing.launches_of_graph(self.problem.bytes_moved) // len(calls))
        return timing.cupy_timer(calls, rounds)

    def results(self, plan: Plan) -> dict[str, numpy.ndarray]:
        """Return the bytes of what a plan writes, by name."""
        import cupy

        written = {operand.name: self.sets[0][operand.name] for operand in self.problem.operands.written}
        for array in written.values():
            array.data.memset(255, array.nbytes)  # NaN
        self.calls(plan)[0]()
        cupy.cuda.Device().synchronize()
        return {name: cupy.asnumpy(array) for name, array in written.items()}

    def fault(self, plan: Plan, expected: dict[str, numpy.ndarray]) -> str:
        """Return what is wrong with a plan's results; empty if nothing is. Sums over rows alone may have other bits."""
        for name, result in self.results(plan).items():
            if numpy.array_equal(result, expected[name]):
                continue
            if name not in self.problem.sums:
                return f"{name} has other bits"
            operand = self.problem.by_name[name]
            numbers, reference = _numbers_of(result, operand), _numbers_of(expected[name], operand)
            apart = abs(numbers - reference).max() / abs(reference).max()
            if not apart <= SUM_TOLERANCE:
                return f"{name} is {apart:.3g} of its largest number away"
        return ""


def _extent(problem: Problem, operand: Operand) -> int:
    """Return how many elements lie from the first to the last."""
    rows, cols = problem.rows, problem.cols
    if operand.kind == "group" and operand.groups:
        return (operand.groups.count - 1) * operand.row_stride + cols
    if operand.kind != "full" and (operand.kind != "per_row" or operand.written):
        return operand.size(rows, cols)
    length = cols if operand.kind == "full" else 1
    if operand.inner:
        return (rows - 1) // operand.inner * operand.outer_stride + (operand.inner - 1) * operand.row_stride + length
    return (rows - 1) * operand.row_stride + length


def bytes_of(numbers: numpy.ndarray, operand: Operand) -> numpy.ndarray:
    """Return numbers in the dtype of an operand; bfloat16, which NumPy does not know, is the upper half of float32."""
    if operand.kind == "seed":
        return numbers.view("uint8")[: operand.itemsize]
    if operand.dtype == "bfloat16":
        return (numbers.astype("float32").view("uint32") >> 16).astype("uint16").view("uint8")
    return numbers.astype(operand.dtype).view("uint8")


def _numbers_of(content: numpy.ndarray, operand: Operand) -> numpy.ndarray:
    if operand.dtype == "bfloat16":
        return (content.view("uint16").astype("uint32") << 16).view("float32").astype("float64")
    return content.view(operand.dtype).astype("float64")
