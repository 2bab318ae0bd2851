"""Where the host time of a training step goes: GPT-2 of bench/torch_models.py with torch's norms, cunorm's and others.

    python -m bench.step_profile [--part step roads compile] [--warm] [--out FILE]

`step` measures the model in eager mode, `roads` single norms and calls, `compile` the model under torch.compile, of
which `--warm` first fills inductor's cache, in processes side by side. Lines of JSON; times are medians of turns that
all contenders take on one machine.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from bench import norm_roads
from bench.norm_roads import ROADS, Road
from bench.results import lines_to
from bench.torch_models import DTYPES, alternate, build
from cunorm import launch
from cunorm.torch import replace_norms
from cunorm.torch.norm import functional, gpu, launching, modules, operators

MODEL, DTYPE = "gpt2", DTYPES["bfloat16"]
EPS = 1e-5
PARTS = ("zero_grad", "forward", "loss", "backward", "optimizer", "freed")
COMPILED = ("torch", "cunorm", "operators in a Function")
PROFILED = 3  # steps
CACHE = 8 << 20  # bytes: more than a core's own caches, less than what all share
Write = Callable[..., None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=("step", "roads", "compile"), default=["step", "roads", "compile"])
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--only", choices=COMPILED)
    parser.add_argument("--out", type=Path, default=Path("bench/results/torch/step_profile.jsonl"))
    arguments = parser.parse_args()
    if arguments.only:
        compiled_step(arguments.only)
        return
    if arguments.warm:
        command = [sys.executable, "-m", "bench.step_profile", "--only"]
        processes = [subprocess.Popen([*command, name]) for name in COMPILED]
        sys.exit(max(process.wait() for process in processes))
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cpu": processor()}
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), **versions, command=" ".join(sys.argv[1:]))
        if "roads" in arguments.part:
            roads(write)
        if "step" in arguments.part:  # ends with profiles, after which CUPTI may slow launches down
            eager(write)
        if "compile" in arguments.part:
            compiled(write, arguments.out.parent)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# A step.


class Step:
    """A training step that marks where its parts end."""

    def __init__(self, model, inputs, labels, around: Callable[[], AbstractContextManager[Any]] = nullcontext):
        self.model, self.inputs, self.labels, self.around = model, inputs, labels, around
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self, mark: Callable[[], None] = lambda: None) -> None:
        with self.around():
            mark()
            self.optimizer.zero_grad()
            mark()
            logits = self.model(**self.inputs).logits
            mark()
            loss = F.cross_entropy(logits.flatten(0, -2).float(), self.labels.flatten())
            mark()
            loss.backward()
            mark()
            self.optimizer.step()
            mark()
            del loss, logits
            mark()


def take(model: torch.nn.Module, road: Road) -> torch.nn.Module:
    """The model, its LayerNorms by that road."""

    class Norm(torch.nn.LayerNorm):
        def forward(self, input):
            return road(input, self.weight, self.bias, self.eps)

    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = Norm
    return model


def take_turns(write: Write, kind: str, steps: dict[str, Step], rounds: int = 10, inner: int = 4) -> None:
    """Host time by part, of a step with a queue that is empty; and time of a step when `inner` are waited for."""
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            found = defaultdict(list)
            for _ in range(inner):
                torch.cuda.synchronize()
                marks: list[float] = []
                step(lambda marks=marks: marks.append(time.perf_counter()))
                for part, (start, end) in zip(PARTS, itertools.pairwise(marks), strict=True):
                    found[part].append(end - start)
                found["host"].append(marks[-1] - marks[0])
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                step()
            torch.cuda.synchronize()
            found["wall"].append((time.perf_counter() - start) / inner)
            if turn:
                for part, values in found.items():
                    times[name][part] += values
    for name, of_parts in times.items():
        figures = {part: round(statistics.median(values) * 1e6, 1) for part, values in of_parts.items()}
        write(kind, contender=name, unit="us", **figures)


# In eager mode.


def eager(write: Write) -> None:
    model, inputs, labels = build(MODEL, DTYPE)

    def step(change: Callable[[Any], Any], around=nullcontext) -> Step:
        changed = copy.deepcopy(model)
        change(changed)
        return Step(changed, inputs, labels, around)

    steps = {
        "torch": step(lambda model: None),
        "cunorm": step(replace_norms),
    }
    started = time.perf_counter()
    for contender in steps.values():
        for _ in range(5):
            contender()
    torch.cuda.synchronize()
    write("warm-up", seconds=round(time.perf_counter() - started, 1))
    take_turns(write, "step", steps)
    for name in ("torch", "cunorm"):
        write("counts", contender=name, **counts(steps[name]))
    functions(write, steps["cunorm"])
    by_road = {name: step(lambda model, road=road: take(model, road)) for name, road in ROADS.items()}
    variants = {
        f"{name}, {what}": step(change, around)
        for name, change in (("torch", lambda model: None), ("cunorm", replace_norms))
        for what, around in (("no collector", without_collector), ("backward in the caller's thread", in_one_thread))
    }
    take_turns(write, "step by road", {**by_road, **variants})
    operators_of(write, steps["torch"], steps["cunorm"])
    for name, contender in steps.items():
        write("gpu", contender=name, unit="us", **gpu_work(contender))


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_one_thread() -> AbstractContextManager[Any]:
    return torch.autograd.set_multithreading_enabled(False)


def gpu_work(step: Step) -> dict[str, Any]:
    """Of a step: launches, time in which a kernel ran, by kernel."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.time_range.start):
        busy += max(0.0, event.time_range.end - max(event.time_range.start, end))
        end = max(end, event.time_range.end)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_kernel[event.name[:80]].append(event.time_range.end - event.time_range.start)
    kernels = {
        name: [round(len(values) / PROFILED, 1), round(sum(values) / PROFILED, 1)] for name, values in by_kernel.items()
    }
    most = dict(sorted(kernels.items(), key=lambda item: -item[1][1])[:12])
    of_norms = {name: figures for name, figures in kernels.items() if "norm" in name.lower() or "sum_partials" in name}
    count = round(len(events) / PROFILED, 1)
    return {"launches": count, "busy": round(busy / PROFILED, 1), "norms": of_norms, "most": most}


def counts(step: Step, steps: int = 20) -> dict[str, Any]:
    """Of a step: allocations, launches prepared, recipes made, threads of the backward pass, garbage collections."""
    prepare, backward = launch.prepare, launching.backward_by
    prepared, threads, started, collected = [], Counter(), [], []

    def counted_prepare(*arguments):
        prepared.append(threading.get_ident())
        return prepare(*arguments)

    def counted_backward(*arguments):
        threads[threading.get_ident() == threading.main_thread().ident] += 1
        return backward(*arguments)

    def collection(phase, _):
        (started if phase == "start" else collected).append(time.perf_counter())

    torch.cuda.synchronize()
    recipes, allocated = len(launching._recipes), torch.cuda.memory_stats()["allocation.all.allocated"]
    launch.prepare, launching.backward_by = counted_prepare, counted_backward
    gc.callbacks.append(collection)
    try:
        for _ in range(steps):
            step()
    finally:
        launch.prepare, launching.backward_by = prepare, backward
        gc.callbacks.remove(collection)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    collecting = sum(end - start for start, end in zip(started, collected, strict=True))
    return {
        "steps": steps,
        "allocations_a_step": allocated / steps,
        "prepared": len(prepared),
        "recipes": len(launching._recipes) - recipes,
        "backward_in_main_thread": threads[True],
        "backward_in_another": threads[False],
        "collections_a_step": len(collected) / steps,
        "collecting_us_a_step": round(collecting / steps * 1e6, 1),
    }


def functions(write: Write, step: Step) -> None:
    """Microseconds of a call of the adapter's functions within the model, what they call included."""
    watched = {
        "LayerNorm.forward": (modules.LayerNorm, "forward"),
        "norm": (modules, "norm"),
        "_apply": (functional, "_apply"),
        "_Norm.forward": (functional._Norm, "forward"),
        "launching.forward_by": (launching, "forward_by"),
        "launch.run": (launch, "run"),
        "_Norm.backward": (functional._Norm, "backward"),
        "launching.backward_by": (launching, "backward_by"),
    }
    for name, (owner, attribute) in watched.items():
        write("function", name=name, unit="us", **timed_calls(step, owner, attribute))


def timed_calls(step: Step, owner: Any, attribute: str, steps: int = 12) -> dict[str, Any]:
    """One function at a time: a clock within a clocked function would be counted."""
    original = owner.__dict__[attribute]
    function = original.__func__ if isinstance(original, staticmethod) else original
    times: list[float] = []

    def timed(*arguments, **options):
        start = time.perf_counter()
        result = function(*arguments, **options)
        times.append(time.perf_counter() - start)
        return result

    setattr(owner, attribute, staticmethod(timed) if isinstance(original, staticmethod) else timed)
    try:
        for _ in range(steps):
            torch.cuda.synchronize()
            step()
    finally:
        setattr(owner, attribute, original)
    calls = len(times) // steps
    values = sorted(value * 1e6 for value in times[calls:])
    p10, median, p90 = (round(values[int(len(values) * part)], 2) for part in (0.1, 0.5, 0.9))
    in_order = [round(statistics.median(times[calls + index :: calls]) * 1e6, 1) for index in range(calls)]
    return {"calls_a_step": len(times) / steps, "p10": p10, "median": median, "p90": p90, "in_order": in_order}


def operators_of(write: Write, before: Step, after: Step, most: int = 24) -> None:
    """CPU time of a step by operator, its own, and how often it is called. The profiler's own time is in it."""
    found = [host_by_operator(before), host_by_operator(after)]
    nothing = (0.0, 0.0, 0.0)
    names = sorted(
        {*found[0], *found[1]},
        key=lambda name: -abs(found[1].get(name, nothing)[1] - found[0].get(name, nothing)[1]),
    )
    totals = [round(sum(figures[1] for figures in by_name.values()), 1) for by_name in found]
    write("operators", unit="us", torch=totals[0], cunorm=totals[1])
    for name in names[:most]:
        figures = {
            who: dict(zip(("calls", "own", "all"), by_name.get(name, nothing), strict=True))
            for who, by_name in zip(("torch", "cunorm"), found, strict=True)
        }
        write("operator", name=name[:100], unit="us", **figures)


def host_by_operator(step: Step) -> dict[str, tuple[float, float, float]]:
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            step()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in profiled.key_averages():
        name = next((name for name in ("CompiledFxGraph", "Torch-Compiled Region") if name in event.key), event.key)
        for index, value in enumerate((event.count, event.self_cpu_time_total, event.cpu_time_total)):
            found[name][index] += value / PROFILED
    return {name: tuple(round(value, 1) for value in figures) for name, figures in found.items()}


# Single norms and calls.


def roads(write: Write, rows: int = 4096, cols: int = 768) -> None:
    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=DTYPE, requires_grad=True)

    x, weight, bias = leaves = leaf(rows, cols), leaf(cols), leaf(cols)
    dy = torch.randn_like(x)

    def chain(road: Road, count: int) -> Callable[[], None]:
        """`count` norms in a row and their backward pass; each but the first adds what one in a model costs."""

        def call() -> None:
            for tensor in leaves:
                tensor.grad = None
            y = x
            for _ in range(count):
                y = road(y, weight, bias, EPS)
            y.backward(dy)

        return call

    some = {name: road for name, road in ROADS.items() if name != "none"}
    in_thread = {name: road for name, road in some.items() if name in ("torch", "Function", "cunorm")}
    for count in (1, 10):
        calls = {name: (chain(road, count), count) for name, road in some.items()}
        write("road", norms=count, unit="us", **alternate(calls, rounds=24, inner=10))
    with in_one_thread():
        calls = {name: (chain(road, 10), 10) for name, road in in_thread.items()}
        write("road", norms=10, thread="the caller's", unit="us", **alternate(calls, rounds=24, inner=10))
    view = {"a view": (chain(lambda x, *_: x.view_as(x), 10), 10)}
    write("road", norms=10, unit="us", **alternate(view, rounds=24, inner=10))
    with torch.no_grad():
        calls = single_calls(x.detach(), weight, bias, dy)
        warm = alternate({name: (call, 1) for name, call in calls.items()}, rounds=24, inner=20)
        for name, call in calls.items():
            write("call", name=name, unit="us", in_a_row=warm[name], alone=alone(call))


def alone(call: Callable[[], Any], repeats: int = 40) -> float:
    """Microseconds of a call that finds none of its code and data in the core's own caches."""
    others = numpy.ones(CACHE // 8)
    times = []
    torch.cuda.synchronize()
    for _ in range(repeats):
        others.sum()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 2)


def single_calls(x, weight, bias, dy) -> dict[str, Callable[[], Any]]:
    """Calls without autograd, each nearer to the driver than the one before it."""
    launched = ("layer_norm", x, weight.shape, weight, bias, EPS, x.dtype, 0, True)
    y, both, family = launching.forward(*launched)
    forward = (x, weight, bias, "layer_norm", 1, EPS, x.dtype, True, 0, 0)
    backward = (dy, x, both, weight, "layer_norm", EPS, [True, True, True], 0, True)
    mask, shape = (True, True, True), weight.shape
    gradients = norm_roads.like(x), norm_roads.like_row(x), norm_roads.like_row(x)
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, EPS)
    index = x.get_device()
    plan = norm_roads.plan_of("forward", x)
    (write, start, _), *_ = launch.prepared(plan, index).launches
    stream = gpu.stream(index)
    words = (*(t.data_ptr() for t in (x, weight, bias, y, both, both)), EPS)

    def below_autograd(operator: Callable, arguments: tuple) -> Callable[[], Any]:
        def call():
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)

        return call

    torch_backward = torch.ops.aten.native_layer_norm_backward.default
    return {
        "forward: torch.native_layer_norm": lambda: torch.native_layer_norm(x, shape, weight, bias, EPS),
        "forward: operator": lambda: operators.norm_forward(*forward),
        "forward: operator, below autograd": below_autograd(operators.norm_forward, forward),
        "forward: its function": lambda: operators._forward_cuda(*forward),
        "forward: launching.forward": lambda: launching.forward(*launched),
        "forward: planned": lambda: norm_roads.run_forward(x, weight, bias, EPS, y, both),
        "forward: arguments written, cuLaunchKernel": lambda: (write(*words), start(stream)),
        "forward: cuLaunchKernel": lambda: start(stream),
        "y and statistics allocated": lambda: (norm_roads.like(x), norm_roads.like_statistics(x)),
        "y allocated": lambda: norm_roads.like(x),
        "backward: torch's operator": lambda: torch_backward(dy, x, shape, mean, rstd, weight, bias, list(mask)),
        "backward: operator": lambda: operators.norm_backward(*backward),
        "backward: operator, below autograd": below_autograd(operators.norm_backward, backward),
        "backward: its function": lambda: operators._backward_cuda(*backward),
        "backward: launching.backward": lambda: launching.backward(family, dy, x, both, weight, mask, 0),
        "backward: planned": lambda: norm_roads.run_backward(dy, x, both, weight, *gradients),
    }


# Under torch.compile.


def compiled_step(name: str) -> Step:
    model, inputs, labels = build(MODEL, DTYPE)
    if name == "cunorm":
        replace_norms(model)
    elif name != "torch":
        take(model, ROADS[name])
    step = Step(model, inputs, labels)
    step.model = torch.compile(model)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def compiled(write: Write, folder: Path) -> None:
    """The code that inductor made is left in the folder."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    steps = {}
    for name in COMPILED:
        counters.clear()
        started = time.perf_counter()
        steps[name], texts = run_and_get_code(compiled_step, name)
        seconds = round(time.perf_counter() - started, 1)
        breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
        write("compiled", contender=name, seconds=seconds, graph_breaks=breaks, graphs=graphs)
        for number, text in enumerate(texts):
            (folder / f"{name.replace(' ', '_')}-{number}.py").write_text(text)
            lines = [line for line in text[text.rfind("def call(") :].splitlines() if not line.lstrip().startswith("#")]
            called = ("triton_", ".run(", "clone", "= torch.ops.cunorm", "= torch.ops.aten", "extern_kernels.")
            in_code = {what: sum(what in line for line in lines) for what in called}
            write("code", contender=name, program=number, **in_code)
    take_turns(write, "compiled step", steps)
    for name, step in steps.items():
        write("compiled gpu", contender=name, unit="us", **gpu_work(step))
    operators_of(write, steps["torch"], steps["cunorm"])


if __name__ == "__main__":
    main()
