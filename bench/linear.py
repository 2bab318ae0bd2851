"""Compare layer_norm_linear with the bare product, torch's two operators, torch.compile and TransformerEngine.

    python -m bench.linear [--warm] [--parts speed memory host] [--out FILE]

Contenders are CUDA graphs over random data in bfloat16. For each shape and direction all are captured first and then
replayed in turns, so that a GPU that slows down under load slows all of them, and medians count. Every result is
checked against float64 before it is timed. `--warm` only compiles, into inductor's cache: run it first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch.nn import functional as F  # noqa: N812

from bench.results import lines_to
from bench.timing import buffers_needed
from bench.torch_models import alternate
from cunorm.torch import layer_norm_linear
from cunorm.torch.norm import nodes

# (rows, in, out)
SHAPES = (
    (16, 4096, 12288),
    (128, 4096, 12288),
    (2048, 1024, 3072),
    (8192, 1024, 3072),
    (8192, 4096, 12288),
    (8192, 8192, 10240),
)
EPS = 1e-5
ROUNDS = 40
MICROSECONDS = 400  # a graph takes at least this long
DIRECTIONS = ("forward", "backward")
PARTS = ("speed", "memory", "host")
ERROR = 8e-3  # the largest relative error that bfloat16 explains


class Buffers(NamedTuple):
    x: Any
    weight: Any
    bias: Any
    ln_weight: Any
    ln_bias: Any
    dy: Any

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self[:5]


Function = Callable[..., Any]


def two_operators(x, weight, bias, ln_weight, ln_bias):
    return F.linear(F.layer_norm(x, ln_weight.shape, ln_weight, ln_bias, EPS), weight, bias)


def contenders() -> dict[str, Function]:
    """Return functions of x, weight, bias, ln_weight and ln_bias, of which the bare product takes x as normalised."""
    torch._functorch.config.donated_buffer = False  # a backward pass runs more than once
    torch._dynamo.reset()  # or the shapes so far would count towards its limit of recompilations
    functions = {
        "product": lambda x, weight, bias, *_: F.linear(x, weight, bias),
        "torch": two_operators,
        "torch.compile": torch.compile(two_operators, dynamic=False),
        "cunorm": lambda *inputs: layer_norm_linear(*inputs, EPS),
        "cunorm, z kept": lambda *inputs: layer_norm_linear(*inputs, EPS, keep_normalized=True),
    }
    try:
        import transformer_engine.pytorch as te
    except ImportError:
        return functions
    modules: dict[int, Any] = {}

    def transformer_engine(x, weight, bias, ln_weight, ln_bias):
        module = modules.get(id(weight))
        if module is None:
            module = te.LayerNormLinear(*weight.shape[::-1], EPS, params_dtype=weight.dtype)
            module.weight, module.bias = weight, bias
            module.layer_norm_weight, module.layer_norm_bias = ln_weight, ln_bias
            modules[id(weight)] = module
        return module(x)

    return {**functions, "TransformerEngine": transformer_engine}


def buffers(rows: int, cols: int, outs: int) -> Buffers:
    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Any:
        return (torch.randn(*shape, device="cuda") * scale + shift).bfloat16()

    leaves = (
        normal(rows, cols, shift=0.5),
        normal(outs, cols, scale=cols**-0.5),
        normal(outs),
        normal(cols, scale=0.3, shift=1.0),
        normal(cols),
    )
    return Buffers(*(torch.nn.Parameter(leaf) for leaf in leaves), normal(rows, outs))


def call_of(name: str, function: Function, b: Buffers, direction: str) -> Callable[[], Any]:
    if direction == "forward":
        return lambda: function(*b.inputs)
    wanted = [b.x, b.weight, b.bias] if name == "product" else list(b.inputs)
    y = function(*b.inputs)
    prepare_again = nothing_freed(y.grad_fn)

    def call() -> Any:
        prepare_again()
        return torch.autograd.grad(y, wanted, b.dy, retain_graph=True)

    return call


def nothing_freed(node: Any) -> Callable[[], None]:
    """Return what must be called before every backward pass of a node, so that it can run more than once.

    TransformerEngine's nodes free what they saved whatever retain_graph says: they drop `tensor_objects` and empty each
    saved tensor that has no attribute `_do_not_clear` (transformer_engine/pytorch/{quantized_tensor,utils}.py).
    """
    if not hasattr(node, "tensor_objects"):
        return lambda: None
    objects = node.tensor_objects
    for tensor in node.saved_tensors:
        if tensor is not None:
            tensor._do_not_clear = True

    def prepare_again() -> None:
        node.tensor_objects = objects

    return prepare_again


def errors(function: Function, b: Buffers) -> list[float]:
    """Return the errors of y and the five gradients relative to float64, as ‖a - b‖ / ‖b‖."""
    wide = [t.detach().double().requires_grad_() for t in b.inputs]
    expected = two_operators(*wide)
    exact = [expected, *torch.autograd.grad(expected, wide, b.dy.double())]
    y = function(*b.inputs)
    ours = [y, *torch.autograd.grad(y, b.inputs, b.dy)]
    return [float((a.double() - e).norm() / e.norm()) for a, e in zip(ours, exact, strict=True)]


def captured(calls: Sequence[Callable[[], Any]], repeats: int) -> tuple[Any, list[Any]]:
    """Capture all calls, `repeats` times one after the other; return the graph and the results, which it writes to."""
    stream = torch.cuda.current_stream()
    for _ in range(2):
        results = [call() for call in calls]
    stream.synchronize()
    del results
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = [None] * len(calls)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for index, call in enumerate(calls):
                kept[index] = call()
    return graph, kept


def in_turns(graphs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of every replay; each round begins with another contender."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return times


def measure(write: Callable[..., None], shape: tuple[int, int, int]) -> None:
    rows, cols, outs = shape
    functions = contenders()
    moved = 2 * (rows * cols + outs * cols + rows * outs)
    sets = [buffers(*shape) for _ in range(min(buffers_needed(moved), 16))]
    base = {"rows": rows, "in": cols, "out": outs, "dtype": "bfloat16"}
    for name, function in functions.items():
        if name != "product":
            relative = errors(function, sets[0])
            write("error", **base, contender=name, relative=relative)
            if not all(error < ERROR for error in relative):  # NaN is wrong too
                raise AssertionError(f"{name} is wrong at {shape}: {relative}")
    for direction in DIRECTIONS:
        torch.cuda.empty_cache()
        estimate = (2 if direction == "forward" else 4) * rows * cols * outs / 700e6 + 15  # microseconds of a call
        repeats = max(1, round(MICROSECONDS / estimate / len(sets)))
        graphs, kept = {}, []
        for name, function in functions.items():
            calls = [call_of(name, function, b, direction) for b in sets]
            graphs[name], results = captured(calls, repeats)
            kept.append((calls, results))
        times = in_turns(graphs, ROUNDS)
        figures = {}
        for name, values in times.items():
            p20, _, _, p80 = statistics.quantiles(values, n=5)
            quantiles = {"median": statistics.median(values), "p20": p20, "p80": p80}
            figures[name] = {key: round(value / repeats / len(sets), 2) for key, value in quantiles.items()}
        write("time", **base, direction=direction, unit="us", sets=len(sets), **figures)
        del graphs, kept


def peak_memory(write: Callable[..., None], shape: tuple[int, int, int]) -> None:
    """Write the bytes that forward and backward need at once beyond the inputs."""
    b = buffers(*shape)
    figures = {}
    for name, function in contenders().items():
        if name == "product":
            continue
        for _ in range(3):
            for leaf in b.inputs:
                leaf.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            function(*b.inputs).backward(b.dy)
        figures[name] = torch.cuda.max_memory_allocated() - before
    rows, cols, outs = shape
    write("memory", rows=rows, **{"in": cols, "out": outs}, unit="bytes", z=2 * rows * cols, **figures)


def host_time(write: Callable[..., None]) -> None:
    """Write the microseconds until a call returns, while the GPU has next to nothing to do."""
    b = buffers(16, 256, 256)
    functions = {name: function for name, function in contenders().items() if name != "product"}

    def forward(function: Function) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                function(*b.inputs)

        return call

    def both(function: Function) -> Callable[[], None]:
        def call() -> None:
            for leaf in b.inputs:
                leaf.grad = None
            function(*b.inputs).backward(b.dy)

        return call

    for what, make in (("forward", forward), ("forward and backward", both)):
        calls = {name: (make(function), 1) for name, function in functions.items()}
        write("host", what=what, unit="us", **alternate(calls, rounds=30, inner=20))


def warm(shape: tuple[int, int, int]) -> None:
    b = buffers(*shape)
    contenders()["torch.compile"](*b.inputs).backward(b.dy)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--only", type=int, choices=range(len(SHAPES)), help="the number of a shape")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path("bench/results/linear/linear.jsonl"))
    arguments = parser.parse_args()
    shapes = SHAPES if arguments.only is None else SHAPES[arguments.only : arguments.only + 1]
    if arguments.warm:
        if arguments.only is not None:
            warm(shapes[0])
            return
        command = [sys.executable, "-m", "bench.linear", "--warm", "--only"]
        sys.exit(max(p.wait() for p in [subprocess.Popen([*command, str(i)]) for i in range(len(SHAPES))]))
    nodes.build()
    with lines_to(arguments.out) as write:
        write(
            "run",
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            command=" ".join(["python -m bench.linear", *sys.argv[1:]]),
        )
        for shape in shapes if "speed" in arguments.parts else ():
            with torch.cuda.stream(torch.cuda.Stream()):  # the default one cannot be captured, and backward goes there
                measure(write, shape)
        for shape in shapes[-2:] if "memory" in arguments.parts else ():
            peak_memory(write, shape)
        if "host" in arguments.parts:
            host_time(write)


if __name__ == "__main__":
    main()
