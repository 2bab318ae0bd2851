"""`demo`: a real array normalised and differentiated: which path ran, its plan, its time and its error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy

from .. import layer_norm_backward, layer_norm_forward
from ..kernel import device
from ..plan.plain_problems import whole
from ..plan.plan import plan
from ..plan.problem import Problem
from . import float8_demo, plot_demo, ranks_demo
from .info import why_no_gpu

DTYPES = ("float16", "float32", "float64")  # of those that cunorm knows, what a .npy file can hold
KINDS = "float16, float32 or float64"
SMALL = 64 << 20  # bytes of a pass below which a GPU waits for launches rather than for memory
COLD_BYTES = 256 << 20  # several times the L2 cache of a GPU
MOST_COPIES = 1000  # an array of which so many fit into the cache is too small for it to matter


class Inputs(NamedTuple):
    """Arrays of one kind: x and dy of one shape, weight and bias as long as their last axis."""

    x: Any
    dy: Any
    weight: Any
    bias: Any


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="normalise and differentiate a real array",
        description="layer_norm_forward and layer_norm_backward over the last axis of an array: the path that ran, its "
        "plan, its time and its largest error against float64.",
    )
    parser.add_argument("--input", metavar="FILE.npy", help=f"an array of {KINDS}; default: 1797 digits of 64 pixels")
    parser.add_argument(
        "--plot", metavar="FILE", help="a picture of the first row: x, mean, rstd and y (.pdf, .png, .svg)"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--fp8", action="store_true", help="the norm that writes 8 bits, and a product that reads them")
    kinds.add_argument("--ranks", type=int, metavar="N", help="PyTorch's LayerNormLinear over N processes, a GPU each")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        x = _read(arguments.input)
    except Exception as error:  # of a file that is wrong NumPy raises anything
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        print(f"demo: --input must be a .npy file of {KINDS}; {arguments.input}: {reason}.", file=sys.stderr)
        return 2
    if arguments.fp8:
        reason = _why_no_fp8(x)
        if reason:
            print(f"demo: --fp8 {reason}.", file=sys.stderr)
            return 2
    if arguments.ranks is not None:
        reason = ranks_demo.why_not(x, arguments.ranks)
        if reason:
            print(f"demo: --ranks {reason}.", file=sys.stderr)
            return 2
    if arguments.plot is not None:
        reason = plot_demo.why_not(arguments.plot)
        if reason:
            print(f"demo: --plot {reason}.", file=sys.stderr)
            return 2
    show = float8_demo.show if arguments.fp8 else _show
    inputs = _with_parameters(x)
    name = arguments.input or "handwritten digits (cunorm/data)"
    print(f"input: {name}, {x.dtype.name} of shape {x.shape}", flush=True)
    if arguments.plot is not None:
        plot_demo.draw(x, name, arguments.plot)
        print(f"plot:  {arguments.plot}")
    if arguments.ranks is not None:
        return ranks_demo.run(x, arguments.ranks)
    no_gpu = why_no_gpu()
    if no_gpu:
        print(f"path:  host path (NumPy): no GPU ({no_gpu})\nplan:  not run here; what an H200 would do")
        show(inputs, device.KNOWN[90], numpy.asarray, _host_seconds)
    else:
        import cupy

        print("path:  GPU (CUDA kernels through CuPy)\nplan:")
        show(Inputs(*map(cupy.asarray, inputs)), device.current(cupy.cuda.Device().id), cupy.asnumpy, _gpu_seconds)
    return 0


def _read(path: str | None) -> numpy.ndarray:
    """Return the array in a file, by default cunorm's own; raise ValueError if it cannot be normalised."""
    file = resources.files("cunorm") / "data" / "digits.npy" if path is None else Path(path)
    with file.open("rb") as stream:
        x = numpy.lib.format.read_array(stream, allow_pickle=False)
    if x.dtype.name not in DTYPES:
        raise ValueError(f"it holds {x.dtype.name}")
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"it must have an axis to normalise and an element; its shape is {x.shape}")
    return x.astype(x.dtype.newbyteorder("="), order="C")


def _why_no_fp8(x: numpy.ndarray) -> str:
    if x.dtype.name == "float64":
        return "needs an array of float16 or float32; it holds float64"
    if find_spec("ml_dtypes") is None:
        return "needs ml_dtypes, which NumPy's numbers of 8 bits are from: pip install ml_dtypes"
    return ""


def _with_parameters(x: numpy.ndarray) -> Inputs:
    generator = numpy.random.default_rng(0)
    dy = generator.standard_normal(x.shape).astype(x.dtype)
    weight = (1 + generator.standard_normal(x.shape[-1]) / 4).astype(x.dtype)
    return Inputs(x, dy, weight, generator.standard_normal(x.shape[-1]).astype(x.dtype))


def _show(
    inputs: Inputs,
    target: device.Device,
    to_host: Callable[[Any], numpy.ndarray],
    seconds_of: Callable[[Callable[[Inputs], Any], Inputs], float],
) -> None:
    """Run both passes and print their plans, times and errors."""
    _, mean, rstd = _forward(inputs)
    passes = {"forward": _forward, "backward": lambda arrays: _backward(arrays, mean, rstd)}
    problems = {direction: _problem(inputs, direction) for direction in passes}
    for problem in problems.values():
        print(plan(problem, target).describe())

    print(f"\n{'':<10}{'time':>12}{'GB/s':>10}")
    for direction, call in passes.items():
        seconds = seconds_of(call, inputs)
        rate = problems[direction].bytes_moved / seconds * 1e-9
        print(f"{direction:<10}{seconds * 1e6:>9.1f} us{rate:>10.1f}")
    if seconds_of is _gpu_seconds and problems["forward"].bytes_moved < SMALL:
        print("This array is so small that the GPU waits for launches, not for memory.")

    print(f"\n{'':<10}{'largest error against float64':>30}{'largest value':>16}")
    exact = _results(Inputs(*(to_host(array).astype("float64") for array in inputs)))
    for (name, result), reference in zip(_results(inputs).items(), exact.values(), strict=True):
        finite = numpy.isfinite(reference)
        values, reference = to_host(result).astype("float64")[finite], reference[finite]
        print(f"{name:<10}{abs(values - reference).max(initial=0):>30.2e}{abs(reference).max(initial=0):>16.3g}")


def _forward(arrays: Inputs) -> tuple[Any, Any, Any]:
    return layer_norm_forward(arrays.x, None, arrays.weight, arrays.bias)


def _backward(arrays: Inputs, mean: Any, rstd: Any) -> tuple[Any, Any, Any]:
    return layer_norm_backward(arrays.dy, arrays.x, mean, rstd, arrays.weight)


def _results(arrays: Inputs) -> dict[str, Any]:
    y, mean, rstd = _forward(arrays)
    return dict(zip(("y", "dx", "dweight", "dbias"), (y, *_backward(arrays, mean, rstd)), strict=True))


def _problem(arrays: Inputs, direction: str) -> Problem:
    x = arrays.x
    return whole("layer_norm", direction, x.size // x.shape[-1], x.shape[-1], x.dtype.name, x.dtype.name)


def _host_seconds(call: Callable[[Inputs], Any], inputs: Inputs) -> float:
    def once() -> float:
        start = perf_counter()
        call(inputs)
        return perf_counter() - start

    return median(once() for _ in range(7))


def _gpu_seconds(call: Callable[[Inputs], Any], inputs: Inputs) -> float:
    """Return the seconds of one of many calls in a row, on copies of the arrays that exceed the L2 cache together."""
    import cupy

    count = min(MOST_COPIES, 1 + COLD_BYTES // inputs.x.nbytes)
    copies = [Inputs(*(array.copy() for array in inputs)) for _ in range(count)]
    calls = copies * (1 + 20 // len(copies))

    def batch() -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for arrays in calls:
            call(arrays)
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / len(calls)

    batch()  # fills the memory pool
    return median(batch() for _ in range(7))
