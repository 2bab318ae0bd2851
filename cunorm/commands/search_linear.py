"""A search over the ways to run a norm with its product, on a GPU: for `tune`.

They are one launch, in each division that does not spill, the overlapped launches, and split: the norm's kernel and
then the product by each algorithm that cuBLASLt offers. Each is held against what runs today. The fastest is timed
beside it once more, alone, so that the luck of the fastest of several is no gain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy

from ..call.numpy import numpy_dtype
from ..kernel import launch
from ..kernel.device import Device
from ..linear import plan as linear_plan
from ..linear.problem import NAMES, LinearProblem
from ..plan.problem import ITEMSIZE
from ..plan.steps import OtherPlan
from ..plan.tables import SPLIT, Algorithm
from . import timing
from .search import RANDOM, SUM_TOLERANCE, checked, sound

EPS = 1e-5
SECONDS = 0.3  # for the turns of all ways


class Way(NamedTuple):
    """How a norm with its product runs."""

    way: int = SPLIT  # as linear.plan.ways has them
    algorithm: Algorithm = ()  # of the product of split ones


class FoundLinear(NamedTuple):
    """What a search found; seconds of a call."""

    today: timing.Times
    best: timing.Times  # of `better`, else today's
    better: Way | None  # what is ahead of today's by more than both spread
    tried: int
    spilled: int
    cublas: str  # the version, by which tables name algorithms


def why_not(problem: LinearProblem, device: Device) -> str:
    """Return why there is nothing to search for; empty if there is."""
    from ..linear import gemm

    reason = linear_plan.why_not(problem, device)
    offered = problem.dtype in ("float16", "bfloat16") and gemm.bindings() is not None
    return "" if offered else reason


def search_linear(problem: LinearProblem, device: Device, step: Callable[[], None] = lambda: None) -> FoundLinear:
    """Time every way beside today's. `step` is called once or twice for each."""
    plans = linear_plan.ways(problem, device)
    without_spills = sound({way: [launch.spec for launch in plan.steps] for way, plan in plans.items()}, device, step)
    arrays = Arrays(problem)
    products = arrays.products()
    ways = {Way(way): partial(arrays.planned, plans[way]) for way in without_spills}
    ways |= {Way(SPLIT, algorithm): partial(arrays.split, product) for algorithm, product in products.items()}
    expected = arrays.numbers(arrays.today(0))
    right = {}
    for way, call in ways.items():
        step()
        if abs(arrays.numbers(call(0)) - expected).max() <= SUM_TOLERANCE * abs(expected).max():
            right[way] = arrays.timer(call)
    own = arrays.timer(arrays.today)
    today, *times = map(checked, timing.in_turns([own, *right.values()], SECONDS))
    best, better = today, None
    if times:
        medians = {way: taken.median for way, taken in zip(right, times, strict=True)}
        fastest = min(medians, key=medians.__getitem__)
        today, of_fastest = map(checked, timing.in_turns([own, right[fastest]], SECONDS))
        best, better = (of_fastest, fastest) if of_fastest.p80 < today.p20 else (today, None)
    return FoundLinear(today, best, better, len(right), len(plans) - len(without_spills), arrays.cublas())


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

    def _given(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays of a set, None for one that is absent, and what else a call is given."""
        options = {"eps": EPS, "zero_centered_gamma": self._problem.zero_centered_gamma}
        return dict.fromkeys(NAMES) | self.sets[index], options

    def today(self, index: int) -> Any:
        """Return y as a call returns it."""
        from ..linear import api

        arrays, options = self._given(index)
        normalization = "LayerNorm" if self._problem.norm == "layer_norm" else "RMSNorm"
        return api.layer_norm_linear(*arrays.values(), normalization=normalization, **options)

    def products(self) -> dict[Algorithm, Any]:
        """Return the product by each algorithm that cuBLASLt offers."""
        from ..linear import gemm

        if gemm.bindings() is None:
            return {}
        kind, pointers = self._product(self._normalised(0), 0, self._empty())
        return gemm.offered(kind, pointers[-1])

    def cublas(self) -> str:
        """Return the version of cuBLAS; empty where cuBLASLt cannot be reached."""
        from ..linear import gemm

        return gemm.version() if gemm.bindings() is not None else ""

    def split(self, product: Any, index: int) -> Any:
        """Return y of the norm's kernel and a product."""
        y, z = self._empty(), self._normalised(index)
        _, pointers = self._product(z, index, y)
        product.run(*pointers)  # its workspace must not be where z is, which is still needed
        return y

    def planned(self, plan: OtherPlan, index: int) -> Any:
        """Return y of a plan, which returns neither z nor statistics."""
        import cupy

        y, workspace = self._empty(), cupy.empty(plan.workspace, "uint8")
        addresses = {name: array.data.ptr for name, array in (self.sets[index] | {"y": y}).items()}
        pointers = [addresses.get(name, 0) for name in plan.problem.pointers]
        stream = cupy.cuda.get_current_stream().ptr
        launch.run(plan, y.data.device_id, stream, (*pointers, EPS), workspace.data.ptr)
        return y

    def _empty(self) -> Any:
        import cupy

        return cupy.empty((self._problem.rows, self._problem.outs), self.sets[0]["x"].dtype)

    def _normalised(self, index: int) -> Any:
        from .. import functions

        arrays, options = self._given(index)
        if self._problem.norm == "layer_norm":
            return functions.layer_norm(
                arrays["x"], self._problem.cols, arrays["ln_weight"], arrays["ln_bias"], **options
            )
        return functions.rms_norm(arrays["x"], self._problem.cols, arrays["ln_weight"], **options)

    def _product(self, z: Any, index: int, y: Any) -> tuple[Any, tuple[int, ...]]:
        """Return the kind of the product and its pointers."""
        from ..linear import gemm

        arrays, _ = self._given(index)
        epilogue = "DEFAULT" if arrays["bias"] is None else "BIAS"
        return gemm.described(epilogue, z, arrays["weight"].T, y, arrays["bias"])

    def timer(self, call: Callable[[int], Any]) -> timing.Timer:
        calls = [partial(call, index) for index in range(len(self.sets))]
        return timing.cupy_timer(calls, -(-timing.launches_of_graph(self._bytes) // len(calls)))

    def numbers(self, y: Any) -> numpy.ndarray:
        """Return y in float32, on the host."""
        import cupy

        return cupy.asnumpy(y.astype("float32"))
