"""Time steps of models of transformers and diffusers, with torch's norms and after `accelerate`.

    python -m bench.accelerated [--models gpt2 llama ...] [--layers 12] [--modes host eager graphs ...]
                                [--cases training autocast forward ...] [--ready-within SECONDS] [--out FILE]

Each model, mode and case has a process. Those of eager mode and of CUDA graphs, which replay both passes without the
optimizer, get ready side by side, then those of the compiled modes, and when all are ready they are measured one after
the other. In a process, copies of the model with random weights take turns, in bfloat16. Each process writes a line of
JSON with
- the median milliseconds of a step until the GPU is done and until the host is, and over torch's in the same turn;
- torch's last step of a turn over the one before it;
- the losses of the first and third step;
- the peak of the second step's memory beyond what was held before, and what a contender holds after three (CUDA graphs
  have one pool in a process, which the first contender pays for);
- the seconds of the first step, which compiles beside the other processes, in mode compile without any cache;
- how many calls of norms cunorm ran and torch ran, by the report of `accelerate`.

In eager mode Liger is measured too where it is installed and knows the model: only its norms, and with its gated
product. Its rotary embedding is left out, because it would be patched for every model of the process.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

import cunorm.torch
from bench.results import lines_to
from bench.side_by_side import in_turns
from bench.torch_models import BATCH, SEQUENCE, alternate, build, loss_of, make_step
from cunorm.torch import Acceleration, accelerate, replace_norms

NAMES = ("gpt2", "bert", "vit", "llama", "qwen3", "gemma3", "whisper", "dit")
CONTENDERS = {
    "eager": ("torch", "replace_norms", "accelerate"),
    "graphs": ("torch", "accelerate"),
    "compile": ("torch", "accelerate"),
    "reduce-overhead": ("torch", "accelerate"),
}
COMPILED = {"compile", "reduce-overhead"}
# Liger's names of the models that it knows.
OF_LIGER = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
LIGER = {
    "Liger, norms": {"rope": False, "fused_linear_cross_entropy": False, "swiglu": False, "geglu": False},
    "Liger": {"rope": False, "fused_linear_cross_entropy": False},
}
# Turns have few steps, so that whatever slows the host slows all contenders alike. The first turns do not count, nor
# does the first step of a turn, which finds dynamo's guards, caches and the GPU's L2 as another copy left them.
ROUNDS, WARM, STEPS = 14, 2, 3
Step = Callable[[], torch.Tensor]


class Case(NamedTuple):
    """Size and kind of a step. Parameters in float32 are used under autocast to bfloat16."""

    batch: int = BATCH
    sequence: int = SEQUENCE
    trains: bool = True
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "training": Case(),
    "autocast": Case(dtype=torch.float32),
    "forward": Case(trains=False),
    "1 x 2048": Case(1, 2048),
    "32 x 128": Case(32, 128),
    "1 x 1": Case(1, 1, trains=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--modes", nargs="+", choices=("host", *CONTENDERS), default=("host", "eager"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=("training",))
    parser.add_argument("--ready-within", type=float, default=600, help="seconds for each kind of mode")
    parser.add_argument("--out", type=Path, default=Path("bench/results/torch/accelerated.jsonl"))
    arguments = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each of the processes would take all cores
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
        if "host" in arguments.modes:
            host(write)
        for modes in (CONTENDERS.keys() - COMPILED, COMPILED):
            wanted = (mode for mode in arguments.modes if mode in modes)
            jobs = [(*job, arguments.layers) for job in product(wanted, arguments.cases, arguments.models)]
            for (mode, case, name, layers), figures in in_turns(prepared, jobs, arguments.ready_within):
                write("step", model=name, layers=layers, mode=mode, case=case, **figures)


def host(write: Callable[..., None]) -> None:
    """Write the host's microseconds for a sum and its norm, both passes, as one of ten that follow one another."""
    for op in ("layer_norm", "rms_norm"):
        x, dy = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16).unbind()
        norm = (nn.LayerNorm if op == "layer_norm" else nn.RMSNorm)(1024, device="cuda", dtype=torch.bfloat16)
        add = getattr(cunorm.torch, f"add_{op}")
        norms = {"torch": norm, "replaced": copy.deepcopy(norm)}
        replace_norms(norms["replaced"])
        pairs: dict[str, Callable[..., Any]] = {who: partial(apart, module) for who, module in norms.items()}
        pairs["function"] = lambda x, s, norm=norm, add=add: add(x, s, *norm.parameters())
        x.requires_grad_()

        def chain(pair, x=x, dy=dy):
            y = s = x
            for _ in range(10):
                y, s = pair(y, s)
            y.backward(dy)

        calls = {who: (partial(chain, pair), 10) for who, pair in pairs.items()}
        write("host", op=op, what="sum and norm of ten in a row, each", unit="us", **alternate(calls, 40, 10))


def apart(norm: nn.Module, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + s
    return norm(s), s


def prepared(mode: str, case_name: str, name: str, layers: int) -> Callable[[], dict[str, Any]]:
    """Let copies of a model do three steps each, and return what measures them in turns."""
    began = time.perf_counter()
    case = CASES[case_name]
    original, inputs, labels = build(name, case.dtype, layers, case.batch, case.sequence)
    contenders = CONTENDERS[mode]
    if mode == "eager" and name in OF_LIGER and find_spec("liger_kernel"):
        contenders += tuple(LIGER)
    compiles = mode in COMPILED
    if compiles:  # imports the compiler before a contender's time is taken
        torch.compile(nn.Linear(8, 8, device="cuda"))(torch.ones(8, 8, device="cuda")).sum().backward()
    steps, took, peak, held, losses, reports = {}, {}, {}, {}, {}, {}
    # The second to compile finds things that the first left, so each contender is first for half of the models.
    for who in contenders[::-1] if compiles and NAMES.index(name) % 2 else contenders:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model = copy.deepcopy(original)
        if who in LIGER:
            by_liger(model, name, LIGER[who])
        elif who != "torch":
            reports[who] = (replace_norms if who == "replace_norms" else accelerate)(model)
        run = torch.compile(model, mode=None if mode == "compile" else mode) if compiles else model
        step = replayed(run, inputs, labels) if mode == "graphs" else step_of(run, inputs, labels, case)
        with fresh_cache() if mode == "compile" else nullcontext():
            start = time.perf_counter()
            losses[who] = [float(step())]
            took[who] = round(time.perf_counter() - start, 2)
            peak[who] = peak_of(step)
            losses[who].append(float(step()))
        steps[who] = step
        model.zero_grad()
        torch.cuda.empty_cache()
        held[who] = torch.cuda.memory_reserved() - before
    ready = round(time.perf_counter() - began, 1)

    def measured() -> dict[str, Any]:
        gc.collect()
        gc.freeze()  # or a garbage collection, of all that transformers made, would take longer than a step
        done, host = times_of({who: steps[who] for who in contenders})
        itself = {"one": done["torch"][0::2], "next": done["torch"][1::2]}
        return {
            "ms": medians(done),
            "of_torch": of_first(done),
            "torch_of_itself": of_first(itself)["next"],
            "host_ms": medians(host),
            "losses": losses,
            "peak_bytes": peak,
            "held_bytes": held,
            "first_step_s": took,
            "ready_after_s": ready,
            "by_cunorm_and_torch": ran(reports),
        }

    return measured


def ran(reports: dict[str, Any]) -> dict[str, list[int]]:
    """Return how often the norms that have a choice ran our kernel, and how often torch's."""
    counts = {who: report.ran().values() for who, report in reports.items() if isinstance(report, Acceleration)}
    return {
        who: [sum(norm.by_cunorm for norm in norms), sum(norm.by_torch for norm in norms)]
        for who, norms in counts.items()
    }


def by_liger(model: nn.Module, name: str, parts: dict[str, bool]) -> None:
    from liger_kernel import transformers

    patch = getattr(transformers, f"apply_liger_kernel_to_{OF_LIGER[name]}")
    known = inspect.signature(patch).parameters
    # The patch also replaces the module's classes, from which the next model would be built.
    classes = vars(sys.modules[type(model).__module__])
    before = dict(classes)
    patch(model=model, **{part: wanted for part, wanted in parts.items() if part in known})
    classes.update(before)


def step_of(model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor, case: Case) -> Step:
    train = make_step(model, inputs, labels) if case.trains else None

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.dtype is torch.float32):
            if train is not None:
                return train()
            with torch.no_grad():
                return loss_of(model, inputs, labels)[0]

    return step


def replayed(model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Step:
    """Return a step that replays both passes of a model, in a CUDA graph, without the optimizer."""

    def passes() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, inputs, labels)[0]
        loss.backward()
        return loss.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # what is done once must not be captured
        for _ in range(3):
            passes()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        loss = passes()

    def step(_: Any = passes) -> torch.Tensor:  # which holds the model, whose memory the graph uses
        graph.replay()
        return loss

    return step


def peak_of(step: Step) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_of(steps: dict[str, Step]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the milliseconds of the steps that count, until the GPU is done and until the host is."""
    done: dict[str, list[float]] = {who: [] for who in steps}
    host: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(ROUNDS):
        for who, step in list(steps.items())[:: -1 if turn % 2 else 1]:
            for place in range(STEPS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                until_host = time.perf_counter() - start
                torch.cuda.synchronize()
                if turn >= WARM and place:
                    host[who].append(until_host * 1e3)
                    done[who].append((time.perf_counter() - start) * 1e3)
    return done, host


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {who: round(statistics.median(values), 3) for who, values in times.items()}


def of_first(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each contender's time over the first contender's in the same turn."""
    first, *others = times
    pairs = {who: zip(times[who], times[first], strict=True) for who in others}
    return {who: round(statistics.median(own / base for own, base in pairs[who]), 4) for who in others}


if __name__ == "__main__":
    main()
