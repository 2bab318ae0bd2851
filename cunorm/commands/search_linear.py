"""A search over the divisions of a norm with its product in one launch, on a GPU: for `tune`.

Each division that does not spill is held against the two launches, the norm's kernel and cuBLASLt's product. The
fastest is timed beside them once more, alone, so that the luck of the fastest of several is no gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy

from ..call.numpy import numpy_dtype
from ..kernel import launch
from ..kernel.device import Device
from ..linear import one_launch
from ..linear.one_launch import LinearProblem, OneLaunchPlan
from ..plan.problem import ITEMSIZE
from . import timing
from .compilation import compile_all, compiler
from .search import RANDOM, checked

EPS = 1e-5
# How far y may be from that of the two launches, in parts of its largest number: two roundings of bfloat16.
TOLERANCE = 2.0**-6
SECONDS = 0.3  # for the turns of all divisions


class FoundLinear(NamedTuple):
    """What a search found; seconds of a call."""

    today: timing.Times  # of the two launches
    best: timing.Times  # of `better`, else of the two launches
    better: int  # the CTAs of the clusters of the one launch that is ahead by more than both spread; 0: none is
    tried: int
    spilled: int


def search_linear(problem: LinearProblem, device: Device, step: Callable[[], None] = lambda: None) -> FoundLinear:
    """Time one launch in each division beside the two launches. `step` is called twice for each division."""
    plans = {
        division.cluster: one_launch.plan(problem, device, division)
        for division in one_launch.divisions(problem, device)
    }
    sound = _without_spills(plans, device, step)
    arrays = Arrays(problem)
    expected = arrays.numbers(arrays.two_launches())
    right = []
    for ctas, plan in sound.items():
        step()
        y = arrays.numbers(arrays.one_launch(plan))
        if abs(y - expected).max() <= TOLERANCE * abs(expected).max():
            right.append(ctas)
    two = arrays.timer(arrays.two_launches)
    timers = {ctas: arrays.timer(lambda index, plan=sound[ctas]: arrays.one_launch(plan, index)) for ctas in right}
    today, *times = map(checked, timing.in_turns([two, *timers.values()], SECONDS))
    best, better = today, 0
    if times:
        medians = {ctas: taken.median for ctas, taken in zip(timers, times, strict=True)}
        fastest = min(medians, key=medians.__getitem__)
        today, of_fastest = map(checked, timing.in_turns([two, timers[fastest]], SECONDS))
        best, better = (of_fastest, fastest) if of_fastest.p80 < today.p20 else (today, 0)
    return FoundLinear(today, best, better, len(right), len(plans) - len(sound))


def _without_spills(
    plans: Mapping[int, OneLaunchPlan], device: Device, step: Callable[[], None]
) -> dict[int, OneLaunchPlan]:
    work = {plan.steps[0].spec: ctas for ctas, plan in plans.items()}
    sound = {}
    with compiler(keep=True) as compile_one:
        for compiled in compile_all([(spec, device.arch) for spec in work], compile_one):
            step()
            if not compiled.fault:
                ctas = work[compiled.spec]
                sound[ctas] = plans[ctas]
    return sound


class Arrays:
    """The arrays of a problem, in so many sets that L2 holds nothing of the next one's."""

    def __init__(self, problem: LinearProblem):
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # those of the last problem
        rows, cols, outs = problem.rows, problem.cols, problem.outs
        self._problem = problem
        self._bytes = ITEMSIZE[problem.dtype] * (cols * outs + rows * (cols + outs))
        shapes = {"x": (rows, cols), "weight": (outs, cols), "bias": (outs,), "ln_weight": (cols,), "ln_bias": (cols,)}
        dtypes = dict.fromkeys(("x", "weight"), problem.dtype) | {"bias": problem.dtype if problem.bias else None}
        dtypes |= {"ln_weight": problem.ln_weight, "ln_bias": problem.ln_bias}
        first = {}
        for name, dtype in dtypes.items():
            if dtype is not None:
                count = min(int(numpy.prod(shapes[name])), RANDOM)
                drawn = numpy.random.default_rng(len(first)).standard_normal(count).astype("float32")
                drawn *= cols**-0.5 if name == "weight" else 1.0
                first[name] = cupy.resize(cupy.asarray(drawn), shapes[name]).astype(numpy_dtype("tune", dtype))
        count = timing.buffers_needed(self._bytes)
        self.sets = [first, *({name: array.copy() for name, array in first.items()} for _ in range(count - 1))]
        cupy.cuda.Device().synchronize()  # graphs run on streams of their own

    def two_launches(self, index: int = 0) -> Any:
        from .. import functions
        from ..linear import gemm

        arrays, problem = self.sets[index], self._problem
        x, weight, bias, ln_weight, ln_bias = map(arrays.get, one_launch.NAMES)
        options = {"eps": EPS, "zero_centered_gamma": problem.zero_centered_gamma}
        if problem.norm == "layer_norm":
            z = functions.layer_norm(x, problem.cols, ln_weight, ln_bias, **options)
        else:
            z = functions.rms_norm(x, problem.cols, ln_weight, **options)
        assert weight is not None
        return gemm.multiply(z, weight.T, bias)

    def one_launch(self, plan: OneLaunchPlan, index: int = 0) -> Any:
        import cupy

        arrays = self.sets[index]
        y = cupy.empty((self._problem.rows, self._problem.outs), arrays["x"].dtype)
        addresses = {name: array.data.ptr for name, array in (arrays | {"y": y}).items()}
        pointers = [addresses.get(name, 0) for name in plan.problem.pointers]  # z and statistics are not written
        launch.run(plan, y.data.device_id, cupy.cuda.get_current_stream().ptr, (*pointers, EPS))
        return y

    def timer(self, call: Callable[[int], Any]) -> timing.Timer:
        calls = [lambda index=index: call(index) for index in range(len(self.sets))]
        return timing.cupy_timer(calls, -(-timing.launches_of_graph(self._bytes) // len(calls)))

    def numbers(self, y: Any) -> numpy.ndarray:
        """Return y in float32, on the host."""
        import cupy

        return cupy.asnumpy(y.astype("float32"))
