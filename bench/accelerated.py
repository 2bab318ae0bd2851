"""Steps of models of transformers and diffusers, with torch's norms and after `accelerate`.

    python -m bench.accelerated [--models gpt2 llama ...] [--layers 12] [--modes eager compile ...]
                                [--cases training autocast forward ...] [--out FILE]

Copies of a model with random weights take turns in one run on one machine, in bfloat16. A line of JSON is a model, a
mode and a case: the median milliseconds of a step until the GPU is done and until the host is, the losses of its first
and last step, the peak of its memory beyond what it held before, and what `accelerate` says that ran.

In eager mode Liger is beside them where it is installed and knows the model: its norms alone, and its gated product
too. What it patches for every model of a process, its rotary embedding, is left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import cunorm.torch
from bench.results import lines_to
from bench.torch_models import BATCH, SEQUENCE, alternate, build, loss_of, make_step
from cunorm.torch import Acceleration, accelerate, replace_norms
from cunorm.torch.models.joins import sum_then_norm

NAMES = ("gpt2", "bert", "vit", "llama", "qwen3", "gemma3", "whisper", "dit")
CONTENDERS = {
    "eager": ("torch", "replace_norms", "accelerate", "accelerate, of any size"),
    "compile": ("torch", "accelerate", "accelerate, of any size"),
    "reduce-overhead": ("torch", "accelerate", "accelerate, of any size"),
}
# Attributes of norms and blocks by which `accelerate` chooses, in elements.
CHOSEN = ("_own_below", "_joined_from", "_compiled_from")
# What Liger calls a model that it knows.
OF_LIGER = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
LIGER = {
    "Liger, norms": {"rope": False, "fused_linear_cross_entropy": False, "swiglu": False, "geglu": False},
    "Liger": {"rope": False, "fused_linear_cross_entropy": False},
}
ROUNDS, WARM = 28, 3  # turns of one step each, so that what slows the host meets all alike; the first are left out
Step = Callable[[], torch.Tensor]


class Case(NamedTuple):
    """What a step computes. Parameters of float32 are used under autocast to bfloat16."""

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
    parser.add_argument("--modes", nargs="+", choices=tuple(CONTENDERS), default=("eager",))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=("training",))
    parser.add_argument("--out", type=Path, default=Path("bench/results/torch/accelerated.jsonl"))
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
        host(write)
        for mode, case, name in product(arguments.modes, arguments.cases, arguments.models):
            started = time.perf_counter()
            figures = measured(name, arguments.layers, mode, CASES[case])
            took = round(time.perf_counter() - started, 1)
            write("step", model=name, layers=arguments.layers, mode=mode, case=case, **figures, took=took)
            torch.cuda.empty_cache()


def host(write: Callable[..., None]) -> None:
    """Microseconds of the host for a sum and the norm of it, both read on, forward and backward: of ten in a row."""
    for op in ("layer_norm", "rms_norm"):
        x, dy = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16).unbind()
        norm = (nn.LayerNorm if op == "layer_norm" else nn.RMSNorm)(1024, device="cuda", dtype=torch.bfloat16)
        add = getattr(cunorm.torch, f"add_{op}")
        norms = {"torch": norm, "replaced": copy.deepcopy(norm)}
        replace_norms(norms["replaced"])
        joins: dict[str, Callable[..., Any]] = {who: partial(apart, one) for who, one in norms.items()}
        joins["function"] = lambda x, s, norm=norm, add=add: add(x, s, (1024,), *norm.parameters())
        joins["joined"] = partial(sum_then_norm, norms["replaced"])
        x.requires_grad_()

        def chain(join, x=x, dy=dy):
            y = s = x
            for _ in range(10):
                y, s = join(y, s)
            y.backward(dy)

        calls = {who: (partial(chain, join), 10) for who, join in joins.items()}
        write("host", op=op, what="sum and norm of ten in a row, each", unit="us", **alternate(calls, 40, 10))


def apart(norm: nn.Module, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + s
    return norm(s), s


def measured(name: str, layers: int, mode: str, case: Case) -> dict[str, Any]:
    """By contender."""
    steps, first, peak, ran = {}, {}, {}, {}
    original, inputs, labels = build(name, case.dtype, layers, case.batch, case.sequence)
    contenders = CONTENDERS[mode]
    if mode == "eager" and name in OF_LIGER and find_spec("liger_kernel"):
        contenders += tuple(LIGER)
    for who in contenders:
        model = copy.deepcopy(original)
        report = None
        if who in LIGER:
            by_liger(model, name, LIGER[who])
        elif who != "torch":
            report = (replace_norms if who == "replace_norms" else accelerate)(model)
        for module in model.modules():
            if who == "accelerate, of any size":
                vars(module).update({name: 1 for name in CHOSEN if name in vars(module)})
        if mode != "eager":
            model = torch.compile(model, mode=None if mode == "compile" else mode)
        steps[who] = step_of(model, inputs, labels, case)
        first[who] = float(steps[who]())
        steps[who]()
        peak[who] = peak_of(steps[who])
        if isinstance(report, Acceleration):
            counts = report.ran().values()
            ran[who] = [sum(one.together for one in counts), sum(sum(one.apart.values()) for one in counts)]
    gc.collect()
    gc.freeze()  # a collection of all that transformers made takes longer than a step
    done, host = times_of(steps)
    losses = {who: [first[who], float(step())] for who, step in steps.items()}
    figures = {
        "ms": medians(done),
        "of_torch": of_first(done),
        "host_ms": medians(host),
        "first_and_last_loss": losses,
        "peak_bytes": peak,
        "together_and_apart": ran,
    }
    itself, _ = times_of({"once": steps["torch"], "again": steps["torch"]})
    gc.unfreeze()
    return figures | {"torch_of_itself": of_first(itself)["again"]}


def by_liger(model: nn.Module, name: str, parts: dict[str, bool]) -> None:
    from liger_kernel import transformers

    patch = getattr(transformers, f"apply_liger_kernel_to_{OF_LIGER[name]}")
    known = inspect.signature(patch).parameters
    # It replaces the module's classes too, of which the next model would be built.
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


def peak_of(step: Step) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_of(steps: dict[str, Step]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of each turn, until the GPU is done and until the host is."""
    done: dict[str, list[float]] = {who: [] for who in steps}
    host: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(ROUNDS):
        for who, step in list(steps.items())[:: -1 if turn % 2 else 1]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            until_host = time.perf_counter() - start
            torch.cuda.synchronize()
            if turn >= WARM:
                host[who].append(until_host * 1e3)
                done[who].append((time.perf_counter() - start) * 1e3)
    return done, host


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {who: round(statistics.median(values), 3) for who, values in times.items()}


def of_first(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians of what a turn takes of the first contender's turn beside it."""
    first, *others = times
    pairs = {who: zip(times[who], times[first], strict=True) for who in others}
    return {who: round(statistics.median(one / base for one, base in pairs[who]), 4) for who in others}


if __name__ == "__main__":
    main()
